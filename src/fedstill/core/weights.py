"""A network whose weights are one vector.

Loading, sending, averaging and comparing networks are then single operations on a flat tensor, whatever the
network. Trainable parameters come first, in the order of `named_parameters`, then buffers. Convolutions lie in
channels-last order, which is what the fast CPU kernels want; `unflatten` gives ordinary shapes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fedstill.core.errors import SettingError
from fedstill.core.kernels import protect


@dataclass(frozen=True)
class Entry:
    """Where one tensor of the network lies in the vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    trainable: bool

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)

    def view(self, vector: Tensor) -> Tensor:
        """This tensor as a view of the vector."""
        return self.shaped(vector[self.start : self.stop])

    def shaped(self, part: Tensor) -> Tensor:
        """This tensor, given its numbers alone; of a matrix with a row for each network, all of them."""
        many = part.shape[:-1]
        if len(self.shape) == 4:
            out, inner, height, width = self.shape
            return part.view((*many, out, height, width, inner)).movedim(-1, -3)
        return part.view((*many, *self.shape))


class FlatNet:
    """A network bound to a vector, its own or one that is given: its parameters and float buffers are views of it.

    >>> net = FlatNet(nn.Linear(2, 1))
    >>> _ = net.vector.fill_(1.0)
    >>> net.module(torch.ones(1, 2)).item()
    3.0
    """

    def __init__(self, module: nn.Module, vector: Tensor | None = None) -> None:
        protect(module)
        self.module = module
        self.params = [p for p in module.parameters() if p.requires_grad]
        if not self.params:
            raise SettingError(f"{type(module).__name__} has no trainable parameters")
        dtypes = {p.dtype for p in self.params}
        if len(dtypes) > 1 or not self.params[0].is_floating_point():
            raise SettingError(f"all trainable parameters must have one floating dtype, got {dtypes}")
        self.entries: list[Entry] = []
        self.counters: list[tuple[Entry, Tensor]] = []  # integer buffers: copied, since they cannot be views
        named: list[tuple[str, Tensor, bool]] = [(n, p, True) for n, p in module.named_parameters() if p.requires_grad]
        named += [(n, b, False) for n, b in module.named_buffers() if b.numel() and not _is_constant(module, n)]
        start = 0
        for name, tensor, trainable in named:
            self.entries.append(Entry(name, tuple(tensor.shape), start, trainable))
            start = self.entries[-1].stop
        self.trainable = sum(p.numel() for p in self.params)
        like = self.params[0]
        self.vector = torch.empty(start, dtype=like.dtype, device=like.device) if vector is None else vector
        with torch.no_grad():
            for entry, (_, tensor, _trainable) in zip(self.entries, named, strict=True):
                view = entry.view(self.vector)
                view.copy_(tensor)
                if tensor.dtype == self.vector.dtype:
                    tensor.data = view
                else:
                    self.counters.append((entry, tensor))

    def to(self, device: torch.device) -> FlatNet:
        """The network on this device; itself if it is there, else this one is of no further use."""
        if self.vector.device == device:
            return self
        for layer in self.module.modules():
            for name, p in layer.named_parameters(recurse=False):
                if not p.requires_grad:
                    layer.register_parameter(name, _frozen(p, device))
        return FlatNet(self.module.to(device))

    @property
    def size(self) -> int:
        """Length of the vector."""
        return len(self.vector)

    @torch.no_grad()
    def load(self, vector: Tensor) -> None:
        """Take these weights."""
        self.vector.copy_(vector)
        for entry, buffer in self.counters:
            buffer.copy_(entry.view(self.vector))

    @torch.no_grad()
    def read(self) -> Tensor:
        """A copy of the weights as they are now."""
        for entry, buffer in self.counters:
            entry.view(self.vector).copy_(buffer)
        return self.vector.clone()

    def split(self, vector: Tensor) -> list[Tensor]:
        """Views of a vector of trainable weights (or longer) shaped as `params`."""
        return [e.view(vector) for e in self.entries if e.trainable]

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """The vector as named tensors of ordinary shape and layout."""
        return {e.name: e.view(vector).contiguous() for e in self.entries}


_FROZEN = WeakTensorKeyDictionary()


def _frozen(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A frozen parameter on a device: one there for all networks that share it here, which keep what they have."""
    copies: dict[torch.device, nn.Parameter] = _FROZEN.setdefault(parameter, {})
    if device not in copies:
        copies[device] = nn.Parameter(parameter.detach().to(device), requires_grad=False)
    return copies[device]


def _is_constant(module: nn.Module, name: str) -> bool:
    """Whether a buffer is not part of the state (`persistent=False`), hence the same everywhere."""
    owner, _, leaf = name.rpartition(".")
    return leaf in module.get_submodule(owner)._non_persistent_buffers_set
