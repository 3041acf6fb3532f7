"""Finite but absurd answers: an update much longer than the others is dropped before a method sees it.

Only where clients are elsewhere: a simulation knows its clients, and its results do not depend on this.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedstill.core import tree
from fedstill.core.tree import Message, nbytes

Norms = dict[str, float]
History = dict[str, list[float]]

_FEWEST = 3  # norms of which a median says something: one absurd answer among two would be half of them
_REMEMBERED = 30  # norms of earlier rounds, of each part
_IN_MEMORY = 256 << 20  # bytes of answers that wait in memory for the last one; more wait in a file


class Judge:
    """Compares the answers of a round by how far each of their parts lies from what was sent."""

    def __init__(self, ratio: float, sent: Message, history: History) -> None:
        """`history` has the norms of earlier rounds, for rounds with few answers; this round's are added to it."""
        self._ratio, self._sent, self._history = ratio, sent, history

    def norms(self, message: Message) -> Norms:
        """The length of the update of every part with fractions; of one that was not sent, its own length."""
        return {name: self._norm(name, part) for name, part in message.items() if part.is_floating_point()}

    def _norm(self, name: str, part: Tensor) -> float:
        part, sent = part.cpu().double(), self._sent.get(name)
        if sent is not None and sent.shape == part.shape:
            part = part - sent.cpu()
        return float(torch.linalg.vector_norm(part))

    def faults(self, answers: Sequence[Norms]) -> list[str | None]:
        """What is wrong with each answer, or None."""
        faults = [self._overflow(norms) for norms in answers]
        for name in sorted({name for norms in answers for name in norms}):
            limit = self._limit(name, [norms[name] for norms in answers if name in norms])
            for place, norms in enumerate(answers):
                if faults[place] is None and norms.get(name, 0.0) > limit:
                    faults[place] = (
                        f"its update of {name} has the norm {norms[name]:.3g}, more than max_update_ratio = "
                        f"{self._ratio:g} times the median, {limit / self._ratio:.3g}"
                    )
        for norms in (norms for norms, problem in zip(answers, faults, strict=True) if problem is None):
            for name, norm in norms.items():
                self._history[name] = [*self._history.get(name, []), norm][-_REMEMBERED:]
        return faults

    def _overflow(self, norms: Norms) -> str | None:
        name = next((name for name, norm in norms.items() if not math.isfinite(norm)), None)
        return name and f"{name} is so large that its norm overflows"

    def _limit(self, name: str, norms: list[float]) -> float:
        """The longest update that is let through."""
        known = norms if len(norms) >= _FEWEST else norms + self._history.get(name, [])
        middle = float(np.median(known)) if self._ratio and len(known) >= _FEWEST else 0.0
        return self._ratio * middle or math.inf  # where most did not move at all, nothing can be compared


class AnswerBuffer:
    """Answers that wait until all of a round are there, few of them in memory."""

    def __init__(self) -> None:
        self._answers: list[Message | tuple[int, int]] = []
        self._bytes = 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it has no name, and goes with this object

    def add(self, message: Message) -> None:
        self._bytes += nbytes(message)
        if self._bytes <= _IN_MEMORY:
            self._answers.append(message)
            return
        data = tree.encode(message)
        self._answers.append((self._file.seek(0, 2), len(data)))
        self._file.write(data)

    def __iter__(self) -> Iterator[Message]:
        """Each answer once, in order; what was handed out is forgotten."""
        for place, answer in enumerate(self._answers):
            self._answers[place] = {}
            yield self._read(*answer) if isinstance(answer, tuple) else answer
        self._file.close()

    def _read(self, start: int, length: int) -> Message:
        self._file.seek(start)
        message: Message = tree.decode(self._file.read(length))
        return message
