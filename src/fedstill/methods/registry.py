"""Methods by name. Modifiers are composed with a method by `+`: `fedprox+t1`."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from fedstill.core import custom
from fedstill.core.errors import SettingError, explain, unknown
from fedstill.core.space import Search
from fedstill.methods.base import Method
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.modifier import Modifier

_METHODS = {
    "fedavg": "fedavg:FedAvg",
    "fedprox": "fedprox:FedProx",
    "fedgkd": "fedgkd:FedGKD",
    "fedgkd-vote": "fedgkd_vote:FedGKDVote",
    "fedgkd-plus": "fedgkd_plus:FedGKDPlus",
    "fedkf": "fedkf:FedKF",
    "moon": "moon:MOON",
    "local": "local:Local",
    "fedproto": "fedproto:FedProto",
    "fedtgp": "fedtgp:FedTGP",
    "fml": "fml:FML",
    "fedkd": "fedkd:FedKD",
    "lg-fedavg": "lg_fedavg:LGFedAvg",
    "feddistill": "feddistill:FedDistill",
    "feddistill-plus": "feddistill:FedDistillPlus",
    "qffl": "qffl:QFFL",
    "fedmgda-plus": "fedmgda_plus:FedMGDAPlus",
    "scaffold": "scaffold:SCAFFOLD",
    "fednova": "fednova:FedNova",
    "feddyn": "feddyn:FedDyn",
    "feddf": "feddf:FedDF",
    "dafkd": "dafkd:DaFKD",
    "fedhyb": "fedhyb:FedHyb",
    "fedgen": "fedgen:FedGen",
    "fedftg": "fedftg:FedFTG",
    "fedbe": "fedbe:FedBE",
    "fedmd": "fedmd:FedMD",
    "fedhkd": "fedhkd:FedHKD",
    "creff": "creff:CReFF",
    "lkd": "lkd:LKD",
    "mtkd": "lkd:MTKD",
    "f2l": "lkd:F2L",
}
_MODIFIERS = {
    "t1": "t1:T1",
    "ccvr": "ccvr:CCVR",
    "dp": "dp:DP",
    "dp-sgd": "dp_sgd:DPSGD",
    "votes": "votes:Votes",
    "compress": "compress:Compress",
    "median": "robust:Median",
    "trimmed-mean": "robust:TrimmedMean",
    "norm-clip": "robust:NormClip",
    "krum": "robust:Krum",
    "multi-krum": "robust:MultiKrum",
    "bulyan": "robust:Bulyan",
    "geomed": "robust:GeoMed",
    "centered-clip": "robust:CenteredClip",
    "fltrust": "robust:FLTrust",
}
# Settings that had another name before, by the method that declares them. The old names are still accepted.
_RENAMED = {
    "feddf": {"server_steps": "steps"},
    "dafkd": {"server_batch": "sample_batch"},
}
# Settings that came later, by the method that declares them, with what runs of before have.
_ADDED: dict[str, dict[str, Any]] = {
    "dafkd": {"generator_width": 0},
    "fedftg": {"generator_width": 128},
    "fedgkd": {"across": False},
    "fedgkd-plus": {"across": False},
    "fedkf": {"across": False},
}

log = logging.getLogger(__name__)


def names() -> list[str]:
    """Every method there is, those of installed packages last."""
    return [*_METHODS, *(name for name in custom.installed("methods") if name not in _METHODS)]


def modifiers() -> list[str]:
    """Every modifier there is."""
    return list(_MODIFIERS)


def find(name: str) -> list[type[Method]]:
    """The classes that a name stands for: a method, by its id or as `file.py:Class`, and what is composed with it."""
    words = split(name)
    return [_method(words[0]), *(_composed(word, words[:i]) for i, word in enumerate(words) if i)]


def find_part(name: str) -> type[Method]:
    """The class of one method or modifier."""
    return _class(name, "method", _METHODS | _MODIFIERS)


def own_names(part: str) -> list[str]:
    """The names of the settings of one method or modifier by its id."""
    return [parameter.name for parameter in own_settings(find_part(part))]  # type: ignore[arg-type]


def default_regions(parts: Sequence[Method | type[Method]]) -> int:
    """How many regions a composed method has by default: as many as any of its parts is made for."""
    return max(part.default_regions for part in parts)


split = custom.parts


def _composed(name: str, before: Sequence[str]) -> type[Method]:
    """What may stand after a `+`: a modifier, or a method that works on the server after any other."""
    found = _class(name, "modifier or server side", _MODIFIERS | _METHODS)
    if issubclass(found, Modifier):
        return found
    first, *others = before
    alone = "+".join((name, *others)) if first == "fedavg" else "+".join((name, *before))
    if first != "fedavg" and not issubclass(_method(first), Modifier):
        instead = f"there can be one, {first!r} or {name!r}"
    else:
        instead = f"it comes first: {alone}"
    raise SettingError(f"{name!r} is a client side and cannot follow a +; {instead}")


def _method(name: str) -> type[Method]:
    return _class(name, "method", _METHODS)


def _class(name: str, kind: str, known: Mapping[str, str]) -> type[Method]:
    if not custom.is_own(name, "methods"):
        return _import(known, kind, name)
    found = custom.load(name, "methods")
    if not (isinstance(found, type) and issubclass(found, Method) and dataclasses.is_dataclass(found)):
        raise SettingError(
            f"{name} is not a method: derive a @dataclass(frozen=True) from fedstill.FedAvg, ServerSide or Modifier"
        )
    return found


def _import(known: Mapping[str, str], kind: str, name: str) -> type[Method]:
    if name not in known:
        if ":" in name:
            raise SettingError(f"unknown {kind} {name!r}; one of your own is file.py:Class, such as ./mine.py:Mine")
        raise unknown(kind, name, [*known, *custom.installed("methods")])
    module, _, cls = known[name].partition(":")
    loaded: type[Method] = getattr(importlib.import_module(f"fedstill.methods.{module}"), cls)
    return loaded


@dataclasses.dataclass(frozen=True)
class HyperParameter:
    """A setting of a method, under the name users write (`lambda` for the field `lambda_`).

    Where two composed methods have the same name, it is written with the method's id: `dafkd.server_lr`.
    """

    name: str
    field: str
    default: Any
    meaning: str
    space: str = ""  # where it is searched by default


def hyper_parameters(name: str) -> list[HyperParameter]:
    """The settings of a method and of what is composed with it."""
    return [parameter for own in _by_part(find(name)) for parameter in own]


def _by_part(parts: list[type[Method]], *, before: bool = False) -> list[list[HyperParameter]]:
    """Each part's settings, by the names they have now or had before; one that several have, with the method's id."""
    plain = [own_settings(part) for part in parts]  # type: ignore[arg-type]  # mypy means instances
    if before:
        plain = [
            tuple(dataclasses.replace(p, name=_renamed(part).get(p.name, p.name)) for p in own)
            for part, own in zip(parts, plain, strict=True)
        ]
    often = Counter(parameter.name for own in plain for parameter in own)
    return [
        [dataclasses.replace(p, name=f"{part.name or part.__name__}.{p.name}") if often[p.name] > 1 else p for p in own]
        for part, own in zip(parts, plain, strict=True)
    ]


def _renamed(method: type[Method]) -> dict[str, str]:
    known = [_RENAMED.get(getattr(base, "name", ""), {}) for base in method.__mro__]
    return {new: old for renames in known for new, old in renames.items()}


def old_names(name: str) -> dict[str, str]:
    """Names that settings had before, each with the one it has now.

    >>> old_names("feddf")
    {'steps': 'server_steps'}
    """
    parts = find(name)
    pairs = zip(chain(*_by_part(parts, before=True)), chain(*_by_part(parts)), strict=True)
    return {old.name: now.name for old, now in pairs if old.name != now.name}


def with_new_names(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a method under the names they have now; a warning says which had an old one."""
    new = old_names(name)
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if key in new:
            _warn(name, key, new[key])
        if (key_now := new.get(key, key)) in found:
            raise SettingError(f"{key_now} is given twice, once under an old name; leave one of them out")
        found[key_now] = value
    return found


