"""Many runs: each in a directory of its own, spread over the cores, continued where they stopped."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from fedstill.building.config import IRRELEVANT, Config, anchored, is_object
from fedstill.building.data import data_source, load_data
from fedstill.building.setup import prepare
from fedstill.core import trust
from fedstill.core.device import CPU, find
from fedstill.core.errors import DataError, Diverged, FedstillError, SettingError
from fedstill.core.files import read_json
from fedstill.core.processes import die_with_parent
from fedstill.data.dataset import Dataset
from fedstill.data.federation import Federation
from fedstill.methods import registry
from fedstill.metrics.records import RoundRecord, Summary
from fedstill.running import api, files
from fedstill.running.callbacks import Callback, RunView, by_name
from fedstill.running.directory import RunDirectory
from fedstill.running.machine import check_engine, cores, one_thread
from fedstill.running.monitors import selection
from fedstill.running.places import check_result, stopped_by
from fedstill.running.uplinks import TooFewClients
from fedstill.studies.archive import ArchivedRun

log = logging.getLogger(__name__)

_CONTEXT: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


@dataclass(frozen=True)
class Cell:
    """A run that is wanted, and where it is or will be."""

    path: Path
    config: Config
    own: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # objects that `prepare` takes
    callbacks: Sequence[Callback] = field(default=(), compare=False, repr=False)  # the run gets copies of its own
    archived: ArchivedRun | None = field(default=None, compare=False, repr=False)  # what it came to elsewhere

    def summary(self) -> Summary:
        """What the finished run came to."""
        if self.archived:
            return self.archived.as_summary()
        try:
            check_result(self.path, files.SUMMARY)
            found = read_json(self.path / files.SUMMARY)
        except DataError as error:
            raise DataError(f"{error}; delete {self.path} to run it again") from error
        if not isinstance(found, dict):
            raise DataError(f"{self.path}/summary.json is not a run's; delete {self.path} to run it again")
        return cast(Summary, found)

    def records(self) -> list[RoundRecord]:
        """Its rounds; of an archived run those that were evaluated, or ended an episode."""
        if self.archived:
            return self.archived.as_records()
        check_result(self.path, files.METRICS)
        return RunDirectory.open(self.path, lock=False).records()

    def rounds_done(self) -> int | None:
        """How many rounds are done already, all of them in a finished run; None: it has not begun, or has to again.

        It has to if it does not keep the models that are wanted. A directory with a run of other settings is refused.
        """
        if not (self.path / files.CONFIG).is_file():
            return None
        there = RunDirectory.open(self.path, lock=False)
        named = {name: value for name, value in self.config.model_dump().items() if name not in self.own}
        if files_ := trust.changed(self.path, named):
            raise SettingError(
                f"{self.path} was run before {', '.join(map(str, files_))} changed; choose another --out, replace all "
                f"runs with --force, or delete {self.path} to run it again"
            )
        theirs = there.config(replaced=self.own)
        if difference := other_settings(theirs, self.config):
            raise SettingError(
                f"{self.path} exists with other settings ({difference}); choose another --out, or replace it with "
                "--force"
            )
        if keeping(theirs, self.config) != keeping(theirs, theirs):
            return None
        done = max((record["round"] for record in there.records()), default=0)
        if not (self.path / files.SUMMARY).exists():
            return min(done, self.config.rounds - 1)
        if done < self.config.rounds and stopped_by(self.path):
            return done  # by a callback
        if done < self.config.rounds:
            raise DataError(
                f"{self.path}/metrics.jsonl has lost rounds of a finished run; delete {self.path} to run it again"
            )
        return self.config.rounds

    @property
    def _hearing(self) -> list[Callback]:
        return [*selection(self.config), *self.callbacks]

    @property
    def finished(self) -> bool:
        """Whether all rounds are done, here or elsewhere, or one of its callbacks has stopped it."""
        if self.archived:
            return True
        done = self.rounds_done()
        return done == self.config.rounds or (done is not None and stopped_by(self.path) in by_name(self._hearing))


def other_settings(there: Config, wanted: Config) -> str:
    """The first setting that two runs differ in, in words; empty if their numbers must be the same."""
    theirs, ours = anchored(there).model_dump(), anchored(wanted).model_dump()
    if not is_object(there.method):  # the run may be older than some of its method's settings
        theirs["hyper"] = registry.added_settings(there.method) | theirs["hyper"]
    for name in theirs:
        if name not in IRRELEVANT and theirs[name] != ours[name]:
            return f"{name} is {theirs[name]}, not {ours[name]}"
    return ""


def keeping(there: Config, wanted: Config) -> dict[str, Any]:
    """The settings with which a run keeps the models that either keeps."""
    return {
        "save_teachers": there.save_teachers or wanted.save_teachers,
        "save_models": math.gcd(there.save_models, wanted.save_models),
    }


def check(cells: Sequence[Cell]) -> None:
    """Find what is wrong with the settings or the data of any run before the first begins."""
    datasets: dict[tuple[str | int, ...], Dataset | Federation] = {}
    for cell in _but_for_seeds(cells):
        config, own = cell.config, dict(cell.own)
        check_engine(config)
        if "data" not in own:
            source = data_source(config)
            if source not in datasets:
                datasets = {source: load_data(config)}  # one at a time
            own["data"] = datasets[source]
        prepare(config, **own)


def _but_for_seeds(cells: Sequence[Cell]) -> list[Cell]:
    """A cell for each setting, those with the same data together."""
    found = {repr(cell.config.model_copy(update={"seed": 0})): cell for cell in cells}
    return sorted(found.values(), key=lambda cell: data_source(cell.config))


class Watcher:
    """Hears how many runs go on."""

    def started(self, cell: Cell) -> None: ...

    def round_done(self, cell: Cell, round_: int) -> None: ...

    def finished(self, cell: Cell) -> None: ...


@dataclass(frozen=True)
class Failure:
    """Why a run did not end."""

    reason: str
    diverged: bool = False  # by its settings: trying again would come to the same


def run_cells(cells: Sequence[Cell], *, jobs: int = 0, watcher: Watcher | None = None) -> None:
    """Run the cells that are not finished, as many at a time as there are cores; each then has one worker.

    On a GPU they run one at a time, unless `jobs` says otherwise.

    A cell that fails does not keep the others from ending; it is named when they have.
    """
    raise_first(try_cells(cells, jobs=jobs, watcher=watcher))


def raise_first(failed: Mapping[Path, Failure]) -> None:
    """Raise the first of some failures."""
    for path, failure in failed.items():
        others = f" ({len(failed)} runs failed)" if len(failed) > 1 else ""
        raise FedstillError(f"{path}: {failure.reason}{others}; the others are finished")


def try_cells(cells: Sequence[Cell], *, jobs: int = 0, watcher: Watcher | None = None) -> dict[Path, Failure]:
    """The same; which cells failed, and why."""
    watcher, todo = watcher or Watcher(), [cell for cell in cells if not cell.finished]
    if not todo:
        return {}
    if any(cell.config.engine == "ray" for cell in todo):
        from fedstill.studies.cluster import run_on_cluster

        return run_on_cluster(todo, jobs, watcher)
    on_gpu = any(find(cell.config.device) != CPU for cell in todo)
    jobs = min(jobs or (1 if on_gpu else cores()), len(todo))
    workers = max(1, cores() // jobs)
    running: dict[Connection, tuple[Any, Cell]] = {}
    failed: dict[Path, Failure] = {}
    waiting = list(reversed(todo))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop()
                ours, theirs = _CONTEXT.Pipe(duplex=False)
                process = _CONTEXT.Process(target=_one, args=(cell, workers, theirs, os.getpid()))
                process.start()
                theirs.close()
                running[ours] = (process, cell)
                watcher.started(cell)
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                _hear(pipe, running, failed, watcher)
    finally:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.join()
    return failed


def _hear(
    pipe: Connection, running: dict[Connection, tuple[Any, Cell]], failed: dict[Path, Failure], watcher: Watcher
) -> None:
    """One message of a run, or its end."""
    process, cell = running[pipe]
    try:
        message = json.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        pipe.close()
        del running[pipe]
        if process.exitcode and cell.path not in failed:
            failed[cell.path] = Failure(f"its process ended with code {process.exitcode}")
        watcher.finished(cell)
        return
    if "error" in message:
        failed[cell.path] = Failure(message["error"], message["diverged"])
    else:
        watcher.round_done(cell, message["round"])


class _Tell(Callback):
    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        self._tell({"round": record["round"]})


def carry_out(cell: Cell, more: Sequence[Callback] = (), **machine: Any) -> None:
    """Begin a run, or go on with it, in this process; `machine` are settings of where it runs."""
    given: dict[str, Any] = {**cell.own, "callbacks": [*cell.callbacks, *more]}
    with one_thread():
        if cell.rounds_done() is None:
            update: dict[str, Any] = dict(machine)
            if again := (cell.path / files.CONFIG).is_file():
                update |= keeping(RunDirectory.open(cell.path, lock=False).config(replaced=cell.own), cell.config)
            api.run_config(cell.config.model_copy(update=update), cell.path, force=again, **given)
        else:
            given |= {"device": cell.config.device, "engine": machine.get("engine")}
            api.resume(cell.path, rounds=cell.config.rounds, **given)


def _one(cell: Cell, workers: int, pipe: Connection, parent: int) -> None:
    """A process that carries out one run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    die_with_parent(parent)

    def tell(message: dict[str, Any]) -> None:
        pipe.send_bytes(json.dumps(message).encode())

    report_run(cell, tell, workers=workers)


def report_run(cell: Cell, tell: Callable[[dict[str, Any]], None], **machine: Any) -> None:
    """Carry out a run, and tell which round is done, or an error."""
    try:
        carry_out(cell, [_Tell(tell)], **machine)
    except (Diverged, TooFewClients) as error:
        tell({"error": str(error), "diverged": True})
    except Exception as error:
        log.exception("%s", cell.path)
        text = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
        tell({"error": text, "diverged": False})
