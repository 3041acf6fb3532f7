"""Which methods' servers need no more than a mean: what they say of themselves is what they do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.core.errors import SettingError
from fedstill.core.store import Store
from fedstill.core.tree import tensors
from fedstill.methods import registry
from fedstill.methods.base import Method, Server, Uplink
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.summed import averaged, check_sums_only, sums_only
from support.wiretap import setup_of

NEEDED: dict[str, Any] = {"pool": 60, "proxy": "pool", "proxy_size": 20}
SUMS = ["fedavg", "fedprox", "fedgkd", "fedgkd-vote", "fedgkd-plus", "moon", "scaffold", "feddyn", "fedmd"]


def test_the_methods_that_take_means_are_known() -> None:
    assert [name for name in registry.names() if sums_only(registry.find_part(name))] == SUMS
    # Of ccvr, rounds are those of the method before it; what it collects after the last is refused for itself. dp is
    # let through with `noise_shares` alone.
    assert sorted(name for name in registry.modifiers() if sums_only(registry.find_part(name))) == ["ccvr", "dp"]


@pytest.mark.parametrize("name", SUMS)
def test_the_server_makes_the_same_of_the_uplinks_and_of_their_mean(name: str, tmp_path: Path) -> None:
    setup = setup_of(name, **NEEDED)
    method, task = setup.method, setup.task
    check_sums_only(method, task)
    declared = method.wire(task).up
    rng = torch.Generator().manual_seed(0)
    ups = [
        Uplink(k, 1, {n: torch.randn(part.shape, generator=rng, dtype=part.dtype) for n, part in declared.items()})
        for k in (0, 2, 3)
    ]

    def server_after(uplinks: Iterator[Uplink], place: str) -> dict[str, torch.Tensor]:
        server = Server(task, setup.federation.sizes, Store(tmp_path / place), setup.pool())
        server.round = 1
        method.start(server)
        method.aggregate(server, uplinks)
        return {"model": server.model, **tensors(server.state, "state")}

    one_by_one, by_mean = server_after(iter(ups), "a"), server_after(averaged(iter(ups), declared), "b")
    assert one_by_one.keys() == by_mean.keys()
    for part, tensor in one_by_one.items():
        torch.testing.assert_close(by_mean[part], tensor, rtol=1e-6, atol=1e-6)


@dataclass(frozen=True)
class Own(FedAvg):
    """An aggregation of somebody's own, which says nothing of itself."""

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        server.model = max(uplinks, key=lambda up: float(up["model"].norm()))["model"]


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("fedavg+median", "median compares what single clients sent"),
        ("fedprox+t1", "t1 works with what single clients sent"),
        ("fedgkd+feddf", "feddf works with what single clients sent"),
        ("qffl", "qffl works with"),
        (Own(), " works with what single clients sent"),
        ("fedavg+ccvr", "ccvr"),
    ],
)
def test_a_method_that_looks_at_single_uplinks_is_refused_in_one_line(method: str | Method, reason: str) -> None:
    setup = setup_of(method if isinstance(method, str) else "fedavg", **NEEDED)
    with pytest.raises(SettingError, match=reason) as refused:
        check_sums_only(setup.method if isinstance(method, str) else method, setup.task)
    assert "\n" not in str(refused.value)


def test_the_setting_refuses_a_method_before_the_run() -> None:
    with pytest.raises(SettingError, match="secure_aggregation = true: median compares"):
        setup_of("fedavg+median", secure_aggregation=True)
    with pytest.raises(SettingError, match="max_update_ratio = 5"):
        setup_of("fedavg", secure_aggregation=True, max_update_ratio=5)
