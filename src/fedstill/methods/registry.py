"""Methods by name."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fedstill.core import custom
from fedstill.core.errors import SettingError, unknown
from fedstill.methods.base import Method

_METHODS = {
    "fedavg": "fedavg:FedAvg",
    "fedprox": "fedprox:FedProx",
}


def names() -> list[str]:
    """Every method there is."""
    return list(_METHODS)


def find(name: str) -> type[Method]:
    """The class of a method, by its id or as `file.py:Class`."""
    if custom.is_reference(name):
        found = custom.load(name)
        if not (isinstance(found, type) and issubclass(found, Method) and dataclasses.is_dataclass(found)):
            raise SettingError(f"{name} is not a method: derive a @dataclass(frozen=True) from fedstill.FedAvg")
        return found
    if name not in _METHODS:
        raise unknown("method", name, _METHODS)
    module, _, cls = _METHODS[name].partition(":")
    loaded: type[Method] = getattr(importlib.import_module(f"fedstill.methods.{module}"), cls)
    return loaded


@dataclasses.dataclass(frozen=True)
class HyperParameter:
    """A setting of a method."""

    name: str
    default: Any
    meaning: str


def hyper_parameters(method: type[Method]) -> list[HyperParameter]:
    """The settings of a method, under the names users write (`lambda` for the field `lambda_`)."""
    hints = get_type_hints(method, include_extras=True)
    found = []
    for field in dataclasses.fields(method):
        notes = [m for m in getattr(hints[field.name], "__metadata__", ()) if isinstance(m, str)]
        found.append(HyperParameter(field.name.rstrip("_"), field.default, notes[0] if notes else ""))
    return found


def make(name: str, settings: dict[str, Any] | None = None) -> Method:
    """A method with its settings checked.

    >>> make("fedprox", {"mu": 0.1})
    FedProx(mu=0.1)
    """
    method = find(name)
    fields = {f.name.rstrip("_"): f.name for f in dataclasses.fields(method)}
    given = {}
    for key, value in (settings or {}).items():
        if key not in fields:
            if not fields:
                raise SettingError(f"method {name!r} has no setting {key!r}: it has none of its own")
            raise unknown(f"setting of {name!r}", key, fields)
        given[fields[key]] = value
    try:
        return TypeAdapter(method).validate_python(given)
    except ValidationError as error:
        raise SettingError(explain(error)) from error


def explain(error: ValidationError) -> str:
    """A validation error as one line: each setting, its value, what is allowed."""
    lines = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"]).rstrip("_")
        text = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        lines.append(f"{where} = {problem['input']!r}: {text}" if where else text)
    return "; ".join(lines)


def settings_of(method: Method) -> dict[str, Any]:
    """All settings of a method, under the names users write."""
    return {f.name.rstrip("_"): getattr(method, f.name) for f in dataclasses.fields(method)}
