"""Flower's middlewares, each for the requests that it does something with.

Up to nine of them stand around every request. Most look at the path and pass the request on, which costs each of them a
task and a queue, a third of a millisecond: of a request that only fetches a few bytes that is most of what it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.middleware import Middleware

PATHS = {
    "ControlSensitiveResponseMiddleware": "/v1/control/",
    "ControlAuthenticationMiddleware": "/v1/control/",
    "ControlLicenseMiddleware": "/v1/control/",
    "ControlEventLogMiddleware": "/v1/control/",
    "FleetEventLogMiddleware": "/v1/fleet/",
    "NodeAuthMiddleware": "/v1/fleet/",
    "RuntimeTracingMiddleware": "/v1/runtime/",
}
"""The paths at which middlewares of Flower's do something, by their names; versions differ in which there are."""


class _ForPath:
    """A middleware around requests of one interface alone."""

    def __init__(self, app: Any, prefix: str, middleware: Middleware) -> None:
        self._app, self._prefix = app, prefix
        self._around = middleware.cls(app, *middleware.args, **middleware.kwargs)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        concerned = scope["type"] == "http" and scope["path"].startswith(self._prefix)
        await (self._around if concerned else self._app)(scope, receive, send)


def only_where_needed(get: Callable[[], list[Middleware]]) -> Callable[[], list[Middleware]]:
    """What gives the same middlewares in their order, those in `PATHS` for these paths alone."""

    def narrowed() -> list[Middleware]:
        return [
            Middleware(_ForPath, prefix=PATHS[name_of(each)], middleware=each) if name_of(each) in PATHS else each
            for each in get()
        ]

    return narrowed


def name_of(middleware: Middleware) -> str:
    """The name of its class."""
    kind: Any = middleware.cls
    return str(kind.__name__)
