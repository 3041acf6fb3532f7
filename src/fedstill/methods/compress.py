"""Compressed messages, for any method whose clients send models.

Error feedback (what compression lost is added to the next update) is of Seide et al., 2014, here as in Stich et al.,
2018; top-k of the latter. The server's own model is never rounded: it adds the updates to what it had before it
compressed, so that what the downlink loses does not add up over the rounds either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor

from fedstill.core.errors import SettingError
from fedstill.core.tree import Message
from fedstill.methods.base import Part, Server, Uplink, Wire
from fedstill.methods.modifier import Modifier
from fedstill.train.client import Client
from fedstill.train.task import Task

BLOCK = 256  # numbers that share a scale
_LARGEST = 1e30  # of what a client sends: what is finite on the wire stays finite when it is added up
_RESIDUAL = "residual"

Scheme = Literal["none", "bfloat16", "int8", "topk"]


def packed(vector: Tensor, scheme: Scheme, share: float) -> Message:
    """A vector as the tensors that are sent for it.

    >>> {name: part.tolist() for name, part in packed(torch.tensor([0.5, -2.0, 1.0]), "topk", 0.5).items()}
    {'indices': [1, 2], 'values': [-2.0, 1.0]}
    """
    if scheme == "bfloat16":
        return {"bfloat16": vector.bfloat16()}
    if scheme == "int8":
        blocks = torch.nn.functional.pad(vector, (0, -len(vector) % BLOCK)).view(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True) / 127
        steps = torch.where(scale > 0, blocks / scale, 0.0).round().clamp(-127, 127)
        return {"int8": steps.to(torch.int8).flatten()[: len(vector)], "scale": scale.flatten()}
    order = vector.abs().sort(descending=True, stable=True).indices  # of equal ones the first, on every machine
    indices = order[: _kept(len(vector), share)].sort().values
    return {"indices": indices.to(torch.int32), "values": vector[indices]}


def unpacked(parts: Message, size: int, dtype: torch.dtype) -> Tensor:
    """The vector that the receiver makes of them."""
    if "bfloat16" in parts:
        return parts["bfloat16"].to(dtype)
    if "int8" in parts:
        return parts["int8"].to(dtype) * parts["scale"].repeat_interleave(BLOCK)[:size]
    vector = torch.zeros(size, dtype=dtype, device=parts["values"].device)
    vector[parts["indices"].long()] = parts["values"]
    return vector


def _kept(size: int, share: float) -> int:
    return max(1, math.ceil(share * size))


def _packed_parts(part: Part, scheme: Scheme, share: float, size: int) -> dict[str, Part]:
    """What `packed` makes of the first `size` numbers of a part."""

    def like(shape: int, dtype: torch.dtype, least: float, most: float, what: str) -> Part:
        return replace(part, shape=(shape,), dtype=dtype, least=least, most=most, what=f"{part.what}, {what}")

    if scheme == "bfloat16":
        return {"bfloat16": like(size, torch.bfloat16, -_LARGEST, _LARGEST, "in bfloat16")}
    if scheme == "int8":
        scale = like(-(-size // BLOCK), part.dtype, 0, _LARGEST, f"the unit of each {BLOCK}")
        return {"int8": like(size, torch.int8, -127, 127, "in 8 bits"), "scale": scale}
    kept = _kept(size, share)
    where = like(kept, torch.int32, 0, size - 1, "where it is largest")
    return {"indices": where, "values": like(kept, part.dtype, -_LARGEST, _LARGEST, "how much it is there")}


@dataclass(frozen=True)
class Compress(Modifier):
    """Send models in fewer bytes: updates up, whole models down; of BatchNorm's statistics, all as they are."""

    name: ClassVar[str] = "compress"
    paper: ClassVar[str] = "Stich et al. 2018"
    client_keys: ClassVar[tuple[str, ...]] = (_RESIDUAL,)
    outermost: ClassVar[bool] = True

    up: Annotated[Scheme, "clients' updates: int8 or topk with error feedback, bfloat16 without, or none"] = "int8"
    down: Annotated[Literal["none", "bfloat16", "int8"], "models that the server sends"] = "bfloat16"
    share: Annotated[float, Gt(0), Le(1), "of topk: the share of the weights whose change is sent"] = 0.05

    def check(self, task: Task) -> None:
        super().check(task)
        wire = self.inner.wire(task)
        if "model" not in wire.up or "model" not in wire.down:
            name = "+".join(part.name for part in self.inner.parts())
            raise SettingError(f"compress makes clients' models smaller, and {name} does not send them; leave it out")

    def wire(self, task: Task) -> Wire:
        inner = self.inner.wire(task)
        up, down = dict(inner.up), dict[str, Part]()
        if self.up != "none" and "model" in up:
            update = replace(up.pop("model"), what="change of the weights")
            up |= self._parts(update, self.up, task, "update")
        for name, part in inner.down.items():
            whole = self.down != "none" and _is_model(part, task)
            down |= self._parts(part, self.down, task, name) if whole else {name: part}
        return replace(inner, up=up, down=down)

    def _parts(self, part: Part, scheme: Scheme, task: Task, name: str) -> dict[str, Part]:
        parts = _packed_parts(part, scheme, self.share, task.trainable)
        if statistics := task.size - task.trainable:
            parts["rest"] = replace(part, shape=(statistics,), what="BatchNorm's statistics")
        return {f"{name}.{suffix}": each for suffix, each in parts.items()}

    def downlink(self, server: Server) -> Message:
        server.sent = self.inner.downlink(server)
        if self.down == "none":
            return server.sent
        declared, message = self.inner.wire(server.task).down, Message()
        for name, vector in server.sent.items():
            if _is_model(declared[name], server.task):
                message |= _split(name, vector, packed(vector[: server.task.trainable], self.down, 1), server.task)
            else:
                message[name] = vector
        return message

    def receive(self, client: Client) -> None:
        declared, task = self.inner.wire(client.task).down, client.task
        for name, part in declared.items() if self.down != "none" else ():
            if f"{name}.{self.down}" in client.down:
                client.down = client.down | {name: _joined(name, client.down, part, task)}
        client.down = {name: part for name, part in client.down.items() if name in declared}
        self.inner.receive(client)

    def uplink(self, client: Client) -> Message:
        message = dict(self.inner.uplink(client))
        if self.up == "none":
            return message
        model, size = message.pop("model"), client.task.trainable
        update = model[:size] - client.down["model"][:size]
        if self.up != "bfloat16" and _RESIDUAL in client.state:
            update = update + client.state[_RESIDUAL]
        parts = packed(update, self.up, self.share)
        if self.up != "bfloat16":
            client.state[_RESIDUAL] = update - unpacked(parts, size, update.dtype)
        return message | _split("update", model, parts, client.task)

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        self.inner.aggregate(server, (self._whole(up, server) for up in uplinks))

    def _whole(self, up: Uplink, server: Server) -> Uplink:
        """An uplink as the inner method's clients would send it."""
        if self.up == "none":
            return up
        before = server.sent["model"]
        part = self.inner.wire(server.task).up["model"]
        message = {name: sent for name, sent in up.message.items() if not name.startswith("update.")}
        model = _joined("update", up.message, part, server.task)
        model[: server.task.trainable] += before[: server.task.trainable]
        return replace(up, message=message | {"model": model})


def _is_model(part: Part, task: Task) -> bool:
    return part.shape == (task.size,) and part.dtype.is_floating_point


def _split(name: str, model: Tensor, parts: Message, task: Task) -> Message:
    """The parts of a model's trained weights, and its statistics, by their names in a message."""
    rest = {"rest": model[task.trainable :]} if task.size > task.trainable else {}
    return {f"{name}.{suffix}": part for suffix, part in (parts | rest).items()}


def _joined(name: str, message: Message, part: Part, task: Task) -> Tensor:
    """The model of which a message holds the parts."""
    parts = {sent.rpartition(".")[2]: tensor for sent, tensor in message.items() if sent.rpartition(".")[0] == name}
    rest = parts.pop("rest", None)
    trained = unpacked(parts, task.trainable, part.dtype)
    return trained if rest is None else torch.cat([trained, rest])
