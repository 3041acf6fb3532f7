"""Differential privacy of samples: what one sample can move in a step, and what the steps spend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

import fedstill
from fedstill.core.weights import FlatNet
from fedstill.methods import registry
from fedstill.methods.dp_sgd import DPSGD, sample_epsilon
from fedstill.models import as_classifier
from fedstill.train.evaluate import outputs
from fedstill.train.loop import Objective, fit, gathered
from fedstill.train.private import PrivateSteps
from fedstill.train.task import LocalTraining, Samples
from support.runs import SMALL, numbers, weights
from support.wiretap import client_of, setup_of

pytest.importorskip("opacus")

LITTLE = 1e-12
QUICK: dict[str, Any] = SMALL | {"model": "mlp", "model_options": {"hidden": [4]}, "fraction": 0.05, "rounds": 3}


def network() -> FlatNet:
    """Two convolutions, whose outputs lie in channels-last order; a layer that overwrites its input; a group norm."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 2)]
    layers += [nn.Flatten(), nn.Linear(16, 3)]
    return FlatNet(as_classifier(nn.Sequential(*layers).double()))


def samples(n: int = 5) -> Samples:
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, 2, 4, 4, generator=rng, dtype=torch.float64), torch.arange(n) % 3
    return Samples(x, y, torch.arange(n), lambda x: x)


def step(data: Samples, noise: float, clip: float, batch: int = 8) -> torch.Tensor:
    """How far one step at rate 1 moves the weights; every sample is in it, as there are fewer than a batch."""
    net = network()
    before = net.read()
    steps = PrivateSteps(noise, clip, torch.Generator().manual_seed(2), torch.Generator().manual_seed(3))
    local = LocalTraining(epochs=1, batch_size=batch)
    fit(net, data, Objective(private=steps), local, lr=1.0, order=torch.Generator())
    return before - net.read()


def gradients(data: Samples) -> torch.Tensor:
    """Of each sample, one at a time."""
    net, found = network(), []
    for k in range(len(data)):
        net.module.zero_grad()
        F.cross_entropy(net.module(data.x(torch.tensor([k]))), data.y[[k]]).backward()
        flat = torch.zeros_like(net.vector)
        for part, p in zip(net.split(flat), net.params, strict=True):
            part.copy_(p.grad if p.grad is not None else torch.zeros_like(p))
        found.append(flat)
    return torch.stack(found)


def test_a_step_is_the_sum_of_clipped_gradients_over_the_expected_number() -> None:
    each = gradients(samples())
    lengths = each.norm(dim=1, keepdim=True)
    clip = float(lengths.median())
    expected = (each * (clip / lengths).clamp(max=1)).sum(0) / 8
    torch.testing.assert_close(step(samples(), LITTLE, clip), expected, rtol=1e-9, atol=1e-11)


def test_no_sample_moves_a_step_by_more_than_the_clip_and_the_noise_is_on_top() -> None:
    """With the same noise, the difference is what the last sample did."""
    all_five, four = step(samples(5), 2.0, 0.1), step(samples(5).take(torch.arange(4)), 2.0, 0.1)
    assert 0 < float((all_five - four).norm()) * 8 <= 0.1 + 1e-12
    noise = 8 * step(samples(5), 2.0, 0.1) - 8 * step(samples(5), LITTLE, 0.1)
    assert stats.kstest(noise.numpy(), stats.norm(0, 2.0 * 0.1).cdf).pvalue > 0.01


def test_samples_are_drawn_by_chance_each_on_its_own() -> None:
    steps = PrivateSteps(1.0, 1.0, torch.Generator().manual_seed(0), None)
    drawn = np.zeros((500, 60))
    for row, ids in zip(
        drawn, steps.choices(60, LocalTraining(epochs=1, steps_per_epoch=500, batch_size=6)), strict=True
    ):
        row[ids.numpy()] = 1
    assert stats.binomtest(int(drawn.sum()), 500 * 60, 0.1).pvalue > 0.001
    assert drawn.sum(1).var() == pytest.approx(60 * 0.1 * 0.9, rel=0.2)
    assert len(list(steps.choices(60, LocalTraining(epochs=2, batch_size=16)))) == 2 * 4


def test_epsilon_is_that_of_another_library() -> None:
    """Opacus' MNIST example: sigma 1.3, a rate of 0.004, 15 epochs of 250 steps."""
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.rdp import RdpAccountant

    other = RdpAccountant()
    other.compose(accounting.PoissonSampledDpEvent(0.004, accounting.GaussianDpEvent(1.3)), 3750)
    found = sample_epsilon(60_000, 15, LocalTraining(epochs=1, batch_size=240), 1.3, 1e-5)
    assert found == pytest.approx(other.get_epsilon(1e-5), rel=1e-6)


# --- which methods ----------------------------------------------------------------------------------------------------

