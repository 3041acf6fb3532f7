"""What FedHyb's clients, and the servers of FedHyb, FedDF and FedBE, compute in real rounds, by loops of the equations.

Each test runs the method with a tap on the wire and works out, from what crossed before, what should have crossed
next. Only random draws are shared: their streams are named by purpose, round and client.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstill.data.augment import rotate_by
from fedstill.methods.fedbe import FedBE
from fedstill.models import Classifier
from support.byhand import Uplinks, tiny_server
from support.play import (
    POOL,
    WIDTH,
    assert_moved_alike,
    at_server,
    averaged,
    distilled,
    epochs_of,
    kl,
    locally,
    nothing,
    play,
    probabilities,
    stream,
)
from support.wiretap import (
    Floats,
    assert_same_network,
    exact,
    network,
    softmax,
)

# --- FedHyb -----------------------------------------------------------------------------------------------------------


def narrow(net: nn.Module, x: Tensor, width: float) -> Tensor:
    """Logits of the sub-network: the first floor(width c + 1/2) outputs of every layer but the last."""
    w = dict(net.named_parameters())
    a, b, c, d = (max(1, math.floor(width * n + 0.5)) for n in (6, 16, 120, 84))
    h = F.max_pool2d(F.relu(F.conv2d(x, w["body.0.weight"][:a], w["body.0.bias"][:a])), 2)
    h = F.max_pool2d(F.relu(F.conv2d(h, w["body.3.weight"][:b, :a], w["body.3.bias"][:b])), 2).flatten(1)
    h = F.relu(h @ w["body.7.weight"][:c, :b].T + w["body.7.bias"][:c])
    h = F.relu(h @ w["body.9.weight"][:d, :c].T + w["body.9.bias"][:d])
    return h @ w["head.weight"][:, :d].T + w["head.bias"]


def transformed(x: Tensor, rng: torch.Generator) -> Tensor:
    """R_m: down to 16, 14 or 12 pixels and back, then each image turned by up to 15 degrees."""
    side = (16, 14, 12)[int(torch.randint(3, (), generator=rng))]
    if side < 16:
        x = F.interpolate(F.interpolate(x, size=side, mode="bilinear"), size=16, mode="bilinear")
    return rotate_by(x, 30 * torch.rand(len(x), generator=rng) - 15)


FEDHYB_CLIENTS: list[dict[str, Any]] = [
    {"variant": "1"},
    {"variant": "2"},
    {"variant": "full", "M": 3},
    {"variant": "full", "beta_per_sample": True},
    {"variant": "full", "literal": True},
]


@pytest.mark.parametrize("settings", FEDHYB_CLIENTS, ids=str)
def test_fedhybs_clients_teach_their_sub_networks(settings: dict[str, Any]) -> None:
    """Eq. 3 to 5: CE + a sum_m beta_m KL_m, with no gradient through the full network's answer nor through beta."""
    run = play("fedhyb", rounds=1, **POOL, a=100.0, **settings)  # much, for gradients that stop to be seen
    for k, up in run.rounds[0].up.items():
        rng = stream("sub-networks", 1, k)

        def self_distillation(net: Classifier, x: Tensor, y: Tensor, rng: torch.Generator = rng) -> Tensor:
            taught_by = net(x).softmax(1).detach()
            total, betas, divergences = torch.zeros(()), [], []
            for m in range(settings.get("M", 2)):
                width = 0.8 if m == 0 else 0.8 + 0.2 * float(torch.rand((), generator=rng))
                said = narrow(net, transformed(x, rng), width)
                each = (taught_by * (taught_by.log() - said.log_softmax(1))).sum(1)
                wrong = -said.log_softmax(1)[torch.arange(len(y)), y].detach()
                if settings["variant"] == "1":
                    beta = torch.ones(())
                elif settings.get("beta_per_sample"):
                    beta = torch.exp(-wrong) / (1 + torch.exp(-wrong))
                else:
                    beta = torch.exp(-wrong.mean()) / (1 + torch.exp(-wrong.mean()))  # Eq. 4
                total = total + (beta * each).mean()
                betas.append(beta)
                divergences.append(each.mean())
            return 100.0 * (sum(betas) * sum(divergences) if settings.get("literal") else total)

        assert_same_network(up["model"], locally(run, k, run.rounds[0], self_distillation))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["1", "2", "3", "full"])
