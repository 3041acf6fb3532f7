"""What `fedstill presets` and `fedstill reproduce` do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from rich.table import Table

from fedstill.cli import pictures
from fedstill.cli.commands import console
from fedstill.cli.progress import AllRuns
from fedstill.core.errors import SettingError
from fedstill.core.files import write_atomic, write_json
from fedstill.experiment import presets as known
from fedstill.experiment.cells import Cell, carry_out
from fedstill.experiment.presets import METRICS, Preset, Scale
from fedstill.experiment.reproduce import Entry, Plan, entries, plans, seconds_needed
from fedstill.experiment.rundir import without_nan


def presets(name: str | None, scale: str) -> None:
    if name:
        _show(name, known.load(name), checked(scale))
        return
    listing = Table(title="Presets", caption="'fedstill presets NAME' shows one, 'fedstill reproduce NAME' runs it")
    for column in ("name", "what it shows", "as", "runs a seed", "at the cpu scale"):
        listing.add_column(column, justify="right" if column == "runs a seed" else "left", overflow="fold")
    for each in known.names():
        preset = known.load(each)
        runs = sum(len(plan.cells) for plan in plans(each, "paper", 1, Path()))
        listing.add_row(each, preset.title, preset.shows, str(runs), preset.cpu.reduces if preset.cpu else "")
    console.print(listing)


def reproduce(name: str, scale: str, *, seeds: int, data_dir: str | None, jobs: int, out: Path, dry_run: bool) -> None:
    given: dict[str, Any] = {"data_dir": data_dir} if data_dir else {}
    found = plans(name, checked(scale), seeds, out / "cells", **given)
    cells = list({cell.path: cell for plan in found for cell in plan.cells}.values())
    todo = [cell for cell in cells if not cell.finished]
    console.print(
        f"{name}, {scale} scale, {seeds} seeds: {len(cells)} runs, {len(cells) - len(todo)} done", style="bold"
    )
    for plan in found:
        if scale == "cpu" and plan.preset.cpu:
            console.print(f"{plan.name} reduces: {plan.preset.cpu.reduces}", highlight=False)
    if todo:
        guess = _duration(seconds_needed(todo))
        console.print(f"about {guess} for the clients' plain training; generators, teachers and tests come on top")
    if dry_run:
        return
    with AllRuns(console, cells) as display:
        carry_out(cells, jobs=jobs, watcher=display)
    for plan in found:
        numbers = entries(plan)
        for metric in dict.fromkeys(entry.metric for entry in numbers):
            console.print(table(plan, [e for e in numbers if e.metric == metric], seeds))
        stem = out / f"{plan.name.replace('/', '-')}-{scale}"
        write_json(stem.with_suffix(".json"), without_nan(saved(plan, numbers)))
        write_atomic(stem.with_suffix(".md"), markdown(plan, numbers, seeds))
        console.print(f"saved: {stem}.json, {stem}.md", highlight=False, soft_wrap=True)
        draw(plan, stem.with_suffix(".png"))


def draw(plan: Plan, out: Path) -> None:
    """A preset's figure, where it is one of runs alone; else how to draw it."""
    paths, shows, title = [cell.path for cell in plan.cells], plan.preset.shows, f"{plan.name}: {plan.preset.title}"
    if shows == "curves":
        pictures.curves(paths, ["accuracy", "fm"], "std", out, title)
    elif shows == "bars" and plan.preset.sweep:
        pictures.bars(paths, next(iter(plan.preset.sweep)), "accuracy", "final", out, title)
    elif shows != "table":
        words = " ".join(["fedstill figure", shows, *map(str, paths[:1]), *(["…"] if len(paths) > 1 else [])])
        console.print(f"to draw it: {words}", highlight=False, soft_wrap=True)


def checked(scale: str) -> Scale:
    if scale not in get_args(Scale):
        raise SettingError(f"--scale {scale}: it is paper or cpu")
    return "cpu" if scale == "cpu" else "paper"


