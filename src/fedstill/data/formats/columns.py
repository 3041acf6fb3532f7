"""The columns of a table as a file or a DataFrame has them: numbers, or categories by their number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.errors import DataError
from fedstill.data.formats import parquet, text
from fedstill.data.formats.decoded import Array
from fedstill.data.preprocessing import category, floats
from fedstill.data.statistics import LONGEST_CATEGORY, MOST_CATEGORIES

TOLD_APART = 10  # rows that all differ in a column, from which on that is no accident
_ROWS = 50_000  # of a CSV file at a time
_DATE = re.compile(r"\d{1,4}([-./])\d{1,2}\1\d{1,4}([ T].*)?")


@dataclass
class Categories:
    """A column of categories: for each row the number of its category, -1 where it is missing."""

    codes: Array
    names: list[str]


Columns = dict[str, Array | Categories]


@dataclass(frozen=True)
class Roles:
    """The columns by what they are for."""

    target: str
    client: str
    split: str
    features: tuple[str, ...]
    text: frozenset[str]  # columns that are no numbers, whatever they look like
    numbers: frozenset[str]  # columns that must be
    classes: tuple[str, ...]
    declared: bool  # what a column is was decided elsewhere
    any_category: bool = False  # as of rows to predict: what no training row had counts as missing

    @property
    def all(self) -> list[str]:
        return [name for name in (self.target, self.client, self.split, *self.features) if name]


def header(path: Path) -> list[str]:
    """The names of a file's columns."""
    if parquet.is_parquet(path):
        return parquet.header(path)
    if text.is_json(path):
        return list(dict.fromkeys(name for _, row in text.json_objects(path) for name in row))
    _, first = next(text.csv_rows(path, text.separator_of(path), strip=True), (0, []))
    return [name.strip() or f"column {number}" for number, name in enumerate(first, 1)]  # pandas' index has no name


def read_columns(path: Path, roles: Roles) -> Columns:
    """The columns of a `.csv`, `.tsv` or `.jsonl` (each perhaps with `.gz`) or a `.parquet`."""
    if parquet.is_parquet(path):
        return _from_parquet(path, roles)
    return _from_json(path, roles) if text.is_json(path) else _from_csv(path, roles)


def _from_csv(path: Path, roles: Roles) -> Columns:
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


def _parsed(path: Path, roles: Roles, as_text: set[str]) -> Columns:
    """The columns of a CSV file, a block of rows at a time: a whole file as strings would fill the memory."""
    separator = text.separator_of(path)
    rows, names = text.csv_rows(path, separator, strip=True), header(path)
    next(rows, None)
    at = {name: number for number, name in enumerate(names)}
    place = {name: at[name] for name in roles.all}
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
                line = block[values.index(wrong_value)][0]
                raise DataError(
                    f"{path}, line {line}: column {name!r} is numbers in this run, and one is {wrong_value[:40]!r}; "
                    "leave the cell empty if the value is missing"
                )
            if name not in codes and blocks[name]:
                raise _NotNumbers(name)
            known = codes.setdefault(name, {})
            if name in roles.features and len(known) > MOST_CATEGORIES and not roles.any_category:
                values = ()  # it is `unusable`, and would fill the memory
            blocks[name].append(_coded(values, known))
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


def _from_json(path: Path, roles: Roles) -> Columns:
    """Objects may lack some of the columns."""
    rows = [row for _, row in text.json_objects(path)]
    return from_values({name: [row.get(name) for row in rows] for name in roles.all}, roles.text, str(path))


def _from_parquet(path: Path, roles: Roles) -> Columns:
    """The columns of a parquet file."""
    from pyarrow import types

    found: dict[str, Any] = {}
    with parquet.opened(path) as file:
        table = file.read(columns=roles.all)
        for name in roles.all:
            column = table.column(name)
            if types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            if types.is_decimal(column.type):
                column = column.cast("float64")
            found[name] = column.to_numpy()
    return from_values(found, roles.text, str(path))


def from_values(given: Mapping[str, Any], as_text: Iterable[str], where: str = "table") -> Columns:
    found: Columns = {}
    if len({len(values) for values in given.values()}) > 1:
        raise DataError(f"{where}: columns differ in length")
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


def unusable(name: str, values: Array | Categories, roles: Roles) -> str:
    """Why a column of features is neither numbers nor categories, in words; empty if it is."""
    if not isinstance(values, Categories):
        return ""
    if name not in roles.text and values.names and all(map(_DATE.fullmatch, values.names)):
        return "dates; make numbers of them, such as an age"
    if len(values.names) > MOST_CATEGORIES:
        return f"more than {MOST_CATEGORIES} different words"
    if any(len(word) > LONGEST_CATEGORY for word in values.names):
        return f"words of more than {LONGEST_CATEGORY} characters"
    if not roles.declared and len(values.names) == (values.codes >= 0).sum() >= TOLD_APART:
        return "another word in every row, as an id or a name would be"
    return ""
