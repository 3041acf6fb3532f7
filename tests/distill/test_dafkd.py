"""DaFKD: correlations, private predictions, discriminators, generated samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedstill
from fedstill.distill import stage
from fedstill.distill.auxiliary import Generator
from fedstill.distill.ensemble import normalised
from fedstill.methods.base import Uplink
from fedstill.methods.dafkd import DaFKD
from fedstill.running.directory import RunDirectory
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch
from fedstill.train.task import Task
from support.distilling import POOL, SHORT, fed, small_setup, targets_of
from support.runs import RunSmall, weights


def test_correlation_factors_sum_to_one_and_fall_back_to_uniform() -> None:
    alpha = torch.tensor([[0.2, 0.0, 1.0], [0.6, 0.0, 0.0]])
    found = normalised(alpha)
    torch.testing.assert_close(found.sum(0), torch.ones(3))
    torch.testing.assert_close(found[:, 0], torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(found[:, 1], torch.tensor([0.5, 0.5]))


def test_a_constant_discriminator_gives_the_uniform_ensemble(tmp_path: Path) -> None:
    models = {}
    _, ups = fed(small_setup("dafkd", **SHORT["dafkd"]), tmp_path)
    for up in ups:
        up["discriminator"].zero_()  # says 1/2 of everything
    for variant in ("full", "no-correlation"):
        setup = small_setup("dafkd", variant=variant, **SHORT["dafkd"])
        server, _ = fed(setup, tmp_path)
        setup.method.aggregate(server, iter(ups))
        models[variant] = server.model
    torch.testing.assert_close(models["full"], models["no-correlation"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_in_the_private_variant_no_discriminator_leaves_a_client(run_small: RunSmall) -> None:
    setup = small_setup("dafkd", private=True, **SHORT["dafkd"])
    assert sorted(setup.method.wire(setup.task).up) == ["generator", "model", "predictions"]
    result = run_small("dafkd", **POOL, **SHORT["dafkd"], private=True)
    assert result.summary["dropped"] == 0
    assert not torch.equal(weights(result), weights(run_small("dafkd", **POOL, variant="no-distill")))


def test_private_targets_are_the_correlation_weighted_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = small_setup("dafkd", private=True, **SHORT["dafkd"])
    server, ups = fed(setup, tmp_path)
    g = torch.Generator().manual_seed(1)
    n, c = ups[0]["predictions"].shape
    alphas = torch.rand(len(ups), n, generator=g)
    soft = torch.randn(len(ups), n, c, generator=g).softmax(2)
    for up, alpha, p in zip(ups, alphas, soft, strict=True):
        up.message["predictions"] = alpha.unsqueeze(1) * p
    seen = targets_of(monkeypatch, "dafkd")
    setup.method.aggregate(server, iter(ups))
    expected = (alphas.unsqueeze(2) * soft).sum(0) / alphas.sum(0).unsqueeze(1)
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-6)


def test_logits_may_be_averaged_and_matched_at_a_temperature() -> None:
    """The softmax of the weighted mean logits over T, and T² KL: by NumPy."""
    g = np.random.default_rng(0)
    said, weight, student = g.normal(size=(3, 5, 4)), g.dirichlet(np.ones(3), 5).T, g.normal(size=(5, 4))
    answers = [Outputs(torch.from_numpy(k), torch.zeros(5, 0)) for k in said]

    def softmax(z: Any) -> Any:
        return np.exp(z) / np.exp(z).sum(-1, keepdims=True)

    mean = (weight[:, :, None] * said).sum(0)
    p, q = softmax(mean / 20), softmax(student / 20)
    ours = stage.mean_logits(answers, torch.from_numpy(weight))
    np.testing.assert_allclose(ours.numpy(), mean)
    loss = stage.match_probabilities(torch.from_numpy(p), 20.0)
    batch = Batch(torch.zeros(0), torch.zeros(0), torch.arange(5))
    found = loss(batch, Outputs(torch.from_numpy(student), torch.zeros(5, 0)))
    assert float(found) == pytest.approx(400 * (p * np.log(p / q)).sum(1).mean())


@pytest.mark.slow
def test_dafkd_can_match_logits(run_small: RunSmall) -> None:
    by_logits = run_small("dafkd", **POOL, **SHORT["dafkd"], logit_T=20.0)
    assert not torch.equal(weights(by_logits), weights(run_small("dafkd", **POOL, **SHORT["dafkd"])))
    with pytest.raises(fedstill.SettingError, match="private"):
        run_small("dafkd", private=True, logit_T=20.0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["no-sharing", "full"])
def test_generated_samples_leave_no_trace_in_a_clients_statistics(run_small: RunSmall, variant: str) -> None:
    """BatchNorm counts one batch a step; without sharing, the classifier trains as in FedAvg, bit for bit."""
    settings = {"model": "resnet8", "model_options": {"norm": "batch", "width": 4}, "rounds": 1, "participation": 0.1}
    plain = run_small("fedavg", **settings).model.state_dict()
    ours = run_small("dafkd", variant=variant, **settings).model.state_dict()
    counts = [name for name in plain if name.endswith("num_batches_tracked")]
    assert counts
    assert all(torch.equal(plain[name], ours[name]) for name in counts)
    assert all(torch.equal(plain[name], ours[name]) for name in plain) == (variant == "no-sharing")


def test_a_client_that_leaves_its_predictions_out_has_no_say(tmp_path: Path) -> None:
    setup = small_setup("dafkd", private=True, **SHORT["dafkd"])
    _, ups = fed(setup, tmp_path)
    models = []
    for silent in ([0], [0, 1, 2]):
        server, _ = fed(setup, tmp_path)
        told = [
            Uplink(u.client, u.samples, {k: v for k, v in u.message.items() if k != "predictions"})
            if u.client in silent
            else u
            for u in ups
        ]
        setup.method.aggregate(server, iter(told))
        models.append(server.model)
    average = torch.stack([up["model"] for up in ups]).double().mean(0).float()
    torch.testing.assert_close(models[1], average, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(models[0], average, rtol=1e-5, atol=1e-7)


class Gaussian(Generator):
    """Draws from N(-1, 1), as constant images."""

    def draw(self, count: int, noise: torch.Generator, y: Tensor | None = None) -> Tensor:
        value = -1 + torch.randn(count, 1, 1, 1, generator=noise)
        nothing = sum(p.sum() for p in self.net.params)
        return value.expand(-1, 1, 4, 4) + 0 * nothing


@dataclass(frozen=True)
class KnownDensity(DaFKD):
    """DaFKD whose generator has a density that is known."""

    def generator(self, task: Task) -> Generator:
        plain = super().generator(task)
        return Gaussian(task, plain.role, plain.purpose, plain.make, plain.z_dim)


class MeanPixel(fedstill.Classifier):
    """A trunk that shows the one number there is in a constant image."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.feature_dim = torch.nn.Linear(1, 2), 1

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1).mean(1, keepdim=True)


