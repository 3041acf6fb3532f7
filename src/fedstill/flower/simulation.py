"""Runs in Flower's simulation engine: its virtual nodes do the clients' work, on actors of Ray's."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

# Ray reads these when it is imported. It reports nothing to anyone; and as it listens on all interfaces, it serves
# only processes that have the token.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else under `uv run` it copies the working directory
if "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
    os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)

import ray
import ray._private.state
import ray._private.worker
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedstill.core import custom
from fedstill.core.errors import FedstillError
from fedstill.core.tree import Message, Tree
from fedstill.engine.base import Engine
from fedstill.engine.worker import Request, Worker, encode_answer, request_fields, request_from
from fedstill.flower.records import from_records, to_records
from fedstill.train.task import Task

log = logging.getLogger(__name__)

_AHEAD = 8  # requests under way for each worker: enough to keep all busy behind one slow client
_DEATHS_ALLOWED = 3
_POLL = 0.01  # seconds
_RAY: Any = ray._private  # Flower keeps its actors to itself; this version of it takes one version of Ray


class Simulation(Engine):
    """Sends each request to one of Flower's virtual nodes, any of which can do any client's work."""

    def __init__(self, worker: Worker, workers: int) -> None:
        self._worker, self._workers = worker, workers
        self._fleet: Fleet | None = None
        self._name = ""

    def run(self, requests: Sequence[Request], down: Message) -> Iterator[Tree]:
        try:
            fleet, broadcast = self._fleet or self._start(), to_records(down)
            places: dict[str, int] = {}  # of the messages under way
            done: dict[int, Tree] = {}
            sent = 0
            for place in range(len(requests)):
                while place not in done:
                    for request in requests[sent : place + fleet.ahead]:
                        about = {"worker": self._name, **request_fields(request)}
                        places[fleet.send(RecordDict({**broadcast, "request": ConfigRecord(about)}))] = sent
                        sent += 1
                    for message, answer in fleet.receive(places):
                        if "error" in answer:
                            raise FedstillError(answer["error"])
                        done[places.pop(message)] = answer["answer"]
                yield done.pop(place)
        except BaseException:
            self.close()  # what is still under way must not go on
            raise

    def close(self) -> None:
        if self._fleet:
            self._fleet.drop(self._name)
            self._fleet.close()
        self._fleet = None

    def _start(self) -> Fleet:
        self._fleet = Fleet(self._workers)
        self._name = self._fleet.keep(self._worker)
        return self._fleet


class Fleet:
    """Flower's simulation engine, up with so many workers until it is closed."""

    def __init__(self, workers: int) -> None:
        self.ahead = _AHEAD * workers
        self._workers = workers
        self._folder = tempfile.TemporaryDirectory(prefix="fedstill-", ignore_cleanup_errors=True)
        self._app = _WorkerApp()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        grids: queue.Queue[Grid | None] = queue.Queue()
        self._thread = threading.Thread(target=self._simulate, args=(grids,), daemon=True)
        self._thread.start()
        grid = grids.get()
        if grid is None:
            raise self._stopped()
        self._grid = grid
        # Flower takes one message from each node every 0.1 s, so there is a node for each message under way.
        self._nodes = list(grid.get_node_ids())

    def keep(self, worker: Worker) -> str:
        """Put a worker into Ray's store for the actors; messages refer to it by the name that is returned."""
        while not (ray.is_initialized() and _RAY.state.actors()):
            if self._stop.is_set():
                raise self._stopped()
            time.sleep(_POLL)
        try:
            stored = _StoredWorker(ray.put(_bare(worker)), os.getcwd(), _users_files())
        except Exception as error:
            reason = error.__cause__ or error
            raise FedstillError(f"engine = 'flower' cannot give this run to its workers: {reason}") from error
        name = secrets.token_hex(8)
        self._app.workers = {**self._app.workers, name: stored}
        return name

    def drop(self, name: str) -> None:
        """Forget a worker."""
        self._app.workers = {key: stored for key, stored in self._app.workers.items() if key != name}

    def send(self, content: RecordDict) -> str:
        """Have the next node work on this; the answer comes under the name that is returned."""
        self._nodes = [*self._nodes[1:], self._nodes[0]]
        (name,) = self._grid.push_messages([FlowerMessage(content, self._nodes[-1], "query")])
        return name

    def receive(self, names: Iterable[str]) -> list[tuple[str, Tree]]:
        """The answers that have arrived; if there are none, a moment later."""
        messages = list(self._grid.pull_messages(list(names)))
        if not messages:
            if self._stop.is_set():
                raise self._stopped()
            time.sleep(_POLL)
        return [(message.metadata.reply_to_message_id, _answer(message)) for message in messages]

    def close(self) -> None:
        self._stop.set()
        if ray.is_initialized():  # Flower would wait for what they do, and then not for their end
            for actor in _RAY.state.actors():
                _RAY.worker.global_worker.core_worker.kill_actor(ray.ActorID.from_hex(actor), True)
        self._thread.join()
        self._folder.cleanup()

    def _stopped(self) -> FedstillError:
        return FedstillError(f"Flower's simulation engine has stopped: {self._failure}")

    def _simulate(self, grids: queue.Queue[Grid | None]) -> None:
        client, server = ClientApp(), ServerApp()
        client.query()(self._app)

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            while len(list(grid.get_node_ids())) < self.ahead and not self._stop.is_set():
                time.sleep(_POLL)
            grids.put(grid)
            self._stop.wait()

        init: dict[str, Any] = {
            "address": "local",
            "_temp_dir": f"{self._folder.name}/ray",  # which it opens to everybody; what is above it is closed
            "num_cpus": self._workers,
            "include_dashboard": False,
            "configure_logging": False,  # it would reformat what the caller logs
            "log_to_driver": False,
        }
        # Ray replaces an actor that dies and repeats what it worked on: the same request gives the same bits.
        resources: dict[str, Any] = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": _DEATHS_ALLOWED - 1}
        settings = {"init_args": init, "client_resources": resources}
        try:
            with _aside(self._folder.name):
                run_simulation(server, client, num_supernodes=self.ahead, backend_config=settings)
        except BaseException as error:  # noqa: BLE001 - it is raised where answers are waited for, in another thread
            while error.__cause__:
                error = error.__cause__
            self._failure = error
        finally:
            self._stop.set()  # else `main` would wait on after a failure
            grids.put(None)


