"""Datasets that are folders of image files: by class, by client, and three published layouts."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedstill.core.errors import DataError, in_one_line
from fedstill.data.formats.decoded import Array, Decoded, SourceFile, SplitArrays, hold_out, source_file
from fedstill.data.formats.labels import class_order

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
GREY = ("1", "L", "LA")
DEEP = ("I", "F")  # more than 8 bits; also I;16 and the like
LARGEST = 256  # pixels of an image's longer side, unless image_size is set

Picture = str | Path | bytes | Image.Image  # a file, the bytes of one, or what Pillow made of one


@dataclass
class Labelled:
    """Image files with the names of their classes and, where known, of their owners."""

    files: list[SourceFile]
    labels: list[str]
    clients: list[str] | None = None


@dataclass
class Tree:
    """The files of a dataset; without a test part, one is held out."""

    root: Path
    train: Labelled
    test: Labelled | None
    notes: tuple[str, ...] = ()

    def files(self) -> list[SourceFile]:
        """Every image file."""
        return self.train.files + (self.test.files if self.test else [])


# --- layouts ---


def folder(root: Path) -> Tree:
    """`clients/<client>/<class>/*`, else `train/<class>/*` with `test/<class>/*`, else `<class>/*`.

    `test` is optional everywhere.
    """
    test = by_class(root / "test") if (root / "test").is_dir() else None
    notes: tuple[str, ...] = ()
    if (root / "clients").is_dir():
        owners: list[str] = []
        train = Labelled([], [], owners)
        for client in subfolders(root / "clients"):
            mine = by_class(client)
            train.files += mine.files
            train.labels += mine.labels
            owners += [client.name] * len(mine.files)
            notes += () if mine.files else (f"no images of client {client.name}, which is left out",)
    elif (root / "train").is_dir():
        train = by_class(root / "train")
    else:
        train, test = by_class(root), None
    if not train.files:
        raise DataError(
            f"{root}: no image files found in <class>/, train/<class>/ or clients/<client>/<class>/ "
            f"(for the files of a published dataset give its name, and this folder as data_dir)"
        )
    return Tree(root, train, test, notes)


def by_class(root: Path, inner: str = "") -> Labelled:
    """Images in one folder per class; `inner` names a folder between the class and its images."""
    found = Labelled([], [])
    for class_folder in subfolders(root):
        files = image_files(class_folder / inner)
        found.files += files
        found.labels += [class_folder.name] * len(files)
    return found


def tiny_imagenet_files(root: Path) -> list[SourceFile]:
    """Every file that Tiny ImageNet's two labelled parts are made from."""
    annotations = source_file(root / "val" / "val_annotations.txt")
    return [annotations, *by_class(root / "train", "images").files, *image_files(root / "val" / "images")]


def tiny_imagenet(root: Path) -> Tree:
    """The published validation images are the test split: the published test images have no labels."""
    annotations = root / "val" / "val_annotations.txt"
    class_of = {row[0]: row[1] for row in _rows(annotations, columns=2)}
    files = image_files(root / "val" / "images")
    unlabelled = [file.path for file in files if os.path.basename(file.path) not in class_of]
    if unlabelled:
        raise DataError(f"{annotations}: no line for {os.path.basename(unlabelled[0])}")
    test = Labelled(files, [class_of[os.path.basename(file.path)] for file in files])
    return Tree(root, by_class(root / "train", "images"), test)


def celeba_files(root: Path) -> list[SourceFile]:
    """Every file that the CelebA splits are made from."""
    lists = [source_file(root / name) for name in ("list_attr_celeba.txt", "list_eval_partition.txt")]
    return [*lists, *image_files(root / "img_align_celeba")]


def celeba(root: Path) -> Tree:
    """Gender of aligned faces; the published training and test parts, the validation part unused."""
    attributes = root / "list_attr_celeba.txt"
    rows = _rows(attributes, columns=1)
    if len(rows) < 3 or "Male" not in rows[1]:
        raise DataError(f"{attributes}: the second line does not name the attribute Male")
    column = 1 + rows[1].index("Male")
    if any(len(row) <= column or row[column] not in ("1", "-1") for row in rows[2:]):
        raise DataError(f"{attributes}: damaged or truncated (an attribute is not 1 or -1)")
    gender = {row[0]: "male" if row[column] == "1" else "female" for row in rows[2:]}
    on_disk = {os.path.basename(file.path): file for file in image_files(root / "img_align_celeba")}
    parts = {"0": Labelled([], []), "1": Labelled([], []), "2": Labelled([], [])}
    for name, part, *_ in _rows(root / "list_eval_partition.txt", columns=2):
        if name not in on_disk or name not in gender or part not in parts:
            where = root / "img_align_celeba" / name if name not in on_disk else attributes
            raise DataError(f"{where}: missing or without entry, but list_eval_partition.txt names {name}")
        parts[part].files.append(on_disk[name])
        parts[part].labels.append(gender[name])
    return Tree(root, parts["0"], parts["2"])


