"""What the charts of a page show, as plain data for static/chart.js."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstill.data.federation import Federation
from fedstill.metrics.records import value_of
from fedstill.report import style
from fedstill.report.bubbles import MOST_CLIENTS
from fedstill.report.clients import Accuracies, ranked
from fedstill.report.runs import Group
from fedstill.report.series import Records, line_of

NUMBERS = 120_000  # of all curves of a page, about a megabyte; longer ones are thinned out
FEWEST = 50  # points of a curve, however many there are
_NOT_SHOWN = ("round", "evaluated", "clients")


@dataclass(frozen=True)
class Chart:
    """A chart of a page: which function of chart.js draws it, what it shows in words, and the data."""

    kind: str
    caption: str
    data: Mapping[str, Any]


def curve_data(groups: Sequence[Group]) -> dict[str, Any]:
    """Every metric by round; a group is one line, with a band where it has several seeds."""
    names = metric_names([run.records for group in groups for run in group.runs])
    most = max(FEWEST, NUMBERS // max(1, 4 * len(names) * len(groups)))
    return {
        "metrics": [{"name": name, "label": style.label(name), "share": style.is_share(name)} for name in names],
        "groups": [
            {
                "name": group.title,
                "lines": {
                    name: line
                    for name in names
                    if (line := _line([run.records for run in group.runs], name, most))["x"]
                },
            }
            for group in groups
        ],
    }


def metric_names(runs: Sequence[Records]) -> list[str]:
    """The numbers that rounds have: those with a name for readers first, then others, then those of further models."""
    own: dict[str, None] = {}
    further: dict[str, None] = {}
    for record in (record for records in runs for record in records):
        own |= {name: None for name in record if value_of(record, name) is not None and name not in _NOT_SHOWN}
        own |= {name: None for name in record.get("metrics") or {} if value_of(record, name) is not None}
        for part in ("also", "groups"):
            parts = record.get(part)
            for model, scores in parts.items() if isinstance(parts, Mapping) else ():
                if isinstance(scores, Mapping) and "." not in model:
                    further |= {f"{part}.{model}.{n}": None for n in scores if value_of(scores, n) is not None}
    known = [name for name in style.METRICS if name in own]
    return [*known, *(name for name in own if name not in known), *further]


def _line(runs: Sequence[Records], metric: str, most: int) -> dict[str, list[Any]]:
    found = line_of(runs, metric)
    chosen = _thinned(len(found.rounds), most)
    line: dict[str, list[Any]] = {
        "x": [found.rounds[i] for i in chosen],
        "y": [_rounded(found.mean[i]) for i in chosen],
    }
    if len(runs) > 1:
        line |= {"low": [_rounded(found.low[i]) for i in chosen], "high": [_rounded(found.high[i]) for i in chosen]}
    return line


def _thinned(count: int, most: int) -> list[int]:
    """At most so many places out of a row, evenly, with the first and the last.

    >>> _thinned(9, 3)
    [0, 4, 8]
    """
    if count <= most:
        return list(range(count))
    return [int(place) for place in np.linspace(0, count - 1, most).round()]


def _rounded(number: float) -> float | None:
    """A number in five digits; None, for there is no other word in JSON, if it is none."""
    return float(f"{number:.5g}") if np.isfinite(number) else None


def client_data(accuracies: Mapping[str, Sequence[Accuracies]]) -> dict[str, Any]:
    """The clients' accuracies of each group of runs, from the worst to the best, with AMP."""
    groups = []
    for name, runs in accuracies.items():
        ranks = ranked(runs)  # (seeds, clients)
        chosen = _thinned(ranks.shape[1], 500)
        line: dict[str, Any] = {
            "name": name,
            "x": [i + 1 for i in chosen],
            "y": [_rounded(ranks[:, i].mean()) for i in chosen],
            "level": _rounded(
                float(np.mean([np.average([a for _, a in run], weights=[n for n, _ in run]) for run in runs]))
            ),
        }
        if len(runs) > 1:
            line |= {pick: [_rounded(getattr(ranks[:, i], how)()) for i in chosen] for pick, how in _RANGE.items()}
        groups.append(line)
    return {"groups": groups}


_RANGE = {"low": "min", "high": "max"}


def bubble_data(federation: Federation) -> dict[str, Any]:
    """Training samples by client and class, of the first hundred clients."""
    counts = federation.class_counts(MOST_CLIENTS)
    return {
        "clients": list(federation.client_names[: len(counts)]),
        "classes": list(federation.dataset.classes),
        "counts": counts.tolist(),
        "all": federation.clients,
    }


def confusion_data(matrices: Mapping[str, Sequence[Sequence[int]]], classes: Sequence[str] = ()) -> dict[str, Any]:
    """Named matrices of true by predicted classes, each row as whole per cents of its class."""
    found = []
    for name, matrix in matrices.items():
        counts = np.asarray(matrix, float)
        shares = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        accuracy = counts.trace() / max(1.0, counts.sum())
        found.append({"name": f"{name}: {accuracy:.1%}", "rows": shares.round().astype(int).tolist()})
    size = len(found[0]["rows"])
    return {"matrices": found, "classes": list(classes) or list(map(str, range(size)))}