def test_fedhybs_server_matches_mean_predictions_and_mean_features(variant: str) -> None:
    """Eq. 2, then Eq. 6 to 8: eta KL(mean softmax || student) + nu MSE of features; ablations 1 and 2 stop at Eq. 2."""
    run = play("fedhyb", rounds=1, **POOL, variant=variant, eta=0.7, nu=2.5, server_lr=0.01, server_batch=50)
    (crossed,), x = run.rounds, run.proxy()
    if variant == "3":
        for k, up in crossed.up.items():
            assert_same_network(up["model"], locally(run, k, crossed, nothing))
    if variant in "12":
        torch.testing.assert_close(run.model_after(1), averaged(crossed), rtol=1e-5, atol=1e-7)
        return
    clients = [network(up["model"]) for up in crossed.up.values()]
    predictions = torch.stack([probabilities(net, x) for net in clients]).mean(0)
    features = torch.from_numpy(np.mean([exact(net, x)[1] for net in clients], axis=0)).float()

    def loss(net: Classifier, ids: Tensor) -> Tensor:
        away = (net.features(x[ids]) - features[ids]).square().sum() / (len(ids) * WIDTH)
        return 0.7 * kl(predictions[ids], net(x[ids])) + 2.5 * away

    order = epochs_of(len(x), 50, 1, at_server("hybrid distillation", 1))
    expected = distilled(averaged(crossed), loss, order, partial(torch.optim.Adam, lr=0.01))
    assert_moved_alike(network(run.model_after(1)), expected, network(averaged(crossed)))


# --- FedDF, FedBE -----------------------------------------------------------------------------------------------------


def test_feddfs_student_starts_from_the_average_and_descends_along_a_cosine() -> None:
    """Row 8: KL(softmax(mean logits) || student) from the weighted mean, Adam whose rate falls along a cosine."""
    steps, size = 5, 50
    run = play("feddf", rounds=1, **POOL, server_steps=steps, server_batch=size, server_lr=0.01)
    (crossed,), x = run.rounds, run.proxy()
    logits = np.mean([exact(network(up["model"]), x)[0] for up in crossed.up.values()], axis=0)
    targets = torch.from_numpy(softmax(logits)).float()
    order = at_server("distillation", 1)
    full = [
        ids for _ in range(steps) for ids in torch.randperm(len(x), generator=order).split(size) if len(ids) == size
    ]
    net, start = network(averaged(crossed)), network(averaged(crossed))
    adam = torch.optim.Adam(net.parameters())
    for t, ids in enumerate(full[:steps]):
        adam.param_groups[0]["lr"] = 0.01 * (1 + math.cos(math.pi * t / steps)) / 2
        adam.zero_grad()
        kl(targets[ids], net(x[ids])).backward()
        adam.step()
    assert_moved_alike(network(run.model_after(1)), net, start)


