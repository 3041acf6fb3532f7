"""How well, and how evenly, a model serves the clients (FedKF, Definitions 1 to 3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Fairness:
    """Accuracies are fractions. `local` has NaN for a client without test samples, as `fm` where only one has some."""

    amp: float  # accuracy over all local test sets pooled
    fm: float  # population variance of the local accuracies; smaller is fairer
    wlp: float  # accuracy of the worst-served client
    local: NDArray[np.float64]  # (clients,)


def fairness(correct: NDArray[np.bool_], offsets: NDArray[np.int64]) -> Fairness:
    """From whether each local test sample is right; client k has those from offsets[k] to offsets[k+1].

    >>> f = fairness(np.array([True, False, True, True]), np.array([0, 2, 4]))
    >>> f.amp, f.fm, f.wlp
    (0.75, 0.0625, 0.5)
    """
    return fairness_of_counts(
        np.diff(np.concatenate([[0], np.cumsum(correct, dtype=np.int64)])[offsets]), np.diff(offsets)
    )


def fairness_of_counts(hits: NDArray[np.int64], counts: NDArray[np.int64]) -> Fairness:
    """The same from how often a model is right on the tests of each client, and how many those are."""
    local = np.full(len(counts), np.nan)
    np.divide(hits, counts, out=local, where=counts > 0)
    accuracies = local[counts > 0]
    if not len(accuracies):
        return Fairness(np.nan, np.nan, np.nan, local)
    fm = float(accuracies.var()) if len(accuracies) > 1 else np.nan  # of one client, it would look perfectly fair
    return Fairness(float(hits.sum() / counts.sum()), fm, float(accuracies.min()), local)
