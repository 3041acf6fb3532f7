"""A paper's table or figure run again: the paper's numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from fedstill.core.errors import SettingError
from fedstill.core.table import Table, frame
from fedstill.running.progress import in_notebook
from fedstill.studies.cells import Cell, Watcher, check, run_cells
from fedstill.studies.presets import Scale
from fedstill.studies.progress import AllRuns
from fedstill.studies.reproduce import Entry, Plan, entries, plans


@dataclass(frozen=True)
class Reproduction:
    """A preset's numbers, the paper's and ours: a table for each of its parts and metrics."""

    name: str
    seeds: int
    parts: tuple[tuple[Plan, list[Entry]], ...]

    def __repr__(self) -> str:
        return (
            f"<fedstill.Reproduction of {self.name}: {self.seeds} seeds, {sum(len(n) for _, n in self.parts)} numbers>"
        )

    def tables(self) -> list[Table]:
        """Rows by points, the paper's number and ours."""
        return [
            table(plan, [e for e in numbers if e.metric == metric], self.seeds)
            for plan, numbers in self.parts
            for metric in dict.fromkeys(entry.metric for entry in numbers)
        ]

    def frame(self) -> Any:
        """A row for each number: a pandas DataFrame, or without pandas a dict of NumPy arrays."""
        return frame([row for each in self.tables() for row in each.values])

    def to_markdown(self) -> str:
        """The tables in Markdown, each with what it shows and what was reduced."""
        return "\n".join(markdown(plan, numbers, self.seeds) for plan, numbers in self.parts)

    def to_latex(self) -> str:
        r"""The tables in LaTeX, for \usepackage{booktabs}."""
        return "\n".join(f"% {each.title}\n{each.to_latex()}" for each in self.tables())

    def to_csv(self) -> str:
        """What `frame` has, as CSV."""
        return Table("", (), values=[row for each in self.tables() for row in each.values]).to_csv()

    def _repr_html_(self) -> str:
        return "".join(each._repr_html_() for each in self.tables())


def reproduce(
    name: str,
    *,
    scale: str = "paper",
    seeds: int = 3,
    out: str | Path = "runs/reproduced",
    jobs: int = 0,
    data_dir: str | None = None,
    device: str | None = None,
    engine: str | None = None,
    progress: bool | None = None,
) -> Reproduction:
    """Run a paper's table or figure again. `list_presets()` lists those that there are.

    Args:
        name: Such as "fedkf/table5".
        scale: "paper"; "cpu": what two cores can do in minutes; "near", where there is one: in hours.
        seeds: How many, from 0 on.
        out: A folder for the runs, in which finished ones are used again, also by other presets.
        jobs: Runs at a time; 0 is one a core.
        data_dir: Where dataset files are; by default $FEDSTILL_DATA.
        device: Where it trains: "cpu", "cuda" and so on.
        engine: "ray" spreads the runs over the cluster that RAY_ADDRESS names.
        progress: Show how the runs go on; by default in a notebook.
    """
    settings = {"data_dir": data_dir, "device": device, "engine": engine}
    given: dict[str, Any] = {key: value for key, value in settings.items() if value}
    found = plans(name, checked(scale), seeds, Path(out) / "cells", **given)
    cells = cells_of(found)
    check([cell for cell in cells if not cell.finished])
    return run_plans(name, found, seeds, jobs, Console() if (in_notebook() if progress is None else progress) else None)


def cells_of(found: Sequence[Plan]) -> list[Cell]:
    """Each run once."""
    return list({cell.path: cell for plan in found for cell in plan.cells}.values())


def run_plans(name: str, found: Sequence[Plan], seeds: int, jobs: int, console: Console | None) -> Reproduction:
    """Run what is not finished."""
    cells = cells_of(found)
    if console:
        with AllRuns(console, cells) as display:
            run_cells(cells, jobs=jobs, watcher=display)
    else:
        run_cells(cells, jobs=jobs, watcher=Watcher())
    return Reproduction(name, seeds, tuple((plan, entries(plan)) for plan in found))


SCALES: tuple[Scale, ...] = get_args(Scale)


def checked(scale: str) -> Scale:
    for known in SCALES:
        if scale == known:
            return known
    raise SettingError(f"scale {scale}: it is paper, near or cpu")


def table(plan: Plan, numbers: Sequence[Entry], seeds: int) -> Table:
    """One metric of a preset: rows by points, the paper's number and ours."""
    metric = numbers[0].metric
    places = list(dict.fromkeys(_place(e) for e in numbers))
    caption = f"{_reading(numbers, seeds)}{_reduced(plan)}"
    shown = Table(f"{plan.name}: {plan.title} · {metric}", ("", *places), caption)
    for row in dict.fromkeys(e.row for e in numbers):
        at = {_place(e): e for e in numbers if e.row == row}
        shown.add(row, *(cell(at[place]) if place in at else "" for place in places))
    shown.values = [_data(plan, entry) for entry in numbers]
    return shown


def _data(plan: Plan, entry: Entry) -> dict[str, Any]:
    ours = {"ours": entry.ours.mean, "ours_std": entry.ours.std} if entry.ours else {"ours": None, "ours_std": None}
    paper = {"paper": entry.paper, "paper_std": entry.paper_std, "difference": entry.difference}
    return {"preset": plan.name, "row": entry.row, "metric": entry.metric, **entry.at, **paper, **ours}


def _reading(numbers: Sequence[Entry], seeds: int) -> str:
    """How to read a table's cells."""
    ours = f"ours, mean ± standard deviation of {seeds} seeds" if seeds > 1 else "ours, one seed"
    notes = [["difference"] * any(e.difference is not None for e in numbers)]
    notes += [["wins over FedAvg"] * any(e.wins is not None for e in numbers)]
    notes_text = ", ".join(word for words in notes for word in words)
    return f"paper → {ours}" + (f" ({notes_text})" if notes_text else "")


def _reduced(plan: Plan) -> str:
    return f". Not at the paper's scale, but with {plan.reduction.reduces}" if plan.reduction else ""


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
    if plan.reduction:
        lines += ["", f"Reduced: {plan.reduction.reduces}."]
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
        "reduces": plan.reduction.reduces if plan.reduction else "",
        "entries": [asdict(entry) | {"difference": entry.difference} for entry in numbers],
        "runs": [_run(cell) for cell in plan.cells],
    }


def _run(cell: Cell) -> dict[str, Any]:
    return {"path": str(cell.path), "method": cell.config.method, "seed": cell.config.seed}
