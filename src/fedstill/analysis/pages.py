"""The page about runs, with the charts that belong to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedstill.analysis.figures import client_accuracies, data_partition, episode_matrices
from fedstill.analysis.runs import alike, group_runs, last_evaluated_episode, read_runs
from fedstill.building.config import DIVISION, IRRELEVANT
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.files import write_atomic
from fedstill.report.charts import Chart, bubble_data, client_data, confusion_data, curve_data
from fedstill.report.page import Pair, page
from fedstill.report.runs import HYPER, Group

_PARTITIONS = 4  # that a page shows


def write_page(directories: Sequence[Path], out: Path, title: str = "", baseline: str = "") -> None:
    """One HTML page about the finished runs in these directories: results, charts, settings.

    The others are compared with the first method, or with `baseline`.
    """
    runs = read_runs(directories)
    groups = group_runs([run for run in runs if run.summary])
    notes = [f"Not finished, and left out: {run.path}" for run in runs if not run.summary]
    if not groups:
        raise SettingError(f"no run is finished: continue one with 'fedstill resume {runs[0].path}'")
    if baseline:
        methods = dict.fromkeys(group.runs[0].method for group in groups)
        if baseline not in methods:
            raise SettingError(f"--baseline {baseline}: there is no run of it; there are {', '.join(methods)}")
        groups.sort(key=lambda group: group.runs[0].method != baseline)
    charts = [Chart("curves", "Numbers by round: a line is the mean over seeds, a band ± one standard deviation",
                    curve_data(groups))]  # fmt: skip
    if served := client_accuracies(groups):
        caption = (
            "Each client's accuracy under the final model, from the worst served to the best; dotted: AMP, all "
            "clients' tests pooled; bands: the range over seeds"
        )
        charts.append(Chart("clients", caption, client_data(served)))
    partitions = _partitions(groups)
    charts += _episodes(groups, partitions.classes) + partitions.charts
    made = page(
        groups,
        charts,
        title=title or "fedstill report",
        notes=notes + partitions.notes,
        pairs=with_baselines(groups),
        classes=partitions.classes,
    )
    write_atomic(out, made)


def with_baselines(groups: Sequence[Group]) -> list[Pair]:
    """Each group with the first that has the same settings but for the method and what is the method's own."""
    pairs = []
    for i, group in enumerate(groups):
        own = {name for g in groups for name in g.settings if name.startswith(HYPER)}
        but = {"seed", "method", *IRRELEVANT, *own}
        first = next((g for g in groups[:i] if alike(g.runs[0], group.runs[0], but=but)), None)
        if first and {run.seed for run in first.runs} & {run.seed for run in group.runs}:
            pairs.append((group, first))
    return pairs


def _episodes(groups: Sequence[Group], classes: dict[str, tuple[str, ...]]) -> list[Chart]:
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
        found.append(Chart("confusion", caption, confusion_data(matrices, classes.get(group.name, ()))))
    return found


@dataclass
class _Partitions:
    """The data partitions of a page, the names of the classes by group, and in words what cannot be shown."""

    charts: list[Chart] = field(default_factory=list)
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _partitions(groups: Sequence[Group]) -> _Partitions:
    """The data partition, once for each way of dividing."""
    found = _Partitions()
    drawn: set[str] = set()
    classes: dict[str, tuple[str, ...]] = {}  # by data
    for group in groups:
        run = group.runs[0]
        data, division = str(run.settings["data"]), repr([run.settings.get(n) for n in sorted({"data", *DIVISION})])
        if division not in drawn and len(drawn) < _PARTITIONS:
            drawn.add(division)
            try:
                federation = data_partition(run.path)
            except FedstillError as error:
                found.notes.append(f"The partition of {group.name} is not shown: {error}")
            else:
                classes[data] = federation.dataset.classes
                caption = f"Training samples by client and class: {group.name}, seed {run.seed}"
                found.charts.append(Chart("bubbles", caption, bubble_data(federation)))
        elif division not in drawn and len(found.charts) == _PARTITIONS:
            found.notes.append(f"Of the partitions, the first {_PARTITIONS} are shown.")
            drawn.add(division)
        if data in classes:
            found.classes[group.name] = classes[data]
    found.notes = list(dict.fromkeys(found.notes))
    return found
