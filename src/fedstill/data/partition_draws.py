"""What partitions are made of: proportions, redraws, and samples dealt to clients by class or by size."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fedstill.core.arrays import FloatArray, IntArray
from fedstill.core.errors import DataError

Generator = np.random.Generator

# At alpha 0.01 with 20 clients and 10 classes about one `dir_balanced` draw in 2,000 succeeds.
MAX_DRAWS = 10_000
# Proportions drawn over all redraws together; about a second of work.
MAX_DRAWN = 10_000_000


def dense_labels(labels: npt.ArrayLike) -> IntArray:
    """Labels renumbered 0..C-1 without gaps."""
    array = np.asarray(labels)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise DataError(f"labels must be one whole number per sample, not {array.dtype} of shape {array.shape}")
    return np.unique(array, return_inverse=True)[1].reshape(-1).astype(np.int64)


def check_enough(samples: int, clients: int, min_size: int, what_to_do: str = "lower") -> None:
    if samples < clients * min_size:
        raise DataError(
            f"{clients} clients with at least {min_size} samples each need {clients * min_size}, but there "
            f"are {samples}; {what_to_do} min_size or the number of clients"
        )


def no_draw_error(draws: int, clients: int, min_size: int, alpha: float) -> DataError:
    return DataError(
        f"no draw in {draws} gave every client {min_size} samples at alpha={alpha:g} with {clients} clients; "
        "lower min_size, raise alpha, or use partition=dir_fedkf"
    )


def log_gammas(alpha: float, shape: tuple[int, ...], rng: Generator) -> FloatArray:
    """Logarithms of Gamma(alpha) draws, which do not underflow however small alpha is.

    Gamma(alpha) is Gamma(alpha + 1) * U**(1/alpha). Normalised by `normalised` they are Dir(alpha); with
    some of them at -inf, Dir(alpha) over the others.
    """
    # Nothing distinguishes smaller values from this one, and log(U)/alpha must stay finite.
    alpha = max(float(alpha), 1e-300)
    uniform = 1.0 - rng.random(shape)  # in (0, 1]
    logs = np.log(rng.standard_gamma(alpha + 1.0, shape)) + np.log(uniform) / alpha
    return np.asarray(logs, np.float64)


def normalised(logs: FloatArray) -> FloatArray:
    """exp(logs) over the last axis, normalised to sum 1."""
    weights = np.exp(logs - logs.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True), np.float64)


def cut_by_shares(shares: FloatArray, total: int | IntArray) -> IntArray:
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


def draw_counts(
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
            counts[:, c] = cut_by_shares(normalised(np.where(full, -np.inf, log_gammas(alpha, full.shape, rng))), size)
            sizes += counts[:, c]
        good = np.flatnonzero(sizes.min(axis=1) >= min_size)
        if len(good):
            return counts[good[0]], True, draws
    return counts[-1], False, draws


def by_class(labels: IntArray, rng: Generator) -> IntArray:
    """Sample indices sorted by class, in random order inside a class."""
    return np.lexsort((rng.random(len(labels)), labels))


def deal_counts(labels: IntArray, counts: IntArray, rng: Generator) -> IntArray:
    """Give client k `counts[c, k]` random samples of class c; what is left over gets -1."""
    classes, clients = counts.shape
    left = np.bincount(labels, minlength=classes) - counts.sum(axis=1)
    owner = np.empty(len(labels), np.int64)
    ids = np.tile(np.r_[np.arange(clients), -1], classes)
    owner[by_class(labels, rng)] = np.repeat(ids, np.c_[counts, left].reshape(-1))
    return owner


def deal_sizes(sizes: IntArray, samples: int, rng: Generator) -> IntArray:
    """Give client k `sizes[k]` random samples; what is left over gets -1."""
    owner = np.full(samples, -1, np.int64)
    owner[: sizes.sum()] = np.repeat(np.arange(len(sizes)), sizes)
    return rng.permutation(owner)


def equal_sizes(samples: int, clients: int, samples_per_client: int = 0) -> IntArray:
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


def levelled_sizes(sizes: IntArray, least: int) -> IntArray:
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


def at_least(owner: IntArray, clients: int, least: int, rng: Generator) -> IntArray:
    """Move random samples of the largest clients so that every client has `least`."""
    sizes = np.bincount(owner, minlength=clients)
    levelled = levelled_sizes(sizes, least)
    surplus = np.maximum(sizes - levelled, 0)
    if surplus.any():
        moved = random_ranks(owner, rng) < surplus[owner]
        owner[moved] = np.repeat(np.arange(clients), np.maximum(levelled - sizes, 0))
    return owner


def random_ranks(owner: IntArray, rng: Generator) -> IntArray:
    """The place of each sample in a random order of its owner's samples (its class's, for labels)."""
    order = np.lexsort((rng.random(len(owner)), owner))
    grouped = owner[order]
    starts = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]])
    lengths = np.diff(np.r_[starts, len(owner)])
    ranks = np.empty(len(owner), np.int64)
    ranks[order] = np.arange(len(owner)) - np.repeat(starts, lengths)
    return ranks


def random_share(owner: IntArray, clients: int, share: float, rng: Generator) -> npt.NDArray[np.bool_]:
    """Which samples are among a random share of their owner's; never all of them. An owner below 0 is nobody."""
    wanted = share_of(np.bincount(owner[owner >= 0], minlength=clients), share)
    return np.asarray((owner >= 0) & (random_ranks(owner, rng) < wanted[owner]))


def share_of(sizes: IntArray, share: float) -> IntArray:
    """How many samples a share of so many is, where at least one must be left.

    >>> share_of(np.array([0, 1, 9, 100]), 0.1).tolist()
    [0, 0, 1, 10]
    """
    wanted: IntArray = np.minimum(np.rint(share * sizes).astype(np.int64), np.maximum(sizes - 1, 0))
    return wanted
