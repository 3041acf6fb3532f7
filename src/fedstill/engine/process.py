"""Worker processes, one thread each."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from fedstill.core import tree
from fedstill.core.errors import FedstillError
from fedstill.core.processes import die_with_parent, keep_memory
from fedstill.core.tree import Message, Tree
from fedstill.engine.base import Engine
from fedstill.engine.worker import Request, Worker, encode_answer, request_fields, request_from

log = logging.getLogger(__name__)

# Forked workers start at once, see the data without copying, and need nothing to be importable: a method or
# network typed into a notebook works. Where a system cannot fork, they are spawned.
_CONTEXT: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
_QUEUED = 2  # requests a worker may hold, so that it never waits for the next
_DEATHS_ALLOWED = 2  # of workers by the same requests: one may be an accident
_EXIT_SECONDS = 5  # that a process whose pipe is closed may take to end
_TRY_LESS = "the system does that when memory runs out: fewer workers, a smaller batch_size or model need less"
_TRY_INLINE = (
    "its code crashed: --engine inline (engine = 'inline' in config.toml, if it is resumed) with "
    "PYTHONFAULTHANDLER=1 shows where; another model, batch_size or precision may avoid it"
)
_PIPE = 1 << 20  # bytes; as much as a system allows everyone
_BROADCAST = b""  # what follows is for all requests until the next


@dataclass
class WorkerHandle:
    """One worker process and the requests it was given, by their place in the queue."""

    process: BaseProcess
    pipe: Connection  # for requests
    answers: Connection
    assigned: deque[int] = field(default_factory=deque)
    last_broadcast: bytes | None = None  # so that each is sent once


class Processes(Engine):
    """Spreads requests over worker processes; replaces a worker that dies and repeats its requests."""

    def __init__(self, worker: Worker, workers: int) -> None:
        self._worker = worker
        self._handles: list[WorkerHandle] = []
        self._count = workers
        self.deaths = 0

    def run(self, requests: Sequence[Request], down: Message) -> Iterator[Tree]:
        broadcast, groups = tree.encode(down), self._worker.grouped(requests)
        while len(self._handles) < min(self._count, len(groups)):
            self._handles.append(self._start_worker(self._handles))
        todo = deque(range(len(groups)))
        done: dict[int, list[Tree]] = {}
        deaths: dict[int, int] = {}
        for handle in [handle for handle in self._handles if not handle.process.is_alive()]:
            self._replace(handle, todo, groups, deaths)  # it died while it had nothing to do, which is nobody's fault
        # Far enough ahead to keep everyone busy behind one slow client, near enough to bound what waits here.
        window = 4 * _QUEUED * self._count
        try:
            for place in range(len(groups)):
                while place not in done:
                    self._assign(todo, place + window, groups, broadcast, deaths)
                    ready = wait([h.answers for h in self._handles if h.assigned])
                    for handle in [h for h in self._handles if h.answers in ready]:
                        try:
                            answer = tree.decode(handle.answers.recv_bytes())
                        except (EOFError, OSError):
                            self._replace(handle, todo, groups, deaths)
                            continue
                        if "error" in answer:
                            raise FedstillError(answer["error"])
                        done[handle.assigned.popleft()] = answer["answer"]
                yield from done.pop(place)
        except BaseException:
            self.close()  # answers still under way must not be taken for those of the next call
            raise

    def close(self) -> None:
        for handle in self._handles:
            handle.pipe.close()
            handle.answers.close()
            handle.process.kill()
        for handle in self._handles:
            handle.process.join()
        self._handles = []

    def _start_worker(self, others: list[WorkerHandle]) -> WorkerHandle:
        requests, ours = _CONTEXT.Pipe(duplex=False)
        answers, theirs = _CONTEXT.Pipe(duplex=False)
        for end in (ours, theirs):
            _enlarge(end)
        inherited = [ours, answers, *(end for h in others for end in (h.pipe, h.answers))]
        process = _CONTEXT.Process(
            target=_serve, args=(self._worker, requests, theirs, inherited, os.getpid()), daemon=True
        )
        process.start()
        requests.close()
        theirs.close()
        return WorkerHandle(process, ours, answers)

    def _assign(
        self,
        todo: deque[int],
        end: int,
        groups: Sequence[Sequence[Request]],
        broadcast: bytes,
        deaths: dict[int, int],
    ) -> None:
        """Give out requests up to this place: to everyone before anyone gets more, the last ones to who is idle."""
        while todo and todo[0] < end:
            handle = min(self._handles, key=lambda handle: len(handle.assigned))
            if len(handle.assigned) == _QUEUED or (handle.assigned and len(todo) < len(self._handles)):
                return
            new = handle.last_broadcast is None
            if self._send(handle, todo, groups, broadcast):
                continue
            if handle.assigned:  # what it answered before it died is still to be read
                return
            if new:  # what it was sent first has ended it; one that had worked before died with nothing to do
                handle.assigned.append(todo.popleft())
            self._replace(handle, todo, groups, deaths)

    def _send(
        self, handle: WorkerHandle, todo: deque[int], groups: Sequence[Sequence[Request]], broadcast: bytes
    ) -> bool:
        """Send the next requests; False if the worker is gone."""
        requests = [request_fields(request) for request in groups[todo[0]]]
        try:
            if handle.last_broadcast is not broadcast:
                handle.pipe.send_bytes(_BROADCAST)
                handle.pipe.send_bytes(broadcast)
                handle.last_broadcast = broadcast
            handle.pipe.send_bytes(json.dumps(requests).encode())
        except OSError:
            return False
        handle.assigned.append(todo.popleft())
        return True

    def _replace(
        self, handle: WorkerHandle, todo: deque[int], groups: Sequence[Sequence[Request]], deaths: dict[int, int]
    ) -> None:
        """A new worker for one that died, and its requests back to the head of the queue."""
        handle.process.join(_EXIT_SECONDS)  # the exit code to report is its own
        handle.process.kill()
        handle.process.join()
        handle.pipe.close()
        handle.answers.close()
        self._handles.remove(handle)
        self.deaths += 1
        if handle.assigned:
            first = handle.assigned[0]
            deaths[first] = deaths.get(first, 0) + 1
            work, (end, advice) = self._worker.describe(groups[first]), _cause(handle.process.exitcode)
            if deaths[first] >= _DEATHS_ALLOWED:
                raise FedstillError(f"{work} ended its worker process {_DEATHS_ALLOWED} times ({end}); {advice}")
            log.warning("%s ended its worker process (%s); it is tried once more", work, end)
            todo.extendleft(reversed(handle.assigned))
        self._handles.append(self._start_worker(self._handles))


def _cause(exitcode: int | None) -> tuple[str, str]:
    """How a process ended, and what its user may try."""
    if exitcode is None or exitcode >= 0:
        return f"exit code {exitcode}", _TRY_INLINE
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:  # a real-time signal
        name = f"signal {-exitcode}"
    return name, _TRY_LESS if name == "SIGKILL" else _TRY_INLINE


def _enlarge(pipe: Connection) -> None:
    """Have a pipe take a whole message, so that nobody need wait until it is read."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE)


def _serve(worker: Worker, pipe: Connection, answers: Connection, inherited: list[Connection], parent: int) -> None:
    """The life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent)
    if _CONTEXT.get_start_method() == "fork":
        for other in inherited:  # else a pipe stays open after its owner died, and nobody notices
            with contextlib.suppress(OSError):
                other.close()
    torch.set_num_threads(1)
    keep_memory()
    down: Message = {}
    while True:
        try:
            request = pipe.recv_bytes()
            if request == _BROADCAST:
                down = tree.decode(pipe.recv_bytes())
                continue
        except (EOFError, OSError):
            return
        data = encode_answer(partial(_work, worker, json.loads(request), down), tree.encode)
        try:
            answers.send_bytes(data)
        except OSError:
            return


def _work(worker: Worker, requests: list[dict[str, Any]], down: Message) -> Tree:
    return worker.handle_group([request_from(fields) for fields in requests], down)
