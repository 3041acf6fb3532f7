"""`fedstill advise`. What it imports at the top is light: `--help` must answer at once."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from fedstill.cli.options import COLUMNS, As, Set
from fedstill.cli.settings import Settings, with_settings


@with_settings(
    "data", "data_dir", *COLUMNS, "partition", "alpha", "clients", "regions", "participation", "model", "seed"
)
def advise(
    settings: Settings,
    only_weights: Annotated[
        bool, typer.Option("--only-weights", help="Nothing but weights may leave a client.")
    ] = False,
    no_weights: Annotated[bool, typer.Option("--no-weights", help="Weights must not leave a client.")] = False,
    set_: Set = None,
    as_: As = "table",
) -> None:
    """Look at a data partition and say which three methods to try first, why, and at what cost.

    \b
    fedstill advise --data fashion-mini --alpha 0.05
    fedstill advise --data ./scans --set pool=0.1 --only-weights

    Say what the server has: --set pool=0.1 (labelled samples), --set proxy=NAME (without labels).
    """
    commands = importlib.import_module("fedstill.cli.commands")
    advice = importlib.import_module("fedstill.analysis.advice")
    config = commands.config_of("fedavg", settings, set_ or [])
    found = advice.advise(config, weights=not no_weights, only_weights=only_weights)
    commands.print_tables(found.tables(), as_)
