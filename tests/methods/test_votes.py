"""Noisy votes: what one client can move, the noise on the counts, and that the model learns the winners alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import fedstill
from fedstill.core.store import Store
from fedstill.methods import votes as module
from fedstill.methods.base import Server, Uplink
from fedstill.methods.votes import Votes, votes
from fedstill.privacy.accounting import Plan, epsilon
from support.runs import SMALL, weights
from support.wiretap import setup_of

pytest.importorskip("dp_accounting")

NEEDED: dict[str, Any] = {"pool": 0.2, "proxy": "pool", "fraction": 0.1, "model": "mlp", "image_size": 16}
LITTLE = 1e-9


@pytest.fixture
def server(tmp_path: Path) -> Server:
    setup = setup_of("fedavg", **NEEDED)
    found = Server(setup.task, np.full(6, 1), Store(tmp_path), setup.pool())
    found.round, found.drawn = 1, (6, 4)
    return found


def ups(server: Server, count: int, scale: float = 1.0) -> list[Uplink]:
    rng = torch.Generator().manual_seed(0)
    return [
        Uplink(k, 1, {"model": server.model + scale * torch.randn(server.model.shape, generator=rng)})
        for k in range(count)
    ]


def test_every_client_has_one_vote_a_sample_by_its_own_model(server: Server) -> None:
    assert server.task.proxy is not None
    clients = ups(server, 5)
    counts = votes(server, iter(clients), server.task.proxy)
    expected = np.zeros(counts.shape)
    for up in clients:  # by the network itself, sample by sample
        net = server.task.build()
        net.load(up["model"])
        net.module.eval()
        with torch.no_grad():
            said = net.module(server.task.proxy.x(torch.arange(len(server.task.proxy)))).argmax(1).numpy()
        expected[np.arange(len(said)), said] += 1
    np.testing.assert_array_equal(counts.numpy(), expected)


@pytest.mark.parametrize("left_out", range(4))
def test_no_client_moves_the_counts_by_more_than_the_root_of_the_queries(server: Server, left_out: int) -> None:
    """Also one whose weights are as large as they can be."""
    assert server.task.proxy is not None
    clients = [*ups(server, 3), ups(server, 1, scale=1e18)[0]]
    others = [up for k, up in enumerate(clients) if k != left_out]
    moved = votes(server, iter(clients), server.task.proxy) - votes(server, iter(others), server.task.proxy)
    assert float(moved.norm()) == pytest.approx(math.sqrt(len(server.task.proxy)))


def test_the_noise_on_the_counts_has_the_size_that_is_accounted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 queries with noise multiplier 3, the noise on each count has deviation 3 sqrt(60)."""
    drawn: list[torch.Tensor] = []

    def spy(server: Server, uplinks: Any, samples: Any) -> torch.Tensor:
        drawn.append(torch.zeros(len(samples), 10, dtype=torch.float64))
        return drawn[-1]

    noisy: list[torch.Tensor] = []
    argmax = torch.Tensor.argmax
    monkeypatch.setattr(module, "votes", spy)

    def winners(self: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        noisy.append(self)
        return argmax(self, *args, **more)

    monkeypatch.setattr(torch.Tensor, "argmax", winners)
    method = Votes(noise_multiplier=3.0, queries=60, server_epochs=1)
    method.start(server)
    for round_ in range(1, 12):
        server.round = round_
        method.aggregate(server, iter(()))
    found = torch.cat([each.flatten() for each in noisy if each.shape == (60, 10)]).numpy()
    assert len(found) == 11 * 600
    assert stats.kstest(found, stats.norm(0, 3.0 * math.sqrt(60)).cdf).pvalue > 0.001


def test_with_little_noise_the_model_learns_what_most_say_and_nothing_of_their_weights(server: Server) -> None:
    """Two sets of clients whose votes are the same leave the same bits, whatever their weights are."""
    method = Votes(noise_multiplier=LITTLE, queries=50)
    clients = ups(server, 1)
    single = torch.zeros_like(server.model)
    results = []
    for group in (clients * 3, [*clients * 3, Uplink(9, 1, {"model": single})]):
        server.model = server.task.initial
        method.start(Server(server.task, server.sizes, server.store))
        server.state = {"votes": {"rounds": []}}
        method.aggregate(server, iter(group))
        results.append(server.model)
    assert torch.equal(*results)  # one vote against three changes no label
    assert not torch.equal(results[0], server.task.initial)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("scaffold+votes", {}, "makes nothing of what clients send but votes, and scaffold does"),
        ("feddf+votes", {}, "feddf does"),
        ("fedavg+t1+votes", {}, "and fedavg\\+t1 does"),
        ("fedavg+votes", {"proxy": ""}, "votes needs proxy data"),
        ("fedavg+votes+dp", {"hyper": {}}, "would use what clients send as it comes"),
        ("fedavg+votes", {"secure_aggregation": True}, "works with what single clients sent"),
        ("fedavg+votes", {"model": "resnet8", "model_options": {"norm": "batch"}}, "BatchNorm's statistics"),
    ],
)
def test_what_does_more_with_updates_is_refused(name: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(fedstill.SettingError, match=reason):
        setup_of(name, **NEEDED | {"hyper": {"noise_multiplier": 1.0}} | settings)


def test_a_run_finds_its_noise_accounts_for_it_and_repeats() -> None:
    settings = SMALL | NEEDED | {"rounds": 2, "eval_every": 2, "target_epsilon": 4.0, "delta": 1e-3, "queries": 40}
    result, again = (fedstill.run("fedprox+votes", **settings | {"engine": e}) for e in ("inline", "process"))
    assert 3.9 < result.summary["epsilon"] <= 4.0
    noise = result.summary["privacy"]["noise_multiplier"]
    assert result.summary["epsilon"] == pytest.approx(epsilon(Plan(6, 3, 2), noise, 1e-3))
    assert torch.equal(weights(result), weights(again))
