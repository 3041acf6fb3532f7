"""Flower's SuperLink behind the guard; ends when the process that started it does."""

from __future__ import annotations

import importlib
import json
import logging
import os
import resource
import socket
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.flower.superlink import KEEP_OPEN, OVERHEAD
from fedstill.flower.superlink.connections import Connections, Door
from fedstill.flower.superlink.guard import Guard
from fedstill.flower.superlink.middlewares import only_where_needed
from fedstill.flower.superlink.uploads import Uploads, only_answers
from fedstill.flower.superlink.waiting import Waiting
from fedstill.flower.versions import check

USED_HERE = "fedstill.flower.superlink.used"


def main() -> None:
    """Take the settings from stdin, patch Flower, start it."""
    settings = json.load(sys.stdin)
    waiting = Waiting()
    uploads = Uploads(settings["most_bytes"], waiting)
    connections = Connections(settings["strangers"], settings["seconds"])

    def watch() -> None:
        while os.getppid() == settings["parent"]:
            time.sleep(0.5)
            with suppress(Exception):  # whatever it was, the next may succeed
                uploads.sweep(time.time())
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        check(USED_HERE)
    except FedstillError as error:
        sys.exit(str(error))  # the last line of its log, which the server repeats
    import uvicorn
    from starlette.middleware import Middleware

    used: Any = importlib.import_module(USED_HERE)

    class Server(uvicorn.Server):
        async def shutdown(self, *arguments: Any, **options: Any) -> None:
            waiting.end()  # else it would wait for those who wait here
            await super().shutdown(*arguments, **options)

    def serve(*, host: str, port: int, **options: Any) -> None:
        # uvloop accepts connections where none can be counted; a header must not say who a client is.
        options["timeout_keep_alive"] = KEEP_OPEN + 15  # so that it is the site that closes: no request meets an end
        config = uvicorn.Config(host=host, port=port, loop="asyncio", proxy_headers=False, **options)
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        places = {(family, address) for family, _, _, _, address in addresses}
        Server(config).run(sockets=[Door(family, address, connections) for family, address in places])

    guard = Middleware(
        Guard,
        secret=settings["secret"],
        keys=frozenset(settings["keys"]),
        uploads=uploads,
        connections=connections,
        waiting=waiting,
        # Larger arrays come in chunks; twice that leaves room for long JSON.
        largest=min(2 * used.common.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, uploads.limit + OVERHEAD),
    )
    for kind in (used.InMemoryLinkState, used.SqlLinkState):
        uploads.bound(kind)
    used.fleet_handlers.push_messages = only_answers(used.fleet_handlers.push_messages)
    used.extensions.get_middleware = lambda: (guard,)  # the hook where Flower's paid extension adds its own
    used.superlink_app._get_middleware = only_where_needed(used.superlink_app._get_middleware)
    # uvicorn's line per request cannot be switched off: ten a second and site would fill the disk.
    logging.getLogger("uvicorn.access").addFilter(lambda record: False)
    used.flower_superlink.uvicorn = SimpleNamespace(run=serve)
    used.flower_superlink.flower_superlink()


if __name__ == "__main__":
    main()
