"""A number by round over seeds: the line and the band that figures and pages draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedstill.metrics.records import value_of
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
    counts = np.array([len(by_round[r]) for r in rounds])
    numbers = np.full((len(rounds), max(counts, default=1)), np.nan)  # (rounds, seeds), NaN where a seed has none
    for row, r in enumerate(rounds):
        numbers[row, : counts[row]] = by_round[r]
    mean = np.nansum(numbers, axis=1) / counts
    if band == "std":
        squares = np.nansum((numbers - mean[:, None]) ** 2, axis=1)
        deviation = np.sqrt(squares / np.maximum(counts - 1, 1))  # of a single number: none
        floor = 0.0 if (numbers[np.isfinite(numbers)] >= 0).all() else -np.inf
        ceiling = 1.0 if style.is_share(metric) else np.inf
        low, high = np.maximum(mean - deviation, floor), np.minimum(mean + deviation, ceiling)
    else:
        low, high = np.nanmin(numbers, axis=1), np.nanmax(numbers, axis=1)
    return Line(rounds, mean.tolist(), low.tolist(), high.tolist())
