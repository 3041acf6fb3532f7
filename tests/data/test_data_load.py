"""Names, the cache, downloads, and the dataset that comes with the package."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import threading
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstill.core.errors import DataError, FedstillError, SettingError
from fedstill.core.files import read_json, write_atomic, write_json
from fedstill.data import Dataset, cache, describe, download, load, names, sources
from fedstill.data.download import Download, fetch
from fedstill.data.formats import arrays
from fedstill.data.formats.decoded import Decoded
from fedstill.data.published import SOURCES


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FEDSTILL_CACHE", str(folder))
    monkeypatch.setenv("FEDSTILL_OFFLINE", "1")
    return folder


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    path = tmp_path / "mine.npz"
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (20, 8, 8, 3), np.uint8)
    np.savez(path, x=x, y=np.arange(20) % 4, client=np.arange(20) // 10, classes=np.array(list("abcd")))
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Paths that have been decoded."""
    seen: list[Path] = []
    real = arrays.read_npz

    def counted(path: Path) -> Decoded:
        seen.append(path)
        return real(path)

    monkeypatch.setattr(arrays, "read_npz", counted)
    return seen


def assert_same(a: Dataset, b: Dataset) -> None:
    for one, two in ((a.train, b.train), (a.test, b.test)):
        assert torch.equal(one.x, two.x)
        assert torch.equal(one.y, two.y)
        assert (one.client is None) == (two.client is None)
        assert one.client is None or two.client is None or torch.equal(one.client, two.client)
    empty = torch.empty(0)
    split = replace(a.train, x=empty, y=empty, client=None)
    assert replace(a, train=split, test=split) == replace(b, train=split, test=split)


# --- the embedded dataset ---


def test_fashion_mini_is_balanced_and_needs_no_other_file() -> None:
    data = load("fashion-mini")
    assert data.train.y.bincount().tolist() == [600] * 10
    assert data.test.y.bincount().tolist() == [100] * 10
    assert data.train.x.shape == (6000, 1, 28, 28)
    assert data.classes[9] == "Ankle boot"
    # Published statistics of all 60,000 images: 0.2860 and 0.3530.
    assert data.mean == pytest.approx((0.2860,), abs=0.002)
    assert data.std == pytest.approx((0.3530,), abs=0.002)
    assert load("fashion-mini", image_size=32).shape == (1, 32, 32)


def test_fashion_mini_carries_its_licence_and_stays_small() -> None:
    notice = sources.EMBEDDED.with_name("NOTICE").read_text()
    assert "Copyright (c) 2017 Zalando SE" in notice
    assert "MIT License" in notice
    assert sources.EMBEDDED.stat().st_size < 4_000_000


# --- names ---


def test_unknown_names_are_answered_with_near_ones() -> None:
    with pytest.raises(SettingError, match="did you mean 'cifar10'"):
        load("cifar-10")


@pytest.mark.parametrize("name", list(SOURCES))
def test_missing_files_say_what_from_where_and_to_where(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert any(file in message for layout in SOURCES[name].layouts for file in layout)
    assert "http" in message
    assert str(tmp_path / name) in message


def test_data_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path / "there"))
    with pytest.raises(DataError, match="there/mnist"):
        load("mnist")


def test_a_file_that_is_missing_from_an_otherwise_complete_set_is_the_one_named(tmp_path: Path) -> None:
    for file in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"):
        (tmp_path / file).touch()
    with pytest.raises(DataError, match=r"^mnist: t10k-labels-idx1-ubyte not found"):
        load("mnist", tmp_path)


def test_describe_lists_every_name_and_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "svhn").mkdir()
    for part in ("train", "test"):
        (tmp_path / "svhn" / f"{part}_32x32.mat").touch()  # empty: describing must not read it
    rows = {row.name: row for row in describe(tmp_path)}
    assert tuple(rows) == names()
    assert rows["svhn"].found == str(tmp_path / "svhn")
    assert rows["mnist"].found == ""
    assert rows["fashion-mini"].found == "in the package"
    assert (rows["cifar100"].train, rows["cifar100"].classes, rows["cifar100"].shape) == (50_000, 100, (3, 32, 32))


