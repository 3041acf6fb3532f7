"""What `fedstill presets` and `fedstill reproduce` do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from fedstill.analysis import listings
from fedstill.analysis.preset_figures import draw
from fedstill.analysis.reproducing import cells_of, checked, markdown, run_plans, saved
from fedstill.cli.commands import console, print_tables, say
from fedstill.cli.pictures import show_progress
from fedstill.core.choices import Format
from fedstill.core.files import write_atomic, write_json
from fedstill.running.directory import without_nan
from fedstill.studies import presets as known
from fedstill.studies.cells import check
from fedstill.studies.presets import Preset, Scale
from fedstill.studies.reproduce import plans, seconds_needed


def presets(name: str | None, scale: str, as_: Format) -> None:
    if name:
        _show(name, known.load(name), checked(scale))
        return
    print_tables([listings.list_presets()], as_)


def reproduce(
    name: str,
    scale: str,
    *,
    seeds: int,
    data_dir: str | None,
    device: str | None,
    engine: str | None = None,
    jobs: int,
    out: Path,
    dry_run: bool,
    as_: Format = "table",
) -> None:
    settings = {"data_dir": data_dir, "device": device, "engine": engine}
    given: dict[str, Any] = {key: value for key, value in settings.items() if value}
    found = plans(name, checked(scale), seeds, out / "cells", **given)
    cells = cells_of(found)
    todo = [cell for cell in cells if not cell.finished]
    shown = as_ == "table"
    if shown:
        done = len(cells) - len(todo)
        console.print(f"{name}, {scale} scale, {seeds} seeds: {len(cells)} runs, {done} done", style="bold")
    for plan in found if shown else ():
        if plan.reduction:
            console.print(f"{plan.name} reduces: {plan.reduction.reduces}", highlight=False)
    check(todo)
    if todo and not device and shown:
        guess = duration(seconds_needed(todo))
        console.print(f"about {guess} for the clients' plain training; generators, teachers and tests come on top")
    if dry_run:
        return
    out.mkdir(parents=True, exist_ok=True)  # some presets have no runs that would have made it
    result = run_plans(name, found, seeds, jobs, console if shown else None)
    print_tables(result.tables(), as_)
    for plan, numbers in result.parts:
        stem = out / f"{plan.name.replace('/', '-')}-{scale}"
        write_json(stem.with_suffix(".json"), without_nan(saved(plan, numbers)))
        write_atomic(stem.with_suffix(".md"), markdown(plan, numbers, seeds))
        if shown:
            say(f"saved: {stem}.json, {stem}.md")
        picture = stem.with_suffix(".png")
        if draw(plan, numbers, picture, show_progress) and shown:
            say(f"saved: {picture}")


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
                point.row, c.method, *(str(point.at.get(key, "")) for key in sweep), c.data, c.network_names,
                str(c.clients), str(c.rounds), own,
            )  # fmt: skip
        console.print(shown)


def duration(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
