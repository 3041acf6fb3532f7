"""Callbacks that come with fedstill: early stopping, the best model, a budget, a table of rounds."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fedstill.building.config import Config
from fedstill.core.errors import SettingError
from fedstill.core.files import naming, write_atomic
from fedstill.methods.base import Method
from fedstill.metrics.records import RoundRecord, scalars, value_of
from fedstill.metrics.scores import lower_is_better
from fedstill.running import files
from fedstill.running.callbacks import Callback, RunView

log = logging.getLogger(__name__)

Mode = Literal["min", "max"]
_SMALLER_IS_BETTER = ("loss", "fm")
_OF_THE_TEST_SET = ("accuracy", "loss", "per_class")


def usual_mode(metric: str) -> Mode:
    """Whether the smallest or the largest number of this name is the best.

    >>> usual_mode("val_loss"), usual_mode("val_amp")
    ('min', 'max')
    """
    last = metric.rpartition(".")[2]
    return "min" if last.endswith(_SMALLER_IS_BETTER) or lower_is_better(last) else "max"


def refuse_own_models(method: Method, config: Config, setting: str) -> None:
    """Refuse a method that has no model to keep."""
    if not method.global_model:
        raise SettingError(
            f"{setting}: with {config.method} every client keeps a model of its own, and there is none of all clients "
            "or of a group whose best round could be kept; leave it out"
        )


class _Best(Callback):
    """Keeps the best value of a metric, and its round."""

    def __init__(self, metric: str, mode: Mode | None = None) -> None:
        if mode not in (None, "min", "max"):
            raise SettingError(f"mode = {mode!r}: 'min' or 'max'")
        self.metric = metric
        self.mode: Mode = mode or usual_mode(metric)
        self.best: float | None = None
        self.best_round = 0

    def improved(self, record: RoundRecord) -> bool | None:
        """Whether a round is the best so far; None if it does not have the metric."""
        value = value_of(record, self.metric)
        if value is None:
            self._check(record)
            return None
        if self.best is not None and self.gain(value, self.best) <= 0:
            return False
        self.best, self.best_round = value, record["round"]
        return True

    def gain(self, value: float, than: float) -> float:
        """By how much a value is better than another."""
        return value - than if self.mode == "max" else than - value

    def _check(self, record: RoundRecord) -> None:
        """Refuse a metric that no round will have, at the first that was evaluated."""
        parent, _, last = self.metric.rpartition(".")
        if last in record.get("metrics", {}) or last in record.get("unmeasured", {}):
            return
        holder: Any = record
        for part in parent.split(".") if parent else ():
            holder = holder.get(part, {}) if isinstance(holder, dict) else {}
        if record["evaluated"] and self.best is None and last not in holder:
            known = ", ".join(name for name, _ in scalars(record, "."))
            raise SettingError(f"metric = {self.metric!r}: the rounds have {known}")

    def begin(self, run: RunView) -> None:
        """Forget what an earlier run, to which this object was given too, has come to."""
        if not run.records:
            self.best, self.best_round = None, 0

    def warn_of_choice(self) -> None:
        """A model that is chosen by its test score looks better than it is."""
        if self.metric in _OF_THE_TEST_SET:
            log.warning("the model is chosen by its %s on the test set: this number of it is too good", self.metric)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_round": self.best_round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_round = state["best"], state["best_round"]


class EarlyStopping(_Best):
    """Stop a run once a metric has not improved for some evaluations.

    `metric` is a number of a round's record, dots leading into it: "train_loss", "amp", "callbacks.mine". Better is
    larger, but for losses and "fm", or as `mode` says; what is better by no more than `min_delta` does not count as an
    improvement to wait for. With `restore_best` the run's model is that of the best round, by however little it is.
    "accuracy" and "loss" are measured on the test set: who stops by them and reports them reports too much.

    Examples:
        >>> import fedstill
        >>> small = {"clients": 4, "epochs": 1, "fraction": 0.05, "engine": "inline"}
        >>> stop = EarlyStopping("train_loss", patience=1, min_delta=10)
        >>> fedstill.run("fedavg", rounds=9, **small, callbacks=[stop]).summary["rounds"]
        2
    """

    def __init__(
        self,
        metric: str,
        patience: int = 5,
        min_delta: float = 0.0,
        *,
        mode: Mode | None = None,
        restore_best: bool = False,
    ) -> None:
        super().__init__(metric, mode)
        if not min_delta >= 0:
            raise SettingError(f"min_delta = {min_delta!r}: at least 0")
        if patience < 1:
            raise SettingError(f"patience = {patience!r}: at least 1 evaluation")
        self.patience, self.min_delta, self.restore_best = patience, min_delta, restore_best
        self.waited = 0  # evaluations since the last improvement
        self._improved_to: float | None = None  # what that came to
        self._weights: dict[str, Tensor] = {}  # of the best round, by model
        self._rounds = 0  # that the run was to have

    def begin(self, run: RunView) -> None:
        super().begin(run)
        if not run.records:
            self.waited, self._improved_to, self._weights = 0, None, {}
        elif self._rounds and run.config.rounds > self._rounds:  # somebody wants more
            self.waited = 0
        self._rounds = run.config.rounds

    def on_run_start(self, run: RunView) -> bool:
        self.begin(run)
        if self.restore_best:
            refuse_own_models(run.method, run.config, "restore_best")
            if run.method.has_final_exchange:
                raise SettingError(f"restore_best: {run.config.method} changes the model after the last round")
            self.warn_of_choice()
            if self._weights and run.records:  # it may have no round left
                run.restore(self.best_round, self._weights)
        return self.waited >= self.patience

    def on_round_end(self, run: RunView, record: RoundRecord) -> bool:
        better, value = self.improved(record), value_of(record, self.metric)
        if value is not None:
            if self._improved_to is None or self.gain(value, self._improved_to) > self.min_delta:
                self._improved_to, self.waited = value, 0
            else:
                self.waited += 1
        if self.restore_best:
            if better:
                self._weights = run.all_weights()
            if self._weights:
                run.restore(self.best_round, self._weights)
        return self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        waiting = {"waited": self.waited, "improved_to": self._improved_to}
        return super().state_dict() | waiting | {"weights": self._weights, "rounds": self._rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        weights = state["weights"]  # older checkpoints have one tensor, or None
        self._weights = {"": weights} if isinstance(weights, Tensor) else weights or {}
        self.waited, self._rounds = state["waited"], state.get("rounds", 0)
        self._improved_to = state.get("improved_to", state["best"])  # older checkpoints have one number for both


class SaveBest(_Best):
    """Keep the model of the best round in the run directory, as best.safetensors; `metric` is as in `EarlyStopping`.

    Where clients have different networks, the model of each group is kept, as best-GROUP.safetensors.
    """

    def __init__(self, metric: str, *, mode: Mode | None = None) -> None:
        super().__init__(metric, mode)

    def on_run_start(self, run: RunView) -> None:
        self.begin(run)
        refuse_own_models(run.method, run.config, "SaveBest")
        self.warn_of_choice()
        if not all((run.path / self._file(run, name)).exists() for name in run.all_weights()):
            self.best = None  # of a run that went back

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        if self.improved(record):
            for name, data in run.model_files().items():
                write_atomic(run.path / self._file(run, name), data)

    @staticmethod
    def _file(run: RunView, name: str) -> str:
        return files.BEST if run.has_one_model else files.best_model(name)


def selection(config: Config) -> list[Callback]:
    """What a run's own settings have to be heard: select, restore_best, patience and min_delta."""
    found: list[Callback] = [SaveBest(config.select)] if config.select else []
    if config.patience or config.restore_best:
        patience = config.patience or config.rounds + 1  # which no run waits for
        found.append(EarlyStopping(config.select, patience, config.min_delta, restore_best=config.restore_best))
    return found


