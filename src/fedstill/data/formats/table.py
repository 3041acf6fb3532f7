"""Tables with named columns: `.csv`, `.tsv`, `.jsonl` and `.parquet` files, and DataFrames of pandas.

A column is numbers if all its values are; any other is categories. Of the columns that are not features, `target` is
the label, `client` who owns the row, `split` whether it trains or tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.core.errors import DataError, SettingError
from fedstill.data.dataset import Dataset
from fedstill.data.formats import text
from fedstill.data.formats.columns import (
    TOLD_APART,
    Categories,
    Columns,
    Roles,
    from_values,
    header,
    read_columns,
    unusable,
)
from fedstill.data.formats.decoded import Array, Decoded, SplitArrays, hold_out, to_dataset
from fedstill.data.formats.labels import class_order
from fedstill.data.preprocessing import Column, TablePreprocessing, floats
from fedstill.data.statistics import column_sums, merged

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet")
_MOST_LABELS = 1000  # that are numbers; more are measurements
_MOST_FRACTIONS = 20  # labels that are not whole
_SHOWN = 20  # names of columns in an error
_SPLITS = {"train": False, "training": False, "test": True, "testing": True}


@dataclass(frozen=True)
class TableSettings:
    """What the columns of a table are."""

    target: str = ""
    client: str = ""  # empty: a column of the name "client", if there is one
    split: str = ""
    categorical: tuple[str, ...] = ()  # besides those that are not numbers
    drop: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()  # the features and what they are, whatever else the table has; empty: all the rest
    classes: tuple[str, ...] = ()  # those there can be; empty: those that occur
    labelled: bool = True  # else only the features count, and no row is held out


def is_table(name: str) -> bool:
    """Whether a file may be a table.

    >>> is_table("patients.csv.gz"), is_table("patients.PARQUET"), is_table("patients.npz")
    (True, True, False)
    """
    return name.lower().endswith(SUFFIXES)


def from_frame(
    frame: Any,
    target: str | int,
    client: str | int = "",
    *,
    split: str | int = "",
    categorical: Sequence[str | int] = (),
    drop: Sequence[str | int] = (),
    name: str = "table",
) -> Dataset:
    """A dataset from a pandas DataFrame, or any mapping of columns: `target` is the label, `client` who owns a row.

    Numbers are standardised and categories one-hot encoded, by the training samples that clients get; numbers may be
    missing. `split` names a column of "train" and "test"; without it a fifth is held out. Whole numbers that stand
    for categories are named in `categorical`, columns to leave out in `drop`.

    Examples:
        >>> table = {"age": [50, 61, 58, 70, 44], "sex": list("fmfmf"), "ill": ["no", "yes", "yes", "yes", "no"]}
        >>> data = from_frame(table, target="ill")
        >>> data.classes, tuple(data.shape), data.input_shape
        (('no', 'yes'), (2,), (3,))
    """
    settings = TableSettings(  # pandas may number its columns
        *(str(target), str(client), str(split), tuple(map(str, categorical)), tuple(map(str, drop)))
    )
    if not hasattr(frame, "columns") and not isinstance(frame, Mapping):
        raise DataError(f"a DataFrame or a mapping of columns is needed, not {type(frame).__name__}")
    given = {str(column): frame[column] for column in getattr(frame, "columns", frame)}
    wanted = _roles(list(given), settings, name)
    return _dataset(from_values(given, wanted.text), wanted, name)


def read(path: Path, settings: TableSettings) -> Dataset:
    """The table in a file."""
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    wanted = _roles(header(path), settings, str(path))
    found = _dataset(read_columns(path, wanted), wanted, str(path), path.name.split(".")[0])
    return replace(found, notes=(*text.encoding_notes(path), *found.notes))


# --- which column is what ---


def _roles(names: Sequence[str], settings: TableSettings, where: str) -> Roles:
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise DataError(f"{where}: two columns are called {twice[0]!r}")
    known = set(names)
    if not settings.labelled:
        settings = replace(settings, target="", client="", split="")
    elif not settings.target:
        raise SettingError(f"{where}: target is needed, the column with the label (--target); {_there_are(names)}")
    client = settings.client or ("client" if "client" in names and settings.target not in ("", "client") else "")
    named: dict[str, tuple[str, ...]] = {
        "target": (settings.target,),
        "client_column": (client,),
        "split_column": (settings.split,),
    }
    named |= {"categorical_columns": settings.categorical, "drop_columns": settings.drop}
    for setting, columns in named.items():
        for column in filter(None, columns):
            if column not in known:
                hint = "; --target names it" if setting == "target" else ""
                raise SettingError(f"{where}: {setting} = {column!r} is no column; {_there_are(names)}{hint}")
    left_out = set(settings.drop)
    special = [name for name in (settings.target, client, settings.split) if name]
    if len(set(special)) < len(special) or set(special) & set(settings.drop):
        raise SettingError(f"{where}: target, client_column, split_column and drop_columns must be different columns")
    features = tuple(name for name in names if name not in special and name not in left_out)
    as_text, numbers = {*special, *settings.categorical}, set[str]()
    if settings.columns:
        features = tuple(column.name for column in settings.columns)
        if lacking := [name for name in features if name not in known or name in special]:
            raise DataError(f"{where}: no column {lacking[0]!r}, which the run has; {_there_are(names)}")
        as_text = {*special, *(column.name for column in settings.columns if column.categories is not None)}
        numbers = set(features) - as_text
    if not features:
        raise DataError(f"{where}: no column is left to learn from; {_there_are(names)}")
    return Roles(
        *(settings.target, client, settings.split, features),
        text=frozenset(as_text),
        numbers=frozenset(numbers),
        classes=settings.classes,
        declared=bool(settings.columns),
    )


def _there_are(names: Sequence[str]) -> str:
    shown = " ".join(", ".join(names[:_SHOWN]).split())[:400]  # a quoted name may have lines
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"the columns are {shown}{more}"


# --- from columns to samples ---


def _dataset(columns: Columns, roles: Roles, where: str, name: str = "") -> Dataset:
    _check_usable(columns, roles, where)
    features = [_feature(columns[feature], feature, roles, where) for feature in roles.features]
    x = np.stack([values for _, values in features], axis=1)
    if not len(x):
        raise DataError(f"{where}: no rows")
    table = TablePreprocessing(columns=tuple(column for column, _ in features))
    if not roles.target:
        part, one = (SplitArrays(rows, np.zeros(len(rows), np.int64)) for rows in (x, x[:1]))
        return replace(to_dataset(Decoded(part, one, ("",)), name or where), table=table)
    y, classes = _labels(columns[roles.target], roles, where)
    client, client_names = _owners(columns.get(roles.client), roles.client, where)
    if roles.split:
        is_test = _tests(columns[roles.split], roles.split, where)
        at = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    else:
        at = hold_out(y, client)
    train, test = (SplitArrays(x[i], y[i], None if client is None else client[i]) for i in at)
    found = to_dataset(Decoded(train, test, classes, client_names), name or where)
    return replace(found, table=_standardised(table, found.train.x), notes=_counting(columns, roles))


def _standardised(table: TablePreprocessing, x: torch.Tensor) -> TablePreprocessing:
    """By the training rows of the file; a run does it again by those that its clients have. Categories stay."""
    by_rows = merged(table, [column_sums(table, x)]).columns
    pairs = zip(table.columns, by_rows, strict=True)
    return TablePreprocessing(columns=tuple(own if own.categories is not None else new for own, new in pairs))


def _feature(values: Array | Categories, name: str, roles: Roles, where: str) -> tuple[Column, Array]:
    """What a column is, and its values as they are stored."""
    if isinstance(values, Categories):
        if name in roles.numbers:
            raise DataError(
                f"{where}: column {name!r} is numbers in this run, and one is {values.names[0][:40]!r}; leave it empty "
                "if the value is missing"
            )
        names = class_order(values.names)
        number = {category_: float(place) for place, category_ in enumerate(names)}
        new = np.array([*(number[category_] for category_ in values.names), np.nan])
        return Column(name=name, categories=tuple(names)), new[values.codes]  # -1 is the last
    if np.isinf(values).any():
        raise DataError(f"{where}: column {name!r} has a number that is not finite; leave it empty if it is not known")
    return Column(name=name), values


def _check_usable(columns: Columns, roles: Roles, where: str) -> None:
    """Refuse all columns at once that are neither numbers nor categories."""
    reasons = {name: reason for name in roles.features if (reason := unusable(name, columns[name], roles))}
    if reasons:
        listed = ", ".join(f"column {name!r} ({reason})" for name, reason in list(reasons.items())[:_SHOWN])
        raise DataError(
            f"{where}: neither numbers nor categories: {listed}; leave out what is not to be learnt from, "
            f"by --drop of 'fedstill columns', else: --set drop_columns={','.join(reasons)}"
        )


def _counting(columns: Columns, roles: Roles) -> tuple[str, ...]:
    """What to say of columns that may be ids: whole numbers, another one in every row."""
    found = []
    for name in roles.features if not roles.declared else ():
        values = columns[name]
        if isinstance(values, Categories) or len(values) < TOLD_APART or (values % 1).any():  # NaN counts as some
            continue
        if np.ptp(values) < 10 * len(values) and len(np.unique(values)) == len(values):
            found.append(
                f"column {name!r} is another whole number in every row; if it is an id, leave it out: "
                f"--set drop_columns={name}"
            )
    return tuple(found)


def _labels(values: Array | Categories, roles: Roles, where: str) -> tuple[Array, tuple[str, ...]]:
    assert isinstance(values, Categories)
    if empty := int((values.codes < 0).sum()):
        raise DataError(
            f"{where}: {empty:,} rows have no label in column {roles.target!r}; give them one, or leave them out"
        )
    numbers = floats(values.names)
    if numbers is not None:
        fractions = (numbers % 1 != 0).any()
        if len(numbers) > (_MOST_FRACTIONS if fractions else _MOST_LABELS):
            raise DataError(
                f"{where}: column {roles.target!r} has {len(numbers):,} different numbers: that is regression, and "
                "this is for classification only; make classes of them"
            )
    names = list(roles.classes) or class_order(values.names)
    if other := [name for name in values.names if name not in names]:
        raise DataError(
            f"{where}: the label {other[0][:40]!r} is none of the classes {', '.join(names[:_SHOWN])}; write it as one "
            f"of them in column {roles.target!r}, or leave such rows out"
        )
    if len(names) < 2:
        raise DataError(f"{where}: all labels are {names[0]!r}; two classes are the fewest to tell apart")
    number = {name: place for place, name in enumerate(names)}
    return np.array([number[name] for name in values.names], np.int64)[values.codes], tuple(names)


def _owners(values: Array | Categories | None, column: str, where: str) -> tuple[Array | None, tuple[str, ...]]:
    if values is None:
        return None, ()
    assert isinstance(values, Categories)
    if empty := int((values.codes < 0).sum()):
        raise DataError(f"{where}: {empty:,} rows have no client in column {column!r}")
    names = class_order(values.names)
    number = {name: place for place, name in enumerate(names)}
    return np.array([number[name] for name in values.names], np.int64)[values.codes], tuple(names)


def is_test(value: str) -> bool:
    """Whether a split column says that a row tests."""
    return _SPLITS.get(value.lower(), False)


def _tests(values: Array | Categories, column: str, where: str) -> Array:
    assert isinstance(values, Categories)
    if other := [name for name in values.names if name.lower() not in _SPLITS]:
        raise DataError(f"{where}: column {column!r} has {other[0][:40]!r}; train and test are what it may have")
    if (values.codes < 0).any():
        raise DataError(f"{where}: column {column!r} is empty in some rows; train and test are what it may have")
    found = np.array([_SPLITS[name.lower()] for name in values.names])[values.codes]
    if found.all() or not found.any():
        raise DataError(f"{where}: column {column!r} needs rows of both train and test")
    return np.asarray(found)
