"""Epsilon and noise are those of closed forms and of published tables."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedstill.core.errors import SettingError
from fedstill.privacy.accounting import Plan, epsilon, noise_multiplier
from support.commandline import fedstill

pytest.importorskip("dp_accounting")

ALL = Plan(clients=10, cohort=10, rounds=16)


def gaussian_epsilon(noise: float, delta: float) -> float:
    """Of one Gaussian mechanism, in closed form (Balle and Wang 2018, Theorem 8)."""

    def excess(eps: float) -> float:
        a, b = 1 / (2 * noise), eps * noise
        return float(norm.cdf(a - b) - math.exp(eps) * norm.cdf(-a - b)) - delta

    return float(brentq(excess, 0, 100))


@pytest.mark.parametrize("noise", [2.0, 8.0])
def test_rounds_of_all_clients_are_one_gaussian_mechanism_with_less_noise(noise: float) -> None:
    assert epsilon(ALL, noise, 1e-5) == pytest.approx(gaussian_epsilon(noise / math.sqrt(16), 1e-5), rel=1e-3)


def test_with_cohorts_of_a_fixed_size_a_client_counts_twice() -> None:
    fixed = Plan(clients=10, cohort=10, rounds=16, sampling="fixed")
    assert epsilon(fixed, 8.0, 1e-5) == pytest.approx(epsilon(ALL, 4.0, 1e-5), rel=1e-6)


def test_the_noise_of_a_published_tutorial() -> None:
    """pfl's: epsilon 2, delta 1e-8, a ten-thousandth of the clients, 100 rounds: 0.4975 by PLD."""
    plan = Plan(clients=10_000, cohort=1, rounds=100)
    assert epsilon(plan, 0.4975, 1e-8) == pytest.approx(2.0, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_the_noise_for_an_epsilon_spends_that_and_no_more(sampling: str) -> None:
    plan = Plan(clients=20, cohort=4, rounds=2, sampling=sampling)  # type: ignore[arg-type]
    found = noise_multiplier(plan, 2.0, 1e-5)
    assert epsilon(plan, found, 1e-5) <= 2.0 < epsilon(plan, found - 0.01, 1e-5)


def test_smaller_cohorts_spend_less() -> None:
    small, large = (epsilon(Plan(clients=100, cohort=n, rounds=10), 1.0, 1e-5) for n in (5, 50))
    assert small < large < math.inf == epsilon(ALL, 0.0, 1e-5)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: Plan(clients=5, cohort=6, rounds=1), "give 1 to 5"),
        (lambda: epsilon(ALL, -1.0, 1e-5), "noise_multiplier is -1"),
        (lambda: epsilon(ALL, 1.0, 1.0), "delta is 1"),
        (lambda: noise_multiplier(ALL, 0.0, 1e-5), "epsilon is 0"),
    ],
)
def test_what_cannot_be_accounted_is_refused(call: object, reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        call()  # type: ignore[operator]


def test_the_calculator_gives_the_epsilon_of_a_noise_and_draws_it(tmp_path: Path) -> None:
    words = ("privacy", "--clients", "10", "--cohort", "10", "--rounds", "16", "--noise", "8", "--delta", "1e-5")
    answer = fedstill(*words, "--out", tmp_path / "spent.svg")
    assert answer.code == 0, answer.err
    assert f"{gaussian_epsilon(2.0, 1e-5):.2f}" in answer.out
    assert (tmp_path / "spent.svg").read_text().startswith("<?xml")
    assert "give --epsilon" in fedstill(*words, "--epsilon", "1").err
