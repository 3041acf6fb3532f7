"""What a server and its sites exchange: the link between them, the run info in every request, and the answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from fedstill.core.errors import SettingError
from fedstill.core.reports import cleaned, sentence
from fedstill.core.tree import Tree
from fedstill.metrics.scores import FUNCTIONS, ClassCounts

_MOST = 10**8  # samples of a site
# Kinds of the requests around the training of a masked round, and the name of what a site then sends.
MASK_KEYS, MASK_SHARES, MASK_CONFIRM, MASK_REVEAL = "MaskKeys", "MaskShares", "MaskConfirm", "MaskReveal"
MASKED = "masked"
STATISTICS = "Statistics"  # the kind of the request for sums over a table's columns

RunInfo = dict[str, Any]
"""What a site has to know of a run, sent along with every request; `server.serve` lists its keys."""


class SiteLink(Protocol):
    """Carries requests to sites by name, and their answers back."""

    def present(self) -> set[str]:
        """The sites that are connected now."""

    def send_requests(
        self,
        requests: Mapping[str, Tree],
        *,
        timeout: float,
        name: str | None = None,
        until: Callable[[], float] | None = None,
    ) -> Iterator[tuple[str, Any]]:
        """Each site's answer as it comes: a tree, or something with a `reason` why there is none.

        A site that gets a request of the same name again may repeat its last answer. `until` gives the moment of the
        monotonic clock after which nobody is waited for any more; it may change with each answer.
        """


def run_number(run_info: Mapping[str, Any]) -> str:
    """The number that identifies a run, and names a folder here: so no server may send anything else."""
    number = str(run_info["number"])
    if not re.fullmatch("[0-9a-f]{16}", number):
        raise SettingError(f"the server's run has the number {number!r:.40}, which is none")
    return number


def failure_reason(answer: Any) -> str:
    """Why an answer does not count, in words of our own: of what a site sends only known codes are repeated."""
    if isinstance(answer, dict):
        return sentence(answer["error"]) if "error" in answer else "its answer cannot be understood"
    return cleaned(getattr(answer, "reason", "its answer cannot be understood"), 300)


BALANCED = "balanced"  # the `class_weight` for which sites send their class counts
VALIDATION = "validation"  # in an answer: samples held out for validation
CLASS_COUNTS = "class_counts"  # in an answer: training samples of each class
BY_CLASS = "by_class"  # in an answer: counts of each client's tests by class, (clients, 3, classes)
SCORES = "scores"  # in an answer: by the name of a metric, its value on each client's tests
NO_SCORE = -1.0  # in place of a value that there is not, as of the AUROC of a single class


def class_counts_of(
    answer: Mapping[str, Any], tests: Sequence[int], hits: Sequence[int], classes: int
) -> list[ClassCounts | None] | None:
    """The counts by class that a site sent with the hits of each client, None of one without; None if any cannot be.

    There are as many samples and predictions as tests, and no class is right more often than it has either.
    """
    given = answer.get(BY_CLASS)
    if not isinstance(given, Tensor) or given.dtype != torch.int64 or given.shape != (len(hits), 3, classes):
        return None
    counts = given.cpu().numpy()
    if (counts < 0).any() or (counts > _MOST).any() or (counts[:, 2] > counts[:, :2].min(1)).any():
        return None
    found: list[ClassCounts | None] = []
    for each, n, hit in zip(counts, tests, hits, strict=True):
        if each.any() and each.sum(1).tolist() != [n, n, hit]:
            return None
        found.append(ClassCounts(*each) if each.any() else None)
    return found


def scores_of(answer: Mapping[str, Any], clients: int) -> list[dict[str, float]]:
    """The metrics that a site worked out on each client's tests: those that can be, from 0 to 1."""
    given, found = answer.get(SCORES), [dict[str, float]() for _ in range(clients)]
    for name in FUNCTIONS:
        values = given.get(name) if isinstance(given, dict) else None
        if isinstance(values, list) and len(values) == clients:
            for each, value in zip(found, values, strict=True):
                if isinstance(value, float) and 0 <= value <= 1:
                    each[name] = value
    return found


def are_counts(given: Any, count: int) -> TypeGuard[list[int]]:
    """Whether this is a list of so many numbers of samples."""
    return isinstance(given, list) and len(given) == count and all(type(n) is int and n <= _MOST for n in given)