@contextmanager
def _aside(folder: str) -> Iterator[None]:
    """Flower and Ray keep to the folder, say nothing on the terminal, and leave the environment as it was."""
    environment = {name: os.environ.get(name) for name in ("FLWR_HOME", "PYTHONPATH")}
    loggers, printer = [logging.getLogger(name) for name in ("flwr", "ray")], _RAY.worker.print_to_stdstream
    levels = [logger.level for logger in loggers]
    os.environ["FLWR_HOME"] = folder
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    _RAY.worker.print_to_stdstream = lambda data, **_: log.info("Ray: %s", " ".join(data["lines"]))
    try:
        yield
    finally:
        _RAY.worker.print_to_stdstream = printer
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@dataclass(frozen=True)
class _StoredWorker:
    """A worker in Ray's store, and what an actor needs to be as its maker is: its folder, and the user's own files."""

    worker: Any  # a reference
    folder: str
    files: tuple[str, ...]


class _WorkerApp:
    """The client's app. Ray sends it along with every message, so it knows of workers stored since it was made."""

    def __init__(self) -> None:
        self.workers: dict[str, _StoredWorker] = {}

    def __call__(self, message: FlowerMessage, context: Context) -> FlowerMessage:
        request: dict[str, Any] = dict(message.content["request"])
        stored = self.workers[request.pop("worker")]
        records = encode_answer(
            lambda: _fetch(stored).handle(request_from(request), from_records(message.content)), to_records
        )
        return FlowerMessage(records, reply_to=message)


@lru_cache(maxsize=1)
def _fetch(stored: _StoredWorker) -> Worker:
    """The worker of the run that this actor serves."""
    torch.set_num_threads(1)
    os.chdir(stored.folder)
    for file in stored.files:
        custom.load(f"{file}:__name__")  # so that it is there under the name it has
    worker = ray.get(stored.worker)
    assert isinstance(worker, Worker)
    return worker


def _bare(worker: Worker) -> Worker:
    """A worker without networks, which every process makes for itself.

    On the way to another process, a network's parameters would cease to be views of one vector.
    """
    task = replace(worker.task)

    def bare(own: Task) -> Task:
        same = own.make_network is worker.task.make_network
        return task.trained_as(own.local) if same else replace(own)

    return replace(worker, task=task, regional=tuple((bare(own), method) for own, method in worker.regional))


def _users_files() -> tuple[str, ...]:
    """The files of the user's own that are loaded, in this order."""
    names = [name for name in sys.modules if name.startswith("fedstill_user_")]
    return tuple(str(sys.modules[name].__file__) for name in names)


def _answer(message: FlowerMessage) -> Tree:
    if message.has_content():
        return from_records(message.content)
    reason = message.error.reason or f"Flower's error {message.error.code}"
    if "ray.exceptions" in reason:
        reason = (
            f"the same work ended its worker process {_DEATHS_ALLOWED} times; is there enough memory? "
            "Fewer --workers need less"
        )
    return {"error": reason}
