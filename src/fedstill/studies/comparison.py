"""Methods side by side: the same partitions, cohorts and initial weights for each, seed by seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill.metrics.records import RoundRecord, further, headline, value_of
from fedstill.metrics.scores import COUNTED, lower_is_better
from fedstill.metrics.shown import PLACES, named_metrics
from fedstill.metrics.statistics import Paired, Spread, paired, spread
from fedstill.studies.cells import Cell

# Columns of a comparison, and whether a larger number is better.
METRICS: dict[str, bool] = {
    "best_accuracy": True,
    "final_accuracy": True,
    "final_amp": True,
    "final_fm": False,
    "final_wlp": True,
}
TO_TARGET = ("rounds_to_target", "bytes_to_target", "seconds_to_target")


@dataclass(frozen=True)
class Row:
    """One method under one combination of settings, over its seeds."""

    method: str
    settings: dict[str, Any]  # those that are swept
    cells: tuple[Cell, ...]  # one a seed, in the order of the seeds
    variant: str = ""  # a model beside the main one, such as "without T1"

    @property
    def name(self) -> str:
        return self.method + (f" ({self.variant})" if self.variant else "")

    @property
    def place(self) -> str:
        """The swept settings in words."""
        return ", ".join(f"{key} = {value}" for key, value in self.settings.items())

    def values(self, metric: str) -> list[float | None]:
        """A number of each seed."""
        if metric in TO_TARGET:
            return [to_target(cell.records(), cell.config.target_accuracy, self.variant)[metric] for cell in self.cells]
        summaries = [cell.summary() for cell in self.cells]
        return [value_of(further(s)[self.variant] if self.variant else s, metric) for s in summaries]

    def spread(self, metric: str) -> Spread | None:
        """Mean and deviation over the seeds; None if a seed lacks the number."""
        values = [v for v in self.values(metric) if v is not None]
        return spread(values) if len(values) == len(self.cells) else None

    def against(self, other: Row, metric: str) -> Paired | None:
        """The difference to another row, seed by seed, positive where this one is better."""
        ours, theirs = self.values(metric), other.values(metric)
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
        if not pairs or len(pairs) < len(ours):
            return None
        better_if_larger = METRICS.get(metric, not lower_is_better(metric.removeprefix("final_")))
        sign = 1 if better_if_larger else -1
        return paired([sign * a for a, _ in pairs], [sign * b for _, b in pairs])

    def _named(self) -> list[str]:
        """The further numbers that the runs' settings name, and those of them that are always there."""
        names = dict.fromkeys([*named_metrics([cell.summary() for cell in self.cells]), *COUNTED])
        return [f"final_{place}{name}" for name in names for place in PLACES]

    def record(self, baseline: Row | None) -> dict[str, Any]:
        """The row as data: every seed's numbers, and what they come to."""
        found: dict[str, Any] = {"method": self.method, "model": self.variant, "settings": self.settings}
        found["runs"] = [str(cell.path) for cell in self.cells]
        found["seeds"] = [cell.config.seed for cell in self.cells]
        measured = [*METRICS, *self._named()]
        for metric in (*measured, "bytes_down", "bytes_up", "seconds", *TO_TARGET):
            if self.variant and metric not in (*measured, *TO_TARGET):
                continue
            values, summed = self.values(metric), self.spread(metric)
            found[metric] = {"values": values}
            if summed:
                found[metric] |= {"mean": summed.mean, "std": summed.std}
            if baseline is not None and metric in measured and (gap := self.against(baseline, metric)):
                found[metric]["better_than_first"] = {
                    "mean": gap.mean,
                    "low": gap.low,
                    "high": gap.high,
                    "wins": gap.wins,
                }
        return found


def grid(
    configs: Mapping[tuple[str, int, int], Cell], methods: Sequence[str], sweep: Sequence[dict[str, Any]], seeds: int
) -> list[list[Row]]:
    """The rows of each combination of the swept settings, with a row for each further model of a method."""
    tables = []
    for i, settings in enumerate(sweep):
        rows = []
        for method in methods:
            cells = tuple(configs[method, i, s] for s in range(seeds))
            rows.append(Row(method, settings, cells))
            rows += [Row(method, settings, cells, variant) for variant in further(cells[0].summary())]
        tables.append(rows)
    return tables


def to_target(records: Sequence[RoundRecord], target: float, variant: str = "") -> dict[str, float | None]:
    """What it took to reach an accuracy for the first time: rounds, bytes both ways, seconds without evaluation."""
    if not target:
        return dict.fromkeys(TO_TARGET)
    compared = headline(records) or "accuracy"
    for i, record in enumerate(records):
        scored = further(record).get(variant, {}) if variant else record
        if (value_of(scored, compared) or 0) >= target:
            before = records[: i + 1]
            return {
                "rounds_to_target": record["round"],
                "bytes_to_target": math.fsum(r["bytes_down"] + r["bytes_up"] for r in before),
                "seconds_to_target": math.fsum(r["seconds"] for r in before),
            }
    return dict.fromkeys(TO_TARGET)


def combinations(methods: Sequence[str], sweep: Sequence[dict[str, Any]], seeds: int) -> list[tuple[str, int, int]]:
    """Every run of a comparison: method, combination and seed by number. All methods of a seed come together."""
    return [(m, i, s) for s, i, m in itertools.product(range(seeds), range(len(sweep)), methods)]
