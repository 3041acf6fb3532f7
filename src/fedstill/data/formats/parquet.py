"""Parquet files, which need pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedstill.core.errors import DataError, SettingError, in_one_line

SUFFIX = ".parquet"


def is_parquet(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """An open parquet file. Whatever the library raises about it, of many kinds, is one error."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise SettingError("parquet files need the pyarrow library: pip install 'fedstill[tables]'") from error
    try:
        with ParquetFile(path) as file:
            yield file
    except Exception as error:
        raise DataError(f"{path}: not a parquet file that can be read ({in_one_line(error)})") from error


def header(path: Path) -> list[str]:
    """The names of a file's columns."""
    with opened(path) as file:
        return [str(name) for name in file.schema_arrow.names]
