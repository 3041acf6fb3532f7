"""Tuned methods: a search for each, and then, once, their winners on the test set over fresh seeds."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from rich.console import Console

from fedstill.analysis.comparing import method_name, own_names, plan, run_comparison, settings_known, slug
from fedstill.analysis.tuned import Tuning
from fedstill.analysis.winners import BEST
from fedstill.building.config import Config, anchored, check_validated
from fedstill.building.keywords import Keywords
from fedstill.building.suggestions import unknown_setting
from fedstill.building.task import Network
from fedstill.core.errors import SettingError
from fedstill.core.files import write_atomic, write_json
from fedstill.core.space import Space, parse_axis
from fedstill.methods import registry
from fedstill.methods.base import Method
from fedstill.metrics.scores import Function
from fedstill.running import files
from fedstill.running.api import configure
from fedstill.running.callbacks import Callback, check_callbacks
from fedstill.running.directory import without_nan
from fedstill.running.progress import in_notebook
from fedstill.running.trackers import placed
from fedstill.studies.cells import Cell, check
from fedstill.studies.progress import AllRuns
from fedstill.studies.trials import Sampler, Search, Terms
from fedstill.studies.tuning import corners, search

VALIDATION = 0.1  # unless it is set
_LR = {"sgd": "log:0.003..0.3", "adam": "log:1e-4..1e-2"}  # by optimiser: where lr is searched if nothing else is said
Configure = Callable[[str, Mapping[str, Any], int], tuple[Config, dict[str, Any]]]  # method, settings, which seed


def default_space(method: str | Method, optimizer: str) -> dict[str, str]:
    """Where a method is searched if nothing else is said: lr, and what its own settings declare."""
    if isinstance(method, str):
        own = registry.hyper_parameters(method)
    else:
        own = [parameter for part in method.parts() for parameter in registry.own_settings(type(part))]  # type: ignore[arg-type]
    return {"lr": _LR[optimizer]} | {parameter.name: parameter.space for parameter in own if parameter.space}


def spaces_of(
    methods: Mapping[str, str | Method], given: Mapping[str, Any], optimizers: Mapping[str, str]
) -> dict[str, Space]:
    """The space of each method: those settings of the given one that it knows, or its default."""
    known = {name: own_names(method) for name, method in methods.items()}
    for key in given:
        if key in ("seed", "method", "rounds", "validation", "hyper", "model_options"):
            raise SettingError(f"space of {key}: it is no setting to search")
        if key not in Config.model_fields and not any(key in names for names in known.values()):
            raise unknown_setting(key, [*Config.model_fields, *itertools.chain(*known.values())])
    found = {}
    for name, method in methods.items():
        wanted = {key: axis for key, axis in given.items() if key in Config.model_fields or key in known[name]}
        chosen = wanted if given else default_space(method, optimizers[name])
        found[name] = {key: parse_axis(key, axis) for key, axis in chosen.items()}
    return found


def layer(point: Mapping[str, Any], own: set[str]) -> dict[str, Any]:
    """A point of a space as settings: what the method calls its own is meant where the run has the name too."""
    run = {name: value for name, value in point.items() if name not in own}
    return run | {"hyper": {name: value for name, value in point.items() if name in own}}


def _check_search(method: str, space: Space, configure: Configure, folder: Path, terms: Terms) -> None:
    """Find a value that is not allowed, or not used, or an objective that is not measured, before the first run."""
    found = []
    for point in corners(space):
        config, own = configure(method, point, 0)
        for name, value in point.items():
            if config.hyper.get(name, getattr(config, name, None)) != value:
                raise SettingError(f"{name} is to be searched for {method}, and is set as well; leave one of them out")
        if not config.validation:
            raise SettingError("validation = 0: a search is judged by samples that are held out; leave it at 0.1, say")
        for objective in terms.objectives:
            check_validated(config, "objective", objective)
        found.append(Cell(folder, config, own))
    check(found)


def run_tuning(
    spaces: Mapping[str, Space],
    configure: Configure,
    folder: Path,
    terms: Terms,
    *,
    test_seeds: int,
    callbacks: Sequence[Callback] = (),
    jobs: int = 0,
    console: Console | None = None,
    kept: Any = None,
) -> Tuning:
    """Search every method with the same budget, write the winners down, and test them once."""
    check_callbacks(callbacks)
    callbacks = placed(callbacks, folder)
    for method, space in spaces.items():
        _check_search(method, space, configure, folder / slug(method), terms)

    def watch(cells: Sequence[Cell]) -> AbstractContextManager[AllRuns]:
        assert console is not None
        return AllRuns(console, cells)

    searches: dict[str, Search] = {}
    for method, space in spaces.items():

        def say(found: Search, method: str = method) -> None:
            searches[method] = found
            _write(folder, searches)
            if console and found.complete:
                best = ", ".join(f"{name} {value}" for name, value in found.best.settings.items())
                console.print(
                    f"{method}: {len(found.trials)} trials, {found.rounds_run:,} rounds; best "
                    f"{terms.objectives[0]} {found.best.score()[0]:.4f} with {best}",
                    highlight=False,
                    soft_wrap=True,
                )

        place = folder / slug(method)
        searches[method] = search(
            method, space, partial(configure, method), place, terms,
            callbacks=callbacks, jobs=jobs, watch=watch if console else None, progress=say,
        )  # fmt: skip
        best, _ = configure(method, searches[method].best.settings, 0)
        write_atomic(place / BEST, anchored(_refit(best)).toml(comments=True))
    _write(folder, searches)
    first = max(searches, key=lambda name: searches[name].better(searches[name].best))
    write_atomic(folder / BEST, (folder / slug(first) / BEST).read_text())
    comparison = None
    if test_seeds:

        def tested(method: str, _: Mapping[str, Any], seed: int) -> tuple[Config, dict[str, Any]]:
            config, own = configure(method, searches[method].best.settings, terms.seeds + seed)
            return _refit(config), own

        cells = plan(list(spaces), tested, [{}], test_seeds, folder / "test", callbacks)
        comparison = run_comparison(
            cells, list(spaces), [{}], test_seeds, folder / "test", jobs=jobs, force=False, console=console
        )
    return Tuning(searches, comparison, folder, kept)


def _refit(config: Config) -> Config:
    """The winner's settings, trained on all training samples unless a round is selected by some of them."""
    return config if config.select else config.model_copy(update={"validation": 0.0})


