"""The board's server."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvicorn

from fedstill.board.app import make_app
from fedstill.core.errors import SettingError


def serve(root: Path, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve the runs below a folder until it is interrupted; `ready` is given the address once it can be called."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise SettingError(
            f"--host {host} --port {port}: {error.strerror or error}; choose another port (0 is any that is free)"
        ) from error
    with listening:
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{listening.getsockname()[1]}/")
        app = make_app(root, [host, socket.gethostname(), socket.getfqdn()])
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, lifespan="off", ws="none"
        )
        with suppress(KeyboardInterrupt):  # the usual end
            uvicorn.Server(config).run(sockets=[listening])
