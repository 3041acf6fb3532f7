"""Regions with servers of their own, in this process: a wire that the test controls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import fedstill
from fedstill.building.config import resolve
from fedstill.core import tree
from fedstill.core.reports import code_of, report, step_of
from fedstill.core.tree import Tree
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.policy import Policy
from fedstill.deployment.protocol import SiteLink
from fedstill.deployment.region import RegionalServer
from fedstill.deployment.server import serve
from fedstill.deployment.site import Site
from fedstill.deployment.site_engine import Terms
from fedstill.running.callbacks import Callback
from support.runs import SMALL
from support.sites import Silence

SETTINGS: dict[str, Any] = {k: v for k, v in SMALL.items() if k != "engine"}
SETTINGS |= {"clients": 5, "rounds": 4, "rounds_per_episode": 2, "participation": 0.67, "pool": 0.2}
SETTINGS["region"] = [{"name": "east", "clients": [0, 3, 4]}, {"name": "west", "clients": [1, 2], "epochs": 2}]


SITES = {"east": ("ann", "bob", "cid"), "west": ("dan", "eve")}


POLICY = Policy(allow=("scaffold", "dafkd", "ccvr", "class-counts"))  # what tests run that sends more than weights


class Wire:
    """Whoever answers, in this process, behind bytes."""

    def __init__(self, there: Mapping[str, Any]) -> None:
        self.there = dict(there)
        self.away = set[str]()
        self.requests: list[tuple[str, Tree]] = []

    def present(self) -> set[str]:
        return set(self.there) - self.away

    def send_requests(
        self, requests: Mapping[str, Tree], *, timeout: float, name: str | None = None, until: Any = None
    ) -> Iterator[tuple[str, Any]]:
        for who, request in reversed(list(requests.items())):
            if who in self.away:
                yield who, Silence(f"no answer within {timeout:g} s")
                continue
            self.requests.append((who, request["request"]))
            try:
                yield who, tree.decode(tree.encode(self.there[who].handle(tree.decode(tree.encode(request)))))
            except fedstill.FedstillError as error:
                yield who, {"error": report(code_of(error), step_of(error), "4f2a")}


class World:
    """Two regions with their sites."""

    def __init__(self, folder: Path, **data: str) -> None:
        self.sites = {
            region: Wire({name: Site(folder / name, LocalInputs(data=data.get(name, "")), POLICY) for name in names})
            for region, names in SITES.items()
        }
        self.regions = {name: self.region(folder, name) for name in SITES}
        self.top = Wire(self.regions)

    def region(self, folder: Path, name: str) -> RegionalServer:
        def connect(most_bytes: int) -> nullcontext[SiteLink]:
            return nullcontext(self.sites[name])

        return RegionalServer(folder / name, SITES[name], connect, inputs=LocalInputs(), terms=Terms(timeout=5))


def served(world: World, out: Path, method: str, callbacks: Sequence[Callback] = (), **settings: Any) -> Any:
    config = resolve(SETTINGS | settings | {"method": method})
    with ExitStack() as stack:
        for region in world.regions.values():
            stack.enter_context(region)
        return serve(
            config, list(SITES), world.top, out, terms=Terms(timeout=5), pause=lambda missing: False,
            callbacks=callbacks, regional=True,
        )  # fmt: skip


def alone(out: Path, method: str, **settings: Any) -> Any:
    return fedstill.run(method, **SETTINGS | settings, out=out, engine="inline")
