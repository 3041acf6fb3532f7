"""Who is there in a round: regions with their clients, and when they join and leave.

A run without regions is one region that is never merged with another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedstill.core import seeds
from fedstill.core.errors import SettingError
from fedstill.data.partition import IntArray, regions
from fedstill.experiment.config import Config
from fedstill.methods.base import Method
from fedstill.train.task import Task


@dataclass(frozen=True)
class Region:
    """A federation of its own between two meetings of all."""

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
    def flat(self) -> bool:
        return self.rounds_per_episode == 0

    def ends_episode(self, round_: int) -> bool:
        return not self.flat and round_ % self.rounds_per_episode == 0

    def present(self, round_: int) -> list[tuple[Region, IntArray]]:
        """The regions of a round with their clients."""
        here = [region for region in self.regions if region.present(round_)]
        held = [region.clients for region in here]
        if self.redrawn and here:
            episode = (round_ - 1) // self.rounds_per_episode
            mixed = seeds.numpy_rng(self.seed, "regions", episode + 1).permutation(np.concatenate(held))
            held = np.split(mixed, np.cumsum([len(clients) for clients in held])[:-1])
        if round_ < self.late_from and self.late:
            first_late = sum(len(region.clients) for region in self.regions) - self.late
            held = [clients[clients < first_late] for clients in held]
        return list(zip(here, held, strict=True))


def assign(config: Config, clients: int) -> list[IntArray]:
    """The clients of each region at the start: those it names, or as many as it asks for, drawn at random."""
    tables = config.each_region()
    named = [t.clients for t in tables if isinstance(t.clients, list)]
    if named and len(named) < len(tables):
        raise SettingError("region: either all regions list their clients, or none does")
    if named:
        everyone = sorted(k for listed in named for k in listed)
        if everyone != list(range(clients)):
            raise SettingError(f"region: the lists of clients must name each of 0 to {clients - 1} exactly once")
        return [np.array(listed, np.int64) for listed in named]
    counts = [t.clients for t in tables if isinstance(t.clients, int)]
    rng = seeds.numpy_rng(config.seed, "regions", 0)
    if not any(counts):
        owner = regions(clients, len(tables), rng)
        return [np.flatnonzero(owner == r) for r in range(len(tables))]
    if not all(counts) or sum(counts) != clients:
        raise SettingError(f"region: the regions ask for {counts} clients, and there are {clients} in all")
    return [np.sort(part) for part in np.split(rng.permutation(clients), np.cumsum(counts)[:-1])]


def with_data(sizes: IntArray, members: IntArray) -> IntArray:
    """The members that can take part."""
    return members[sizes[members] > 0]


def cohort_size(able: int, members: int, participation: float) -> int:
    """How many clients take part in a round, of so many that can."""
    return min(able, max(1, math.floor(participation * members + 0.5)))


def draw_cohort(sizes: IntArray, able: IntArray, count: int, seed: int, round_: int, region: int = 0) -> list[int]:
    """The clients of a round, drawn uniformly among those that can take part: the same for every method.

    The largest come first, so that no worker is left alone with a large one at the end. Sums run in this order.
    """
    where = (round_, region) if region else (round_,)
    drawn = able[seeds.numpy_rng(seed, "cohort", *where).choice(len(able), count, replace=False)]
    cohort: list[int] = drawn[np.lexsort((drawn, -sizes[drawn]))].tolist()
    return cohort
