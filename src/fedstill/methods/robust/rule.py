"""What a robust rule is: it sees all uplinks of a round, and hands the method it modifies others in their place.

A rule defends every part of an uplink, or refuses the method. It does not believe claimed sample counts, neither those
of the uplinks nor those of `server.sizes`: all clients count alike, or up to a cap. BatchNorm's statistics are not
updates (a step beyond them can make a variance negative), so rules that compare updates take their median.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core.errors import SettingError
from fedstill.core.tree import Message
from fedstill.methods.base import Part, Server, Uplink
from fedstill.methods.modifier import Modifier
from fedstill.train.task import Task

_AT_ONCE = 1 << 16  # coordinates; the models are kept, but no second copy of all of them is made


@dataclass(frozen=True)
class Robust(Modifier):
    """Collect the uplinks of a round and pass them on defended."""

    rule: ClassVar[bool] = True
    capped: ClassVar[bool] = False  # clients count by their samples, up to the median; else all alike
    defends: ClassVar[frozenset[str]] = frozenset({"any"})  # which parts besides the model: values of `Part.defence`

    def check(self, task: Task) -> None:
        super().check(task)
        up = self.inner.wire(task).up
        if "model" not in up:
            raise SettingError(f"{self.name} compares the clients' models, and with this method they do not send any")
        if self.inner.has_final_exchange:
            last = next(part.name for part in self.inner.parts() if part.has_final_exchange)
            raise SettingError(f"{self.name} does not defend what {last} collects after the last round; leave it out")
        for name, part in up.items():
            if name != "model" and (part.optional or part.defence not in self.defends):
                raise SettingError(
                    f"{self.name} does not defend {name!r} ({part.what}), which clients also send here; "
                    + self._instead(part)
                )

    def _instead(self, part: Part) -> str:
        if part.optional or part.defence == "none":
            return f"no rule does; use another method, for example fedavg+{self.name}"
        if part.defence == "any":
            return "use +median or +multi-krum"
        return "use +krum or +multi-krum, which judge an uplink as a whole"

    @property
    def beyond_sums(self) -> str:
        return f"{self.name} compares the clients' updates with each other"

    def start(self, server: Server) -> None:
        with self._trusted_sizes(server):
            super().start(server)

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        defended = self.defend(server, list(uplinks))
        with self._trusted_sizes(server):
            super().aggregate(server, iter(defended))

    def defend(self, server: Server, uplinks: list[Uplink]) -> list[Uplink]:
        """What the inner method gets; `server.model` is still what was sent."""
        trusted = self._trusted(np.array([up.samples for up in uplinks], np.int64)).tolist()
        return self.apply_rule(server, [replace(up, samples=n) for up, n in zip(uplinks, trusted, strict=True)])

    def apply_rule(self, server: Server, uplinks: list[Uplink]) -> list[Uplink]:
        """The same of uplinks that count as they should."""
        raise NotImplementedError

    def _trusted(self, claimed: NDArray[np.int64]) -> NDArray[np.int64]:
        """How much clients count that claim so many samples; of nothing, nothing."""
        cap = max(1, int(np.median(claimed[claimed > 0]))) if self.capped and claimed.any() else 1
        return np.minimum(claimed, cap)

    @contextmanager
    def _trusted_sizes(self, server: Server) -> Iterator[None]:
        """For methods that weigh clients by `server.sizes`, which sites claim too."""
        claimed, server.sizes = server.sizes, self._trusted(server.sizes)
        try:
            yield
        finally:
            server.sizes = claimed


@dataclass(frozen=True)
class Replacing(Robust):
    """Every part of every uplink is replaced by one robust centre, so that any weighted mean of them is that one."""

    def apply_rule(self, server: Server, uplinks: list[Uplink]) -> list[Uplink]:
        return replaced(uplinks, lambda name, sent: self.centre(server, name, sent))

    def centre(self, server: Server, name: str, sent: list[Tensor]) -> Tensor:
        """The centre of what all clients sent under this name, in float64."""
        raise NotImplementedError


def updates(server: Server, name: str, sent: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Where the clients began, and where they are: what is not a statistic, for rules that compare updates."""
    if name == "model":
        trained = server.task.trainable
        return server.model[:trained].double(), [x[:trained] for x in sent]
    return torch.zeros_like(sent[0], dtype=torch.float64), list(sent)


def statistics(server: Server, name: str, sent: Sequence[Tensor]) -> Tensor:
    """The median of the statistics that were sent; none if this is not the model."""
    return columns([x[server.task.trainable :] for x in sent] if name == "model" else [x[:0] for x in sent], median)


def replaced(uplinks: list[Uplink], centre: Callable[[str, list[Tensor]], Tensor]) -> list[Uplink]:
    """The uplinks, all with the same message: the centre of what was sent under each name."""
    message: Message = {}
    for name, like in uplinks[0].message.items():
        found = centre(name, [up[name].flatten() for up in uplinks])
        message[name] = found.view(like.shape).to(like.dtype)
    return [replace(up, message=dict(message)) for up in uplinks]


def pieces(models: Sequence[Tensor]) -> Iterator[Tensor]:
    """The models side by side, (clients, coordinates) in float64, some coordinates at a time."""
    for piece in zip(*(model.split(_AT_ONCE) for model in models), strict=True):
        yield torch.stack(piece).double()


def columns(models: Sequence[Tensor], middle: Callable[[Tensor], Tensor]) -> Tensor:
    """The middle of each coordinate; `middle` gets (clients, coordinates), each column in ascending order."""
    return torch.cat([middle(piece.sort(0).values) for piece in pieces(models)])


def median(values: Tensor) -> Tensor:
    """Of sorted columns; of an even number, the mean of the two in the middle."""
    n = len(values)
    return (values[(n - 1) // 2] + values[n // 2]) / 2


def combined(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_k weight_k vector_k in float64, one vector at a time."""
    total = torch.zeros_like(vectors[0], dtype=torch.float64)
    for vector, weight in zip(vectors, weights, strict=True):
        total.add_(vector, alpha=weight)
    return total


def distances(vectors: Sequence[Tensor], centre: Tensor) -> list[float]:
    """How far each is from the centre."""
    return [math.sqrt(float((vector.double() - centre).square().sum())) for vector in vectors]


def squared_distances(models: Sequence[Tensor]) -> Tensor:
    """Between all pairs, (clients, clients); exactly 0 between equals."""
    total = torch.zeros(len(models), len(models), dtype=torch.float64)
    for piece in pieces(models):
        total += torch.cdist(piece, piece, compute_mode="donot_use_mm_for_euclid_dist").square()
    return total
