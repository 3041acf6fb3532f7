"""Errors that speak to the person who made the call."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedstillError(Exception):
    """Something the user can mend; the command line prints it as one line, without a traceback."""


class SettingError(FedstillError):
    """A setting has a value that is not allowed."""


class DataError(FedstillError):
    """Data that are missing, damaged, or cannot be divided as asked."""


def unknown(kind: str, name: str, known: Iterable[str]) -> SettingError:
    """The error for a name that is not in a fixed set, with the nearest names that are.

    >>> str(unknown("method", "fedprx", ["fedavg", "fedprox"]))
    "unknown method 'fedprx'; did you mean 'fedprox'?"
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = "did you mean " + " or ".join(map(repr, close)) + "?" if close else "known: " + ", ".join(known)
    return SettingError(f"unknown {kind} {name!r}; {hint}")


def in_one_line(error: BaseException) -> str:
    """What an error says, without its line breaks, and not more than a few hundred characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__