def _show(name: str, preset: Preset, scale: Scale) -> None:
    console.print(f"{name}: {preset.title}", style="bold")
    for plan in plans(name, scale, 1, Path()):
        shown = Table(title=plan.name)
        sweep = list(dict.fromkeys(key for point, _ in plan.runs for key in point.at))
        for column in ("row", "method", *sweep, "data", "model", "clients", "rounds", "own settings"):
            shown.add_column(column, overflow="fold")
        for point, _ in plan.runs:
            c = point.config
            own = " ".join(f"{key}={value}" for key, value in c.hyper.items())
            shown.add_row(
                point.row, c.method, *(str(point.at.get(key, "")) for key in sweep), c.data, c.model,
                str(c.clients), str(c.rounds), own,
            )  # fmt: skip
        console.print(shown)


def table(plan: Plan, numbers: Sequence[Entry], seeds: int) -> Table:
    """One metric of a preset: rows by points, the paper's number and ours."""
    metric = numbers[0].metric
    shown = Table(
        title=f"{plan.name}: {plan.preset.title} · {metric}",
        caption=f"paper → ours, mean ± standard deviation of {seeds} seeds (difference, wins over FedAvg)",
    )
    places = list(dict.fromkeys(_place(e) for e in numbers))
    shown.add_column("")
    for place in places:
        shown.add_column(place, justify="right")
    for row in dict.fromkeys(e.row for e in numbers):
        at = {_place(e): e for e in numbers if e.row == row}
        shown.add_row(row, *(cell(at[place]) if place in at else "" for place in places))
    return shown


def cell(entry: Entry) -> str:
    """A number of the paper and ours, in the unit people read."""
    factor, digits = _unit(entry.metric)
    paper = "–" if entry.paper is None else f"{factor * entry.paper:.{digits}f}"
    if entry.ours is None:
        return f"{paper} → not in all"
    ours = f"{factor * entry.ours.mean:.{digits}f}"
    if not math.isnan(entry.ours.std):
        ours += f" ± {factor * entry.ours.std:.{digits}f}"
    notes = [] if entry.difference is None else [f"{factor * entry.difference:+.{digits}f}"]
    notes += [] if entry.wins is None else [f"{entry.wins}/{entry.ours.n}"]
    return f"{paper} → {ours}" + (f" ({', '.join(notes)})" if notes else "")


def _unit(metric: str) -> tuple[float, int]:
    if METRICS[metric][0] in ("rounds_to_target", "server_seconds"):
        return 1, 1
    return (1, 4) if metric == "FM" else (100, 2)


def _place(entry: Entry) -> str:
    return ", ".join(f"{key} {value}" for key, value in entry.at.items()) or "value"


def markdown(plan: Plan, numbers: Sequence[Entry], seeds: int) -> str:
    """The tables of a preset as text."""
    lines = [f"# {plan.name}: {plan.preset.title}", "", f"{plan.scale} scale, {seeds} seeds."]
    if plan.scale == "cpu" and plan.preset.cpu:
        lines += ["", f"Reduced: {plan.preset.cpu.reduces}."]
    for metric in dict.fromkeys(e.metric for e in numbers):
        chosen = [e for e in numbers if e.metric == metric]
        places = list(dict.fromkeys(_place(e) for e in chosen))
        lines += ["", f"## {metric}", "", "paper → ours (difference, wins over FedAvg)", ""]
        lines += ["| | " + " | ".join(places) + " |", "|---" * (len(places) + 1) + "|"]
        for row in dict.fromkeys(e.row for e in chosen):
            at = {_place(e): e for e in chosen if e.row == row}
            lines.append(f"| {row} | " + " | ".join(cell(at[p]) if p in at else "" for p in places) + " |")
    return "\n".join(lines) + "\n"


def saved(plan: Plan, numbers: Sequence[Entry]) -> dict[str, Any]:
    """Everything about the tables, as data."""
    return {
        "preset": plan.name,
        "scale": plan.scale,
        "reduces": plan.preset.cpu.reduces if plan.scale == "cpu" and plan.preset.cpu else "",
        "entries": [asdict(entry) | {"difference": entry.difference} for entry in numbers],
        "runs": [_run(cell) for cell in plan.cells],
    }


def _run(cell: Cell) -> dict[str, Any]:
    return {"path": str(cell.path), "method": cell.config.method, "seed": cell.config.seed}


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
