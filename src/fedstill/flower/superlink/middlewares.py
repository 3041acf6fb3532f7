"""Flower's middlewares, each for the requests that it does something with.

Nine of them stand around every request. Most look at the path and pass the request on, which costs each of them a task
and a queue, a third of a millisecond: of a request that only fetches a few bytes that is most of what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.middleware import Middleware


class _ForPath:
    """A middleware around requests of one interface alone."""

    def __init__(self, app: Any, prefix: str, middleware: Middleware) -> None:
        self._app, self._prefix = app, prefix
        self._around = middleware.cls(app, *middleware.args, **middleware.kwargs)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        concerned = scope["type"] == "http" and scope["path"].startswith(self._prefix)
        await (self._around if concerned else self._app)(scope, receive, send)


def only_where_needed(
    get: Callable[[], list[Middleware]], interfaces: Mapping[Any, str]
) -> Callable[[], list[Middleware]]:
    """What gives the same middlewares in their order, those in `interfaces` for the paths of their own alone."""

    def narrowed() -> list[Middleware]:
        return [
            Middleware(_ForPath, prefix=interfaces[each.cls], middleware=each) if each.cls in interfaces else each
            for each in get()
        ]

    return narrowed
