"""What `fedstill verify` does."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from fedstill.cli import commands
from fedstill.core.errors import SettingError
from fedstill.deployment.verify import sites_in, verify_served, verify_site
from fedstill.running.verify import Check, runs_in
from fedstill.running.verify import verify as verify_run


def verify(directories: list[Path]) -> int:
    """Print what each run, and each site's folder, was found to be; 1 if anything is not what was written."""
    found: dict[Path, list[Check]] = {}
    for directory in directories:
        runs, sites = runs_in(directory), sites_in(directory)
        if not runs and not sites:
            raise SettingError(
                f"{directory} is no run directory and no folder of a site, and holds none: there is no config.toml "
                "and no audit.jsonl"
            )
        found |= {run: [*verify_run(run), *verify_served(run)] for run in runs}
        found |= {site: verify_site(site) for site in sites}
    for path, checks in found.items():
        shown = Table("what", "found", title=str(path))
        for check in checks:
            shown.add_row(check.what, escape(check.found) if check.sound else f"[red]{escape(check.found)}[/red]")
        commands.console.print(shown)
    sound = sum(all(check.sound for check in checks) for checks in found.values())
    commands.say(f"{sound} of {len(found)} runs{' and sites' if any(map(sites_in, directories)) else ''} are sound")
    return int(sound < len(found))
