"""Who is there in a round: regions with their clients, and when they join and leave.

A run without regions is one region that is never merged with another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedstill.building.config import Config, RegionSettings
from fedstill.building.groups import Group
from fedstill.building.members import clients_of_regions
from fedstill.building.task import local_training
from fedstill.core import seeds
from fedstill.core.arrays import IntArray
from fedstill.core.errors import SettingError
from fedstill.data.federation import Federation
from fedstill.methods import registry
from fedstill.methods.base import Method
from fedstill.train.task import Task


@dataclass(frozen=True)
class Region:
    """A federation of its own between two aggregations of regions."""

    number: int
    name: str
    clients: IntArray  # at the start, if they are drawn anew in each episode
    method: Method
    task: Task
    participation: float
    joins: int = 1  # its first round
    leaves: int = 0  # the first round without it; 0: it stays

    def present(self, round_: int) -> bool:
        return self.joins <= round_ and (not self.leaves or round_ < self.leaves)


@dataclass(frozen=True)
class Hierarchy:
    """All regions, and how they come together."""

    regions: tuple[Region, ...]
    rounds_per_episode: int = 0  # 0: they never do, there is only one
    redrawn: bool = False  # clients change regions in each episode
    late: int = 0  # how many clients, the last ones, are not there from the start
    late_from: int = 1  # their first round
    seed: int = 0

    @property
    def grouped(self) -> bool:
        """Whether they are the groups of clients that have one network: drawn together, and never merged."""
        return self.flat and len(self.regions) > 1

    @property
    def separate(self) -> bool:
        """Whether there is no model of all clients: one for each group, or region, with a network of its own."""
        return self.grouped or bool(not self.flat and self.regions[0].task.group)

    @property
    def flat(self) -> bool:
        return self.rounds_per_episode == 0

    def ends_episode(self, round_: int) -> bool:
        return not self.flat and round_ % self.rounds_per_episode == 0

    def present(self, round_: int) -> list[tuple[Region, IntArray]]:
        """The regions of a round with their clients."""
        regions = [region for region in self.regions if region.present(round_)]
        members = [region.clients for region in regions]
        if self.redrawn and regions:
            episode = (round_ - 1) // self.rounds_per_episode
            mixed = seeds.numpy_rng(self.seed, "regions", episode + 1).permutation(np.concatenate(members))
            members = np.split(mixed, np.cumsum([len(clients) for clients in members])[:-1])
        if round_ < self.late_from and self.late:
            first_late = sum(len(region.clients) for region in self.regions) - self.late
            members = [clients[clients < first_late] for clients in members]
        return list(zip(regions, members, strict=True))


def with_data(sizes: IntArray, members: IntArray) -> IntArray:
    """The members that can take part."""
    return members[sizes[members] > 0]


def cohort_size(able: int, members: int, participation: float) -> int:
    """How many clients take part in a round, of so many that can."""
    return min(able, max(1, math.floor(participation * members + 0.5)))


def draw_cohort(sizes: IntArray, able: IntArray, count: int, seed: int, round_: int, region: int = 0) -> list[int]:
    """The clients of a round, drawn uniformly among those that can take part: the same for every method."""
    where = (round_, region) if region else (round_,)
    drawn = able[seeds.numpy_rng(seed, "cohort", *where).choice(len(able), count, replace=False)]
    return largest_first(sizes, drawn)


def largest_first(sizes: IntArray, drawn: IntArray) -> list[int]:
    """The clients in the order in which they train and sums run: no worker is left with a large one at the end."""
    cohort: list[int] = drawn[np.lexsort((drawn, -sizes[drawn]))].tolist()
    return cohort


def arrange(
    config: Config, task: Task, federation: Federation, method: Method, groups: Sequence[Group] = ()
) -> Hierarchy:
    """The regions of a run, each with its method and how its clients train; one, of all clients, if there are none.

    Where clients have different networks, and the method one for each, the groups are in their place.
    """
    clients = federation.clients
    if config.late_clients >= clients:
        raise SettingError(f"late_clients = {config.late_clients}: some of the {clients} clients must be there at once")
    tables = config.region
    if tables and config.regions != len(tables):
        raise SettingError(f"regions = {config.regions}, but there are {len(tables)} [[region]] tables")
    each_has_a_model = len(groups) > 1 and method.model_per_group
    if config.save_models and each_has_a_model:
        raise SettingError("save_models keeps one model, and there is one for each group; leave it out")
    if each_has_a_model and config.flat:
        each = tuple(Region(g.number, g.name, g.clients, method, g.task, config.participation) for g in groups)
        return Hierarchy(each, late=config.late_clients, late_from=config.late_from)
    if config.flat:
        everyone = Region(0, "", np.arange(clients), method, task, config.participation)
        return Hierarchy((everyone,), late=config.late_clients, late_from=config.late_from)
    if config.rounds % config.rounds_per_episode:
        raise SettingError(
            f"rounds = {config.rounds} is not a whole number of episodes; rounds_per_episode is "
            f"{config.rounds_per_episode}"
        )
    if groups and not config.fixed_regions:
        raise SettingError("fixed_regions = false: clients would change their network with the region; leave one out")
    if groups and config.save_teachers:
        raise SettingError("save_teachers keeps models of one network, and regions have several; leave it out")
    found = []
    tables, everywhere = config.each_region(), clients_of_regions(config, clients)
    for number, (own, members) in enumerate(zip(tables, everywhere, strict=True)):
        settings = config.model_copy(update=own.overrides())
        name = own.name or f"region {number + 1}"
        base = groups[number].task if groups else task
        regional_task = base.trained_as(local_training(settings, federation)) if own.overrides() else base
        inside = regional_method(own, config, method)
        _check_region(name, inside, regional_task, config)
        check_labels(f"{name}: its method", inside, federation)
        found.append(
            Region(number, name, members, inside, regional_task, settings.participation, own.joins, own.leaves)
        )
    return Hierarchy(
        tuple(found),
        config.rounds_per_episode,
        not config.fixed_regions,
        config.late_clients,
        config.late_from,
        config.seed,
    )


def check_labels(name: str, method: Method, federation: Federation) -> None:
    if method.needs().server_labels and not len(federation.pool_index):
        raise SettingError(
            f"{name} needs labelled samples on the server: set pool, for example pool=0.1, or give pool to from_clients"
        )


def regional_method(own: RegionSettings, config: Config, method: Method) -> Method:
    """The method inside a region: its own, or the run's with the region's settings."""
    if own.method:
        return registry.make(own.method, own.hyper)
    return (registry.make(config.method, config.hyper | own.hyper) if own.hyper else method).regional()


def _check_region(name: str, method: Method, task: Task, config: Config) -> None:
    """Refuse, inside a region, what cannot be merged with others."""
    if not method.global_model:
        raise SettingError(f"{name}: its method has no global model that could be merged with other regions'")
    changes_model = method.needs().changed_model
    if changes_model and any(r.method and r.method != config.method for r in config.region):
        raise SettingError(f"{name}: its method changes the network, so all regions must run it")
    if not config.fixed_regions and (any(r.method or r.hyper for r in config.region) or method.averages_all_clients):
        raise SettingError(
            f"{name}: fixed_regions = false deals the clients anew, which asks for one method in all regions, and "
            "one that does not average clients it no longer has (T1)"
        )
    method.check(task)


def check_attendance(hierarchy: Hierarchy, config: Config, federation: Federation, *, elsewhere: bool) -> None:
    """Refuse a plan in which somebody has nobody to work with."""
    names = [region.name for region in hierarchy.regions]
    if len(set(names)) < len(names):
        raise SettingError(f"region: each needs a name of its own, and they are {', '.join(names)}")
    for region in hierarchy.regions:
        if region.leaves and region.leaves <= region.joins:
            raise SettingError(f"{region.name}: it leaves in round {region.leaves} and joins in round {region.joins}")
    changes = {1, config.late_from, *(r.joins for r in hierarchy.regions), *(r.leaves for r in hierarchy.regions)}
    if hierarchy.redrawn:  # each episode deals anew
        changes |= set(range(1, config.rounds + 1, config.rounds_per_episode))
    for round_ in sorted(r for r in changes if 1 <= r <= config.rounds):
        present = hierarchy.present(round_)
        if not present:
            raise SettingError(f"region: no region is there in round {round_}")
        for region, members in present:
            where = f"{region.name}: " if region.name else ""
            if not federation.sizes[members].any():
                if elsewhere:
                    continue
                raise SettingError(f"{where}none of the clients has data in round {round_}")
            count = cohort_size(len(with_data(federation.sizes, members)), len(members), region.participation)
            if hierarchy.grouped and region.participation < 1:
                count = 1  # of a group, as the clients of a round are drawn among all
            for part in region.method.parts():
                if count < part.fewest_clients:
                    raise SettingError(
                        f"{where}{part.name} asks for at least {part.fewest_clients} clients a round, and round "
                        f"{round_} has {count}; raise participation"
                    )
