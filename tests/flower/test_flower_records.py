"""Trees as Flower's records: what goes in comes out, and what others made up is refused before it costs anything."""

from __future__ import annotations

import io
import json
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedstill.core import tree
from fedstill.core.errors import DataError
from fedstill.core.tree import Tree
from fedstill.flower.records import from_records, to_records

DTYPES = [torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8]
DTYPES += [torch.int16, torch.int32, torch.int64]
SHAPES = [(), (0,), (3,), (2, 0, 4), (2, 3), (1, 2, 3, 4)]


def same(one: Tree, other: Tree) -> bool:
    if isinstance(one, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and bytes(one.numpy().tobytes()) == bytes(other.numpy().tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_comes_back_with_the_same_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (10 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    found = from_records(to_records({"model": tensor}))
    assert same(found, {"model": tensor})
    found["model"].zero_()  # it is the receiver's own


def test_numbers_that_are_not_finite_come_back_with_the_same_bits() -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    assert same(from_records(to_records(tensor)), tensor)


def test_views_come_back_as_what_they_show() -> None:
    whole = torch.arange(24.0).view(2, 3, 4)
    parts = [whole.mT, whole[:, 1], whole.permute(2, 0, 1), whole[:1].expand(5, 3, 4)]
    assert same(from_records(to_records(parts)), [part.contiguous() for part in parts])


def test_a_name_that_looks_like_a_place_takes_no_place_of_another() -> None:
    alike = {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    assert same(from_records(to_records(alike)), alike)


leaves = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text() | st.just(torch.arange(3))
keys = st.text().filter(lambda key: key != "$tensor")
trees = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=12)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(trees)
def test_a_tree_comes_back_as_through_safetensors(given_tree: Tree) -> None:
    assert same(from_records(to_records(given_tree)), tree.decode(tree.encode(given_tree)))


class Bomb:
    """Whoever unpickles it notices."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("it was unpickled",)


def npy(array: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def header(text: str, version: tuple[int, int] = (1, 0)) -> bytes:
    length = len(text).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + text.encode()


def sent(
    data: bytes, dtype: str = "float32", shape: tuple[Any, ...] = (3,), stype: str = "numpy.ndarray"
) -> RecordDict:
    """What a peer that makes everything up could send as a model."""
    array = Array(dtype=dtype, shape=shape, stype=stype, data=data)
    return RecordDict(
        {"tensors": ArrayRecord({"model": array}), "tree": ConfigRecord({"json": '{"model": {"$tensor": "model"}}'})}
    )


GOOD = npy(np.zeros(3, np.float32))
TERABYTES = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }\n"
NOTHING = TERABYTES.replace("(1000000000000,)", f"(0, {2**70})")
DIMENSIONS = TERABYTES.replace("(1000000000000,)", f"({'0, ' * 70})")
REFUSED: dict[str, RecordDict] = {
    "terabytes, told twice": sent(header(TERABYTES), shape=(10**12,)),
    "terabytes, told by the bytes": sent(header(TERABYTES) + bytes(12)),
    "terabytes, by a second header": sent(header(TERABYTES, (2, 0)) + bytes(12)),
    "a number of elements that overflows": sent(GOOD, shape=(2**62, 4)),
    "nothing of a size that overflows": sent(header(NOTHING), shape=(0, 2**70)),
    "more dimensions than there can be": sent(header(DIMENSIONS), shape=(0,) * 70),
    "a negative shape": sent(GOOD, shape=(-3,)),
    "two negatives": sent(GOOD, shape=(-1, -3)),
    "objects": sent(npy(np.array([Bomb()], dtype=object), allow_pickle=True), dtype="object", shape=(1,)),
    "objects called floats": sent(npy(np.array([Bomb()], dtype=object), allow_pickle=True), "float64", (1,)),
    "a pickle": sent(pickle.dumps(Bomb()), shape=()),
    "a pickle as long as its array": sent(pickle.dumps(Bomb()).ljust(200, b"."), shape=(3,)),
    "an archive": sent(b"PK\x03\x04" + bytes(60)),
    "structures": sent(npy(np.zeros(3, [("a", "<f4")])), dtype="[('a', '<f4')]"),
    "words": sent(npy(np.array(["abc"])), dtype="<U3", shape=(1,)),
    "complex numbers": sent(npy(np.zeros(3, np.complex64)), dtype="complex64"),
    "another dtype than told": sent(npy(np.zeros(3, np.int32))),
    "another byte order": sent(npy(np.zeros(3, ">f4"))),
    "another shape than told": sent(npy(np.zeros((3, 1), np.float32))),
    "too few bytes": sent(GOOD[:-1]),
    "too many bytes": sent(GOOD + b"\0"),
    "no bytes": sent(b""),
    "half a header": sent(GOOD[:20]),
    "a header that is code": sent(header("__import__('os').abort()") + bytes(12)),
    "a header that is no dict": sent(header("[1, 2]") + bytes(12)),
    "a header that nests deeply": sent(header("(" * 900 + ")" * 900) + bytes(12)),
    "an unknown version": sent(b"\x93NUMPY\x09\x00" + GOOD[8:]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_made_up_arrays_are_refused(name: str) -> None:
    with pytest.raises(DataError):
        from_records(REFUSED[name])


@pytest.mark.parametrize("data", [GOOD, GOOD[:20], header("secret") + bytes(12)], ids=len)
@pytest.mark.parametrize("dtype", ["float32", "secret"])
def test_errors_repeat_no_text_of_the_sender(data: bytes, dtype: str) -> None:
    array = Array(dtype=dtype, shape=(3,), stype="numpy.ndarray", data=data)
    text = '{"model": {"$tensor": "another secret"}}'
    records = RecordDict({"tensors": ArrayRecord({"secret": array}), "tree": ConfigRecord({"json": text})})
    with pytest.raises(DataError) as caught:
        from_records(records)
    assert "secret" not in str(caught.value)


def test_the_helpers_of_these_tests_make_what_is_taken() -> None:
    assert same(from_records(sent(GOOD)), {"model": torch.zeros(3)})
    fortran = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert same(from_records(sent(npy(fortran), shape=(2, 3))), {"model": torch.arange(6.0).view(2, 3)})


JSON = {
    "no JSON": "{'model': 1}",
    "half of it": '{"model": [1, 2',
    "nothing": "",
    "too deep": "[" * 100_000 + "]" * 100_000,
    "a number of too many digits": '{"samples": ' + "1" * 5000 + "}",
    "a tensor that is not there": '{"model": {"$tensor": "state"}}',
    "a tensor named by a number": '{"model": {"$tensor": 1}}',
    "a tensor beside other keys": '{"samples": 1, "$tensor": "model"}',
    "deeper than it can be written again": "[" * 400 + "]" * 400,
    "a tensor that is named twice": '[{"$tensor": "model"}, {"$tensor": "model"}]',
    "a million empty dicts": "[" + ",".join(["{}"] * 1_000_000) + "]",
    "a million values after a string of brackets": json.dumps("[" * 100)[:-1] + '\\"", ' + "1," * 1_000_000,
    "a string without an end": '"' + '\\"' * 1_000_000,
    "a tensor named by a list": '{"model": {"$tensor": ["model"]}}',
}


@pytest.mark.parametrize("name", list(JSON))
def test_made_up_trees_are_refused(name: str) -> None:
    records = sent(GOOD)
    records["tree"] = ConfigRecord({"json": JSON[name]})
    with pytest.raises(DataError):
        from_records(records)


made_up = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("model"),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("$tensor"), inner),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(made_up, st.integers(0, 50))
def test_whatever_is_taken_can_be_written_again(given_tree: Any, levels: int) -> None:
    records = sent(GOOD)
    records["tree"] = ConfigRecord({"json": "[" * levels + json.dumps(given_tree) + "]" * levels})
    try:
        found = from_records(records)
    except DataError:
        return
    tree.encode(found)


@pytest.mark.parametrize(
    "records",
    [
        RecordDict(),
        RecordDict({"tensors": ArrayRecord({})}),
        RecordDict({"tensors": ConfigRecord(), "tree": ConfigRecord({"json": "1"})}),
        RecordDict({"tensors": ArrayRecord({}), "tree": ArrayRecord({})}),
        RecordDict({"tensors": ArrayRecord({}), "tree": ConfigRecord()}),
        RecordDict({"tensors": ArrayRecord({}), "tree": ConfigRecord({"json": b"1"})}),
    ],
    ids=["nothing", "no tree", "tensors of another kind", "a tree of another kind", "no JSON", "bytes"],
)
def test_records_of_other_kinds_are_refused(records: RecordDict) -> None:
    with pytest.raises(DataError, match="not a message of fedstill's"):
        from_records(records)


def test_what_is_larger_than_allowed_is_refused() -> None:
    records = to_records({"model": torch.zeros(1000)})
    assert same(from_records(records, most_bytes=5000), {"model": torch.zeros(1000)})
    with pytest.raises(DataError, match="more than the 4,000 allowed"):
        from_records(records, most_bytes=4000)
    with pytest.raises(DataError, match="more than the 100 allowed"):
        from_records(to_records({"name": "x" * 200}), most_bytes=100)


@pytest.mark.slow
def test_small_messages_take_little_memory_before_they_are_refused() -> None:
    empty = sent(GOOD)
    empty["tree"] = ConfigRecord({"json": "[" + ",".join(["{}"] * 2_000_000) + "]"})  # 6 MB, and 150 MB as objects
    named = {f"{i}": {"$tensor": "model"} for i in range(2000)}
    large = npy(np.zeros(250_000, np.float32))  # 1 MB, and 2 GB if each name had its own
    often = sent(large, shape=(250_000,))
    often["tree"] = ConfigRecord({"json": json.dumps(named)})
    for records in (empty, often):
        tracemalloc.start()
        try:
            with pytest.raises(DataError, match=r"more than|names one twice"):
                tree.encode(from_records(records, most_bytes=10_000_000))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 10_000_000


def test_text_has_a_limit_of_its_own() -> None:
    records = to_records({"model": torch.zeros(100_000), "text": "x" * 1000})
    assert from_records(records, most_bytes=1_000_000, most_text=2000)["text"] == "x" * 1000
    with pytest.raises(DataError, match="characters of text, more than the 500 allowed"):
        from_records(records, most_bytes=1_000_000, most_text=500)


def test_brackets_and_commas_within_strings_are_no_values() -> None:
    tokenizer = json.dumps([["a", "b\\", '"']] * 150_000)
    assert from_records(to_records({"tokenizer": tokenizer})) == {"tokenizer": tokenizer}
