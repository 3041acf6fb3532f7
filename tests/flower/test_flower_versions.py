"""What is used of Flower beyond its public interfaces is there, or the program says so before it starts."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import flwr.app
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient

import fedstill.flower
from fedstill.cli import network
from fedstill.core.errors import FedstillError
from fedstill.deployment.policy import Policy
from fedstill.flower import versions
from fedstill.flower.superlink.__main__ import USED_HERE

used: Any = importlib.import_module(USED_HERE)
MODULES = ("fedstill.flower.messages", network._SERVER, network._SITE, USED_HERE)


def test_the_installed_flower_has_all_that_is_used_of_it() -> None:
    versions.check(*MODULES)


@pytest.mark.parametrize(
    ("owner", "name", "module"),
    [
        (FleetHttpClient, "PushObject", network._SITE),
        (RuntimeHttpClient, "PullMessages", network._SERVER),
        (used.extensions, "get_middleware", USED_HERE),
    ],
)
def test_what_a_flower_lacks_is_named_with_its_version(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, module: str
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(
        FedstillError, match=rf"Flower {flwr.__version__} lacks .*{owner.__name__} has no {name}; .*1\.41"
    ):
        versions.check(module)


def test_a_module_that_a_flower_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, network._SITE, raising=False)
    monkeypatch.setitem(sys.modules, "flwr.supernode.fleet_http_client", None)
    with pytest.raises(FedstillError, match=rf"Flower {flwr.__version__} lacks .*fleet_http_client"):
        versions.check(network._SITE)


def test_a_site_says_so_before_it_connects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(FleetHttpClient, "ActivateNode")
    with pytest.raises(FedstillError, match="FleetHttpClient has no ActivateNode"):
        network.join(
            "127.0.0.1:1", key=tmp_path / "key", ca=None, directory=tmp_path / "site", insecure=True, policy=Policy(),
            ask=None, once=True, data="",
        )  # fmt: skip
    assert not (tmp_path / "site").exists()


def test_what_the_superlinks_process_imports_later_is_checked_at_its_start() -> None:
    checked = {name for names in used.USED.values() for name in names} | vars(used).keys() | set(flwr.app.__all__)
    folder = Path(fedstill.flower.__file__).parent / "superlink"
    nodes = [node for file in folder.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    from_flower = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith("flwr")]
    assert {alias.asname or alias.name for node in from_flower for alias in node.names} <= checked
