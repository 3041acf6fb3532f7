"""Labels as people have them, and samples that no network can take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedstill
from fedstill import DataError, from_arrays, from_clients
from fedstill.building.config import resolve
from fedstill.building.setup import prepare

X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
MLP: dict[str, Any] = {"model": "mlp", "partition": "iid", "clients": 2}


def named(y: Any, **given: Any) -> tuple[tuple[str, ...], list[str]]:
    """The classes, and the class of each sample by name."""
    data = from_arrays(X, y, X, y, **given)
    assert torch.equal(data.train.y, data.test.y)
    return data.classes, [data.classes[label] for label in data.train.y]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([1, 2, 3, 4], ("1", "2", "3", "4")),
        ([7, 0, 300, 7], ("0", "7", "300")),
        ([-1, 1], ("-1", "1")),
        ([1.0, 2.0], ("1", "2")),
        (["no", "yes"], ("no", "yes")),
        (["10", "9"], ("9", "10")),
        ([True, False], ("False", "True")),
        ([10**15, 5], ("5", str(10**15))),
        (np.array([2**64 - 1, 1], np.uint64), ("1", str(2**64 - 1))),
        (np.array(["b", "a"], object), ("a", "b")),
        (np.array([3, 1], object), ("1", "3")),
        (np.array([b"x", b"y"]), ("x", "y")),
        (np.array([[4], [2]]), ("2", "4")),
    ],
)
def test_a_class_is_named_as_its_label_is_written(labels: Any, classes: tuple[str, ...]) -> None:
    y = np.asarray(labels)
    y = np.concatenate([y] * (20 // len(y)))
    expected = [v.decode() if isinstance(v, bytes) else str(v) for v in y.reshape(-1).tolist()]
    expected = [name.removesuffix(".0") for name in expected]
    assert named(y) == (classes, expected)


def test_names_that_are_given_belong_to_the_numbers_from_0_or_else_to_the_numbers_there_are_in_order() -> None:
    assert named(np.arange(20) % 2, classes=["a", "b", "c"]) == (("a", "b", "c"), ["a", "b"] * 10)
    assert named(1 + np.arange(20) % 2, classes=["a", "b"]) == (("a", "b"), ["a", "b"] * 10)
    with pytest.raises(DataError, match="2 class names, but labels reach from 1 to 4"):
        named(1 + np.arange(20) % 4, classes=["a", "b"])


def test_a_class_of_the_test_part_alone_is_a_class_and_is_warned_about() -> None:
    data = from_arrays(X, np.arange(20) % 2, X, np.arange(20) % 3)
    assert data.classes == ("0", "1", "2")
    warnings = prepare(resolve(MLP | {"participation": 1.0}), data=data).warnings
    assert warnings == ("no client has training samples of class 2: it cannot be learnt",)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.linspace(0, 1, 20), "labels are measurements, 20 different ones such as .* classification only"),
        (np.where(np.arange(20) < 3, np.nan, 1), "y: 3 of 20 labels are NaN"),
        (np.array(["a", ""] * 10), "y: 10 of 20 labels are empty"),
        (np.array(["a", None] * 10, object), "y: 10 of 20 labels are missing"),
        (np.array([["a"], {}] * 10, object)[:20], "one number or word a sample, not dict"),
        (np.eye(20), "y has 20 columns; give one label a sample .of one-hot rows, their argmax"),
        (np.full(20, 1e300), "a label of 1e.300 is no class"),
    ],
)
def test_labels_that_are_no_classes_are_refused_in_one_line(y: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        from_arrays(X, y)
    assert "\n" not in str(caught.value)


def test_a_label_of_its_own_for_nearly_every_sample_is_taken_for_an_identifier() -> None:
    x = np.zeros((400, 2), np.float32)
    with pytest.raises(DataError, match=r"400 different labels for 400 samples, such as '0'.*classification only"):
        from_arrays(x, np.arange(400))
    assert len(from_arrays(x, np.arange(400) % 200).classes) == 200


def test_one_class_alone_is_refused_for_a_run_though_a_site_may_have_no_other() -> None:
    data = from_arrays(X, np.array(["ill"] * 20))
    with pytest.raises(DataError, match="all labels are 'ill'; two classes are the fewest to tell apart"):
        prepare(resolve(MLP), data=data)


def test_values_that_are_not_finite_are_counted_and_their_columns_named() -> None:
    x = X.copy()
    x[3, 1] = np.nan
    x[5, 2] = x[5, 1] = np.inf
    message = "3 values are NaN or infinite, in 2 of 20 samples, columns 1, 2 .the first is 0.; fill them in"
    with pytest.raises(DataError, match=message):
        from_arrays(x, np.arange(20) % 2)
    with pytest.raises(DataError, match=f"samples of client north: {message}"):
        from_clients([(x, np.arange(20) % 2)], names=["north"])


def test_clients_may_label_in_words_and_each_its_own_classes() -> None:
    federation = from_clients([(X[:8], ["b"] * 8), (X, ["a", "c"] * 10)], (X[:2], ["c", "b"]), test_fraction=0.0)
    assert federation.dataset.classes == ("a", "b", "c")
    assert federation.dataset.train.y.tolist() == [1] * 8 + [0, 2] * 10
    assert federation.dataset.test.y.tolist() == [2, 1]


def test_an_empty_client_is_named() -> None:
    with pytest.raises(DataError, match="client west has no samples; leave it out"):
        from_clients([(X, np.arange(20) % 2), (X[:0], np.arange(0))], names=["east", "west"])


def test_a_client_of_one_sample_trains() -> None:
    federation = from_clients([(X, np.arange(20) % 2), (X[:1], [1])], (X, np.arange(20) % 2))
    assert (federation.sizes.tolist(), federation.test_sizes.tolist()) == ([16, 1], [4, 0])
    result = fedstill.run(data=federation, model="mlp", rounds=1, epochs=1, participation=1.0, engine="inline")
    assert result.records[0]["clients"] == 2
