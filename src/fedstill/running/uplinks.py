"""The server trusts no answer: names, shapes, dtypes and finiteness are checked before a method sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from fedstill.building.config import Config
from fedstill.core.device import to_current_device
from fedstill.core.errors import FedstillError
from fedstill.core.tree import Message, Tree, nbytes
from fedstill.methods.base import Method, Part, Uplink, fault
from fedstill.methods.summed import masked_bytes
from fedstill.running.judging import AnswerBuffer, Judge

log = logging.getLogger(__name__)

_Answer = tuple[int, int, dict[str, float], Message]  # client, samples, metrics, message


class RoundFailed(FedstillError):
    """A round came to nothing that could be kept; it may be tried again."""

    def __init__(self, text: str, dropped: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.dropped = dict(dropped or {})  # why, of each client


class TooFewClients(RoundFailed):
    """A round got fewer usable answers than it needs."""

    def __init__(self, good: int, asked: int, least: int, dropped: Mapping[int, str], who: str = "client") -> None:
        last = "".join(f"; the last one dropped: {why}" for why in list(dropped.values())[-1:])
        super().__init__(
            f"only {good} of {asked} {who}s gave a usable answer, {least} are needed (min_clients, or the method)"
            + last,
            dropped,
        )


class Checked:
    """The good uplinks of a round, one at a time and in order, with counts of what came."""

    def __init__(
        self,
        clients: Sequence[int],
        answers: Iterator[Tree],
        declared: dict[str, Part],
        *,
        least: int,
        tick: Callable[[int, Mapping[str, float]], None],
        who: str = "client",
        names: Sequence[str] = (),
        judge: Judge | None = None,
        masked: bool = False,
    ) -> None:
        """With a `judge`, all answers are waited for before the first is handed on; `names` are for the log.

        `masked`: what comes is as long as masked sums are.
        """
        self.good: list[int] = []
        self.dropped: dict[int, str] = {}
        self.bytes_up = 0
        self.waited = 0.0  # seconds until answers came, while the server had nothing else to do
        self.metrics: dict[str, list[float]] = {}
        self.by_client: dict[int, Mapping[str, float]] = {}  # the same
        self.states: dict[int, int] = {}  # of clients elsewhere: the round whose state each has
        self._clients, self._answers, self._declared = clients, answers, declared
        self._least, self._tick, self._who, self._names, self._judge = least, tick, who, names, judge
        self._masked = masked

    def _drop(self, client: int, problem: str) -> None:
        self.dropped[client] = problem
        log.warning("%s %s dropped: %s", self._who, self._names[client] if self._names else client, problem)

    def __iter__(self) -> Iterator[Uplink]:
        answers = self._well_formed()
        for client, samples, metrics, message in self._judged(answers, self._judge) if self._judge else answers:
            self.good.append(client)
            self.by_client[client] = metrics
            for name, value in metrics.items():
                self.metrics.setdefault(name, []).append(value)
            yield Uplink(client, samples, {name: to_current_device(part) for name, part in message.items()})
        self._check_enough()

    def _well_formed(self) -> Iterator[_Answer]:
        for client, answer in zip(self._clients, self._timed(), strict=True):
            self._tick(client, {} if "failure" in answer else answer["metrics"])
            if "failure" in answer:
                self._drop(client, answer["failure"])
                continue
            self.bytes_up += masked_bytes(self._declared) if self._masked else nbytes(answer["message"])
            if problem := fault(answer["message"], self._declared):
                self._drop(client, problem)
                continue
            if "state" in answer:
                self.states[client] = answer["state"]
            yield client, answer["samples"], answer["metrics"], answer["message"]

    def _judged(self, answers: Iterator[_Answer], judge: Judge) -> Iterator[_Answer]:
        buffer, norms, senders = AnswerBuffer(), [], []
        for client, samples, metrics, message in answers:
            norms.append(judge.norms(message))
            senders.append((client, samples, metrics))
            buffer.add(message)
        for (client, samples, metrics), message, problem in zip(senders, buffer, judge.faults(norms), strict=True):
            if problem:
                self._drop(client, problem)
            else:
                yield client, samples, metrics, message

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
            raise TooFewClients(len(self.good), len(self._clients), self._least, self.dropped, self._who)


def fewest_answers(config: Config, method: Method) -> int:
    """How many answers of clients elsewhere a round needs: with fewer, a method such as Krum would defend nothing."""
    return max(config.min_clients, *(part.fewest_clients for part in method.parts()))
