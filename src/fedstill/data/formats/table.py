"""Tables with named columns: `.csv` and `.tsv` files, `.parquet` files, and DataFrames of pandas.

A column is numbers if all its values are; any other is categories. Of the columns that are not features, `target` is
the label, `client` who owns the row, `split` whether it trains or tests.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.core.errors import DataError, SettingError, in_one_line
from fedstill.data.dataset import Dataset
from fedstill.data.formats import text
from fedstill.data.formats.decoded import Array, Decoded, SplitArrays, hold_out, to_dataset
from fedstill.data.formats.labels import class_order
from fedstill.data.preprocessing import Column, TablePreprocessing, category, floats
from fedstill.data.statistics import LONGEST_CATEGORY, MOST_CATEGORIES, column_sums, merged

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
_ROWS = 50_000  # of a CSV file at a time
_MOST_LABELS = 1000  # that are numbers; more are measurements
_MOST_FRACTIONS = 20  # labels that are not whole
_SHOWN = 20  # names of columns in an error
_TOLD_APART = 10  # rows that all differ in a column, from which on that is no accident
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


@dataclass
class Categories:
    """A column of categories: for each row the number of its category, -1 where it is missing."""

    codes: Array
    names: list[str]


Columns = dict[str, Array | Categories]


def is_table(name: str) -> bool:
    """Whether a file may be a table.

    >>> is_table("patients.csv.gz"), is_table("patients.PARQUET"), is_table("patients.npz")
    (True, True, False)
    """
    return name.lower().endswith(SUFFIXES)


def from_frame(
    frame: Any,
    target: str,
    client: str = "",
    *,
    split: str = "",
    categorical: Sequence[str] = (),
    drop: Sequence[str] = (),
    name: str = "table",
) -> Dataset:
    """A dataset from a pandas DataFrame, or any mapping of columns: `target` is the label, `client` who owns a row.

    Numbers are standardised and categories one-hot encoded, by the training samples that clients get; numbers may be
    missing. `split` names a column of "train" and "test"; without it a fifth is held out. Whole numbers that stand
    for categories are named in `categorical`, columns to leave out in `drop`.

    >>> table = {"age": [50, 61, 58, 70, 44], "sex": list("fmfmf"), "ill": ["no", "yes", "yes", "yes", "no"]}
    >>> data = from_frame(table, target="ill")
    >>> data.classes, tuple(data.shape), data.input_shape
    (('no', 'yes'), (2,), (3,))
    """
    settings = TableSettings(target, client, split, tuple(categorical), tuple(drop))
    given = {str(column): frame[column] for column in getattr(frame, "columns", frame)}
    wanted = _roles(list(given), settings, name)
    return _dataset(_from_frame(given, wanted.text), wanted, name)


def read(path: Path, settings: TableSettings) -> Dataset:
    """The table in a file."""
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    wanted = _roles(header(path), settings, str(path))
    found = _from_parquet(path, wanted) if path.suffix.lower() == ".parquet" else _from_csv(path, wanted)
    return _dataset(found, wanted, str(path), path.name.split(".")[0])


def header(path: Path) -> list[str]:
    """The names of a file's columns."""
    if path.suffix.lower() == ".parquet":
        return [str(name) for name in _opened(path).schema_arrow.names]
    _, first = next(_numbered_rows(path, _separator(path)), (0, []))
    return [name.strip() for name in first]


# --- which column is what ---


@dataclass(frozen=True)
class _Roles:
    """The columns by what they are for."""

    target: str
    client: str
    split: str
    features: tuple[str, ...]
    text: frozenset[str]  # columns that are no numbers, whatever they look like
    numbers: frozenset[str]  # columns that must be
    classes: tuple[str, ...]
    declared: bool  # what a column is was decided elsewhere

    @property
    def all(self) -> list[str]:
        return [name for name in (self.target, self.client, self.split, *self.features) if name]


