"""Fetching published files over the network, checked against their published checksums."""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import secrets
import shutil
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fedstill.core.errors import DataError

Progress: TypeAlias = Callable[[str, int, int], None]  # file name, bytes so far, bytes in all (0: not known)

TIMEOUT_SECONDS = 10
BLOCK = 1 << 20


@dataclass(frozen=True)
class Download:
    """A file at a public address. An archive is unpacked: those members whose name starts with `members`."""

    url: str
    md5: str
    members: str = ""

    @property
    def file_name(self) -> str:
        """The name the file is stored under."""
        return self.url.rsplit("/", 1)[-1]


_REFUSED: ContextVar[bool] = ContextVar("refused", default=False)


def allowed() -> bool:
    """Whether downloading is wanted: not with FEDSTILL_OFFLINE=1, nor while it is refused."""
    return not _REFUSED.get() and os.environ.get("FEDSTILL_OFFLINE", "") in ("", "0")


def why_not() -> str:
    """Why it is not allowed."""
    return (
        "a site fetches nothing that a server names, but with --download"
        if _REFUSED.get()
        else ("FEDSTILL_OFFLINE is set")
    )


@contextmanager
def refused() -> Iterator[None]:
    """Fetch nothing meanwhile: the names are somebody else's."""
    before = _REFUSED.set(True)
    try:
        yield
    finally:
        _REFUSED.reset(before)


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Let a library say nothing but errors meanwhile, such as of each attempt to reach the network."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def fetch(download: Download, folder: Path, progress: Progress | None = None) -> None:
    """Put a file, or what an archive holds, into a folder; all of it or, with a DataError, nothing."""
    temporary = folder / f".{download.file_name}.{secrets.token_hex(6)}.tmp"
    try:
        temporary.mkdir(parents=True)
        file = temporary / download.file_name
        _receive(download, file, progress)
        if file.name.endswith((".tar.gz", ".zip")):
            unpacked = temporary / "unpacked"
            _unpack(file, unpacked, download.members)
            for item in sorted(unpacked.iterdir()):
                _move(item, folder / item.name)
        else:
            file.replace(folder / file.name)
    except (OSError, EOFError, http.client.HTTPException, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(f"download of {download.url} to {folder} failed: {error or type(error).__name__}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _receive(download: Download, file: Path, progress: Progress | None) -> None:
    digest = hashlib.md5(usedforsecurity=False)  # the checksum that the publishers give
    with urllib.request.urlopen(download.url, timeout=TIMEOUT_SECONDS) as response, file.open("wb") as target:
        total, received = int(response.headers.get("Content-Length") or 0), 0
        while block := response.read(BLOCK):
            target.write(block)
            digest.update(block)
            received += len(block)
            if progress:
                progress(download.file_name, received, total)
    if digest.hexdigest() != download.md5:
        raise DataError(f"download of {download.url} failed: its MD5 is {digest.hexdigest()}, not {download.md5}")


def _unpack(archive: Path, folder: Path, members: str) -> None:
    if archive.name.endswith(".zip"):
        with zipfile.ZipFile(archive) as content:
            # extractall drops absolute paths and "..", so nothing lands outside the folder.
            content.extractall(folder, [name for name in content.namelist() if name.startswith(members)])
    else:
        with tarfile.open(archive) as content_tar:
            wanted = [item for item in content_tar.getmembers() if item.name.removeprefix("./").startswith(members)]
            content_tar.extractall(folder, wanted, filter="data")


def _move(source: Path, target: Path) -> None:
    """Move a file or folder; into a folder that is there already, item by item."""
    if source.is_dir() and target.is_dir():
        for item in sorted(source.iterdir()):
            _move(item, target / item.name)
    else:
        source.replace(target)
