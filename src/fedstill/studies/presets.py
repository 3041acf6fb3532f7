"""Presets: a paper's table or figure as runs, and the paper's own numbers to hold them against."""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedstill.building.config import Config, resolve
from fedstill.core.errors import SettingError, explain, in_one_line, unknown
from fedstill.methods import registry

Scale = Literal["paper", "near", "cpu"]
# A paper's metric: the number of ours, and whether a larger one is better.
METRICS: dict[str, tuple[str, bool]] = {
    "AMP": ("final_amp", True),
    "FM": ("final_fm", False),
    "WLP": ("final_wlp", True),
    "top1": ("final_accuracy", True),
    "final_top1": ("final_accuracy", True),
    "global_top1": ("final_accuracy", True),
    "global_acc": ("final_accuracy", True),
    "best_top1": ("best_accuracy", True),
    "top1_at_round": ("accuracy_at_round", True),
    "local_acc": ("final_local_accuracy", True),
    "local_top1": ("final_local_accuracy", True),
    "rounds_to_target": ("rounds_to_target", False),
    "server_seconds": ("server_seconds", False),
    # Not the papers' words: how much accuracy changes between evaluations (standard deviation of the changes in the
    # second half), and
    # whether the regions' models taught a student at an aggregation of regions (1) or were averaged (0).
    "roughness": ("roughness", False),
    "taught": ("taught", False),
}
# What a preset has from the one it is like.
_PASSED_ON = ("match", "settings", "sweep", "row", "cpu")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class When(_Table):
    """Settings for some points of the sweep only."""

    at: dict[str, Any]
    settings: dict[str, Any]


class PresetRow(_Table):
    """One row of a table, or one line of a figure."""

    name: str  # as the paper prints it
    method: str = ""
    # Which of the run's models, such as "without T1"; empty: the model. Of a run with regions also "region 1 before",
    # "region 1 after" and "student": at the last aggregation of regions that a round followed.
    model: str = ""
    match: dict[str, Any] = Field(default_factory=dict)  # what its numbers have there, where not its name
    settings: dict[str, Any] = Field(default_factory=dict)
    when: list[When] = Field(default_factory=list)


class Reduction(_Table):
    """What another scale changes."""

    reduces: str
    settings: dict[str, Any] = Field(default_factory=dict)
    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    row: list[PresetRow] = Field(default_factory=list)  # further settings of rows, by name
    leave_out: list[str] = Field(default_factory=list)  # rows


class Preset(_Table):
    """A table or figure of a paper."""

    title: str
    like: str = ""  # another preset: its match, settings, sweep, rows and cpu hold where nothing else is said
    rows: list[str] = Field(default_factory=list)  # those it has, of its own and of the other's; empty: all
    shows: Literal["table", "curves", "bars", "bubbles", "confusion", "tsne", "landscape", "distance", "toy"] = "table"
    numbers: str = ""  # the table of paper_numbers.json; empty: the paper prints none
    match: dict[str, Any] = Field(default_factory=dict)  # what its rows have in common there
    keys: dict[str, str] = Field(default_factory=dict)  # a swept setting's name there, where it is another
    metrics: list[str] = Field(default_factory=list)
    targets: list[float] = Field(default_factory=list)  # accuracies in percent, for rounds_to_target
    relative_targets: list[float] = Field(default_factory=list)  # the same in percent of the run's own best accuracy
    at_rounds: list[int] = Field(default_factory=list)  # for top1_at_round
    settings: dict[str, Any] = Field(default_factory=dict)
    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    row: list[PresetRow] = Field(default_factory=list)
    parts: list[str] = Field(default_factory=list)  # presets that this one consists of
    reteach: bool = False  # the sweep is over the last episode's saved teachers of one run
    teachers: dict[str, Any] = Field(default_factory=dict)  # the method's settings in that run
    near: Reduction | None = None  # as near to the paper as two cores can bear; not passed on to presets like this
    cpu: Reduction | None = None

    def reduction(self, scale: Scale) -> Reduction | None:
        """What a scale changes; None: nothing, or there is no such scale of this preset."""
        return {"paper": None, "near": self.near, "cpu": self.cpu}[scale]


class Point(BaseModel):
    """One run of a preset, but for its seed."""

    model_config = ConfigDict(frozen=True)

    row: str
    model: str
    at: dict[str, Any]  # where in the sweep
    config: Config


def names() -> list[str]:
    """Every preset there is, as paper/name."""
    folders = [f for f in files("fedstill.presets").iterdir() if f.is_dir() and not f.name.startswith("_")]
    found = [
        f"{d.name}/{f.name.removesuffix('.toml')}" for d in folders for f in d.iterdir() if f.name.endswith(".toml")
    ]
    return sorted(found)


