"""Differential privacy before the first round: the noise for the epsilon that was asked for, or a refusal."""

from __future__ import annotations

from dataclasses import replace

from fedstill.building.config import Config
from fedstill.building.topology import Hierarchy, Region, cohort_size, with_data
from fedstill.core.errors import SettingError
from fedstill.data.federation import Federation
from fedstill.methods.base import Method
from fedstill.methods.dp import DP, PrivateClients
from fedstill.privacy import accounting
from fedstill.privacy.masks import MOST_NEIGHBOURS


def with_noise(hierarchy: Hierarchy, config: Config, federation: Federation, *, elsewhere: bool) -> Hierarchy:
    """The same with the noise that each region's budget asks for.

    A client is in one region, so that what is promised to it is what its region promises.
    """
    private = [region for region in hierarchy.regions if region.method.guarantee]
    if not private:
        return hierarchy
    if open_ones := [region.name for region in hierarchy.regions if not region.method.guarantee]:
        raise SettingError(f"{open_ones[0]}: its method has no dp, and other regions' have; give it to all or none")
    for region in private:
        check_noise(config, region.method)
    if config.class_weight == "balanced":
        raise SettingError("class_weight = 'balanced' counts clients' classes exactly, without noise: give numbers")
    if config.select or config.patience:
        raise SettingError("select and patience choose by clients' exact scores, which are not private: leave them out")
    if hierarchy.redrawn:
        raise SettingError("fixed_regions = false: dp is accounted region by region, and clients would change theirs")
    return replace(hierarchy, regions=tuple(_solved(region, config, federation, elsewhere) for region in private))


def check_one_sum(config: Config, hierarchy: Hierarchy) -> None:
    """Refuse different networks where all clients' updates are added up."""
    private = hierarchy.grouped and any(isinstance(region.method, PrivateClients) for region in hierarchy.regions)
    if private or (config.secure_aggregation and not config.same_network):
        what = "dp adds noise to the sum of" if private else "secure_aggregation adds up"
        raise SettingError(f"{what} all clients' updates, who need one network: leave models, or [[group]] tables, out")


def check_noise(config: Config, method: Method) -> None:
    """Refuse noise that nobody adds: of clients, where updates are not masked, or of a server that sees none."""
    private = next((part for part in method.parts() if isinstance(part, DP)), None)
    if private is None:
        return
    if config.secure_aggregation and not (private.noise_shares and private.noise_multiplier):
        raise SettingError(
            "dp with secure_aggregation: clients add the noise, and have to know it: give noise_multiplier ('fedstill "
            "privacy' finds it) and noise_shares, the number of clients whose noise together is that"
        )
    if private.noise_shares > MOST_NEIGHBOURS + 1:  # of a sum that has more, a client knows so many
        raise SettingError(
            f"noise_shares = {private.noise_shares}: a client makes sure of itself and {MOST_NEIGHBOURS} others in a "
            f"sum, and would refuse all; give at most {MOST_NEIGHBOURS + 1}, and fewer where some may drop out"
        )
    if private.noise_shares and not config.secure_aggregation:
        raise SettingError(
            f"noise_shares = {private.noise_shares}: a client's share of the noise hides it in a sum alone; set "
            "secure_aggregation = true"
        )


def _solved(region: Region, config: Config, federation: Federation, elsewhere: bool) -> Region:
    method = region.method
    if not isinstance(method, PrivateClients):
        return region
    clients = len(region.clients if elsewhere else with_data(federation.sizes, region.clients))
    cohort = cohort_size(clients, len(region.clients), region.participation)
    plan = method.plan((clients, cohort), config.rounds)
    delta = method.delta_of(len(region.clients))
    if not method.noise_multiplier:
        noise = accounting.noise_multiplier(plan, method.target_epsilon, delta) if method.target_epsilon else 1.0
        method = replace(method, noise_multiplier=noise)
    first = replace(plan, rounds=max(1, config.rounds_per_episode if not config.flat else 1))
    least = accounting.epsilon(first, method.noise_multiplier, delta)  # also to notice now that no package accounts
    if method.target_epsilon and least > method.target_epsilon:
        raise SettingError(
            f"target_epsilon = {method.target_epsilon:g}: the first {first.rounds} of the rounds already spend "
            f"{least:.3g}; raise it, or noise_multiplier"
        )
    return replace(region, method=method)
