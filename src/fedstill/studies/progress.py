"""The live display of many runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedstill.running.progress import NotebookBar, in_notebook
from fedstill.studies.cells import Cell, Watcher


class AllRuns(Watcher):
    """Many runs at once: one bar over all their rounds, or a line a run where the output is a file."""

    def __init__(self, console: Console, cells: Sequence[Cell]) -> None:
        self._console = console
        done = {cell.path: cell.rounds_done() or 0 for cell in cells}
        self._finished = sum(done[cell.path] == cell.config.rounds for cell in cells)
        self._runs = len(cells)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        total = sum(cell.config.rounds for cell in cells)
        self._task = self._bar.add_task(self._what(), total=total, completed=sum(done.values()))
        self._rounds = sum(done.values())
        self._notebook = NotebookBar("", self._rounds, total) if in_notebook() else None
        if self._finished:
            console.print(f"{self._finished} of {self._runs} runs are there already", highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _what(self) -> str:
        return f"{self._finished} of {self._runs} runs done"

    def round_done(self, cell: Cell, round_: int) -> None:
        self._rounds += 1
        self._bar.advance(self._task)
        if self._notebook:
            self._notebook.show(self._rounds, f"rounds, {self._what()}")

    def finished(self, cell: Cell) -> None:
        self._finished += 1
        self._bar.update(self._task, description=self._what())
        if self._notebook:
            self._notebook.show(self._rounds, f"rounds, {self._what()}")
        elif not self._console.is_terminal:
            self._console.print(f"{self._what()}: {cell.path}", highlight=False, soft_wrap=True)
