"""Rows with named columns, as they stand in a file: what a trained model is to predict of, with labels or without."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from fedstill.core.errors import DataError, in_one_line
from fedstill.data.formats import text

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
    read = {".parquet": _parquet, ".jsonl": _read_json}.get(_suffix(path), _read_separated)
    columns = read(path)
    if not columns or not next(iter(columns.values())):
        raise DataError(f"{path}: no rows")
    return columns


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _read_separated(path: Path) -> Columns:
    """In whatever encoding and with whatever separator training data may have."""
    names, rows = text.named_rows(path)
    if twice := next((name for name, times in Counter(names).items() if times > 1), None):
        raise DataError(f"{path}: two columns are called {twice!r}")
    columns: Columns = {name: [] for name in names}
    for line, row in rows:
        if len(row) != len(names):
            raise DataError(f"{path}, line {line}: {len(row)} fields, not {len(names)}")
        for name, value in zip(names, row, strict=True):
            columns[name].append(value)
    return columns


def _read_json(path: Path) -> Columns:
    """Objects may lack some of the columns."""
    rows = []
    for number, line in enumerate(text.lines(path), 1):
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
