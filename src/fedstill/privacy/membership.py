"""How well members are told from others: the curve, its area, few false alarms, and the least epsilon that explains it.

An attack gives each sample a score, higher for those that it takes for members of the training set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import SettingError
from fedstill.core.seeds import numpy_rng

Floats = NDArray[np.float64]
FALSE_ALARMS = 0.01  # the share of non-members that may be taken for members: few, as an attacker has to be sure
_RESAMPLED = 1000  # times, for the interval of the area


@dataclass(frozen=True)
class Advantage:
    """What an attack achieves."""

    auc: float  # 0.5: no better than a guess
    interval: tuple[float, float]  # of the AUC, 95 %, over which samples were looked at
    tpr: float  # members found at 1 % false alarms
    epsilon: float  # the least epsilon of differential privacy that allows this, with 95 % confidence


def advantage(members: Floats, others: Floats, delta: float = 1e-5) -> Advantage:
    """Measure an attack by the scores that it gave.

    >>> found = advantage(np.arange(50.0) + 100, np.arange(50.0))
    >>> found.auc, found.tpr
    (1.0, 1.0)
    """
    from sklearn.metrics import roc_auc_score, roc_curve

    if min(len(members), len(others)) < 2:
        raise SettingError("an attack is measured on at least 2 members and 2 others")
    truth = np.repeat([1, 0], [len(members), len(others)])
    scores = np.concatenate([members, others])
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    tpr = float(true[false <= FALSE_ALARMS].max())
    auc = float(roc_auc_score(truth, scores))
    return Advantage(auc, auc_interval(members, others), tpr, epsilon_lower_bound(members, others, delta))


def auc_interval(members: Floats, others: Floats) -> tuple[float, float]:
    """95 % of the areas that samples drawn again, with replacement, would give."""
    wins = (members[:, None] > others) + 0.5 * (members[:, None] == others)
    rng = numpy_rng(0, "audit: interval")
    a, b = len(members), len(others)
    areas = [
        rng.multinomial(a, np.full(a, 1 / a)) @ wins @ rng.multinomial(b, np.full(b, 1 / b)) / (a * b)
        for _ in range(_RESAMPLED)
    ]
    low, high = np.quantile(areas, [0.025, 0.975])
    return float(low), float(high)


def epsilon_lower_bound(members: Floats, others: Floats, delta: float, confidence: float = 0.95) -> float:
    """The least epsilon at `delta` that allows these scores: any mechanism with less would be caught in a lie.

    For every (epsilon, delta) mechanism and every test, TPR <= e^epsilon FPR + delta, and likewise for those taken for
    non-members (Kairouz, Oh and Viswanath 2015). Half of the scores choose the test, the other half count, with
    Clopper and Pearson's exact intervals (Jagielski, Ullman and Oprea 2020).
    """
    if not 0 <= delta < 1 or not 0 < confidence < 1:
        raise SettingError(f"delta {delta:g} and confidence {confidence:g} lie between 0 and 1")
    error = (1 - confidence) / 2  # for each of the two rates
    best, chosen = -math.inf, (0.0, False)
    for threshold in np.unique(np.concatenate([members[::2], others[::2]])):
        for above in (True, False):
            if (bound := _bound(members[::2], others[::2], threshold, above, delta, error)) > best:
                best, chosen = bound, (float(threshold), above)
    return max(0.0, _bound(members[1::2], others[1::2], *chosen, delta, error))


def _bound(members: Floats, others: Floats, threshold: float, above: bool, delta: float, error: float) -> float:
    """log((p - delta) / q): the test says "member" from the threshold on, or below it "other"."""
    from scipy.stats import beta

    right, wrong = (members >= threshold, others >= threshold) if above else (others < threshold, members < threshold)
    hits, alarms = int(right.sum()), int(wrong.sum())
    least = float(beta.ppf(error, hits, len(right) - hits + 1)) if hits else 0.0
    most = float(beta.ppf(1 - error, alarms + 1, len(wrong) - alarms)) if alarms < len(wrong) else 1.0
    return math.log((least - delta) / most) if least > delta else -math.inf


def confidence_logits(loss: Floats) -> Floats:
    """log(p / (1 - p)) of the probability p of the right class, given its negative logarithm: close to Gaussian."""
    loss = np.clip(loss, 1e-12, 700)
    return np.asarray(-loss - np.log(-np.expm1(-loss)))


def likelihood_ratios(target: Floats, shadows: Floats, included: NDArray[np.bool_]) -> Floats:
    """LiRA (Carlini et al. 2022): how much likelier each sample's confidence is if it was trained on.

    `shadows` are the confidences under each shadow model, (models, samples), and `included` which samples each was
    trained on. Spreads are pooled over the samples, as few shadow models do not give one for each.
    """
    inside = np.where(included, shadows, np.nan)
    outside = np.where(included, np.nan, shadows)
    found = []
    for group in (inside, outside):
        mean = np.nanmean(group, 0)
        spread = math.sqrt(float(np.nanmean((group - mean) ** 2)) * _corrected(len(group) // 2)) + 1e-6
        found.append(-0.5 * ((target - mean) / spread) ** 2 - math.log(spread))
    return np.asarray(found[0] - found[1])


def _corrected(count: int) -> float:
    """Bessel's correction for means of so many."""
    return count / max(1, count - 1)


def balanced_halves(models: int, samples: int, seed: int) -> NDArray[np.bool_]:
    """Which samples each of several shadow models is trained on: every sample in exactly half of them."""
    if models < 4 or models % 2:
        raise SettingError(f"{models} shadow runs; give an even number from 4 on, or 0 for none")
    rng = numpy_rng(seed, "audit: shadows")
    order = np.argsort(rng.random((models, samples)), axis=0)
    return np.asarray(order < models // 2)
