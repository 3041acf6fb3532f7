"""`fedstill keys`. What it imports at the top is light: `--help` must answer at once."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup


class _MakeUnlessNamed(TyperGroup):
    """`fedstill keys DIRECTORY --site ...` makes keys; a word for that is not needed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["make", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_MakeUnlessNamed,
    help="Keys of a trial on many machines: make them, add a site later, revoke one.\n\n"
    "fedstill keys trial --site north --site south --host server.example",
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)

Directory = Annotated[Path, typer.Argument(help="The directory with the keys.")]
Name = Annotated[str, typer.Argument(help="The site's name.")]


@app.command()
def make(
    directory: Annotated[Path, typer.Argument(help="Where to write them.")],
    host: Annotated[
        list[str], typer.Option(help="A name or address of the server, as sites know it; can be repeated.")
    ],
    site: Annotated[
        list[str] | None, typer.Option(help="A site's name; repeat it for each, or add sites by their own keys.")
    ] = None,
) -> None:
    """Make certificates and keys for a trial on many machines; the word 'make' can be left out.

    \b
    fedstill keys trial --site north --site south --host server.example
    """
    _network().make_keys(directory, site or [], host)


@app.command()
def add(
    directory: Directory,
    name: Name,
    public: Annotated[
        Path | None,
        typer.Option(help=r"The site's own public key, from ssh-keygen. \[a new key pair]", show_default=False),
    ] = None,
) -> None:
    """Let a further site in, or one again that was revoked. A server that runs takes note of it.

    \b
    fedstill keys add trial west
    fedstill keys add trial west --public west.pub
    """
    _network().add_key(directory, name, public)


@app.command()
def revoke(directory: Directory, name: Name) -> None:
    """Let a site in no more, also while the server runs. The run goes on without it.

    \b
    fedstill keys revoke trial west
    """
    _network().revoke_key(directory, name)


def _network() -> ModuleType:
    return importlib.import_module("fedstill.cli.network")
