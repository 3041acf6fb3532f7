"""From partial settings to one complete configuration, checked before work starts."""

from __future__ import annotations

import itertools
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.building.schema import (
    CHANGEABLE,
    DIVISION,
    IRRELEVANT,
    ROW_MODEL,
    TABLE_TRAINING,
    TEXT_MODEL,
    TEXT_TRAINING,
    Config,
    fixed,
)
from fedstill.building.sections import GroupSettings, RegionSettings
from fedstill.building.suggestions import unknown_setting
from fedstill.core import custom, device
from fedstill.core.errors import SettingError
from fedstill.core.files import home_path
from fedstill.data import augment, sources
from fedstill.data.sources import Glance
from fedstill.methods import registry
from fedstill.metrics.records import VALIDATION
from fedstill.metrics.scores import COUNTED, check_names, short_name

__all__ = [
    "CHANGEABLE",
    "DIVISION",
    "IRRELEVANT",
    "TEXT_TRAINING",
    "Config",
    "GroupSettings",
    "RegionSettings",
    "anchored",
    "check_validated",
    "fixed",
    "is_config_file",
    "is_object",
    "parse_assignments",
    "parse_sweeps",
    "read_toml",
    "resolve",
]


def anchored(config: Config) -> Config:
    """The configuration with paths that hold wherever it is read."""
    update: dict[str, Any] = {}
    for name in ("method", "model", "data", "proxy", "tokenizer"):
        value = getattr(config, name)
        files = name in ("data", "proxy", "tokenizer")
        if custom.is_reference(value):
            update[name] = custom.anchored(value)
        elif files and is_saved(value):
            update[name] = f"hf:{home_path(value.removeprefix('hf:')).resolve()}"
        elif files and value and value not in sources.names() and home_path(value).exists():
            update[name] = str(home_path(value).resolve())
    folder = config.model_options.get("pretrained")
    if isinstance(folder, str) and home_path(folder).is_dir():
        update["model_options"] = config.model_options | {"pretrained": str(home_path(folder).resolve())}
    update["metrics"] = list(map(custom.anchored, config.metrics))
    update["models"] = list(map(custom.anchored, config.models))
    update["group"] = [g.model_copy(update={"model": custom.anchored(g.model)}) for g in config.group]
    update["region"] = [
        r.model_copy(update={"method": custom.anchored(r.method), "model": custom.anchored(r.model)})
        for r in config.region
    ]
    data_dir = config.data_dir or os.environ.get("FEDSTILL_DATA", "")
    if data_dir:
        update["data_dir"] = str(home_path(data_dir).resolve())
    return config.model_copy(update=update)


def resolve(
    *layers: Mapping[str, Any], custom_method: bool = False, data: Glance | None = None, default_regions: int = 1
) -> Config:
    """One complete configuration from several partial ones, the later ones first in rank.

    A name that is not a setting of the run is taken for one of the method's own, wherever it stands. Where data or
    method are objects, no name tells what the `data` are, or what its `default_regions` are.
    """
    merged: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {"hyper": {}, "model_options": {}}
    for layer in layers:
        for key, value in layer.items():
            if key in tables:
                if not isinstance(value, Mapping):
                    raise SettingError(f"{key} = {value!r}: a table of settings is needed")
                tables[key] |= value
            elif key in Config.model_fields:
                merged[key] = value
            else:
                tables["hyper"][key] = value
    hyper, method = tables["hyper"], merged.get("method", "fedavg")
    if not isinstance(method, str):
        raise SettingError(f"method = {method!r}: the name of a method is needed")
    by_name = not custom_method and not is_object(method)
    _fill_dependent(merged, method, data, None if by_name else default_regions)
    merged |= tables
    if by_name:
        own, hyper = [p.name for p in registry.hyper_parameters(method)], registry.with_new_names(method, hyper)
        for key in hyper:
            if key not in own:
                raise unknown_setting(key, [*own, *Config.model_fields])
        merged["hyper"] = registry.settings_of(registry.make(method, hyper))
    config = Config.model_validate(merged)
    if (config.models or config.group) and not config.flat:
        raise SettingError(
            "regions: clients with different networks cannot be divided into regions; leave one out, or give each "
            "[[region]] a model"
        )
    augment.parse(config.augment)
    device.check(config.device)
    check_names(config.metrics)
    _check_choice(config)
    return config


def _check_choice(config: Config) -> None:
    """Refuse to choose by what is not measured."""
    for name in ("restore_best", "patience", "min_delta"):
        if (value := getattr(config, name)) and not config.select:
            raise SettingError(f"{name} = {value}: set select, the number to choose by, such as select=val_amp")
    if config.select.startswith("val_") and not config.validation:
        raise SettingError(f"select = {config.select!r}: nothing is held out; set validation, such as validation=0.1")
    check_validated(config, "select", config.select)


def check_validated(config: Config, setting: str, name: str) -> None:
    """Refuse a number of validation that no round will have."""
    measured = [*VALIDATION, *(f"val_{short_name(each)}" for each in (*COUNTED, *config.metrics))]
    if name.startswith("val_") and name not in measured:
        raise SettingError(f"{setting} = {name!r}: of validation there are {', '.join(dict.fromkeys(measured))}")


