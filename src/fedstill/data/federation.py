"""The data partition: the clients' training and test samples, and the server dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedstill.core.arrays import IntArray
from fedstill.core.choices import ALPHA
from fedstill.core.errors import DataError, SettingError, unknown
from fedstill.core.seeds import numpy_rng
from fedstill.data import partition as partitions
from fedstill.data.dataset import Dataset, Split
from fedstill.data.formats.arrays import as_array, check_finite
from fedstill.data.formats.labels import numbered
from fedstill.data.held_out import HeldOut
from fedstill.data.partition import check_setting, long_tail, subsample
from fedstill.data.partition_draws import random_ranks, random_share

Array = npt.NDArray[Any] | Tensor
Labels = Array | Sequence[str] | Sequence[int]


LOCAL_TESTS = ("split", "matched", "shared", "own")


@dataclass(frozen=True, eq=False)
class Federation:
    """A dataset divided between clients, as index arrays: client k holds `index[offsets[k]:offsets[k+1]]`."""

    dataset: Dataset
    train_index: IntArray  # into dataset.train
    train_offsets: IntArray  # (clients + 1,)
    test_index: IntArray  # into test_split
    test_offsets: IntArray  # (clients + 1,)
    pool_index: IntArray  # the server dataset, into dataset.train
    test_source: Literal["train", "test"] = "train"
    names: tuple[str, ...] = ()  # empty: clients have numbers only
    validation: HeldOut | None = None  # samples held out to choose by

    def __repr__(self) -> str:
        samples = f"{len(self.train_index):,} training and {len(self.test_index):,} test samples"
        return f"<fedstill.Federation of {self.dataset.name}: {self.clients:,} clients with {samples}>"

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.train_offsets) - 1

    @property
    def client_names(self) -> tuple[str, ...]:
        """A name for each client: the data's, or its number."""
        return self.names or tuple(map(str, range(self.clients)))

    @property
    def sizes(self) -> IntArray:
        """Training samples of each client."""
        return np.diff(self.train_offsets)

    @property
    def test_sizes(self) -> IntArray:
        """Local test samples of each client."""
        return np.diff(self.test_offsets)

    @property
    def test_split(self) -> Split:
        """The split that the local test indices refer to."""
        return self.dataset.train if self.test_source == "train" else self.dataset.test

    def train(self, client: int) -> IntArray:
        """Indices of a client's training samples in `dataset.train`."""
        return _slice(self.train_index, self.train_offsets, client)

    def test(self, client: int) -> IntArray:
        """Indices of a client's test samples in `test_split`."""
        return _slice(self.test_index, self.test_offsets, client)

    def class_counts(self, first: int | None = None) -> IntArray:
        """Training samples by client and class, (clients, classes), of all or the first few clients."""
        clients = self.clients if first is None else min(first, self.clients)
        index = self.train_index[: self.train_offsets[clients]]
        held_by = np.repeat(np.arange(clients), self.sizes[:clients])
        return _pair_counts(held_by, _labels(self.dataset.train)[index], clients, len(self.dataset.classes))


