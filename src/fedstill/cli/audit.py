"""`fedstill audit`: what an attacker learns of a run's training samples."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from fedstill.cli.options import As


def audit(
    directory: Annotated[Path, typer.Argument(help="A run directory.", metavar="DIR")],
    shadows: Annotated[
        int,
        typer.Option(
            help="Shadow runs for LiRA, each as long as the run itself: an even number from 4 on, 16 or more for few "
            "false alarms; 0: none. Interrupted, they go on.",
            min=0,
        ),
    ] = 0,
    samples: Annotated[int, typer.Option(help="Members to look at, and as many others.", min=4)] = 500,
    clients: Annotated[int, typer.Option(help="Clients whose messages to look at, at most.", min=1)] = 10,
    inversion_steps: Annotated[int, typer.Option(help="Steps of gradient inversion; 0: none.", min=0)] = 300,
    out: Annotated[
        Path | None,
        typer.Option(help=r"Folder for the results and shadow runs. \[DIR/audit]", show_default=False),
    ] = None,
    as_: As = "table",
) -> None:
    """Attack a run: what do its model, and what crosses the wire, tell of the training samples?

    fedstill run fedgkd --out runs/a && fedstill audit runs/a --shadows 16

    Membership inference guesses which samples were trained on, from how sure models are of them. AUC 0.5 is a guess,
    1 is certainty; TPR at 1 % FPR says how many members are found by an attacker who is hardly ever wrong. From both
    follows an epsilon that the run cannot be below: a promise of differential privacy with less would be broken.
    Gradient inversion rebuilds samples from the update of one step. docs/audit.md explains how to read the table.

    The attacks are lower bounds: what they do not find, a better attacker may.
    """
    studies, commands, files = (
        importlib.import_module(f"fedstill.{name}") for name in ("studies.audit", "cli.commands", "running.files")
    )
    with commands.console.status("preparing") as status:
        found = studies.audit(
            directory,
            shadows=shadows,
            samples=samples,
            clients=clients,
            inversion_steps=inversion_steps,
            out=out,
            told=lambda what, number, count: status.update(f"{what} {number} of {count}" if count > 1 else what),
        )
    commands.print_tables(found.tables(), as_)
    for note in found.notes:
        commands.say(note)
    picture = found.path / files.AUDIT_PICTURE
    if found.leaks:
        found.plot(picture)
        commands.say(f"picture: {picture}; numbers: {found.path / files.AUDIT}")
