"""`fedstill cache`: decoded copies of data, which are as private as the data."""

from __future__ import annotations

import importlib
import time
from typing import Annotated

import typer


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete them; each is made again when it is needed.")] = False,
    older_than: Annotated[
        float, typer.Option(metavar="DAYS", help="Only those that were not used for so many days.", min=0)
    ] = 0.0,
) -> None:
    """List the decoded copies of data on this machine, or delete them."""
    data, commands = importlib.import_module("fedstill.data.cache"), importlib.import_module("fedstill.cli.commands")
    from rich.table import Table

    old = [entry for entry in data.entries() if time.time() - entry.used >= older_than * 86_400]
    if clear:
        for entry in old:
            data.remove(entry)
        commands.say(f"deleted {len(old)} copies, {sum(entry.bytes for entry in old) / 1e6:,.1f} MB")
        return
    table = Table("copy", "of", "MB", "days since its last use")
    for entry in old:
        days = (time.time() - entry.used) / 86_400
        table.add_row(entry.path.name, entry.source, f"{entry.bytes / 1e6:,.1f}", f"{days:.1f}")
    commands.console.print(table)
    commands.say(f"in {data.cache_folder()}; what was not used for {data.EXPIRES_DAYS} days is deleted by itself")
