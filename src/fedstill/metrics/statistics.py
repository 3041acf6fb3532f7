"""Numbers of several seeds as one, and two methods on the same seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

RESAMPLES = 9999
CONFIDENCE = 0.95
POWER = 0.8
ENOUGH = 5  # seeds; a bootstrap of fewer misses the mean more often than one time in four


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
    low: float  # of the confidence interval of the mean
    high: float
    wins: int  # seeds on which it is larger
    n: int


def paired(
    ours: Sequence[float], theirs: Sequence[float], *, interval: Literal["bootstrap", "student"] = "bootstrap"
) -> Paired:
    """The differences of two rows of numbers, seed by seed, with a 95 % confidence interval of their mean.

    A percentile bootstrap, which takes nothing for granted but is too narrow for few seeds (five: about 86 %) and is
    left out (NaN) for fewer than five; or Student's, which takes the differences for normal and asks for two.

    >>> paired([0.7, 0.8], [0.6, 0.7]).wins
    2
    """
    d = np.asarray(ours, float) - np.asarray(theirs, float)
    low = high = float("nan")
    if interval == "student" and len(d) > 1:
        from scipy import stats  # costs half a second, and only intervals need it

        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(d) - 1) * d.std(ddof=1) / len(d) ** 0.5)
        low, high = float(d.mean()) - half, float(d.mean()) + half
    elif interval == "bootstrap" and len(d) >= ENOUGH:
        from scipy import stats

        found = stats.bootstrap(
            (d,), np.mean, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="percentile", rng=0
        ).confidence_interval
        low, high = float(found.low), float(found.high)
    return Paired(float(d.mean()), low, high, int((d > 0).sum()), len(d))


def detectable(differences: Sequence[float]) -> float:
    """The smallest true difference that so many seeds would show in four cases of five, were it there.

    From the standard deviation of the paired differences, as they are: what Student's interval of their mean excludes
    zero for with a probability of 80 %. NaN for a single seed.
    """
    from scipy import optimize, stats

    d = np.asarray(differences, float)
    if len(d) < 2:
        return float("nan")
    freedom, critical = len(d) - 1, stats.t.ppf((1 + CONFIDENCE) / 2, len(d) - 1)

    def missed(shift: float) -> float:
        """The power at a shift, in standard errors, less the power that is wanted."""
        return float(stats.nct.sf(critical, freedom, shift)) - POWER

    return float(optimize.brentq(missed, 0, 2 * critical) * d.std(ddof=1) / len(d) ** 0.5)
