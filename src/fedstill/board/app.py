"""The board's web application: one page, its script and style, and the runs as JSON. Nothing here writes."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Collection
from dataclasses import asdict
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedstill.analysis.figures import client_accuracies, data_partition
from fedstill.analysis.pages import with_baselines
from fedstill.analysis.runs import group_runs
from fedstill.board.runs import Entry, Runs, log_tail
from fedstill.core import trust
from fedstill.core.errors import FedstillError, in_one_line
from fedstill.data import download
from fedstill.report.charts import bubble_data, client_data, curve_data
from fedstill.report.page import differences, results
from fedstill.running.directory import without_nan

STATIC = {
    "chart.js": ("fedstill.report", "text/javascript"),
    "style.css": ("fedstill.report", "text/css"),
    "board.js": ("fedstill.board", "text/javascript"),
    "board.css": ("fedstill.board", "text/css"),
}
MOST = 100  # runs that are compared at once
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_app(root: Path, hosts: Collection[str] = ()) -> Starlette:
    """The application for the runs below a folder. `hosts` are further names by which it may be called."""
    runs = Runs(root)
    partitions: dict[str, dict[str, Any]] = {}  # those read so far, by run and settings

    def page(request: Request) -> Response:
        return Response(_static("fedstill.board", "board.html"), media_type="text/html; charset=utf-8")

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            raise HTTPException(404, "there is no such file")
        package, kind = STATIC[name]
        return Response(_static(package, name), media_type=kind)

    def listing(request: Request) -> Response:
        return _json({"root": str(runs.root), "runs": [entry.row() for entry in runs.entries().values()]})

    def compare(request: Request) -> Response:
        """Chosen runs side by side, as in the report: curves, clients, tables."""
        chosen = [entry.run for entry in _chosen(runs, request) if entry.run]
        groups = group_runs(chosen)
        ended = group_runs([run for run in chosen if run.summary])
        pairs = with_baselines(ended)
        tables = [results(ended, pairs)] if ended else []
        tables += [differences(pairs)] if pairs else []
        return _json(
            {
                "curves": curve_data(groups),
                "clients": client_data(served) if (served := client_accuracies(ended)) else None,
                "tables": [asdict(table) for table in tables],
            }
        )

    def details(request: Request) -> Response:
        """One run: its clients, the worst served first, its settings and the end of its log."""
        (entry,) = _chosen(runs, request)[:1]
        run = entry.run
        clients = sorted(zip(run.clients, run.client_names, strict=True), key=lambda c: c[0][1]) if run else []
        return _json(
            entry.row()
            | {
                "clients": [{"name": name, "samples": n, "accuracy": accuracy} for (n, accuracy), name in clients],
                "config": run.config if run else "",
                "log": log_tail(entry.path),
            }
        )

    def partition(request: Request) -> Response:
        """A run's data partition, for which its data are loaded; no code of the user's is run, and nothing fetched."""
        (entry,) = _chosen(runs, request)[:1]
        if entry.run is None:
            return _json({"problem": entry.problem})
        if trust.files_of(entry.run.settings):
            return _json({"problem": "its settings name code, which the board does not run: fedstill figure bubbles"})
        key = f"{entry.name}\n{entry.run.config}"
        if key not in partitions:
            try:
                with download.refused():
                    partitions[key] = {"partition": bubble_data(data_partition(entry.path))}
            except (FedstillError, OSError) as error:
                return _json({"problem": in_one_line(error)})
        return _json(partitions[key])

    routes = [
        Route("/", page),
        Route("/static/{name}", static),
        Route("/api/runs", listing),
        Route("/api/compare", compare),
        Route("/api/run", details),
        Route("/api/partition", partition),
    ]
    return Starlette(routes=routes, middleware=[Middleware(_Guard, hosts=frozenset(hosts))])


def _static(package: str, name: str) -> bytes:
    return (resources(package) / "static" / name).read_bytes()


def _chosen(runs: Runs, request: Request) -> list[Entry]:
    names = request.query_params.getlist("run")
    if not 1 <= len(names) <= MOST:
        raise HTTPException(400, f"give 1 to {MOST} runs, as ?run=NAME")
    try:
        return runs.choose(names)
    except KeyError as error:
        raise HTTPException(404, "there is no such run") from error


def _json(value: Any) -> Response:
    return Response(json.dumps(without_nan(value), allow_nan=False), media_type="application/json")


class _Guard:
    """Answers only those who called it by a name that is its own, and says to browsers what a page may do.

    A page of somebody else's could have its own name point to this machine; then the name that is called is theirs.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.lower().encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        app: ASGIApp = self.app
        if not is_own_name(Request(scope).headers.get("host", ""), self.hosts):
            app = PlainTextResponse("this host is not served; see fedstill board --host", 421)
        await app(scope, receive, with_headers)


def is_own_name(host: str, names: Collection[str] = ()) -> bool:
    """Whether the Host of a request is localhost, an address in numbers, or one of these names.

    >>> is_own_name("localhost:8765"), is_own_name("[::1]:8765"), is_own_name("evil.example")
    (True, True, False)
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    name = name.lower()
    if name == "localhost" or name in {each.lower() for each in names}:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
