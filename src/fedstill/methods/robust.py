"""Robust aggregation for any method: one honest model out of a round in which some clients may send anything.

Each of these looks at all models of the round, then hands the method it modifies others in their place, or fewer
of them. What else a client sends (control variates, losses, logits) goes on as it came.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Lt
from torch import Tensor

from fedstill.core.errors import FedstillError, SettingError
from fedstill.methods.base import Server, Uplink
from fedstill.methods.modifier import Modifier
from fedstill.train.task import Task

log = logging.getLogger(__name__)

_AT_ONCE = 1 << 16  # coordinates; the models are kept, but no second copy of all of them is made


@dataclass(frozen=True)
class Robust(Modifier):
    """Collect the uplinks of a round and pass them on defended."""

    def check(self, task: Task) -> None:
        super().check(task)
        if "model" not in self.inner.wire(task).up:
            raise SettingError(f"{self.name} compares the clients' models, and with this method they do not send any")

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        super().aggregate(server, iter(self.defended(server, list(uplinks))))

    def defended(self, server: Server, uplinks: list[Uplink]) -> list[Uplink]:
        """What the inner method gets; `server.model` is still what was sent."""
        raise NotImplementedError


@dataclass(frozen=True)
class Coordinatewise(Robust):
    """Every model is replaced by one robust mean, so that any weighted mean of them is that one, buffers included."""

    def defended(self, server: Server, uplinks: list[Uplink]) -> list[Uplink]:
        ordered = (piece.sort(0).values for piece in pieces([up["model"] for up in uplinks]))
        model = torch.cat([self.middle(values) for values in ordered]).to(server.model.dtype)
        return [with_model(up, model) for up in uplinks]

    def middle(self, values: Tensor) -> Tensor:
        """The robust mean of each column; values are (clients, coordinates), each column in ascending order."""
        raise NotImplementedError


@dataclass(frozen=True)
class Median(Coordinatewise):
    """The median of each weight; of two clients, their mean."""

    name: ClassVar[str] = "median"
    paper: ClassVar[str] = "Yin et al. 2018"

    def middle(self, values: Tensor) -> Tensor:
        n = len(values)
        return (values[(n - 1) // 2] + values[n // 2]) / 2


@dataclass(frozen=True)
class TrimmedMean(Coordinatewise):
    """The mean of each weight without its largest and smallest values.

    `trim` is rounded down to whole clients, but where it is not 0 and there are three, one at each end always goes:
    else a small round would have no defence.
    """

    name: ClassVar[str] = "trimmed-mean"
    paper: ClassVar[str] = "Yin et al. 2018"

    trim: Annotated[float, Ge(0), Lt(0.5), "share of the clients cut off at each end; 0: the plain, uniform mean"] = 0.2

    def middle(self, values: Tensor) -> Tensor:
        n = len(values)
        whole = math.floor(self.trim * n + 1e-9)  # 0.29 * 100 is a little less than 29
        cut = min(max(1, whole), (n - 1) // 2) if self.trim else 0
        return values[cut : n - cut].mean(0)


@dataclass(frozen=True)
class NormClip(Robust):
    """No client's update w_k - w_t is longer than `max_norm`; buffers, which have no such length, go on as sent."""

    name: ClassVar[str] = "norm-clip"
    paper: ClassVar[str] = "Sun et al. 2019"

    max_norm: Annotated[float, Ge(0), "largest norm of a client's update; 0: the median of the round's"] = 0.0

    def defended(self, server: Server, uplinks: list[Uplink]) -> list[Uplink]:
        trainable = server.task.trainable
        w_t = server.model[:trainable].double()
        norms = [float(torch.linalg.vector_norm(up["model"][:trainable].double() - w_t)) for up in uplinks]
        longest = self.max_norm or float(np.median(norms))

        def clipped(w: Tensor, norm: float) -> Tensor:
            w = w.clone()
            w[:trainable] = w_t + longest / norm * (w[:trainable].double() - w_t)
            return w

        return [
            with_model(up, clipped(up["model"], norm)) if norm > longest else up
            for up, norm in zip(uplinks, norms, strict=True)
        ]


@dataclass(frozen=True)
class Krum(Robust):
    """Only the client counts whose model is nearest to its n - f - 2 nearest others.

    That asks for n >= 2f + 3. In a round with fewer clients (some were dropped, say), f is as large as it may be.
    """

    name: ClassVar[str] = "krum"
    paper: ClassVar[str] = "Blanchard et al. 2017"

    byzantine: Annotated[int, Ge(0), "f, how many clients of a round may be malicious"] = 1

    @property
    def fewest_clients(self) -> int:
        return 2 * self.byzantine + 3

    def defended(self, server: Server, uplinks: list[Uplink]) -> list[Uplink]:
        n = len(uplinks)
        f = min(self.byzantine, (n - 3) // 2)
        if f < 0:
            raise FedstillError(
                f"round {server.round}: {self.name} compares at least three clients, and {n} gave a usable answer; "
                "raise participation"
            )
        if f < self.byzantine:
            log.warning(
                "round %d: %s withstands %d malicious among %d clients, not byzantine = %d; raise participation",
                *(server.round, self.name, f, n, self.byzantine),
            )
        apart = squared_distances([up["model"][: server.task.trainable] for up in uplinks])
        scores = apart.sort(1).values[:, 1 : n - f - 1].sum(1)  # the first is each client's distance from itself
        chosen = sorted(scores.argsort(stable=True)[: self.count(n, f)].tolist())
        server.notes["chosen"] = [uplinks[place].client for place in chosen]
        return [uplinks[place] for place in chosen]

    def count(self, n: int, f: int) -> int:
        """How many clients count."""
        return 1


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The `keep` clients that Krum would take first, in the method's own mean."""

    name: ClassVar[str] = "multi-krum"

    keep: Annotated[int, Ge(0), "how many clients count, if there are so many; 0: all but `byzantine`"] = 0

    def count(self, n: int, f: int) -> int:
        return self.keep or n - f


def with_model(up: Uplink, model: Tensor) -> Uplink:
    """The uplink with another model in it."""
    return replace(up, message=up.message | {"model": model})


def pieces(models: Sequence[Tensor]) -> Iterator[Tensor]:
    """The models side by side, (clients, coordinates) in float64, some coordinates at a time."""
    for piece in zip(*(model.split(_AT_ONCE) for model in models), strict=True):
        yield torch.stack(piece).double()


def squared_distances(models: Sequence[Tensor]) -> Tensor:
    """Between all pairs, (clients, clients); exactly 0 between equals."""
    total = torch.zeros(len(models), len(models), dtype=torch.float64)
    for piece in pieces(models):
        total += torch.cdist(piece, piece, compute_mode="donot_use_mm_for_euclid_dist").square()
    return total
