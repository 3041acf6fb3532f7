"""The partitions, each a function of its name. Labels come in as 0..C-1 without gaps; 1 <= clients <= samples holds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedstill.core.arrays import IntArray
from fedstill.core.choices import ALPHA
from fedstill.core.errors import DataError, SettingError
from fedstill.data.partition_draws import (
    Generator,
    at_least,
    by_class,
    check_enough,
    cut_by_shares,
    deal_counts,
    deal_sizes,
    dense_labels,
    draw_counts,
    equal_sizes,
    levelled_sizes,
    log_gammas,
    no_draw_error,
    normalised,
)

FEDDF_GROUP = 10


def iid(labels: IntArray, clients: int, rng: Generator, *, samples_per_client: int = 0) -> IntArray:
    """Equal shares at random."""
    return deal_sizes(equal_sizes(len(labels), clients, samples_per_client), len(labels), rng)


def quantity(labels: IntArray, clients: int, rng: Generator, *, alpha: float = ALPHA, min_size: int = 1) -> IntArray:
    """Sizes from Dir(alpha), labels as in the whole."""
    check_enough(len(labels), clients, min_size)
    sizes = cut_by_shares(normalised(log_gammas(alpha, (clients,), rng)), len(labels))
    return deal_sizes(levelled_sizes(sizes, min_size), len(labels), rng)


def shards(labels: IntArray, clients: int, rng: Generator, *, shards_per_client: int = 2) -> IntArray:
    """Sort by label, cut into equal shards, give each client the same number of them."""
    samples, shards = len(labels), clients * shards_per_client
    if shards > samples:
        raise DataError(
            f"{clients} clients with {shards_per_client} shards each need {shards} samples, but there are "
            f"{samples}; lower shards_per_client or the number of clients"
        )
    owner = np.empty(samples, np.int64)
    shard_owner = rng.permutation(shards) // shards_per_client
    owner[by_class(labels, rng)] = shard_owner[np.arange(samples) * shards // samples]
    return owner


def natural(
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


def dirichlet(labels: IntArray, clients: int, rng: Generator, *, alpha: float = ALPHA, min_size: int = 1) -> IntArray:
    """Each class is cut by its own Dir(alpha) over the clients.

    Redrawn while a client has fewer than `min_size` samples; when the draws are used up, single samples
    of the last draw move from the client that is then the largest to those that lack some.
    """
    check_enough(len(labels), clients, min_size)
    counts, _, _ = draw_counts(np.bincount(labels), clients, alpha, min_size, rng)
    return at_least(deal_counts(labels, counts, rng), clients, min_size, rng)


def dir_balanced(
    labels: IntArray, clients: int, rng: Generator, *, alpha: float = ALPHA, min_size: int = 10
) -> IntArray:
    """As `dirichlet`, but a client that holds its N/K samples gets no further class (NIID-Bench, MOON)."""
    check_enough(len(labels), clients, min_size)
    counts, found, draws = draw_counts(np.bincount(labels), clients, alpha, min_size, rng, cap=len(labels) / clients)
    if not found:
        raise no_draw_error(draws, clients, min_size, alpha)
    return deal_counts(labels, counts, rng)


def dir_fedgen(
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
    check_enough(int(class_sizes.sum()), clients, min_size, "raise ratio, lower")
    counts, found, draws = draw_counts(class_sizes, clients, alpha, min_size, rng, cap=cap)
    if not found:
        raise no_draw_error(draws, clients, min_size, alpha)
    return deal_counts(labels, counts, rng)


def dir_feddf(
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
        group = dense_labels(labels[samples])
        mean = len(group) / width
        counts, found, draws = draw_counts(np.bincount(group), width, alpha, int(min_share * mean), rng, cap=mean)
        if not found:
            raise DataError(
                f"no draw in {draws} gave each of {width} clients {min_share:g} of their mean size at "
                f"alpha={alpha:g}; lower min_share, raise alpha, or use partition=dir_fedkf"
            )
        # By client, and by class for the same client: the order the slices are cut in.
        listed.append(samples[np.lexsort((group, deal_counts(group, counts, rng)))])
    owner = np.empty(len(labels), np.int64)
    owner[np.concatenate(listed)] = np.repeat(np.arange(clients), equal_sizes(len(labels), clients))
    return owner


def dir_fedkf(labels: IntArray, clients: int, rng: Generator, *, alpha: float = ALPHA, min_size: int = 1) -> IntArray:
    """Dir(alpha) inside groups of C clients whose largest shares take turns (FedKF).

    FedKF redraws until the largest share of a class falls to a client that has not had its turn. Clients
    are exchangeable under Dir(alpha), so to swap the largest share to a random such client gives the
    same distribution, without a loop. `min_size` moves samples only if a client would have fewer.
    """
    check_enough(len(labels), clients, min_size)
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
        share = normalised(np.where(exists, log_gammas(alpha, exists.shape, rng), -np.inf))
        largest = share.argmax(axis=1)
        waiting = exists & ~had_turn
        chosen = np.where(waiting, rng.random(exists.shape), -1.0).argmax(axis=1)
        chosen = np.where(waiting[every_group, largest], largest, chosen)
        top, other = share[every_group, largest], share[every_group, chosen]
        share[every_group, largest], share[every_group, chosen] = other, top
        had_turn[every_group, chosen] = True
        had_turn[(had_turn == exists).all(axis=1)] = False
        counts[c] = cut_by_shares(share, group_sizes[:, None]).reshape(-1)[:clients]
    return at_least(deal_counts(labels, counts, rng), clients, min_size, rng)


def dir_client_prior(
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
    sizes = equal_sizes(len(labels), clients, samples_per_client)
    check_enough(int(sizes.sum()), clients, min_size)
    if size_sigma:
        sizes = levelled_sizes(
            cut_by_shares(normalised(rng.normal(0, size_sigma, clients)), int(sizes.sum())), min_size
        )
    available = np.bincount(labels)
    prior = log_gammas(alpha, (clients, len(available)), rng)
    counts = np.zeros((len(available), clients), np.int64)
    lacking = sizes
    # A pass that leaves somebody lacking has emptied a class, so there are at most C passes.
    while lacking.any():
        left = np.flatnonzero(available)
        requested = np.zeros_like(counts)
        requested[left] = rng.multinomial(lacking, normalised(prior[:, left])).T
        for c in np.flatnonzero(requested.sum(axis=1) > available):
            lucky = rng.permutation(np.repeat(np.arange(clients), requested[c]))[: available[c]]
            requested[c] = np.bincount(lucky, minlength=clients)
        counts += requested
        available = available - requested.sum(axis=1)
        lacking = lacking - requested.sum(axis=0)
    return deal_counts(labels, counts, rng)


def n_way(
    labels: IntArray, clients: int, rng: Generator, *, ways: int = 3, shots: int = 100, ways_spread: int = 2
) -> IntArray:
    """Each client gets n random classes and k samples of each, both drawn within `ways_spread` of `ways` and `shots`.

    As FedProto's n-way k-shot clients, but no sample goes to two of them. At least two classes, at most all there are,
    and one sample.
    """
    class_sizes = np.bincount(labels)
    classes = len(class_sizes)
    most = min(classes, ways + ways_spread)
    n = rng.integers(min(max(2, ways - ways_spread), most), most + 1, clients)
    k = rng.integers(max(1, shots - ways_spread), shots + ways_spread + 1, clients)
    chosen = rng.random((clients, classes)).argsort(axis=1).argsort(axis=1) < n[:, None]
    counts = (chosen * k[:, None]).T
    requested = counts.sum(axis=1)
    if (requested > class_sizes).any():
        c = int((requested - class_sizes).argmax())
        raise DataError(
            f"{clients} clients ask for {requested[c]} samples of a class that has {class_sizes[c]}; lower shots, ways "
            "or the number of clients"
        )
    return deal_counts(labels, counts, rng)


SCHEMES: dict[str, Callable[..., IntArray]] = {
    "dirichlet": dirichlet,
    "dir_balanced": dir_balanced,
    "dir_client_prior": dir_client_prior,
    "dir_feddf": dir_feddf,
    "dir_fedgen": dir_fedgen,
    "dir_fedkf": dir_fedkf,
    "iid": iid,
    "n_way": n_way,
    "natural": natural,
    "quantity": quantity,
    "shards": shards,
}
