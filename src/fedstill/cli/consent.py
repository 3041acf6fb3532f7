"""Options by which people agree: what a site may send, and whether code that a run directory names is run."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstill.core import trust

POLICY = "What the site agrees to"

Allow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METHOD|KIND",
        help="A method that may send more than weights, or a kind of information that may be sent, such as "
        r"class-counts, or statistics of a table's columns; can be repeated. \[on a terminal, you are asked]",
        rich_help_panel=POLICY,
    ),
]
Deny = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND",
        help="What never leaves the site: class-counts, logits, predictions, statistics, generator, gradients, loss, "
        "steps, metrics, other; can be repeated.",
        rich_help_panel=POLICY,
    ),
]
MaxRounds = Annotated[
    int | None,
    typer.Option(help=r"Train at most so often for one run. \[no limit]", min=1, rich_help_panel=POLICY),
]
MaxHours = Annotated[
    float | None, typer.Option(help=r"Work at most so long for one run. \[no limit]", rich_help_panel=POLICY)
]
PolicyFile = Annotated[
    Path | None,
    typer.Option("--policy", help="A policy.toml with all this and more; flags add to it.", rich_help_panel=POLICY),
]
Download = Annotated[
    bool | None,
    typer.Option(
        "--download",
        help="Fetch published datasets and encoders that the server names and that are not here.",
        show_default=False,
        rich_help_panel=POLICY,
    ),
]


def _trust(given: bool) -> bool:
    if given:
        trust.confirm.set(lambda question: True)
    return given


TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        callback=_trust,
        help="Run the code that the run directory names, though it is not known to be what the run began with.",
    ),
]

_one_at_a_time = threading.Lock()


def on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str) -> bool:
    """Put a question to whoever sits at the terminal; no answer means no."""
    with _one_at_a_time:
        print(f"\n{question}\nallow it? [y/N] ", end="", file=sys.stderr, flush=True)
        try:
            return input().strip().lower() in ("y", "yes")
        except (EOFError, OSError):
            return False


def policy_of(file: Path | None, **given: Any) -> Any:
    """The policy that the options say."""
    from fedstill.deployment import policy

    return policy.read(file, **given)