def federate(
    dataset: Dataset,
    *,
    clients: int,
    partition: str = "dirichlet",
    seed: int = 0,
    alpha: float = ALPHA,
    test_fraction: float = 0.2,
    pool: float = 0,
    imbalance_factor: float = 1,
    fraction: float = 1.0,
    samples_per_client: int = 0,
    local_test: str = "split",
    **settings: Any,
) -> Federation:
    """Divide the training data of a dataset between a server and its clients.

    In this order: keep `fraction` of each class; cut to a long tail; take the server dataset (`pool`, a number of
    samples, or a fraction below 1; classes in proportion); divide the rest by `partition`; split each
    client's samples at random into training and test. A client keeps at least one for training.

    Every step has its own random stream, so that another `test_fraction` leaves the owners as they are.
    `clients=0` with `partition="natural"` means all of them. `local_test="matched"` keeps all samples for
    training and draws local tests, `test_fraction` times as large, from `dataset.test` with the client's
    class proportions; clients may then share test samples. `local_test="shared"` gives each client 1/K of the test
    samples of every class it holds, as FedGen does; "own" gives it the test samples that the data say are its own, as
    LEAF's do. Other settings go to the partition.
    """
    _check_test_fraction(test_fraction)
    check_setting("fraction", fraction)
    check_setting("imbalance_factor", imbalance_factor)
    if local_test not in LOCAL_TESTS:
        raise unknown("local_test", local_test, LOCAL_TESTS)

    labels = _labels(dataset.train)
    index = np.arange(len(labels))
    if fraction < 1:
        index = index[subsample(labels[index], fraction, numpy_rng(seed, "fraction"))]
    if imbalance_factor > 1:
        index = index[long_tail(labels[index], imbalance_factor, numpy_rng(seed, "long tail"))]
    in_pool = _take_pool(labels[index], pool, numpy_rng(seed, "pool"))
    pool_index, index = index[in_pool], index[~in_pool]

    if partition == "natural":
        if dataset.train.client is None:
            raise DataError(
                f"dataset {dataset.name!r} does not say who owns a sample, so partition=natural cannot be "
                f"used; choose one of {', '.join(n for n in partitions.names() if n != 'natural')}"
            )
        settings["owner"] = dataset.train.client.numpy()[index]
    settings |= {"alpha": alpha, "samples_per_client": samples_per_client}
    owner = partitions.partition(partition, labels[index], clients, numpy_rng(seed, "partition"), **settings)
    count = int(clients) or int(owner.max()) + 1

    is_test = np.zeros(len(index), bool)
    if local_test == "split":
        is_test = random_share(owner, count, test_fraction, numpy_rng(seed, "local test"))
    train_index, train_offsets = _compress(index[~is_test], owner[~is_test], count)
    if local_test == "split":
        test_index, test_offsets = _compress(index[is_test], owner[is_test], count)
    else:
        class_counts = _pair_counts(owner[owner >= 0], labels[index[owner >= 0]], count, len(dataset.classes))
        rng, test_labels = numpy_rng(seed, "local test"), _labels(dataset.test)
        if local_test == "own":
            test_index, test_offsets = _own_tests(dataset, train_index, train_offsets, natural=partition == "natural")
        elif local_test == "matched":
            test_index, test_offsets = _matched(class_counts, test_labels, test_fraction, rng)
        else:
            test_index, test_offsets = _shared(class_counts, test_labels, rng)

    client_names: tuple[str, ...] = ()
    if partition == "natural" and dataset.client_names and dataset.train.client is not None:
        original = dataset.train.client.numpy()[train_index[train_offsets[:-1]]]
        client_names = tuple(dataset.client_names[i] for i in original.tolist())
    return Federation(
        dataset,
        train_index,
        train_offsets,
        test_index,
        test_offsets,
        pool_index,
        "train" if local_test == "split" else "test",
        client_names,
    )


