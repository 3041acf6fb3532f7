"""Partitions: each sample at most once, always an end, and the shape each scheme promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.errors import DataError, SettingError
from fedstill.data.partition import defaults, long_tail, names, partition, regions, subsample
from fedstill.data.partition_draws import random_ranks
from support.runs import lines_run

CIFAR = np.repeat(np.arange(10), 5000)
# These fail only if there are too few samples; the others may also find no draw with their minimum size.
ALWAYS = ["dirichlet", "iid", "quantity", "dir_fedkf", "dir_client_prior", "shards"]
ALL = [name for name in names() if name != "natural"]
ALPHAS = st.sampled_from([1e-320, 1e-6, 1e-3, 0.01, 0.1, 0.5, 1.0, 100.0, 1e6])
LABELS = st.lists(st.integers(0, 6), min_size=1, max_size=150).map(lambda y: np.array(y, np.int64))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def sizes_of(owner: npt.NDArray[np.int64], clients: int) -> npt.NDArray[np.int64]:
    return np.bincount(owner[owner >= 0], minlength=clients)


def counts_of(owner: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], clients: int) -> Any:
    """(clients, classes) by an independent route."""
    counts = np.zeros((clients, labels.max() + 1), np.int64)
    np.add.at(counts, (owner[owner >= 0], labels[owner >= 0]), 1)
    return counts


def total_variation(counts: Any) -> float:
    """Mean distance between a client's class distribution and the even one."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return float(np.abs(shares - 1 / shares.shape[1]).sum(axis=1).mean() / 2)


@given(st.sampled_from(ALL), LABELS, st.integers(1, 40), ALPHAS, st.integers(0, 2**32))
@settings(max_examples=250)
def test_every_partition_ends_with_valid_owners_or_a_clear_error(
    name: str, labels: npt.NDArray[np.int64], clients: int, alpha: float, seed: int
) -> None:
    try:
        owner = partition(name, labels, clients, rng(seed), alpha=alpha)
    except DataError as error:
        message = str(error)
    else:
        message = ""
    if message:
        too_few = clients * defaults(name).get("shards_per_client", 1) > len(labels)
        assert too_few or name not in ALWAYS
        assert any(hint in message for hint in ("lower", "raise", "fewer"))
        return
    assert owner.shape == labels.shape
    assert owner.dtype == np.int64
    assert owner.min() >= -1
    assert owner.max() < clients
    if name not in ("dir_fedgen", "n_way"):
        assert (owner >= 0).all()
    assert sizes_of(owner, clients).min() >= defaults(name).get("min_size", 1)
    assert np.array_equal(owner, partition(name, labels, clients, rng(seed), alpha=alpha))


@given(LABELS, st.integers(1, 30), ALPHAS, st.integers(0, 8), st.sampled_from(["dirichlet", "dir_fedkf"]))
@settings(max_examples=100)
def test_min_size_holds_whenever_there_are_enough_samples(
    labels: npt.NDArray[np.int64], clients: int, alpha: float, min_size: int, name: str
) -> None:
    if len(labels) < clients * max(min_size, 1):
        with pytest.raises(DataError):
            partition(name, labels, clients, rng(), alpha=alpha, min_size=min_size)
    else:
        owner = partition(name, labels, clients, rng(), alpha=alpha, min_size=min_size)
        assert sizes_of(owner, clients).min() >= min_size
        assert (owner >= 0).all()


@given(st.sampled_from(ALL), st.integers(1, 60), st.integers(1, 20))
@settings(max_examples=60)
def test_samples_per_client_is_a_cap(name: str, samples_per_client: int, clients: int) -> None:
    labels = np.arange(1200) % 3
    given = {"alpha": 5.0, "ratio": 1.0, "shots": 5, "samples_per_client": samples_per_client}
    owner = partition(name, labels, clients, rng(), **given)
    sizes = sizes_of(owner, clients)
    assert sizes.max() <= samples_per_client
    if name in ("iid", "dir_client_prior"):
        assert (sizes == samples_per_client).all()


def test_repaired_draw_takes_from_the_largest_clients() -> None:
    # At this alpha the one class falls to one client, which then gives one sample to each of the others.
    owner = partition("dirichlet", np.zeros(100, int), 8, rng(), alpha=1e-6)
    assert sorted(sizes_of(owner, 8)) == [1, 1, 1, 1, 1, 1, 1, 93]


def test_dirichlet_without_min_size_is_one_client_per_class_in_the_limit() -> None:
    counts = counts_of(partition("dirichlet", CIFAR, 50, rng(), alpha=1e-6, min_size=0), CIFAR, 50)
    assert ((counts > 0).sum(axis=0) == 1).all()
    assert (counts.max(axis=0) == 5000).all()


