"""The runs below a folder as the board shows them, read again only when their files have changed."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedstill.analysis.runs import find_runs, read_run
from fedstill.core.errors import FedstillError, SettingError
from fedstill.metrics.records import value_of
from fedstill.report.runs import RunData
from fedstill.running import files
from fedstill.running.lock import is_held

READ = (files.CONFIG, files.METRICS, files.SUMMARY, files.CLIENTS)  # what a run is read from
LOG_BYTES = 64_000  # from the end of a log
LOG_LINES = 300
Stamp = tuple[tuple[int, int] | None, ...]  # time and size of each of these files


@dataclass(frozen=True)
class Entry:
    """A run directory; `run` is None where it cannot be read, and `problem` says why."""

    name: str  # the path below the folder
    path: Path
    run: RunData | None
    problem: str = ""

    @property
    def state(self) -> str:
        if self.run is None:
            return "unreadable"
        if is_held(self.path):
            return "running"
        return "finished" if self.run.summary else "interrupted"

    def row(self) -> dict[str, Any]:
        """The run in a line."""
        return {"name": self.name, "state": self.state, "problem": self.problem, **self._numbers}

    @cached_property
    def _numbers(self) -> dict[str, Any]:
        """How far it is, its last evaluation, and what it has cost so far."""
        if self.run is None:
            return {}
        records, settings = self.run.records, self.run.settings
        scored = next((r for r in reversed(records) if value_of(r, "accuracy") is not None), None)
        return {
            "method": self.run.method,
            "data": Path(str(settings["data"])).name,
            "seed": self.run.seed,
            "round": records[-1]["round"] if records else 0,
            "rounds": value_of(settings, "rounds"),
            **{name: value_of(scored or {}, name) for name in ("accuracy", "amp", "fm", "wlp")},
            "bytes": sum((value_of(r, "bytes_down") or 0) + (value_of(r, "bytes_up") or 0) for r in records),
            "seconds": sum((value_of(r, "seconds") or 0) + (value_of(r, "eval_seconds") or 0) for r in records),
        }


class Runs:
    """All runs below a folder. A name that is not among those found there is unknown, whatever it points to."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._read: dict[Path, tuple[Stamp, Entry]] = {}
        self._lock = threading.Lock()  # requests are answered in threads

    def entries(self) -> dict[str, Entry]:
        """Every run by name, as it is now."""
        with self._lock:
            found = {path: self._entry(path) for path in find_runs(self.root)}
            self._read = {path: self._read[path] for path in found}
        return {entry.name: entry for entry in found.values()}

    def choose(self, names: Sequence[str]) -> list[Entry]:
        """The runs of these names; KeyError if there is one that is not there."""
        entries = self.entries()
        return [entries[name] for name in dict.fromkeys(names)]

    def _entry(self, path: Path) -> Entry:
        name = path.relative_to(self.root).as_posix()
        try:
            stamp = tuple(_stamp(path / file) for file in READ)
        except (SettingError, OSError) as error:
            entry = Entry(name, path, None, str(error))
            self._read[path] = ((), entry)
            return entry
        if path not in self._read or self._read[path][0] != stamp:
            self._read[path] = (stamp, _read_entry(name, path))
        return self._read[path][1]


def _stamp(file: Path) -> tuple[int, int] | None:
    """When a file changed and how long it is; None if there is none. A link could lead out of the folder."""
    try:
        status = file.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise SettingError(f"{file.name} is not a plain file")
    return status.st_mtime_ns, status.st_size


def _read_entry(name: str, path: Path) -> Entry:
    try:
        run = read_run(path)
        run.seed  # noqa: B018 - whether it is a number
    except (FedstillError, OSError, ValueError, TypeError) as error:  # also of files that nobody of us wrote
        return Entry(name, path, None, " ".join(str(error).split())[:300])
    return Entry(name, path, run)


def log_tail(path: Path) -> str:
    """The last lines of a run's log; empty if there is none, or if it is a link."""
    try:
        opened = os.open(path / files.LOG, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            return ""
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        lines = file.read(LOG_BYTES).decode("utf-8", errors="replace").splitlines()
    return "\n".join(lines[1 if size > LOG_BYTES else 0 :][-LOG_LINES:])