def _roles(names: Sequence[str], settings: TableSettings, where: str) -> _Roles:
    if twice := [name for name in names if list(names).count(name) > 1]:
        raise DataError(f"{where}: two columns are called {twice[0]!r}")
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
            if column not in names:
                raise SettingError(f"{where}: {setting} = {column!r} is no column; {_there_are(names)}")
    special = [name for name in (settings.target, client, settings.split) if name]
    if len(set(special)) < len(special) or set(special) & set(settings.drop):
        raise SettingError(f"{where}: target, client_column, split_column and drop_columns must be different columns")
    features = tuple(name for name in names if name not in special and name not in settings.drop)
    as_text, numbers = {*special, *settings.categorical}, set[str]()
    if settings.columns:
        features = tuple(column.name for column in settings.columns)
        if lacking := [name for name in features if name not in names or name in special]:
            raise DataError(f"{where}: no column {lacking[0]!r}, which the run has; {_there_are(names)}")
        as_text = {*special, *(column.name for column in settings.columns if column.categories is not None)}
        numbers = set(features) - as_text
    if not features:
        raise DataError(f"{where}: no column is left to learn from; {_there_are(names)}")
    return _Roles(
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


# --- files ---


def _from_csv(path: Path, roles: _Roles) -> Columns:
    as_text = set(roles.text)
    while True:
        try:
            return _parsed(path, roles, as_text)
        except _NotNumbers as found:  # a column whose first rows look like numbers
            as_text.add(found.column)


class _NotNumbers(Exception):
    def __init__(self, column: str) -> None:
        super().__init__(column)
        self.column = column


def _parsed(path: Path, roles: _Roles, as_text: set[str]) -> Columns:
    """The columns of a CSV file, a block of rows at a time: a whole file as strings would fill the memory."""
    separator = _separator(path)
    rows, names = _numbered_rows(path, separator), header(path)
    next(rows, None)
    place = {name: names.index(name) for name in roles.all}
    blocks: dict[str, list[Array]] = {name: [] for name in place}
    codes: dict[str, dict[str, int]] = {name: {} for name in as_text & place.keys()}
    while block := list(islice(rows, _ROWS)):
        if wrong := next(((line, row) for line, row in block if len(row) != len(names)), None):
            raise DataError(f"{path}, line {wrong[0]}: {len(wrong[1])} fields, not {len(names)}")
        cells = list(zip(*(row for _, row in block), strict=True))
        for name, column in place.items():
            values = cells[column]
            if name not in codes and (numbers := _numbers(values, decimal_comma=separator == ";")) is not None:
                blocks[name].append(numbers)
                continue
            if name in roles.numbers:
                wrong_value = next(v for v in values if _numbers([v], decimal_comma=separator == ";") is None)
                raise DataError(f"{path}: column {name!r} is numbers in this run, and one is {wrong_value[:40]!r}")
            if name not in codes and blocks[name]:
                raise _NotNumbers(name)
            blocks[name].append(_coded(values, codes.setdefault(name, {})))
            _check_categories(str(path), name, codes[name], roles)
    if not blocks[roles.all[0]]:
        raise DataError(f"{path}: no rows")
    found = {name: np.concatenate(parts) for name, parts in blocks.items()}
    return {name: Categories(array, list(codes[name])) if name in codes else array for name, array in found.items()}


def _numbers(values: Sequence[str], *, decimal_comma: bool) -> Array | None:
    found = floats(values)
    if found is None and decimal_comma:
        found = floats([value.replace(",", ".") for value in values])
    return found


def _coded(values: Iterable[Any], codes: dict[str, int]) -> Array:
    """The number of each value's category, in the order in which they first occur; -1 where it is missing."""
    listed = list(values)
    of_value = {}
    for value in dict.fromkeys(listed):
        name = category(value)
        of_value[value] = codes.setdefault(name, len(codes)) if name else -1
    return np.fromiter((of_value[value] for value in listed), np.int64, len(listed))


def _numbered_rows(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Rows with the lines they begin in, empty ones left out."""
    csv.field_size_limit(text.LONGEST)
    reader, line = csv.reader(text.lines(path), strict=True, delimiter=separator, skipinitialspace=True), 1
    try:
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: not CSV ({error})") from error


def _separator(path: Path) -> str:
    """What separates columns: a tab in .tsv files, else what the first line has most of."""
    if ".tsv" in path.name.lower():
        return "\t"
    first = next((line for line in text.lines(path) if line.strip()), "")
    return max((",", ";", "\t", "|"), key=first.count)


def _opened(path: Path) -> Any:
    try:
        from pyarrow import lib, parquet
    except ImportError as error:
        raise SettingError("parquet files need the pyarrow library: pip install 'fedstill[tables]'") from error
    try:
        return parquet.ParquetFile(path)
    except (lib.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a parquet file that can be read ({in_one_line(error)})") from error


def _from_parquet(path: Path, roles: _Roles) -> Columns:
    from pyarrow import lib, types

    try:
        table = _opened(path).read(columns=roles.all)
        found: dict[str, Any] = {}
        for name in roles.all:
            column = table.column(name)
            if types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            if types.is_decimal(column.type):
                column = column.cast("float64")
            found[name] = column.to_numpy()
    except (lib.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read ({in_one_line(error)})") from error
    return _from_frame(found, roles.text, str(path))


def _from_frame(given: Mapping[str, Any], as_text: Iterable[str], where: str = "table") -> Columns:
    found: Columns = {}
    for name, values in given.items():
        array = values.to_numpy() if hasattr(values, "to_numpy") else np.asarray(values)
        if array.ndim != 1:
            raise DataError(f"{where}: column {name!r} is no list of values")
        if array.dtype.kind in "mM":
            raise DataError(f"{where}: column {name!r} is dates or times; make numbers of them, or drop it")
        listed = array.tolist() if array.dtype.kind not in "iuf" or name in as_text else array
        numbers = None if name in as_text or array.dtype.kind == "b" else _plain_numbers(listed)
        if numbers is not None:
            found[name] = numbers
        else:
            codes: dict[str, int] = {}
            try:
                found[name] = Categories(_coded(listed, codes), list(codes))
            except TypeError as error:
                raise DataError(f"{where}: column {name!r} holds what is neither number nor text") from error
    return found


def _plain_numbers(values: Any) -> Array | None:
    """Values as numbers; None where they are text or truth values."""
    if not isinstance(values, np.ndarray) and any(isinstance(value, bool) for value in values):
        return None
    return floats(values)


# --- from columns to samples ---


def _dataset(columns: Columns, roles: _Roles, where: str, name: str = "") -> Dataset:
    features = [_feature(columns[feature], feature, roles, where) for feature in roles.features]
    x = np.stack([values for _, values in features], axis=1)
    table = TablePreprocessing(columns=tuple(column for column, _ in features))
    if not roles.target:
        part, one = (SplitArrays(rows, np.zeros(len(rows), np.int64)) for rows in (x, x[:1]))
        return replace(to_dataset(Decoded(part, one, ("",)), name or where), table=table)
    y, classes = _labels(columns[roles.target], roles, where)
    client, client_names = _owners(columns.get(roles.client), roles.client, where)
    if len({len(y), len(x)}) > 1:
        raise DataError(f"{where}: columns differ in length")
    if roles.split:
        is_test = _tests(columns[roles.split], roles.split, where)
        at = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    else:
        at = hold_out(y, client)
    train, test = (SplitArrays(x[i], y[i], None if client is None else client[i]) for i in at)
    found = to_dataset(Decoded(train, test, classes, client_names), name or where)
    return replace(found, table=_standardised(table, found.train.x))


def _standardised(table: TablePreprocessing, x: torch.Tensor) -> TablePreprocessing:
    """By the training rows of the file; a run does it again by those that its clients have. Categories stay."""
    by_rows = merged(table, [column_sums(table, x)]).columns
    pairs = zip(table.columns, by_rows, strict=True)
    return TablePreprocessing(columns=tuple(own if own.categories is not None else new for own, new in pairs))


def _feature(values: Array | Categories, name: str, roles: _Roles, where: str) -> tuple[Column, Array]:
    """What a column is, and its values as they are stored."""
    if isinstance(values, Categories):
        if name in roles.numbers:
            raise DataError(f"{where}: column {name!r} is numbers in this run, and {values.names[:1]} is none")
        _check_categories(where, name, values.names, roles)
        if not roles.declared and len(values.names) == (values.codes >= 0).sum() >= _TOLD_APART:
            raise _too_many(where, name, "another one in every row, as an id or a name would be")
        names = class_order(values.names)
        number = {category_: float(place) for place, category_ in enumerate(names)}
        new = np.array([*(number[category_] for category_ in values.names), np.nan])
        return Column(name=name, categories=tuple(names)), new[values.codes]  # -1 is the last
    if np.isinf(values).any():
        raise DataError(f"{where}: column {name!r} has a number that is not finite; leave it empty if it is not known")
    whole = not roles.declared and len(values) >= _TOLD_APART and not (values % 1).any()  # NaN counts as some
    if whole and len(np.unique(values)) == len(values):
        warnings.warn(
            f"{where}: column {name!r} is another whole number in every row; if it is an id, leave it out with "
            f"drop_columns = [{name!r}]",
            stacklevel=2,
        )
    return Column(name=name), values


def _check_categories(where: str, name: str, names: Iterable[str], roles: _Roles) -> None:
    listed = list(names)
    if name in roles.features and len(listed) > MOST_CATEGORIES:
        raise _too_many(where, name, f"more than {MOST_CATEGORIES} different ones")
    if name in roles.features and len(listed[-1] if listed else "") > LONGEST_CATEGORY:
        raise _too_many(where, name, f"some of more than {LONGEST_CATEGORY} characters")


def _too_many(where: str, name: str, what: str) -> DataError:
    return DataError(
        f"{where}: the values of column {name!r} are no categories, but {what}; leave the column out with "
        f"drop_columns = [{name!r}]"
    )


def _labels(values: Array | Categories, roles: _Roles, where: str) -> tuple[Array, tuple[str, ...]]:
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
        raise DataError(f"{where}: the label {other[0][:40]!r} is none of the classes {', '.join(names[:_SHOWN])}")
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
