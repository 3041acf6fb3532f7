"""Methods by name. Modifiers are joined to a method by `+`: `fedprox+t1`."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fedstill.core import custom
from fedstill.core.errors import SettingError, unknown
from fedstill.methods.base import Method
from fedstill.methods.modifier import Modifier

_METHODS = {
    "fedavg": "fedavg:FedAvg",
    "fedprox": "fedprox:FedProx",
    "fedgkd": "fedgkd:FedGKD",
    "fedgkd-vote": "fedgkd_vote:FedGKDVote",
    "fedgkd-plus": "fedgkd_plus:FedGKDPlus",
    "fedkf": "fedkf:FedKF",
    "moon": "moon:MOON",
    "feddistill": "feddistill:FedDistill",
    "feddistill-plus": "feddistill:FedDistillPlus",
    "qffl": "qffl:QFFL",
    "fedmgda-plus": "fedmgda_plus:FedMGDAPlus",
    "scaffold": "scaffold:SCAFFOLD",
    "fednova": "fednova:FedNova",
    "feddyn": "feddyn:FedDyn",
}
_MODIFIERS = {"t1": "t1:T1"}


def names() -> list[str]:
    """Every method there is."""
    return list(_METHODS)


def modifiers() -> list[str]:
    """Every modifier there is."""
    return list(_MODIFIERS)


def find(name: str) -> list[type[Method]]:
    """The classes that a name stands for: a method, by its id or as `file.py:Class`, and its modifiers."""
    first, *others = [name] if custom.is_reference(name) and "+" not in name.rpartition(":")[2] else _split(name)
    return [_method(first), *(_import(_MODIFIERS, "modifier", other) for other in others)]


def _split(name: str) -> list[str]:
    """`a+b+c` as its parts; a `+` in the path of a file does not count."""
    file, colon, last = name.rpartition(":")
    first, *others = last.split("+")
    return [file + colon + first, *others]


def _method(name: str) -> type[Method]:
    if not custom.is_reference(name):
        return _import(_METHODS, "method", name)
    found = custom.load(name)
    if not (isinstance(found, type) and issubclass(found, Method) and dataclasses.is_dataclass(found)):
        raise SettingError(f"{name} is not a method: derive a @dataclass(frozen=True) from fedstill.FedAvg")
    return found


def _import(known: dict[str, str], kind: str, name: str) -> type[Method]:
    if name not in known:
        raise unknown(kind, name, known)
    module, _, cls = known[name].partition(":")
    loaded: type[Method] = getattr(importlib.import_module(f"fedstill.methods.{module}"), cls)
    return loaded


@dataclasses.dataclass(frozen=True)
class HyperParameter:
    """A setting of a method, under the name users write (`lambda` for the field `lambda_`)."""

    name: str
    field: str
    default: Any
    meaning: str


def hyper_parameters(name: str) -> list[HyperParameter]:
    """The settings of a method and its modifiers."""
    return [parameter for part in find(name) for parameter in _own(part)]


def _own(method: type[Method]) -> list[HyperParameter]:
    hints = get_type_hints(method, include_extras=True)
    found = []
    for field in dataclasses.fields(method):
        if field.name == "inner":
            continue
        notes = [m for m in getattr(hints[field.name], "__metadata__", ()) if isinstance(m, str)]
        found.append(HyperParameter(field.name.rstrip("_"), field.name, field.default, notes[0] if notes else ""))
    return found


def make(name: str, settings: dict[str, Any] | None = None) -> Method:
    """A method with its settings checked.

    >>> make("fedprox", {"mu": 0.1})
    FedProx(mu=0.1)
    """
    parts, settings = find(name), settings or {}
    known = [parameter.name for part in parts for parameter in _own(part)]
    for key in settings:
        if key not in known:
            raise (
                unknown(f"setting of {name!r}", key, known)
                if known
                else SettingError(f"method {name!r} has no setting {key!r}: it has none of its own")
            )
    method: Method | None = None
    for part in parts:
        given = {p.field: settings[p.name] for p in _own(part) if p.name in settings}
        try:
            made: Method = TypeAdapter(part).validate_python(given)
        except ValidationError as error:
            raise SettingError(explain(error)) from error
        method = made if method is None else dataclasses.replace(made, inner=method)  # type: ignore[call-arg]
    assert method is not None
    return method


def explain(error: ValidationError) -> str:
    """A validation error as one line: each setting, its value, what is allowed."""
    lines = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"]).rstrip("_")
        text = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        lines.append(f"{where} = {problem['input']!r}: {text}" if where else text)
    return "; ".join(lines)


def settings_of(method: Method) -> dict[str, Any]:
    """All settings of a method and its modifiers, under the names users write."""
    inner = settings_of(method.inner) if isinstance(method, Modifier) else {}
    return inner | {p.name: getattr(method, p.field) for p in _own(type(method))}
