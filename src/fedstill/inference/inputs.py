"""Files to predict of, or to test a model on, as the raw inputs that the model takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedstill.core.errors import DataError, SettingError
from fedstill.data.formats import images, rows
from fedstill.data.formats.arrays import read_arrays
from fedstill.inference.description import ModelDescription

_SHOWN = 20


@dataclass(frozen=True)
class RawInputs:
    """Inputs by name, and their labels where the files have some."""

    unit: Literal["file", "row"]
    names: list[str]
    part: Callable[[int, int], Any]  # raw inputs from one number to another
    labels: list[str] | None = None

    def __len__(self) -> int:
        return len(self.names)


def read_inputs(
    path: Path, description: ModelDescription, *, text_column: str = "text", label_column: str = "label"
) -> RawInputs:
    """What a folder of images, an `.npz`, or a file of rows holds for this model."""
    if not path.exists():
        raise DataError(f"there is no file or folder {path}")
    kind = description.preprocessing.kind
    takes = _TAKES[kind]
    if kind == "image" and (path.is_dir() or path.name.lower().endswith(images.SUFFIXES)):
        return _images(path)
    if path.suffix.lower() == ".npz" and kind in ("image", "array"):
        return _arrays(path, description.classes)
    if rows.is_rows(path) and kind in ("text", "table"):
        return _rows(path, kind, text_column, label_column)
    raise SettingError(f"{path}: this model takes {takes}")


_ROWS = ".csv, .tsv, .jsonl or .parquet"
_TAKES = {
    "image": "images: a folder of them, or of one folder for each class, an image file, or an .npz with x",
    "array": "arrays: an .npz with x",
    "text": f"texts: a {_ROWS} file with a column of texts",
    "table": f"rows of a table: a {_ROWS} file with its columns",
}


def _images(path: Path) -> RawInputs:
    """Images without labels if they lie in the folder itself, else by class; its `test` folder, if it has one."""
    if path.is_file():
        return _image_files([str(path)], path.parent, None)
    if plain := images.image_files(path):
        return _image_files([file.path for file in plain], path, None)
    root = path / "test" if (path / "test").is_dir() else path
    found = images.by_class(root)
    if not found.files:
        if inside := images.image_files(root):
            return _image_files([file.path for file in inside], path, None)
        raise DataError(f"{path}: no image files in it, nor in folders for each class")
    return _image_files([file.path for file in found.files], path, found.labels)


def _image_files(files: list[str], root: Path, labels: list[str] | None) -> RawInputs:
    names = [str(Path(file).relative_to(root)) for file in files]
    return RawInputs("file", names, lambda start, stop: files[start:stop], labels)


def _arrays(path: Path, classes: Sequence[str]) -> RawInputs:
    """The test part if there is one, else all there is."""
    arrays = read_arrays(path)
    part = "_test" if "x_test" in arrays else ""
    if f"x{part}" not in arrays:
        raise DataError(f"{path}: no array 'x'; found {', '.join(arrays) or 'none'}")
    x, y = arrays[f"x{part}"], arrays.get(f"y{part}")
    labels = None if y is None else _names_of(y.reshape(-1), arrays.get("classes"), classes, path)
    if labels is not None and len(labels) != len(x):
        raise DataError(f"{path}: x{part} has {len(x)} samples but y{part} has {len(labels)}")
    names = [str(row) for row in range(1, len(x) + 1)]
    return RawInputs("row", names, lambda start, stop: x[start:stop], labels)


def _names_of(y: Any, own: Any, classes: Sequence[str], path: Path) -> list[str]:
    """Labels by name: strings, or numbers of the file's own names, numbers that are names, or the model's numbers."""
    if y.dtype.kind not in "iu":
        return [str(label) for label in y]
    if own is None and all(str(label) in classes for label in np.unique(y)):
        return [str(label) for label in y]
    named = list(classes) if own is None else [str(name) for name in own.reshape(-1)]
    if len(y) and not 0 <= y.min() <= y.max() < len(named):
        raise DataError(f"{path}: labels reach from {y.min()} to {y.max()}, and there are {len(named)} classes")
    return [named[label] for label in y.tolist()]


def _rows(path: Path, kind: str, text_column: str, label_column: str) -> RawInputs:
    columns = rows.read_columns(path)
    count = len(next(iter(columns.values())))
    names = [str(row) for row in range(1, count + 1)]
    found = columns.get(label_column)
    labels = None if found is None else [_label(value) for value in found]
    if kind == "table":
        return RawInputs("row", names, lambda a, b: {name: values[a:b] for name, values in columns.items()}, labels)
    if text_column not in columns:
        there = ", ".join(list(columns)[:_SHOWN])
        raise SettingError(f"{path}: no column {text_column!r}; --text-column names that of the texts: {there}")
    texts = ["" if value is None else str(value) for value in columns[text_column]]
    return RawInputs("row", names, lambda a, b: texts[a:b], labels)


def _label(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of whole numbers with a gap
    return "" if value is None else str(value).strip()
