"""From labels as people have them to classes 0 to C-1 with names: words, truth values, numbers from 1, with gaps.

A class is named as its label is written. Numbers are classes in their order, words in alphabetical order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedstill.core.errors import DataError
from fedstill.data.formats.decoded import Array

MANY = 100  # different labels from which on they may be an identifier or a measurement


def numbered(
    given: Mapping[str, Array], classes: Sequence[str] | None, where: str
) -> tuple[dict[str, Array], tuple[str, ...]]:
    """The labels of each part as int64, and the names of the classes; `given` names them for errors.

    >>> numbered({"y": np.array([3, 1, 3])}, None, "mine")[1]
    ('1', '3')
    """
    parts = {name: _plain(labels, f"{where}: {name}") for name, labels in given.items()}
    words = any(labels.dtype.kind == "U" for labels in parts.values())
    if words:
        parts = {name: labels.astype(str) for name, labels in parts.items()}
    values = np.unique(np.concatenate(list(parts.values())))
    total = sum(map(len, parts.values()))
    if len(values) > MANY and 2 * len(values) > total:
        raise DataError(
            f"{where}: {len(values):,} different labels for {total:,} samples, such as {str(values[0])[:40]!r}: an "
            "identifier or a measurement? fedstill does classification only; give the column of the classes"
        )
    if words:
        _refuse_measurements(values, where)
        names = class_order(map(str, values)) if classes is None else tuple(classes)
        if stray := [str(value) for value in values if value not in names]:
            raise DataError(f"{where}: label {stray[0]!r} is not among the classes")
        number = {name: index for index, name in enumerate(names)}
        # Each different label once, however many samples have it.
        of_value = np.array([number[str(value)] for value in values], np.int64)
        return {name: of_value[np.searchsorted(values, labels)] for name, labels in parts.items()}, tuple(names)
    if classes is None:
        return {name: np.searchsorted(values, labels).astype(np.int64) for name, labels in parts.items()}, tuple(
            map(str, values.tolist())
        )
    if not len(values) or (values[0] >= 0 and values[-1] < len(classes)):
        return {name: labels.astype(np.int64) for name, labels in parts.items()}, tuple(classes)
    if len(values) == len(classes):  # 1 to C, say
        return {name: np.searchsorted(values, labels).astype(np.int64) for name, labels in parts.items()}, tuple(
            classes
        )
    raise DataError(f"{where}: {len(classes)} class names, but labels reach from {values[0]} to {values[-1]}")


def class_order(names: Iterable[str]) -> list[str]:
    """Sorted names; whole numbers sort by value, so that 10 comes after 9.

    >>> class_order(["10", "9"]), class_order(["b", "a", "10"])
    (['9', '10'], ['10', 'a', 'b'])
    """
    names = set(names)
    if all(name.isascii() and name.isdigit() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def _plain(labels: Array, what: str) -> Array:
    """Labels as whole numbers or as words, one a sample."""
    y = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if y.ndim == 2:
        raise DataError(f"{what} has {y.shape[1]} columns; give one label a sample (of one-hot rows, their argmax)")
    if y.dtype.kind == "O":
        y = _of_objects(y, what)
    if y.ndim != 1 or y.dtype.kind not in "iubfUS":
        raise DataError(f"{what} must be one number or word a sample, not {y.dtype} of shape {y.shape}")
    if y.dtype.kind in "USb":
        y = y.astype(str)
        if missing := int(np.count_nonzero(np.char.strip(y) == "")):
            raise DataError(f"{what}: {missing:,} of {len(y):,} labels are empty; leave those samples out")
        return y
    if y.dtype.kind == "f":
        if missing := int(np.count_nonzero(~np.isfinite(y))):
            raise DataError(f"{what}: {missing:,} of {len(y):,} labels are NaN or infinite; leave those samples out")
        if (fractions := y[y != np.round(y)]).size:
            raise _measurements(what, fractions[0], len(np.unique(y)))
        if len(y) and float(np.abs(y).max()) >= 2.0**53:
            raise DataError(f"{what}: a label of {np.abs(y).max():g} is no class; give the column of the classes")
    return y.astype(np.int64) if y.dtype.kind != "u" or not len(y) or y.max() < 2**63 else y.astype(str)


def _of_objects(y: Array, what: str) -> Array:
    """Labels that came as Python objects, as a column of a DataFrame does."""
    flat = y.reshape(-1).tolist()
    missing = sum(value is None or value != value for value in flat)  # noqa: PLR0124 (NaN)
    if missing:
        raise DataError(f"{what}: {missing:,} of {len(flat):,} labels are missing; leave those samples out")
    if kinds := {type(value).__name__ for value in flat if not isinstance(value, str | int | float | np.generic)}:
        raise DataError(f"{what} must be one number or word a sample, not {sorted(kinds)[0]}")
    if any(isinstance(value, str) for value in flat):
        return np.array([str(value) for value in flat]).reshape(y.shape)
    return np.array(flat).reshape(y.shape)


def _refuse_measurements(values: Array, where: str) -> None:
    """Refuse words that are many different numbers with fractions."""
    if len(values) <= MANY // 5:
        return
    try:
        numbers = values.astype(float)
    except ValueError:
        return
    if (fractions := numbers[numbers != np.round(numbers)]).size:
        raise _measurements(where, fractions[0], len(values))


def _measurements(what: str, example: float, different: int) -> DataError:
    return DataError(
        f"{what}: labels are measurements, {different:,} different ones such as {example:g}; fedstill does "
        "classification only: give classes, for instance by cutting the numbers into ranges"
    )
