"""Rows with named columns, as they stand in a file: what a trained model is to predict of, with labels or without."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedstill.core.errors import DataError, in_one_line

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
Columns = dict[str, list[Any]]


def is_rows(path: Path) -> bool:
    """Whether a file holds rows.

    >>> is_rows(Path("a.CSV.gz")), is_rows(Path("a.npz"))
    (True, False)
    """
    return _suffix(path) in SUFFIXES


def read_columns(path: Path) -> Columns:
    """The columns of a `.csv`, `.tsv` or `.jsonl` (each perhaps with `.gz`) or a `.parquet`, by name."""
    try:
        if _suffix(path) == ".parquet":
            columns = _parquet(path)
        else:
            opened: Any = gzip.open if path.suffix.lower() == ".gz" else open
            with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
                columns = _jsonl(file, path) if _suffix(path) == ".jsonl" else _separated(file, path)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise DataError(f"{path}: cannot be read ({in_one_line(error)})") from error
    if not columns or not next(iter(columns.values())):
        raise DataError(f"{path}: no rows")
    return columns


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _separated(lines: Iterable[str], path: Path) -> Columns:
    """The first line names the columns; they are separated by tabs in a .tsv, else by commas or semicolons."""
    text = iter(lines)
    first = next(text, "")
    marks = "\t" if _suffix(path) == ".tsv" else ",;\t"
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(_chain(first, text), delimiter=max(marks, key=first.count), strict=True)
    header = [name.strip() for name in next(reader, [])]
    if twice := next((name for name in header if header.count(name) > 1), None):
        raise DataError(f"{path}: two columns are called {twice!r}")
    columns: Columns = {name: [] for name in header}
    for row in reader:
        if row and len(row) != len(header):
            raise DataError(f"{path}, line {reader.line_num}: {len(row)} fields, not {len(header)}")
        for name, value in zip(header, row, strict=False):
            columns[name].append(value)
    return columns


def _chain(first: str, rest: Iterable[str]) -> Iterable[str]:
    yield first
    yield from rest


def _jsonl(lines: Iterable[str], path: Path) -> Columns:
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: no JSON ({error})") from error
        if not isinstance(rows[-1], dict):
            raise DataError(f"{path}, line {number}: no JSON object, {{…}}")
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _parquet(path: Path) -> Columns:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(f"{path}: reading .parquet needs pyarrow: pip install pyarrow") from error
    try:
        table = parquet.read_table(path)
    except ArrowException as error:
        raise DataError(f"{path}: damaged, or not Parquet ({in_one_line(error)})") from error
    return {name: table[name].to_pylist() for name in table.column_names}
