"""Errors that speak to the person who made the call."""

from __future__ import annotations

import difflib
import importlib.metadata
import itertools
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

_PACKAGE = str(Path(__file__).parents[1])
ENTRY_POINTS = ("fedstill.methods", "fedstill.models", "fedstill.datasets")
_PYTHON = sysconfig.get_path("stdlib")
_KIND = re.compile(r"\[|^(constrained-)?(int|float|str|bool)$")  # what pydantic calls the alternatives of a type
_INSTALLED = {"site-packages", "dist-packages"}


class FedstillError(Exception):
    """Something the user can mend; the command line prints it as one line, without a traceback."""


class SettingError(FedstillError):
    """A setting has a value that is not allowed."""


class DataError(FedstillError):
    """Data that are missing, damaged, or cannot be divided as asked."""


class Diverged(FedstillError):
    """A model is no longer finite, by the settings it was trained with."""


def unknown(kind: str, name: str, known: Iterable[str]) -> SettingError:
    """The error for a name that is not in a fixed set, with the nearest names that are.

    >>> str(unknown("method", "fedprx", ["fedavg", "fedprox"]))
    "unknown method 'fedprx'; did you mean 'fedprox'?"
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = "did you mean " + " or ".join(map(repr, close)) + "?" if close else "known: " + ", ".join(known)
    return SettingError(f"unknown {kind} {name!r}; {hint}")


def explain(error: ValidationError) -> str:
    """A validation error as one line: each setting, its value, what is allowed."""
    lines = []
    for problem in error.errors():
        parts = [str(part) for part in problem["loc"] if not _KIND.search(str(part))]
        where = ".".join(parts).rstrip("_")
        text = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        lines.append(f"{where} = {problem['input']!r}: {text}" if where else text)
    return "; ".join(lines)


def in_one_line(error: BaseException) -> str:
    """What an error says, without its line breaks, and not more than a few hundred characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def described(error: BaseException) -> str:
    """An error of somebody else's code in one line: its kind, its text, and the line of that code it came from."""
    if isinstance(error, FedstillError):
        return in_one_line(error)
    text = f"{type(error).__name__}: {in_one_line(error)}" if str(error).strip() else type(error).__name__
    return text + (f" ({place})" if (place := users_line(error)) else "")


def users_line(error: BaseException) -> str:
    """The innermost line of the user's code, or of a package that offers something to fedstill: `file.py, line 3`."""
    return _users_line((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__))


def users_line_in(text: str) -> str:
    """The same of a traceback as text, such as a worker sends."""
    return _users_line(re.findall(r'File "([^"]+)", line (\d+)', text))


def _users_line(frames: Iterable[tuple[str, int | str | None]]) -> str:
    for file, line in reversed(list(frames)):
        if not file.startswith((_PACKAGE, "<")) and not _is_library(Path(file)):
            return f"{file}, line {line}"
    return ""


def _is_library(file: Path) -> bool:
    """Whether a file is Python's own, or of an installed package that offers no methods, networks or datasets."""
    for place in _INSTALLED & set(file.parts):
        package = file.parts[file.parts.index(place) + 1].removesuffix(".py")
        points = itertools.chain(*(importlib.metadata.entry_points(group=group) for group in ENTRY_POINTS))
        return package not in {point.module.partition(".")[0] for point in points}
    return str(file).startswith(_PYTHON)
