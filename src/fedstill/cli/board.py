"""`fedstill board`. What it imports at the top is light: `--help` must answer at once."""

from __future__ import annotations

import importlib
import ipaddress
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fedstill.core.errors import SettingError


def board(
    folder: Annotated[Path, typer.Argument(metavar="RUNS", help="A folder that holds run directories.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on. Whoever reaches another than 127.0.0.1 can read the runs.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any that is free.", min=0, max=65535)] = 8765,
    open_: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Watch runs in a browser: those under way as they go on, and finished ones side by side. It changes nothing.

    \b
    fedstill board
    fedstill board runs/compare-… --open
    ssh -L 8765:127.0.0.1:8765 server.example      (a board on another machine, seen on this one)
    """
    if not folder.is_dir():
        raise SettingError(f"{folder} is not a folder; 'fedstill run fedavg' makes runs/, or name another")
    try:
        server = importlib.import_module("fedstill.board.server")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise SettingError("the board needs a web server: pip install 'fedstill[board]'") from error
    say = importlib.import_module("fedstill.cli.commands").say

    def ready(address: str) -> None:
        say(f"board: {address}  (Ctrl-C ends it)")
        if not _is_loopback(host):
            say("warning: whoever reaches this address can read the runs; nothing is encrypted")
        if open_:
            webbrowser.open(address)

    server.serve(folder, host, port, ready)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
