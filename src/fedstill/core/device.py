"""Where tensors live.

Inside `on(device)` whatever is made is made on that device: tensors without a `device` of their own, networks, what is
read from bytes, samples that are gathered. On the CPU none of this is active.

Random numbers are drawn on the CPU and moved, so that a seed gives the same ones on every device. Layers that draw for
themselves (dropout) use the device's own stream instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedstill.core.errors import SettingError

CPU = torch.device("cpu")
_current: ContextVar[torch.device] = ContextVar("device", default=CPU)


def check(name: str) -> None:
    """Refuse what is no name of a device."""
    if name.startswith("mps"):
        raise SettingError(f"device = {name!r}: it has no float64, in which sums over clients are kept; use cpu")
    if not re.fullmatch(r"cpu|auto|cuda(:\d+)?", name):
        raise SettingError(f"device = {name!r}: it is cpu, cuda, cuda:1 and so on, or auto")


def find(name: str) -> torch.device:
    """The device of that name, if this machine has it; `auto` is a GPU if there is one.

    >>> find("cpu")
    device(type='cpu')
    """
    check(name)
    count = 0 if name == "cpu" else torch.cuda.device_count()  # which, unlike other questions, leaves forks possible
    if name == "cpu" or (name == "auto" and not count):
        return CPU
    index = int(name.partition(":")[2] or 0)
    if index >= count:
        built = "" if torch.version.cuda or torch.version.hip else "; this PyTorch is built for the CPU alone"
        raise SettingError(f"device = {name!r}: PyTorch sees {count or 'no'} GPUs here{built}; use cpu, or auto")
    return torch.device("cuda", index)


def current() -> torch.device:
    """The device on which things are made now."""
    return _current.get()


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Make everything on this device."""
    if device == current():
        yield
        return
    token = _current.set(device)
    try:
        with device, _Draws():
            yield
    finally:
        _current.reset(token)


def to_current_device(tensor: Tensor) -> Tensor:
    """The tensor on the device on which things are made now; itself if it is there."""
    return tensor.to(current())


class _Draws(TorchFunctionMode):
    """What is drawn from a generator of the CPU's is drawn there, and moved."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        generator = kwargs.get("generator")
        if not isinstance(generator, torch.Generator) or generator.device != CPU or current() == CPU:
            return func(*args, **kwargs)
        device, out = torch.device(kwargs.pop("device", None) or current()), kwargs.pop("out", None)
        with on(CPU):
            drawn = func(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})
        if func.__name__.endswith("_"):  # such as exponential_, and nn.init's, which name their tensor
            out = args[0] if args else kwargs["tensor"]
        with torch.no_grad():
            return drawn.to(device) if out is None else out.copy_(drawn)


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def seed_layers(seed: int) -> None:
    """Seed the stream of layers that draw for themselves, and of code that asks for no stream of its own."""
    torch.default_generator.manual_seed(seed)
    if current() != CPU:
        torch.cuda.manual_seed_all(seed)


def isolated_rng() -> AbstractContextManager[None]:
    """PyTorch's global streams are afterwards what they were before."""
    fork: AbstractContextManager[None] = torch.random.fork_rng(devices=[] if current() == CPU else [current()])
    return fork
