"""The lock of a run directory: one process at a time may write there."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

from fedstill.core.errors import FedstillError
from fedstill.running import files

log = logging.getLogger(__name__)

LOCK = f"{files.CHECKPOINTS}/lock"
_ATTEMPTS = 3


def take(path: Path) -> int:
    """Hold a run directory until this process ends, however it ends, or closes what this returns."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    for attempt in range(_ATTEMPTS):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if attempt < _ATTEMPTS - 1:
                time.sleep(0.05)  # somebody may only be looking: `is_held`
                continue
            os.close(lock)
            raise FedstillError(f"{path} is in use by another process") from error
        except OSError as error:  # some network file systems have no locks
            log.warning("%s is not protected against a second process: %s", path, error)
        break
    return lock


def is_held(path: Path) -> bool:
    """Whether a process holds the run directory. Changes nothing."""
    try:
        lock = os.open(path / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system
        return False
    finally:
        os.close(lock)
    return False