REFUSED = {"fedkf", "feddistill", "feddistill-plus", "qffl", "dafkd", "fedhyb", "fedgen", "fedftg", "fedmd", "fedhkd"}
REFUSED |= {
    "creff",
    "fedavg+ccvr",
    "fedavg+dp",
    "fedavg+compress",
    "fedavg+votes",
    "fedproto",
    "fedtgp",
    "fml",
    "fedkd",
}
COMPOSITIONS = {*registry.names(), *(f"fedavg+{name}" for name in registry.modifiers() if name != "dp-sgd")}


@pytest.mark.parametrize("name", sorted(COMPOSITIONS))
def test_the_loss_is_a_mean_over_samples_or_the_method_is_refused(name: str) -> None:
    settings: dict[str, Any] = {"pool": 0.2, "proxy": "pool", "fraction": 0.05, "regions": 1}
    setup = setup_of(name.partition("+")[0], model="mlp", model_options={"hidden": [4]}, **settings)
    method = registry.make(name, {"noise_multiplier": 1.0} if name.endswith("+dp") else {})
    private = DPSGD(inner=method)
    if name in REFUSED:
        with pytest.raises(fedstill.SettingError) as refused:
            private.check(setup.task)
        assert str(refused.value).startswith("dp-sgd")
        assert "\n" not in str(refused.value)
        return
    private.check(setup.task)
    wire = method.wire(setup.task)
    assert wire.up.keys() <= {"model", "head", "c_change", "a"}  # which follow from weights and steps
    rng = torch.Generator().manual_seed(0)
    sent = {name: torch.rand(part.shape, generator=rng).to(part.dtype) for name, part in wire.down.items()}
    client = client_of(setup, 0, 2, sent, {"previous": [torch.rand(setup.task.size, generator=rng)]})
    objective = method.prepare(client)
    whole = gathered(client.data, setup.task.local, torch.arange(4))
    each = [gathered(client.data, setup.task.local, torch.tensor([k])) for k in range(4)]

    def loss(batch: Any) -> float:
        with torch.no_grad():
            return float(objective.loss(batch, outputs(client.net, objective.seen(batch))))

    assert loss(whole) == pytest.approx(np.mean([loss(batch) for batch in each]), rel=1e-5)


def test_what_mixes_samples_is_refused() -> None:
    with pytest.raises(fedstill.SettingError, match="BatchNorm mixes the samples"):
        setup_of("fedavg+dp-sgd", model="resnet8", model_options={"norm": "batch"})
    with pytest.raises(fedstill.SettingError, match="compose one"):
        DPSGD(inner=registry.make("fedavg+dp", {"noise_multiplier": 1.0})).check(setup_of("fedavg").task)


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_clients_are_accounted_one_by_one_and_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    class Interrupt(fedstill.Callback):
        def on_round_start(self, run: Any, round_: int, clients: int) -> None:
            if round_ == 3:
                raise KeyboardInterrupt

    settings = QUICK | {"hyper": {"noise_multiplier": 3.0}}
    whole = fedstill.run("fedgkd+dp-sgd", **settings)
    with pytest.raises(KeyboardInterrupt):
        fedstill.run("fedgkd+dp-sgd", out=tmp_path / "run", callbacks=[Interrupt()], **settings)
    resumed = fedstill.resume(tmp_path / "run")
    assert numbers(resumed) == numbers(whole)
    assert torch.equal(weights(resumed), weights(whole))
    setup = setup_of("fedgkd+dp-sgd", **settings)
    local, sizes = setup.task.local, setup.federation.sizes
    from fedstill.running.cohorts import Cohorts

    taken = [
        k
        for round_ in (1, 2, 3)
        for _, cohort in Cohorts(setup.hierarchy, sizes, 0).draw(round_, set())
        for k in cohort
    ]
    spent = [sample_epsilon(int(sizes[k]), taken.count(k), local, 3.0, 1e-5) for k in set(taken)]
    assert whole.summary["epsilon"] == pytest.approx(max(spent))


def test_at_a_site_nothing_that_is_secret_follows_from_the_seed() -> None:
    setup = setup_of("fedavg+dp-sgd")
    client = client_of(setup, 0, 1, {"model": setup.task.initial})
    objective = setup.method.prepare(client)
    assert objective.private is not None
    assert objective.private.choice is not None
    client.simulated = False
    secret = setup.method.prepare(client).private
    assert secret == replace(objective.private, choice=None, randomness=None)  # the system's


@pytest.mark.slow
def test_a_budget_ends_the_run_before_any_client_spends_more() -> None:
    settings = QUICK | {"hyper": {"noise_multiplier": 3.0, "target_epsilon": 3.0}, "rounds": 9, "participation": 1.0}
    result = fedstill.run("fedavg+dp-sgd", **settings)
    assert result.summary["stopped_by"] == "privacy budget"
    assert 0 < result.summary["epsilon"] <= 3.0
