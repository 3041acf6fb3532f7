"""What processes of ours do when they start."""

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


def keep_memory() -> None:
    """Have the allocator keep what training frees and asks for again in every step, instead of giving it back."""
    if sys.platform == "linux":
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
        with contextlib.suppress(OSError, AttributeError):  # other C libraries do otherwise
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(M_MMAP_THRESHOLD, 1 << 25)
            mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
