"""Files and folders that are for their owner alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedstill.core.errors import SettingError


def private_folder(path: Path) -> None:
    """A folder that its owner alone may enter, made or tightened."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    tighten(path)


def tighten(path: Path) -> None:
    """Take from others what they may do with a file or folder of ours."""
    status = path.stat()
    if status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(stat.S_IMODE(status.st_mode) & 0o700)


def check_private(path: Path) -> None:
    """Refuse a secret that others than its owner may read or change."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise SettingError(
            f"the key {path} can be read or changed by others (mode {mode:04o}); run 'chmod 600 {path}', and make "
            "another key if somebody may have copied it"
        )


@contextmanager
def owner_only() -> Iterator[None]:
    """New files and folders are for their owner alone meanwhile, in the whole process."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