def from_clients(
    clients: Sequence[tuple[Array, Labels]],
    test: tuple[Array, Labels] | None = None,
    *,
    classes: Sequence[str] = (),
    names: Sequence[str] = (),
    test_fraction: float = 0.2,
    seed: int = 0,
    dataset_name: str = "clients",
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    pool: tuple[Array, Labels] | None = None,
) -> Federation:
    """A federation of clients given as (samples, labels) each, with an optional global test set.

    `pool` is the server dataset.

    Examples:
        >>> x, y = np.zeros((10, 4), np.float32), np.arange(10) % 2
        >>> from_clients([(x, y), (x[:5], y[:5])]).sizes.tolist()
        [8, 4]
    """
    if not clients:
        raise DataError("there are no clients; give a (samples, labels) pair for each")
    if names and len(names) != len(clients):
        raise DataError(f"{len(names)} names were given for {len(clients)} clients; give one for each")
    if doubled := next((name for name in names if list(names).count(name) > 1), None):
        raise DataError(f"two clients are called {doubled!r}; give each a name of its own")
    called = [f"client {name}" for name in names or range(len(clients))]
    parts = {name: _pair(name, *pair) for name, pair in zip(called, _pairs(clients), strict=True)}
    for name, (x, labels) in parts.items():
        if not len(labels):
            raise DataError(f"{name} has no samples; leave it out")
        if x.shape[1:] != parts[called[0]][0].shape[1:]:
            raise DataError(
                f"samples of {name} have shape {tuple(x.shape[1:])}, those of {called[0]} "
                f"{tuple(parts[called[0]][0].shape[1:])}; all must have the same shape"
            )
    extra = {"the test set": test, "the pool": pool}
    parts |= {name: _pair(name, *pair) for name, pair in extra.items() if pair is not None}
    prefix = "labels of "
    numbers, class_names = numbered({prefix + name: y for name, (_, y) in parts.items()}, classes or None, dataset_name)

    def joined(*names: str) -> tuple[Tensor, Tensor]:
        """Samples and labels of these parts, one after the other; nothing of those that are not there."""
        there = [name for name in names if name in parts]
        x = torch.cat([parts[called[0]][0][:0], *(parts[name][0] for name in there)])
        return x, torch.from_numpy(np.concatenate([*(numbers[prefix + name] for name in there), np.zeros(0, np.int64)]))

    (x, y), (test_x, test_y) = joined(*called, "the pool"), joined("the test set")
    sizes = [len(parts[name][1]) for name in called]
    owner = torch.full((len(y),), -1)
    owner[: sum(sizes)] = torch.repeat_interleave(torch.tensor(sizes))
    pooled = np.arange(sum(sizes), len(y))
    dataset = Dataset(
        name=dataset_name,
        train=Split(_channels_last(x), y, owner),
        test=Split(_channels_last(test_x), test_y),
        classes=class_names,
        mean=mean,
        std=std,
        client_names=tuple(names),
    )
    divided = federate(dataset, clients=0, partition="natural", seed=seed, test_fraction=test_fraction)
    return replace(divided, pool_index=pooled)


def _own_tests(
    dataset: Dataset, train_index: IntArray, train_offsets: IntArray, *, natural: bool
) -> tuple[IntArray, IntArray]:
    """The test samples of the owners that the clients are."""
    if not natural or dataset.train.client is None or dataset.test.client is None:
        raise DataError(
            "local_test = 'own': the data must say who owns each test sample (client_test, LEAF's test files, or a "
            "table with client_column and split_column), and the partition must be natural"
        )
    held, tests = dataset.train.client.numpy(), dataset.test.client.numpy()
    number = np.full(max(held.max(), tests.max(initial=0)) + 1, -1)
    number[held[train_index[train_offsets[:-1]]]] = np.arange(len(train_offsets) - 1)
    return _compress(np.arange(len(tests)), number[tests], len(train_offsets) - 1)


def _labels(split: Split) -> IntArray:
    return np.asarray(split.y.numpy(), np.int64)


def _slice(index: IntArray, offsets: IntArray, client: int) -> IntArray:
    if not 0 <= client < len(offsets) - 1:
        raise IndexError(f"client {client} is not one of 0..{len(offsets) - 2}")
    return index[offsets[client] : offsets[client + 1]]


def _pair_counts(rows: IntArray, columns: IntArray, height: int, width: int) -> IntArray:
    """How often each (row, column) occurs, (height, width)."""
    return np.bincount(rows * width + columns, minlength=height * width).reshape(height, width)


def _compress(index: IntArray, owner: IntArray, clients: int) -> tuple[IntArray, IntArray]:
    """Indices grouped by owner (ascending inside a group) and where each group starts."""
    index, owner = index[owner >= 0], owner[owner >= 0]
    offsets = np.zeros(clients + 1, np.int64)
    np.cumsum(np.bincount(owner, minlength=clients), out=offsets[1:])
    return index[np.argsort(owner, kind="stable")], offsets


