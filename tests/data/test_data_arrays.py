"""Arrays, `.npz` files and PyTorch datasets."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

import fedstill
from fedstill.core.errors import DataError, SettingError
from fedstill.data import from_arrays, from_torch, load
from fedstill.data.formats.decoded import Array

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _isolated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("FEDSTILL_OFFLINE", "1")


def saved(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "data.npz", **arrays)
    return str(folder / "data.npz")


def noise(*shape: int) -> Array:
    return RNG.integers(0, 256, shape, np.uint8)


LABELS = np.arange(10) % 2


@pytest.mark.parametrize(
    ("shape", "sample"),
    [
        ((10, 8, 6), (1, 8, 6)),
        ((10, 8, 6, 1), (1, 8, 6)),
        ((10, 8, 6, 3), (3, 8, 6)),
        ((10, 3, 8, 6), (3, 8, 6)),
        ((10, 1, 8, 6), (1, 8, 6)),
        ((10, 3, 8, 3), (3, 3, 8)),  # both ends could be channels: the last is taken
    ],
)
def test_uint8_images_are_recognised_by_their_axes(
    tmp_path: Path, shape: tuple[int, ...], sample: tuple[int, ...]
) -> None:
    x = noise(*shape)
    data = load(saved(tmp_path, x=x, y=LABELS, x_test=x, y_test=LABELS))
    assert tuple(data.shape) == sample
    assert data.train.x.is_contiguous(memory_format=torch.channels_last)
    assert sorted(data.train.x.flatten().tolist()) == sorted(x.flatten().tolist())
    channels = data.train.x.double().div(255)
    assert data.mean == pytest.approx(channels.mean(dim=(0, 2, 3)).tolist(), abs=1e-12)
    assert data.std == pytest.approx(channels.std(dim=(0, 2, 3), correction=0).tolist(), abs=1e-12)
    normalised = data.normalise(data.train.x)
    assert normalised.mean(dim=(0, 2, 3)).abs().max() < 1e-5
    assert (normalised.std(dim=(0, 2, 3), correction=0) - 1).abs().max() < 1e-5


def test_floats_are_used_as_they_are(tmp_path: Path) -> None:
    x = RNG.normal(size=(10, 3, 8, 6))
    data = load(saved(tmp_path, x_train=x, y_train=LABELS, x_test=x, y_test=LABELS))
    assert data.train.x.dtype == torch.float32
    assert torch.equal(data.train.x, torch.from_numpy(x).float())
    assert data.mean == ()


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int8, np.uint32])
def test_two_axes_of_integers_are_features_unless_they_are_said_to_be_tokens(kind: Any) -> None:
    numbers = np.arange(50, dtype=kind).reshape(10, 5)
    assert from_arrays(numbers, LABELS).train.x.dtype == torch.float32
    assert from_arrays(numbers, LABELS).vocabulary == 0
    assert from_arrays(numbers, LABELS, numbers, LABELS, tokens=True).train.x.dtype == torch.int64
    with pytest.raises(DataError, match="tokens are whole numbers of two axes"):
        from_arrays(np.zeros((10, 3)), LABELS, tokens=True)


def test_rows_of_numbers_get_a_multilayer_perceptron_without_naming_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for x in (rng.normal(size=(40, 3)), rng.integers(0, 9, (40, 3))):
        settings: dict[str, Any] = {"clients": 2, "partition": "iid", "rounds": 1, "epochs": 1, "engine": "inline"}
        run = fedstill.run(data=from_arrays(x, np.arange(40) % 2), out=tmp_path / str(x.dtype), **settings)
        np.savez(tmp_path / f"{x.dtype}.npz", x=x, y=np.arange(40) % 2)
        named = fedstill.run(data=str(tmp_path / f"{x.dtype}.npz"), out=tmp_path / f"named-{x.dtype}", **settings)
        for each in (run, named):
            assert each.path is not None
            assert 'model = "mlp"' in (each.path / "config.toml").read_text()


def test_labels_are_numbered_in_order_and_name_their_classes() -> None:
    x = noise(10, 4, 4)
    named = from_arrays(x, np.array(["b", "a"] * 5), x, np.array(["b", "a"] * 5))
    assert (named.classes, named.train.y.tolist()[:2]) == (("a", "b"), [1, 0])
    numbered = from_arrays(x, LABELS * 4, x, LABELS * 4)
    assert (numbered.classes, numbered.train.y.tolist()[:2]) == (("0", "4"), [0, 1])


def test_clients_are_numbered_by_name_and_every_one_keeps_a_test_part(tmp_path: Path) -> None:
    client = np.repeat([70, 7, 30], 10)
    x = np.repeat(np.array([70, 7, 30], np.uint8), 10)[:, None, None] * np.ones((1, 4, 4), np.uint8)
    data = load(saved(tmp_path, x=x, y=np.tile(LABELS, 3), client=client))
    assert data.client_names == ("7", "30", "70")
    for split, each in ((data.train, 8), (data.test, 2)):
        assert split.client is not None
        assert split.client.bincount().tolist() == [each] * 3
        assert torch.equal(torch.tensor([7, 30, 70])[split.client], split.x[:, 0, 0, 0].long())


def test_class_names_may_be_given(tmp_path: Path) -> None:
    x = noise(10, 4, 4)
    assert load(saved(tmp_path, x=x, y=LABELS, classes=np.array(["no", "yes"]))).classes == ("no", "yes")
    with pytest.raises(DataError, match="1 class names, but labels reach from 0 to 1"):
        from_arrays(x, LABELS, classes=["only"])


X = noise(10, 4, 4)
NAN = np.full((10, 4), np.nan)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X, "y": LABELS[:9]}, "x has 10 samples but y has 9"),
        ({"x": X, "y": LABELS, "x_test": X, "y_test": LABELS[:3]}, "x_test has 10 samples but y_test has 3"),
        ({"x": X, "y": LABELS, "client": LABELS[:4]}, "x has 10 samples but client has 4"),
        ({"x": NAN, "y": LABELS}, "NaN or infinite"),
        ({"x": X, "y": LABELS, "x_test": X}, "no array 'y_test'"),
        ({"x": X, "y": LABELS / 2}, "classification only"),
        ({"x": X, "y": np.eye(10, dtype=int)}, "y has 10 columns; give one label a sample"),
        ({"x": X, "y": LABELS.astype("M8[D]")}, "one number or word a sample, not datetime64"),
        ({"x": X, "y": LABELS, "x_test": noise(10, 5, 5), "y_test": LABELS}, "test samples are"),
        ({"x": noise(10, 5, 8, 7), "y": LABELS}, "no axis of 1, 3 or 4 channels"),
        ({"x": X.astype(np.int32), "y": LABELS}, "images are uint8"),
        ({"x": X[:0], "y": LABELS[:0]}, "no samples"),
        ({"x": X[:3], "y": LABELS[:3]}, "too few to hold out"),
        ({"images": X}, "no array 'x'; found images"),
    ],
)
def test_arrays_that_make_no_sense_are_refused_in_one_line(
    tmp_path: Path, arrays: dict[str, Array], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(saved(tmp_path, **arrays))
    assert "\n" not in str(caught.value)


def test_an_npz_with_python_objects_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, x=X, y=np.array([{}] * 10, object))
    with pytest.raises(DataError, match=r"data\.npz: damaged, or not an \.npz of plain arrays"):
        load(path)


@pytest.mark.parametrize("keep", [0, 30, -10])
def test_a_truncated_npz_is_named(tmp_path: Path, keep: int) -> None:
    path = Path(saved(tmp_path, x=X, y=LABELS))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"data\.npz: damaged"):
        load(str(path))


def header(shape: str, dtype: str = "<f4") -> str:
    return f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}\n"


@pytest.mark.parametrize(
    "text",
    [
        header(f"({10**12}, {10**6})"),
        header(f"({10**40}, 2)"),
        header(f"(0, {10**40})"),
        header("(-1, 5)"),
        header("(10**12, 5)"),
        header("(3, 5)", "nonsense"),
        header("(((("),
        "'''\n",
        "-" * 9000 + "1\n",
        " " * 60_000,
        "",
        None,
    ],
    ids=[
        *("more than any memory", "no number of C", "empty of no number of C", "negative", "an expression", "no dtype"),
        *("not closed", "not closed string", "too deep", "too long", "nothing", "no array"),
    ],
)
@pytest.mark.parametrize("name", ["x", "y"])
def test_an_npz_with_a_header_that_makes_no_sense_is_refused_in_one_line(
    tmp_path: Path, name: str, text: str | None
) -> None:
    path = Path(saved(tmp_path, **({"y": LABELS} if name == "x" else {"x": X})))
    member = b"hello" if text is None else b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{name}.npy", member)
    with pytest.raises(DataError, match=r"data\.npz: (damaged, or |no array)") as caught:
        load(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": np.array([b"\xff", b"a"] * 5)}, "its text is not UTF-8"),
        ({"y": LABELS, "client": np.array([b"\xff"] * 10)}, "its text is not UTF-8"),
        ({"y": np.frombuffer(b"\xff\xff\xff\x7f" * 10, "<U1")}, "it holds what is no character"),
        ({"y": LABELS, "x_test": np.float32(3), "y_test": LABELS}, r"x_test: shape \(\) has no axis"),
    ],
)
def test_arrays_that_cannot_be_what_they_are_called_are_refused(
    tmp_path: Path, arrays: dict[str, Array], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(saved(tmp_path, x=X, **arrays))


def test_image_size_needs_images(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="needs images"):
        load(saved(tmp_path, x=np.ones((10, 4)), y=LABELS), image_size=8)


def test_tensors_and_arrays_give_the_same_dataset_without_copying() -> None:
    x = noise(10, 8, 8, 3)
    by_array = from_arrays(x, LABELS, x, LABELS)
    by_tensor = from_arrays(torch.from_numpy(x), torch.from_numpy(LABELS), x, LABELS)
    assert torch.equal(by_array.train.x, by_tensor.train.x)
    assert by_tensor.train.x.data_ptr() == x.ctypes.data


class Pictures(TorchDataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return Image.fromarray(np.full((5, 4, 3), index, np.uint8)), index % 2


def test_torch_datasets_of_tensors_and_of_pictures() -> None:
    x = torch.randn(10, 3, 4, 4)
    data = from_torch(TensorDataset(x, torch.arange(10) % 2), TensorDataset(x[:2], torch.arange(2)))
    assert torch.equal(data.train.x, x)
    assert data.test.y.tolist() == [0, 1]
    pictures = from_torch(Pictures(), Pictures())
    assert pictures.train.x.shape == (10, 3, 5, 4)
    assert pictures.train.x[:, 0, 0, 0].tolist() == list(range(10))
