"""Differential privacy where there is somebody to protect: sites that a server asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedstill.core.tree import Tree
from fedstill.deployment import region as regional
from fedstill.privacy.accounting import Plan, epsilon
from support import regions
from support.sites import Wire, served, weights

pytest.importorskip("dp_accounting")

PRIVATE: dict[str, Any] = {"hyper": {"noise_multiplier": 4.0, "delta": 1e-3, "clip": 0.01}}


class Tapped(Wire):
    """Notes what sites answer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.metrics: set[str] = set()
        self.kinds: list[str | None] = []

    def answer(self, name: str, request: Tree) -> Any:
        answer = super().answer(name, request)
        self.kinds.append(request["request"] and request["request"].get("kind"))
        self.metrics |= set(answer.get("metrics", {}))
        return answer


@pytest.mark.slow
def test_sites_are_not_asked_how_they_do_and_the_noise_is_not_in_the_seed(tmp_path: Path) -> None:
    wire = Tapped(tmp_path / "sites")
    result = served(wire, tmp_path / "one", "fedavg+dp", rounds=2, **PRIVATE)
    assert [record["epsilon"] for record in result.records] == pytest.approx(
        [epsilon(Plan(3, 3, n), 4.0, 1e-3) for n in (1, 2)]
    )
    assert wire.metrics == {"seconds"}
    assert "Score" not in wire.kinds
    assert all(record["train_loss"] is record["amp"] is None for record in result.records)
    served(Wire(tmp_path / "others"), tmp_path / "two", "fedavg+dp", rounds=2, **PRIVATE)
    assert weights(tmp_path / "one") != weights(tmp_path / "two")  # of one seed


@pytest.mark.slow
def test_a_regional_server_reports_what_its_region_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regional, "_NEWCOMERS_TIMEOUT", 0.5)
    result = regions.served(regions.World(tmp_path), tmp_path / "served", "fedavg+dp+f2l", participation=1.0, **PRIVATE)
    members = {len(sites) for sites in regions.SITES.values()}
    spent = max(epsilon(Plan(n, n, 4), 4.0, 1e-3) for n in members)
    assert result.summary["epsilon"] == pytest.approx(spent)


@pytest.mark.slow
def test_a_regional_server_finds_the_noise_of_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regional, "_NEWCOMERS_TIMEOUT", 0.5)
    budget: dict[str, Any] = {"hyper": {"target_epsilon": 9.0, "delta": 1e-3, "clip": 0.01}}
    result = regions.served(regions.World(tmp_path), tmp_path / "served", "fedavg+dp+f2l", participation=1.0, **budget)
    assert 8.5 < result.summary["epsilon"] <= 9.0
