"""A federation of sites that hold their own data, in this process: a wire that the test controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fedstill
from fedstill.building.config import resolve
from fedstill.core import tree
from fedstill.core.tree import Tree
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.policy import Policy
from fedstill.deployment.server import serve
from fedstill.deployment.site import Site
from fedstill.deployment.site_engine import Terms
from fedstill.running.callbacks import Callback
from support.runs import SMALL

SETTINGS: dict[str, Any] = {k: v for k, v in SMALL.items() if k != "engine"} | {"clients": 3, "participation": 1.0}


NAMES = ("north", "south", "west")


POLICY = Policy(allow=("scaffold", "dafkd", "ccvr", "feddistill"))  # what tests run that sends more than weights


MALFORMED: list[tuple[Any, str]] = [  # ways to spoil the message of an answer, and what the server says of it
    (lambda a: {"message": {"model": a["message"]["model"][:-1]}}, "has shape"),
    (lambda a: {"message": {"weights": a["message"]["model"]}}, "it holds"),
    (lambda a: {"message": {"model": a["message"]["model"] * torch.nan}}, "not finite"),
]


@dataclasses.dataclass
class Silence:
    reason: str


class Wire:
    """Sites in this process, behind bytes."""

    def __init__(self, folder: Path, **data: str) -> None:
        self.sites = {name: Site(folder / name, LocalInputs(data=data.get(name, "")), POLICY) for name in NAMES}
        self.away = set[str]()

    def present(self) -> set[str]:
        return set(self.sites) - self.away

    def send_requests(
        self, requests: Mapping[str, Tree], *, timeout: float, name: str | None = None, until: Any = None
    ) -> Iterator[tuple[str, Any]]:
        for site, request in reversed(list(requests.items())):  # answers come in any order
            if site in self.away:
                yield site, Silence(f"no answer within {timeout:g} s")
            else:
                yield site, self.answer(site, tree.decode(tree.encode(request)))

    def answer(self, name: str, request: Tree) -> Any:
        return tree.decode(tree.encode(self.sites[name].handle(request)))


def served(wire: Wire, out: Path, method: str = "fedavg", callbacks: Sequence[Callback] = (), **settings: Any) -> Any:
    config = resolve(SETTINGS | settings | {"method": method})
    return serve(config, NAMES, wire, out, terms=Terms(timeout=5), pause=lambda missing: False, callbacks=callbacks)


def alone(out: Path, method: str = "fedavg", **settings: Any) -> Any:
    return fedstill.run(method, **SETTINGS | settings, out=out, engine="inline")


def weights(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


def sizes(path: Path) -> list[int]:
    lines = (path / "clients.csv").read_text().splitlines()[1:]
    return [int(line.split(",")[1]) for line in lines]
