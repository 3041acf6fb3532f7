"""What the user is told when something stops."""

from __future__ import annotations

import signal
from pathlib import Path

from fedstill.core.errors import FedstillError, described, users_line_in

TERMINATED = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM; ends what runs in the same way as Ctrl-C."""


class Halted(FedstillError):
    """A run stopped under way."""

    def __init__(self, reason: BaseException, path: Path, again: str = "") -> None:
        stopped = isinstance(reason, KeyboardInterrupt)
        text = "stopped" if stopped else one_line(reason)
        if isinstance(reason, OSError) and not reason.filename:
            text = f"{path}: {text}"
        ours = isinstance(reason, FedstillError | OSError | KeyboardInterrupt)
        if not ours or "\n" in str(reason):
            text += f" (the traceback is in {path / 'log.txt'})"
        super().__init__(text)
        self.hint = f"what is done is kept; continue with: {again or f'fedstill resume {path}'}"
        self.code = TERMINATED if isinstance(reason, Terminated) else 130 if stopped else 2


def one_line(error: BaseException) -> str:
    """An error as one line. Of a traceback that came from a worker, its first and its last line."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    text = str(error) if isinstance(error, FedstillError) else described(error)
    lines = text.strip().splitlines() or [type(error).__name__]
    if len(lines) == 1:
        return lines[0]
    place = users_line_in(text)
    return f"{lines[0].rstrip(':')}: {lines[-1].strip()}" + (f" ({place})" if place else "")
