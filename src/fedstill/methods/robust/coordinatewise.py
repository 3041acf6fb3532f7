"""Rules that look at each number by itself: Yin et al., "Byzantine-robust distributed learning", 2018."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Lt
from torch import Tensor

from fedstill.core.space import Search
from fedstill.methods.base import Server
from fedstill.methods.robust.rule import Replacing, columns, median


@dataclass(frozen=True)
class Coordinatewise(Replacing):
    """The middle of each number, in every part and in BatchNorm's statistics; all clients count alike."""

    paper: ClassVar[str] = "Yin et al. 2018"

    def centre(self, server: Server, name: str, sent: list[Tensor]) -> Tensor:
        return columns(sent, self.middle)

    def middle(self, values: Tensor) -> Tensor:
        """The robust mean of each column; values are (clients, coordinates), each column in ascending order."""
        raise NotImplementedError


@dataclass(frozen=True)
class Median(Coordinatewise):
    """The median of each weight; of two clients, their mean."""

    name: ClassVar[str] = "median"

    def middle(self, values: Tensor) -> Tensor:
        return median(values)


@dataclass(frozen=True)
class TrimmedMean(Coordinatewise):
    """The mean of each weight without its largest and smallest values.

    `trim` is rounded down to whole clients, but where it is not 0 and there are three, one at each end always goes:
    else a small round would have no defence.
    """

    name: ClassVar[str] = "trimmed-mean"

    trim: Annotated[
        float,
        Ge(0),
        Lt(0.5),
        Search("0.05..0.45"),
        "share of the clients cut off at each end; 0: the plain, uniform mean",
    ] = 0.2

    def middle(self, values: Tensor) -> Tensor:
        n = len(values)
        whole = math.floor(self.trim * n + 1e-9)  # 0.29 * 100 is a little less than 29
        cut = min(max(1, whole), (n - 1) // 2) if self.trim else 0
        return values[cut : n - cut].mean(0)
