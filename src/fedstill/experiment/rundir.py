"""The run directory: everything a run leaves behind, whole at any moment.

config.toml         every setting; `fedstill run config.toml` repeats the run
metrics.jsonl       one JSON object a round
summary.json        best and final numbers, cost, versions; there when the run is finished
clients.csv         each client's samples and its accuracy under the final model
model.safetensors   the final model as named tensors
tokenizer.json      what made tokens of text, where the data are text
curves.png          the learning curves, where the command line drew them
models/             the global model after some of the rounds, if the run was to save them
teachers/           the models that met at each episode's end, if the run was to save them
checkpoints/        the last two rounds' server state, and the clients' own
tensorboard/        events for TensorBoard, if they were asked for
run.json            the run's number and its sites, if its clients are elsewhere
log.txt             what happened when
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from fedstill.core import tree, trust
from fedstill.core.errors import DataError, FedstillError, SettingError
from fedstill.core.files import sync, write_atomic
from fedstill.core.store import Store
from fedstill.core.tree import Tree
from fedstill.experiment.config import Config, read_toml, resolve

log = logging.getLogger(__name__)

Record = dict[str, Any]
_KEPT = 2
_LOCK = "checkpoints/lock"
_TEACHERS = "teachers"
_MODELS = "models"
TENSORBOARD = "tensorboard"
SERVED = "run.json"
_FILES = (
    *("summary.json", "metrics.jsonl", "clients.csv", "model.safetensors", "tokenizer.json", "curves.png", "log.txt"),
    *(trust.CODE, "received.jsonl"),
)


class RunDirectory:
    """Reads and writes one run directory. Only one process at a time may hold it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.client_store = Store(self.checkpoints / "clients", durable=False)
        self.server_store = Store(self.checkpoints / "server", durable=False)
        self._lock: int | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    @classmethod
    def create(cls, path: Path, config: Config, *, force: bool = False) -> RunDirectory:
        """A new run directory; one that is there already is replaced only by `force`."""
        check_place(path, force=force)
        run = cls(path)
        run._take_lock()
        try:
            run._clear()
            run.write_config(config)
        except BaseException:
            run.release()
            raise
        return run

    @classmethod
    def open(cls, path: Path, *, lock: bool = True) -> RunDirectory:
        """A run directory that is there already."""
        if not (path / "config.toml").is_file():
            raise SettingError(f"{path} is not a run directory: it has no config.toml")
        run = cls(path)
        if lock:
            run._take_lock()
        return run

    @property
    def served(self) -> bool:
        """Whether its clients are elsewhere."""
        return (self.path / SERVED).exists()

    def write_config(self, config: Config) -> None:
        """Set the settings of a run, or change those of one that goes on."""
        trust.record(self.path, config.model_dump())
        write_atomic(self.path / "config.toml", config.toml())

    def config(self, *, custom_method: bool = False) -> Config:
        """The settings. A method in a file is run for that, unless it is the caller's own (`custom_method`)."""
        settings = read_toml(self.path / "config.toml")
        if not custom_method:
            trust.check(self.path, settings)
        return resolve(settings, custom_method=custom_method)

    def records(self) -> list[Record]:
        """The rounds in metrics.jsonl. A line cut short by a crash, and what follows it, is left out."""
        records: list[Record] = []
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return records
        for line in path.read_text(errors="replace").splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                break
        return records

    def append(self, record: Record) -> None:
        """One more line of metrics.jsonl, on disk when the next checkpoint is, and not there before the last one is."""
        self.settle()
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(to_json(record) + "\n")

    def checkpoint(self, round_: int, state: Tree, active: Iterable[int]) -> None:
        """Keep the server's state after a round, and forget what only older checkpoints needed.

        `active` are the clients whose state may have changed since the last checkpoint. It is written while the next
        round goes on; `settle` waits for it.
        """
        self.settle()  # one at a time, so that no more than one waits in memory
        self._writer = self._writer or ThreadPoolExecutor(1, "checkpoint")
        self._writing = self._writer.submit(self._write_checkpoint, round_, tree.copied(state), list(active))

    def settle(self) -> None:
        """Have the last checkpoint on disk when this returns."""
        if self._writing:
            wait([self._writing])  # also if this is interrupted and asked again
            done, self._writing = self._writing, None
            done.result()

    def _write_checkpoint(self, round_: int, state: Tree, active: Sequence[int]) -> None:
        """What a checkpoint rests on goes to disk first, so that none is ever there without it."""
        before = max(self._checkpoint_rounds(), default=0)
        for store in self._stores():
            store.sync(active, since=before)
        if (metrics := self.path / "metrics.jsonl").exists():
            sync(metrics)
        write_atomic(self._checkpoint_path(round_), tree.encode(state))
        kept = self._checkpoint_rounds()[-_KEPT:]
        for store in self._stores():
            store.prune(active, needed=kept[0])
        for old in self._checkpoint_rounds()[:-_KEPT]:
            self._checkpoint_path(old).unlink()

    def oldest_checkpoint(self) -> int:
        """The earliest round that the run could go back to."""
        return min(self._checkpoint_rounds(), default=0)

    def restore(self) -> tuple[int, Tree] | None:
        """The newest checkpoint that is whole, and everything younger than it undone; None: no round is done."""
        try:
            self.settle()  # of a run in this process that was broken off
        except OSError as error:
            log.warning("the last checkpoint was not written: %s", error)
        damaged = []
        for round_ in reversed(self._checkpoint_rounds()):
            path = self._checkpoint_path(round_)
            try:
                state = tree.decode(path.read_bytes())
            except DataError as error:
                log.warning("%s: %s", path, error)
                damaged.append(path)
                continue
            for bad in damaged:
                bad.rename(bad.with_suffix(".damaged"))
            self._undo_after(round_)
            return round_, state
        if damaged:
            raise FedstillError(f"no checkpoint can be read: {damaged[0]} is damaged, and there is no older one")
        self._check_nothing_done()
        self._undo_after(0)
        return None

    def server_state(self) -> Tree:
        """What the method kept on the server at the newest checkpoint; empty if there is none. Changes nothing."""
        rounds = self._checkpoint_rounds()
        return tree.decode(self._checkpoint_path(rounds[-1]).read_bytes())["state"] if rounds else {}

    def _check_nothing_done(self) -> None:
        """Refuse to start anew, and so to forget its rounds, in a directory that lost its checkpoints."""
        done = len(self.records())
        due = read_toml(self.path / "config.toml").get("checkpoint_every", 1)
        # A round is in metrics.jsonl before its checkpoint is written, so the first may lack one.
        if done > due or (self.path / "summary.json").exists():
            raise FedstillError(f"{self.checkpoints} holds no checkpoint of the {done} rounds done; it cannot go on")

    def write(self, name: str, data: str | bytes) -> None:
        """One of the files that the end of a run writes."""
        write_atomic(self.path / name, data)

    def go_back(self, round_: int) -> None:
        """Forget every later round, also its checkpoint."""
        self.settle()
        for later in self._checkpoint_rounds():
            if later > round_:
                self._checkpoint_path(later).unlink()
        self._undo_after(round_)

    def undo_server(self, round_: int) -> None:
        """Forget what later rounds had the servers keep for single clients."""
        self.settle()
        for store in self._stores():
            if store.root != self.client_store.root:
                store.rollback(round_)

    def _undo_after(self, round_: int) -> None:
        for store in self._stores():
            store.rollback(round_)
        kept = [r for r in self.records() if r["round"] <= round_]
        write_atomic(self.path / "metrics.jsonl", "".join(to_json(r) + "\n" for r in kept))
        for leftover in self.path.rglob(".*.tmp"):  # of writes that a crash cut off
            leftover.unlink(missing_ok=True)

    def save_episode(self, number: int, models: Tree) -> None:
        """Keep the models that met at the end of an episode."""
        folder = self.path / _TEACHERS
        folder.mkdir(exist_ok=True)
        write_atomic(folder / f"episode-{number:04d}.safetensors", tree.encode(models))

    def saved_episodes(self) -> dict[int, Path]:
        """The episodes whose models were kept, by number."""
        files = (self.path / _TEACHERS).glob("episode-*.safetensors")
        return {int(p.stem.removeprefix("episode-")): p for p in files}

    def save_model(self, round_: int, data: bytes) -> None:
        """Keep the global model after a round."""
        folder = self.path / _MODELS
        folder.mkdir(exist_ok=True)
        write_atomic(folder / f"round-{round_:06d}.safetensors", data)

    def saved_models(self) -> dict[int, Path]:
        """The rounds whose global model was kept, in order."""
        files = (self.path / _MODELS).glob("round-*.safetensors")
        return dict(sorted((int(p.stem.removeprefix("round-")), p) for p in files))

    def regional_store(self, region: int) -> Store:
        """What a region's server keeps for single clients."""
        return Store(self.checkpoints / f"server-{region}", durable=False)

    def _stores(self) -> list[Store]:
        return [self.client_store, self.server_store, *map(Store, self.checkpoints.glob("server-*"))]

    def _checkpoint_path(self, round_: int) -> Path:
        return self.checkpoints / f"round-{round_:06d}.safetensors"

    def _checkpoint_rounds(self) -> list[int]:
        return sorted(int(p.stem.removeprefix("round-")) for p in self.checkpoints.glob("round-*.safetensors"))

    def _take_lock(self) -> None:
        """Hold the directory until this process ends, however it ends."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise FedstillError(f"{self.path} is in use by another process") from error
        except OSError as error:  # some network file systems have no locks
            log.warning("%s is not protected against a second process: %s", self.path, error)
        self._lock = lock

    def _clear(self) -> None:
        """Delete what an earlier run wrote, and nothing else."""
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)
        kept = (*self.saved_episodes().values(), *self.saved_models().values())
        for file in (*self.checkpoints.glob("round-*"), *kept, *(self.path / TENSORBOARD).glob("events.out.*")):
            file.unlink()
        for store in self._stores():
            shutil.rmtree(store.root, ignore_errors=True)

    def release(self) -> None:
        """Let other processes have the directory."""
        try:
            self.settle()
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None
            if self._writer:
                self._writer.shutdown(wait=False)
                self._writer = None


def check_place(path: Path, *, force: bool) -> None:
    """Refuse a place for a run that would cost something else its own."""
    if _is_free(path):
        return
    if not force:
        raise SettingError(
            f"{path} exists; continue it with 'fedstill resume {path}', choose another --out, "
            "or replace it with --force"
        )
    if not _was_run(path):
        raise SettingError(f"{path} is not a run directory; --force will not delete it")


def _is_free(path: Path) -> bool:
    """Whether a run may begin here: there is no file yet, but perhaps the lock of one that could not."""
    if not path.is_dir():
        return not path.exists()
    return not any(p.is_file() and p != path / _LOCK for p in path.rglob("*"))


def _was_run(path: Path) -> bool:
    """Whether a run wrote to this folder; a config.toml alone may be the user's own."""
    return any((path / name).is_file() for name in ("metrics.jsonl", _LOCK))


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON in which what is not a number is null."""
    return json.dumps(without_nan(value), indent=indent)


def without_nan(value: Any) -> Any:
    """The same value with None for what is not a number."""
    if isinstance(value, dict):
        return {k: without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