def _fill_dependent(merged: dict[str, Any], method: str, data: Glance | None, default_regions: int | None) -> None:
    """Fill in the defaults that depend on other settings, and on the data."""
    if not {"partition", "model", "lr", "optimizer"} <= merged.keys():
        words = [
            str(merged.get(name, Config.model_fields[name].default)) for name in ("data", "target", "client_column")
        ]
        about = data or sources.glance(*words)
        if about.owners:
            _use_owners(merged)
        models = {"text": TEXT_MODEL, "table": ROW_MODEL, "rows": ROW_MODEL}
        if about.kind in models:
            merged.setdefault("model", models[about.kind])
        training = {"text": TEXT_TRAINING, "table": TABLE_TRAINING}.get(about.kind, {})
        if not training.keys() & merged.keys():
            merged |= training
    if merged.get("partition") == "natural":
        merged.setdefault("clients", 0)
    if "region" in merged:
        merged["region"] = _regions(merged["region"], method)
        merged.setdefault("regions", len(merged["region"]) or 1)
    else:
        merged.setdefault("regions", default_regions or registry.default_regions(registry.find(method)))


def _use_owners(merged: dict[str, Any]) -> None:
    """Data that name their clients are used as they are, unless a partition is named."""
    if "partition" not in merged and merged.get("clients", 0) != 0:
        raise SettingError(
            f"clients = {merged['clients']!r}: the data name their clients; leave clients out to use them as they are, "
            "set partition=natural for so many of them, or partition=dirichlet (or another) to deal the samples anew"
        )
    merged.setdefault("partition", "natural")


def _regions(tables: Any, method: str) -> list[dict[str, Any]]:
    """The regions' tables, a name that is no setting of a region taken for one of its method's own."""
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise SettingError("region: a list of tables is needed, [[region]] for each in a file")
    found = []
    for table in tables:
        plain = {k: v for k, v in table.items() if k in RegionSettings.model_fields}
        given = plain.pop("hyper", {})
        if not isinstance(given, Mapping) or not isinstance(plain.get("method", ""), str):
            raise SettingError("region: hyper is a table of settings, and method the name of one")
        own = dict(given) | {k: v for k, v in table.items() if k not in RegionSettings.model_fields}
        runs = plain.get("method") or method
        known = [] if is_object(runs) else [p.name for p in registry.hyper_parameters(runs)]
        own = own if is_object(runs) else registry.with_new_names(runs, own)
        for key in own:
            if key not in known:
                raise unknown_setting(key, [*known, *RegionSettings.model_fields], "setting of a region")
        found.append(plain | {"hyper": own})
    return found


def read_toml(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise SettingError(f"there is no file {path}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is not TOML: {error}") from error


def parse_assignments(pairs: list[str], method: str) -> dict[str, Any]:
    """`key=value` words as settings. The method's own settings win over the run's where both have the name."""
    settings: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {"hyper": {}, "model_options": {}}
    own = {p.name for p in registry.hyper_parameters(method)}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise SettingError(f"--set {pair}: write it as key=value")
        value = _value(text)
        table, _, rest = key.partition(".")
        if key in own:
            tables["hyper"][key] = value
        elif rest and table in tables:
            tables[table][rest] = value
        elif key in tables:
            raise SettingError(f"--set {pair}: name the setting, --set {key}.name=value")
        else:
            settings[key] = value
    return settings | tables


def parse_sweeps(words: Sequence[str]) -> list[dict[str, Any]]:
    """`key=a,b,c` words as every combination of the values.

    >>> parse_sweeps(["mu=0.1,1", "q=2"])
    [{'mu': 0.1, 'q': 2}, {'mu': 1, 'q': 2}]
    """
    axes: dict[str, list[Any]] = {}
    for word in words:
        key, equals, values = word.partition("=")
        if not key or not equals or not all(values.split(",")):
            raise SettingError(f"--sweep {word}: write it as key=value,value")
        if key in axes:
            raise SettingError(f"--sweep {word}: {key} is swept already; write all its values in one --sweep")
        found = [_value(value) for value in values.split(",")]
        if any(found.count(value) > 1 for value in found):
            raise SettingError(f"--sweep {word}: a value stands there twice")
        axes[key] = found
    return [dict(zip(axes, combination, strict=True)) for combination in itertools.product(*axes.values())]


def _value(text: str) -> Any:
    """A value as TOML reads it; what is not TOML is a string."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def is_saved(name: str) -> bool:
    """Whether a name is of a folder that the Hugging Face library saved."""
    return name.startswith("hf:") and home_path(name.removeprefix("hf:")).is_dir()


def is_object(name: str) -> bool:
    """Whether a setting stands for an object that was given from Python, such as `<MyNet>`."""
    return name.startswith("<")


def is_config_file(name: str) -> bool:
    return name.endswith(".toml") and not custom.is_reference(name)
