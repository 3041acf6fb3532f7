"""The data partition: ways to divide labelled data between clients.

A partition gives one owner per sample (-1: nobody), so no sample can be given out twice. `partition_schemes` has them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstill.core.arrays import IntArray
from fedstill.core.errors import DataError, SettingError, unknown
from fedstill.data.partition_draws import dense_labels, random_ranks
from fedstill.data.partition_schemes import SCHEMES


def names() -> list[str]:
    """The known partitions.

    >>> "dirichlet" in names()
    True
    """
    return sorted(SCHEMES)


def defaults(name: str) -> dict[str, Any]:
    """The settings a partition uses, with their default values.

    >>> defaults("shards")
    {'shards_per_client': 2, 'samples_per_client': 0}
    """
    if name not in SCHEMES:
        raise unknown("partition", name, SCHEMES)
    parameters = inspect.signature(SCHEMES[name]).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {**own, "samples_per_client": 0}


def partition(name: str, labels: npt.ArrayLike, clients: int, rng: np.random.Generator, **settings: Any) -> IntArray:
    """The client (0..clients-1, or -1 for nobody) of each sample.

    A setting that only other partitions use is ignored, so one set of settings serves them all; a name
    that no partition knows is an error. `samples_per_client` caps every partition (0: no cap).

    >>> np.bincount(partition("iid", [0, 0, 1, 1], 2, np.random.default_rng(0))).tolist()
    [2, 2]
    """
    own = defaults(name)
    allowed = {setting for scheme in SCHEMES for setting in defaults(scheme)}
    for setting, value in settings.items():
        if setting not in allowed:
            raise unknown("partition setting", setting, allowed)
        if setting in own:
            check_setting(setting, value)
    check_setting("clients", clients, least=0 if name == "natural" else 1)
    dense = dense_labels(labels)
    if not len(dense):
        raise DataError("there are no samples to divide between clients")
    if clients > len(dense):
        raise DataError(f"{clients} clients cannot share {len(dense)} samples; ask for fewer clients")

    cap = int(settings.get("samples_per_client", 0))
    scheme = SCHEMES[name]
    sets_sizes = "samples_per_client" in inspect.signature(scheme).parameters
    used = {s: v for s, v in settings.items() if s in own and (s != "samples_per_client" or sets_sizes)}
    owner = scheme(dense, int(clients), rng, **used)
    if cap and not sets_sizes:
        owner[random_ranks(owner, rng) >= cap] = -1
    return owner


def long_tail(labels: npt.ArrayLike, imbalance_factor: float, rng: np.random.Generator) -> IntArray:
    """Indices that leave class c (of C) with `int(n_max * imbalance_factor**(-c/(C-1)))` samples.

    A class keeps at least one sample, and all it has if it has fewer than that number.

    >>> labels = np.repeat(np.arange(3), 100)
    >>> np.bincount(labels[long_tail(labels, 100, np.random.default_rng(0))]).tolist()
    [100, 10, 1]
    """
    check_setting("imbalance_factor", imbalance_factor)
    dense = dense_labels(labels)
    if not len(dense):
        return np.empty(0, np.int64)
    sizes = np.bincount(dense)
    last = max(len(sizes) - 1, 1)
    wanted = [max(1, int(sizes.max() * imbalance_factor ** (-c / last))) for c in range(len(sizes))]
    return np.flatnonzero(random_ranks(dense, rng) < np.array(wanted)[dense])


def subsample(labels: npt.ArrayLike, fraction: float, rng: np.random.Generator) -> IntArray:
    """Indices of a random `fraction` of each class, at least one sample of each.

    >>> labels = np.repeat([0, 1], [100, 50])
    >>> np.bincount(labels[subsample(labels, 0.1, np.random.default_rng(0))]).tolist()
    [10, 5]
    """
    check_setting("fraction", fraction)
    dense = dense_labels(labels)
    wanted = np.maximum(1, np.rint(fraction * np.bincount(dense)))
    return np.flatnonzero(random_ranks(dense, rng) < wanted[dense])


def regions(clients: int, regions: int, rng: np.random.Generator) -> IntArray:
    """A random region for each client; the sizes of the regions differ by one at most.

    >>> np.bincount(regions(10, 3, np.random.default_rng(0))).tolist()
    [4, 3, 3]
    """
    check_setting("clients", clients, least=1)
    check_setting("regions", regions)
    if regions > clients:
        raise SettingError(f"regions={regions} is not allowed with {clients} clients; give 1 to {clients}")
    return rng.permutation(np.arange(clients) % regions)


def check_setting(setting: str, value: object, *, least: int | None = None) -> None:
    """Raise a `SettingError` if a setting of this module has a value that is not allowed."""
    if setting not in _ALLOWED:
        return
    kind, fits, allowed = _ALLOWED[setting]
    if least is not None:
        fits, allowed = lambda v: v >= least, f"a whole number, {least} or more"
    if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
        raise SettingError(f"{setting}={value!r} is not allowed; give {allowed}")


_ALLOWED: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "clients": (Integral, lambda v: v >= 1, "a whole number, 1 or more"),
    "regions": (Integral, lambda v: v >= 1, "a whole number, 1 or more"),
    "alpha": (Real, lambda v: 0 < v < math.inf, "a number above 0"),
    "min_size": (Integral, lambda v: v >= 0, "a whole number, 0 or more"),
    "min_share": (Real, lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    "shards_per_client": (Integral, lambda v: v >= 1, "a whole number, 1 or more"),
    "ways": (Integral, lambda v: v >= 1, "a whole number, 1 or more"),
    "shots": (Integral, lambda v: v >= 1, "a whole number, 1 or more"),
    "ways_spread": (Integral, lambda v: v >= 0, "a whole number, 0 or more"),
    "samples_per_client": (Integral, lambda v: v >= 0, "a whole number, 0 (all) or more"),
    "size_sigma": (Real, lambda v: 0 <= v <= 10, "a number from 0 to 10"),
    "ratio": (Real, lambda v: 0 < v <= 1, "a number above 0, at most 1"),
    "fraction": (Real, lambda v: 0 < v <= 1, "a number above 0, at most 1"),
    "imbalance_factor": (Real, lambda v: 1 <= v < math.inf, "a number, 1 or more"),
}