@pytest.mark.slow
def test_dirichlet_shares_have_the_mean_and_variance_of_the_distribution() -> None:
    alpha, clients, classes = 0.5, 5, 3000
    labels = np.repeat(np.arange(classes), 1000)
    shares = counts_of(partition("dirichlet", labels, clients, rng(), alpha=alpha), labels, clients) / 1000
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert shares.mean(axis=1) == pytest.approx(np.full(clients, 0.2), abs=5 * (variance / classes) ** 0.5)
    assert shares.var(axis=1) == pytest.approx(np.full(clients, variance), rel=0.1)


@pytest.mark.parametrize("name", ["dirichlet", "dir_balanced", "dir_feddf", "dir_fedkf", "dir_client_prior"])
def test_small_alpha_concentrates_and_large_alpha_evens_out(name: str) -> None:
    small, large = (
        total_variation(counts_of(partition(name, CIFAR, 10, rng(1), alpha=a, min_size=1), CIFAR, 10))
        for a in (0.05, 1000.0)
    )
    # One class of ten is 0.9 away from even; Dir(1000) shares deviate by about 3 %.
    assert small > 0.5
    assert large < 0.05


def test_dir_balanced_stops_giving_to_full_clients() -> None:
    clients = 10
    owner = partition("dir_balanced", CIFAR, clients, rng(), alpha=0.5)
    counts = counts_of(owner, CIFAR, clients)
    before = np.cumsum(counts, axis=1) - counts
    assert (counts[before >= len(CIFAR) / clients] == 0).all()
    assert counts.sum(axis=1).min() >= 10


def test_dir_balanced_says_what_to_change_when_no_draw_fits() -> None:
    with pytest.raises(DataError) as caught:
        partition("dir_balanced", CIFAR, 20, rng(), alpha=1e-6)
    assert str(caught.value) == (
        "no draw in 10000 gave every client 10 samples at alpha=1e-06 with 20 clients; "
        "lower min_size, raise alpha, or use partition=dir_fedkf"
    )


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_dir_feddf_gives_equal_sizes(alpha: float) -> None:
    labels = rng(3).permutation(CIFAR)[:45_000]
    assert (sizes_of(partition("dir_feddf", labels, 20, rng(), alpha=alpha), 20) == 2250).all()


def test_dir_feddf_names_min_share_when_no_draw_fits() -> None:
    labels = np.arange(2000) % 2
    with pytest.raises(DataError, match="lower min_share"):
        partition("dir_feddf", labels, 10, rng(), alpha=1e-6)
    assert (sizes_of(partition("dir_feddf", labels, 10, rng(), alpha=1e-6, min_share=0), 10) == 200).all()


@pytest.mark.slow
@given(st.integers(2, 12), st.integers(1, 40), st.sampled_from([0.01, 0.1, 0.5]), st.integers(0, 10**6))
@settings(max_examples=60)
def test_dir_fedkf_largest_shares_take_turns(classes: int, clients: int, alpha: float, seed: int) -> None:
    labels = np.repeat(np.arange(classes), 20_000)
    owner = partition("dir_fedkf", labels, clients, rng(seed), alpha=alpha)
    counts = counts_of(owner, labels, clients)
    for start in range(0, clients, classes):
        group = counts[start : start + classes]
        width = len(group)
        for turn in range(0, classes, width):
            block = group[:, turn : turn + width]
            top = block.max(axis=0)
            # A tie after rounding leaves open who had the turn.
            if ((block == top).sum(axis=0) == 1).all():
                assert len(set(block.argmax(axis=0))) == block.shape[1]


@pytest.mark.slow
def test_dir_fedkf_takes_turns_in_any_order_alike() -> None:
    labels = np.repeat(np.arange(3), 1000)
    turns = []
    for seed in range(1200):
        owner = partition("dir_fedkf", labels, 3, rng(seed), alpha=0.3)
        turns.append(tuple(counts_of(owner, labels, 3).argmax(axis=0).tolist()))
    orders = np.array([turns.count(order) for order in set(turns) if len(set(order)) == 3])
    assert len(orders) == 6
    # Binomial with p = 1/6: five standard deviations are 65.
    assert np.abs(orders - 200).max() < 65


def test_dir_fedkf_shares_a_class_between_groups_by_their_size() -> None:
    labels = np.repeat(np.arange(4), 1000)
    counts = counts_of(partition("dir_fedkf", labels, 10, rng(), alpha=0.1), labels, 10)
    by_group = np.stack([counts[:4].sum(axis=0), counts[4:8].sum(axis=0), counts[8:].sum(axis=0)])
    assert np.abs(by_group - np.array([[400], [400], [200]])).max() <= 1


