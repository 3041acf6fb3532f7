"""Rules that compare whole updates by their lengths: clipping and the geometric median.

Below, x_k is what client k sent (of the model: its trained weights), x_t where it began (w_t; 0 for other parts). Each
part is treated by itself, and BatchNorm's statistics are the median of those sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor

from fedstill.core.errors import SettingError
from fedstill.core.tree import Message
from fedstill.methods.base import Server, Uplink
from fedstill.methods.robust.rule import (
    Replacing,
    Robust,
    columns,
    combined,
    distances,
    median,
    statistics,
    updates,
)
from fedstill.methods.server_side import ServerSide
from fedstill.train.task import Task


@dataclass(frozen=True)
class NormClip(Robust):
    """No update is longer than `max_norm`: x_t + min(1, max_norm / ||x_k - x_t||) (x_k - x_t).

    Clients count by their samples, but none for more than the median of the round's counts. Parts besides the model
    are clipped to the median of their own lengths.
    """

    name: ClassVar[str] = "norm-clip"
    paper: ClassVar[str] = "Sun et al. 2019"
    capped: ClassVar[bool] = True

    max_norm: Annotated[float, Ge(0), "largest norm of a client's update; 0: the median of the round's"] = 0.0

    def check(self, task: Task) -> None:
        super().check(task)
        if teaching := [part.name for part in self.inner.parts() if isinstance(part, ServerSide)]:
            raise SettingError(
                f"norm-clip bounds the mean of the models, not what each of them teaches {teaching[-1]}; use "
                "+median or +multi-krum"
            )

    def apply_rule(self, server: Server, uplinks: list[Uplink]) -> list[Uplink]:
        messages: list[Message] = [{} for _ in uplinks]
        for name, like in uplinks[0].message.items():
            sent = [up[name].flatten() for up in uplinks]
            start, ends = updates(server, name, sent)
            norms, tail = distances(ends, start), statistics(server, name, sent)
            longest = (self.max_norm if name == "model" else 0) or float(np.median(norms))
            for message, x, norm in zip(messages, ends, norms, strict=True):
                short = start + longest / norm * (x.double() - start) if norm > longest else x.double()
                message[name] = torch.cat([short, tail]).view(like.shape).to(like.dtype)
        return [replace(up, message=message) for up, message in zip(uplinks, messages, strict=True)]


@dataclass(frozen=True)
class Vectorwise(Replacing):
    """Every update is replaced by one centre of them; all clients count alike."""

    def centre(self, server: Server, name: str, sent: list[Tensor]) -> Tensor:
        start, ends = updates(server, name, sent)
        return torch.cat([self.middle(server, name, start, ends), statistics(server, name, sent)])

    def middle(self, server: Server, name: str, start: Tensor, ends: list[Tensor]) -> Tensor:
        """The centre of where clients are that began at `start`."""
        raise NotImplementedError


@dataclass(frozen=True)
class GeoMed(Vectorwise):
    """The geometric median argmin_v sum_k ||v - x_k||, by the smoothed Weiszfeld algorithm.

    b_k = 1 / max(nu, ||v - x_k||), v <- sum_k b_k x_k / sum_k b_k, `iterations` times. It begins at the median of each
    number, not at the mean: that may be so far away that few iterations do not lead back. Pillutla et al., "Robust
    aggregation for federated learning", 2022, Algorithm 2.
    """

    name: ClassVar[str] = "geomed"
    paper: ClassVar[str] = "Pillutla et al. 2022"

    iterations: Annotated[int, Ge(1), "Weiszfeld steps"] = 8
    nu: Annotated[float, Gt(0), "smallest distance that is divided by"] = 1e-6

    def middle(self, server: Server, name: str, start: Tensor, ends: list[Tensor]) -> Tensor:
        v = columns(ends, median)
        for _ in range(self.iterations):
            weights = [1 / max(self.nu, distance) for distance in distances(ends, v)]
            v = combined(ends, weights) / math.fsum(weights)
        return v


@dataclass(frozen=True)
class CenteredClip(Vectorwise):
    """Clipped around the round before's update: v <- v + (1/n) sum_k min(1, tau / ||x_k - v||) (x_k - v).

    v begins at x_t plus the update of the round before (none in the first). Without the clients' momentum of the
    paper: Karimireddy et al., "Learning from history for Byzantine robust optimization", 2021, Algorithm 2. Parts
    besides the model have the median distance as their tau.
    """

    name: ClassVar[str] = "centered-clip"
    paper: ClassVar[str] = "Karimireddy et al. 2021"

    tau: Annotated[float, Ge(0), "radius around the centre; 0: the median of the clients' distances from it"] = 0.0
    iterations: Annotated[int, Ge(1), "clipping steps a round"] = 3

    def middle(self, server: Server, name: str, start: Tensor, ends: list[Tensor]) -> Tensor:
        before: dict[str, Any] = server.state.get(self.name, {})
        v = start + before[name] if name in before else start
        for _ in range(self.iterations):
            away = distances(ends, v)
            tau = (self.tau if name == "model" else 0) or float(np.median(away))
            factors = [min(1.0, tau / distance) if distance else 1.0 for distance in away]
            v = v + (combined(ends, factors) - math.fsum(factors) * v) / len(ends)
        server.state[self.name] = before | {name: v - start}
        return v
