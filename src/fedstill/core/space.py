"""Spaces of settings to search, as people write them: `lr=log:1e-3..1e-1`, `buffer=int:1..9`, `mu=0,0.01,0.1`."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill.core.errors import SettingError

_DIGITS = 4  # of a number that is drawn: more would only make tables hard to read
_MOST_WHOLE = 50  # whole numbers of a range that a grid goes through


@dataclass(frozen=True)
class Search:
    """Where a method's setting is searched if nothing else is said; stands in the setting's annotation."""

    space: str


@dataclass(frozen=True)
class Choices:
    """One of these values."""

    values: tuple[Any, ...]

    def grid(self, name: str) -> tuple[Any, ...]:
        return self.values

    @property
    def ends(self) -> tuple[Any, ...]:
        return self.values

    @property
    def log(self) -> bool:
        return False


@dataclass(frozen=True)
class Range:
    """A number from `low` to `high`; `log`: drawn evenly by its logarithm."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def grid(self, name: str) -> tuple[Any, ...]:
        if not self.whole or self.high - self.low >= _MOST_WHOLE:
            raise SettingError(f"space of {name}: a grid needs its values, such as {name}={self.low:g},{self.high:g}")
        return tuple(range(int(self.low), int(self.high) + 1))

    @property
    def ends(self) -> tuple[Any, ...]:
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)


Axis = Choices | Range
Space = dict[str, Axis]


def rounded(value: Any) -> Any:
    """A value that was drawn, with a few digits.

    >>> rounded(0.0123456), rounded(7), rounded("sgd")
    (0.01235, 7, 'sgd')
    """
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def parse_axis(name: str, given: Any) -> Axis:
    """A range or a list of values, from text or from Python.

    >>> parse_axis("lr", "log:1e-3..1e-1")
    Range(low=0.001, high=0.1, log=True, whole=False)
    >>> parse_axis("mu", "0,0.01,0.1")
    Choices(values=(0, 0.01, 0.1))
    """
    if isinstance(given, Choices | Range):
        return given
    if isinstance(given, str) and ".." in given:
        return _range(name, given)
    values = tuple(map(_value, given.split(","))) if isinstance(given, str) else given
    if not isinstance(values, Sequence) or not values or "" in values:
        raise _wrong(name, given)
    if any(list(values).count(value) > 1 for value in values):
        raise SettingError(f"space of {name}: a value stands there twice")
    if not all(isinstance(value, bool | int | float | str) for value in values):
        raise SettingError(f"space of {name}: {given!r:.80} has a value that is no number, text, true or false")
    return Choices(tuple(values))


def parse_space(words: Iterable[str]) -> dict[str, str]:
    """`name=space` words by name."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (name and equals and text):
            raise SettingError(f"--space {word}: write it as lr=log:1e-3..1e-1, buffer=int:1..9 or mu=0,0.01,0.1")
        if name in found:
            raise SettingError(f"--space {word}: {name} has a space already")
        found[name] = text
    return found


def combinations(space: Mapping[str, Axis]) -> list[dict[str, Any]]:
    """Every point of a grid.

    >>> combinations({"mu": Choices((0, 1)), "buffer": Range(1, 2, whole=True)})
    [{'mu': 0, 'buffer': 1}, {'mu': 0, 'buffer': 2}, {'mu': 1, 'buffer': 1}, {'mu': 1, 'buffer': 2}]
    """
    axes = {name: axis.grid(name) for name, axis in space.items()}
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _range(name: str, text: str) -> Range:
    kind, colon, ends = text.rpartition(":")
    if "..." in ends:  # 1...5 would be 1 to .5
        raise _wrong(name, text)
    try:
        low, high = (float(end) for end in ends.split(".."))
    except ValueError as error:
        raise _wrong(name, text) from error
    log, whole = kind in ("log", "logint"), kind in ("int", "logint")
    if (colon and not (log or whole)) or not low < high or not math.isfinite(high - low):
        raise _wrong(name, text)
    if log and low <= 0:
        raise SettingError(f"space of {name}: {text!r} is logarithmic and must begin above 0")
    if whole and (low % 1 or high % 1):
        raise SettingError(f"space of {name}: {text!r} is of whole numbers")
    return Range(low, high, log, whole)


def _wrong(name: str, given: Any) -> SettingError:
    return SettingError(
        f"space of {name}: {given!r:.80} is none; write log:1e-3..1e-1, 0.1..0.9, int:1..9 or values, 0,0.01,0.1"
    )


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text.strip()
