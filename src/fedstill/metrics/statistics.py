"""Numbers of several seeds as one, and two methods on the same seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

RESAMPLES = 9999
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation; the latter is NaN for a single number."""

    mean: float
    std: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    """
    >>> spread([1.0, 2.0, 3.0])
    Spread(mean=2.0, std=1.0, n=3)
    """
    x = np.asarray(values, float)
    return Spread(float(x.mean()), float(x.std(ddof=1)) if len(x) > 1 else float("nan"), len(x))


@dataclass(frozen=True)
class Paired:
    """By how much one method exceeds another on the same seeds."""

    mean: float
    low: float  # of the bootstrap confidence interval of the mean
    high: float
    wins: int  # seeds on which it is larger
    n: int


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Paired:
    """The differences of two rows of numbers, seed by seed, with a 95 % percentile bootstrap of their mean.

    A single seed has no interval (NaN); with few seeds it is too narrow, as every bootstrap is.

    >>> paired([0.7, 0.8], [0.6, 0.7]).wins
    2
    """
    d = np.asarray(ours, float) - np.asarray(theirs, float)
    low = high = float("nan")
    if len(d) > 1:
        found = bootstrap(
            (d,), np.mean, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="percentile", rng=0
        ).confidence_interval
        low, high = float(found.low), float(found.high)
    return Paired(float(d.mean()), low, high, int((d > 0).sum()), len(d))
