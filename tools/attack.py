"""What every attack of docs/security.md has: a name, what it once did, and a function that carries it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Outcome = tuple[bool, str]
"""Whether the defence withstood it, and what was seen."""


@dataclass(frozen=True)
class Attack:
    name: str
    before: str
    carry_out: Callable[[Path], Outcome]


ATTACKS: list[Attack] = []


def attack(name: str, before: str) -> Callable[[Callable[[Path], Outcome]], Callable[[Path], Outcome]]:
    """Make a function that carries out an attack a row of the table; `before`: what an earlier version did."""

    def add(carry_out: Callable[[Path], Outcome]) -> Callable[[Path], Outcome]:
        ATTACKS.append(Attack(name, before, carry_out))
        return carry_out

    return add
