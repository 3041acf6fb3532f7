"""A number by round over seeds: the line and the band that figures and pages draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedstill.metrics.records import value_of
from fedstill.metrics.statistics import spread
from fedstill.report import style

Records = Sequence[Mapping[str, Any]]
Band = Literal["std", "range"]


@dataclass(frozen=True)
class Line:
    """The mean in each round that any seed has, and the band around it."""

    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def line_of(runs: Sequence[Records], metric: str, band: Band = "std") -> Line:
    """The line of a metric over the records of each seed.

    A deviation around a mean may reach where no number can be: a band of numbers that are not negative ends at zero,
    one of shares at one.

    >>> line_of([[{"round": 1, "fm": 0.0}], [{"round": 1, "fm": 0.2}]], "fm").low
    [0.0]
    """
    by_round: dict[int, list[float]] = {}
    for record in (record for records in runs for record in records):
        if (number := value_of(record, metric)) is not None:
            by_round.setdefault(record["round"], []).append(number)
    rounds = sorted(by_round)
    spreads = [spread(by_round[r]) for r in rounds]
    mean = np.array([s.mean for s in spreads])
    if band == "std":
        deviation = np.nan_to_num([s.std for s in spreads])
        floor = 0.0 if all(min(values) >= 0 for values in by_round.values()) else -np.inf
        ceiling = 1.0 if style.is_share(metric) else np.inf
        low, high = np.maximum(mean - deviation, floor), np.minimum(mean + deviation, ceiling)
    else:
        low, high = (np.array([pick(by_round[r]) for r in rounds]) for pick in (min, max))
    return Line(rounds, mean.tolist(), low.tolist(), high.tolist())
