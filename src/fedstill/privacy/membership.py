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
_NORMAL = 1.96  # standard deviations to either side of 95 %


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
    return Advantage(auc, auc_interval(auc, members, others), tpr, epsilon_lower_bound(members, others, delta))


def auc_interval(auc: float, members: Floats, others: Floats) -> tuple[float, float]:
    """95 % of the area, over which samples were looked at (DeLong, DeLong and Clarke-Pearson 1988)."""

    def share_below(values: Floats, reference: Floats) -> Floats:
        ranked = np.sort(reference)
        both = np.searchsorted(ranked, values, "left") + np.searchsorted(ranked, values, "right")
        return np.asarray(both / (2 * len(ranked)))

    variance = share_below(members, others).var(ddof=1) / len(members)
    variance += share_below(others, members).var(ddof=1) / len(others)
    half = _NORMAL * math.sqrt(float(variance))
    return max(0.0, auc - half), min(1.0, auc + half)


def epsilon_lower_bound(members: Floats, others: Floats, delta: float, confidence: float = 0.95) -> float:
    """The least epsilon at `delta` that allows these scores: any mechanism with less would be caught in a lie.

    For every (epsilon, delta) mechanism and every test, TPR <= e^epsilon FPR + delta, and likewise for those taken for
    non-members (Kairouz, Oh and Viswanath 2015). Half of the scores choose the test, the other half count, with
    Clopper and Pearson's exact intervals (Jagielski, Ullman and Oprea 2020).
    """
    if not 0 <= delta < 1 or not 0 < confidence < 1:
        raise SettingError(f"delta {delta:g} and confidence {confidence:g} lie between 0 and 1")
    error = (1 - confidence) / 2  # for each of the two rates
    thresholds = np.unique(np.concatenate([members[::2], others[::2]]))
    tried = {above: _bounds(members[::2], others[::2], thresholds, above, delta, error) for above in (True, False)}
    above = bool(tried[True].max() >= tried[False].max())
    threshold = thresholds[[int(tried[above].argmax())]]
    return max(0.0, float(_bounds(members[1::2], others[1::2], threshold, above, delta, error)[0]))


def _bounds(members: Floats, others: Floats, thresholds: Floats, above: bool, delta: float, error: float) -> Floats:
    """log((p - delta) / q) of each test: from the threshold on it says "member", or below it "other"."""
    from scipy.stats import beta

    below = [np.searchsorted(np.sort(group), thresholds, "left") for group in (members, others)]
    hits, alarms = (len(members) - below[0], len(others) - below[1]) if above else (below[1], below[0])
    rights, wrongs = (len(members), len(others)) if above else (len(others), len(members))
    least = np.where(hits > 0, beta.ppf(error, np.maximum(hits, 1), rights - hits + 1), 0.0)
    most = np.where(alarms < wrongs, beta.ppf(1 - error, alarms + 1, np.maximum(wrongs - alarms, 1)), 1.0)
    return np.log(np.maximum(least - delta, 1e-300) / most)


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
