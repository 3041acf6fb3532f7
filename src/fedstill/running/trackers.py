"""Trackers: a run's settings, numbers and files for MLflow, Weights & Biases or Trackio; TensorBoard is beside this.

A tracker is a callback that never ends a run: what fails is logged once, and it is silent from then on. The runs of a
comparison or a tuning are one experiment. Nothing leaves this machine unless the library's own settings say so.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from fedstill.core.errors import SettingError, described
from fedstill.core.files import write_atomic
from fedstill.metrics.records import RoundRecord, Summary, curve_metrics, scalars
from fedstill.report.charts import Chart, curve_data
from fedstill.report.page import page
from fedstill.report.runs import Group, RunData, flat
from fedstill.running import files
from fedstill.running.callbacks import Callback, RunView

log = logging.getLogger(__name__)

_ARTEFACTS = (files.CONFIG, files.SUMMARY, files.MODEL, files.DESCRIPTION, files.CLIENTS, files.BEST,
              files.BEST_OF_GROUPS, files.CURVES, files.REPORT)  # fmt: skip
_LONGEST = 500  # characters of a setting: MLflow takes no more
# MLflow would try a server that is gone for minutes, while the run waits.
_IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


class Tracker(Callback):
    """Base class: `begin`, `write` and `end` may fail, and the run goes on without them.

    `folder` is that of the experiment, by default the one that the run directory lies in: it names the experiment.
    """

    needs: ClassVar[tuple[str, str]]  # a module, and the extra that brings it

    def __init__(self, folder: str | Path | None = None) -> None:
        try:
            _ = self.library
        except ImportError as error:
            name = type(self).__name__
            raise SettingError(f"{name} needs a package: pip install 'fedstill[{self.needs[1]}]'") from error
        self.folder = None if folder is None else Path(folder)
        self.id = ""  # of the run, as the library calls it
        self._broken = False

    @property
    def library(self) -> Any:
        """The tracker's module; no attribute, so that a tracker can be copied."""
        return importlib.import_module(self.needs[0])

    def begin(self, run: RunView, settings: Mapping[str, Any]) -> None:
        """A run begins, or goes on: `self.id` is then what it was."""
        raise NotImplementedError

    def write(self, run: RunView, round_: int, numbers: Mapping[str, float]) -> None:
        """The numbers of a round."""
        raise NotImplementedError

    def end(self, run: RunView, artefacts: Sequence[Path], *, failed: bool) -> None:
        """The run has ended; if it failed, without artefacts."""
        raise NotImplementedError

    def experiment(self, run: RunView) -> str:
        """What the experiment is called."""
        return (self.folder or run.path.resolve().parent).resolve().name

    def name(self, run: RunView) -> str:
        """What the run is called in it."""
        path, folder = run.path.resolve(), (self.folder or run.path.parent).resolve()
        return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name

    def on_run_start(self, run: RunView) -> None:
        self._safely(self.begin, run, flat(run.config.model_dump()))

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        classes = run.federation.dataset.classes
        numbers = {_plain(name): value for name, value in scalars(by_class(record, classes))}
        self._safely(self.write, run, record["round"], numbers)

    def on_run_end(self, run: RunView, summary: Summary) -> None:
        self._safely(lambda: self.end(run, _artefacts(run, summary), failed=False))

    def on_run_failed(self, run: RunView, error: BaseException) -> None:
        self._safely(lambda: self.end(run, (), failed=True))

    def state_dict(self) -> dict[str, Any]:
        return {"id": self.id} if self.id else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.id = state["id"]

    def _safely(self, do: Callable[..., None], *what: Any) -> None:
        if self._broken:
            return
        try:
            do(*what)
        except Exception as error:  # noqa: BLE001 - whatever a tracker's library does, the run goes on
            self._broken = True
            log.warning("%s: nothing is tracked any more: %s", type(self).__name__, described(error))


