"""The server trusts no answer: names, shapes, dtypes and finiteness are checked before a method sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from fedstill.core.device import to_current_device
from fedstill.core.errors import FedstillError
from fedstill.core.tree import Tree, nbytes
from fedstill.methods.base import Part, Uplink, fault

log = logging.getLogger(__name__)


class TooFewClients(FedstillError):
    """A round got fewer usable answers than it needs."""


class Checked:
    """The good uplinks of a round, one at a time and in order, with counts of what came."""

    def __init__(
        self,
        clients: Sequence[int],
        answers: Iterator[Tree],
        declared: dict[str, Part],
        *,
        least: int,
        tick: Callable[[], None],
        who: str = "client",
    ) -> None:
        self.good: list[int] = []
        self.dropped: dict[int, str] = {}
        self.bytes_up = 0
        self.waited = 0.0  # seconds until answers came, while the server had nothing else to do
        self.metrics: dict[str, list[float]] = {}
        self._clients, self._answers, self._declared = clients, answers, declared
        self._least, self._tick, self._who = least, tick, who

    def _drop(self, client: int, problem: str) -> None:
        self.dropped[client] = problem
        log.warning("%s %d dropped: %s", self._who, client, problem)

    def __iter__(self) -> Iterator[Uplink]:
        for client, answer in zip(self._clients, self._timed(), strict=True):
            self._tick()
            if "failure" in answer:
                self._drop(client, answer["failure"])
                continue
            message, samples = answer["message"], answer["samples"]
            self.bytes_up += nbytes(message)
            if problem := fault(message, self._declared):
                self._drop(client, problem)
                continue
            self.good.append(client)
            for name, value in answer["metrics"].items():
                self.metrics.setdefault(name, []).append(value)
            yield Uplink(client, samples, {name: to_current_device(part) for name, part in message.items()})
        self._check_enough()

    def _timed(self) -> Iterator[Tree]:
        while True:
            began = time.perf_counter()
            answer = next(self._answers, None)
            self.waited += time.perf_counter() - began
            if answer is None:
                return
            yield answer

    def _check_enough(self) -> None:
        if len(self.good) < self._least:
            last = next(reversed(self.dropped.values()), "no answer")
            raise TooFewClients(
                f"only {len(self.good)} of {len(self._clients)} {self._who}s gave a usable answer, "
                f"{self._least} are needed (min_clients); the last one dropped: {last}"
            )
