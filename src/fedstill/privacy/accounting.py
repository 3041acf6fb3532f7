"""From noise to epsilon, and from epsilon to noise, by Google's dp-accounting.

What is accounted: in every round some of the clients answer, the update of each is clipped to a norm, and Gaussian
noise of standard deviation `noise_multiplier x clip` is added to the sum. It protects a whole client, with all samples.

- `poisson`: each client takes part by chance, cohort / clients, on its own. Two federations are neighbours if one has a
  client more. Accounted by privacy loss distributions (PLD), which are exact up to a small grid.
- `fixed`: as many clients as the cohort, drawn without replacement. The number of clients is known then, so neighbours
  are federations in which one client is replaced: the sum may move by twice the clip. Accounted by Rényi divergences
  (RDP; Wang, Balle and Kasiviswanathan 2019), the tightest that the library has for it, and looser than PLD.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, reduce
from types import ModuleType
from typing import Any, NamedTuple

from fedstill.core.choices import Sampling
from fedstill.core.errors import SettingError

_LEAST, _MOST = 0.2, 1e4  # noise multipliers to look between: with less noise than that, epsilon says nothing
_TOLERANCE = 1e-3  # of a noise multiplier that is looked for
_GRID = 1e-3  # of privacy losses, which are rounded up: epsilon is too large by less than 1e-3 of itself


@dataclass(frozen=True)
class Plan:
    """Rounds of private aggregation.

    >>> Plan(clients=1000, cohort=50, rounds=200).sampled
    0.05
    """

    clients: int
    cohort: int
    rounds: int
    sampling: Sampling = "poisson"

    def __post_init__(self) -> None:
        if not 1 <= self.cohort <= self.clients:
            raise SettingError(f"a cohort of {self.cohort} from {self.clients} clients; give 1 to {self.clients}")
        if self.rounds < 1:
            raise SettingError(f"{self.rounds} rounds; give at least 1")
        if self.sampling not in ("poisson", "fixed"):
            raise SettingError(f"sampling is {self.sampling!r}; give 'poisson' or 'fixed'")

    @property
    def sampled(self) -> float:
        """The share of the clients in a round."""
        return self.cohort / self.clients


def epsilon(plan: Plan, noise_multiplier: float, delta: float) -> float:
    """The epsilon that is spent at `delta` when all rounds are done; infinite without noise.

    >>> round(epsilon(Plan(clients=10_000, cohort=1, rounds=100), noise_multiplier=0.4975, delta=1e-8), 2)
    2.0
    """
    return spent([(plan, noise_multiplier)], delta)


def spent(rounds: Iterable[tuple[Plan, float]], delta: float) -> float:
    """The epsilon of rounds of several kinds one after the other, each with its noise multiplier."""
    check_delta(delta)
    return _spent(tuple(rounds), delta)


@lru_cache(maxsize=256)  # a run asks before a round whether it can afford it, and after it what it spent
def _spent(rounds: tuple[tuple[Plan, float], ...], delta: float) -> float:
    for _, noise in rounds:
        if noise < 0 or not math.isfinite(noise):
            raise SettingError(f"noise_multiplier is {noise:g}; give a number from 0 on")
    if any(noise < _LEAST for _, noise in rounds):
        return math.inf
    if not rounds:
        return 0.0
    if all(plan.sampling == "poisson" or plan.cohort == plan.clients for plan, _ in rounds):
        losses = [_one_loss(*_gaussian(plan, noise)).self_compose(plan.rounds) for plan, noise in rounds]
        return float(reduce(lambda one, other: one.compose(other), losses).get_epsilon_for_delta(delta))
    library = _library()
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
    for plan, noise in rounds:
        one = library.GaussianDpEvent(noise / 2)  # a client that is replaced moves the sum by twice the clip
        if plan.cohort < plan.clients:
            one = library.SampledWithoutReplacementDpEvent(plan.clients, plan.cohort, one)
        accountant.compose(one, plan.rounds)
    return float(accountant.get_epsilon(delta))


class Release(NamedTuple):
    """Gaussian mechanisms that somebody untrusted saw, each on samples that were drawn by chance."""

    noise: float  # in units of what one sample, or one client, can move
    sampled: float  # how likely each was in it; 1: it was
    times: int


def composed(releases: Iterable[Release], delta: float) -> float:
    """The epsilon of all of them together, by Rényi divergences: of different kinds, whoever chose each.

    >>> round(composed([Release(2.0, 1.0, 4)], 1e-5), 1)
    4.7
    """
    check_delta(delta)
    library = _library()
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    for noise, sampled, times in releases:
        one = library.GaussianDpEvent(noise)
        accountant.compose(one if sampled >= 1 else library.PoissonSampledDpEvent(sampled, one), times)
    return float(accountant.get_epsilon(delta))


def _gaussian(plan: Plan, noise: float) -> tuple[float, float]:
    """The noise that one client of a round hides in, in units of what it can move, and how likely it is in the round.

    A client that is replaced moves the sum by twice the clip.
    """
    return (noise, plan.sampled) if plan.sampling == "poisson" else (noise / 2, 1.0)


@lru_cache(maxsize=32)
def _one_loss(noise: float, sampled: float) -> Any:
    """The privacy loss distribution of one round."""
    _library()
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=sampled, value_discretization_interval=_GRID
    )


def noise_multiplier(plan: Plan, epsilon: float, delta: float) -> float:
    """The least noise that keeps all rounds within `epsilon` at `delta`."""
    check_delta(delta)
    if not 0 < epsilon < math.inf:
        raise SettingError(f"epsilon is {epsilon:g}; give a number above 0")
    less, more = _bracket(plan, epsilon, delta)
    while more - less > _TOLERANCE:
        middle = (less + more) / 2
        less, more = (less, middle) if spent([(plan, middle)], delta) <= epsilon else (middle, more)
    return more


def _bracket(plan: Plan, target: float, delta: float) -> tuple[float, float]:
    """Two noise multipliers, of which one spends more than the target and the other does not."""
    less = more = 1.0
    while epsilon(plan, more, delta) > target:
        less, more = more, 2 * more
        if more > _MOST:
            raise SettingError(f"epsilon {target:g} needs more noise than {_MOST:g} x clip; ask for a larger one")
    while epsilon(plan, less, delta) <= target:  # from above, as little noise takes the accountant long
        less, more = less / 2, less
        if less < _LEAST:
            raise SettingError(f"epsilon {target:g} is met with less noise than {more:g} x clip; ask for a smaller one")
    return less, more


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise SettingError(f"delta is {delta:g}; give a number between 0 and 1, below 1 / clients")


def _library() -> ModuleType:
    try:
        import dp_accounting
    except ImportError as error:
        raise SettingError("privacy accounting needs a package: pip install 'fedstill[privacy]'") from error
    return dp_accounting  # type: ignore[no-any-return, unused-ignore]
