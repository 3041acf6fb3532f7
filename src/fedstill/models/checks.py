"""Checks of option values, so that a wrong one is named before a network is built."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from fedstill.core.errors import SettingError


def whole(name: str, value: object, least: int) -> int:
    """The value, if it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise SettingError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def wholes(name: str, values: object, length: int | None = None) -> tuple[int, ...]:
    """The values as a tuple, if they are positive whole numbers and, where asked, so many of them."""
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != (length or len(values)):
        raise SettingError(f"{name} must be a list of {length or 'whole'} numbers, got {values!r}")
    return tuple(whole(f"each number of {name}", value, 1) for value in values)
