"""What `fedstill verify` does."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from fedstill.cli import commands
from fedstill.running.verify import runs_in
from fedstill.running.verify import verify as checks_of


def verify(directories: list[Path]) -> int:
    """Print what each run was found to be; 1 if anything is not what was written."""
    damaged, runs = 0, [run for directory in directories for run in runs_in(directory)]
    for run in runs:
        checks = checks_of(run)
        shown = Table("what", "found", title=str(run))
        for check in checks:
            shown.add_row(check.what, escape(check.found) if check.sound else f"[red]{escape(check.found)}[/red]")
        commands.console.print(shown)
        damaged += not all(check.sound for check in checks)
    commands.say(f"{len(runs) - damaged} of {len(runs)} runs are sound")
    return int(damaged > 0)
