"""The live display of a run: on a terminal, in a notebook, or a line a round where the output is a file."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from fedstill.building.setup import majority
from fedstill.metrics.records import RoundRecord, Summary, value_of
from fedstill.metrics.scores import short_name
from fedstill.metrics.shown import is_imbalanced, title
from fedstill.running.callbacks import Callback, RunView

_CLIENTS = 0.9  # the share of a round that its clients' training is shown as


class Progress(Callback):
    """Show how a run goes on: a bar with the latest numbers, or a line a round where the output is a file."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._bar: _TerminalBar | NotebookBar | None = None
        self._clients = self._clients_done = 0
        self._shown: list[str] = []  # metrics beyond accuracy
        self.began = False  # whether the run got as far as its rounds

    def on_run_start(self, run: RunView) -> None:
        self.began = True
        c = run.config
        balanced = ["balanced_accuracy"] if is_imbalanced(majority(run.federation)) else []
        self._shown = list(dict.fromkeys([*balanced, *map(short_name, c.metrics)]))
        held, left = run.federation, c.rounds - run.round
        tests = len(held.dataset.test.y) or len(held.test_index)
        self._say(
            f"{c.method} on {c.data or 'tables'}: {held.clients} clients with {held.sizes.sum():,} samples, "
            f"{tests:,} to test on, {c.partition} partition, {run.networks}, {left} round{'s' * (left != 1)}",
            style="bold",
        )
        if c.hyper:
            self._say(" ".join(f"{name}={_written(value)}" for name, value in c.hyper.items()))
        for warning in run.warnings:
            self._say(warning)
        if run.round < c.rounds:
            if in_notebook():
                self._bar = NotebookBar(c.method, run.round, c.rounds)
            elif self._console.is_terminal:
                self._bar = _TerminalBar(self._console, c.method, run.round, c.rounds)

    def on_round_start(self, run: RunView, round_: int, clients: int) -> None:
        self._clients, self._clients_done = clients, 0

    def on_client_end(self, run: RunView, client: int, metrics: Mapping[str, float]) -> None:
        self._clients_done += 1
        if self._bar:
            self._bar.show(run.round - 1 + _CLIENTS * self._clients_done / self._clients)

    def on_round_failed(self, run: RunView, reason: str) -> None:
        self._say(reason)

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        numbers = _numbers(record, self._shown)
        if self._bar:
            self._bar.show(record["round"], numbers)
        elif numbers:
            self._say(f"round {record['round']}/{run.rounds}: {numbers}")
        if record["dropped"]:
            self._say(f"round {record['round']}: clients dropped: {record['dropped']} (see log.txt)")

    def on_run_end(self, run: RunView, summary: Summary) -> None:
        self._close()
        if run.stopped_by:
            self._say(f"stopped by {run.stopped_by} after round {run.round} of {run.rounds}")
        if summary.get("epsilon") is not None:
            promise = summary["privacy"]
            of = f" at delta {promise['delta']:g}, of {promise['of']}" if "delta" in promise else ""
            self._say(f"privacy: epsilon {summary['epsilon']:.3f}{of}")
        if "selected" in summary:
            chosen = summary["selected"]
            numbers = _numbers(cast(RoundRecord, chosen), self._shown)
            self._say(f"best by {chosen['by']}: round {chosen['round']}, {numbers}")
        if "restored_round" in summary:
            self._say(f"the model is that of round {summary['restored_round']}")

    def on_run_failed(self, run: RunView, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar:
            self._bar.close()
            self._bar = None

    def _say(self, text: str, style: str | None = None) -> None:
        """Print a line as it is: a path in it can be copied, and brackets mean nothing."""
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


class _TerminalBar:
    def __init__(self, console: Console, name: str, done: int, rounds: int) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID = self._bar.add_task(name, total=rounds, completed=done, numbers="")
        self._bar.start()

    def show(self, done: float, numbers: str = "") -> None:
        shown = numbers or self._bar.tasks[0].fields["numbers"]
        self._bar.update(self._task, completed=done, numbers=shown)

    def close(self) -> None:
        self._bar.stop()


class NotebookBar:
    """A bar in HTML, which every notebook shows without further packages."""

    def __init__(self, name: str, done: int, rounds: int) -> None:
        from IPython.display import display

        self._name, self._rounds, self._numbers = name, rounds, ""
        self._handle: Any = display(self._picture(done), display_id=True)

    def show(self, done: float, numbers: str = "") -> None:
        self._numbers = numbers or self._numbers
        self._handle.update(self._picture(done))

    def close(self) -> None: ...

    def _picture(self, done: float) -> Any:
        from IPython.display import HTML

        bar = f'<progress value="{done:.2f}" max="{self._rounds}"></progress>'
        return HTML(f"{escape(self._name)} {bar} {int(done)}/{self._rounds} {escape(self._numbers)}")


def in_notebook() -> bool:
    """Whether this is a Jupyter notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def _written(value: object) -> str:
    """A setting as --set takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _numbers(record: RoundRecord, metrics: Sequence[str]) -> str:
    """The numbers of a round that there are; a metric on the global test set, else on the clients' tests."""
    names = {"accuracy": "accuracy", "amp": "AMP", "wlp": "WLP", "epsilon": "epsilon"}
    found = [(written, value_of(record, name)) for name, written in names.items()]
    for name in metrics:
        on_test = value_of(record, name)
        found.append((title(name), value_of(record, f"pooled_{name}") if on_test is None else on_test))
    return "  ".join(f"{written} {value:.3f}" for written, value in found if value is not None)
