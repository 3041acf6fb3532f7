"""What tuning came to: tables, a frame of trials, pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstill.analysis.comparing import Comparison
from fedstill.core.table import Table, frame
from fedstill.metrics.shown import title
from fedstill.metrics.statistics import paired
from fedstill.report import tuning as pictures
from fedstill.studies.trials import Search, Trial

_TESTED = {"accuracy": "accuracy", "amp": "AMP", "wlp": "WLP"}


@dataclass(frozen=True)
class Tuning:
    """What tuning came to: each method's search, and its winner on the test set."""

    searches: dict[str, Search]
    comparison: Comparison | None  # of the winners on the test set, over fresh seeds; None: it was not asked for
    path: Path  # a folder with one for each method, and the winners' runs in `test`
    _kept: Any = field(default=None, repr=False, compare=False)  # the folder, if it is a temporary one

    def __repr__(self) -> str:
        trials = sum(len(each.trials) for each in self.searches.values())
        return f"<fedstill.Tuning of {', '.join(self.searches)}: {trials} trials, {self.path}>"

    @property
    def winners(self) -> dict[str, dict[str, Any]]:
        """The settings that each method's best trial has."""
        return {method: dict(each.best.settings) for method, each in self.searches.items()}

    @property
    def objectives(self) -> tuple[str, ...]:
        return next(iter(self.searches.values())).terms.objectives

    def tables(self) -> list[Table]:
        """The winners by validation, and what they come to on the test set."""
        found = [self._winners_table()]
        return [*found, self._tested_table()] if self.comparison else found

    def _winners_table(self) -> Table:
        some = next(iter(self.searches.values()))
        over = f"mean of {some.terms.seeds} seeds · " if some.terms.seeds > 1 else ""
        shown = Table(
            "Winners by validation",
            ("", "settings", *map(title, self.objectives), "trials", "rounds run", "of a full search"),
            f"{over}final: mean of the last five evaluations · chosen without test data",
        )
        for method, each in self.searches.items():
            best, score = each.best, each.best.score()
            shown.add(
                method,
                ", ".join(f"{name} {value}" for name, value in best.settings.items()),
                *(f"{value:.4f}" for value in score),
                str(len(each.trials)),
                f"{each.rounds_run:,}",
                f"{100 * each.rounds_run / max(1, each.rounds_of_full_search):.0f} %",
            )
            numbers = dict(zip(self.objectives, score, strict=True))
            spent = {"trials": len(each.trials), "rounds_run": each.rounds_run, "seconds": each.seconds}
            shown.values.append({"method": method, **best.settings, **numbers, **spent})
        return shown

    def _tested_table(self) -> Table:
        assert self.comparison is not None
        rows, seeds = self.comparison.rows[0], self.comparison.seeds
        restored = all(cell.config.restore_best for row in rows for cell in row.cells)
        of = "of the round that was selected" if restored else "final: mean of the last five evaluations"
        shown = Table(
            "The winners on the test set",
            ("", *_TESTED.values()),
            f"mean of {seeds} fresh seeds, with Student's 95 % interval of the mean · {of}",
        )
        for row in rows:
            cells, numbers = list[str](), dict[str, float]()
            for metric, name in _TESTED.items():
                measured = row.values(f"selected.{metric}" if restored else f"final_{metric}")
                values = [value for value in measured if value is not None]
                mean = paired(values, [0.0] * len(values), interval="student") if len(values) == seeds else None
                cells.append(_interval(mean))
                numbers |= {name: mean.mean, f"{name}_low": mean.low, f"{name}_high": mean.high} if mean else {}
            shown.add(row.name, *cells)
            shown.values.append({"method": row.method, "model": row.variant, "seeds": seeds, **numbers})
        return shown

    def frame(self) -> Any:
        """A row for each trial: a pandas DataFrame, or without pandas a dict of NumPy arrays."""
        return frame(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        return [_trial_row(each, trial) for each in self.searches.values() for trial in each.trials]

    def to_markdown(self) -> str:
        """The tables in Markdown."""
        return "\n".join(map(str, self.tables()))

    def to_latex(self) -> str:
        r"""The tables in LaTeX, for \usepackage{booktabs}."""
        return "\n".join(f"% {table.title}\n{table.to_latex()}" for table in self.tables())

    def to_csv(self) -> str:
        """What `frame` has, as CSV."""
        return Table("", (), values=self._rows()).to_csv()

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self.tables())

    def plot(self) -> list[Path]:
        """Draw the slices, the importances and, of two objectives, the Pareto front into the folder."""
        points = {method: _points(each, each.trials) for method, each in self.searches.items()}
        log = [name for each in self.searches.values() for name, axis in each.space.items() if axis.log]
        found = [self.path / "slices.png"]
        pictures.slices(points, log, self.objectives[0], found[0], title="What each setting did, by validation")
        important = {method: shares for method, each in self.searches.items() if (shares := each.importances())}
        if important:
            after = next(iter(self.searches.values())).compared_after
            found.append(self.path / "importance.png")
            pictures.importances(important, found[-1], title=f"{title(self.objectives[0])} {pictures.after(after)}")
        if len(self.objectives) == 2:
            fronts = {method: _points(each, each.front) for method, each in self.searches.items()}
            found.append(self.path / "pareto.png")
            pictures.pareto(points, fronts, self.objectives, found[-1], title="Trials that no other exceeds in both")
        return found


def _interval(mean: Any) -> str:
    if mean is None:
        return "–"
    bounds = "" if math.isnan(mean.low) else f" [{100 * mean.low:.2f}, {100 * mean.high:.2f}]"
    return f"{100 * mean.mean:.2f} %{bounds}"


def _points(each: Search, trials: Sequence[Trial]) -> list[pictures.Point]:
    best = each.best.number if each.complete else -1
    return [
        pictures.Point(trial.settings, trial.score(), trial.rounds, trial.number == best)
        for trial in trials
        if trial.values
    ]


def _trial_row(each: Search, trial: Trial) -> dict[str, Any]:
    scores = trial.score() if trial.values else [None] * len(each.terms.objectives)
    return {
        "method": each.method,
        "trial": trial.number,
        **trial.settings,
        **dict(zip(each.terms.objectives, scores, strict=True)),
        "rounds": trial.rounds,
        "seconds": trial.seconds,
        "failed": trial.failed,
        "best": bool(each.complete) and trial.number == each.best.number,
    }
