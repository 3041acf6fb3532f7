"""Every published format, read from small files of that format."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image

from fedstill.core.errors import DataError
from fedstill.data import load
from fedstill.data.formats.decoded import Array

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _isolated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("FEDSTILL_OFFLINE", "1")


def noise(*shape: int) -> Array:
    return RNG.integers(0, 256, shape, np.uint8)


def write_idx(path: Path, values: Array, zipped: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(content) if zipped else content)


def write_mnist(folder: Path, zipped: bool = True, per_part: int = 4) -> Array:
    x = noise(2 * per_part, 28, 28)
    y = np.arange(2 * per_part, dtype=np.uint8) % 10
    end = ".gz" if zipped else ""
    for part, at in (("train", slice(0, per_part)), ("t10k", slice(per_part, None))):
        write_idx(folder / f"{part}-images-idx3-ubyte{end}", x[at], zipped)
        write_idx(folder / f"{part}-labels-idx1-ubyte{end}", y[at], zipped)
    return x


def write_image(path: Path, pixels: Array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def flat(x: Array) -> Array:
    """Images (N, H, W, 3) as CIFAR stores them: the red plane, then green, then blue."""
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


# --- IDX ---


@pytest.mark.parametrize("folder", ["mnist", "fashion-mnist", "fashion_mnist", "mnist/raw", "anything"])
@pytest.mark.parametrize("zipped", [True, False])
def test_idx_files_are_found_and_read(tmp_path: Path, folder: str, zipped: bool) -> None:
    x = write_mnist(tmp_path / folder, zipped)
    name = "fashion-mnist" if folder.startswith("fashion") else "mnist"
    data = load(name, tmp_path / folder if folder == "anything" else tmp_path)
    assert data.train.x.shape == (4, 1, 28, 28)
    assert np.array_equal(data.train.x[:, 0].numpy(), x[:4])
    assert np.array_equal(data.test.x[:, 0].numpy(), x[4:])
    assert data.test.y.tolist() == [4, 5, 6, 7]
    assert data.train.y.dtype == torch.int64
    assert data.classes[0] == ("0" if name == "mnist" else "T-shirt/top")


def test_mnist_files_in_a_folder_named_mnist_are_not_taken_for_fashion_mnist(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    with pytest.raises(DataError, match="fashion-mnist"):
        load("fashion-mnist", tmp_path / "mnist")


@pytest.mark.parametrize("inside", ["", "gzip"])
def test_emnist_letters_are_turned_upright_and_counted_from_zero(tmp_path: Path, inside: str) -> None:
    x = noise(6, 28, 28)
    for part in ("train", "test"):
        prefix = f"emnist-letters-{part}"
        folder = tmp_path / "emnist-letters" / inside
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", x.transpose(0, 2, 1))
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", np.array([1, 2, 3, 26, 26, 1], np.uint8))
    data = load("emnist-letters", tmp_path)
    assert np.array_equal(data.train.x[:, 0].numpy(), x)
    assert data.train.y.tolist() == [0, 1, 2, 25, 25, 0]
    assert (len(data.classes), data.classes[25]) == (26, "Z")


@pytest.mark.parametrize(("split", "classes", "last"), [("balanced", 47, "t"), ("byclass", 62, "z")])
def test_emnist_splits_with_digits_keep_their_labels(tmp_path: Path, split: str, classes: int, last: str) -> None:
    for part in ("train", "test"):
        write_idx(tmp_path / f"emnist-{split}-{part}-images-idx3-ubyte.gz", noise(2, 28, 28))
        labels = np.array([0, classes - 1], np.uint8)
        write_idx(tmp_path / f"emnist-{split}-{part}-labels-idx1-ubyte.gz", labels)
    data = load(f"emnist-{split}", tmp_path)
    assert data.train.y.tolist() == [0, classes - 1]
    assert (len(data.classes), data.classes[-1]) == (classes, last)


@pytest.mark.parametrize("keep", [0, 3, 10, 200, -1])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_idx_file_is_named(tmp_path: Path, keep: int, zipped: bool) -> None:
    write_mnist(tmp_path, zipped)
    damaged = tmp_path / ("train-images-idx3-ubyte" + (".gz" if zipped else ""))
    damaged.write_bytes(damaged.read_bytes()[:keep])
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        load("mnist", tmp_path)


def test_a_gzip_file_with_a_flipped_byte_is_named(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    damaged = tmp_path / "t10k-images-idx3-ubyte.gz"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged.write_bytes(content)
    with pytest.raises(DataError, match="t10k-images"):
        load("mnist", tmp_path)


def test_images_and_labels_must_be_as_many(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.zeros(3, np.uint8))
    with pytest.raises(DataError, match=r"4 images .* 3 labels"):
        load("mnist", tmp_path)


def test_a_label_outside_the_classes_is_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.array([0, 1, 2, 10], np.uint8))
    with pytest.raises(DataError, match=r"train-labels.*outside 0\.\.9"):
        load("mnist", tmp_path)


# --- SVHN ---


def test_svhn_moves_the_sample_axis_first_and_turns_label_10_into_0(tmp_path: Path) -> None:
    x = noise(5, 32, 32, 3)
    for part in ("train", "test"):
        y = np.array([[10], [1], [9], [10], [2]], np.uint8)
        scipy.io.savemat(tmp_path / f"{part}_32x32.mat", {"X": x.transpose(1, 2, 3, 0), "y": y})
    data = load("svhn", tmp_path)
    assert np.array_equal(data.train.x.permute(0, 2, 3, 1).numpy(), x)
    assert data.train.y.tolist() == [0, 1, 9, 0, 2]


@pytest.mark.parametrize("keep", [0, 50, 200, -20])
def test_a_truncated_svhn_file_is_named(tmp_path: Path, keep: int) -> None:
    for part in ("train", "test"):
        content = {"X": noise(32, 32, 3, 2), "y": np.array([[1], [2]], np.uint8)}
        scipy.io.savemat(tmp_path / f"{part}_32x32.mat", content, do_compression=True)
    damaged = tmp_path / "test_32x32.mat"
    damaged.write_bytes(damaged.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"test_32x32\.mat"):
        load("svhn", tmp_path)


# --- CIFAR ---


def python2_pickle(batch: dict[str, Any]) -> bytes:
    """A batch as Python 2 wrote it (protocol 2, byte strings): the form in which CIFAR is published."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text  # SHORT_BINSTRING

    def array(values: Array) -> bytes:
        raw = values.tobytes()
        state = b"(K\x01" + b"(" + b"".join(b"M" + struct.pack("<H", n) for n in values.shape) + b"t"
        dtype = b"cnumpy\ndtype\n(" + short(b"u1") + b"K\x00K\x01tR(K\x03" + short(b"|")
        dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        state += dtype + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
        return b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + short(b"b") + b"tR" + state

    items = b""
    for key, value in batch.items():
        items += short(key.encode())
        if isinstance(value, np.ndarray):
            items += array(value)
        else:
            items += b"](" + b"".join(b"K" + bytes([label]) for label in value) + b"e"
    return b"\x80\x02}(" + items + b"u."