def _check_test_fraction(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise SettingError(f"test_fraction={value!r} is not allowed; give a number from 0 to below 1")


def _take_pool(labels: IntArray, pool: float, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Which samples the server takes."""
    if isinstance(pool, bool) or not isinstance(pool, Real) or not pool >= 0 or (pool > 1 and pool % 1):
        raise SettingError(f"pool={pool!r} is not allowed; give a number of samples, or a fraction below 1")
    wanted = int(pool) if isinstance(pool, Integral) or pool >= 1 else round(float(pool) * len(labels))
    if wanted and wanted >= len(labels):
        raise DataError(f"a pool of {wanted} leaves nothing of {len(labels)} samples; lower pool")
    if not wanted:
        return np.zeros(len(labels), bool)
    share = _apportion(np.bincount(labels), np.array(wanted))
    return np.asarray(random_ranks(labels, rng) < share[labels])


def _apportion(weights: IntArray, total: IntArray) -> IntArray:
    """Whole numbers in proportion to weights that sum to total over the last axis: largest remainders."""
    quota = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1) * total[..., None]
    whole: IntArray = np.floor(quota).astype(np.int64)
    missing = total - whole.sum(axis=-1)
    order = np.argsort(whole - quota, axis=-1, kind="stable")
    whole += np.argsort(order, axis=-1) < missing[..., None]
    return whole


def _matched(
    class_counts: IntArray, test_labels: IntArray, test_fraction: float, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Test samples for each client in the class proportions of what it holds, (clients, classes)."""
    available = np.bincount(test_labels, minlength=class_counts.shape[1])
    sizes = class_counts.sum(axis=1)
    total = np.rint(test_fraction * sizes).astype(np.int64)
    if test_fraction:
        total = np.maximum(total, np.minimum(sizes, 1))
    wanted = np.minimum(_apportion(class_counts, total), available)
    begin = rng.integers(0, np.broadcast_to(np.maximum(available, 1), wanted.shape))
    return _stretches(wanted, begin, test_labels, rng)


def _shared(class_counts: IntArray, test_labels: IntArray, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """For each client 1/K of the test samples of every class that it holds (FedGen), nobody else's."""
    share = np.bincount(test_labels, minlength=class_counts.shape[1]) // len(class_counts)
    begin = np.arange(len(class_counts))[:, None] * share
    return _stretches(np.where(class_counts > 0, share, 0), begin, test_labels, rng)


def _stretches(
    wanted: IntArray, begin: IntArray, test_labels: IntArray, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Test samples of each client: of each shuffled class as many as wanted from a start, both (clients, classes).

    A stretch goes on at the start of its class, so no client has a sample twice.
    """
    available = np.bincount(test_labels, minlength=wanted.shape[1])
    shuffled = np.lexsort((rng.random(len(test_labels)), test_labels))
    first = np.cumsum(available) - available
    client, label = np.nonzero(wanted)
    length = wanted[client, label]
    begin = begin[client, label]
    step = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    place = (np.repeat(begin, length) + step) % np.repeat(available[label], length)
    index = shuffled[np.repeat(first[label], length) + place]
    return _compress(index, np.repeat(client, length), len(wanted))


def _pairs(clients: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    for number, client in enumerate(clients):
        if not isinstance(client, Sequence) or isinstance(client, str) or len(client) != 2:
            raise DataError(f"client {number} is a {type(client).__name__}; give a (samples, labels) pair for each")
        yield client[0], client[1]


def _pair(whose: str, x: Any, y: Any) -> tuple[Tensor, npt.NDArray[Any]]:
    """Samples as a tensor and labels as they are, checked."""
    samples, labels = torch.as_tensor(x), as_array(y)
    if samples.dtype == torch.uint8:
        raise DataError(
            f"samples of {whose} are raw bytes; scale them to floats, or let fedstill.from_arrays(x, y, client=…) do it"
        )
    if not samples.is_floating_point() and samples.dim() == 2:
        samples = samples.float()  # features; tokens come from fedstill.from_arrays(…, tokens=True)
    if samples.is_floating_point():
        check_finite(samples.numpy(), f"samples of {whose}")
    if labels.ndim != 1 or len(samples) != len(labels):
        raise DataError(
            f"{whose} has samples of shape {tuple(samples.shape)} and labels of shape "
            f"{tuple(labels.shape)}; give one label for each sample"
        )
    return samples, labels


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