@cache
def load(name: str) -> Preset:
    """A preset by name."""
    if name not in names():
        raise unknown("preset", name, names())
    return parsed(name, files("fedstill.presets").joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def parsed(name: str, text: str) -> Preset:
    """The preset that a file holds."""
    try:
        return Preset.model_validate(_whole(tomllib.loads(text)))
    except ValidationError as error:
        raise SettingError(f"preset {name}: {explain(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SettingError(f"preset {name} is damaged: {in_one_line(error)}") from error


def _read(name: str) -> dict[str, Any]:
    if name not in names():
        raise unknown("preset", name, names())
    return _whole(tomllib.loads(files("fedstill.presets").joinpath(f"{name}.toml").read_text(encoding="utf-8")))


def _whole(own: dict[str, Any]) -> dict[str, Any]:
    """A preset's file, with what it has from the one it is like."""
    base = {key: value for key, value in (_read(own["like"]) if "like" in own else {}).items() if key in _PASSED_ON}
    if "sweep" in own and "cpu" in base:  # which was a part of the other sweep
        base["cpu"] = {key: value for key, value in base["cpu"].items() if key != "sweep"}
    found = _over(base, own)
    if "cpu" in found:
        found["cpu"] = _over(base.get("cpu", {}), own.get("cpu", {}))
    if "rows" in own:
        found["row"] = _chosen(found["row"], own["rows"])
        reduced = found.get("cpu", {}).get("row", [])
        reduced[:] = [row for row in reduced if row["name"] in own["rows"]]
    return found


def _over(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Settings are merged, those of rows of the same name too; of anything else, it is `own` that counts."""
    rows = {row["name"]: row for row in base.get("row", [])}
    for row in own.get("row", []):
        before = rows.get(row["name"], {})
        rows[row["name"]] = before | row | {"settings": before.get("settings", {}) | row.get("settings", {})}
    tables = {key: base.get(key, {}) | own.get(key, {}) for key in ("match", "settings") if key in base or key in own}
    return base | own | tables | {"row": list(rows.values())}


def _chosen(rows: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    by_name = {row["name"]: row for row in rows}
    for name in names:
        if name not in by_name:
            raise unknown("row", name, by_name)
    return [by_name[name] for name in names]


def points(preset: Preset, scale: Scale, **given: Any) -> list[Point]:
    """Every run of a preset at a scale, in the order of its rows and sweep; `given` wins over its settings."""
    less = preset.reduction(scale)
    if less is None and scale != "paper":
        having = ", ".join(name for name in names() if load(name).reduction(scale))
        raise SettingError(f"there is no {scale} scale of this preset; presets that have one: {having}")
    less = less or Reduction(reduces="")
    sweep = preset.sweep | less.sweep
    further = {row.name: row for row in less.row}
    found = []
    for row in preset.row:
        if row.name in less.leave_out:
            continue
        more = further.get(row.name, PresetRow(name=row.name))
        method = more.method or row.method
        for values in itertools.product(*sweep.values()):
            at = dict(zip(sweep, values, strict=True))
            layers: list[Mapping[str, Any]] = [preset.settings, less.settings, row.settings, more.settings, at]
            layers += [when.settings for when in (*row.when, *more.when) if when.at.items() <= at.items()]
            found.append(Point(row=row.name, model=row.model, at=at, config=resolved(method, [*layers, given])))
    return found


def resolved(method: str, layers: list[Mapping[str, Any]]) -> Config:
    """A name that both the run and the method have is the method's where the preset writes it as hyper.name."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if key == "hyper":
                merged["hyper"] = merged.get("hyper", {}) | value
            else:
                merged[key] = value
    own = {p.name for p in registry.hyper_parameters(method)} | registry.old_names(method).keys()
    foreign = [k for k in merged if k not in Config.model_fields and k not in own]
    for key in foreign:  # a swept setting of another row's method
        del merged[key]
    return resolve({"method": method, **merged})


@cache
def paper_numbers() -> dict[str, Any]:
    """Every number that the papers print, by paper and table."""
    found: dict[str, Any] = json.loads(files("fedstill.presets").joinpath("paper_numbers.json").read_text("utf-8"))
    return found


def paper_number(name: str, preset: Preset, row: str, metric: str, at: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the paper prints for a row and a point of the sweep: `value` and `std`, in our units; None: nothing.

    Where it is `censored`, the paper only says that it is more than `value`.
    """
    if not preset.numbers:
        return None
    rows = paper_numbers()[name.partition("/")[0]][preset.numbers]["rows"]
    own = next((r.match for r in preset.row if r.name == row), {})
    there = {preset.keys.get(k, k): v for k, v in at.items()}
    wanted = {"method": row, "metric": metric, **preset.match, **own, **there}
    for number in rows:
        if all(_printed(number[key]) == value for key, value in wanted.items() if key in number):
            factor = {"%": 0.01}.get(number["unit"], 1.0) * number.get("scale", 1.0)
            std = number["std"]
            value, std = factor * number["value"], None if std is None else factor * std
            return {"value": value, "std": std, "censored": bool(number.get("censored"))}
    return None


def _printed(value: Any) -> Any:
    """A fraction such as 1/6 as the number it is."""
    return float(Fraction(value)) if isinstance(value, str) and value.replace("/", "").isdecimal() else value
