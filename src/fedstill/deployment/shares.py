"""How much each site counts: what it claimed when it joined, and never more than a share of all."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedstill.core.arrays import IntArray
from fedstill.core.files import read_sealed_json, write_sealed_json

log = logging.getLogger(__name__)

_HALF = 0.5


def capped(counts: IntArray, max_share: float) -> IntArray:
    """The counts, none of them more than a share of their sum. 0: by how many there are, 0.75 of three, 0.6 of four,
    half of more, for a few that are honest may well be that uneven; of two, neither can be called too large.

    >>> capped(np.array([100, 100, 100, 100, 10**8]), 0).tolist()
    [100, 100, 100, 100, 400]
    >>> capped(np.array([58, 55, 126]), 0).tolist()
    [58, 55, 126]
    """
    ordered = np.sort(counts[counts > 0])[::-1]
    if not len(ordered):
        return counts
    share = max(max_share, 1 / len(ordered)) if max_share else max(_HALF, 3 / (len(ordered) + 1))
    if share >= 1:
        return counts
    limit = int(ordered[0])
    # With the first `top` of them at the limit c and the others as they are, c = share (top c + others).
    for top in range(len(ordered)):
        others = int(ordered[top:].sum())
        limit = int(share * others / (1 - share * top) + 1e-9) if top else limit
        if ordered[top] <= (limit if top else share * others):
            break
    return np.minimum(counts, max(1, limit))


class Counts:
    """How many samples each site reported when it joined; saved in a file, so that a restart changes nothing."""

    def __init__(self, clients: Mapping[str, IntArray], total: int, max_share: float, path: Path | None) -> None:
        """`clients` are those of each site, among the `total` of all."""
        self._clients, self._total, self._max_share, self._path = clients, total, max_share, path
        saved: dict[str, Any] = read_sealed_json(path) if path and path.exists() else {}
        self._claims: dict[str, tuple[list[int], list[int]]] = {
            name: (samples, tests) for name, (samples, tests) in saved.items() if name in clients
        }
        self._saved = dict(self._claims)
        self._warned = set[str]()

    def forget(self, names: Iterable[str]) -> None:
        """Let these sites report anew how many samples they have."""
        for name in names:
            self._claims.pop(name, None)

    def settle(self, name: str, samples: list[int], tests: list[int], *, growing: bool) -> str:
        """Note the numbers that a site reports, unless it claimed otherwise before: then, what is wrong with that.

        To be followed by `save`. `growing`: clients of whom nothing was known may come to it, as to a region.
        """
        claimed = list(zip(samples, tests, strict=True))
        before = list(zip(*self._claims[name], strict=True)) if name in self._claims else claimed
        nothing = (0, 0)  # of a client that is not there, or not yet
        settled = [new if growing and old == nothing else old for old, new in zip(before, claimed, strict=True)]
        self._claims[name] = [n for n, _ in settled], [n for _, n in settled]
        if all(new == old or (growing and new == nothing) for old, new in zip(settled, claimed, strict=True)):
            return ""
        return f"it had {_text(settled)} when it joined, and has {_text(claimed)} now"

    def save(self) -> None:
        """Write the file, once for all sites that were asked together: it has a line for each of them."""
        if self._path and self._claims != self._saved:
            write_sealed_json(self._path, self._claims)
            self._saved = dict(self._claims)

    def samples(self, name: str) -> int:
        """How many samples a site claims to train on."""
        return sum(self._claims[name][0])

    def of_sites(self, present: Iterable[str], what: Literal["samples", "tests"]) -> tuple[IntArray, IntArray]:
        """Training samples or tests of every client: as they count, and as the sites claim."""
        claimed, place = np.zeros(self._total, np.int64), ("samples", "tests").index(what)
        for name, claim in self._claims.items():
            claimed[self._clients[name]] = claim[place]
        count, there = capped(claimed, self._max_share), np.zeros(self._total, bool)
        for name in present:
            there[self._clients[name]] = True
        for name in sorted(self._claims.keys() - self._warned):
            who = self._clients[name]
            if (count[who] < claimed[who]).any():
                self._warned.add(name)
                log.warning(
                    "%s says that it has %d %s, and counts as if it had %d: no site has a larger share of all than "
                    "max_share allows",
                    *(name, claimed[who].max(), what, count[who].max()),
                )
        return count * there, claimed * there


def _text(claims: list[tuple[int, int]]) -> str:
    return f"{sum(n for n, _ in claims)} samples and {sum(n for _, n in claims)} tests"
