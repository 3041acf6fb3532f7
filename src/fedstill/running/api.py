"""Runs from Python."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from fedstill.building.config import (
    DIVISION,
    Config,
    anchored,
    is_object,
    resolve,
)
from fedstill.building.given import as_data, as_dataset, as_model
from fedstill.building.setup import Setup, prepare
from fedstill.building.task import Network
from fedstill.core import device as devices
from fedstill.core.errors import SettingError
from fedstill.data.dataset import Dataset
from fedstill.data.federation import Federation
from fedstill.data.sources import Glance
from fedstill.engine.base import Engine
from fedstill.engine.worker import Worker
from fedstill.inference.description import unwrapped
from fedstill.inference.predictor import Predictor
from fedstill.methods import registry
from fedstill.methods.base import Method
from fedstill.metrics.records import RoundRecord, Summary
from fedstill.metrics.scores import Function
from fedstill.running import files
from fedstill.running.directory import RunDirectory
from fedstill.running.inputs import prepare_again, save_inputs
from fedstill.running.logfile import logging_to
from fedstill.running.loop import Listener, RoundLoop
from fedstill.running.machine import check_engine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    summary: Summary  # as in summary.json
    records: list[RoundRecord]  # as in metrics.jsonl
    model: nn.Module  # the trained network: yours, if you brought one; untrained if the method has no global model
    path: Path | None  # the run directory, if it was kept
    _predictor: Predictor | None = field(default=None, repr=False)

    @property
    def predictor(self) -> Predictor:
        """The trained model with its preprocessing, as `fedstill.load` gives it."""
        if self._predictor is None:
            raise SettingError(
                f"{self.summary['method']} has no global model, every client keeps its own: run it with out=DIR, and "
                "fedstill.load(DIR, client=0) gives that of a client"
            )
        return self._predictor

    def predict(self, raw: Any) -> npt.NDArray[np.str_]:
        """The class of each raw input, such as an image or a row of a table."""
        return self.predictor.predict(raw)

    def predict_proba(self, raw: Any) -> npt.NDArray[np.float64]:
        """The probability of each class for each raw input, (N, classes)."""
        return self.predictor.predict_proba(raw)


def run(
    method: str | Method = "fedavg",
    *,
    data: Any = "fashion-mini",
    model: str | Network | None = None,
    proxy: Any = "",
    metrics: str | Sequence[str | Function] = (),
    out: str | Path | None = None,
    force: bool = False,
    listener: Listener | None = None,
    **settings: Any,
) -> Result:
    """Train a federation.

    `data` and `model` are names or objects of your own: data a fedstill.Dataset or Federation, (x, y) of arrays, or a
    dataset of PyTorch's or Hugging Face's. Without a model it is LeNet-5, on rows of numbers a multilayer perceptron,
    on text a small Transformer, trained by Adam. `settings` are those of `fedstill run` and the method's own. Without
    `out` nothing is kept on disk. `metrics` are names (docs/metrics.md) or functions of your own, which get labels (N,)
    and class probabilities (N, classes) and return a number, the larger the better.

    >>> result = run("fedprox", rounds=1, clients=4, epochs=1, mu=0.1, fraction=0.05, engine="inline")
    >>> result.summary["rounds"]
    1
    """
    data, proxy = as_data(data), as_dataset(proxy, "proxy")
    network = None if model is None else as_model(model)
    metrics = metrics.split(",") if isinstance(metrics, str) else metrics
    if not isinstance(metrics, Sequence) or not all(isinstance(metric, str) or callable(metric) for metric in metrics):
        raise SettingError(f"metrics = {metrics!r}: a list of names or functions is needed, such as ['auroc']")
    names = [metric if isinstance(metric, str) else _object_name(metric) for metric in metrics]
    config = _config(method, data, model, proxy, settings | {"metrics": names})
    own: dict[str, Any] = {
        "proxy": None if isinstance(proxy, str) else proxy,
        "method": None if isinstance(method, str) else method,
        "data": None if isinstance(data, str) else data,
        "model": None if isinstance(network, str) else network,
        "metrics": [metric for metric in metrics if not isinstance(metric, str)],
    }
    listener = checked_listener(listener)
    if out is not None:
        return run_config(config, Path(out), force=force, listener=listener, **own)
    with tempfile.TemporaryDirectory(prefix="fedstill-") as folder:
        result = run_config(config, Path(folder) / "run", listener=listener, **own)
        return replace(result, path=None)


def run_config(
    config: Config, path: Path, *, force: bool = False, listener: Listener | None = None, **own: Any
) -> Result:
    """Carry out a configuration in a new run directory; `own` are the objects that `prepare` takes."""
    return run_setup(prepare(config, **own), path, force=force, listener=listener)


def run_setup(setup: Setup, path: Path, *, force: bool = False, listener: Listener | None = None) -> Result:
    """Carry out what is prepared in a new run directory, which works from wherever it is resumed."""
    check_engine(setup.config)
    directory = RunDirectory.create(path, anchored(setup.config), force=force)
    try:
        save_inputs(setup, directory)
    except BaseException:
        directory.release()
        raise
    return run_in_directory(setup, directory, listener)


def resume(
    path: str | Path,
    *,
    method: Method | None = None,
    data: Any = None,
    model: Network | None = None,
    proxy: Any = None,
    metrics: Sequence[Function] = (),
    rounds: int | None = None,
    device: str | None = None,
    listener: Listener | None = None,
) -> Result:
    """Continue a run where it stopped, or with more `rounds` after it ended, on another `device` if one is named.

    Objects must be given again.
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
    listener, directory = checked_listener(listener), RunDirectory.open(Path(path))
    try:
        if directory.served:
            raise SettingError(f"{path} is a run of sites elsewhere; 'fedstill serve' with the same --out continues it")
        config = _continued(directory, rounds, given)
        if device is not None:
            config = config.model_copy(update={"device": device})
        check_engine(config)
        setup = prepare_again(directory, config, metrics=metrics, **given)
        if rounds is not None or device is not None:
            directory.write_config(config)  # now that it is known to work
    except BaseException:
        directory.release()
        raise
    return run_in_directory(setup, directory, listener)


