"""Who owns which sample: ways to divide labelled data between clients.

A partitioner returns one owner per sample (-1: nobody), so no sample can be given out twice.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstill.core.choices import ALPHA
from fedstill.core.errors import DataError, SettingError, unknown

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Generator = np.random.Generator

# At alpha 0.01 with 20 clients and 10 classes about one `dir_balanced` draw in 2,000 succeeds.
MAX_DRAWS = 10_000
# Proportions drawn over all redraws together; about a second of work.
MAX_DRAWN = 10_000_000
FEDDF_GROUP = 10


def names() -> list[str]:
    """The known partitions.

    >>> "dirichlet" in names()
    True
    """
    return sorted(_SCHEMES)


def defaults(name: str) -> dict[str, Any]:
    """The settings a partition uses, with their default values.

    >>> defaults("shards")
    {'shards_per_client': 2, 'samples_per_client': 0}
    """
    if name not in _SCHEMES:
        raise unknown("partition", name, _SCHEMES)
    parameters = inspect.signature(_SCHEMES[name]).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {**own, "samples_per_client": 0}


def partition(name: str, labels: npt.ArrayLike, clients: int, rng: Generator, **settings: Any) -> IntArray:
    """The client (0..clients-1, or -1 for nobody) of each sample.

    A setting that only other partitions use is ignored, so one set of settings serves them all; a name
    that no partition knows is an error. `samples_per_client` caps every partition (0: no cap).

    >>> np.bincount(partition("iid", [0, 0, 1, 1], 2, np.random.default_rng(0))).tolist()
    [2, 2]
    """
    own = defaults(name)
    allowed = {setting for scheme in _SCHEMES for setting in defaults(scheme)}
    for setting, value in settings.items():
        if setting not in allowed:
            raise unknown("partition setting", setting, allowed)
        if setting in own:
            check_setting(setting, value)
    check_setting("clients", clients, least=0 if name == "natural" else 1)
    dense = _dense(labels)
    if not len(dense):
        raise DataError("there are no samples to divide between clients")
    if clients > len(dense):
        raise DataError(f"{clients} clients cannot share {len(dense)} samples; ask for fewer clients")

    cap = int(settings.get("samples_per_client", 0))
    scheme = _SCHEMES[name]
    sets_sizes = "samples_per_client" in inspect.signature(scheme).parameters
    used = {s: v for s, v in settings.items() if s in own and (s != "samples_per_client" or sets_sizes)}
    owner = scheme(dense, int(clients), rng, **used)
    if cap and not sets_sizes:
        owner[random_ranks(owner, rng) >= cap] = -1
    return owner


def long_tail(labels: npt.ArrayLike, imbalance_factor: float, rng: Generator) -> IntArray:
    """Indices that leave class c (of C) with `int(n_max * imbalance_factor**(-c/(C-1)))` samples.

    A class keeps at least one sample, and all it has if it has fewer than that number.

    >>> labels = np.repeat(np.arange(3), 100)
    >>> np.bincount(labels[long_tail(labels, 100, np.random.default_rng(0))]).tolist()
    [100, 10, 1]
    """
    check_setting("imbalance_factor", imbalance_factor)
    dense = _dense(labels)
    if not len(dense):
        return np.empty(0, np.int64)
    sizes = np.bincount(dense)
    last = max(len(sizes) - 1, 1)
    wanted = [max(1, int(sizes.max() * imbalance_factor ** (-c / last))) for c in range(len(sizes))]
    return np.flatnonzero(random_ranks(dense, rng) < np.array(wanted)[dense])


def subsample(labels: npt.ArrayLike, fraction: float, rng: Generator) -> IntArray:
    """Indices of a random `fraction` of each class, at least one sample of each.

    >>> labels = np.repeat([0, 1], [100, 50])
    >>> np.bincount(labels[subsample(labels, 0.1, np.random.default_rng(0))]).tolist()
    [10, 5]
    """
    check_setting("fraction", fraction)
    dense = _dense(labels)
    wanted = np.maximum(1, np.rint(fraction * np.bincount(dense)))
    return np.flatnonzero(random_ranks(dense, rng) < wanted[dense])


def regions(clients: int, regions: int, rng: Generator) -> IntArray:
    """A random region for each client; the sizes of the regions differ by one at most.

    >>> np.bincount(regions(10, 3, np.random.default_rng(0))).tolist()
    [4, 3, 3]
    """
    check_setting("clients", clients, least=1)
    check_setting("regions", regions)
    if regions > clients:
        raise SettingError(f"regions={regions} is not allowed with {clients} clients; give 1 to {clients}")
    return rng.permutation(np.arange(clients) % regions)


def random_ranks(owner: IntArray, rng: Generator) -> IntArray:
    """The place of each sample in a random order of its owner's samples (its class's, for labels)."""
    order = np.lexsort((rng.random(len(owner)), owner))
    grouped = owner[order]
    starts = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]])
    lengths = np.diff(np.r_[starts, len(owner)])
    ranks = np.empty(len(owner), np.int64)
    ranks[order] = np.arange(len(owner)) - np.repeat(starts, lengths)
    return ranks


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
    "samples_per_client": (Integral, lambda v: v >= 0, "a whole number, 0 (all) or more"),
    "size_sigma": (Real, lambda v: 0 <= v <= 10, "a number from 0 to 10"),
    "ratio": (Real, lambda v: 0 < v <= 1, "a number above 0, at most 1"),
    "fraction": (Real, lambda v: 0 < v <= 1, "a number above 0, at most 1"),
    "imbalance_factor": (Real, lambda v: 1 <= v < math.inf, "a number, 1 or more"),
}


# The partitions. Labels come in as 0..C-1 without gaps, and 1 <= clients <= samples holds.


def _iid(labels: IntArray, clients: int, rng: Generator, *, samples_per_client: int = 0) -> IntArray:
    """Equal shares at random."""
    return _deal_sizes(_equal_sizes(len(labels), clients, samples_per_client), len(labels), rng)


def _quantity(labels: IntArray, clients: int, rng: Generator, *, alpha: float = ALPHA, min_size: int = 1) -> IntArray:
    """Sizes from Dir(alpha), labels as in the whole."""
    _check_enough(len(labels), clients, min_size)
    sizes = _cut(_shares(_log_gammas(alpha, (clients,), rng)), len(labels))
    return _deal_sizes(_level(sizes, min_size), len(labels), rng)


def _shards(labels: IntArray, clients: int, rng: Generator, *, shards_per_client: int = 2) -> IntArray:
    """Sort by label, cut into equal shards, give each client the same number of them."""
    samples, shards = len(labels), clients * shards_per_client
    if shards > samples:
        raise DataError(
            f"{clients} clients with {shards_per_client} shards each need {shards} samples, but there are "
            f"{samples}; lower shards_per_client or the number of clients"
        )
    owner = np.empty(samples, np.int64)
    shard_owner = rng.permutation(shards) // shards_per_client
    owner[_by_class(labels, rng)] = shard_owner[np.arange(samples) * shards // samples]
    return owner


def _natural(
    labels: IntArray,
    clients: int,
    rng: Generator,
    *,
    owner: npt.ArrayLike | None = None,
    min_size: int = 1,
) -> IntArray:
    """The owners the data name; of those with at least `min_size` samples all, or `clients` at random.

    Those chosen are numbered 0, 1, ... in the order of their ids.
    """
    if owner is None:
        raise SettingError("partition=natural needs owner: the client of each sample")
    given = np.asarray(owner)
    if given.shape != labels.shape or not np.issubdtype(given.dtype, np.integer):
        raise DataError(f"owner must hold one whole number for each of the {len(labels)} samples")
    ids, where, sizes = np.unique(given, return_inverse=True, return_counts=True)
    eligible = np.flatnonzero((ids >= 0) & (sizes >= max(min_size, 1)))
    if clients > len(eligible) or not len(eligible):
        raise DataError(
            f"asked for {clients or 'all'} clients, but the data have {len(eligible)} with at least "
            f"{max(min_size, 1)} samples; ask for fewer clients or lower min_size"
        )
    if clients:
        eligible = np.sort(rng.choice(eligible, clients, replace=False))
    number = np.full(len(ids), -1, np.int64)
    number[eligible] = np.arange(len(eligible))
    return number[where.reshape(-1)]


def _dirichlet(labels: IntArray, clients: int, rng: Generator, *, alpha: float = ALPHA, min_size: int = 1) -> IntArray:
    """Each class is cut by its own Dir(alpha) over the clients.

    Redrawn while a client has fewer than `min_size` samples; when the draws are used up, single samples
    of the last draw move from the client that is then the largest to those that lack some.
    """
    _check_enough(len(labels), clients, min_size)
    counts, _, _ = _draw_counts(np.bincount(labels), clients, alpha, min_size, rng)
    return _at_least(_deal_counts(labels, counts, rng), clients, min_size, rng)


def _dir_balanced(
    labels: IntArray, clients: int, rng: Generator, *, alpha: float = ALPHA, min_size: int = 10
) -> IntArray:
    """As `dirichlet`, but a client that holds its N/K samples gets no further class (NIID-Bench, MOON)."""
    _check_enough(len(labels), clients, min_size)
    counts, found, draws = _draw_counts(np.bincount(labels), clients, alpha, min_size, rng, cap=len(labels) / clients)
    if not found:
        raise _no_draw(draws, clients, min_size, alpha)
    return _deal_counts(labels, counts, rng)


def _dir_fedgen(
    labels: IntArray,
    clients: int,
    rng: Generator,
    *,
    alpha: float = ALPHA,
    min_size: int = 10,
    ratio: float = 0.5,
) -> IntArray:
    """As `dir_balanced` on a part `ratio` of the data, with at most `ratio` N/K samples of a class."""
    cap = ratio * len(labels) / clients
    class_sizes = np.bincount(labels)
    if ratio < 1:
        class_sizes = np.minimum(int(cap), (ratio * class_sizes).astype(np.int64))
    _check_enough(int(class_sizes.sum()), clients, min_size, "raise ratio, lower")
    counts, found, draws = _draw_counts(class_sizes, clients, alpha, min_size, rng, cap=cap)
    if not found:
        raise _no_draw(draws, clients, min_size, alpha)
    return _deal_counts(labels, counts, rng)


def _dir_feddf(
    labels: IntArray, clients: int, rng: Generator, *, alpha: float = ALPHA, min_share: float = 0.5
) -> IntArray:
    """`dir_balanced` inside groups of ten clients, then one list cut again into equal slices (FedDF).

    A group is redrawn while its smallest client has less than `min_share` of the group's mean.
    """
    groups = -(-clients // FEDDF_GROUP)
    ends = np.minimum(np.arange(1, groups + 1) * FEDDF_GROUP, clients)
    parts = np.split(rng.permutation(len(labels)), np.rint(ends[:-1] / clients * len(labels)).astype(int))
    widths = np.diff(ends, prepend=0)
    listed = []
    for samples, width in zip(parts, widths.tolist(), strict=True):
        group = _dense(labels[samples])
        mean = len(group) / width
        counts, found, draws = _draw_counts(np.bincount(group), width, alpha, int(min_share * mean), rng, cap=mean)
        if not found:
            raise DataError(
                f"no draw in {draws} gave each of {width} clients {min_share:g} of their mean size at "
                f"alpha={alpha:g}; lower min_share, raise alpha, or use partition=dir_fedkf"
            )
        # By client, and by class for the same client: the order the slices are cut in.
        listed.append(samples[np.lexsort((group, _deal_counts(group, counts, rng)))])
    owner = np.empty(len(labels), np.int64)
    owner[np.concatenate(listed)] = np.repeat(np.arange(clients), _equal_sizes(len(labels), clients))
    return owner


def _dir_fedkf(labels: IntArray, clients: int, rng: Generator, *, alpha: float = ALPHA, min_size: int = 1) -> IntArray:
    """Dir(alpha) inside groups of C clients whose largest shares take turns (FedKF).

    FedKF redraws until the largest share of a class falls to a client that has not had its turn. Clients
    are exchangeable under Dir(alpha), so to swap the largest share to a random such client gives the
    same distribution, without a loop. `min_size` moves samples only if a client would have fewer.
    """
    _check_enough(len(labels), clients, min_size)
    class_sizes = np.bincount(labels)
    classes = len(class_sizes)
    groups = -(-clients // classes)
    ends = np.minimum(np.arange(1, groups + 1) * classes, clients)
    exists = np.arange(groups * classes).reshape(groups, classes) < clients
    had_turn = np.zeros_like(exists)
    every_group = np.arange(groups)
    counts = np.empty((classes, clients), np.int64)
    for c, size in enumerate(class_sizes.tolist()):
        # A random phase, or rounding would leave the same groups without each small class.
        edges = np.floor(ends / clients * size + rng.random()).astype(np.int64)
        edges[-1] = size
        group_sizes = np.diff(edges, prepend=0)
        share = _shares(np.where(exists, _log_gammas(alpha, exists.shape, rng), -np.inf))
        largest = share.argmax(axis=1)
        waiting = exists & ~had_turn
        chosen = np.where(waiting, rng.random(exists.shape), -1.0).argmax(axis=1)
        chosen = np.where(waiting[every_group, largest], largest, chosen)
        top, other = share[every_group, largest], share[every_group, chosen]
        share[every_group, largest], share[every_group, chosen] = other, top
        had_turn[every_group, chosen] = True
        had_turn[(had_turn == exists).all(axis=1)] = False
        counts[c] = _cut(share, group_sizes[:, None]).reshape(-1)[:clients]
    return _at_least(_deal_counts(labels, counts, rng), clients, min_size, rng)


def _dir_client_prior(
    labels: IntArray,
    clients: int,
    rng: Generator,
    *,
    alpha: float = ALPHA,
    size_sigma: float = 0.0,
    samples_per_client: int = 0,
    min_size: int = 1,
) -> IntArray:
    """Each client draws its own class prior from Dir(alpha) and fills its size from it (FedDyn, FedFTG).

    Sizes are equal, or log-normal with `size_sigma` above 0 and the same total. A class that has run out
    is left out of the priors.
    """
    sizes = _equal_sizes(len(labels), clients, samples_per_client)
    _check_enough(int(sizes.sum()), clients, min_size)
    if size_sigma:
        sizes = _level(_cut(_shares(rng.normal(0, size_sigma, clients)), int(sizes.sum())), min_size)
    available = np.bincount(labels)
    prior = _log_gammas(alpha, (clients, len(available)), rng)
    counts = np.zeros((len(available), clients), np.int64)
    lacking = sizes
    # A pass that leaves somebody lacking has emptied a class, so there are at most C passes.
    while lacking.any():
        left = np.flatnonzero(available)
        requested = np.zeros_like(counts)
        requested[left] = rng.multinomial(lacking, _shares(prior[:, left])).T
        for c in np.flatnonzero(requested.sum(axis=1) > available):
            lucky = rng.permutation(np.repeat(np.arange(clients), requested[c]))[: available[c]]
            requested[c] = np.bincount(lucky, minlength=clients)
        counts += requested
        available = available - requested.sum(axis=1)
        lacking = lacking - requested.sum(axis=0)
    return _deal_counts(labels, counts, rng)


_SCHEMES: dict[str, Callable[..., IntArray]] = {
    "dirichlet": _dirichlet,
    "dir_balanced": _dir_balanced,
    "dir_client_prior": _dir_client_prior,
    "dir_feddf": _dir_feddf,
    "dir_fedgen": _dir_fedgen,
    "dir_fedkf": _dir_fedkf,
    "iid": _iid,
    "natural": _natural,
    "quantity": _quantity,
    "shards": _shards,
}


# What they share.


def _dense(labels: npt.ArrayLike) -> IntArray:
    """Labels renumbered 0..C-1 without gaps."""
    given = np.asarray(labels)
    if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
        raise DataError(f"labels must be one whole number per sample, not {given.dtype} of shape {given.shape}")
    return np.unique(given, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _check_enough(samples: int, clients: int, min_size: int, what_to_do: str = "lower") -> None:
    if samples < clients * min_size:
        raise DataError(
            f"{clients} clients with at least {min_size} samples each need {clients * min_size}, but there "
            f"are {samples}; {what_to_do} min_size or the number of clients"
        )


def _no_draw(draws: int, clients: int, min_size: int, alpha: float) -> DataError:
    return DataError(
        f"no draw in {draws} gave every client {min_size} samples at alpha={alpha:g} with {clients} clients; "
        "lower min_size, raise alpha, or use partition=dir_fedkf"
    )


def _log_gammas(alpha: float, shape: tuple[int, ...], rng: Generator) -> FloatArray:
    """Logarithms of Gamma(alpha) draws, which do not underflow however small alpha is.

    Gamma(alpha) is Gamma(alpha + 1) * U**(1/alpha). Normalised by `_shares` they are Dir(alpha); with
    some of them at -inf, Dir(alpha) over the others.
    """
    # Nothing distinguishes smaller values from this one, and log(U)/alpha must stay finite.
    alpha = max(float(alpha), 1e-300)
    uniform = 1.0 - rng.random(shape)  # in (0, 1]
    logs = np.log(rng.standard_gamma(alpha + 1.0, shape)) + np.log(uniform) / alpha
    return np.asarray(logs, np.float64)


def _shares(logs: FloatArray) -> FloatArray:
    """exp(logs) over the last axis, normalised to sum 1."""
    weights = np.exp(logs - logs.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True), np.float64)


def _cut(shares: FloatArray, total: int | IntArray) -> IntArray:
    """Whole numbers in proportion to the shares, summing to total over the last axis."""
    # Rounded, not floored: a running sum of 1 - 1e-16 must not pass a sample on to a client with share 0.
    edges = np.rint(np.cumsum(shares, axis=-1) * total).astype(np.int64)
    edges[..., -1:] = total
    return np.diff(edges, axis=-1, prepend=0)


def _batches(clients: int, classes: int) -> Iterator[int]:
    """How many draws to make at once: one, then ever more, MAX_DRAWS in all, fewer if each is large."""
    most, done = max(1, min(MAX_DRAWS, MAX_DRAWN // (clients * classes))), 0
    while done < most:
        batch = min(max(1, 9 * done), most - done)
        yield batch
        done += batch


def _draw_counts(
    class_sizes: IntArray,
    clients: int,
    alpha: float,
    min_size: int,
    rng: Generator,
    *,
    cap: float = math.inf,
) -> tuple[IntArray, bool, int]:
    """Dirichlet draws of (classes, clients) counts until every client has `min_size`.

    Returns the counts, whether they do, and the number of draws. A client with `cap` samples or more gets
    none of the later classes. If no draw succeeds the counts are those of the last one.
    """
    counts = np.empty((0, len(class_sizes), clients), np.int64)
    draws = 0
    for batch in _batches(clients, len(class_sizes)):
        draws += batch
        counts = np.empty((batch, len(class_sizes), clients), np.int64)
        sizes = np.zeros((batch, clients), np.int64)
        for c, size in enumerate(class_sizes.tolist()):
            full = sizes >= cap
            full[full.all(axis=1)] = False
            counts[:, c] = _cut(_shares(np.where(full, -np.inf, _log_gammas(alpha, full.shape, rng))), size)
            sizes += counts[:, c]
        good = np.flatnonzero(sizes.min(axis=1) >= min_size)
        if len(good):
            return counts[good[0]], True, draws
    return counts[-1], False, draws


def _by_class(labels: IntArray, rng: Generator) -> IntArray:
    """Sample indices sorted by class, in random order inside a class."""
    return np.lexsort((rng.random(len(labels)), labels))


def _deal_counts(labels: IntArray, counts: IntArray, rng: Generator) -> IntArray:
    """Give client k `counts[c, k]` random samples of class c; what is left over gets -1."""
    classes, clients = counts.shape
    left = np.bincount(labels, minlength=classes) - counts.sum(axis=1)
    owner = np.empty(len(labels), np.int64)
    ids = np.tile(np.r_[np.arange(clients), -1], classes)
    owner[_by_class(labels, rng)] = np.repeat(ids, np.c_[counts, left].reshape(-1))
    return owner


def _deal_sizes(sizes: IntArray, samples: int, rng: Generator) -> IntArray:
    """Give client k `sizes[k]` random samples; what is left over gets -1."""
    owner = np.full(samples, -1, np.int64)
    owner[: sizes.sum()] = np.repeat(np.arange(len(sizes)), sizes)
    return rng.permutation(owner)


def _equal_sizes(samples: int, clients: int, samples_per_client: int = 0) -> IntArray:
    """The same size for each client; without a given size all samples are used, so by one at most more."""
    if samples_per_client * clients > samples:
        raise DataError(
            f"{clients} clients with samples_per_client={samples_per_client} need "
            f"{clients * samples_per_client} samples, but there are {samples}; lower samples_per_client "
            f"to {samples // clients} or ask for fewer clients"
        )
    if samples_per_client:
        return np.full(clients, samples_per_client, np.int64)
    return samples // clients + (np.arange(clients) < samples % clients).astype(np.int64)


def _level(sizes: IntArray, least: int) -> IntArray:
    """Sizes after single samples moved, each from the then largest client, until all have `least`.

    Found by bisection for the level the donors sink to, not one by one.
    """
    missing = int(np.maximum(least - sizes, 0).sum())
    if not missing:
        return sizes
    low, high = least, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        if np.maximum(sizes - middle, 0).sum() >= missing:
            low = middle
        else:
            high = middle - 1
    levelled = np.clip(sizes, least, low)
    donors = np.flatnonzero(sizes > low)
    spare = int((sizes - low)[donors].sum()) - missing
    levelled[donors[:spare]] += 1
    return levelled


def _at_least(owner: IntArray, clients: int, least: int, rng: Generator) -> IntArray:
    """Move random samples of the largest clients so that every client has `least`."""
    sizes = np.bincount(owner, minlength=clients)
    levelled = _level(sizes, least)
    surplus = np.maximum(sizes - levelled, 0)
    if surplus.any():
        moved = random_ranks(owner, rng) < surplus[owner]
        owner[moved] = np.repeat(np.arange(clients), np.maximum(levelled - sizes, 0))
    return owner