def test_trained_discriminators_approach_the_ratio_of_densities(tmp_path: Path) -> None:
    """Theorem 1 on two clients with Gaussians: D_k(x) -> p_k(x) / (p_k(x) + p(x)), p the generator's density."""
    rng, means, n = np.random.default_rng(0), (1.0, 0.0), 4000
    clients = []
    for mean in means:
        value = rng.normal(mean, 1, (n, 1, 1, 1)).astype(np.float32)
        clients.append((np.tile(value, (1, 1, 4, 4)), np.arange(n) % 2))
    fedstill.run(
        KnownDensity(variant="no-distill", z_dim=2),
        data=fedstill.from_clients(clients, test_fraction=0),
        model=MeanPixel(),
        rounds=1, epochs=4, batch_size=200, lr=1.0, participation=1.0, engine="inline", out=tmp_path / "run",
    )  # fmt: skip
    x = torch.linspace(-3, 3, 13)
    for k, mean in enumerate(means):
        state = RunDirectory.open(tmp_path / "run", lock=False).client_store.latest(k)
        assert state is not None
        weight, bias = state["discriminator"]
        own, made = (torch.exp(-((x - m) ** 2) / 2) for m in (mean, -1.0))
        torch.testing.assert_close((weight * x + bias).sigmoid(), own / (own + made), atol=0.04, rtol=0)
