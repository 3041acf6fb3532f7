"""Whether the installed Flower has what is used of it beyond its public interfaces; asked before anything starts."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from fedstill.core.errors import FedstillError

TESTED = ("1.41", "1.42")  # also in pyproject.toml

Used = Mapping[Any, tuple[str, ...]]
"""The attributes that are used of some of Flower's modules and classes."""


def check(*modules: str) -> None:
    """FedstillError that names Flower's version and what it lacks, unless these modules of ours can be used with it.

    Each imports what it uses at its head, and says in `USED` which attributes it uses of that.
    """
    for name in modules:
        try:
            used: Used = importlib.import_module(name).USED
        except ImportError as error:
            raise _lacking(str(error)) from error
        for owner, attributes in used.items():
            for attribute in attributes:
                if not hasattr(owner, attribute):
                    raise _lacking(f"{owner.__name__} has no {attribute}")


def _lacking(what: str) -> FedstillError:
    version = importlib.metadata.version("flwr")
    return FedstillError(
        f"Flower {version} lacks what fedstill uses of it: {what}; tested are {' and '.join(TESTED)}: "
        f"pip install 'flwr=={TESTED[0]}.*'"
    )
