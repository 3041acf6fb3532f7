"""Files that are either there whole or not there at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedstill.core.errors import DataError


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


def home_path(name: str | os.PathLike[str]) -> Path:
    """A path whose `~` is the home folder; where there is no such user, it stays as it is, as in a shell.

    >>> home_path("~nobody-at-all/x")
    PosixPath('~nobody-at-all/x')
    """
    return Path(os.path.expanduser(name))


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
        with suppress(OSError):  # the first error is the one to report
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
    """The value a JSON file holds; DataError if it holds none."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write a value as readable JSON, atomically; NaN and infinity, which JSON lacks, are refused."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_sealed_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object that carries its digest, for `read_sealed_json`."""
    write_json(path, value | {"sha256": _seal_of(value)})


def read_sealed_json(path: Path, *, earlier: bool = False) -> dict[str, Any]:
    """The object that was written; DataError if the file is damaged. `earlier`: by a version that wrote no digests."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise DataError(f"{path} is damaged: it holds no JSON object")
    digest = value.pop("sha256", None)
    if digest != _seal_of(value) and not (earlier and digest is None):
        problem = "has lost its digest" if digest is None else "is not what was written: its digest does not fit"
        raise DataError(f"{path} {problem}; put it back from a copy")
    return value


def _seal_of(value: dict[str, Any]) -> str:
    return sha256(json.dumps({k: v for k, v in value.items() if k != "sha256"}, sort_keys=True).encode())


def sha256(data: bytes) -> str:
    """The digest of some bytes, as text."""
    return hashlib.sha256(data).hexdigest()


def check_file(path: Path, digest: str) -> bytes:
    """The content of a file that must have this digest; DataError if it has not, or is not there."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    if sha256(data) != digest:
        raise DataError(f"{path} is not what was written: its digest does not fit")
    return data


class GrowingFile:
    """A file that only grows, and the digest of what was written to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = 0
        self._hash: Any = None  # of all bytes, once it is known

    def append(self, data: bytes) -> None:
        """More bytes, on disk after `sync`."""
        self._load()
        with naming(self.path), self.path.open("ab") as file:
            file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def mark(self) -> dict[str, Any]:
        """What `check` compares the file with, however it has grown since."""
        self._load()
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}

    def check(self, mark: dict[str, Any]) -> bytes:
        """The bytes that were there at a mark; DataError if they are not there now."""
        data = self._read()[: mark["bytes"]]
        if len(data) < mark["bytes"]:
            found = f"cut off after {len(data)} of {mark['bytes']} bytes" if self.path.exists() else "missing"
            raise DataError(f"{self.path} is {found}")
        if sha256(data) != mark["sha256"]:
            raise DataError(f"{self.path} is not what was written: its digest does not fit")
        return data

    def replace(self, data: bytes) -> None:
        """Have this content, and no other."""
        if not self.path.exists() or self._read() != data:
            write_atomic(self.path, data)
        self._size, self._hash = len(data), hashlib.sha256(data)

    def forget(self) -> None:
        """The file is another now."""
        self._size, self._hash = 0, None

    def _load(self) -> None:
        if self._hash is None:
            data = self._read()
            self._size, self._hash = len(data), hashlib.sha256(data)

    def _read(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""
