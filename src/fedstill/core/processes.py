"""What every process that has a parent of ours does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys


def die_with_parent(parent: int) -> None:
    """Have the system end this process when its parent is killed, so that no orphan goes on writing."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