def test_negative_image_size_is_refused() -> None:
    with pytest.raises(SettingError, match="image_size is -1"):
        load("fashion-mini", image_size=-1)


# --- the cache ---


def test_a_second_load_maps_the_cache_and_decodes_nothing(npz: Path, reads: list[Path], cache_folder: Path) -> None:
    first = load(str(npz))
    second = load(str(npz))
    assert len(reads) == 1
    assert_same(first, second)
    assert second.client_names == ("0", "1")
    assert str(cache_folder) in Path("/proc/self/maps").read_text()
    assert second.train.x.is_contiguous(memory_format=torch.channels_last)


def test_writing_to_a_loaded_tensor_does_not_reach_the_cache(npz: Path, cache_folder: Path) -> None:
    load(str(npz))
    (pixels,) = cache_folder.glob("*/train_x.npy")
    stored = pixels.read_bytes()
    load(str(npz)).train.x.zero_()
    assert pixels.read_bytes() == stored


def test_changed_content_is_decoded_again(npz: Path, reads: list[Path]) -> None:
    load(str(npz))
    status = npz.stat()
    content = bytearray(npz.read_bytes())
    at = content.index(b"\x93NUMPY") + 200  # a pixel of the first array
    content[at] ^= 1
    npz.write_bytes(content)
    os.utime(npz, ns=(status.st_atime_ns, status.st_mtime_ns))  # same size, same time: only the bytes differ
    with pytest.raises(DataError, match="damaged"):  # the archive's own checksum
        load(str(npz))
    assert len(reads) == 2
    np.savez(npz, x=np.zeros((20, 8, 8, 3), np.uint8), y=np.arange(20) % 4)
    assert load(str(npz)).train.x.max() == 0


def test_each_image_size_has_its_own_entry(npz: Path, reads: list[Path]) -> None:
    shapes = [load(str(npz), image_size=size).shape[1] for size in (0, 4, 0, 4)]
    assert shapes == [8, 4, 8, 4]
    assert len(reads) == 2


@pytest.mark.parametrize("damage", ["truncate", "overwrite", "remove", "meta", "labels"])
def test_a_damaged_entry_is_rebuilt(npz: Path, reads: list[Path], cache_folder: Path, damage: str) -> None:
    first = load(str(npz))
    kept = first.train.x.clone()
    (entry,) = cache_folder.iterdir()
    pixels = entry / "train_x.npy"
    content = pixels.read_bytes()
    pixels.unlink()  # a new file, because `first` is still mapped to the old one
    match damage:
        case "truncate":
            pixels.write_bytes(content[:-5])
        case "overwrite":
            pixels.write_bytes(content[:200] + bytes(len(content) - 200))
        case "meta":
            pixels.write_bytes(content)
            (entry / "meta.json").write_text("{")
        case "labels":
            pixels.write_bytes(content)
            np.save(entry / "train_y.npy", np.zeros(16, np.int64))
    assert torch.equal(load(str(npz)).train.x, kept)
    assert len(reads) == 2
    load(str(npz))
    assert len(reads) == 2
    assert [path.name for path in cache_folder.iterdir()] == [entry.name]


def test_a_cache_that_cannot_be_written_costs_a_warning_only(
    npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = load(str(npz))
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="not kept for the next start"):
        data = load(str(npz))
    assert_same(data, kept)


