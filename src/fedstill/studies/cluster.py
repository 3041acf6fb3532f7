"""Many runs on a Ray cluster: each whole run on some node, its directory here.

A run works in a folder of its node, and what has changed there comes back while it goes on: a node needs no disk in
common with this machine, and a run whose node is gone goes on elsewhere from what has come back. Data come from here,
through Ray's object store.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedstill.building.config import anchored
from fedstill.building.data import data_source, load_data, load_proxy
from fedstill.core.errors import in_one_line
from fedstill.core.files import write_atomic
from fedstill.data.federation import Federation
from fedstill.engine import ray_connection
from fedstill.running import lock
from fedstill.running.files import CHECKPOINTS
from fedstill.running.inputs import saved_tokenizer
from fedstill.running.machine import cores
from fedstill.studies.cells import Cell, Failure, Watcher, report_run

log = logging.getLogger(__name__)

_DEATHS_ALLOWED = 2  # of nodes or processes by the same run
_SECONDS = 20  # after which what a run has written comes back: as much is lost with its node
_INLINE = {"engine": "inline", "ray_address": "", "worker_gpus": 0.0}  # how a run works on its node


@dataclass
class Study:
    """Runs that are to be done, and how far they are."""

    cells: Sequence[Cell]
    jobs: int  # at a time; 0: as many as the cluster has room for
    watcher: Watcher
    failed: dict[Path, Failure] = field(default_factory=dict)
    _told: dict[Path, int] = field(default_factory=dict)  # the last round that the watcher knows
    _deaths: dict[Path, int] = field(default_factory=dict)
    _stored: dict[Any, Any] = field(default_factory=dict)  # references to what several runs share

    def run(self) -> None:
        """Carry out all of them; those that fail are then in `failed`."""
        with ray_connection.connected(self.cells[0].config.ray_address, cores()):
            import ray

            waiting, running = deque(self.cells), dict[Any, tuple[Cell, int]]()
            try:
                while waiting or running:
                    while waiting and len(running) < (self.jobs or _room(waiting[0].config.worker_gpus)):
                        cell = waiting.popleft()
                        running[self._start(cell)] = cell, _lock(cell.path)
                    (news, *_), _ = ray.wait(list(running), num_returns=1)
                    cell, held = running[news]
                    if not self._hear(news, cell, waiting):
                        del running[news]
                        os.close(held)
            finally:
                for news, (_, held) in running.items():
                    ray.cancel(news, force=True)
                    os.close(held)

    def _start(self, cell: Cell) -> Any:
        """A run on some node: what it will say, one message after the other."""
        import ray

        if cell.path not in self._told:
            self._told[cell.path] = cell.rounds_done() or 0
            self.watcher.started(cell)
        config = anchored(cell.config)
        shared = {"data": self._data(cell)}
        if config.proxy not in ("", "pool"):
            shared["proxy"] = self._proxy(cell)
        there = replace(cell, config=config, own={k: v for k, v in cell.own.items() if k not in shared})
        stored = ray_connection.put(there, "this run")
        options = {"num_cpus": 1, "num_gpus": config.worker_gpus, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        home = {"folder": os.getcwd(), "path": list(sys.path), "seconds": _SECONDS}
        begin = ray.remote(_on_node).options(**options, num_returns="streaming")
        return begin.remote(
            [stored], {name: [reference] for name, reference in shared.items()}, home, _changed(cell.path, {})[0]
        )

    def _data(self, cell: Cell) -> Any:
        """A reference to a run's data, which are read here, once for all runs that share them."""
        given, tokenizer = cell.own.get("data"), saved_tokenizer(cell.path)
        key = id(given) if given is not None else (data_source(cell.config), tokenizer)
        return self._put(key, lambda: load_data(cell.config, tokenizer) if given is None else given)

    def _proxy(self, cell: Cell) -> Any:
        """The same of its proxy data; of tables they are known once the clients' are standardised."""
        import ray

        given, data = cell.own.get("proxy"), ray.get(self._data(cell))
        target = data.dataset if isinstance(data, Federation) else data
        key = id(given) if given is not None else (data_source(cell.config), cell.config.proxy)
        return self._put(key, lambda: load_proxy(cell.config, given, target) if target.table is None else given)

    def _put(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._stored:
            self._stored[key] = ray_connection.put(make(), "the data")
        return self._stored[key]

    def _hear(self, news: Any, cell: Cell, waiting: deque[Cell]) -> bool:
        """Take in one message of a run; False if it was the last."""
        import ray

        try:
            message = ray.get(next(news))
        except StopIteration:
            self.watcher.finished(cell)
            return False
        except ray.exceptions.RayTaskError as error:
            self.failed[cell.path] = Failure(in_one_line(error.cause))
            return True
        except ray.exceptions.RayError as error:
            self._deaths[cell.path] = self._deaths.get(cell.path, 0) + 1
            if self._deaths[cell.path] < _DEATHS_ALLOWED:
                log.warning("%s: its process or node is gone; it goes on elsewhere", cell.path)
                waiting.appendleft(cell)
            else:
                gone = f"its process or node was gone {_DEATHS_ALLOWED} times: {in_one_line(error)}"
                self.failed[cell.path] = Failure(gone)
                self.watcher.finished(cell)
            return False
        if "error" in message:
            self.failed[cell.path] = Failure(message["error"], message["diverged"])
        _apply(message, cell.path)
        if message.get("round", 0) > self._told[cell.path]:
            self._told[cell.path] = message["round"]
            self.watcher.round_done(cell, message["round"])
        return True


def _room(gpus: float) -> int:
    """How many runs the cluster has room for."""
    import ray

    there = ray.cluster_resources()
    return max(1, int(min(there.get("CPU", 1), there.get("GPU", 0) / gpus if gpus else float("inf"))))


def _lock(path: Path) -> int:
    """Hold the directory here as long as its run goes on elsewhere."""
    (path / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    return lock.take(path)


# --- directories that are the same in two places ----------------------------------------------------------------------

Known = dict[str, tuple[int, int]]  # when each file was changed, and its size


def _changed(path: Path, known: Known) -> tuple[dict[str, bytes], Known]:
    """The files of a run directory that are not as they were known to be, and what is now known.

    Checkpoints are read first, and written last: whatever is written meanwhile, what they stand on is there.
    """
    found: dict[str, bytes] = {}
    there: Known = {}
    names = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
    for name in sorted(names, key=lambda name: not _is_checkpoint(name)):
        if name == lock.LOCK or name.endswith(".tmp"):
            continue
        try:
            about = (path / name).stat()
            there[name] = about.st_mtime_ns, about.st_size
            if known.get(name) != there[name]:
                found[name] = (path / name).read_bytes()
        except FileNotFoundError:  # of a round that is not needed any more
            there.pop(name, None)
    return found, there


def _is_checkpoint(name: str) -> bool:
    return name.startswith(f"{CHECKPOINTS}/round-")


def _apply(message: dict[str, Any], path: Path) -> None:
    """Have what a run has written, and no longer what it has deleted."""
    written: dict[str, bytes] = message.get("written", {})
    for name in sorted(written, key=_is_checkpoint):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path / name, written[name])
    for name in message.get("gone", ()):
        (path / name).unlink(missing_ok=True)


# --- on a node --------------------------------------------------------------------------------------------------------


def _on_node(
    stored: list[Any], shared: dict[str, list[Any]], home: dict[str, Any], files: dict[str, bytes]
) -> Iterator[dict[str, Any]]:
    """Carry out a run, and say how it goes on and what has changed in its directory."""
    import ray

    sys.path.extend(path for path in home["path"] if path not in sys.path)
    if os.path.isdir(home["folder"]):
        os.chdir(home["folder"])
    cell: Cell = ray.get(stored[0])
    own = {name: ray.get(reference[0]) for name, reference in shared.items()}
    with tempfile.TemporaryDirectory(prefix="fedstill-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / cell.path.name
        _apply({"written": files}, path)
        here = replace(cell, path=path, own={**cell.own, **own})
        yield from _Reports(path, home["seconds"]).of(here)


class _Reports:
    """What a run in a thread says, with the files that have changed every few seconds and at its end."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._seconds = seconds
        self._path, self._known, self._sent_at = path, _changed(path, {})[1], time.monotonic()
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def of(self, cell: Cell) -> Iterator[dict[str, Any]]:
        thread = threading.Thread(target=self._run, args=(cell,), daemon=True)
        thread.start()
        while (message := self._queue.get()) is not None:
            yield message
        thread.join()
        yield self._files()

    def _run(self, cell: Cell) -> None:
        try:
            report_run(cell, self._tell, **_INLINE)
        finally:
            self._queue.put(None)

    def _tell(self, message: dict[str, Any]) -> None:
        due = time.monotonic() - self._sent_at > self._seconds
        self._queue.put(message | (self._files() if due else {}))

    def _files(self) -> dict[str, Any]:
        written, known = _changed(self._path, self._known)
        gone = [name for name in self._known if name not in known]
        self._known, self._sent_at = known, time.monotonic()
        return {"written": written, "gone": gone}


def run_on_cluster(cells: Sequence[Cell], jobs: int, watcher: Watcher) -> dict[Path, Failure]:
    """Run the cells; those that failed, and why."""
    study = Study(cells, jobs, watcher)
    study.run()
    return study.failed
