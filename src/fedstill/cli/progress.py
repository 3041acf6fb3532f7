"""The live display of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedstill.building.setup import Setup
from fedstill.metrics.records import RoundRecord
from fedstill.running.loop import Listener
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
        self._bar.advance(self._task)

    def finished(self, cell: Cell) -> None:
        self._finished += 1
        self._bar.update(self._task, description=self._what())
        if not self._console.is_terminal:
            self._console.print(f"{self._what()}: {cell.path}", highlight=False, soft_wrap=True)


class Display(Listener):
    """A bar with the latest numbers on a terminal; a line a round where the output is a file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._setup: Setup | None = None
        self._clients = self._clients_done = 0

    @property
    def began(self) -> bool:
        """Whether the run got as far as its rounds."""
        return self._setup is not None

    def started(self, setup: Setup, done: int) -> None:
        self._setup = setup
        c = setup.config
        self._console.print(
            f"{c.method} on {c.data or 'tables'}: {setup.federation.clients} clients, {c.partition} partition, "
            f"{c.model} with {setup.task.size:,} weights, {c.rounds - done} rounds",
            style="bold",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        for warning in setup.warnings:
            self._console.print(warning, markup=False, highlight=False, soft_wrap=True)
        if self._console.is_terminal and done < c.rounds:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(c.method, total=c.rounds, completed=done, numbers="")
            self._bar.start()

    def round_started(self, round_: int, clients: int) -> None:
        self._clients, self._clients_done, self._round = clients, 0, round_

    def client_done(self) -> None:
        self._clients_done += 1
        if self._bar:
            self._bar.update(self._task, completed=self._round - 1 + 0.9 * self._clients_done / self._clients)

    def round_failed(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def round_done(self, record: RoundRecord) -> None:
        numbers = _numbers(record)
        rounds = self._setup.config.rounds if self._setup else 0
        if self._bar:
            self._bar.update(
                self._task, completed=record["round"], numbers=numbers or self._bar.tasks[0].fields["numbers"]
            )
        elif numbers:
            self._console.print(f"round {record['round']}/{rounds}: {numbers}", highlight=False)
        if record["dropped"]:
            self._console.print(f"round {record['round']}: clients dropped: {record['dropped']} (see log.txt)")

    def ended(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None


def _numbers(record: RoundRecord) -> str:
    if record["accuracy"] is None:
        return ""
    text = f"accuracy {record['accuracy']:.3f}"
    for key in ("amp", "wlp"):
        text += f"  {key.upper()} {record[key]:.3f}" if record[key] is not None and record[key] == record[key] else ""
    return text
