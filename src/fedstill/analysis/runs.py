"""Runs read from their directories, and which of them are repetitions of one another.

>>> groups = group_runs(read_runs([Path("runs")]))  # doctest: +SKIP
>>> [(group.title, group.runs[0].summary) for group in groups]  # doctest: +SKIP
"""

from __future__ import annotations

import csv
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from fedstill.building.config import Config, read_toml
from fedstill.building.schema import IRRELEVANT
from fedstill.core.errors import DataError, SettingError
from fedstill.core.files import read_json
from fedstill.metrics.records import EpisodeRecord, RoundRecord
from fedstill.report.runs import HYPER, Group, RunData, flat, short, value
from fedstill.running import files
from fedstill.running.directory import RunDirectory
from fedstill.running.places import stopped_by


def read_runs(directories: Iterable[Path]) -> list[RunData]:
    """The runs in these directories and in folders of them, each once, in the order in which they were given."""
    paths: list[Path] = []
    for directory in directories:
        inside = find_runs(directory)
        if not inside:
            raise SettingError(f"{directory} is not a run directory and holds none: there is no config.toml")
        paths += inside
    return [read_run(path) for path in dict.fromkeys(path.resolve() for path in paths)]


def find_runs(directory: Path) -> list[Path]:
    """The run directories in a folder, at any depth: those of a comparison in its order, others by name.

    A run directory is not searched, and links are not followed.
    """
    found: list[Path] = []
    for folder, below, inside in os.walk(directory):
        if files.CONFIG in inside:
            found.append(Path(folder))
            below.clear()
        else:
            order = _compared(Path(folder)) if files.COMPARISON in inside else {}
            below.sort(key=lambda name: (order.get(name, len(order)), name))
    return found


def _compared(folder: Path) -> dict[str, int]:
    """The place of each run of a comparison, by the name of its directory; the baseline has the first."""
    try:
        rows = read_json(folder / files.COMPARISON)
        names = [Path(path).name for row in rows for path in row["runs"]]
    except (DataError, OSError, TypeError, KeyError):
        return {}  # whatever it is, the runs are there
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def read_run(path: Path) -> RunData:
    """One run directory; a run that is not finished has neither summary nor clients' accuracies."""
    directory = RunDirectory.open(path, lock=False)
    records, text = directory.records(), (path / files.CONFIG).read_text()
    # A setting that is younger than the run had what is now its default.
    settings = flat(Config.model_validate({}).model_dump() | read_toml(path / files.CONFIG))
    done = records[-1]["round"] if records else 0
    ended = (path / files.SUMMARY).is_file() and (done == settings["rounds"] or bool(stopped_by(path)))
    clients, names = _accuracies(path / files.CLIENTS) if ended else ([], [])
    return RunData(
        path,
        settings,
        records,
        read_json(path / files.SUMMARY) if ended else None,
        clients,
        text,
        tuple(names),
    )


def _accuracies(file: Path) -> tuple[list[tuple[int, float]], list[str]]:
    """Test samples and accuracy of each client that has any, and their names."""
    try:
        with file.open(newline="") as rows:
            tested = [row for row in csv.DictReader(rows) if row["accuracy"]]
        return [(int(r["test_samples"]), float(r["accuracy"])) for r in tested], [r["client"] for r in tested]
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise DataError(f"{file} is damaged: {error}") from error


def group_runs(runs: Sequence[RunData], *, free: Collection[str] = IRRELEVANT) -> list[Group]:
    """The runs in groups, each named by its method and whatever else tells it from the others.

    `free` are settings that do not divide a group, by default those that do not change what is computed. A run whose
    seed its group has already begins another.
    """
    groups: list[list[RunData]] = []
    but = {"seed", *free}
    for run in runs:
        for group in groups:
            if alike(group[0], run, but=but) and run.seed not in [r.seed for r in group]:
                group.append(run)
                break
        else:
            groups.append([run])
    names = distinct_names([group[0] for group in groups], but=but)
    return [Group(name, tuple(sorted(group, key=lambda r: r.seed))) for name, group in zip(names, groups, strict=True)]


def alike(run: RunData, other: RunData, *, but: Collection[str] = ()) -> bool:
    """Whether two runs have the same settings but for these."""
    ours, theirs = ({k: v for k, v in r.settings.items() if k not in but} for r in (run, other))
    return ours == theirs


def varying(runs: Sequence[RunData], *, but: Collection[str] = ()) -> list[str]:
    """The settings in which runs differ, a method's own among the runs of that method."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in but)
    return [name for name in names if _differ(runs, name)]


def _differ(runs: Sequence[RunData], name: str) -> bool:
    alike = {run.method for run in runs} if name.startswith(HYPER) else {""}
    return any(
        len({repr(run.settings.get(name)) for run in runs if method in ("", run.method)}) > 1 for method in alike
    )


def distinct_names(runs: Sequence[RunData], *, but: Collection[str] = ()) -> list[str]:
    """A name for each run: its method and the settings that differ, with its directory if that is not enough."""
    shown = [name for name in varying(runs, but=but) if name != "method"]
    names = [
        ", ".join([run.method, *(f"{short(n)} {value(run.settings[n])}" for n in shown if n in run.settings)])
        for run in runs
    ]
    alike = {name for name in names if names.count(name) > 1}
    return [f"{name} [{run.path.name}]" if name in alike else name for name, run in zip(names, runs, strict=True)]


def finished(groups: Sequence[Group]) -> Sequence[Group]:
    """The same groups, if every run in them is finished."""
    for run in (run for group in groups for run in group.runs):
        if run.summary is None:
            raise SettingError(f"{run.path} is not finished; continue it with 'fedstill resume {run.path}'")
    return groups


def in_common(groups: Sequence[Group]) -> str:
    """What all runs have in common that a reader must know: data, clients, partition and network."""
    first = groups[0].settings
    words = {
        "data": Path(str(first["data"])).name,
        "clients": f"{first['clients']} clients" if first["clients"] else "",
        "partition": str(first["partition"]),
        "alpha": f"alpha {value(first['alpha'])}" if str(first["partition"]).startswith("dir") else "",
        "model": Path(str(first["model"])).name,
    }
    return ", ".join(
        text for name, text in words.items() if text and all(group.settings[name] == first[name] for group in groups)
    )


def last_evaluated_episode(records: Sequence[RoundRecord]) -> EpisodeRecord | None:
    """The end of the last episode that was evaluated, of a run with regions; None if there is none."""
    evaluated = [r["episode"] for r in records if "student" in r.get("episode", {})]
    return evaluated[-1] if evaluated and "teachers" in evaluated[-1] else None
