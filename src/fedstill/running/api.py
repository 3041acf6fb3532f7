"""Runs from Python."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from fedstill.building.config import (
    DIVISION,
    Config,
    anchored,
    is_object,
    resolve,
)
from fedstill.building.data import own_glance
from fedstill.building.given import as_data, as_dataset, as_model
from fedstill.building.keywords import Keywords
from fedstill.building.setup import Setup, prepare
from fedstill.building.suggestions import unknown_setting
from fedstill.building.task import Network
from fedstill.core import device as devices
from fedstill.core.errors import SettingError
from fedstill.data.dataset import Dataset
from fedstill.data.federation import Federation
from fedstill.data.sources import Glance
from fedstill.engine.base import Engine
from fedstill.engine.worker import Worker
from fedstill.inference.description import unwrapped
from fedstill.methods import registry
from fedstill.methods.base import Method
from fedstill.metrics.scores import Function
from fedstill.running import files
from fedstill.running.callbacks import Callback, check_callbacks
from fedstill.running.directory import RunDirectory
from fedstill.running.inputs import prepare_again, save_inputs
from fedstill.running.logfile import logging_to
from fedstill.running.loop import RoundLoop, refuse_one_file
from fedstill.running.machine import check_engine, on_engine
from fedstill.running.monitors import refuse_own_models, selection
from fedstill.running.progress import Progress, in_notebook
from fedstill.running.result import Result
from fedstill.running.results import network

log = logging.getLogger(__name__)

NOT_GIVEN: Any = type("NotGiven", (), {"__repr__": lambda _: "<not given>"})()


def run(
    method: str | Method | Config = "fedavg",
    *,
    data: Any = NOT_GIVEN,
    model: str | Network | None = None,
    models: str | Sequence[str | Network] = (),
    proxy: Any = None,
    metrics: str | Sequence[str | Function] | None = None,
    out: str | Path | None = None,
    force: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **settings: Unpack[Keywords],
) -> Result:
    """Train a federation.

    Args:
        method: A name, an object, or a `Config` with all settings. Keywords win over what an object or `Config` has.
        data: A name or path, a Dataset or Federation, (x, y) of arrays, or a dataset of PyTorch's or Hugging Face's.
            By default "fashion-mini".
        model: A name or a network of your own. By default LeNet-5, on rows of numbers a multilayer perceptron, on
            text a small Transformer, trained by Adam.
        models: Instead of `model`: names and networks of your own, dealt to the clients in turn.
        proxy: Samples without labels on the server, for methods that need them: as `data`, or "pool".
        metrics: Names (docs/metrics.md) or functions of your own, which get labels (N,) and class probabilities
            (N, classes) and return a number, the larger the better.
        out: The run directory; without it nothing is kept on disk.
        force: Replace a run directory that is there.
        callbacks: They hear how the run goes on, and may stop it.
        progress: Show how the run goes on; by default in a notebook.
        settings: Those of `fedstill settings` and the method's own, which may also stand in `hyper`.

    Examples:
        >>> result = run("fedprox", rounds=1, clients=4, epochs=1, mu=0.1, fraction=0.05, engine="inline")
        >>> result.summary["rounds"]
        1
    """
    data = None if data is NOT_GIVEN else as_data(data)  # a loader that returns None is a mistake, not the default
    objects = {"data": data, "model": model, "models": models, "proxy": proxy, "metrics": metrics}
    config, own = configure(method, objects, dict(settings))
    callbacks = _with_progress(callbacks, progress)
    if out is not None:
        return run_config(config, Path(out), force=force, callbacks=callbacks, **own)
    with tempfile.TemporaryDirectory(prefix="fedstill-") as folder:
        result = run_config(config, Path(folder) / "run", callbacks=callbacks, **own)
        return replace(result, path=None)


def configure(
    method: str | Method | Config, objects: Mapping[str, Any], given: dict[str, Any]
) -> tuple[Config, dict[str, Any]]:
    """The configuration of a run from Python, and those of `data`, `model`, `proxy` and `method` that are no names."""
    if isinstance(method, Config):
        # What its maker left open is filled in as if it had been left open here.
        given, method = method.model_dump(exclude_unset=True) | given, method.method
        for name, value in objects.items():
            if value is None and is_object(str(given.get(name, ""))):
                raise SettingError(f"{name}: the Config was made with an object, {given[name]}; give it again")
    registry.refuse_others([method])
    if isinstance(method, Method):
        method, given = _with_keywords(method, given)
    metrics = _metrics(objects.get("metrics"))
    models = _models(objects.get("models"))
    checked = {
        "data": _optional(as_data, objects.get("data")),
        "model": _optional(as_model, objects.get("model")),
        "proxy": _optional(partial(as_dataset, what="proxy"), objects.get("proxy")),
    }
    if metrics is not None:
        given = given | {"metrics": [each if isinstance(each, str) else _object_name(each) for each in metrics]}
    own = {name: value for name, value in {"method": method, **checked}.items() if not isinstance(value, str | None)}
    if models:
        given = given | {"models": _model_names(objects["models"])}
        own |= {"models": models} if any(not isinstance(each, str) for each in models) else {}
    own["metrics"] = [each for each in metrics or () if not isinstance(each, str)]
    # An object is named as it was given: a class of networks by its own name.
    named = checked | {"model": objects.get("model")}
    return _config(method, named, given), own


def _with_progress(callbacks: Sequence[Callback], progress: bool | None) -> list[Callback]:
    check_callbacks(callbacks)
    shown = in_notebook() if progress is None else progress
    return [Progress(), *callbacks] if shown else [*callbacks]


def _with_keywords(method: Method, given: dict[str, Any]) -> tuple[Method, dict[str, Any]]:
    """The method with the settings of its own that are among those given, and the others."""
    changed = {key: value for key, value in given.items() if key not in Config.model_fields} | given.get("hyper", {})
    own = registry.settings_of(method)
    for key in changed:
        if key not in own:
            raise unknown_setting(key, [*own, *Config.model_fields])
    others = {key: value for key, value in given.items() if key in Config.model_fields and key != "hyper"}
    return registry.with_settings(method, changed), others


def _optional(check: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else check(value)


def _models(given: Any) -> list[str | Network]:
    """Names and networks, each as `model` takes it."""
    if isinstance(given, nn.Module) or not isinstance(given, str | Sequence | None):
        raise SettingError(f"models is a {type(given).__name__}; a list of names and networks is needed")
    return [as_model(each) for each in _listed(given)]


def _model_names(given: Any) -> list[str]:
    """What the settings call them: an object by its class, with a number where several have one."""
    names: list[str] = []
    for each in _listed(given):
        name = each if isinstance(each, str) else _object_name(each)
        twice = not isinstance(each, str) and name in names
        names.append(f"{name[:-1]} {len(names) + 1}>" if twice else name)
    return names


def _listed(given: Any) -> list[Any]:
    return [name.strip() for name in given.split(",") if name.strip()] if isinstance(given, str) else list(given or ())


def _metrics(given: Any) -> Sequence[str | Function] | None:
    """Names and functions, as a list."""
    metrics = given.split(",") if isinstance(given, str) else given
    if metrics is None:
        return None
    if not isinstance(metrics, Sequence) or not all(isinstance(metric, str) or callable(metric) for metric in metrics):
        raise SettingError(f"metrics = {metrics!r}: a list of names or functions is needed, such as ['auroc']")
    return metrics


def run_config(
    config: Config, path: Path, *, force: bool = False, callbacks: Sequence[Callback] = (), **own: Any
) -> Result:
    """Carry out a configuration in a new run directory; `own` are the objects that `prepare` takes."""
    return run_setup(prepare(config, **own), path, force=force, callbacks=callbacks)


def run_setup(setup: Setup, path: Path, *, force: bool = False, callbacks: Sequence[Callback] = ()) -> Result:
    """Carry out what is prepared in a new run directory, which works from wherever it is resumed."""
    check_callbacks(callbacks)
    check_engine(setup.config)
    refuse_one_file(setup)
    if setup.config.select:
        refuse_own_models(setup.method, setup.config, "select")
    directory = RunDirectory.create(path, anchored(setup.config), force=force)
    try:
        save_inputs(setup, directory)
    except BaseException:
        directory.release()
        raise
    return run_in_directory(setup, directory, callbacks)


def resume(
    path: str | Path,
    *,
    method: Method | None = None,
    data: Any = None,
    model: Network | None = None,
    models: Sequence[str | Network] = (),
    proxy: Any = None,
    metrics: Sequence[Function] = (),
    rounds: int | None = None,
    device: str | None = None,
    engine: str | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> Result:
    """Continue a run where it stopped, or go on after it ended.

    What the run was given as objects (`method`, `data`, `model`, `models`, `proxy`, `metrics`) is given again, and so
    are callbacks, which go on from their own state.

    Args:
        path: The run directory.
        rounds: The last round, if it is to be another.
        device: Where it goes on, if that is to be elsewhere.
        engine: On which engine it goes on, if that is to be another: "ray", "process" or "inline".
        progress: Show how the run goes on; by default in a notebook.
    """
    given: dict[str, Any] = {
        "method": method,
        "data": None if data is None else as_data(data),
        "model": None if model is None else as_model(model),
        "proxy": None if proxy is None else as_dataset(proxy, "proxy"),
    }
    for name, value in given.items():
        if isinstance(value, str):
            raise SettingError(f"{name} = {value!r}: the run knows by itself what it was given by name; leave it out")
    callbacks = _with_progress(callbacks, progress)
    directory = RunDirectory.open(Path(path))
    try:
        if directory.served:
            raise SettingError(f"{path} is a run of sites elsewhere; 'fedstill serve' with the same --out continues it")
        config = _continued(directory, rounds, given)
        if device is not None:
            config = config.model_copy(update={"device": device})
        if engine is not None:
            config = on_engine(config, engine)
        check_engine(config)
        setup = prepare_again(directory, config, metrics=metrics, models=_models(models), **given)
        if (rounds, device, engine) != (None, None, None):
            directory.write_config(config)  # now that it is known to work
    except BaseException:
        directory.release()
        raise
    return run_in_directory(setup, directory, callbacks)


def _continued(directory: RunDirectory, rounds: int | None, given: dict[str, object]) -> Config:
    """The settings of a run that goes on, to another number of rounds if one is given."""
    config = directory.config(replaced=[name for name, value in given.items() if value is not None])
    for name, value in given.items():
        named = getattr(config, name)
        if is_object(named) and value is None:
            raise SettingError(f"{directory.path} was run with a {name} of your own, {named}; give it again")
    if rounds is not None:
        config = config.model_copy(update={"rounds": rounds})
    directory.check_rounds(config.rounds)  # whoever set it: config.toml can be edited
    return config


def run_in_directory(
    setup: Setup,
    directory: RunDirectory,
    callbacks: Sequence[Callback] = (),
    engine: Callable[[Worker], Engine] | None = None,
    loop_class: type[RoundLoop] = RoundLoop,
    at_end: Callable[[RoundLoop], None] | None = None,
) -> Result:
    """Carry out what is left to do in a run directory, on another engine than the settings name if one is given.

    `at_end` is called once the results are written.
    """
    try:
        with logging_to(directory.path / files.LOG), devices.on(devices.find(setup.config.device)):
            for warning in setup.warnings:
                log.info("%s", warning)
            loop = loop_class(setup, directory, [*selection(setup.config), *callbacks], engine)
            summary = loop.run()
            if at_end:
                at_end(loop)
            predictor = loop.predictor()
            model = unwrapped(predictor.module.network) if predictor else network(setup.task)
            return Result(summary, loop.records, model, directory.path, setup.config, loop.client_columns, predictor)
    finally:
        directory.release()


def _object_name(value: object) -> str:
    """What stands for an object in the settings: its class, of a composed method those of its parts."""
    if isinstance(value, Method):
        return f"<{'+'.join(type(part).__name__ for part in registry.parts_of(value))}>"
    return f"<{getattr(value, '__name__', type(value).__name__)}>"


def _config(method: str | Method, objects: Mapping[str, object], settings: dict[str, Any]) -> Config:
    """The configuration, in which an object is named by its class."""
    data = objects["data"]
    if isinstance(data, Federation):
        if settled := sorted(DIVISION & set(settings)):
            raise SettingError(f"{settled[0]} cannot be set: the data are a Federation, divided already")
        settings = settings | {"clients": data.clients, "partition": "natural"}
    dataset = data.dataset if isinstance(data, Federation) else data
    about = Glance.of(dataset) if isinstance(dataset, Dataset) else own_glance(data) if isinstance(data, str) else None
    named: dict[str, object] = {"method": method} | {name: v for name, v in objects.items() if v is not None}
    for name, value in named.items():
        if not isinstance(value, str):
            named[name] = _object_name(value)
    if isinstance(method, Method):
        given = settings | named | {"hyper": registry.settings_of(method)}
        regions = registry.default_regions(method.parts())
        return resolve(given, custom_method=True, data=about, default_regions=regions)
    return resolve(settings | named, data=about)
