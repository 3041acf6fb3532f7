"""Decoded datasets on disk: read once from their own files, then mapped into memory at every later start.

A copy is as private as the data: it is for its owner alone, and is deleted when it was not used for a while.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstill.core.errors import DataError
from fedstill.core.files import home_path, naming, read_json, write_json
from fedstill.core.owner import tighten
from fedstill.data.formats.decoded import Array, Decoded, SourceFile, SplitArrays

VERSION = 2  # of what is stored; a new number makes every older entry unused
ENDS = 65_536  # bytes looked at from each end of a file
LOOKED_INTO = 256  # files whose ends enter the key; of more files, so many spread evenly
STALE_SECONDS = 24 * 3600
EXPIRES_DAYS = 30  # without use


def cache_folder() -> Path:
    """Where entries are kept: FEDSTILL_CACHE, else ~/.cache/fedstill/decoded."""
    return home_path(os.environ.get("FEDSTILL_CACHE") or "~/.cache/fedstill/decoded")


def cached(
    loader: str, settings: object, root: Path, files: Sequence[SourceFile], build: Callable[[], Decoded]
) -> Decoded:
    """What `build` returns, from the cache if the files have not changed since it was stored with these settings."""
    entry = cache_folder() / f"{loader}-{content_key(loader, settings, root, files)}"
    stored = _read(entry)
    if stored is not None:
        return stored
    decoded = build()
    try:
        return _store(entry, decoded, str(root.resolve()))
    except OSError as error:
        warnings.warn(
            f"decoded data are not kept for the next start: {error}; FEDSTILL_CACHE can name another folder",
            stacklevel=3,
        )
        return decoded


def content_key(loader: str, settings: object, root: Path, files: Sequence[SourceFile]) -> str:
    """A key that changes when a file is added, removed, renamed or rewritten, or a setting (the image size) changes.

    Names, sizes and times of all files, and the ends of up to 256 of them: reading every byte would take as
    long as decoding.
    """
    digest = hashlib.sha256(repr((VERSION, loader, settings, len(files))).encode())
    prefix = f"{root}{os.sep}"
    names = [file.path.removeprefix(prefix) for file in files]
    digest.update("\0".join(names).encode("utf-8", "surrogateescape"))
    digest.update(np.array([(file.size, file.mtime_ns) for file in files], np.int64).tobytes())
    for index in np.unique(np.linspace(0, len(files) - 1, min(len(files), LOOKED_INTO)).astype(int)):
        digest.update(_ends(files[index].path))
    return digest.hexdigest()[:32]


def _ends(path: str | Path) -> bytes:
    """A hash of a file's first and last bytes."""
    try:
        with open(path, "rb") as file:
            head = file.read(ENDS)
            file.seek(max(len(head), os.fstat(file.fileno()).st_size - ENDS))
            return hashlib.sha256(head + file.read(ENDS)).digest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _store(entry: Path, decoded: Decoded, source: str) -> Decoded:
    """Write an entry under another name and rename it, so that nobody ever sees a part of one."""
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(entry.parent)
    temporary = entry.with_name(f".{entry.name}.{secrets.token_hex(6)}.tmp")
    try:
        temporary.mkdir(mode=0o700)
        checks: dict[str, Any] = {}
        for name, array in _arrays(decoded).items():
            path = temporary / f"{name}.npy"
            with naming(path):
                np.save(path, array, allow_pickle=False)
            tighten(path)
            checks[name] = _check(path)
        meta = {
            "version": VERSION,
            "source": source,
            "classes": decoded.classes,
            "client_names": decoded.client_names,
            "mean": decoded.mean,
            "std": decoded.std,
            "tokenizer": decoded.tokenizer,
            "original_size": decoded.original_size,
            "notes": decoded.notes,
            "arrays": checks,
        }
        write_json(temporary / "meta.json", meta)
        tighten(temporary / "meta.json")
        return _publish(temporary, entry) or decoded
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, entry: Path) -> Decoded | None:
    for _ in range(3):
        try:
            temporary.rename(entry)
        except OSError:
            # Either another process was faster, and its entry is as good, or a damaged one is in the way.
            stored = _read(entry)
            if stored is not None:
                return stored
            if not entry.exists():
                raise
            discarded = entry.with_name(f".{entry.name}.{secrets.token_hex(6)}.tmp")
            entry.rename(discarded)
            shutil.rmtree(discarded, ignore_errors=True)
        else:
            break
    return _read(entry)


def _sweep(folder: Path) -> None:
    """Remove what a killed process left behind, and what nobody uses any more."""
    for leftover in folder.glob(".*.tmp"):
        try:
            if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
        except FileNotFoundError:
            continue
    for entry in entries(folder):
        if time.time() - entry.used > EXPIRES_DAYS * 86_400:
            remove(entry)


class Entry(NamedTuple):
    """A copy: where it is, of what, how large, and when it was last used (seconds since 1970)."""

    path: Path
    source: str
    bytes: int
    used: float


def entries(folder: Path | None = None) -> list[Entry]:
    """Every copy there is, the least recently used first."""
    found = []
    for meta in (folder or cache_folder()).glob("*/meta.json"):
        with suppress(OSError, DataError, AttributeError):  # one that is damaged is made anew when it is needed
            source = str(read_json(meta).get("source", "not recorded"))
            size = sum(file.stat().st_size for file in meta.parent.iterdir())
            found.append(Entry(meta.parent, source, size, meta.stat().st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def remove(entry: Entry) -> None:
    """Delete a copy. A process that has it mapped keeps what it has."""
    shutil.rmtree(entry.path, ignore_errors=True)


def _use(entry: Path) -> None:
    """Note that a copy is used, and take from others what an older version let them do with it."""
    with suppress(OSError):
        os.utime(entry / "meta.json")
        tighten(entry)


def _arrays(decoded: Decoded) -> dict[str, Array]:
    parts = {"train": decoded.train, "test": decoded.test}
    arrays = {f"{name}_{key}": getattr(part, key) for name, part in parts.items() for key in ("x", "y", "client")}
    return {name: array for name, array in arrays.items() if array is not None}


def _read(entry: Path) -> Decoded | None:
    """A stored entry with its samples mapped, not read; None if there is none or it is damaged."""
    try:
        meta = read_json(entry / "meta.json")
        _use(entry)
        arrays = {}
        for name, check in meta["arrays"].items():
            path = entry / f"{name}.npy"
            if _check(path) != check:
                return None
            # Copy on write: PyTorch wants writable memory, and nothing written may reach the file.
            arrays[name] = np.load(path, mmap_mode="c" if name.endswith("_x") else None, allow_pickle=False)
        train, test = (
            SplitArrays(arrays[f"{name}_x"], arrays[f"{name}_y"], arrays.get(f"{name}_client"))
            for name in ("train", "test")
        )
        return Decoded(
            train,
            test,
            classes=tuple(meta["classes"]),
            client_names=tuple(meta["client_names"]),
            mean=tuple(meta["mean"]),
            std=tuple(meta["std"]),
            tokenizer=meta["tokenizer"],
            original_size=meta["original_size"],
            notes=tuple(meta["notes"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, DataError):
        return None


def _check(path: Path) -> list[int]:
    """Size and checksum of the ends: enough to notice a file that was cut or written only in part."""
    return [path.stat().st_size, zlib.crc32(_ends(path))]
