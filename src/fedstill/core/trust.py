"""Whether code that a run directory names is run: `resume`, `samples`, `figure` and others run its `file.py`.

Whoever made the directory chose the file. So a directory remembers what each file held when its owner began the run;
if that has changed, or the directory is somebody else's, its reader has to confirm first.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fedstill.core import custom
from fedstill.core.errors import SettingError
from fedstill.core.files import read_json, write_json

CODE = "code.json"
NAMED = ("method", "model", "data", "proxy")  # settings that may name a file with code; metrics may as well
confirm: ContextVar[Callable[[str], bool]] = ContextVar("confirm", default=lambda question: False)
"""Answers questions about consent; nobody's is assumed."""


def files_of(settings: Mapping[str, Any]) -> list[Path]:
    """The files with code that settings name."""

    def tables(name: str, key: str) -> list[Any]:
        found = settings.get(name, [])
        return [table.get(key) for table in found if isinstance(table, Mapping)] if isinstance(found, list) else []

    named = [settings.get(name) for name in NAMED]
    for name in ("metrics", "models"):
        named += found if isinstance(found := settings.get(name, []), list) else []
    named += [*tables("region", "method"), *tables("group", "model")]
    return list(dict.fromkeys(file for name in named if isinstance(name, str) for file in custom.files(name)))


def record(directory: Path, settings: Mapping[str, Any]) -> None:
    """Write down what each file holds now."""
    if files := files_of(settings):
        write_json(directory / CODE, {str(file): _digest(file) for file in files})
    else:
        (directory / CODE).unlink(missing_ok=True)  # of a run that was replaced


def check(directory: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to run code that a run directory names, unless it is as it was, and ours; or somebody agrees."""
    files = files_of(settings)
    if not files:
        return
    digests = read_json(directory / CODE) if (directory / CODE).is_file() else {}
    doubts = {}
    for file in files:
        if directory.stat().st_uid != os.getuid():
            doubts[file] = "the directory belongs to another user"
        elif str(file) not in digests:
            doubts[file] = "the directory does not say what the file held"
        elif digests[str(file)] != _digest(file):
            doubts[file] = "the file has changed, or moved, since the run began"
    if not doubts:
        return
    named = "; ".join(f"{file} ({why})" for file, why in doubts.items())
    text = f"{directory} names code that would be run: {named}"
    if not confirm.get()(text):
        raise SettingError(f"{text}; read it, and if you trust it, say so with --trust-code")


def changed(directory: Path, settings: Mapping[str, Any]) -> list[Path]:
    """Files of these settings that held something else when the run in a directory began."""
    digests = read_json(directory / CODE) if (directory / CODE).is_file() else {}
    return [file for file in files_of(settings) if digests.get(str(file), _digest(file)) != _digest(file)]


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
