"""`fedstill tune`. What it imports at the top is light: `--help` must answer at once."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from fedstill.cli.options import FEDERATION, LEARNING, LOCAL, As, Callbacks, Out, Set
from fedstill.cli.settings import Settings, with_settings
from fedstill.cli.tracking import Trackers, with_trackers

_SEARCH = "Search"


@with_settings(*FEDERATION, *LEARNING, "validation", *LOCAL)
@with_trackers
def tune(
    methods: Annotated[
        list[str],
        typer.Argument(help="Methods from 'fedstill methods', or a config.toml, perhaps with a table [space]."),
    ],
    settings: Settings,
    space: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=SPACE",
            help="What is searched: lr=log:1e-3..1e-1, buffer=int:1..9, mu=0,0.01,0.1; repeatable. "
            r"\[lr, and what each method declares]",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    objective: Annotated[
        list[str] | None,
        typer.Option(
            help=r"A number of validation, such as val_amp or val_wlp; given twice, the Pareto front. \[val_accuracy]",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    sampler: Annotated[str, typer.Option(help="tpe, random or grid.", rich_help_panel=_SEARCH)] = "tpe",
    trials: Annotated[
        int, typer.Option(help="Of each method; 0: as other budgets allow.", min=0, rich_help_panel=_SEARCH)
    ] = 20,
    seconds: Annotated[
        float, typer.Option(help="Of runs of each method; 0: any.", min=0, rich_help_panel=_SEARCH)
    ] = 0.0,
    budget_rounds: Annotated[
        int, typer.Option(help="Rounds of all runs of a method; 0: any.", min=0, rich_help_panel=_SEARCH)
    ] = 0,
    halving: Annotated[
        int,
        typer.Option(
            help="Of how many trials one goes on, a ninth and a third into the run; 0: all do.",
            min=0,
            rich_help_panel=_SEARCH,
        ),
    ] = 3,
    seeds: Annotated[
        int, typer.Option(help="Of each trial, from --seed on; the mean counts.", min=1, rich_help_panel=_SEARCH)
    ] = 1,
    test_seeds: Annotated[
        int, typer.Option(help="Fresh ones, to test the winners with; 0: not.", min=0, rich_help_panel=_SEARCH)
    ] = 5,
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0 is one a core, or one on a GPU.", min=0)] = 0,
    out: Out = None,
    set_: Set = None,
    callback: Callbacks = None,
    trackers: Trackers = (),
    as_: As = "table",
) -> None:
    """Search methods' settings by validation data, with one budget for each, then test the winners once.

    \b
    fedstill tune fedprox
    fedstill tune fedavg fedprox --trials 40 --space lr=log:1e-3..1e-1 --space mu=0,0.01,0.1 --seeds 2
    fedstill tune fedkf --objective val_accuracy --objective val_wlp

    Needs Optuna: pip install 'fedstill[tune]'. Interrupted, the same command goes on; nothing is run twice.
    """
    terms = importlib.import_module("fedstill.studies.trials").Terms(
        tuple(objective or ["val_accuracy"]), sampler, trials, seconds, budget_rounds, seeds, halving
    )
    importlib.import_module("fedstill.cli.tuning").tune(
        methods, settings, set_ or [], spaces=space or [], terms=terms, test_seeds=test_seeds, jobs=jobs, out=out,
        as_=as_, callbacks=callback or [], trackers=trackers,
    )  # fmt: skip
