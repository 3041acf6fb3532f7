"""Which clients belong to which region, and which have which network."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedstill.building.config import Config
from fedstill.core import seeds
from fedstill.core.arrays import IntArray
from fedstill.core.errors import SettingError, unknown
from fedstill.data.partition import regions


def clients_of_regions(config: Config, clients: int) -> list[IntArray]:
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


def clients_of_groups(config: Config, names: Sequence[str]) -> list[IntArray]:
    """The clients of each group, by their numbers."""
    if config.same_network:
        return []
    if config.regional_networks:
        return clients_of_regions(config, len(names))
    if config.models:
        dealt = np.array([config.models[k % len(config.models)] for k in range(len(names))], dtype=object)
        found = [np.flatnonzero(dealt == model) for model in dict.fromkeys(config.models)]
    else:
        found = _of_tables(config, names)
    for own, clients in zip(config.each_group(), found, strict=True):
        if not len(clients):
            raise SettingError(f"group {own.name or own.model!r} has none of the {len(names)} clients")
    return found


def _of_tables(config: Config, names: Sequence[str]) -> list[IntArray]:
    """The clients that [[group]] tables name; of the others, as many as each asks for, drawn at random."""
    tables, total = config.group, len(names)
    named = [_numbers(own.clients, names) if isinstance(own.clients, list) else None for own in tables]
    taken = [k for clients in named if clients is not None for k in clients]
    if len(set(taken)) < len(taken):
        raise SettingError(f"group: client {max(taken, key=taken.count)} is named twice")
    left = np.setdiff1d(np.arange(total), taken)
    counts = [own.clients if isinstance(own.clients, int) else 0 for own in tables]
    counts = [n + share for n, share in zip(counts, _rounded([own.share * total for own in tables]), strict=True)]
    open_ones = [i for i, own in enumerate(tables) if named[i] is None and not own.clients and not own.share]
    rest = len(left) - sum(counts)
    for place, i in enumerate(open_ones):
        counts[i] = rest // len(open_ones) + (place < rest % len(open_ones))
    if rest < 0 or sum(counts) != len(left):
        raise SettingError(
            f"group: {len(taken)} clients are named and groups ask for {sum(counts)} more, and there are {total} in "
            "all; a group without clients and share takes those that are left"
        )
    drawn = seeds.numpy_rng(config.seed, "groups").permutation(left)
    parts = iter(np.split(drawn, np.cumsum(counts)[:-1]))
    return [np.sort(part) if own is None else np.array(sorted(own)) for own, part in zip(named, parts, strict=True)]


def _rounded(shares: Sequence[float]) -> list[int]:
    """Whole numbers with the rounded sum of some shares: largest remainders are rounded up.

    >>> _rounded([1.5, 1.5]), _rounded([6.8, 6.6, 6.6])
    ([2, 1], [7, 7, 6])
    """
    whole = [math.floor(share + 1e-9) for share in shares]
    missing = round(sum(shares)) - sum(whole)
    for i in sorted(range(len(shares)), key=lambda i: whole[i] - shares[i])[: max(0, missing)]:
        whole[i] += 1
    return whole


def _numbers(listed: Sequence[int | str], names: Sequence[str]) -> list[int]:
    found = []
    for client in listed:
        if isinstance(client, str) and client not in names:
            raise unknown("client in group", client, names)
        if isinstance(client, int) and not client < len(names):
            raise SettingError(f"group: clients are 0 to {len(names) - 1}, and {client} is named")
        found.append(names.index(client) if isinstance(client, str) else client)
    return found


def numbered(config: Config, names: Sequence[str]) -> Config:
    """The settings with groups that name clients by their numbers."""
    groups = [
        own.model_copy(update={"clients": _numbers(own.clients, names)}) if isinstance(own.clients, list) else own
        for own in config.group
    ]
    return config.model_copy(update={"group": groups})
