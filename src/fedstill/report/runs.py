"""Runs as their directories hold them: what figures and pages are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.metrics.records import RoundRecord, Summary

Settings = Mapping[str, Any]
HYPER = "hyper."  # before the name of a method's own setting
_LONGEST = 24  # characters of a value in a name


@dataclass(frozen=True)
class RunData:
    """What a run directory holds; `summary` is None while the run is under way."""

    path: Path
    settings: Settings  # as in config.toml, tables flattened: "hyper.mu"
    records: Sequence[RoundRecord]
    summary: Summary | None = None
    clients: Sequence[tuple[int, float]] = ()  # test samples and accuracy of each client that has any
    config: str = ""  # the text of config.toml
    client_names: Sequence[str] = ()  # of those in `clients`

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
    runs: tuple[RunData, ...]

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
    for name, setting in settings.items():
        found |= {f"{name}.{k}": v for k, v in setting.items()} if isinstance(setting, Mapping) else {name: setting}
    return found


def short(setting: str) -> str:
    """A setting's name without the table that it is in."""
    return setting.removeprefix(HYPER)


def value(setting: Any) -> str:
    """A setting's value, short enough for a legend."""
    text = f"{setting:g}" if isinstance(setting, float) else str(setting)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
