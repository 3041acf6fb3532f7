"""Where client work runs. Every engine gives the same answers, bit for bit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from fedstill.core import device, tree
from fedstill.core.arrays import IntArray
from fedstill.core.tree import Message, Tree
from fedstill.engine.worker import Request, Source, Worker
from fedstill.metrics.scores import ClassCounts


@dataclass(frozen=True)
class LocalTest:
    """How a model does on the tests of a client elsewhere."""

    hits: int  # how often it is right
    by_class: ClassCounts | None = None  # if the client sends them
    scores: Mapping[str, float] = field(default_factory=dict)  # metrics that the client worked out, by name


class Engine(ABC):
    """Carries requests to workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @abstractmethod
    def run(self, requests: Sequence[Request], down: Message) -> Iterator[Tree]:
        """Answers in the order of the requests, whatever the order in which they were worked out."""

    def run_all(self, broadcasts: Sequence[tuple[Sequence[Request], Message]]) -> list[Iterator[Tree]]:
        """Several broadcasts, each to clients of its own: the answers to each, to be read one after the other."""
        return [self.run(requests, down) for requests, down in broadcasts]

    def poll_newcomers(self) -> bool:
        """Before a round: let clients in that were not there; whether the numbers of samples changed."""
        return False

    def absent(self) -> set[int]:
        """Clients that cannot be reached at present."""
        return set()

    def local_tests(
        self, broadcasts: Sequence[tuple[IntArray | None, Message]], source: Source = "local"
    ) -> dict[int, LocalTest] | None:
        """How models do on the tests (or validation) of each client that answers; None: they are scored here.

        Each broadcast is to the clients that it names, or to all.
        """
        return None

    @property
    def remote(self) -> bool:
        """Whether clients are elsewhere and come and go, so that a round without enough answers is retried."""
        return False

    def close(self) -> None:  # noqa: B027 - not every engine starts something
        """Stop whatever was started."""


class Inline(Engine):
    """Everything in the calling process: easy to debug, and the way to work on a GPU."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def run(self, requests: Sequence[Request], down: Message) -> Iterator[Tree]:
        # Through bytes and back, so that nothing passes here that would not pass a real wire.
        down = tree.decode(tree.encode(down))
        for group in self._worker.grouped(requests):
            with device.isolated_rng():  # the caller's global stream is the caller's
                answers = [tree.encode(answer) for answer in self._worker.handle_group(group, down)]
            yield from map(tree.decode, answers)