def test_dir_fedgen_uses_the_ratio_and_caps_a_class() -> None:
    owner = partition("dir_fedgen", CIFAR, 20, rng(), alpha=1.0, ratio=0.2)
    # min(0.2 * 50000 / 20, 0.2 * 5000) = 500 of each class
    assert (np.bincount(CIFAR[owner >= 0]) == 500).all()
    assert (partition("dir_fedgen", CIFAR, 20, rng(), alpha=1.0, ratio=1.0) >= 0).all()


def test_dir_client_prior_sizes_are_equal_or_log_normal() -> None:
    equal = sizes_of(partition("dir_client_prior", CIFAR, 30, rng(), alpha=0.1, samples_per_client=1600), 30)
    assert (equal == 1600).all()
    drawn = partition("dir_client_prior", CIFAR, 2000, rng(), alpha=10.0, size_sigma=0.3)
    assert (drawn >= 0).all()
    assert np.log(sizes_of(drawn, 2000)).std() == pytest.approx(0.3, rel=0.15)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 10**6))
@settings(max_examples=50)
def test_shards_hold_few_labels(clients: int, shards: int, seed: int) -> None:
    labels = rng(seed).permutation(np.repeat(np.arange(10), 100))
    owner = partition("shards", labels, clients, rng(seed), shards_per_client=shards)
    # A shard of n samples lies across at most ceil((n - 1) / 100) borders between classes.
    most = shards * (1 + -(-(-(-1000 // (clients * shards)) - 1) // 100))
    assert (counts_of(owner, labels, clients) > 0).sum(axis=1).max() <= most
    assert np.ptp(sizes_of(owner, clients)) <= shards


def test_shards_that_divide_the_classes_give_exactly_k_labels_at_most() -> None:
    counts = counts_of(partition("shards", CIFAR, 100, rng()), CIFAR, 100)
    assert (counts.sum(axis=1) == 500).all()
    assert (counts > 0).sum(axis=1).max() == 2


def test_n_way_gives_each_client_so_many_classes_and_samples_of_each() -> None:
    counts = counts_of(partition("n_way", CIFAR, 200, rng(), ways=4, shots=20, ways_spread=2), CIFAR, 200)
    ways, shots = (counts > 0).sum(axis=1), counts.max(axis=1)
    assert set(ways) == {2, 3, 4, 5, 6}
    assert set(shots) == {18, 19, 20, 21, 22}
    assert (np.where(counts > 0, counts, shots[:, None]) == shots[:, None]).all()
    even = counts_of(partition("n_way", CIFAR, 200, rng(), ways=10, shots=20, ways_spread=0), CIFAR, 200)
    assert (even == 20).all()


def test_n_way_takes_classes_at_random() -> None:
    counts = counts_of(partition("n_way", CIFAR, 1000, rng(), ways=3, shots=5, ways_spread=0), CIFAR, 1000)
    # Binomial: five standard deviations of how many of 1000 clients have a class, at a chance of 0.3.
    assert np.abs((counts > 0).sum(axis=0) - 300).max() < 5 * (1000 * 0.3 * 0.7) ** 0.5


def test_n_way_names_what_to_lower_where_a_class_is_too_small() -> None:
    with pytest.raises(DataError, match=r"20 clients ask for .* of a class that has 1000; lower shots, ways"):
        partition("n_way", np.repeat(np.arange(10), 1000), 20, rng(), ways=5, shots=500)


def test_quantity_skews_sizes_and_leaves_labels_alone() -> None:
    counts = counts_of(partition("quantity", CIFAR, 10, rng(), alpha=0.5), CIFAR, 10)
    sizes = counts.sum(axis=1)
    assert sizes.max() > 3 * sizes.mean() / 2
    # Hypergeometric: five standard deviations of a class share in a client of n samples.
    bound = 5 * np.sqrt(0.1 * 0.9 / sizes)[:, None]
    assert (np.abs(counts / sizes[:, None] - 0.1) < bound).all()


def test_natural_keeps_the_owners_of_the_data() -> None:
    owner = np.array([7, 3, 3, 9, 7, -1])
    labels = np.zeros(6, int)
    assert partition("natural", labels, 0, rng(), owner=owner).tolist() == [1, 0, 0, 2, 1, -1]
    assert partition("natural", labels, 0, rng(), owner=owner, min_size=2).tolist() == [1, 0, 0, -1, 1, -1]
    two = partition("natural", labels, 2, rng(), owner=owner)
    assert set(two.tolist()) == {-1, 0, 1}
    with pytest.raises(DataError, match="the data have 3"):
        partition("natural", labels, 4, rng(), owner=owner)
    with pytest.raises(SettingError, match="needs owner"):
        partition("natural", labels, 0, rng())


@pytest.mark.parametrize(
    ("name", "clients", "given", "message"),
    [
        ("dirichlet", 5, {"alpha": 0}, "alpha=0 is not allowed; give a number above 0"),
        ("dirichlet", 5, {"alpha": float("nan")}, "alpha=nan"),
        ("dirichlet", 5, {"alpha": float("inf")}, "alpha=inf"),
        ("dirichlet", 5, {"alpha": "0.1"}, "alpha='0.1'"),
        ("dirichlet", 0, {}, "clients=0 is not allowed; give a whole number, 1 or more"),
        ("dirichlet", 2.5, {}, "clients=2.5"),
        ("natural", -1, {}, "clients=-1 is not allowed; give a whole number, 0 or more"),
        ("dir_balanced", 5, {"min_size": -1}, "min_size=-1"),
        ("shards", 5, {"shards_per_client": 0}, "shards_per_client=0"),
        ("n_way", 5, {"ways": 0}, "ways=0"),
        ("n_way", 5, {"shots": 0}, "shots=0"),
        ("n_way", 5, {"ways_spread": -1}, "ways_spread=-1"),
        ("iid", 5, {"samples_per_client": -3}, "samples_per_client=-3"),
        ("dir_client_prior", 5, {"size_sigma": -0.1}, "size_sigma=-0.1"),
        ("dir_fedgen", 5, {"ratio": 1.5}, "ratio=1.5"),
        ("dirichlet", 5, {"aplha": 1}, "unknown partition setting 'aplha'; did you mean 'alpha'"),
        ("dirichlett", 5, {}, "unknown partition 'dirichlett'; did you mean 'dirichlet'"),
    ],
)
def test_wrong_settings_are_named(name: str, clients: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        partition(name, CIFAR, clients, rng(), **given)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ALL)
def test_more_clients_than_samples_is_an_error(name: str) -> None:
    with pytest.raises(DataError, match="fewer clients"):
        partition(name, np.arange(5), 6, rng())


def test_stated_counts_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(DataError, match="50 clients with samples_per_client=500 need 25000"):
        partition("dir_client_prior", np.zeros(12_406, int), 50, rng(), samples_per_client=500)


@pytest.mark.parametrize("labels", [np.zeros((2, 2), int), np.zeros(3), np.zeros(0, int)])
def test_labels_must_be_whole_numbers(labels: npt.NDArray[Any]) -> None:
    with pytest.raises(DataError):
        partition("iid", labels, 1, rng())


@pytest.mark.parametrize(("factor", "total"), [(1, 50_000), (10, 20_431), (20, 17_023), (50, 13_996), (100, 12_406)])
def test_long_tail_has_the_published_totals(factor: float, total: int) -> None:
    kept = long_tail(CIFAR, factor, rng())
    assert len(np.unique(kept)) == len(kept) == total
    sizes = np.bincount(CIFAR[kept])
    assert sizes[0] == 5000
    assert sizes[-1] == 5000 // factor


def test_subsample_keeps_a_tenth_of_each_class() -> None:
    letters = rng().permutation(np.repeat(np.arange(26), 4800))
    kept = subsample(letters, 0.1, rng())
    assert len(np.unique(kept)) == len(kept) == 12_480
    assert (np.bincount(letters[kept]) == 480).all()


@given(st.integers(1, 200), st.integers(1, 20))
def test_regions_differ_by_one_client_at_most(clients: int, count: int) -> None:
    if count > clients:
        with pytest.raises(SettingError, match="regions="):
            regions(clients, count, rng())
        return
    region = regions(clients, count, rng())
    assert region.shape == (clients,)
    assert np.ptp(np.bincount(region, minlength=count)) <= 1


@given(st.lists(st.integers(-1, 5), max_size=40))
def test_random_ranks_number_the_samples_of_each_owner(owner: list[int]) -> None:
    ranks = random_ranks(np.array(owner, np.int64), rng())
    for client in set(owner):
        mine = sorted(r for r, o in zip(ranks.tolist(), owner, strict=True) if o == client)
        assert mine == list(range(len(mine)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iid", "dirichlet", "quantity", "dir_fedkf", "dir_client_prior"])
def test_a_million_clients_are_never_looped_over(name: str) -> None:
    def drawn(clients: int) -> None:
        owner = partition(name, np.arange(clients) % 10, clients, rng())
        assert (np.bincount(owner) == 1).all()

    drawn(1_000_000)
    assert lines_run(drawn, 100_000) < 2 * lines_run(drawn, 1_000)
