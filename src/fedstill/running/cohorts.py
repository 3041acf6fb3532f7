"""Which clients train in a round."""

from __future__ import annotations

import secrets

import numpy as np

from fedstill.building.topology import Hierarchy, Region, cohort_size, draw_cohort, largest_first, with_data
from fedstill.core import seeds
from fedstill.core.arrays import IntArray


class Cohorts:
    """Draws the clients of every round, of those that have data and are there."""

    def __init__(self, hierarchy: Hierarchy, sizes: IntArray, seed: int) -> None:
        self._hierarchy, self._sizes, self._seed = hierarchy, sizes, seed
        # Of each region; to look for them among a million takes longer than a round.
        self._able: dict[int, IntArray] = {}
        # Of each region in the last round drawn: from how many clients, and how many were expected.
        self.drawn: dict[int, tuple[int, int]] = {}

    def count(self, sizes: IntArray) -> None:
        """Somebody came who was not there before."""
        self._sizes, self._able = sizes, {}

    def draw(self, round_: int, absent: set[int], *, secret: bool = False) -> list[tuple[Region, list[int]]]:
        """The regions that take part in a round, each with its active clients.

        `secret`: privacy counts on it that nobody knows who was drawn, and clients elsewhere know the seed.
        """
        if self._hierarchy.grouped:
            return self._of_groups(round_, absent)
        return [
            (region, self._cohort(region, _without(members, absent), round_, secret=secret))
            for region, members in self._hierarchy.present(round_)
        ]

    def _of_groups(self, round_: int, absent: set[int]) -> list[tuple[Region, list[int]]]:
        """The cohort of all clients, as if they had one network, divided; groups without any are left out."""
        present = self._hierarchy.present(round_)
        members = _without(np.sort(np.concatenate([clients for _, clients in present])), absent)
        able = with_data(self._sizes, members)
        count = cohort_size(len(able), len(members), present[0][0].participation)
        self.drawn = {region.number: (len(able), count) for region, _ in present}
        cohort = draw_cohort(self._sizes, able, count, self._seed, round_)
        divided = [
            (region, [k for k in cohort if k in own]) for region, own in ((r, set(c.tolist())) for r, c in present)
        ]
        return [(region, own) for region, own in divided if own]

    def _cohort(self, region: Region, members: IntArray, round_: int, *, secret: bool) -> list[int]:
        able = self._able.get(region.number) if members is region.clients else None
        if able is None:
            able = with_data(self._sizes, members)
        if members is region.clients:
            self._able[region.number] = able
        count = cohort_size(len(able), len(members), region.participation)
        self.drawn[region.number] = len(able), count
        guarantee = region.method.guarantee
        if guarantee is None or (guarantee.sampling == "fixed" and not secret):
            return draw_cohort(self._sizes, able, count, self._seed, round_, region.number)
        if guarantee.sampling == "fixed":
            drawn = np.array(secrets.SystemRandom().sample(able.tolist(), count), np.int64)
        elif secret:
            drawn = able[[secrets.SystemRandom().random() < count / len(able) for _ in able]]
        else:
            rng = seeds.numpy_rng(self._seed, "private cohort", round_, region.number)
            drawn = able[rng.random(len(able)) < count / len(able)]
        return largest_first(self._sizes, drawn)


def _without(members: IntArray, absent: set[int]) -> IntArray:
    """Those of the members that are there; all of them if none is, to be waited for."""
    if not absent:
        return members
    there = members[~np.isin(members, list(absent))]
    return there if len(there) else members
