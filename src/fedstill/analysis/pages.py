"""The page about runs, with the pictures that belong to it."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fedstill.analysis.figures import client_accuracies, data_partition, episode_matrices, round_records
from fedstill.analysis.runs import group_runs, in_common, last_evaluated_episode, read_runs
from fedstill.building.config import DIVISION
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.files import write_atomic
from fedstill.metrics.records import curve_metrics, value_of
from fedstill.metrics.shown import named_metrics
from fedstill.report.bubbles import bubbles
from fedstill.report.clients import clients
from fedstill.report.confusion import confusion
from fedstill.report.curves import seed_curves
from fedstill.report.page import Picture, page
from fedstill.report.runs import Group

_PARTITIONS = 4  # that a page shows


def write_page(directories: Sequence[Path], out: Path, title: str = "") -> None:
    """One HTML page about the finished runs in these directories: results, figures, settings."""
    runs = read_runs(directories)
    groups = group_runs([run for run in runs if run.summary])
    notes = [f"Not finished, and left out: {run.path}" for run in runs if not run.summary]
    if not groups:
        raise SettingError(f"no run is finished: continue one with 'fedstill resume {runs[0].path}'")
    metrics = curve_metrics([record for group in groups for run in group.runs for record in run.records])
    what = "on the global test set" if metrics[0] == "accuracy" else "on the clients' own tests"
    pictures = [
        _picture(
            f"Accuracy {what}, and variance over the clients (FM), by round",
            lambda file: seed_curves(round_records(groups), file, metrics=metrics, title=in_common(groups)),
        )
    ]
    if named := named_metrics([run.summary for run in runs if run.summary]):
        pictures.append(
            _picture(
                "The metrics that the runs name, by round: on the global test set, or else on the clients' tests",
                lambda file: seed_curves(
                    round_records(groups), file, metrics=_measured(groups, named), title=in_common(groups)
                ),
            )
        )
    if served := client_accuracies(groups):
        caption = "Each client's accuracy under the final model, from the worst served to the best"
        pictures.append(_picture(caption, lambda file: clients(served, file, title=in_common(groups))))
    pictures += _episodes(groups)
    partitions, more = _partitions(groups)
    write_atomic(out, page(groups, pictures + partitions, title=title or "fedstill report", notes=notes + more))


def _measured(groups: Sequence[Group], names: Sequence[str]) -> list[str]:
    """Each metric where any round has it."""
    records = [record for group in groups for run in group.runs for record in run.records]
    return [
        next((n for n in (name, f"pooled_{name}") if any(value_of(r, n) is not None for r in records)), name)
        for name in names
    ]


def _picture(caption: str, draw: Callable[[io.BytesIO], object]) -> Picture:
    file = io.BytesIO()
    draw(file)
    return Picture(caption, file.getvalue())


def _episodes(groups: Sequence[Group]) -> list[Picture]:
    """The confusion at the last episode's end that was evaluated, of the first seed of each run with regions."""
    found = []
    for group in groups:
        last = last_evaluated_episode(group.runs[0].records)
        if not last:
            continue
        matrices = episode_matrices(last) | {"global model": last["student"]["confusion"]}
        caption = (
            f"{group.name}, seed {group.runs[0].seed}: the regions' models and the global one at the end of episode "
            f"{last['number']}; test samples of each class, in per cent"
        )
        found.append(_picture(caption, partial(confusion, matrices)))
    return found


def _partitions(groups: Sequence[Group]) -> tuple[list[Picture], list[str]]:
    """The data partition, once for each way of dividing; what cannot be drawn, in words."""
    pictures: list[Picture] = []
    notes: list[str] = []
    seen = set()
    for group in groups:
        run = group.runs[0]
        division = repr({name: run.settings.get(name) for name in sorted({"data", *DIVISION})})
        if division in seen:
            continue
        seen.add(division)
        if len(seen) > _PARTITIONS:
            notes.append(f"Of the partitions, the first {_PARTITIONS} are shown.")
            break
        try:
            federation = data_partition(run.path)
        except FedstillError as error:
            notes.append(f"The partition of {group.name} is not shown: {error}")
            continue
        caption = f"Training samples by client and class: {group.name}, seed {run.seed}"
        pictures.append(_picture(caption, partial(bubbles, federation)))
    return pictures, notes