@cache  # once
def _warn(method: str, old: str, new: str) -> None:
    log.warning("%s: the setting %s is called %s now", method, old, new)


def with_old_names(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under the names they first had, for what is derived from them and must never change."""
    old, added = {new: old for old, new in old_names(name).items()}, added_settings(name)
    return {old.get(key, key): value for key, value in settings.items() if key not in added or value != added[key]}


def added_settings(name: str) -> dict[str, Any]:
    """Settings that the configuration of an older run lacks, with the values it was run with.

    >>> added_settings("fedprox+fedftg")
    {'generator_width': 128}
    """
    return {key: value for part in find(name) for key, value in _ADDED.get(part.name, {}).items()}


@cache
def own_settings(method: type[Method]) -> tuple[HyperParameter, ...]:
    """The settings of one class, under the names users write."""
    hints = get_type_hints(method, include_extras=True)
    found = []
    for field in dataclasses.fields(method):
        if field.name == "inner":
            continue
        notes = [m for m in getattr(hints[field.name], "__metadata__", ()) if isinstance(m, str)]
        meant = notes[0] if notes else ""
        spaces = [m.space for m in getattr(hints[field.name], "__metadata__", ()) if isinstance(m, Search)]
        found.append(HyperParameter(field.name.rstrip("_"), field.name, field.default, meant, "".join(spaces)))
    return tuple(found)


def make(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """A method with its settings checked.

    >>> make("fedprox", {"mu": 0.1})
    FedProx(mu=0.1)
    """
    return _composition(_instances(name, find(name), with_new_names(name, settings or {})))


def compose(*parts: str | Method, **settings: Any) -> Method:
    """One method of several parts, as `+` composes names: objects of your own classes, and built-in ones by name.

    Args:
        parts: A client side first, if there is one; then server sides and modifiers, in their order.
        settings: Those of the parts that are given by name.

    Examples:
        >>> compose("fedprox", "t1", mu=0.1).parts()[0]
        FedProx(mu=0.1)
    """
    refuse_others(parts)
    words: list[str | Method] = [
        word for part in parts for word in (split(part) if isinstance(part, str) else part.parts())
    ]
    names = [word for word in words if isinstance(word, str)]
    made = iter(_instances("+".join(names), [find_part(name) for name in names], settings))
    found = [next(made) if isinstance(word, str) else word for word in words]
    if not found:
        raise SettingError("compose: give at least one method")
    # A modifier of one's own brings FedAvg along, the client side that it has until it is given another.
    client_sides = [part for part in found[1:] if not isinstance(part, Modifier) and part != FedAvg()]
    if client_sides:
        raise SettingError(f"{client_sides[0].name!r} is a client side and comes first; there can be one")
    return _composition([found[0], *(part for part in found[1:] if isinstance(part, Modifier))])


def refuse_others(methods: Iterable[object]) -> None:
    """Refuse what is neither the name of a method nor an object of one."""
    for method in methods:
        if not isinstance(method, str | Method):
            hint = f"; write {method.__name__}(…)" if isinstance(method, type) else ""
            raise SettingError(f"method is {method!r:.80}; give the name or an object of one{hint}")


def parts_of(method: Method) -> list[Method]:
    """What a method is composed of, without the FedAvg that a server side or modifier has when it stands alone."""
    return [part for part in method.parts() if part != FedAvg()] or [method]


def with_settings(method: Method, settings: Mapping[str, Any]) -> Method:
    """The method with other values of some of its settings, which have the names users write."""
    parts = method.parts()
    changed = [
        dataclasses.replace(part, **{p.field: settings[p.name] for p in own if p.name in settings})
        for part, own in zip(parts, _by_part([type(part) for part in parts]), strict=True)
    ]
    return _composition(changed)


def _instances(name: str, classes: list[type[Method]], settings: Mapping[str, Any]) -> list[Method]:
    """An object of each class, with those of the settings that are its own."""
    by_part = _by_part(classes)
    known = [parameter.name for own in by_part for parameter in own]
    for key in settings:
        if key not in known:
            raise (
                unknown(f"setting of {name!r}", key, known)
                if known
                else SettingError(f"method {name!r} has no setting {key!r}: it has none of its own")
            )
    found: list[Method] = []
    for cls, own in zip(classes, by_part, strict=True):
        given = {p.field: settings[p.name] for p in own if p.name in settings}
        for key, value in given.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise SettingError(f"{key.rstrip('_')} = {value!r}: should be a finite number")
        try:
            found.append(TypeAdapter(cls).validate_python(given))
        except ValidationError as error:
            raise SettingError(explain(error)) from error
    return found


def _composition(parts: Sequence[Method]) -> Method:
    """One method of its parts: each but the first is a modifier of those before it."""
    method = parts[0]
    for part in parts[1:]:
        method = dataclasses.replace(part, inner=method)  # type: ignore[call-arg]
    return method


def checked(method: Method) -> Method:
    """A method that was made in Python, its settings checked as those in a file are."""
    settings = {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.name != "inner"}
    try:
        instance = TypeAdapter(type(method)).validate_python(settings)
    except PydanticSchemaGenerationError:  # a setting of a type that only its method knows
        return method
    except ValidationError as error:
        raise SettingError(explain(error)) from error
    if isinstance(instance, Modifier) and isinstance(method, Modifier):
        return dataclasses.replace(instance, inner=checked(method.inner))
    return instance


def settings_of(method: Method) -> dict[str, Any]:
    """All settings of a method and of what it is composed with, under the names users write."""
    composed = method.parts()
    by_part = _by_part([type(part) for part in composed])
    return {p.name: getattr(part, p.field) for part, own in zip(composed, by_part, strict=True) for p in own}
