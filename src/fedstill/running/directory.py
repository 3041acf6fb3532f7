"""The run directory: everything a run leaves behind, whole at any moment. `files` lists what is in it."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, cast

from fedstill.building.config import Config, is_object, read_toml, resolve
from fedstill.core import tree, trust
from fedstill.core.errors import DataError, FedstillError, SettingError
from fedstill.core.files import (
    GrowingFile,
    check_file,
    read_sealed_json,
    sha256,
    sync,
    write_atomic,
    write_sealed_json,
)
from fedstill.core.index import Entries, Entry, Index, newest
from fedstill.core.store import Store
from fedstill.core.tree import Tree
from fedstill.inference.description import read_description
from fedstill.methods import registry
from fedstill.metrics.records import RoundRecord
from fedstill.running import files, lock
from fedstill.running.places import check_place

log = logging.getLogger(__name__)

_KEEP_CHECKPOINTS = 2
_STANDS_ON = "stands on"  # in a checkpoint: the digests of what else is needed to go on from it
_SEAL = "# sha256 of the lines above: "  # the last line of config.toml
_UNCHECKED = "unchecked"
_CHECKED_AT_ONCE = 1000  # client states; where there are more, each is checked when it is read
_CLIENTS, _SERVER, _REGION, _MODELS, _TEACHERS = 0, 1, 2, -1, -2  # kinds in the index; the stores of regions count on


class RunDirectory:
    """Reads and writes one run directory. Only one process at a time may hold it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / files.CHECKPOINTS
        self.client_store = Store(self.checkpoints / "clients", durable=False)
        self.server_store = Store(self.checkpoints / "server", durable=False)
        self.keep = _KEEP_CHECKPOINTS  # how many checkpoints, the newest ones
        self.pinned: Callable[[int], bool] = lambda round_: False  # whether an older one is kept too
        self._regional: dict[int, Store] = {}
        self.index = Index(self.checkpoints / "index")
        self._metrics = GrowingFile(path / files.METRICS)
        self._saved: list[Entry] = []  # models that the next checkpoint's index names
        self._written: dict[str, str] = {}  # digests of files
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
            run._begin_index()
        except BaseException:
            run.release()
            raise
        return run

    @classmethod
    def open(cls, path: Path, *, lock: bool = True) -> RunDirectory:
        """A run directory that is there already."""
        if not (path / files.CONFIG).is_file():
            raise SettingError(f"{path} is not a run directory: it has no config.toml")
        run = cls(path)
        if lock:
            run._take_lock()
        try:
            run._set_run(run.index.run())
        except BaseException:
            run.release()
            raise
        return run

    def _begin_index(self) -> None:
        self.index.create()
        self._set_run(self.index.run())

    def _set_run(self, number: str) -> None:
        for store in (self.client_store, self.server_store, *self._regional.values()):
            store.run = number

    @property
    def served(self) -> bool:
        """Whether its clients are elsewhere; also if one of the files that say so is lost."""
        return any((self.path / name).exists() for name in (files.SERVED, files.COUNTS, files.RECEIVED))

    def served_run(self) -> dict[str, Any]:
        """What run.json holds: the number of a served run, its sites and rollbacks; nothing if there is none."""
        path = self.path / files.SERVED
        return read_sealed_json(path, earlier=not self.client_store.run) if path.exists() else {}

    def write_config(self, config: Config) -> None:
        """Set the settings of a run, or change those of one that goes on."""
        trust.record(self.path, config.model_dump())
        text = config.toml()
        write_atomic(self.path / files.CONFIG, f"{text}{_SEAL}{sha256(text.encode())}\n")

    def check_config(self) -> None:
        """Refuse settings that are not those that were written."""
        path = self.path / files.CONFIG
        text, seal, digest = path.read_bytes().rpartition(_SEAL.encode())
        if digest.strip() == _UNCHECKED.encode() or (not seal and not self.client_store.run):
            return
        if not seal or sha256(text) != digest.decode(errors="replace").strip():
            raise SettingError(
                f"{path} is not what was written; put it back, or if a change is meant, let it end in the line "
                f"'{_SEAL}{_UNCHECKED}'"
            )

    def config(self, *, replaced: Collection[str] = ()) -> Config:
        """The settings. A method in a file is run for that; code that is not `replaced` by the caller's is checked."""
        self.check_config()
        settings = read_toml(self.path / files.CONFIG)
        if settings.get("engine") == "flower":  # which gave the same bits
            settings["engine"] = "ray"
        unused = set(replaced) - ({"method"} if settings.get("region") else set())  # regions' tables are read by it
        trust.check(self.path, {name: value for name, value in settings.items() if name not in unused})
        method, given = settings.get("method"), "method" in replaced
        named = isinstance(method, str) and not given and not is_object(method)
        before = registry.added_settings(str(method)) if named else {}
        return resolve({"hyper": before}, settings, custom_method=given)

    def records(self) -> list[RoundRecord]:
        """The rounds in metrics.jsonl. A line cut short by a crash, and what follows it, is left out."""
        path = self.path / files.METRICS
        return [record for _, record in _lines(path.read_bytes())] if path.exists() else []

    def check_rounds(self, rounds: int) -> None:
        """Refuse an end of the run that lies before the rounds already done."""
        done = max([*(record["round"] for record in self.records()), *self.checkpoint_rounds()], default=0)
        if rounds < max(1, done):
            raise SettingError(
                f"rounds = {rounds}: {self.path} has {done} rounds done; give {max(1, done)} or more, in its "
                "config.toml or with --rounds, or start another run"
            )

    def append(self, record: RoundRecord) -> None:
        """One more line of metrics.jsonl, on disk when the next checkpoint is, and not there before the last one is."""
        self.settle()
        self._metrics.append((to_json(record) + "\n").encode())

    def checkpoint(self, round_: int, state: Tree, active: Iterable[int]) -> None:
        """Keep the server's state after a round, and forget what only older checkpoints needed.

        `active` are the clients whose state may have changed since the last checkpoint. It is written while the next
        round goes on; `settle` waits for it.
        """
        self.settle()  # one at a time, so that no more than one waits in memory
        self._writer = self._writer or ThreadPoolExecutor(1, "checkpoint")
        stands_on = {"metrics": self._metrics.mark(), "files": self._file_digests()}
        if number := self.served_run().get("number"):
            stands_on["number"] = number
        saved, self._saved = self._saved, []
        self._writing = self._writer.submit(
            self._write_checkpoint, round_, tree.copied(state) | {_STANDS_ON: stands_on}, list(active), saved
        )

    def settle(self) -> None:
        """Have the last checkpoint on disk when this returns."""
        if self._writing:
            wait([self._writing])  # also if this is interrupted and asked again
            done, self._writing = self._writing, None
            done.result()

    def _write_checkpoint(self, round_: int, state: Tree, active: Sequence[int], saved: Sequence[Entry]) -> None:
        """What a checkpoint stands on goes to disk first, so that none is ever there without it."""
        before = max(self.checkpoint_rounds(), default=0)
        entries = list(saved)
        for kind, store in self._stores().items():
            for client, written, digest in store.sync(active, since=before, until=round_):
                entries.append((written, kind, client, digest))
        if (metrics := self.path / files.METRICS).exists():
            sync(metrics)
        path, run = self._checkpoint_path(round_), self.client_store.run
        if run:
            self.index.append(entries)
            state[_STANDS_ON]["index"] = self.index.mark()
            write_atomic(path, tree.seal(state, _label(run, path)))
        else:  # a run that an earlier version began
            write_atomic(path, tree.encode({name: part for name, part in state.items() if name != _STANDS_ON}))
        rounds = self.checkpoint_rounds()
        rounds_to_keep = [r for r in rounds if r in rounds[-self.keep :] or self.pinned(r)]
        for store in self._stores().values():
            store.prune(active, needed=rounds_to_keep[0])
        for old in set(rounds) - set(rounds_to_keep):
            self._checkpoint_path(old).unlink()

    def _file_digests(self) -> dict[str, str]:
        """Of what was written before the first round."""
        for name in files.INPUTS:
            if name not in self._written and (self.path / name).is_file():
                self._written[name] = sha256((self.path / name).read_bytes())
        return {name: self._written[name] for name in files.INPUTS if (self.path / name).is_file()}

    def oldest_checkpoint(self) -> int:
        """The earliest round that the run could go back to."""
        return min(self.checkpoint_rounds(), default=0)

    def restore(self) -> tuple[int, Tree] | None:
        """The newest checkpoint that is whole, and everything younger than it undone; None: no round is done."""
        try:
            self.settle()  # of a run in this process that was broken off
        except OSError as error:
            log.warning("the last checkpoint was not written: %s", error)
        problems: dict[Path, Exception] = {}
        for round_ in reversed(self.checkpoint_rounds()):
            path = self._checkpoint_path(round_)
            try:
                state = self.read_checkpoint(round_)
            except (DataError, OSError) as error:
                log.warning("round %d cannot be gone on from: %s", round_, error)
                problems[path] = error
                continue
            for bad in problems:
                bad.rename(bad.with_suffix(".damaged"))
            if problems:
                log.warning("the run goes on from round %d, the checkpoint before, which is sound", round_)
            if not self.client_store.run:
                log.warning("%s has no digests: made by an earlier version; damage would not be noticed", self.path)
            self._undo_after(round_)
            return round_, state
        if problems:
            raise FedstillError(
                f"no checkpoint can be read: {next(iter(problems.values()))}; put back what is damaged from a copy "
                f"('fedstill verify {self.path}' lists all), or begin again: 'fedstill rollback {self.path} --to 0'"
            )
        self._check_nothing_done()
        self._undo_after(0)
        if not self.client_store.run:  # killed before there was one
            self._begin_index()
        return None

    def read_checkpoint(self, round_: int, *, everything: bool = False) -> Tree:
        """The server's state after a round, if it and all that it stands on are what was written; else DataError.

        Of many client states only that they are there, unless `everything` is to be read.
        """
        path, run = self._checkpoint_path(round_), self.client_store.run
        try:
            data = path.read_bytes()
            state, digest = tree.unseal(data, _label(run, path)) if run else (tree.decode(data), "")
        except DataError as error:
            raise DataError(f"{path} is damaged: {error}") from error
        if not isinstance(state, dict) or bool(run) != (_STANDS_ON in state) or bool(run) != bool(digest):
            raise DataError(f"{path} is damaged, or {self.index.path} is missing")
        if run:
            stands_on = state.pop(_STANDS_ON)
            for name, expected in stands_on["files"].items():
                check_file(self.path / name, expected)
            if stands_on.get("number", "") not in ("", self.served_run().get("number")):
                found = "of another run" if (self.path / files.SERVED).exists() else "missing"
                raise DataError(f"{self.path / files.SERVED} is {found}, and sites know this run by its number")
            self._metrics.check(stands_on["metrics"])
            self._check_states(self.index.check(stands_on["index"]), round_, everything=everything)
        return state

    def _check_states(self, entries: Entries, round_: int, *, everything: bool) -> None:
        """Refuse a checkpoint if a state that it stands on is missing, is not what was written, or is one too many."""
        for kind, store in self._stores().items():
            last = newest(entries, [kind])
            wanted, there = dict(zip(last["number"].tolist(), last["round"].tolist(), strict=True)), store.versions()
            for client, written in there:
                if wanted.get(client, 0) < written <= round_:
                    raise DataError(f"{store.path(client, written)} is not of this run")
            for client, written in wanted.items():
                if (client, written) not in there:
                    raise DataError(f"{store.path(client, written)} is missing")
            for entry in last if everything or len(last) <= _CHECKED_AT_ONCE else ():
                client, written = int(entry["number"]), int(entry["round"])
                if store.check(client, written)[1] != entry["sha256"].tobytes().hex():
                    raise DataError(f"{store.path(client, written)} is not of this run")

    def client_states(self, client: int) -> tuple[Tree, Tree]:
        """What a client keeps for itself, and what the servers keep for it; empty if they keep nothing."""
        kept = (store.latest(client) for kind, store in self._stores().items() if kind != _CLIENTS)
        return self.client_store.latest(client) or {}, next(filter(None, kept), {})

    def server_state(self) -> Tree:
        """What the method kept on the server at the newest checkpoint; empty if there is none. Changes nothing."""
        rounds = self.checkpoint_rounds()
        return self.read_checkpoint(rounds[-1])["state"] if rounds else {}

    def _check_nothing_done(self) -> None:
        """Refuse to start anew, and so to forget its rounds, in a directory that lost its checkpoints."""
        done = len(self.records())
        due = read_toml(self.path / files.CONFIG).get("checkpoint_every", 1)
        # A round is in metrics.jsonl before its checkpoint is written, so the first may lack one.
        if done > due or (self.path / files.SUMMARY).exists():
            raise FedstillError(f"{self.checkpoints} holds no checkpoint of the {done} rounds done; it cannot go on")

    def write(self, name: str, data: str | bytes) -> None:
        """One of the files that the end of a run writes."""
        write_atomic(self.path / name, data)
        self._written[name] = sha256(data.encode() if isinstance(data, str) else data)

    def write_digests(self) -> None:
        """The end of a run: the digests of all results, also of the best round's models, which callbacks wrote."""
        best = [*self.path.glob(files.BEST), *self.path.glob(files.BEST_OF_GROUPS)]
        self._written |= {file.name: sha256(file.read_bytes()) for file in best}
        digests = {name: digest for name, digest in self._written.items() if (self.path / name).is_file()}
        digests |= self._file_digests() | {files.METRICS: self._metrics.mark()["sha256"]}
        write_sealed_json(self.path / files.DIGESTS, {"files": dict(sorted(digests.items()))})

    def go_back(self, round_: int) -> None:
        """Forget every later round, also its checkpoint."""
        self.settle()
        for later in self.checkpoint_rounds():
            if later > round_:
                self._checkpoint_path(later).unlink()
        self._undo_after(round_)

    def forget_results(self, round_: int, rounds_per_episode: int) -> None:
        """Delete what the end of a run wrote, and the models that rounds after this one saved."""
        for name in files.RESULTS:
            (self.path / name).unlink(missing_ok=True)
        for best in (*self.path.glob(files.BEST), *self.path.glob(files.BEST_OF_GROUPS)):
            if _best_round(best) not in range(round_ + 1):
                best.unlink()
        for file in self.path.glob(files.FURTHER_MODELS):
            file.unlink()
        later = [path for saved, path in self.saved_models().items() if saved > round_]
        later += [path for episode, path in self.saved_episodes().items() if episode * rounds_per_episode > round_]
        for path in later:
            path.unlink()

    def undo_server(self, round_: int) -> None:
        """Forget what later rounds had the servers keep for single clients."""
        self.settle()
        for store in self._stores().values():
            if store.root != self.client_store.root:
                store.rollback(round_)

    def _undo_after(self, round_: int) -> None:
        for store in self._stores().values():
            store.rollback(round_)
        path = self.path / files.METRICS
        lines = _lines(path.read_bytes()) if path.exists() else []
        self._metrics.replace(b"".join(line + b"\n" for line, record in lines if record["round"] <= round_))
        if self.client_store.run:
            self.index.cut(round_)
        self._saved = []
        (self.path / files.DIGESTS).unlink(missing_ok=True)  # of results that the end of the run writes again
        for leftover in self.path.rglob(".*.tmp"):  # of writes that a crash cut off
            leftover.unlink(missing_ok=True)

    def save_episode(self, number: int, models: Tree) -> None:
        """Keep the models that met at the end of an episode."""
        folder = self.path / files.TEACHERS
        folder.mkdir(exist_ok=True)
        data = tree.encode(models)
        write_atomic(folder / f"episode-{number:04d}.safetensors", data)
        self._saved.append((models["round"], _TEACHERS, number, sha256(data)))

    def saved_episodes(self) -> dict[int, Path]:
        """The episodes whose models were kept, by number."""
        return _numbered(self.path / files.TEACHERS, "episode-", ".safetensors")

    def save_model(self, round_: int, data: bytes) -> None:
        """Keep the global model after a round."""
        folder = self.path / files.MODELS
        folder.mkdir(exist_ok=True)
        write_atomic(folder / f"round-{round_:06d}.safetensors", data)
        self._saved.append((round_, _MODELS, round_, sha256(data)))

    def saved_models(self) -> dict[int, Path]:
        """The rounds whose global model was kept, in order."""
        return _numbered(self.path / files.MODELS, "round-", ".safetensors")

    def saved_digests(self, round_: int) -> dict[str, dict[Path, str]]:
        """What the digests of saved models and teachers were when the checkpoint of a round was made."""
        state = tree.decode(self._checkpoint_path(round_).read_bytes())
        entries = self.index.check(state[_STANDS_ON]["index"])
        names = {
            _MODELS: lambda n: f"{files.MODELS}/round-{n:06d}.safetensors",
            _TEACHERS: lambda n: f"{files.TEACHERS}/episode-{n:04d}.safetensors",
        }
        return {
            folder: {
                self.path / names[kind](int(e["number"])): e["sha256"].tobytes().hex() for e in newest(entries, [kind])
            }
            for kind, folder in ((_MODELS, files.MODELS), (_TEACHERS, files.TEACHERS))
        }

    def regional_store(self, region: int) -> Store:
        """What a region's server keeps for single clients."""
        if region not in self._regional:
            path = self.checkpoints / f"server-{region}"
            self._regional[region] = Store(path, durable=False, run=self.client_store.run)
        return self._regional[region]

    def _stores(self) -> dict[int, Store]:
        """By their kind in the index."""
        regional = {_REGION + n: self.regional_store(n) for n in _numbered(self.checkpoints, "server-")}
        return {_CLIENTS: self.client_store, _SERVER: self.server_store, **regional}

    def _checkpoint_path(self, round_: int) -> Path:
        return self.checkpoints / f"round-{round_:06d}.safetensors"

    def checkpoint_rounds(self) -> list[int]:
        """The rounds that have a checkpoint, in order."""
        return sorted(_numbered(self.checkpoints, "round-", ".safetensors"))

    def _take_lock(self) -> None:
        """Hold the directory until this process ends, however it ends."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock = lock.take(self.path)

    def _clear(self) -> None:
        """Delete what an earlier run wrote, and nothing else."""
        for name in files.REPLACED:
            (self.path / name).unlink(missing_ok=True)
        saved = [*self.saved_episodes().values(), *self.saved_models().values()]
        saved += [file for kind in (files.FURTHER_MODELS, files.BEST_OF_GROUPS) for file in self.path.glob(kind)]
        for file in (*self.checkpoints.glob("round-*"), *saved, *(self.path / files.TENSORBOARD).glob("events.out.*")):
            file.unlink()
        self.index.path.unlink(missing_ok=True)
        for store in self._stores().values():
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


def _best_round(best: Path) -> int | None:
    """The round that a model was the best of; None if the file does not say."""
    try:
        return read_description(best).round
    except DataError:
        written = tree.metadata(best).get("round", "")  # by an earlier version
        return int(written) if written.isdecimal() else None


def _label(run: str, checkpoint: Path) -> str:
    return f"{run} {checkpoint.stem}"


def _numbered(folder: Path, prefix: str, suffix: str = "") -> dict[int, Path]:
    """What is called by these words with a number between them, in its order."""
    found = {p: p.name.removeprefix(prefix).removesuffix(suffix) for p in folder.glob(f"{prefix}*{suffix}")}
    return dict(sorted((int(n), p) for p, n in found.items() if n.isascii() and n.isdecimal() and len(n) < 10))


def _lines(data: bytes) -> list[tuple[bytes, RoundRecord]]:
    """The lines of metrics.jsonl up to the first that is none."""
    found: list[tuple[bytes, RoundRecord]] = []
    for line in data.removesuffix(b"\n").split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(record, dict) or type(record.get("round")) is not int:
            break
        found.append((line, cast(RoundRecord, record)))
    return found


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
