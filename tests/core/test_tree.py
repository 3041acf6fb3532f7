"""Trees of tensors and plain values, as bytes."""

from __future__ import annotations

import contextlib
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fedstill
from fedstill.core import tree
from fedstill.core.errors import DataError
from support.core import few, same

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    numbers = draw(st.lists(st.integers(0, 100), min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(numbers, dtype=torch.int64).view(shape).to(draw(st.sampled_from(DTYPES)))


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors()


keys = st.text().filter(lambda k: k != "$tensor")


trees = st.recursive(leaves, lambda node: st.lists(node, max_size=4) | st.dictionaries(keys, node, max_size=4))


@pytest.mark.slow
@few
@given(trees)
def test_a_tree_survives_the_way_through_bytes(given_: Any) -> None:
    assert same(tree.decode(tree.encode(given_)), given_)


def test_tensors_that_share_memory_arrive_as_they_were() -> None:
    w = torch.arange(10.0)
    sent = {"model": w, "teacher": w, "head": w[2:5], "middle": w[4:8]}
    received = tree.decode(tree.encode(sent))
    assert same(received, sent)
    received["model"][0] = 99
    assert received["teacher"][0] == 0, "what is received shares nothing"


def test_a_small_view_of_a_large_tensor_is_sent_small() -> None:
    assert len(tree.encode({"part": torch.zeros(100_000)[:3]})) < 1000


def test_a_tensor_that_is_not_contiguous_keeps_its_values() -> None:
    image = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    assert same(tree.decode(tree.encode([image, image.mT])), [image, image.mT])


def test_gradients_stay_behind() -> None:
    received = tree.decode(tree.encode(torch.ones(2, requires_grad=True)))
    assert not received.requires_grad


@pytest.mark.parametrize("value", [object(), {1, 2}, np.zeros(2), {1: "one"}, {"$tensor": "0"}, b"bytes"])
def test_what_cannot_be_a_tree_is_refused_when_it_is_written(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be kept or sent"):
        tree.encode({"state": value})


def test_a_sparse_tensor_is_refused_with_what_to_do() -> None:
    with pytest.raises(TypeError, match="make it dense"):
        tree.encode(torch.zeros(3).to_sparse())


WHOLE = tree.encode({"w": torch.arange(20.0), "b": torch.ones(3), "round": 4})


@few
@given(st.integers(0, len(WHOLE) - 1))
def test_a_truncated_tree_is_damaged_data(length: int) -> None:
    with pytest.raises(DataError, match="damaged"):
        tree.decode(WHOLE[:length])


@few
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_damaged_data(data: bytes) -> None:
    with pytest.raises(DataError, match="damaged"):
        tree.decode(data)


@few
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_a_changed_byte_gives_a_tree_or_damaged_data_and_no_other_error(place: int, value: int) -> None:
    data = bytearray(WHOLE)
    data[place] = value
    with contextlib.suppress(DataError):
        tree.decode(bytes(data))


@pytest.mark.parametrize("shape", ['{"a": {"$tensor": "7"}}', '{"$tensor": [1]}', "[" * 100_000, "nonsense"])
def test_a_tree_that_names_tensors_it_does_not_hold_is_damaged_data(shape: str) -> None:
    from safetensors.torch import save

    with pytest.raises(DataError, match="damaged"):
        tree.decode(save({"0": torch.ones(2)}, metadata={"tree": shape}))


class Bomb:
    built = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Bomb, "built", True)


def test_a_pickle_is_never_built() -> None:
    for data in (pickle.dumps(Bomb()), pickle.dumps({"model": Bomb()}, protocol=0)):
        with pytest.raises(DataError):
            tree.decode(data)
    assert not Bomb.built
    source = Path(fedstill.__file__).parent
    reading = ("pickle.load", "torch.load", "allow_pickle=True", "marshal", "shelve", "dill", "cloudpickle")
    for file in source.rglob("*.py"):
        text = file.read_text()
        # Ray passes our own objects between our own processes; which modules go by value is told to its pickler.
        found = {word for word in reading if word in text}
        assert found == ({"cloudpickle"} if file.name == "ray_connection.py" else set()), file


def test_bytes_of_a_message_are_those_of_its_tensors() -> None:
    assert tree.nbytes({"w": torch.zeros(10), "n": torch.zeros(3, dtype=torch.int64), "e": torch.zeros(0)}) == 64
    assert tree.nbytes({"nested": [torch.zeros(2), 1.0, None]}) == 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_part_that_is_not_finite_is_named(bad: float) -> None:
    message = {"count": torch.ones(2, dtype=torch.int64), "good": torch.ones(2), "bad": torch.tensor([1.0, bad])}
    assert tree.first_not_finite(message) == "bad"
    assert tree.first_not_finite({"both": torch.tensor([math.inf, -math.inf])}) == "both"


def test_finite_numbers_whose_sum_overflows_are_finite() -> None:
    assert tree.first_not_finite({"large": torch.full((4,), 3e38)}) is None