def subfolders(root: Path) -> list[Path]:
    """Visible folders in a folder, in the order of their class numbers."""
    found = [entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")]
    return [root / name for name in class_order(found)]


def image_files(root: Path) -> list[SourceFile]:
    """Image files in one folder, by name."""
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        found = [
            (entry.path, entry.stat())
            for entry in entries
            if entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(".")
        ]
    return sorted(SourceFile(path, status.st_size, status.st_mtime_ns) for path, status in found)


def _rows(path: Path, columns: int) -> list[list[str]]:
    try:
        rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if any(len(row) < columns for row in rows):
        raise DataError(f"{path}: damaged or truncated (a line with fewer than {columns} columns)")
    return rows


# --- pixels ---


def decode(
    tree: Tree,
    image_size: int = 0,
    colour: bool = False,
    classes: Sequence[str] | None = None,
    *,
    any_size: bool = False,
) -> Decoded:
    """Decode every file. Images are RGB, or one channel if all are grey and `colour` is not asked for.

    With `image_size` they are resized while being read, so that large originals never fill the memory. Of `any_size`:
    without it they are brought to the most common size, and to no more than `LARGEST`.
    """
    names = class_order(tree.train.labels) if classes is None else list(classes)
    number = {name: index for index, name in enumerate(names)}
    client_names = class_order(tree.train.clients or [])
    client_number = {name: index for index, name in enumerate(client_names)}

    def numbered(part: Labelled) -> tuple[Array, Array | None]:
        stray = next((i for i, label in enumerate(part.labels) if label not in number), None)
        if stray is not None:
            raise DataError(f"{part.files[stray].path}: class {part.labels[stray]!r} is not among the training classes")
        y = np.array([number[label] for label in part.labels], np.int64)
        if part.clients is None:
            return y, None
        return y, np.array([client_number[client] for client in part.clients], np.int64)

    if not tree.train.files or (tree.test is not None and not tree.test.files):
        raise DataError(f"{tree.root}: no image files in the {'test' if tree.train.files else 'training'} part")
    files, (y, client) = tree.train.files, numbered(tree.train)
    if tree.test is None:
        train_at, test_at = hold_out(y, client)
    else:
        train_at, test_at = np.arange(len(y)), np.arange(len(y), len(y) + len(tree.test.files))
        files = files + tree.test.files
        y = np.concatenate([y, numbered(tree.test)[0]])
    paths = [file.path for file in files]
    size, original = chosen_size(paths if any_size else paths[:1], image_size=image_size)
    x_train, grey_train = pixels([paths[i] for i in train_at], size, resize=any_size or bool(image_size))
    x_test, grey_test = pixels([paths[i] for i in test_at], size, resize=any_size or bool(image_size))
    if grey_train and grey_test and not colour:
        x_train, x_test = (np.ascontiguousarray(x[..., :1]) for x in (x_train, x_test))
    return Decoded(
        SplitArrays(x_train, y[train_at], None if client is None else client[train_at]),
        SplitArrays(x_test, y[test_at], None if client is None or tree.test else client[test_at]),
        tuple(names),
        tuple(client_names),
        original_size=original,
        notes=tree.notes,
    )


def chosen_size(*parts: Sequence[Picture], image_size: int = 0) -> tuple[tuple[int, int], str]:
    """The height and width that images are brought to, and what their sizes are, in words; empty if all have that.

    Without `image_size` it is the most common size, the larger of two as common, with a longer side of `LARGEST`
    at most.
    """
    counted: Counter[tuple[int, int]] = Counter()
    for pictures in parts:
        counted.update(_in_threads(partial(_size, pictures), range(len(pictures))))
    usual = max(counted, key=lambda size: (counted[size], size[0] * size[1], size))
    if image_size:
        height = width = image_size
    else:
        scale = min(1.0, LARGEST / max(usual))
        height, width = (max(1, round(side * scale)) for side in usual)
    if counted.keys() == {(height, width)}:
        return (height, width), ""
    shown = f"{usual[1]}x{usual[0]}"
    return (height, width), shown if len(counted) == 1 else f"of {len(counted):,} sizes, mostly {shown},"


def pixels(pictures: Sequence[Picture], size: tuple[int, int], *, resize: bool) -> tuple[Array, bool]:
    """Images as (N, H, W, 3), and whether all of them are grey."""
    height, width = size
    x = np.empty((len(pictures), height, width, 3), np.uint8)

    def fill(index: int) -> bool:
        picture = pictures[index]
        image = opened(picture)
        if resize:
            image = resized(image, width, height)
        if image.size != (width, height):
            raise DataError(
                f"{_name(picture)}: {image.width}x{image.height} pixels where others have {width}x{height}; "
                f"set image_size to bring all to one size"
            )
        values = np.asarray(image)
        x[index] = values[..., None] if image.mode == "L" else values
        return image.mode == "L"

    return x, all(_in_threads(fill, range(len(pictures))))


def _in_threads(function: Callable[[int], Any], items: range) -> list[Any]:
    # Pillow releases the interpreter while it decodes, so threads share the work.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))


def _size(pictures: Sequence[Picture], index: int) -> tuple[int, int]:
    """Height and width of one of them, for which the beginning of a file is enough."""
    picture = pictures[index]
    with _refused(picture), _open(picture) as image:
        return image.height, image.width


def resized(image: Image.Image, width: int, height: int) -> Image.Image:
    """The image at this size."""
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BILINEAR)


def opened(picture: Picture) -> Image.Image:
    """An image with one channel or three of 8 bits: colours of a palette looked up, transparency left out."""
    with _refused(picture), _open(picture) as image:
        if image.mode.startswith(DEEP):
            raise DataError(f"{_name(picture)}: more than 8 bits per channel ({image.mode}); convert it to 8 bits")
        return image.convert("L" if image.mode in GREY else "RGB")


def _open(picture: Picture) -> AbstractContextManager[Image.Image]:
    if isinstance(picture, Image.Image):
        return nullcontext(picture)
    return Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture)


def _name(picture: Picture) -> str:
    return str(picture) if isinstance(picture, str | Path) else "an image"


@contextmanager
def _refused(picture: Picture) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # Pillow raises of many kinds, MemoryError for a length that a file only claims
        raise DataError(f"{_name(picture)}: damaged, or not an image ({in_one_line(error)})") from error
