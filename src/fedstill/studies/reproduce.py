"""A preset's runs, and its table: the paper's numbers beside ours."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from fedstill.building.config import Config
from fedstill.building.setup import prepare
from fedstill.core.errors import DataError
from fedstill.metrics.records import RoundRecord
from fedstill.metrics.statistics import Spread, spread
from fedstill.running.machine import cores, one_thread
from fedstill.studies import presets
from fedstill.studies.archive import name_of, settings_of
from fedstill.studies.cells import Cell
from fedstill.studies.presets import METRICS, Point, Preset, Reduction, Scale
from fedstill.studies.reteach import Accuracies, accuracies

BASELINE = "FedAvg"
MEAN = "Mean of teachers"  # where the student starts


@dataclass(frozen=True)
class Entry:
    """One number of a table, the paper's and ours."""

    row: str
    metric: str
    at: dict[str, Any]
    paper: float | None
    paper_std: float | None
    paper_is_less: bool  # it only says that its number is larger than this
    ours: Spread | None  # None: a seed did not get there
    values: list[float | None]  # one a seed
    wins: int | None  # seeds on which the row is better than FedAvg's

    @property
    def difference(self) -> float | None:
        known = self.ours is not None and self.paper is not None and not self.paper_is_less
        return self.ours.mean - self.paper if known else None  # type: ignore[union-attr, operator]


@dataclass(frozen=True)
class Plan:
    """A preset at a scale, with the runs it asks for."""

    name: str
    preset: Preset
    scale: Scale
    runs: tuple[tuple[Point, tuple[Cell, ...]], ...]  # a cell for each seed

    @property
    def title(self) -> str:
        """The preset's, with the dataset where the scale has another than the paper."""
        preset = self.preset
        data = self.reduction.settings.get("data") if self.reduction else None
        return f"{preset.title}; here {data}" if data and data != preset.settings.get("data") else preset.title

    @property
    def reduction(self) -> Reduction | None:
        """What the scale changes; None: nothing."""
        return self.preset.reduction(self.scale)

    @property
    def cells(self) -> list[Cell]:
        """Each run once, also where several rows are read from it."""
        return list({cell.path: cell for _, cells in self.runs for cell in cells}.values())


def plans(name: str, scale: Scale, seeds: int, root: Path, **given: Any) -> list[Plan]:
    """A preset, or its parts, as plans. Runs with the same settings have the same directory, whoever asks for them."""
    preset = presets.load(name)
    if preset.parts:
        return [plan for part in preset.parts for plan in plans(part, scale, seeds, root, **given)]
    runs = []
    if preset.shows == "bubbles":  # the data partition is known without training
        seeds = 0
    for point in presets.points(preset, scale, **given):
        configs = [point.config.model_copy(update={"seed": point.config.seed + s}) for s in range(seeds)]
        if preset.reteach:  # the sweep needs no runs of its own
            configs = [config.model_copy(update={"hyper": config.hyper | preset.teachers}) for config in configs]
        runs.append((point, tuple(Cell(root / directory(config), config) for config in configs)))
    return [Plan(name, preset, scale, tuple(runs))]


def directory(config: Config) -> str:
    """A name that only runs with the same numbers share, and that settings of later versions do not change."""
    return name_of(settings_of(config))


# --- what it will take ------------------------------------------------------------------------------------------------


def seconds_needed(cells: Sequence[Cell]) -> float:
    """A guess at the time that the unfinished runs take: the clients' plain training, on all cores.

    Generators, teachers and evaluation come on top.
    """
    total, pace = 0.0, dict[tuple[object, ...], float]()
    for cell in cells:
        left = cell.config.rounds - (cell.rounds_done() or 0)
        if left <= 0:
            continue
        c = cell.config
        kind = (
            c.data,
            c.network_names,
            str(c.model_options),
            c.batch_size,
            c.clients,
            c.partition,
            c.fraction,
            c.participation,
        )
        if kind not in pace:
            pace[kind] = _seconds_a_round(c) / c.epochs
        total += left * c.epochs * pace[kind]
    return total / cores()