def checked_listener(listener: object) -> Listener | None:
    """What hears how a run goes on, if it can."""
    if listener is None or isinstance(listener, Listener):
        return listener
    raise SettingError(
        f"listener is {listener!r:.60}; give an object of a class that derives from fedstill.running.loop.Listener and "
        "overrides what it wants to hear, as round_done"
    )


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
    listener: Listener | None = None,
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
            loop = loop_class(setup, directory, listener, engine)
            summary = loop.run()
            if at_end:
                at_end(loop)
            predictor = loop.predictor()
            model = unwrapped(predictor.module.network) if predictor else loop.trained()
            return Result(summary, loop.records, model, directory.path, predictor)
    finally:
        directory.release()


def _object_name(value: object) -> str:
    """What stands for an object in the settings."""
    return f"<{getattr(value, '__name__', type(value).__name__)}>"


def _config(
    method: str | Method, data: str | Dataset | Federation, model: object, proxy: object, settings: dict[str, Any]
) -> Config:
    if isinstance(data, Federation):
        if settled := sorted(DIVISION & set(settings)):
            raise SettingError(f"{settled[0]} cannot be set: the data are a Federation, divided already")
        settings = settings | {"clients": data.clients, "partition": "natural"}
    dataset = data.dataset if isinstance(data, Federation) else data
    about = Glance.of(dataset) if isinstance(dataset, Dataset) else None
    named = {"method": method, "data": data, "proxy": proxy} | ({} if model is None else {"model": model})
    for name, value in named.items():
        if not isinstance(value, str):
            named[name] = _object_name(value)
    if isinstance(method, Method):
        given = settings | named | {"hyper": registry.settings_of(method)}
        regions = registry.default_regions(method.parts())
        return resolve(given, custom_method=True, data=about, default_regions=regions)
    return resolve(settings | named, data=about)
