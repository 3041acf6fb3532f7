"""Workers on a Ray cluster, one thread each: on this machine, or on as many as there are.

A node needs fedstill and Ray, and no disk in common with the others: the run, its data and each round's broadcast come
through Ray's object store, once a node; what clients keep travels with their requests and answers, and lies where the
run directory is.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedstill.core import device, tree
from fedstill.core.errors import FedstillError, in_one_line
from fedstill.core.processes import keep_memory
from fedstill.core.store import Store
from fedstill.core.tree import Message, Tree
from fedstill.engine import ray_connection
from fedstill.engine.base import Engine
from fedstill.engine.worker import Request, Score, Worker, encode_answer, request_fields, request_from
from fedstill.train.task import Task

log = logging.getLogger(__name__)

_QUEUED = 2  # calls a worker may hold, so that it never waits for the next
_CALL_SECONDS = 0.1  # of work in a call, if clients are small: each call costs some milliseconds of Ray's
_MOST_IN_CALL = 8  # groups of requests, whose answers are in memory at once
_DEATHS_ALLOWED = 2  # of workers by the same requests: one may be an accident, or a node that was switched off
_STARTS_ALLOWED = 10  # of workers one after the other that end before they are ready
_SECONDS = 20  # without a worker after which a user should know why nothing happens
_ADVICE = (
    "is there enough memory? Fewer workers, a smaller batch_size or model need less; if its code crashed, --engine "
    "inline with PYTHONFAULTHANDLER=1 shows where"
)


@dataclass
class WorkerHandle:
    """An actor of Ray's, and its requests under way: their places in the queue, in the order in which it works."""

    actor: Any
    starting: Any  # the reference to what it says when it is ready; None once it is
    node: str = ""
    assigned: dict[Any, Call] = field(default_factory=dict)  # by the reference to the first of its answers


@dataclass(frozen=True)
class Call:
    """Requests that were given to a worker at once: their places in the queue, and references to their answers."""

    places: list[int]
    answers: list[Any]