def modern_pickle(protocol: int) -> Callable[[dict[str, Any]], bytes]:
    return lambda batch: pickle.dumps({key.encode(): value for key, value in batch.items()}, protocol)


WRITERS = [python2_pickle, *(modern_pickle(protocol) for protocol in (0, 2, 4, 5))]


@pytest.mark.parametrize("write", WRITERS)
def test_cifar10_pickles(tmp_path: Path, write: Callable[[dict[str, Any]], bytes]) -> None:
    x, y = noise(12, 32, 32, 3), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    folder = tmp_path / "cifar10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        batch = {"data": flat(x[2 * i : 2 * i + 2]), "labels": y[2 * i : 2 * i + 2]}
        (folder / name).write_bytes(write(batch))
    data = load("cifar10", tmp_path)
    assert np.array_equal(data.train.x.permute(0, 2, 3, 1).numpy(), x[:10])
    assert np.array_equal(data.test.x.permute(0, 2, 3, 1).numpy(), x[10:])
    assert data.train.y.tolist() + data.test.y.tolist() == y
    assert data.train.x.is_contiguous(memory_format=torch.channels_last)


def test_cifar10_binary(tmp_path: Path) -> None:
    x, y = noise(12, 32, 32, 3), np.arange(12, dtype=np.uint8) % 10
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    records = np.concatenate([y[:, None], flat(x)], axis=1)
    for i, name in enumerate([*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]):
        (folder / name).write_bytes(records[2 * i : 2 * i + 2].tobytes())
    data = load("cifar10", tmp_path)
    assert np.array_equal(data.train.x.permute(0, 2, 3, 1).numpy(), x[:10])
    assert data.test.y.tolist() == [0, 1]
    (folder / "data_batch_3.bin").write_bytes(records[:2].tobytes()[:-7])
    with pytest.raises(DataError, match=r"data_batch_3\.bin: damaged or truncated"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("binary", [True, False])
def test_cifar100_uses_the_fine_labels(tmp_path: Path, binary: bool) -> None:
    x, coarse, fine = noise(3, 32, 32, 3), np.array([1, 2, 3], np.uint8), np.array([0, 50, 99], np.uint8)
    folder = tmp_path / ("cifar-100-binary" if binary else "cifar-100-python")
    folder.mkdir()
    for part in ("train", "test"):
        if binary:
            records = np.concatenate([coarse[:, None], fine[:, None], flat(x)], axis=1)
            (folder / f"{part}.bin").write_bytes(records.tobytes())
        else:
            batch = {"data": flat(x), "coarse_labels": coarse.tolist(), "fine_labels": fine.tolist()}
            (folder / part).write_bytes(python2_pickle(batch))
    data = load("cifar100", tmp_path)
    assert np.array_equal(data.train.x.permute(0, 2, 3, 1).numpy(), x)
    assert data.train.y.tolist() == [0, 50, 99]
    assert (len(data.classes), data.classes[0], data.classes[50], data.classes[99]) == (
        *(100, "apple"),
        *("mouse", "worm"),
    )


class Attack:
    """Pickles to a call."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def write_cifar100(folder: Path, content: bytes) -> None:
    (folder / "cifar-100-python").mkdir()
    for part in ("train", "test"):
        (folder / "cifar-100-python" / part).write_bytes(content)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_malicious_pickle_is_refused_without_executing_anything(tmp_path: Path, protocol: int) -> None:
    victim = tmp_path / "victim"
    attacks: list[tuple[Callable[..., object], tuple[object, ...]]] = [
        (os.mkdir, (str(victim),)),
        (os.system, (f"mkdir {victim}",)),
        (eval, (f"__import__('os').mkdir({str(victim)!r})",)),
        (getattr, (os, "mkdir")),
        (np.load, (str(victim), None, True)),
    ]
    for number, (function, arguments) in enumerate(attacks):
        if function is getattr:
            content = b"cbuiltins\ngetattr\n(cos\nmkdir\nU\x08__call__tR."
        else:
            content = pickle.dumps({b"data": Attack(function, *arguments), b"fine_labels": [1]}, protocol)
        folder = tmp_path / str(number)
        folder.mkdir()
        write_cifar100(folder, content)
        with pytest.raises(DataError, match="it asks for"):
            load("cifar100", folder)
        assert not victim.exists()


def test_arrays_of_objects_in_a_pickle_are_refused(tmp_path: Path) -> None:
    batch = {b"data": np.array([{"any": "thing"}], object), b"fine_labels": [1]}
    write_cifar100(tmp_path, pickle.dumps(batch, 2))
    with pytest.raises(DataError, match="array of type 'O8'"):
        load("cifar100", tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 40, 1000, -1])
def test_a_truncated_pickle_is_named(tmp_path: Path, keep: int) -> None:
    content = python2_pickle({"data": flat(noise(2, 32, 32, 3)), "fine_labels": [1, 2]})
    write_cifar100(tmp_path, content[:keep])
    with pytest.raises(DataError, match="cifar-100-python/train"):
        load("cifar100", tmp_path)


# --- folders of images ---


def test_cinic10_takes_train_and_test_and_leaves_valid(tmp_path: Path) -> None:
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    x = {(part, n): noise(32, 32, 3) for part in ("train", "valid", "test") for n in names}
    for (part, name), pixels in x.items():
        write_image(tmp_path / "cinic10" / part / name / "one.png", pixels)
    data = load("cinic10", tmp_path)
    assert (len(data.train), len(data.test), data.classes) == (10, 10, tuple(names))
    assert np.array_equal(data.test.x[3].permute(1, 2, 0).numpy(), x["test", "cat"])


def test_tiny_imagenet_tests_on_the_validation_images(tmp_path: Path) -> None:
    root = tmp_path / "tiny-imagenet" / "tiny-imagenet-200"
    for wnid, level in (("n02", 200), ("n01", 20)):
        for i in range(3):
            pixels = np.full((64, 64), level, np.uint8) if i == 2 else np.full((64, 64, 3), level, np.uint8)
            write_image(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", pixels)
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
    write_image(root / "val" / "images" / "val_0.JPEG", np.full((64, 64, 3), 200, np.uint8))
    write_image(root / "val" / "images" / "val_1.JPEG", np.full((64, 64, 3), 20, np.uint8))
    write_image(root / "test" / "images" / "test_0.JPEG", noise(64, 64, 3))
    lines = "val_0.JPEG\tn02\t0\t32\t44\t62\nval_1.JPEG\tn01\t52\t55\t57\t59\n"
    (root / "val" / "val_annotations.txt").write_text(lines)
    data = load("tiny-imagenet", tmp_path)
    assert data.classes == ("n01", "n02")
    assert data.train.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.train.x.float().mean(dim=(1, 2, 3)).round().tolist() == [20, 20, 20, 200, 200, 200]
    assert data.test.y.tolist() == [1, 0]
    assert data.test.x.float().mean(dim=(1, 2, 3)).round().tolist() == [200, 20]


def test_celeba_gender_at_64_pixels_with_the_published_parts(tmp_path: Path) -> None:
    root = tmp_path / "celeba"
    male = [1, -1, 1, -1, 1]
    part = [0, 0, 1, 2, 2]
    for i in range(5):
        write_image(root / "img_align_celeba" / f"00000{i}.jpg", np.full((218, 178, 3), 40 * i, np.uint8))
    rows = [f"00000{i}.jpg  1 {m} -1" for i, m in enumerate(male)]
    (root / "list_attr_celeba.txt").write_text("\n".join(["5", "Bald Male Young", *rows]) + "\n")
    parts = "\n".join(f"00000{i}.jpg {p}" for i, p in enumerate(part))
    (root / "list_eval_partition.txt").write_text(parts)
    data = load("celeba", tmp_path)
    assert data.train.x.shape == (2, 3, 64, 64)
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([1, 0], [0, 1])
    assert data.test.x.float().mean(dim=(1, 2, 3)).round().tolist() == [120, 160]
    assert data.classes == ("female", "male")
    (root / "img_align_celeba" / "000003.jpg").unlink()
    with pytest.raises(DataError, match=r"000003\.jpg"):
        load("celeba", tmp_path)


def test_folder_by_class_with_train_and_test(tmp_path: Path) -> None:
    x = {(p, c, i): noise(8, 6, 3) for p in ("train", "test") for c in ("dog", "ant") for i in range(3)}
    for (part, name, i), pixels in x.items():
        write_image(tmp_path / part / name / f"{i}.png", pixels)
    (tmp_path / "train" / "dog" / "notes.txt").write_text("not an image")
    data = load(str(tmp_path))
    assert data.classes == ("ant", "dog")
    assert data.train.x.shape == (6, 3, 8, 6)
    assert data.train.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert np.array_equal(data.train.x[4].permute(1, 2, 0).numpy(), x["train", "dog", 1])
    assert data.train.client is None


def test_flat_folder_holds_out_a_fifth_of_every_class_and_the_same_one_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in range(11):
        for i in range(10):
            write_image(tmp_path / "d" / str(name) / f"{i}.png", np.full((4, 4), 10 * name + i, np.uint8))
    data = load(str(tmp_path / "d"))
    assert data.classes == tuple(str(n) for n in range(11))  # 10 after 9, not after 1
    assert data.train.x.shape == (88, 1, 4, 4)
    assert data.test.y.bincount().tolist() == [2] * 11
    values = torch.cat([data.train.x, data.test.x])[:, 0, 0, 0]
    assert sorted(values.tolist()) == list(range(110))  # every image once
    assert torch.equal(values // 10, torch.cat([data.train.y, data.test.y]))
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "another"))
    assert torch.equal(load(str(tmp_path / "d")).test.x, data.test.x)


def test_folder_per_client_gives_owners(tmp_path: Path) -> None:
    for client, base in (("bob", 100), ("ann", 0)):
        for name in ("x", "y"):
            for i in range(10):
                pixels = np.full((4, 4), base + i, np.uint8)
                write_image(tmp_path / "clients" / client / name / f"{i}.png", pixels)
    data = load(str(tmp_path))
    assert data.client_names == ("ann", "bob")
    for split, count in ((data.train, 16), (data.test, 4)):
        assert split.client is not None
        assert torch.equal(split.client, (split.x[:, 0, 0, 0] >= 100).long())
        assert split.client.bincount().tolist() == [count, count]
    write_image(tmp_path / "test" / "x" / "0.png", np.zeros((4, 4), np.uint8))
    data = load(str(tmp_path))
    assert (len(data.train), len(data.test), data.test.client) == (40, 1, None)


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    for i in range(5):
        write_image(tmp_path / "a" / f"{i}.png", noise(8, 8, 3))
    good = (tmp_path / "a" / "3.png").read_bytes()
    for bad in (good[:60], b"", b"no image"):
        (tmp_path / "a" / "3.png").write_bytes(bad)
        with pytest.raises(DataError, match=r"3\.png: damaged"):
            load(str(tmp_path))


def test_an_image_of_sixteen_bits_is_refused_rather_than_clipped(tmp_path: Path) -> None:
    for i in range(5):
        write_image(tmp_path / "a" / f"{i}.png", np.full((4, 4), 1000, np.uint16))
    with pytest.raises(DataError, match="convert it to 8 bits"):
        load(str(tmp_path))


def test_a_test_class_that_training_lacks_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "train" / "a" / "0.png", noise(4, 4))
    write_image(tmp_path / "test" / "b" / "0.png", noise(4, 4))
    with pytest.raises(DataError, match="class 'b' is not among the training classes"):
        load(str(tmp_path))


def test_a_folder_without_images_says_what_was_expected(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    with pytest.raises(DataError, match="no image files found"):
        load(str(tmp_path))


def test_resized_on_reading_or_from_an_array_is_the_same_picture(tmp_path: Path) -> None:
    x = noise(10, 40, 40, 3)
    for i, pixels in enumerate(x):
        write_image(tmp_path / "f" / "train" / "a" / f"{i}.png", pixels)
        write_image(tmp_path / "f" / "test" / "a" / f"{i}.png", pixels)
    buffer = io.BytesIO()
    np.savez(buffer, x=x, y=np.zeros(10, int), x_test=x, y_test=np.zeros(10, int))
    (tmp_path / "a.npz").write_bytes(buffer.getvalue())
    for size in (16, 64):
        by_pillow = load(str(tmp_path / "f"), image_size=size).train.x
        by_torch = load(str(tmp_path / "a.npz"), image_size=size).train.x
        assert by_torch.shape == (10, 3, size, size)
        assert (by_pillow.int() - by_torch.int()).abs().max() <= 1
