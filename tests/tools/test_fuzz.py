"""Damaged input gives a value or an error of one line: the deterministic part of tools/fuzz.py."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import sys
import zipfile
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core import tree
from fedstill.core.choices import SMALLEST_VOCABULARY
from fedstill.core.errors import DataError, SettingError
from fedstill.data import tokens
from fedstill.data.formats import arrays, cifar, idx, images, mat, text
from fedstill.flower.records import from_records

INPUTS = 40  # of each reader


def _fuzz() -> ModuleType:
    """tools/fuzz.py as a module."""
    tools = Path(__file__).parents[2] / "tools"
    sys.path.append(str(tools))  # what it imports stands beside it
    spec = importlib.util.spec_from_file_location("fuzz", tools / "fuzz.py")
    assert spec
    assert spec.loader
    module = sys.modules["fuzz"] = importlib.util.module_from_spec(spec)  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    return module


fuzz: Any = _fuzz()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_reader_breaks_its_contract(tmp_path: Path) -> None:
    found = []
    for target in fuzz.targets(tmp_path):
        for seed in range(INPUTS):
            if finding := fuzz.attempt(target, fuzz.inputs(target, seed)):
                found.append(f"{target.name}, seed {seed}: {finding.problem}")
    assert found == []


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_tree_or_refused(data: bytes) -> None:
    for read in (tree.decode, lambda given_: tree.unseal(given_, "label")):
        target = fuzz.Target("tree", [data], read)
        assert fuzz.attempt(target, data) is None


# --- what fuzzing found ---


def message(data: bytes, dtype: str = "float32") -> RecordDict:
    array = Array(dtype, (6,), "numpy.ndarray", data)
    return RecordDict({"tensors": ArrayRecord({"x": array}), "tree": ConfigRecord({"json": '{"$tensor": "x"}'})})


def test_a_message_whose_array_header_cannot_be_parsed_is_refused() -> None:
    made = io.BytesIO()
    np.save(made, np.arange(6, dtype=np.float32))
    with pytest.raises(DataError, match="a tensor: its bytes are not those of an array"):
        from_records(message(made.getvalue().replace(b"'shape", b"#shape")))


def test_a_message_cannot_forge_lines_of_a_log() -> None:
    with pytest.raises(DataError) as refused:
        from_records(message(b"", "float32\nERROR forged"))
    assert "\n" not in str(refused.value)


def test_a_pickle_cannot_have_memory_allocated_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")
    with pytest.raises(DataError, match="its memo has a number 2147483647"):
        cifar.decode([tmp_path / "batch"] * 2, cifar.CIFAR10)


def test_an_npz_of_something_else_than_arrays_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", b"no array")
        archive.writestr("y.npy", b"no array")
    with pytest.raises(DataError, match=r"not an \.npz of plain arrays \('x' is none\)"):
        arrays.read_npz(tmp_path / "a.npz")


@pytest.mark.parametrize("point", [0x110000, 0xD800])
def test_labels_that_are_no_text_are_refused(tmp_path: Path, point: int) -> None:
    labels = np.full(6, point, np.uint32).view("U1")
    np.savez(tmp_path / "a.npz", x=np.zeros((6, 2)), y=labels)
    with pytest.raises(DataError, match="what is no character"):
        arrays.read_npz(tmp_path / "a.npz")


def test_labels_as_bytes_are_read_as_utf8_or_refused(tmp_path: Path) -> None:
    for word, good in (("é".encode(), True), (b"\xff", False)):
        np.savez(tmp_path / "a.npz", x=np.zeros((10, 2)), y=np.array([word, b"b"] * 5))
        if good:
            assert set(arrays.read_npz(tmp_path / "a.npz").classes) == {"é", "b"}
        else:
            with pytest.raises(DataError, match="not UTF-8"):
                arrays.read_npz(tmp_path / "a.npz")


def test_a_damaged_gzip_of_text_is_refused(tmp_path: Path) -> None:
    head = b"\x1f\x8b\x08\0\0\0\0\0\0\x03"
    (tmp_path / "a.csv.gz").write_bytes(head + b"\xff" * 20)
    with pytest.raises(DataError, match="cannot be read as text"):
        text.read_table(tmp_path / "a.csv.gz")


def test_an_idx_file_is_not_unpacked_beyond_what_it_claims(tmp_path: Path) -> None:
    claimed = b"\0\0\x08\x01" + (4).to_bytes(4, "big")
    (tmp_path / "bomb").write_bytes(gzip.compress(claimed + bytes(10**6)))
    with pytest.raises(DataError, match="more than 4 bytes of data, not 4"):
        idx.read(tmp_path / "bomb")
    (tmp_path / "bomb").write_bytes(gzip.compress(b"\0\0\x08\x03" + b"\xff" * 12))
    with pytest.raises(DataError, match="it claims 3 axes"):
        idx.read(tmp_path / "bomb")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_matlab_file_is_read_as_scipy_does_and_may_lie_about_its_lengths(tmp_path: Path, compressed: bool) -> None:
    import scipy.io

    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3, 6), np.uint8)
    other = {"s": "text", "c": np.array([1j]), "i": np.arange(3, dtype=np.int16)}
    path = tmp_path / "a.mat"
    scipy.io.savemat(
        path, {"X": pixels, "y": np.array([[1.0], [10], [2], [3], [4], [5]]), **other}, do_compression=compressed
    )
    found = mat._variables(path.read_bytes())
    assert found.keys() == {"X", "y", "i"}
    for name, values in found.items():
        expected = scipy.io.loadmat(path)[name]
        assert values.dtype == expected.dtype
        assert np.array_equal(values, expected)
    whole = path.read_bytes()
    for at in range(128, 250):
        path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        assert fuzz.attempt(fuzz.Target("mat", [], lambda _: mat.decode([path, path])), b"") is None


@pytest.mark.parametrize("seed", [3000002, 3000044, 777537, 9008313])
def test_a_damaged_tokenizer_neither_panics_nor_overflows(tmp_path: Path, seed: int) -> None:
    """Found by these seeds: a panic of the library's, more tokens than a text was cut to, and what is no JSON."""
    target = next(target for target in fuzz.targets(tmp_path) if target.name == "tokenizer")
    assert fuzz.attempt(target, fuzz.inputs(target, seed)) is None


def test_a_tokens_number_beyond_32_bits_is_refused_and_takes_no_memory() -> None:
    """The library, made to write such a tokenizer, would go through all the numbers between."""
    made = json.loads(tokens.trained(["a text"] * 3, SMALLEST_VOCABULARY))
    made["model"]["vocab"]["a"] = 2**32 - 1
    with pytest.raises(SettingError, match="the number of a token is too large"):
        tokens.encode(json.dumps(made), ["a text"], 8)


def test_column_names_of_several_lines_are_one_in_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,"two\nlines"\na,b\n')
    with pytest.raises(DataError, match=r"has text, two lines; name"):
        text.read_table(tmp_path / "a.csv")


def test_a_line_of_text_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_LONGEST_LINE", 1000)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"text,label\n" + b"a" * 1001))
    with pytest.raises(DataError, match="a line has more than 1,000 characters"):
        text.read_table(tmp_path / "a.csv.gz")


def test_an_image_that_only_claims_its_length_is_refused(tmp_path: Path) -> None:
    head = b"IHDR" + (5).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    chunk = (13).to_bytes(4, "big") + head + zlib.crc32(head).to_bytes(4, "big")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + b"\xff\xff\xff\xffIDAT")
    with pytest.raises(DataError, match="damaged, or not an image"):
        images.opened(str(tmp_path / "a.png"))
