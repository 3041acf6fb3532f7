"""What `fedstill presets` and `fedstill reproduce` do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from rich.table import Table

from fedstill.analysis.preset_figures import draw
from fedstill.cli.commands import console, say
from fedstill.cli.pictures import show_progress
from fedstill.cli.progress import AllRuns
from fedstill.core.errors import SettingError
from fedstill.core.files import write_atomic, write_json
from fedstill.running.directory import without_nan
from fedstill.studies import presets as known
from fedstill.studies.cells import Cell, check, run_cells
from fedstill.studies.presets import Preset, Scale
from fedstill.studies.reproduce import Entry, Plan, entries, plans, seconds_needed


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


def reproduce(
    name: str,
    scale: str,
    *,
    seeds: int,
    data_dir: str | None,
    device: str | None,
    jobs: int,
    out: Path,
    dry_run: bool,
) -> None:
    given: dict[str, Any] = {key: value for key, value in (("data_dir", data_dir), ("device", device)) if value}
    found = plans(name, checked(scale), seeds, out / "cells", **given)
    cells = list({cell.path: cell for plan in found for cell in plan.cells}.values())
    todo = [cell for cell in cells if not cell.finished]
    console.print(
        f"{name}, {scale} scale, {seeds} seeds: {len(cells)} runs, {len(cells) - len(todo)} done", style="bold"
    )
    for plan in found:
        if scale == "cpu" and plan.preset.cpu:
            console.print(f"{plan.name} reduces: {plan.preset.cpu.reduces}", highlight=False)
    check(todo)
    if todo and not device:
        guess = duration(seconds_needed(todo))
        console.print(f"about {guess} for the clients' plain training; generators, teachers and tests come on top")
    if dry_run:
        return
    out.mkdir(parents=True, exist_ok=True)  # some presets have no runs that would have made it
    with AllRuns(console, cells) as display:
        run_cells(cells, jobs=jobs, watcher=display)
    for plan in found:
        numbers = entries(plan)
        for metric in dict.fromkeys(entry.metric for entry in numbers):
            console.print(table(plan, [e for e in numbers if e.metric == metric], seeds))
        stem = out / f"{plan.name.replace('/', '-')}-{scale}"
        write_json(stem.with_suffix(".json"), without_nan(saved(plan, numbers)))
        write_atomic(stem.with_suffix(".md"), markdown(plan, numbers, seeds))
        console.print(f"saved: {stem}.json, {stem}.md", highlight=False, soft_wrap=True)
        picture = stem.with_suffix(".png")
        if draw(plan, numbers, picture, show_progress):
            say(f"saved: {picture}")


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
        title=f"{plan.name}: {plan.title} · {metric}",
        caption=f"{_reading(numbers, seeds)}{_reduced(plan)}",
    )
    places = list(dict.fromkeys(_place(e) for e in numbers))
    shown.add_column("")
    for place in places:
        shown.add_column(place, justify="right")
    for row in dict.fromkeys(e.row for e in numbers):
        at = {_place(e): e for e in numbers if e.row == row}
        shown.add_row(row, *(cell(at[place]) if place in at else "" for place in places))
    return shown


def _reading(numbers: Sequence[Entry], seeds: int) -> str:
    """How to read a table's cells."""
    ours = f"ours, mean ± standard deviation of {seeds} seeds" if seeds > 1 else "ours, one seed"
    notes = [["difference"] * any(e.difference is not None for e in numbers)]
    notes += [["wins over FedAvg"] * any(e.wins is not None for e in numbers)]
    notes_text = ", ".join(word for words in notes for word in words)
    return f"paper → {ours}" + (f" ({notes_text})" if notes_text else "")


def _reduced(plan: Plan) -> str:
    return (
        f". Not at the paper's scale, but with {plan.preset.cpu.reduces}"
        if plan.scale == "cpu" and plan.preset.cpu
        else ""
    )


def cell(entry: Entry) -> str:
    """A number of the paper and ours, in the unit people read."""
    factor, digits = unit(entry.metric)
    paper = "–" if entry.paper is None else f"{'> ' * entry.paper_is_less}{factor * entry.paper:.{digits}f}"
    if entry.paper_std is not None:
        paper += f" ± {factor * entry.paper_std:.{digits}f}"
    if entry.ours is None:
        return f"{paper} → not in all"
    ours = f"{factor * entry.ours.mean:.{digits}f}"
    if not math.isnan(entry.ours.std):
        ours += f" ± {factor * entry.ours.std:.{digits}f}"
    notes = [] if entry.difference is None else [f"{factor * entry.difference:+.{digits}f}"]
    notes += [] if entry.wins is None else [f"{entry.wins}/{entry.ours.n}"]
    return f"{paper} → {ours}" + (f" ({', '.join(notes)})" if notes else "")


def unit(metric: str) -> tuple[float, int]:
    """What to multiply a number with for reading, and how many digits it then has."""
    if metric in ("rounds_to_target", "server_seconds", "taught"):
        return 1, 1
    return (1, 4) if metric == "FM" else (100, 2)


def _place(entry: Entry) -> str:
    return ", ".join(f"{key} {value}" for key, value in entry.at.items()) or "value"


def markdown(plan: Plan, numbers: Sequence[Entry], seeds: int) -> str:
    """The tables of a preset as text."""
    lines = [f"# {plan.name}: {plan.title}", "", f"{plan.scale} scale."]
    if plan.scale == "cpu" and plan.preset.cpu:
        lines += ["", f"Reduced: {plan.preset.cpu.reduces}."]
    for metric in dict.fromkeys(e.metric for e in numbers):
        chosen = [e for e in numbers if e.metric == metric]
        places = list(dict.fromkeys(_place(e) for e in chosen))
        lines += ["", f"## {metric}", "", f"{_reading(chosen, seeds)}.", ""]
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


def duration(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
