"""Pieces of server-side methods against loops and NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedstill.data.proxy import match_channels
from fedstill.distill import stage
from fedstill.distill.ensemble import diversity, label_weights, normalised
from fedstill.distill.generators import (
    ConditionalGenerator,
    ShrinkingGenerator,
    TransposedGenerator,
    dafkd_generator,
    dcgan_init,
)
from fedstill.methods.base import Uplink
from fedstill.methods.ccvr import pooled
from fedstill.methods.ccvr import root as ccvr_root
from fedstill.methods.creff import CReFF, flat, unflat
from fedstill.methods.fedhyb import FedHyb
from fedstill.train.evaluate import Outputs, predict
from support.distilling import SHORT, fed, small_setup, targets_of
from support.runs import RunSmall, numbers, weights


def test_grey_of_colours_between_0_and_1_is_not_rounded() -> None:
    grey = match_channels(torch.rand(2, 3, 4, 4), 1)
    assert ((grey > 0.01) & (grey < 0.99)).any()


def test_ccvr_survives_clients_that_send_what_is_no_covariance() -> None:
    bad = torch.tensor([[1.0, 3.0], [3.0, 1.0]], dtype=torch.float64)  # an eigenvalue of -2
    L = ccvr_root(bad)
    torch.testing.assert_close(L @ L.T, torch.full((2, 2), 2.0).double(), rtol=1e-5, atol=1e-5)


def test_feddf_matches_the_softmax_of_the_mean_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = small_setup("feddf", server_steps=1)
    server, ups = fed(setup, tmp_path)
    assert setup.task.proxy is not None
    logits = [predict(setup.task, up["model"], setup.task.proxy).logits.double().numpy() for up in ups]
    mean = np.mean(logits, axis=0)
    expected = np.exp(mean) / np.exp(mean).sum(1, keepdims=True)
    seen = targets_of(monkeypatch, "feddf")
    setup.method.aggregate(server, iter(ups))
    np.testing.assert_allclose(seen[0].numpy(), expected, rtol=1e-4, atol=1e-6)


def test_ensemble_weights_against_a_loop() -> None:
    g = torch.Generator().manual_seed(0)
    answers = [Outputs(torch.randn(4, 3, generator=g), torch.randn(4, 2, generator=g)) for _ in range(3)]
    alpha = torch.rand(3, 4, generator=g)
    found = stage.mean_probabilities(answers, normalised(alpha)).numpy()
    for i in range(4):
        total = sum(float(alpha[k, i]) for k in range(3))
        expected = np.zeros(3)
        for k in range(3):
            z = answers[k].logits[i].double().numpy()
            expected += float(alpha[k, i]) / total * np.exp(z) / np.exp(z).sum()
        np.testing.assert_allclose(found[i], expected, rtol=1e-5)
    np.testing.assert_allclose(
        stage.mean_features(answers).numpy(), np.mean([a.features.numpy() for a in answers], axis=0), rtol=1e-6
    )


def test_fedhyb_self_distillation_against_numpy() -> None:
    g = torch.Generator().manual_seed(0)
    teacher, student = torch.randn(5, 4, generator=g), torch.randn(5, 4, generator=g)
    y = torch.tensor([0, 1, 2, 3, 0])
    t, s = teacher.double().numpy(), student.double().numpy()
    p = np.exp(t) / np.exp(t).sum(1, keepdims=True)
    log_q = s - np.log(np.exp(s).sum(1, keepdims=True))
    each = (p * (np.log(p) - log_q)).sum(1)
    ce = -log_q[np.arange(5), y.numpy()]

    def weighted(method: FedHyb) -> torch.Tensor:
        weight, divergence = method.weight_and_divergence(teacher, student, y)
        return (weight * divergence).mean()

    assert float(weighted(FedHyb(variant="1"))) == pytest.approx(each.mean(), rel=1e-5)
    beta = 1 / (1 + np.exp(ce.mean()))
    assert float(weighted(FedHyb())) == pytest.approx(beta * each.mean(), rel=1e-5)
    by_sample = (each / (1 + np.exp(ce))).mean()
    assert float(weighted(FedHyb(beta_per_sample=True))) == pytest.approx(by_sample, rel=1e-5)
    student.requires_grad_()
    loss = weighted(FedHyb())
    (grad,) = torch.autograd.grad(loss, student)
    q = np.exp(log_q)
    np.testing.assert_allclose(grad.numpy(), beta * (q - p) / 5, rtol=1e-4, atol=1e-7)  # beta gets no gradient


def test_label_weights_and_diversity_against_loops() -> None:
    counts = torch.tensor([[3.0, 0.0, 1.0], [1.0, 0.0, 4.0]])
    found = label_weights(counts)
    torch.testing.assert_close(found, torch.tensor([[0.75, 0.5, 0.2], [0.25, 0.5, 0.8]]))
    z, x = torch.rand(4, 3), torch.rand(4, 2, 2)
    total = 0.0
    for i in range(4):
        for j in range(4):
            total += float(((z[i] - z[j]) ** 2).mean()) * float((x[i] - x[j]).abs().mean())
    assert float(diversity(z, x)) == pytest.approx(np.exp(-total / 16), rel=1e-5)


def test_generators_have_the_published_sizes() -> None:
    def count(net: torch.nn.Module) -> int:
        return sum(p.numel() for p in net.parameters())

    assert count(ConditionalGenerator((3, 32, 32), 10)) == 682_499
    assert count(ShrinkingGenerator((1, 28, 28))) == 328_764
    # Biases are in the last layer alone: BatchNorm has the others'.
    assert count(TransposedGenerator((3, 32, 32))) == 16 * (100 * 256 + 256 * 128 + 128 * 64 + 64 * 3) + 2 * 448 + 3
    for net, shape in ((ShrinkingGenerator((1, 28, 28)), (1, 28, 28)), (TransposedGenerator((3, 32, 32)), (3, 32, 32))):
        made = net(torch.randn(4, 100))
        assert made.shape == (4, *shape)
        assert 0 <= made.min() <= made.max() <= 1


@pytest.mark.parametrize(
    ("shape", "classes", "usual"), [((1, 28, 28), 0, 50), ((3, 32, 32), 0, 256), ((3, 32, 32), 10, 128)]
)
def test_a_narrow_generator_of_dafkd_makes_the_same_images_with_fewer_channels(
    shape: tuple[int, int, int], classes: int, usual: int
) -> None:
    def channels(width: int) -> list[int]:
        net = dafkd_generator(shape, 5, classes, width)
        labels = (torch.zeros(4, dtype=torch.int64),) if classes else ()
        assert net(torch.randn(4, 5), *labels).shape == (4, *shape)
        return [m.num_features for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d) and m.affine]

    assert channels(0) == channels(usual)
    assert max(channels(0)) == usual
    assert max(channels(8)) == 8


def test_ccvr_pools_to_the_covariance_of_all_samples() -> None:
    g = torch.Generator().manual_seed(0)
    shares = [torch.randn(n, 3, generator=g, dtype=torch.float64) + k for k, n in enumerate((5, 1, 9))]
    ups = []
    for k, x in enumerate(shares):
        covariance = torch.cov(x.T) if len(x) > 1 else torch.zeros(3, 3, dtype=torch.float64)
        message = {
            "counts": torch.tensor([float(len(x))], dtype=torch.float64),
            "means": x.mean(0, keepdim=True),
            "covariances": covariance.unsqueeze(0),
        }
        ups.append(Uplink(k, len(x), message))
    n, mean, covariance = pooled(iter(ups))
    everything = torch.cat(shares).numpy()
    assert n.tolist() == [15]
    np.testing.assert_allclose(mean[0].numpy(), everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(covariance[0].numpy(), np.cov(everything.T), rtol=1e-10)


@pytest.mark.slow
def test_ccvr_changes_the_classifier_alone_and_only_at_the_end(run_small: RunSmall) -> None:
    plain, calibrated = run_small("fedavg", lr=0.2), run_small("fedavg+ccvr", lr=0.2)
    assert numbers(plain) == numbers(calibrated)
    before, after = plain.model.state_dict(), calibrated.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias"}
    assert calibrated.summary["also"]["after the last exchange"]["final_loss"] < plain.records[-1]["loss"]
    twice = run_small("fedavg+ccvr", lr=0.2, engine="process", workers=2)
    assert torch.equal(weights(twice), weights(calibrated))


def test_creff_matches_gradients_and_retrains_a_classifier() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(5, 3)
    method = CReFF(features=8, match_steps=150, match_lr=1.0, retrain_epochs=200, retrain_lr=0.5)
    centres = 3 * torch.eye(3, 5)
    real = []
    for c in range(3):
        loss = F.cross_entropy(head(centres[c] + 0.1 * torch.randn(50, 5)), torch.full((50,), c))
        real.append(flat(torch.autograd.grad(loss, list(head.parameters()))))
    start = torch.randn(3, 8, 5)

    def distance(features: torch.Tensor) -> float:
        total = 0.0
        for c in range(3):
            loss = F.cross_entropy(head(features[c]), torch.full((8,), c))
            found = torch.autograd.grad(loss, list(head.parameters()))
            for a, b in zip(found, unflat(real[c], found), strict=True):
                rows = zip(a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), strict=True)
                total += sum(float(1 - u @ v / (u.norm() * v.norm())) for u, v in rows)
        return total

    learnt = method.match(head, start, torch.stack(real), [0, 1, 2])
    assert distance(learnt) < 0.2 * distance(start)
    torch.manual_seed(1)
    fresh = torch.nn.Linear(5, 3)
    method.retrain(fresh, learnt, torch.Generator().manual_seed(0))
    assert (fresh(centres).argmax(1) == torch.arange(3)).all()


def test_creff_evaluates_the_re_trained_classifier_on_the_averaged_body(run_small: RunSmall) -> None:
    plain, result = run_small("fedavg"), run_small("creff", **SHORT["creff"])
    before, after = plain.model.state_dict(), result.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias"}
    assert result.summary["also"]["before re-training"]["final_accuracy"] == plain.summary["final_accuracy"]


def test_first_weights_as_in_dcgan_have_a_deviation_of_0_02_and_no_biases() -> None:
    torch.manual_seed(0)
    net = TransposedGenerator((3, 32, 32)).apply(dcgan_init)
    first, norm, last = net.stages[0], net.stages[1], net.stages[-2]
    assert isinstance(norm, nn.BatchNorm2d)
    assert isinstance(first, nn.ConvTranspose2d)
    assert isinstance(last, nn.ConvTranspose2d)
    assert last.bias is not None
    assert first.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert norm.weight.mean().item() == pytest.approx(1, abs=0.01)
    assert norm.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert not norm.bias.any()
    assert not last.bias.any()
