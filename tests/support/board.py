"""A board that is served in this process, for a browser."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from fedstill.board.app import make_app


@contextmanager
def served(root: Path) -> Iterator[str]:
    """The address of a board of the runs below a folder."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(make_app(root), log_level="warning", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()
