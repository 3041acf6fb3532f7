"""Federations: what clients, their local tests and the server's pool hold, and how it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from fedstill.core.errors import DataError, SettingError
from fedstill.data import from_arrays, load
from fedstill.data.dataset import Dataset, Split
from fedstill.data.federation import Federation, federate, from_clients
from fedstill.data.partition import names
from fedstill.report.bubbles import bubbles, table
from support.runs import lines_run


def dataset(samples: int = 1000, classes: int = 10, owners: int = 0, test_samples: int = 200) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    y = torch.randperm(samples, generator=generator) % classes
    owner = torch.randint(0, owners, (samples,), generator=generator) if owners else None
    return Dataset(
        name="toy",
        train=Split(torch.arange(samples, dtype=torch.float32)[:, None], y, owner),
        test=Split(torch.zeros(test_samples, 1), torch.arange(test_samples) % classes),
        classes=tuple(f"class {c}" for c in range(classes)),
        client_names=tuple(f"writer {k}" for k in range(owners)),
    )


def held(federation: Federation, client: int) -> set[int]:
    return set(federation.train(client).tolist()) | set(federation.test(client).tolist())


@given(
    st.sampled_from([n for n in names() if n != "natural"]),
    st.integers(1, 25),
    st.sampled_from([0, 0.0, 0.1, 100, 333]),
    st.sampled_from([0.0, 0.2, 0.5, 0.99]),
    st.integers(0, 2**31),
)
@settings(max_examples=80)
def test_training_test_and_pool_samples_are_disjoint(
    partition: str, clients: int, pool: float, test_fraction: float, seed: int
) -> None:
    data = dataset()
    federation = federate(
        data,
        clients=clients,
        partition=partition,
        alpha=5.0,
        pool=pool,
        test_fraction=test_fraction,
        seed=seed,
        ratio=1.0,
        shots=1,
    )
    everything = np.concatenate([federation.train_index, federation.test_index, federation.pool_index])
    assert len(set(everything.tolist())) == len(everything)
    assert len(everything) == 1000 or partition == "n_way"  # which leaves samples to nobody
    assert federation.clients == clients
    assert len(federation.pool_index) == (pool if pool >= 1 else round(pool * 1000))
    total = federation.sizes + federation.test_sizes
    expected = [min(round(test_fraction * n), n - 1) for n in total.tolist()]
    assert federation.test_sizes.tolist() == expected
    assert federation.sizes.min() >= 1


def test_same_seed_same_federation_and_another_seed_another() -> None:
    data = dataset()
    one, same, other = (federate(data, clients=8, seed=s, pool=50, alpha=0.3) for s in (1, 1, 2))
    for field in ("train_index", "train_offsets", "test_index", "test_offsets", "pool_index"):
        assert np.array_equal(getattr(one, field), getattr(same, field))
    assert not np.array_equal(one.train_index, other.train_index)


def test_test_fraction_does_not_change_who_holds_what() -> None:
    data = dataset()
    few, many = (federate(data, clients=7, test_fraction=f, alpha=0.2, pool=30) for f in (0.1, 0.4))
    assert all(held(few, k) == held(many, k) for k in range(7))
    # The tests grow, they are not drawn afresh.
    assert all(set(few.test(k)) <= set(many.test(k)) for k in range(7))


def test_pool_has_the_class_proportions_of_the_data() -> None:
    data = dataset()
    pool = federate(data, clients=5, pool=205).pool_index
    counts = np.bincount(data.train.y.numpy()[pool])
    assert counts.sum() == 205
    assert set(counts.tolist()) <= {20, 21}


def test_fraction_then_long_tail_then_pool_then_clients() -> None:
    data = dataset(samples=20_000)
    federation = federate(data, clients=4, partition="iid", fraction=0.5, imbalance_factor=10, pool=500)
    labels = data.train.y.numpy()
    kept = np.concatenate([federation.train_index, federation.test_index, federation.pool_index])
    assert np.bincount(labels[kept]).tolist() == [int(1000 * 10 ** (-c / 9)) for c in range(10)]
    assert len(federation.pool_index) == 500


def test_class_counts_are_those_of_the_training_samples() -> None:
    data = dataset()
    federation = federate(data, clients=6, alpha=0.3)
    expected = [np.bincount(data.train.y.numpy()[federation.train(k)], minlength=10) for k in range(6)]
    assert np.array_equal(federation.class_counts(), np.array(expected))
    assert np.array_equal(federation.class_counts(2), np.array(expected[:2]))
    assert federation.sizes.dtype == np.int64


def test_matched_tests_follow_the_training_classes() -> None:
    data = dataset(samples=5000, test_samples=1000)
    federation = federate(data, clients=10, alpha=0.2, local_test="matched", test_fraction=0.1)
    assert federation.test_source == "test"
    assert federation.test_split is data.test
    assert federation.sizes.sum() == 5000
    counts = federation.class_counts()
    for k in range(10):
        mine = federation.test(k)
        assert len(set(mine.tolist())) == len(mine)
        got = np.bincount(data.test.y.numpy()[mine], minlength=10)
        exact = counts[k] * round(0.1 * counts[k].sum()) / counts[k].sum()
        assert (np.abs(got - np.minimum(exact, 100)) < 1).all()
        assert (got[counts[k] == 0] == 0).all()


def test_matched_tests_never_ask_for_more_than_there_is() -> None:
    federation = federate(dataset(test_samples=12), clients=3, partition="iid", local_test="matched")
    assert (federation.test_sizes == 12).all()


def test_natural_partition_uses_owners_and_names_of_the_data() -> None:
    data = dataset(owners=12)
    assert data.train.client is not None
    federation = federate(data, clients=0, partition="natural")
    assert federation.clients == 12
    for k in range(12):
        assert held(federation, k) == set(torch.nonzero(data.train.client == k).flatten().tolist())
    some = federate(data, clients=5, partition="natural")
    for k, name in enumerate(some.client_names):
        owners = set(data.train.client[torch.from_numpy(some.train(k))].tolist())
        assert {f"writer {o}" for o in owners} == {name}


def test_natural_partition_needs_owners() -> None:
    with pytest.raises(DataError, match="does not say who owns"):
        federate(dataset(), clients=3, partition="natural")


def test_federation_from_client_arrays() -> None:
    rng = np.random.default_rng(0)
    clients = [(rng.random((n, 3), dtype=np.float32), rng.integers(0, 4, n)) for n in (1, 2, 10, 30)]
    federation = from_clients(clients, test=clients[3], names=["a", "b", "c", "d"], test_fraction=0.2)
    assert federation.client_names == ("a", "b", "c", "d")
    assert federation.sizes.tolist() == [1, 2, 8, 24]
    assert federation.test_sizes.tolist() == [0, 0, 2, 6]
    assert len(federation.dataset.test) == 30
    for k, (x, _) in enumerate(clients):
        mine = np.sort(np.concatenate([federation.train(k), federation.test(k)]))
        assert np.array_equal(federation.dataset.train.x[torch.from_numpy(mine)].numpy(), x)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "no clients"),
        ([(np.zeros((2, 3)), np.zeros(3, int))], "one label for each sample"),
        ([(np.zeros((2, 3)), np.array([0.5, 1]))], "labels of client 0: labels are measurements"),
        ([np.zeros((2, 3))], "client 0 is a ndarray; give a .samples, labels. pair"),
        (
            [(np.zeros((2, 3)), np.zeros(2, int)), (np.zeros((0, 3)), np.zeros(0, int))],
            "client 1 has no samples",
        ),
        ([(np.zeros((2, 3)), np.zeros(2, int)), (np.zeros((2, 4)), np.zeros(2, int))], "the same shape"),
    ],
)
def test_client_arrays_that_do_not_fit_are_named(clients: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_clients(clients)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"test_fraction": 1.0}, SettingError, "test_fraction=1.0 is not allowed"),
        ({"test_fraction": float("nan")}, SettingError, "test_fraction=nan"),
        ({"pool": -1}, SettingError, "pool=-1"),
        ({"pool": 2.5}, SettingError, "pool=2.5"),
        ({"pool": 1000}, DataError, "lower pool"),
        ({"fraction": 0}, SettingError, "fraction=0"),
        ({"imbalance_factor": 0.1}, SettingError, "imbalance_factor=0.1"),
        ({"local_test": "matchd"}, SettingError, "did you mean 'matched'"),
        ({"partition": "dirichlet", "clients": 2000}, DataError, "2000 clients cannot share 1000 samples"),
        ({"shard_per_client": 3}, SettingError, "did you mean 'shards_per_client'"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        federate(dataset(), **{"clients": 3, **given})
    assert message in str(caught.value)


def test_a_client_number_out_of_range_is_an_error() -> None:
    federation = federate(dataset(), clients=3)
    for client in (-1, 3):
        with pytest.raises(IndexError):
            federation.train(client)


@pytest.mark.slow
@pytest.mark.parametrize("local_test", ["split", "matched"])
def test_a_million_clients_are_only_index_arrays(local_test: str) -> None:
    def made(clients: int) -> None:
        data = dataset(samples=2 * clients)
        federation = federate(data, clients=clients, partition="iid", test_fraction=0.5, local_test=local_test)
        assert (federation.test_sizes == 1).all()
        assert federation.sizes.sum() == (clients if local_test == "split" else 2 * clients)

    made(1_000_000)
    assert lines_run(made, 100_000) < 2 * lines_run(made, 1_000)


def test_table_counts_classes_and_the_largest_share() -> None:
    x = np.zeros((10, 1), np.float32)
    federation = from_clients(
        [(x, np.array([0] * 8 + [1] * 2)), (x, np.full(10, 2))], names=["p", "q"], test_fraction=0
    )
    assert table(federation) == [
        {"client": "p", "samples": 10, "classes_held": 2, "largest_class_share": 0.8, "test_samples": 0},
        {"client": "q", "samples": 10, "classes_held": 1, "largest_class_share": 1.0, "test_samples": 0},
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (100, 62), (250, 10)])
def test_bubbles_draw_any_size(tmp_path: Path, clients: int, classes: int) -> None:
    path = tmp_path / "who.png"
    bubbles(federate(dataset(5000, classes), clients=clients, alpha=0.3), path, title="who holds what")
    height, width = imread(path).shape[:2]
    # A cell for each bubble must stay wide enough to read: at least 15 pixels.
    assert width >= 15 * min(clients, 100)
    assert height >= 15 * classes


def test_shared_local_tests_are_a_kth_of_every_class_that_a_client_holds() -> None:
    dataset = load("fashion-mini")
    federation = federate(dataset, clients=7, partition="dir_fedgen", alpha=0.1, ratio=1.0, local_test="shared")
    held, labels = federation.class_counts(), dataset.test.y.numpy()
    taken = np.concatenate([federation.test(k) for k in range(7)])
    assert len(taken) == len(set(taken.tolist())), "nobody shares a test sample"
    for k in range(7):
        found = np.bincount(labels[federation.test(k)], minlength=10)
        assert found.tolist() == [100 // 7 if n else 0 for n in held[k]]
    assert federation.test_source == "test"


def test_test_samples_that_name_their_owners_are_the_clients_own() -> None:
    places, y = np.array(["south", "north", "west"]), np.arange(12) % 2
    client, client_test = places[np.arange(12) % 3], np.array(["west", "north", "north", "nobody"])
    data = from_arrays(np.zeros((12, 2)), y, np.zeros((4, 2)), y[:4], client=client, client_test=client_test)
    found = federate(data, clients=0, partition="natural", local_test="own")
    tests = {name: found.test(k).tolist() for k, name in enumerate(found.client_names)}
    assert tests == {"north": [1, 2], "south": [], "west": [0]}
    assert found.sizes.sum() == 12  # nothing is held out
    with pytest.raises(DataError, match="local_test = 'own': the data must say who owns each test sample"):
        federate(data, clients=2, partition="iid", local_test="own")