class Budget(Callback):
    """Stop a run once it has taken so many seconds, or moved so many bytes; those before it was resumed count too."""

    def __init__(self, *, seconds: float | None = None, bytes: float | None = None) -> None:
        if seconds is None and bytes is None:
            raise SettingError("Budget: give seconds=, bytes=, or both")
        for name, value in (("seconds", seconds), ("bytes", bytes)):
            if value is not None and not value > 0:
                raise SettingError(f"Budget: {name} = {value!r}: more than 0")
        self.seconds, self.bytes = seconds, bytes

    def on_round_end(self, run: RunView, record: RoundRecord) -> bool:
        took = sum(r["seconds"] + r["eval_seconds"] for r in run.records)
        moved = sum(r["bytes_down"] + r["bytes_up"] + r.get("episode", {}).get("bytes", 0) for r in run.records)
        return (self.seconds is not None and took >= self.seconds) or (self.bytes is not None and moved >= self.bytes)


class CSVLog(Callback):
    """Write the numbers of every round to a CSV file, by default rounds.csv in the run directory."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.given = None if path is None else Path(path)
        self._path = Path(files.ROUNDS)
        self._columns: tuple[str, ...] = ()

    def on_run_start(self, run: RunView) -> None:
        self._path = self.given or run.path / files.ROUNDS
        self._columns = ()
        if run.records:
            self._write(run.records)
        else:
            self._path.unlink(missing_ok=True)

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        if not _numbers(record).keys() <= set(self._columns):
            self._write(run.records)
            return
        with naming(self._path), open(self._path, "a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(_numbers(record))

    def _write(self, records: Sequence[RoundRecord]) -> None:
        """All rounds again: one of them has a number that those before had not."""
        rows, text = [_numbers(record) for record in records], io.StringIO(newline="")
        self._columns = tuple(dict.fromkeys(name for row in rows for name in row))
        table = csv.DictWriter(text, self._columns)
        table.writeheader()
        table.writerows(rows)
        write_atomic(self._path, text.getvalue())


def _numbers(record: RoundRecord) -> dict[str, float]:
    return {"round": record["round"], **dict(scalars(record, "."))}
