"""Files that are either there whole or not there at all."""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Have an error of the system name what was being written: `open` says it, `write` and `fsync` do not."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a library's own words, which a file name would hide
            raise OSError(errno.EIO, str(error), os.fspath(path)) from error
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def write_atomic(path: str | os.PathLike[str], data: bytes | str, *, durable: bool = True) -> None:
    """Write a file so that a reader, or a crash, finds the old content or the new and never a part.

    What is not `durable` yet survives the end of the process but not that of the machine, until `sync`.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "note.txt"
    >>> write_atomic(target, "whole"); target.read_text()
    'whole'
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with naming(path), temporary.open("xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):  # the first error is the one to tell
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)  # the temporary name means nothing to anybody
        raise
    if durable:
        sync(path.parent)  # without it a power cut may undo the rename


def sync(path: str | os.PathLike[str]) -> None:
    """Have a file's content, or a folder's entries, on disk when this returns."""
    opened = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(opened)
    finally:
        os.close(opened)


def read_json(path: str | os.PathLike[str]) -> Any:
    """The value a JSON file holds."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write a value as readable JSON, atomically; NaN and infinity, which JSON lacks, are refused."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
