"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstill.cli.settings import RUNNING, option
from fedstill.core.choices import Format

COLUMNS = ("target", "text_column", "label_column", "client_column")
FEDERATION = ("data", "data_dir", *COLUMNS, "partition", "alpha", "clients", "regions")
LEARNING = ("participation", "rounds", "epochs", "batch_size", "lr", "model", "models", "seed")
LOCAL = ("workers", "engine", "device", "eval_every", "metrics")
CHOOSING = ("validation", "select", "restore_best", "patience")

DataDir = Annotated[str | None, option("data_dir")]
Device = Annotated[str | None, option("device")]
StudyEngine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="[process|inline|ray]",
        help="Where clients run; ray: whole runs on the nodes of the Ray cluster that RAY_ADDRESS names.",
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=A,B,…", help="Values to try of any setting; repeated, every combination.", rich_help_panel=RUNNING
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other setting, the method's own too: --set mu=0.01 --set momentum=0.9. "
        "'fedstill run METHOD --dry-run' lists them all. Where a method has a setting of the same name as the "
        "run, --set means the method's.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help=r"Run directory. \[runs/METHOD-DATA-…]", show_default=False, rich_help_panel=RUNNING),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a run directory that exists.", rich_help_panel=RUNNING)]
Callbacks = Annotated[
    list[str] | None,
    typer.Option(
        "--callback",
        metavar="FILE.PY:NAME",
        help="A fedstill.Callback, or what gives one: it hears how the run goes on and may stop it; repeatable.",
        rich_help_panel=RUNNING,
    ),
]
Tuned = Annotated[
    Path | None,
    typer.Option(help="Folder of 'fedstill tune': each method with the settings that won there.", show_default=False),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the complete configuration as TOML, which reproduces the run."),
]
As = Annotated[
    Format, typer.Option("--format", help="table, markdown, latex or csv.", metavar="[table|markdown|latex|csv]")
]