def test_many_loading_at_once_agree_and_leave_one_entry(npz: Path, cache_folder: Path) -> None:
    barrier = threading.Barrier(4)
    results: list[Dataset] = []

    def work() -> None:
        barrier.wait()
        results.append(load(str(npz)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 4
    for data in results[1:]:
        assert_same(results[0], data)
    assert len(list(cache_folder.iterdir())) == 1


def test_the_key_sees_a_renamed_file_among_many(tmp_path: Path) -> None:
    from fedstill.data.formats.images import image_files

    for i in range(300):
        (tmp_path / f"{i:03}.png").write_bytes(b"x")
    before = cache.content_key("folder", 0, tmp_path, image_files(tmp_path))
    assert before == cache.content_key("folder", 0, tmp_path, image_files(tmp_path))
    (tmp_path / "007.png").rename(tmp_path / "007b.png")
    assert before != cache.content_key("folder", 0, tmp_path, image_files(tmp_path))


# --- downloads, from files on this machine ---


def published(path: Path, content: bytes, members: str = "") -> Download:
    path.write_bytes(content)
    return Download(path.as_uri(), hashlib.md5(content, usedforsecurity=False).hexdigest(), members)


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_files_and_archives_are_fetched_and_unpacked(tmp_path: Path) -> None:
    target = tmp_path / "target"
    steps: list[tuple[str, int, int]] = []
    fetch(published(tmp_path / "a.gz", b"plain"), target, lambda *step: steps.append(step))
    fetch(published(tmp_path / "b.tar.gz", tar_of({"set/one": b"1", "set/two": b"2"})), target)
    content = {"gzip/letters": b"3", "gzip/digits": b"4"}
    fetch(published(tmp_path / "c.zip", zip_of(content), members="gzip/letters"), target)
    assert tree(target) == ["a.gz", "gzip/letters", "set/one", "set/two"]
    assert steps == [("a.gz", 5, 5)]


def test_a_wrong_checksum_leaves_nothing_behind(tmp_path: Path) -> None:
    item = published(tmp_path / "a.gz", b"plain")
    with pytest.raises(DataError, match="MD5"):
        fetch(replace(item, md5="0" * 32), tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []


def test_an_archive_that_reaches_outside_its_folder_is_not_obeyed(tmp_path: Path) -> None:
    for name, content in (("a.tar.gz", tar_of({"../../evil": b"!"})), ("b.zip", zip_of({"../../evil": b"!"}))):
        try:
            fetch(published(tmp_path / name, content), tmp_path / "deep" / "target")
        except DataError:
            continue
    assert not [path for path in tree(tmp_path) if "evil" in path and not path.startswith("deep/target/")]


def test_load_downloads_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = bytes([1, 7]) + bytes(3072)
    archive = tar_of({f"cifar-100-binary/{part}.bin": record for part in ("train", "test")})
    source = replace(SOURCES["cifar100"], downloads=(published(tmp_path / "c.tar.gz", archive),))
    monkeypatch.setitem(SOURCES, "cifar100", source)
    with pytest.raises(DataError, match="FEDSTILL_OFFLINE is set"):
        load("cifar100", tmp_path / "data")
    monkeypatch.delenv("FEDSTILL_OFFLINE")
    assert load("cifar100", tmp_path / "data").train.y.tolist() == [7]
    monkeypatch.setattr(download, "fetch", None)  # a second load must not need it
    assert load("cifar100", tmp_path / "data").train.y.tolist() == [7]


def test_a_failing_download_falls_through_to_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Download((tmp_path / "gone.tar.gz").as_uri(), "0" * 32)
    source = replace(SOURCES["cifar100"], downloads=(gone,))
    monkeypatch.setitem(SOURCES, "cifar100", source)
    monkeypatch.delenv("FEDSTILL_OFFLINE")
    with pytest.raises(DataError, match=r"cifar-100-binary/train\.bin.* put it in .*download of .* failed"):
        load("cifar100", tmp_path / "data")


# --- atomic files ---


def test_write_atomic_replaces_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"kept": 1})

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, "lost")
    assert read_json(path) == {"kept": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_json_refuses_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", float("nan"))
    assert list(tmp_path.iterdir()) == []


def test_data_errors_are_errors_the_command_line_prints() -> None:
    assert issubclass(DataError, FedstillError)
