"""Methods whose server needs no more of a round's uplinks than their mean: what `secure_aggregation` gives it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedstill.core.errors import SettingError
from fedstill.core.tree import Message
from fedstill.methods.base import Method, Part, Uplink
from fedstill.methods.modifier import Modifier
from fedstill.privacy import fixed_point
from fedstill.train.task import Task


def check_sums_only(method: Method, task: Task) -> None:
    """Refuse a method whose server looks at what single clients sent."""
    reason = _reason(method, task)
    if reason:
        raise SettingError(
            f"secure_aggregation = true: {reason}; it is for methods whose server takes plain means, such as fedavg, "
            "fedprox, fedgkd, moon, scaffold, feddyn or fedmd"
        )


def _reason(method: Method, task: Task) -> str:
    if rules := [part.name for part in method.parts() if isinstance(part, Modifier) and part.rule]:
        return f"{rules[0]} compares what single clients sent, which nobody sees under masks"
    if single := [part.name for part in method.parts() if not sums_only(type(part))]:
        return f"{single[0]} works with what single clients sent, not with a mean of it"
    if method.has_final_exchange:
        return f"{method.name} collects something else after the last round"
    for name, part in method.wire(task).up.items():
        if part.optional or part.defence != "any" or not part.dtype.is_floating_point:
            return f"{method.name} makes more of {name!r} ({part.what}) than a plain mean"
    return ""


def sums_only(method: type[Method]) -> bool:
    """Whether a method declares it, beside the very `aggregate` that it has: one that is derived declares its own."""
    owner = next(cls for cls in method.__mro__ if "aggregate" in vars(cls))
    return bool(vars(owner).get("sums_only", False))


def to_integers(message: Message, declared: Mapping[str, Part]) -> Tensor:
    """A message as one vector of integers, to be added to those of others."""
    return torch.cat([fixed_point.to_integers(message[name].flatten()) for name in declared])


def mean_message(total: Tensor, count: int, declared: Mapping[str, Part]) -> Message:
    """The mean of so many messages, of which this is the sum."""
    sizes = [torch.Size(part.shape).numel() for part in declared.values()]
    return {
        name: fixed_point.mean_of(piece, count, part.dtype).view(part.shape)
        for (name, part), piece in zip(declared.items(), total.split(sizes), strict=True)
    }


def masked_bytes(declared: Mapping[str, Part]) -> int:
    """Bytes of a message under masks."""
    return sum(torch.Size(part.shape).numel() for part in declared.values()) * torch.int64.itemsize


def averaged(uplinks: Iterator[Uplink], declared: Mapping[str, Part]) -> Iterator[Uplink]:
    """In each uplink's place the mean of all, every client counting alike: what a server of masked sums knows."""
    total, clients = None, []
    for up in uplinks:
        integers = to_integers(up.message, declared)
        total = integers if total is None else total + integers
        clients.append(up.client)
    if total is not None:
        mean = mean_message(total, len(clients), declared)
        for client in clients:
            yield Uplink(client, 1, dict(mean))
