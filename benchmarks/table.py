"""The one table that a run of the benchmarks writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from fedstill.core.files import write_atomic

COLUMNS = ("part", "what", "fedstill", "beside it", "ratio", "to reach", "")


@dataclass(frozen=True)
class Row:
    """One thing that was measured, what it is held against, and what their ratio should be."""

    part: str
    what: str
    here: str
    beside: str = ""
    ratio: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the ratio is what it should be; None: nothing is asked of it."""
        if self.ratio is None or (self.at_least is None and self.at_most is None):
            return None
        return (self.at_least or 0.0) <= self.ratio <= (self.at_most or float("inf"))

    def cells(self) -> tuple[str, ...]:
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        goals = [("≥", self.at_least), ("≤", self.at_most)]
        goal = " ".join(f"{sign} {bound:.3g}" for sign, bound in goals if bound is not None)
        notes = ["missed" if self.reached is False else "", self.note]
        return self.part, self.what, self.here, self.beside, ratio, goal, "; ".join(filter(None, notes))


def shown(rows: Sequence[Row]) -> Table:
    """For a terminal."""
    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in ("fedstill", "beside it", "ratio", "to reach") else "left")
    for row in rows:
        table.add_row(*row.cells(), style="red" if row.reached is False else None)
    return table


def write(rows: Sequence[Row], path: Path) -> None:
    """As Markdown, whole or not at all."""
    lines = [" | ".join(COLUMNS), "|".join("--:" if name == "ratio" else "---" for name in COLUMNS)]
    lines += [" | ".join(row.cells()) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(f"| {line} |\n" for line in lines))