def _seconds_a_round(config: Config) -> float:
    """Of the training of an average cohort, from a few steps of it."""
    setup = prepare(config)
    task, sizes = setup.task, setup.federation.sizes
    net = task.nets.get("student")
    x = task.dataset.normalise(task.dataset.train.x[: config.batch_size])
    y = task.dataset.train.y[: config.batch_size]

    def step() -> float:
        began = time.perf_counter()
        F.cross_entropy(net.module(x), y).backward()
        return time.perf_counter() - began

    with one_thread(), torch.enable_grad():
        net.module.train()
        a_step = min(step() for _ in range(4))
    samples = float(np.mean(sizes)) * max(1.0, config.participation * setup.federation.clients)
    return a_step / len(y) * samples * config.epochs


# --- the table --------------------------------------------------------------------------------------------------------


def entries(plan: Plan) -> list[Entry]:
    """Every number of a preset whose runs are finished."""
    if plan.preset.reteach:
        every = range(len(plan.runs[0][1]))
        return [_entry(plan, row, "top1", at, values, None) for row, at, values in student_accuracies(plan, every)]
    found: dict[tuple[str, str, str], list[float | None]] = {}
    listed = []
    for point, cells in plan.runs:
        for metric in plan.preset.metrics:
            for further in _further(plan.preset, metric):
                at = point.at | further
                values = [number(cell, point.model, metric, at) for cell in cells]
                found[point.row, metric, json.dumps(at)] = values
                listed.append((point.row, metric, at, values))
    result = []
    for row, metric, at, values in listed:
        baseline = found.get((BASELINE, metric, json.dumps(at)))
        result.append(_entry(plan, row, metric, at, values, baseline if row != BASELINE else None))
    return result


def _entry(
    plan: Plan,
    row: str,
    metric: str,
    at: dict[str, Any],
    values: list[float | None],
    baseline: list[float | None] | None,
) -> Entry:
    paper = presets.paper_number(plan.name, plan.preset, row, metric, at) or {}
    known = [v for v in values if v is not None]
    wins = None
    if baseline is not None:
        sign = 1 if METRICS[metric][1] else -1
        pairs = [(a, b) for a, b in zip(values, baseline, strict=True) if a is not None and b is not None]
        wins = sum(sign * a > sign * b for a, b in pairs) if len(pairs) == len(values) else None
    ours = spread(known) if len(known) == len(values) else None
    censored = paper.get("censored", False)
    return Entry(row, metric, at, paper.get("value"), paper.get("std"), censored, ours, values, wins)


def _further(preset: Preset, metric: str) -> list[dict[str, Any]]:
    """What a metric asks for beside a point of the sweep: a target, or a round."""
    if metric == "rounds_to_target":
        of_its_best = [{"target_percent": target} for target in preset.relative_targets]
        return [{"target_acc": target} for target in preset.targets] + of_its_best
    if metric == "top1_at_round":
        return [{"round": round_} for round_ in preset.at_rounds]
    return [{}]


def number(cell: Cell, model: str, metric: str, at: Mapping[str, Any]) -> float | None:
    """A number of one run: of the model, or of another that it evaluates."""
    if metric in _BY_ROUND:
        return _BY_ROUND[metric](cell, model, at)
    if model == "student" or model.startswith("region "):
        return _of_aggregation(cell.records(), model)
    summary = cell.summary()
    return _number((summary["also"][model] if model else summary).get(METRICS[metric][0]))


def _rounds_to_target(cell: Cell, model: str, at: Mapping[str, Any]) -> float | None:
    target = at["target_acc"] / 100 if "target_acc" in at else at["target_percent"] / 100 * _best(cell, model)
    return next((round_ for round_, accuracy in _accuracies(cell, model).items() if accuracy >= target), None)


