"""Measures of an attack, held against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedstill.core.errors import SettingError
from fedstill.privacy.membership import (
    Floats,
    advantage,
    balanced_halves,
    confidence_logits,
    epsilon_lower_bound,
    likelihood_ratios,
)


def scores(shift: float, count: int, seed: int = 0) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    return rng.normal(shift, 1, count), rng.normal(0, 1, count)


def test_the_area_and_the_members_found_are_those_of_two_gaussians() -> None:
    found = advantage(*scores(1.5, 2000))
    assert found.auc == pytest.approx(norm.cdf(1.5 / math.sqrt(2)), abs=0.02)
    assert found.interval[0] < norm.cdf(1.5 / math.sqrt(2)) < found.interval[1]
    assert found.tpr == pytest.approx(1 - norm.cdf(norm.ppf(0.99) - 1.5), abs=0.04)


def test_a_guess_is_no_better_than_a_guess() -> None:
    found = advantage(*scores(0, 500))
    assert found.interval[0] < 0.5 < found.interval[1]
    assert found.epsilon == 0


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_the_bound_lies_below_the_epsilon_of_the_gaussian_mechanism(sigma: float) -> None:
    delta = 1e-3

    def spent(epsilon: float) -> float:  # Balle and Wang 2018, Theorem 8, of sensitivity 1
        a, b = 1 / (2 * sigma), epsilon * sigma
        return float(norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b)) - delta

    epsilon = brentq(spent, 0, 50)
    members, others = scores(1 / sigma, 4000)
    assert 0.3 * epsilon < epsilon_lower_bound(members, others, delta) < epsilon


@pytest.mark.parametrize("flipped", [False, True])
def test_the_bound_of_randomised_response_is_close_to_its_epsilon(flipped: bool) -> None:
    epsilon, rng = math.log(3), np.random.default_rng(1)
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    members, others = ((rng.random(4000) < p).astype(float) for p in (truth, 1 - truth))
    given = (1 - members, 1 - others) if flipped else (members, others)
    bound = epsilon_lower_bound(*given, 0.0)
    assert bound == 0 if flipped else 0.8 * epsilon < bound < epsilon


def test_confidences_are_logits_of_the_probability() -> None:
    p = np.array([0.01, 0.5, 0.999])
    assert confidence_logits(-np.log(p)) == pytest.approx(np.log(p / (1 - p)))
    assert np.isfinite(confidence_logits(np.array([0.0, 1e4]))).all()


def test_likelihood_ratios_are_those_of_the_true_densities() -> None:
    rng, models, samples = np.random.default_rng(2), 200, 40
    included = balanced_halves(models, samples, 0)
    assert (included.sum(0) == models // 2).all()
    centre = rng.normal(0, 3, samples)  # some samples are easy whether they were trained on or not
    shadows = centre + rng.normal(0, 1, (models, samples)) + 2 * included
    target = centre + rng.normal(0, 1, samples) + 2 * (np.arange(samples) < 20)
    expected = norm.logpdf(target, centre + 2, 1) - norm.logpdf(target, centre, 1)
    assert likelihood_ratios(target, shadows, included) == pytest.approx(expected, abs=0.8)


def test_an_odd_number_of_shadows_is_refused() -> None:
    with pytest.raises(SettingError, match="5 shadow runs; give an even number from 4 on"):
        balanced_halves(5, 10, 0)
