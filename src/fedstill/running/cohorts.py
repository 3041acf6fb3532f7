"""Which clients train in a round."""

from __future__ import annotations

import numpy as np

from fedstill.building.topology import Hierarchy, Region, cohort_size, draw_cohort, with_data
from fedstill.core.arrays import IntArray


class Cohorts:
    """Draws the clients of every round, of those that have data and are there."""

    def __init__(self, hierarchy: Hierarchy, sizes: IntArray, seed: int) -> None:
        self._hierarchy, self._sizes, self._seed = hierarchy, sizes, seed
        # Of each region; to look for them among a million takes longer than a round.
        self._able: dict[int, IntArray] = {}

    def count(self, sizes: IntArray) -> None:
        """Somebody came who was not there before."""
        self._sizes, self._able = sizes, {}

    def draw(self, round_: int, absent: set[int]) -> list[tuple[Region, list[int]]]:
        """The regions that take part in a round, each with its active clients."""
        if self._hierarchy.grouped:
            return self._of_groups(round_, absent)
        return [
            (region, self._cohort(region, _without(members, absent), round_))
            for region, members in self._hierarchy.present(round_)
        ]

    def _of_groups(self, round_: int, absent: set[int]) -> list[tuple[Region, list[int]]]:
        """The cohort of all clients, as if they had one network, divided; groups without any are left out."""
        present = self._hierarchy.present(round_)
        members = _without(np.sort(np.concatenate([clients for _, clients in present])), absent)
        able = with_data(self._sizes, members)
        count = cohort_size(len(able), len(members), present[0][0].participation)
        cohort = draw_cohort(self._sizes, able, count, self._seed, round_)
        divided = [
            (region, [k for k in cohort if k in own]) for region, own in ((r, set(c.tolist())) for r, c in present)
        ]
        return [(region, own) for region, own in divided if own]

    def _cohort(self, region: Region, members: IntArray, round_: int) -> list[int]:
        able = self._able.get(region.number) if members is region.clients else None
        if able is None:
            able = with_data(self._sizes, members)
        if members is region.clients:
            self._able[region.number] = able
        count = cohort_size(len(able), len(members), region.participation)
        return draw_cohort(self._sizes, able, count, self._seed, round_, region.number)


def _without(members: IntArray, absent: set[int]) -> IntArray:
    """Those of the members that are there; all of them if none is, to be waited for."""
    if not absent:
        return members
    there = members[~np.isin(members, list(absent))]
    return there if len(there) else members
