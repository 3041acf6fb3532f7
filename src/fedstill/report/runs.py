"""Runs as their directories tell them, and which of them are repetitions of one another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
Settings = Mapping[str, Any]
HYPER = "hyper."  # before the name of a method's own setting
_LONGEST = 24  # characters of a value in a name


@dataclass(frozen=True)
class Run:
    """What a run directory holds; `summary` is None while the run is under way."""

    path: Path
    settings: Settings  # as in config.toml, tables flattened: "hyper.mu"
    records: Sequence[Record]
    summary: Record | None = None
    clients: Sequence[tuple[int, float]] = ()  # test samples and accuracy of each client that has any
    config: str = ""  # the text of config.toml

    @property
    def method(self) -> str:
        return str(self.settings["method"])

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone."""

    name: str
    runs: tuple[Run, ...]

    @property
    def settings(self) -> Settings:
        return self.runs[0].settings

    @property
    def title(self) -> str:
        """The name, and of how many seeds."""
        return self.name if len(self.runs) == 1 else f"{self.name} ({len(self.runs)} seeds)"


def flat(settings: Settings) -> dict[str, Any]:
    """Settings with those of tables beside the others.

    >>> flat({"alpha": 1, "hyper": {"mu": 0.1}})
    {'alpha': 1, 'hyper.mu': 0.1}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return found


def grouped(runs: Sequence[Run], *, free: Collection[str] = ()) -> list[Group]:
    """The runs in groups, each named by its method and whatever else tells it from the others.

    `free` are settings that do not change what is computed. A run whose seed its group has already begins another.
    """
    groups: list[list[Run]] = []
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


def alike(run: Run, other: Run, *, but: Collection[str] = ()) -> bool:
    """Whether two runs have the same settings but for these."""
    ours, theirs = ({k: v for k, v in r.settings.items() if k not in but} for r in (run, other))
    return ours == theirs


def varying(runs: Sequence[Run], *, but: Collection[str] = ()) -> list[str]:
    """The settings in which runs differ, a method's own among the runs of that method."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in but)
    return [name for name in names if _differ(runs, name)]


def _differ(runs: Sequence[Run], name: str) -> bool:
    alike = {run.method for run in runs} if name.startswith(HYPER) else {""}
    return any(
        len({repr(run.settings.get(name)) for run in runs if method in ("", run.method)}) > 1 for method in alike
    )


def distinct_names(runs: Sequence[Run], *, but: Collection[str] = ()) -> list[str]:
    """A name for each run: its method and the settings that differ, with its directory if that is not enough."""
    shown = [name for name in varying(runs, but=but) if name != "method"]
    names = [
        ", ".join([run.method, *(f"{short(n)} {value(run.settings[n])}" for n in shown if n in run.settings)])
        for run in runs
    ]
    alike = {name for name in names if names.count(name) > 1}
    return [f"{name} [{run.path.name}]" if name in alike else name for name, run in zip(names, runs, strict=True)]


def short(setting: str) -> str:
    return setting.removeprefix(HYPER)


def value(setting: Any) -> str:
    """A setting's value, short enough for a legend."""
    text = f"{setting:g}" if isinstance(setting, float) else str(setting)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def look_up(record: Record, metric: str) -> float | None:
    """A number of a record; dots lead into it, as in `also.without T1.accuracy`.

    >>> look_up({"server": {"loss": 0.5}}, "server.loss")
    0.5
    """
    found: Any = record
    for part in metric.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None