class RayCluster(Engine):
    """Spreads requests over actors; those of an actor or node that dies are worked on elsewhere."""

    def __init__(self, worker: Worker, workers: int, *, cores: int, address: str = "", gpus: float = 0.0) -> None:
        """`workers` 0: as many as the cluster has room for; `cores`: of a cluster on this machine; `gpus`: of each."""
        self._worker, self._workers, self._cores = worker, workers, cores
        self._address, self._gpus = address, gpus
        self._open: ExitStack | None = None
        self._make_actor: Any = None
        self._stored: Any = None
        self._handles: list[WorkerHandle] = []
        self._failed_starts = 0
        self._pace = _CALL_SECONDS  # seconds that a group of requests takes, by the last answer
        self._inline = 0  # bytes up to which an object goes along with a call, without Ray's store
        self._broadcasts = 0
        self.deaths = 0

    def run(self, requests: Sequence[Request], down: Message) -> Iterator[Tree]:
        groups = self._worker.grouped(requests)
        try:
            self._connect()
            import ray

            encoded, room = tree.encode(down), self._room()
            self._broadcasts += 1
            # In a list, Ray sends the reference: a worker fetches and decodes each broadcast once.
            content = encoded if len(encoded) < self._inline else [ray.put(encoded)]
            broadcast = self._broadcasts, content
            todo = deque(range(len(groups)))
            done: dict[int, list[Tree]] = {}
            deaths: dict[int, int] = {}
            for place in range(len(groups)):
                while place not in done:
                    self._start_workers(min(len(todo), room))
                    in_call = 1 if deaths else self._in_call()  # to know whose work it is that ends workers
                    # Far enough ahead to keep everyone busy behind one slow client, near enough to bound what waits.
                    end = place + 4 * _QUEUED * in_call * len(self._handles)
                    self._assign(todo, end, in_call, groups, broadcast)
                    self._receive(todo, done, groups, deaths)
                yield from done.pop(place)
        except BaseException:
            self.close()  # what is still under way must not go on
            raise

    def close(self) -> None:
        if self._open is None:
            return
        import ray

        for handle in self._handles:
            ray.kill(handle.actor)
        self._handles, self._stored = [], None
        self._open.close()
        self._open = None

    def _connect(self) -> None:
        if self._open is not None:
            return
        with ExitStack() as opened:
            self._inline = opened.enter_context(ray_connection.connected(self._address, self._cores))
            self._stored = ray_connection.put(_bare(self._worker), "this run")
            self._make_actor = _remote(self._gpus)
            self._open = opened.pop_all()

    def _room(self) -> int:
        """For how many workers the cluster has room, or how many were asked for; nodes may come and go."""
        if self._workers:
            return self._workers
        import ray

        there = ray.cluster_resources()
        room = there.get("CPU", 1)
        return max(1, int(min(room, there.get("GPU", 0) / self._gpus) if self._gpus else room))

    def _start_workers(self, wanted: int) -> None:
        """Have so many workers; those for which there is no room yet wait for it."""
        for _ in range(wanted - len(self._handles)):
            actor = self._make_actor.remote()
            home = {"folder": os.getcwd(), "path": list(sys.path), "gpu": bool(self._gpus), "versions": _versions()}
            self._handles.append(WorkerHandle(actor, actor.start.remote([self._stored], home)))

    def _in_call(self) -> int:
        """How many groups of requests a worker gets at once."""
        return max(1, min(_MOST_IN_CALL, round(_CALL_SECONDS / max(self._pace, 1e-6))))

    def _assign(
        self, todo: deque[int], end: int, in_call: int, groups: Sequence[Sequence[Request]], broadcast: Any
    ) -> None:
        """Give out requests up to this place: to everyone before anyone gets more, the last ones to who is idle."""
        ready = [handle for handle in self._handles if handle.starting is None]
        while ready and todo and todo[0] < end:
            handle = min(ready, key=lambda handle: len(handle.assigned))
            if len(handle.assigned) == _QUEUED or (handle.assigned and len(todo) < len(ready)):
                return
            fair = -(-len(todo) // (2 * len(ready)))  # towards the end fewer, so that all end together
            places = [todo.popleft() for _ in range(min(in_call, fair))]
            message = tree.encode({"groups": [self._with_states(groups[place]) for place in places]})
            found = handle.actor.work.options(num_returns=len(places)).remote(message, *broadcast)
            answers = found if len(places) > 1 else [found]
            handle.assigned[answers[0]] = Call(places, answers)

    def _with_states(self, requests: Sequence[Request]) -> Tree:
        """Requests with what their clients have kept."""
        store = self._worker.store
        states = [None if isinstance(r, Score) else store.read(r.client, before=r.round) for r in requests]
        return {"requests": [request_fields(request) for request in requests], "states": states}

    def _receive(
        self,
        todo: deque[int],
        done: dict[int, list[Tree]],
        groups: Sequence[Sequence[Request]],
        deaths: dict[int, int],
    ) -> None:
        """Wait until something has happened, and take it in."""
        import ray

        by_reference = {reference: handle for handle in self._handles for reference in handle.assigned}
        by_reference |= {handle.starting: handle for handle in self._handles if handle.starting is not None}
        found, _ = ray.wait(list(by_reference), num_returns=1, timeout=_SECONDS)
        if not found and all(handle.starting is not None for handle in self._handles):
            needed = f"a core and {self._gpus:g} of a GPU" if self._gpus else "a core"
            log.warning("the Ray cluster has no room for a worker, which needs %s; waiting ('ray status')", needed)
        for reference in found:
            handle = by_reference[reference]
            call = handle.assigned.get(reference)
            try:
                answers = [tree.decode(data) for data in ray.get(call.answers if call else [reference])]
            except ray.exceptions.RayTaskError as error:
                raise FedstillError(f"a worker on the Ray cluster failed: {in_one_line(error.cause)}") from error
            except ray.exceptions.RayError as error:
                self._drop(handle, todo, groups, deaths, error)
                continue
            for answer in answers:
                if "error" in answer:
                    raise FedstillError(answer["error"])
            if call is None:
                handle.starting, handle.node, self._failed_starts = None, answers[0]["answer"], 0
                continue
            del handle.assigned[reference]
            for place, answer in zip(call.places, answers, strict=True):
                done[place] = self._kept(groups[place], answer["answer"])
            self._pace = sum(answer["answer"]["seconds"] for answer in answers) / len(answers)

    def _kept(self, requests: Sequence[Request], found: Tree) -> list[Tree]:
        """The answers, once what the clients keep is kept."""
        for request, state in zip(requests, found["states"], strict=True):
            if state is not None and not isinstance(request, Score):
                self._worker.store.write(request.client, request.round, state)
        return list(found["answers"])

    def _drop(
        self,
        handle: WorkerHandle,
        todo: deque[int],
        groups: Sequence[Sequence[Request]],
        deaths: dict[int, int],
        error: Exception,
    ) -> None:
        """Forget a worker that died; its requests are put back to the head of the queue."""
        import ray

        ray.kill(handle.actor)  # it may only be out of reach
        self._handles.remove(handle)
        self.deaths += 1
        if handle.starting is not None:
            self._failed_starts += 1
            if self._failed_starts >= _STARTS_ALLOWED:
                raise FedstillError(f"workers do not start on the Ray cluster: {in_one_line(error)}") from error
        if handle.assigned:
            places = sorted(place for call in handle.assigned.values() for place in call.places)
            first, *more = next(iter(handle.assigned.values())).places
            deaths[first] = deaths.get(first, 0) + (not more)  # of several nobody knows whose it was: each comes alone
            work, where = self._worker.describe(groups[first]), handle.node
            if deaths[first] >= _DEATHS_ALLOWED:
                raise FedstillError(f"{work} ended its worker {_DEATHS_ALLOWED} times, at last on {where}; {_ADVICE}")
            work += f" or one of the {len(more)} sent with it" if more else ""
            log.warning("%s ended its worker on %s, or the node is gone; it is tried once more", work, where)
            todo.extendleft(reversed(places))


def _remote(gpus: float) -> Any:
    import ray

    return ray.remote(_Actor).options(num_cpus=1, num_gpus=gpus, scheduling_strategy="SPREAD")


def _bare(worker: Worker) -> Worker:
    """A worker without networks, which every process makes for itself, and without the run directory.

    On the way to another process, a network's parameters would cease to be views of one vector.
    """
    task = replace(worker.task)

    def bare(own: Task) -> Task:
        same = own.make_network is worker.task.make_network and not own.group
        return task.trained_as(own.local) if same else replace(own)

    regional = tuple((bare(own), method) for own, method in worker.regional)
    for own, _ in regional:
        if own.others:  # groups, whose tasks know each other
            own.beside(tuple(other for other, _ in regional if other is not own))
    return replace(worker, task=task, regional=regional, store=Store(Path()))


def _versions() -> str:
    """What must be the same everywhere for the same bits."""
    return f"fedstill {importlib.metadata.version('fedstill')}, torch {torch.__version__}"


class _States(Store):
    """What the clients of some requests keep: it came with them, and goes back with the answers."""

    def __init__(self, states: dict[int, Tree]) -> None:
        super().__init__(Path())
        self._states, self.written = states, dict[int, Tree]()

    def read(self, client: int, before: int) -> Tree | None:
        return self._states.get(client)

    def write(self, client: int, round_: int, state: Tree) -> None:
        self.written[client] = state


class _Actor:
    """The life of a worker on a node."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._device = device.CPU
        self._broadcast = 0  # the number of the one whose content is `_down`
        self._down: Message = {}

    def start(self, stored: list[Any], home: dict[str, Any]) -> bytes:
        """Become a worker of the run that is stored; the answer names the node."""
        return encode_answer(partial(self._start, stored[0], home), tree.encode)

    def _start(self, stored: Any, home: dict[str, Any]) -> str:
        import ray

        node = platform.node()
        if _versions() != home["versions"]:
            raise FedstillError(
                f"node {node} of the Ray cluster has {_versions()}, and the run was started with {home['versions']}; "
                "install the same on all"
            )
        self._broadcast = 0  # each run counts its own
        torch.set_num_threads(1)
        keep_memory()
        sys.path.extend(path for path in home["path"] if path not in sys.path)
        if os.path.isdir(home["folder"]):
            os.chdir(home["folder"])
        if home["gpu"]:
            self._device = device.find("cuda")  # the one that Ray lets this process see
        try:
            self._worker = ray.get(stored)
        except ImportError as error:
            raise FedstillError(f"node {node} of the Ray cluster: {error}; install it there") from error
        return node

    def work(self, message: bytes, broadcast: int, content: bytes | list[Any]) -> bytes | list[bytes]:
        """The answers to groups of requests, with what clients keep: an object each, as small ones need no store."""
        import ray

        with device.on(self._device):
            if broadcast != self._broadcast:
                data = content if isinstance(content, bytes) else ray.get(content[0])
                self._down, self._broadcast = tree.decode(data), broadcast
            groups = tree.decode(message)["groups"]
            answers = [encode_answer(partial(self._answers, group), tree.encode) for group in groups]
        return answers if len(answers) > 1 else answers[0]

    def _answers(self, found: Tree) -> Tree:
        assert self._worker is not None
        began = time.perf_counter()
        requests = [request_from(fields) for fields in found["requests"]]
        clients = [None if isinstance(request, Score) else request.client for request in requests]
        states = {c: s for c, s in zip(clients, found["states"], strict=True) if c is not None and s is not None}
        store = _States(states)
        answers = replace(self._worker, store=store).handle_group(requests, self._down)
        kept = [None if c is None else store.written.get(c) for c in clients]
        return {"answers": answers, "states": kept, "seconds": time.perf_counter() - began}
