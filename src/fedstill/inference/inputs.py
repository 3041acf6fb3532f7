"""Files to predict of, or to test a model on, as the raw inputs that the model takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedstill.core.errors import DataError, SettingError
from fedstill.data import sources
from fedstill.data.formats import images, table, text
from fedstill.data.formats.arrays import read_arrays
from fedstill.data.formats.columns import Categories, Roles, header, read_columns
from fedstill.data.formats.labels import numbered
from fedstill.data.preprocessing import TablePreprocessing
from fedstill.inference.description import ModelDescription

_SHOWN = 20


@dataclass(frozen=True)
class RawInputs:
    """Inputs by name, and their labels where the files have some."""

    unit: Literal["file", "row"]
    names: list[str]
    part: Callable[[int, int], Any]  # raw inputs from one number to another
    labels: list[str] | None = None
    held_out: bool = False  # the test part of data that have one

    def __len__(self) -> int:
        return len(self.names)


def read_inputs(
    path: Path, description: ModelDescription, *, text_column: str = "", label_column: str = "", tests: bool = False
) -> RawInputs:
    """What a folder of images, an `.npz`, or a file of rows holds for this model; columns are called as in training.

    `tests`: of a table with the run's split column, the test rows alone.
    """
    if not path.exists() and str(path) in sources.names():
        return _named(str(path), description)
    if not path.exists():
        raise DataError(f"there is no file or folder {path}")
    columns = {
        "text": text_column or description.text_column,
        "label": label_column or description.label_column,
        "split": description.split_column if tests else "",
    }
    found = _found(path, description, columns)
    if not len(found):
        raise DataError(f"{path}: no rows")
    return found


def _found(path: Path, description: ModelDescription, columns: Mapping[str, str]) -> RawInputs:
    preprocessing = description.preprocessing
    kind, rows = preprocessing.kind, table.is_table(path.name)
    if kind == "image" and (path.is_dir() or path.name.lower().endswith(images.SUFFIXES)):
        return _images(path)
    if path.suffix.lower() == ".npz" and kind in ("image", "array"):
        return _arrays(path, description.classes)
    if rows and isinstance(preprocessing, TablePreprocessing):
        return _rows(path, preprocessing, columns["label"] or "label", columns["split"])
    if rows and kind == "text":
        return _texts(path, columns["text"], columns["label"])
    raise SettingError(f"{path}: this model takes {_TAKES[kind]}")


def _named(name: str, description: ModelDescription) -> RawInputs:
    """The test images of a dataset that is known by name."""
    if description.preprocessing.kind != "image" or sources.is_text(name):
        raise SettingError(f"{name}: of datasets with a name, only images can be read here; give a file")
    data = sources.load(name)
    x, labels = data.test.x.numpy(), [data.classes[n] for n in data.test.y.tolist()]
    names = [str(row) for row in range(1, len(x) + 1)]
    return RawInputs("row", names, lambda start, stop: x[start:stop], labels, held_out=True)


_ROWS = ".csv, .tsv, .jsonl or .parquet"
_TAKES = {
    "image": "images: a folder of them, or of one folder for each class, an image file, or an .npz with x",
    "array": "arrays: an .npz with x",
    "text": f"texts: a {_ROWS} file with a column of texts",
    "table": f"rows of a table: a {_ROWS} file with its columns",
}


def _images(path: Path) -> RawInputs:
    """Images without labels if they lie in the folder itself; else by class, of its `test` folder if it has one."""
    if path.is_file():
        return _image_files([str(path)], path.parent, None)
    if plain := images.image_files(path) or images.image_files(path / "test"):
        return _image_files([file.path for file in plain], path, None)
    tree = images.folder(path)
    found = tree.test or tree.train
    return _image_files([file.path for file in found.files], path, found.labels, held_out=tree.test is not None)


def _image_files(files: list[str], root: Path, labels: list[str] | None, *, held_out: bool = False) -> RawInputs:
    names = [str(Path(file).relative_to(root)) for file in files]
    return RawInputs("file", names, lambda start, stop: files[start:stop], labels, held_out)


def _arrays(path: Path, classes: Sequence[str]) -> RawInputs:
    """The test part if there is one, else all there is."""
    arrays = read_arrays(path)
    part = "_test" if "x_test" in arrays else ""
    if f"x{part}" not in arrays:
        raise DataError(f"{path}: no array 'x'; found {', '.join(arrays) or 'none'}")
    x, y = arrays[f"x{part}"], arrays.get(f"y{part}")
    labels = None if y is None else _names_of(y, arrays.get("classes"), classes, path)
    if labels is not None and len(labels) != len(x):
        raise DataError(f"{path}: x{part} has {len(x)} samples but y{part} has {len(labels)}")
    names = [str(row) for row in range(1, len(x) + 1)]
    return RawInputs("row", names, lambda start, stop: x[start:stop], labels, bool(part))


def _names_of(y: Any, own: Any, classes: Sequence[str], path: Path) -> list[str]:
    """Labels by name, as training reads them; numbers that are no names of the model's classes are their numbers."""
    numbers, named = numbered({"y": y}, None if own is None else [str(name) for name in own.reshape(-1)], str(path))
    if own is None and not set(named) <= set(classes):
        given = {int(name) for name in named if name.isdecimal()}
        if len(given) == len(named) and max(given) < len(classes):
            named = tuple(classes[int(name)] for name in named)
    return [named[number] for number in numbers["y"]]


def _rows(path: Path, preprocessing: TablePreprocessing, label_column: str, split_column: str) -> RawInputs:
    """The model's columns and the labels, read as training reads them."""
    there, features = header(path), tuple(column.name for column in preprocessing.columns)
    if lacking := next((name for name in features if name not in there), None):
        raise DataError(f"{path}: no column {lacking!r}; there are {', '.join(there[:_SHOWN]) or 'none'}")
    target, split = (name if name in there else "" for name in (label_column, split_column))
    as_text = {column.name for column in preprocessing.columns if column.categories is not None}
    roles = Roles(
        *(target, "", split, features),
        text=frozenset({*as_text, target, split}),
        numbers=frozenset(),
        classes=(),
        declared=True,
        any_category=True,
    )
    found = {
        name: np.array([*values.names, ""], object)[values.codes] if isinstance(values, Categories) else values
        for name, values in read_columns(path, roles).items()
    }
    count = len(found[features[0]])
    chosen = np.flatnonzero([table.is_test(str(value)) for value in found[split]]) if split else np.arange(count)
    labels = found[target][chosen].tolist() if target else None
    columns = {name: found[name][chosen] for name in features}
    names = [str(row + 1) for row in chosen]
    return RawInputs(
        "row", names, lambda a, b: {name: values[a:b] for name, values in columns.items()}, labels, bool(split)
    )


def _texts(path: Path, text_column: str, label_column: str) -> RawInputs:
    columns = text.Columns(text_column, label_column)
    wanted = (label_column or "label").lower()
    labelled = wanted in (name.lower() for name in text.header(path))
    corpus = text.read_table(path, columns, labelled=labelled)
    names = [str(row) for row in range(1, len(corpus.texts) + 1)]
    labels = None if corpus.labels is None else corpus.labels.tolist()
    return RawInputs("row", names, lambda a, b: corpus.texts[a:b], labels)
