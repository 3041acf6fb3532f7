"""Regions with servers of their own, over a wire that the test controls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL
from test_sites import Silence, weights

import fedstill
from fedstill.core import tree
from fedstill.core.tree import Tree
from fedstill.experiment.config import Config, resolve
from fedstill.experiment.regional import RegionalServer
from fedstill.experiment.runner import Listener
from fedstill.experiment.sites import Link, Own, Site, Terms, serve

SETTINGS: dict[str, Any] = {k: v for k, v in SMALL.items() if k != "engine"}
SETTINGS |= {"clients": 5, "rounds": 4, "rounds_per_episode": 2, "participation": 0.67, "pool": 0.2}
SETTINGS["region"] = [{"name": "east", "clients": [0, 3, 4]}, {"name": "west", "clients": [1, 2], "epochs": 2}]
SITES = {"east": ("ann", "bob", "cid"), "west": ("dan", "eve")}


class Wire:
    """Whoever answers, in this process, behind bytes."""

    def __init__(self, there: Mapping[str, Any]) -> None:
        self.there = dict(there)
        self.away = set[str]()
        self.asked: list[tuple[str, Tree]] = []

    def present(self) -> set[str]:
        return set(self.there) - self.away

    def ask(
        self, requests: Mapping[str, Tree], *, timeout: float, name: str | None = None
    ) -> Iterator[tuple[str, Any]]:
        for who, request in reversed(list(requests.items())):
            if who in self.away:
                yield who, Silence(f"no answer within {timeout:g} s")
                continue
            self.asked.append((who, request["request"]))
            try:
                yield who, tree.decode(tree.encode(self.there[who].handle(tree.decode(tree.encode(request)))))
            except fedstill.FedstillError as error:
                yield who, {"error": str(error)}


class World:
    """Two regions with their sites."""

    def __init__(self, folder: Path, **data: str) -> None:
        self.sites = {
            region: Wire({name: Site(folder / name, Own(data=data.get(name, ""))) for name in names})
            for region, names in SITES.items()
        }
        self.regions = {name: self.region(folder, name) for name in SITES}
        self.top = Wire(self.regions)

    def region(self, folder: Path, name: str) -> RegionalServer:
        def link(config: Config) -> Link:
            return self.sites[name]

        return RegionalServer(folder / name, SITES[name], link, own=Own(), terms=Terms(timeout=5))

    def close(self) -> None:
        for region in self.regions.values():
            region.close()


def served(world: World, out: Path, method: str, listener: Listener | None = None, **settings: Any) -> Any:
    config = resolve(SETTINGS | settings | {"method": method})
    try:
        return serve(
            config, list(SITES), world.top, out, terms=Terms(timeout=5), pause=lambda: False, listener=listener,
            regional=True,
        )  # fmt: skip
    finally:
        world.close()


def alone(out: Path, method: str, **settings: Any) -> Any:
    return fedstill.run(method, **SETTINGS | settings, out=out, engine="inline")


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg+f2l", {}),
        ("fedavg+f2l", {"local_unit": "equal_steps", "participation": 1.0}),
        ("scaffold+f2l", {}),
        ("fedavg+t1+f2l", {}),
        ("fedavg", {}),
        ("fedgkd-vote+f2l", {"buffer": 2}),
    ],
)
def test_regions_come_to_the_bits_of_a_run_on_one_machine(tmp_path: Path, method: str, settings: dict[str, Any]) -> None:
    there = served(World(tmp_path), tmp_path / "served", method, **settings)
    here = alone(tmp_path / "alone", method, **settings)
    assert weights(tmp_path / "served") == weights(tmp_path / "alone")
    meetings = [record for record in here.records if "episode" in record]
    assert [r["round"] for r in there.records] == [2, 4]
    for ours, theirs in zip(meetings, there.records, strict=True):
        for name in ("round", "accuracy", "loss", "amp", "fm", "wlp"):
            assert ours[name] == theirs[name]
        assert ours["episode"]["teachers"] == theirs["episode"]["teachers"]
    assert here.summary["bytes_up"] == there.summary["bytes_up"]
    assert here.summary["bytes_down"] == there.summary["bytes_down"]
