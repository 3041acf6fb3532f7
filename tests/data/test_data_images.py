"""Folders of images as people have them: of any size, mode and number of clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.core.errors import DataError
from fedstill.data import from_arrays, load
from fedstill.data.dataset import sized
from fedstill.data.formats import images


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))


def write(path: Path, width: int, height: int, level: int = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (width, height), level).save(path)


def folder(root: Path, sizes: list[tuple[int, int]]) -> Path:
    """Images of these widths and heights, of two classes in turn."""
    for number, (width, height) in enumerate(sizes):
        write(root / "ab"[number % 2] / f"{number}.png", width, height, 10 * number)
    return root


def notes(path: Path | str, **settings: object) -> tuple[str, ...]:
    settings = {"data": str(path), "clients": 2, "partition": "iid", "model": "mlp", **settings}
    return prepare(resolve({"participation": 1.0} | settings)).warnings


def test_images_of_different_sizes_are_brought_to_the_most_common_one_and_a_run_says_so(tmp_path: Path) -> None:
    path = folder(tmp_path / "mixed", [(6, 8)] * 6 + [(5, 5)] * 3 + [(30, 30)])
    data = load(str(path))
    assert tuple(data.shape) == (1, 8, 6)
    values = torch.cat([data.train.x, data.test.x]).float().amax(dim=(1, 2, 3))
    assert sorted(values.tolist()) == [10.0 * n for n in range(10)]  # every picture is there, and still grey
    assert notes(path) == ("images of 3 sizes, mostly 6x8, resized to 6x8; image_size sets another size",)
    assert notes(path, image_size=4) == ("images of 3 sizes, mostly 6x8, resized to 4x4",)
    assert load(str(path)).original_size == data.original_size == "of 3 sizes, mostly 6x8,"  # from the cache too


def test_of_two_sizes_as_common_the_larger_is_taken(tmp_path: Path) -> None:
    assert tuple(load(str(folder(tmp_path, [(4, 4)] * 4 + [(5, 4)] * 4))).shape) == (1, 4, 5)


def test_images_as_large_as_the_network_needs_are_left_as_they_are(tmp_path: Path) -> None:
    path = folder(tmp_path, [(32, 32)] * 10)
    assert notes(path, model="lenet5") == ()
    assert notes(path) == ()


def test_a_network_that_insists_on_a_size_gets_it_and_a_run_says_so(tmp_path: Path) -> None:
    path = folder(tmp_path, [(20, 24)] * 10)
    assert notes(path, model="lenet5") == ("images 20x24 resized to 32x32 for lenet5",)
    assert notes(Path("fashion-mini"), model="lenet5") == ("images 28x28 resized to 32x32 for lenet5",)
    assert notes(Path("fashion-mini"), model="cnn") == ()
    own = tmp_path / "own.py"
    own.write_text(f"import fedstill\n\ndef pictures():\n    return fedstill.load_dataset({str(path)!r})\n")
    assert notes(f"{own}:pictures", model="lenet5") == ("images 20x24 resized to 32x32 for lenet5",)


def test_arrays_are_resized_in_words_too() -> None:
    data = from_arrays(np.zeros((10, 6, 8), np.uint8), np.arange(10) % 2)
    assert sized(data, 4).original_size == "8x6"
    assert sized(sized(data, 4), 5).original_size == "8x6"
    assert sized(data, 0).original_size == ""


def test_very_large_images_are_reduced_in_proportion(tmp_path: Path) -> None:
    path = folder(tmp_path, [(1024, 512)] * 10)
    assert tuple(load(str(path)).shape) == (1, images.LARGEST // 2, images.LARGEST)
    assert notes(path) == ("images 1024x512 resized to 256x128; image_size sets another size",)
    assert tuple(load(str(path), image_size=300).shape) == (1, 300, 300)


@pytest.mark.parametrize(
    ("mode", "make"),
    [
        ("RGBA", lambda: Image.new("RGBA", (4, 4), (200, 0, 0, 0))),
        ("P", lambda: Image.new("RGB", (4, 4), (200, 0, 0)).convert("P", palette=Image.Palette.ADAPTIVE)),
        ("CMYK", lambda: Image.new("RGB", (4, 4), (200, 0, 0)).convert("CMYK")),
    ],
)
def test_transparency_is_left_out_and_colours_of_a_palette_are_looked_up(
    tmp_path: Path, mode: str, make: Callable[[], Image.Image]
) -> None:
    image = make()
    assert image.mode == mode
    for number in range(10):
        file = tmp_path / "ab"[number % 2] / f"{number}.tif"
        file.parent.mkdir(exist_ok=True)
        image.save(file)
    data = load(str(tmp_path))
    assert data.train.x[0, :, 0, 0].tolist() == [200, 0, 0]


def test_images_of_one_bit_are_black_and_white(tmp_path: Path) -> None:
    for number in range(10):
        file = tmp_path / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.new("1", (4, 4), number % 2).save(file)
    data = load(str(tmp_path))
    assert tuple(data.shape) == (1, 4, 4)
    assert torch.equal(data.train.x.amax(dim=(1, 2, 3)).long(), data.train.y * 255)


def test_a_client_without_images_is_left_out_and_named(tmp_path: Path) -> None:
    for client in ("north", "south"):
        folder(tmp_path / "clients" / client, [(4, 4)] * 10)
    (tmp_path / "clients" / "west" / "a").mkdir(parents=True)
    data = load(str(tmp_path))
    assert data.client_names == ("north", "south")
    assert data.notes == ("no images of client west, which is left out",)
    assert data.notes[0] in notes(tmp_path, partition="natural", clients=0)


def test_a_folder_of_images_can_be_learnt(tmp_path: Path) -> None:
    for number in range(40):
        write(tmp_path / "d" / ("dark", "light")[number % 2] / f"{number}.png", 10, 12, 30 + 180 * (number % 2))
    result = fedstill.run(
        data=str(tmp_path / "d"), clients=2, partition="iid", rounds=2, participation=1.0, engine="inline", model="mlp"
    )
    assert result.records[-1]["accuracy"] == 1.0


def test_a_broken_file_among_images_of_any_size_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path, [(4, 4)] * 10)
    (path / "a" / "x.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"x\.png: damaged, or not an image"):
        load(str(path))