class MLflow(Tracker):
    """Write to MLflow: where MLFLOW_TRACKING_URI says, else to files in mlruns/ of the experiment's folder."""

    needs = ("mlflow", "mlflow")

    def begin(self, run: RunView, settings: Mapping[str, Any]) -> None:
        for name, value in _IMPATIENT.items():
            os.environ.setdefault(name, value)
        place = os.environ.get("MLFLOW_TRACKING_URI")
        if not place:
            place = ((self.folder or run.path.parent).resolve() / files.MLFLOW).as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow would rather have a database
        self._client = self.library.tracking.MlflowClient(place)
        if self.id:
            self._client.update_run(self.id, status="RUNNING")
            return
        name = self.experiment(run)
        found = self._client.get_experiment_by_name(name)
        number = found.experiment_id if found else self._create(name)
        self.id = self._client.create_run(number, run_name=self.name(run)).info.run_id
        for key, value in settings.items():
            self._client.log_param(self.id, _plain(key), str(value)[:_LONGEST])

    def _create(self, name: str) -> str:
        try:
            return str(self._client.create_experiment(name))
        except self.library.exceptions.MlflowException:  # another run of the comparison was faster
            return str(self._client.get_experiment_by_name(name).experiment_id)

    def write(self, run: RunView, round_: int, numbers: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self.library.entities.Metric(name, value, now, round_) for name, value in numbers.items()]
        self._client.log_batch(self.id, metrics)

    def end(self, run: RunView, artefacts: Sequence[Path], *, failed: bool) -> None:
        for path in artefacts:
            self._client.log_artifact(self.id, str(path))
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


class WandB(Tracker):
    """Write to Weights & Biases: offline into the run directory, for `wandb sync`, unless WANDB_MODE says otherwise."""

    needs = ("wandb", "wandb")

    def begin(self, run: RunView, settings: Mapping[str, Any]) -> None:
        quiet = self.library.Settings(silent=True, console="off", disable_git=True, save_code=False)
        self._run = self.library.init(
            project=os.environ.get("WANDB_PROJECT", "fedstill"),
            group=self.experiment(run),
            name=self.name(run),
            id=self.id or None,
            resume="allow" if self.id else None,
            config=dict(settings),
            dir=str(run.path),
            mode=os.environ.get("WANDB_MODE", "offline"),
            reinit="create_new",
            settings=quiet,
        )
        self.id = str(self._run.id)

    def write(self, run: RunView, round_: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=round_)

    def end(self, run: RunView, artefacts: Sequence[Path], *, failed: bool) -> None:
        if artefacts:
            kept = self.library.Artifact(f"run-{self.id}", type="run")
            for path in artefacts:
                kept.add_file(str(path))
            self._run.log_artifact(kept)
        self._run.finish(exit_code=int(failed))


class Trackio(Tracker):
    """Write to Trackio, on this machine: in TRACKIO_DIR, or where it keeps its projects. `trackio show` opens them."""

    needs = ("trackio", "trackio")

    def begin(self, run: RunView, settings: Mapping[str, Any]) -> None:
        going_on = "allow" if self.id else "never"
        self._run = self.library.init(
            project=self.experiment(run), name=self.id or self.name(run), config=dict(settings), resume=going_on
        )
        self.id = str(self._run.name)

    def write(self, run: RunView, round_: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=round_)

    def end(self, run: RunView, artefacts: Sequence[Path], *, failed: bool) -> None:
        self._run.finish()


def placed(callbacks: Iterable[Callback], folder: Path) -> list[Callback]:
    """The callbacks, trackers among them with the folder of their experiment, unless they were given one."""
    found = []
    for callback in callbacks:
        if isinstance(callback, Tracker) and callback.folder is None:
            callback = copy.copy(callback)  # noqa: PLW2901
            callback.folder = folder
        found.append(callback)
    return found


def by_class(record: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """A record whose numbers of each class have the names of the classes, also inside others.

    >>> by_class({"loss": 0.5, "also": {"mean": {"per_class": [0.1, 0.2]}}}, ("cat", "dog"))
    {'loss': 0.5, 'also': {'mean': {'per_class': {'cat': 0.1, 'dog': 0.2}}}}
    """
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found[name] = by_class(value, classes)
        elif name == "per_class" and isinstance(value, list) and len(value) == len(classes):
            found[name] = dict(zip(classes, value, strict=True))
        else:
            found[name] = value
    return found


def _plain(name: str) -> str:
    """A name that every tracker takes."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _artefacts(run: RunView, summary: Summary) -> list[Path]:
    """What a finished run leaves to be looked at, its curves drawn and a page written."""
    if not (run.path / files.CURVES).exists():
        from fedstill.report.curves import curves

        curves({run.config.method: run.records}, run.path / files.CURVES, metrics=curve_metrics(run.records))
    report = RunData(run.path, flat(run.config.model_dump()), run.records, summary, config=run.config.toml())
    groups = [Group(run.config.method, (report,))]
    charts = [Chart("curves", "Numbers by round", curve_data(groups))]
    write_atomic(run.path / files.REPORT, page(groups, charts, title=run.path.name))
    return [path for name in _ARTEFACTS for path in sorted(run.path.glob(name))]