def _write(folder: Path, searches: Mapping[str, Search]) -> None:
    terms = next(iter(searches.values())).terms
    record = {"terms": vars(terms), "methods": {name: each.record() for name, each in searches.items()}}
    write_json(folder / files.TUNING, without_nan(record))


def tune(
    methods: str | Method | Sequence[str | Method] | Mapping[str, str | Method],
    *,
    space: Mapping[str, Any] | None = None,
    objective: str | Sequence[str] = "val_accuracy",
    sampler: Sampler = "tpe",
    trials: int = 20,
    seconds: float = 0.0,
    budget_rounds: int = 0,
    halving: int = 3,
    seeds: int = 1,
    test_seeds: int = 5,
    data: Any = None,
    model: str | Network | None = None,
    proxy: Any = None,
    metrics: str | Sequence[str | Function] | None = None,
    out: str | Path | None = None,
    jobs: int = 0,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **settings: Unpack[Keywords],
) -> Tuning:
    """Search the settings of methods by validation data, each with the same budget, and test the winners once.

    `data`, `model`, `proxy` and `metrics` are as in `run`. With the same `out`, a tuning that was interrupted goes on.

    Args:
        methods: A name or an object, or several; a dict gives them the names that tables show.
        space: What is searched: {"lr": "log:1e-3..1e-1", "mu": [0, 0.01, 0.1]}. By default lr, and what each method's
            settings declare.
        objective: A number of validation, or two.
        sampler: "tpe", "random" or "grid".
        trials: Of each method; 0: as many as the other budgets allow.
        seconds: Of training and evaluation, of each method; no group of trials begins after them.
        budget_rounds: Likewise rounds, of all its runs together.
        halving: Of how many trials one goes on, a third and a ninth of the rounds into the run; 0: all do.
        seeds: Of each trial; the mean counts.
        test_seeds: Fresh ones, with which the winners are tested; 0: they are not.
        out: A folder for the runs. Without it the result keeps them.
        jobs: Runs at a time; 0 is one a core.
        callbacks: Each run gets copies of its own.
        progress: Show how the runs go on; by default in a notebook.
        settings: Those of `fedstill settings` and the methods' own; validation is 0.1 unless it is set.
    """
    if isinstance(methods, str | Method):
        methods = [methods]
    registry.refuse_others(methods.values() if isinstance(methods, Mapping) else methods)
    named = dict(methods) if isinstance(methods, Mapping) else {method_name(method): method for method in methods}
    if not named or len(named) < len(methods):
        raise SettingError("tune: name at least one method, and each once")
    objects = {"data": data, "model": model, "proxy": proxy, "metrics": metrics}
    given: dict[str, Any] = {"validation": VALIDATION, **settings}
    known = {name: own_names(method) for name, method in named.items()}

    def config_for(method: str, point: Mapping[str, Any], seed: int) -> tuple[Config, dict[str, Any]]:
        chosen = layer(point, known[method])
        found = settings_known(method, given | {k: v for k, v in chosen.items() if k != "hyper"}, known)
        found["hyper"] = found.get("hyper", {}) | chosen["hyper"]
        config, own = configure(named[method], objects, found | {"seed": given.get("seed", 0) + seed})
        return config, {name: value for name, value in own.items() if name != "metrics" or value}

    wanted = (objective,) if isinstance(objective, str) else tuple(objective)
    terms = Terms(wanted, sampler, trials, seconds, budget_rounds, seeds, halving)
    optimizers = {name: config_for(name, {}, 0)[0].optimizer for name in named}
    spaces = spaces_of(named, space or {}, optimizers)
    kept = None if out is not None else tempfile.TemporaryDirectory(prefix="fedstill-")
    folder = Path(out) if out is not None else Path(kept.name) / "tuning"  # type: ignore[union-attr]
    watching = in_notebook() if progress is None else progress
    found = run_tuning(
        spaces, config_for, folder, terms, test_seeds=test_seeds, callbacks=callbacks, jobs=jobs,
        console=Console() if watching else None,
    )  # fmt: skip
    return replace(found, _kept=kept)
