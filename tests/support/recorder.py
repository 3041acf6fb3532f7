"""The record of what crosses between server and clients: the only place where tests look into the engine's calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from fedstill.core import tree
from fedstill.core.tree import Message, Tree
from fedstill.engine.base import Inline
from fedstill.engine.worker import Request, Train


@dataclass
class Round:
    """What crossed in one round: down to every client of the cohort, and up from each that answered, in their order."""

    number: int
    cohort: list[int]
    down: Message
    up: dict[int, Message] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of tensors, both ways."""
        return len(self.cohort) * tree.nbytes(self.down) + sum(map(tree.nbytes, self.up.values()))


def record_rounds(patch: pytest.MonkeyPatch) -> list[Round]:
    """From now on, every round that runs in this process leaves here what crossed, one entry for each region."""
    rounds: list[Round] = []
    original = Inline.run

    def recorded(self: Inline, requests: Sequence[Request], down: Message) -> Iterator[Tree]:
        training = [request for request in requests if isinstance(request, Train)]
        if training:
            cohort = [request.client for request in training]
            crossed = Round(training[0].round, cohort, tree.decode(tree.encode(down)))
            rounds.append(crossed)
        for request, answer in zip(requests, original(self, requests, down), strict=True):
            if isinstance(request, Train):
                crossed.up[request.client] = tree.decode(tree.encode(answer["message"]))
                crossed.samples[request.client] = answer["samples"]
            yield answer

    patch.setattr(Inline, "run", recorded)
    return rounds
