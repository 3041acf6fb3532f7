"""Noise that the clients add themselves: what one can move in the sum, the noise of a sum, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import fedstill
from fedstill.building.config import resolve
from fedstill.building.privacy import check_noise
from fedstill.core.tree import Message
from fedstill.methods.base import Uplink, fault
from fedstill.methods.dp import DP
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.scaffold import SCAFFOLD
from fedstill.methods.summed import averaged, to_integers
from fedstill.train.client import Client
from support.byhand import tiny_server
from support.runs import SMALL, weights
from support.wiretap import client_of, setup_of

pytest.importorskip("dp_accounting")

LITTLE = 2e-5
QUICK: dict[str, Any] = SMALL | {
    "model": "mlp",
    "model_options": {"hidden": [8]},
    "fraction": 0.05,
    "rounds": 2,
    "secure_aggregation": True,
    "noise_multiplier": 4.0,
    "noise_shares": 3,
    "delta": 1e-3,
}


@dataclass(frozen=True)
class Moved(SCAFFOLD):
    """Clients whose update and control variate are given."""

    by: float = 3.0

    def uplink(self, client: Client) -> Message:
        model = client.down["model"] + self.by * torch.arange(len(client.down["model"])) / 100
        return {"model": model, "c_change": torch.full_like(model, -2.0)}


def client(round_: int = 1) -> Client:
    setup = setup_of("fedavg", model="mlp", model_options={"hidden": [4]}, fraction=0.05)
    found = client_of(setup, 0, round_, {"model": setup.task.initial})
    found.receive()
    return found


def test_a_client_clips_all_that_it_sends_together() -> None:
    method = DP(noise_multiplier=LITTLE, noise_shares=1, clip=0.5, scales="c_change=7", inner=Moved())
    given = client()
    sent, plain = method.uplink(given), Moved().uplink(given)
    start = given.down["model"].double().numpy()
    joint = np.concatenate([plain["model"].double().numpy() - start, plain["c_change"].double().numpy() / 7])
    joint *= 0.5 / np.linalg.norm(joint)
    np.testing.assert_allclose(sent["model"].numpy() - start, joint[: len(start)], atol=1e-4)
    np.testing.assert_allclose(sent["c_change"].numpy(), 7 * joint[len(start) :], atol=5e-4)


@pytest.mark.parametrize("shares", [1, 4])
def test_the_noise_of_as_many_clients_as_shares_is_what_is_accounted(shares: int) -> None:
    """Clients that did not move: the sum of what they send is noise of the standard deviation z x clip x scale."""
    method = DP(noise_multiplier=3.0, noise_shares=shares, clip=0.5, scales="c_change=10", inner=Moved(by=0.0))
    still, found = client(), {"model": [], "c_change": []}  # type: ignore[var-annotated]
    for k in range(shares):
        still.id = k
        sent = method.uplink(still)
        found["model"].append(sent["model"] - still.down["model"])
        found["c_change"].append(sent["c_change"])
    # The control variates are clipped to c: -2 everywhere has the length 2 sqrt(n) / 10 in units of its scale.
    n = len(still.down["model"])
    length = 2 * math.sqrt(n) / 10
    c = -2.0 * min(1, 0.5 / length)
    for name, scale, mean in (("model", 1, 0.0), ("c_change", 10, c)):
        total = torch.stack(found[name]).sum(0).numpy() - shares * mean
        assert stats.kstest(total, stats.norm(0, 3.0 * 0.5 * scale).cdf).pvalue > 0.001


@pytest.mark.parametrize("by", [math.nan, math.inf, 1e38])
def test_a_client_that_diverged_sends_noise_like_everybody_else(by: float) -> None:
    """Its refusal would be told without noise, and in every attempt at the round again."""
    method = DP(noise_multiplier=3.0, noise_shares=4, clip=0.5, scales="c_change=10", inner=Moved(by=by))
    given = client()
    sent = method.uplink(given)
    assert not fault(sent, method.wire(given.task).up)
    noise = (sent["model"] - given.down["model"]).numpy()
    if not math.isfinite(by):
        assert stats.kstest(noise, stats.norm(0, 3.0 * 0.5 / 2).cdf).pvalue > 0.001


def test_the_server_takes_the_mean_of_what_came(tmp_path: Path) -> None:
    method, server = DP(noise_multiplier=1.0, noise_shares=2, inner=FedAvg()), tiny_server(tmp_path, [1, 50, 3])
    method.start(server)
    before, declared = server.model.double().clone(), method.wire(server.task).up
    rng = torch.Generator().manual_seed(0)
    ups = [Uplink(k, 9, {"model": torch.randn(before.shape, generator=rng, dtype=torch.float64)}) for k in range(3)]
    method.aggregate(server, averaged(iter(ups), declared))
    expected = torch.stack([up["model"] for up in ups]).mean(0)
    torch.testing.assert_close(server.model.double(), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(fedstill.FedstillError, match="the noise of 1 clients is less than is accounted"):
        method.aggregate(server, averaged(iter(ups[:1]), declared))


def test_a_client_draws_other_noise_in_every_round_and_none_that_others_draw() -> None:
    method = DP(noise_multiplier=1.0, noise_shares=2, inner=FedAvg())
    drawn = []
    for round_, number in ((1, 0), (1, 1), (2, 0)):
        given = client(round_)
        given.id = number
        drawn.append(method.uplink(given)["model"])
    assert all((a != b).all() for a, b in ((drawn[0], drawn[1]), (drawn[0], drawn[2])))
    given = client()
    given.simulated = False
    assert (method.uplink(given)["model"] != method.uplink(given)["model"]).all()


def test_rounding_is_nothing_beside_the_noise() -> None:
    """The least noise that is let through has thousands of steps of the grid, and the largest fits into it."""
    setup = setup_of("fedavg", model="mlp")
    for clip, fits in ((1e-6, False), (1e-5, True), (1e3, True), (1e4, False)):
        method = DP(noise_multiplier=1.0, noise_shares=1, clip=clip, inner=FedAvg())
        if not fits:
            with pytest.raises(fedstill.SettingError, match="have room for"):
                method.check(setup.task)
            continue
        method.check(setup.task)
        drawn = torch.randn(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * clip
        assert to_integers({"a": drawn}, {"a": None}).unique().numel() > 3000  # type: ignore[dict-item]


def test_a_client_refuses_a_model_at_which_its_noise_would_be_cut_off() -> None:
    given = client()
    given.down = {"model": given.down["model"] + 2.0**17}
    with pytest.raises(fedstill.SettingError, match="sums cut noise off"):
        DP(noise_multiplier=1.0, noise_shares=2, inner=FedAvg()).uplink(given)
    with pytest.raises(fedstill.SettingError, match="the room of masked sums"):
        DP(noise_multiplier=0.01, noise_shares=2, clip=1e5, inner=FedAvg()).uplink(client())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"noise_shares": 0}, "give noise_multiplier .* and noise_shares"),
        ({"noise_multiplier": 0.0, "target_epsilon": 3.0}, "give noise_multiplier"),
        ({"secure_aggregation": False}, "set secure_aggregation = true"),
        ({"adaptive_clip": 0.5}, "adaptive_clip follows what the server counts"),
        ({"noise_shares": 7}, "dp asks for at least 7 clients a round"),
    ],
)
def test_what_would_leave_a_sum_without_its_noise_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(fedstill.SettingError, match=reason):
        fedstill.run("fedavg+dp", **QUICK | changed)


def test_more_shares_than_a_client_can_make_sure_of_are_refused() -> None:
    """Of a sum of more than 101 a client knows 101, and would refuse every one that should have more in it."""
    config = resolve({"method": "fedavg+dp", "secure_aggregation": True})
    check_noise(config, DP(noise_multiplier=1.0, noise_shares=101, inner=FedAvg()))
    with pytest.raises(fedstill.SettingError, match=r"itself and 100 others .* at most 101"):
        check_noise(config, DP(noise_multiplier=1.0, noise_shares=102, inner=FedAvg()))


def test_a_run_has_the_same_bits_whoever_computes_it_and_every_round_is_accounted_in_full() -> None:
    """That a client is drawn by chance hides nobody from the server: T rounds of a Gaussian mechanism, whoever came."""
    result = fedstill.run("fedavg+dp", **QUICK)
    other = fedstill.run("fedavg+dp", **QUICK | {"engine": "process", "workers": 2})
    assert torch.equal(weights(result), weights(other))
    # A Gaussian mechanism of noise z / sqrt(T): delta of epsilon in closed form (Balle and Wang 2018).
    mu = math.sqrt(2) / 4.0
    spent = result.summary["epsilon"]
    phi = stats.norm.cdf
    assert phi(mu / 2 - spent / mu) - math.exp(spent) * phi(-mu / 2 - spent / mu) == pytest.approx(1e-3, rel=0.02)
    assert result.records[-1]["privacy"]["noise_shares"] == 3