def fedbe_gaussian(start: Floats, models: Floats, sizes: list[int], noise: Floats) -> list[Floats]:
    """Row 16, layer by layer: unit updates have a mean and a deviation; a draw of them is as long as updates are."""
    drawn = []
    for row in noise:
        model = start.copy()
        for a, b in itertools.pairwise(np.cumsum([0, *sizes]).tolist()):
            updates = [w[a:b] - start[a:b] for w in models]
            lengths = [math.sqrt(sum(float(u) ** 2 for u in update)) for update in updates]
            units = np.array([update / length for update, length in zip(updates, lengths, strict=True)])
            mean = sum(units) / len(units)
            deviation = np.sqrt(sum((u - mean) ** 2 for u in units) / len(units))
            model[a:b] += sum(lengths) / len(lengths) * (mean + 0.1 * deviation * row[a:b])
        drawn.append(model)
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"distribution": "dirichlet"}, {"clients_teach": False}], ids=str)
def test_fedbes_teachers_average_to_sharpened_probabilities(settings: dict[str, Any]) -> None:
    """Row 16: the mean, the drawn models and the clients, p^2 / sum p^2, SGD with momentum 0.9 and decay 1e-5."""
    run = play("fedbe", rounds=1, **POOL, samples=2, server_epochs=2, server_lr=0.1, server_batch=50, **settings)
    (crossed,), x = run.rounds, run.proxy()
    models = np.stack([up["model"].double().numpy() for up in crossed.up.values()])
    mean, rng = averaged(crossed).double().numpy(), at_server("ensemble", 1)
    drawn: Sequence[Floats]
    if settings.get("distribution") == "dirichlet":
        raw = torch.empty(2, len(models), dtype=torch.float64).exponential_(generator=rng).numpy()
        drawn = [sum(r / row.sum() * w for r, w in zip(row, models, strict=True)) for row in raw]
    else:
        noise = torch.randn(2, len(mean), generator=rng, dtype=torch.float64).numpy()
        sizes = [p.numel() for p in network(crossed.down["model"]).parameters()]
        drawn = fedbe_gaussian(crossed.down["model"].double().numpy(), models, sizes, noise)
    teachers = [mean, *drawn, *(models if settings.get("clients_teach", True) else [])]
    p = np.mean([softmax(exact(network(torch.from_numpy(w).float()), x)[0]) for w in teachers], axis=0)
    sharp = torch.from_numpy(p**2 / (p**2).sum(1, keepdims=True)).float()
    expected = distilled(
        averaged(crossed),
        lambda net, ids: kl(sharp[ids], net(x[ids])),
        epochs_of(len(x), 50, 2, at_server("distillation", 1)),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-5),
    )
    assert_same_network(run.model_after(1), expected)


def test_fedbes_draws_have_the_moments_of_their_distributions(tmp_path: Path) -> None:
    """Gaussian: around the start plus a mean update, 0.1 times the deviation of updates; Dirichlet: Dir(1, ..., 1)."""
    server = tiny_server(tmp_path, [10, 30, 60])
    ups = Uplinks(server, [0, 1, 2])
    models, start = torch.from_numpy(ups.w), server.before.double().numpy()
    n, k = 20_000, 3
    drawn = torch.stack(FedBE(samples=n).draw(server, models)).numpy()
    flat = np.stack([np.zeros_like(start), np.ones_like(start)])  # no noise, and one deviation everywhere
    sizes = [p.numel() for p in server.task.nets.get("student").params]
    mean, beyond = fedbe_gaussian(start, ups.w, sizes, flat)
    deviation = beyond - mean
    np.testing.assert_allclose((drawn.mean(0) - mean) / deviation, 0, atol=5 / math.sqrt(n))
    np.testing.assert_allclose(drawn.std(0) / deviation, 1, atol=0.03)
    np.testing.assert_allclose(np.corrcoef(drawn.T), np.eye(len(mean)), atol=0.04)
    drawn = torch.stack(FedBE(samples=n, distribution="dirichlet").draw(server, models)).numpy()
    mixed = np.linalg.lstsq(ups.w.T, drawn.T, rcond=None)[0].T  # the shares that gave each model
    np.testing.assert_allclose(mixed.sum(1), 1, rtol=1e-9)
    assert mixed.min() >= -1e-9
    np.testing.assert_allclose(mixed.mean(0), 1 / k, atol=0.01)
    np.testing.assert_allclose(mixed.var(0), (k - 1) / (k**2 * (k + 1)), rtol=0.05)