def _server_seconds(cell: Cell, _model: str, _at: Mapping[str, Any]) -> float:
    if cell.archived:
        raise DataError(f"{cell.path}: the archive has no times of rounds")
    notes = [r.get("episode") or r.get("server") or {} for r in cell.records()]
    return float(sum(t.get("server_seconds", 0.0) for t in notes))


def _accuracies(cell: Cell, model: str) -> dict[int, float]:
    """By round, of those that were evaluated."""
    found = {r["round"]: (r.get("also", {}).get(model, {}) if model else r).get("accuracy") for r in cell.records()}
    return {round_: float(value) for round_, value in found.items() if value is not None}


def _roughness(cell: Cell, model: str, _at: Mapping[str, Any]) -> float | None:
    """Over the second half of the evaluations: before that, a curve that rises fast is rough too."""
    accuracies = list(_accuracies(cell, model).values())
    changes = np.diff(accuracies[len(accuracies) // 2 :])
    return float(np.std(changes, ddof=1)) if len(changes) > 1 else None


def _distils(cell: Cell, _model: str, at: Mapping[str, Any]) -> float | None:
    stages = {r["episode"]["number"]: r["episode"]["stage"] for r in cell.records() if "episode" in r}
    return float(stages[at["episode"]] != "average") if at["episode"] in stages else None


# Metrics that are read from a run's rounds; the others are in its summary.
_BY_ROUND: dict[str, Callable[[Cell, str, Mapping[str, Any]], float | None]] = {
    "rounds_to_target": _rounds_to_target,
    "server_seconds": _server_seconds,
    "top1_at_round": lambda cell, model, at: _accuracies(cell, model).get(at["round"]),
    "roughness": _roughness,
    "taught": _distils,
}


def _best(cell: Cell, model: str) -> float:
    summary = cell.summary()
    return float((summary["also"][model] if model else summary)["best_accuracy"])


def _of_aggregation(records: Sequence[RoundRecord], model: str) -> float | None:
    """Accuracy at the last aggregation of regions of which is known how the regions did one round later.

    `model` is "student", or "region N before" or "region N after" it.
    """
    pairs = [(a["episode"], b["teachers_after"]) for a, b in pairwise(records) if "teachers_after" in b]
    if not pairs:
        return None
    episode, after = pairs[-1]
    if model == "student":
        return _number(episode["student"]["accuracy"])
    region, _, when = model.rpartition(" ")
    if when == "after":
        return _number(after.get(region))
    return _number(episode["teachers"][region]["accuracy"] if region in episode["teachers"] else None)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def variants_of(plan: Plan) -> list[dict[str, Any]]:
    """The method's settings at every point of a sweep over saved teachers."""
    return [point.config.hyper for point, _ in plan.runs]


def student_accuracies(plan: Plan, seeds: Sequence[int]) -> Iterator[tuple[str, dict[str, Any], list[float | None]]]:
    """Accuracies of students taught at every point of the sweep from the same teachers, of those, and of their mean."""
    points = [point for point, _ in plan.runs]
    students: list[list[float | None]] = [[] for _ in points]
    teachers: dict[str, list[float | None]] = {}
    for seed in seeds:
        cell, variants = plan.runs[0][1][seed], variants_of(plan)
        kept = cell.archived.students_of(variants) if cell.archived else None
        found = Accuracies(**kept) if kept else accuracies(cell.path, variants)
        for n, accuracy in enumerate(found.teachers, 1):
            teachers.setdefault(f"Teacher {n}", []).append(accuracy)
        teachers.setdefault(MEAN, []).append(found.mean)
        for values, accuracy in zip(students, found.students, strict=True):
            values.append(accuracy)
    for point, values in zip(points, students, strict=True):
        for teacher, of_teacher in teachers.items():
            yield teacher, point.at, of_teacher
        yield point.row, point.at, values
