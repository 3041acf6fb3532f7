"""What FedMD, FedHKD, CCVR and CReFF compute in real rounds, against loops written from the equations.

Each test runs the method with a tap on the wire and works out, from what crossed before, what should have crossed
next. Only random draws are shared: their streams are named by purpose, round and client.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedstill.core.weights import FlatNet
from fedstill.models import Classifier
from support.play import (
    CLASSES,
    POOL,
    WIDTH,
    assert_moved_alike,
    at_server,
    averaged,
    batches_of,
    epochs_of,
    kl,
    locally,
    nothing,
    play,
    stream,
)
from support.wiretap import (
    LR,
    Floats,
    assert_same_network,
    descend,
    exact,
    network,
    softmax,
)

# --- FedMD, FedHKD ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest", ["joint", "first"])
def test_fedmds_clients_approach_the_mean_logits(digest: str) -> None:
    """Row 10: the consensus is the plain mean of logits; CE + weight KL(consensus || p), or an epoch of MAE before."""
    run = play("fedmd", rounds=2, **POOL, weight=0.8, digest=digest)
    (first, second), x = run.rounds, run.proxy()
    for crossed in run.rounds:
        for up in crossed.up.values():
            np.testing.assert_allclose(up["logits"].numpy(), exact(network(up["model"]), x)[0], rtol=1e-3, atol=1e-4)
    consensus = np.mean([up["logits"].double().numpy() for up in first.up.values()], axis=0)
    np.testing.assert_allclose(second.down["logits"].numpy(), consensus, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(run.model_after(1), averaged(first), rtol=1e-5, atol=1e-7)
    p, wanted = torch.from_numpy(softmax(consensus)).float(), torch.from_numpy(consensus).float()
    for k, up in second.up.items():
        rng = stream("public samples", 2, k)

        def agreeing(net: Classifier, _: Tensor, y: Tensor, rng: torch.Generator = rng) -> Tensor:
            ids = torch.randint(0, len(x), (len(y),), generator=rng)
            return 0.8 * kl(p[ids], net(x[ids]))

        if digest == "joint":
            expected = locally(run, k, second, agreeing)
        else:
            expected, (own_x, own_y) = network(second.down["model"]), run.held_by(k)
            for ids in torch.randperm(len(x), generator=stream("digest", 2, k)).split(256):
                descend(expected, (expected(x[ids]) - wanted[ids]).abs().mean())
            for ids in batches_of(k, 2, len(own_y)):
                descend(expected, F.cross_entropy(expected(own_x[ids]), own_y[ids]))
        assert_same_network(up["model"], expected)


def test_fedhkds_hyper_knowledge_is_the_mean_over_every_sample_of_a_class() -> None:
    """Row 11: each client's mean feature and mean softmax(logits / T) of each class, averaged by counts."""
    run = play("fedhkd", rounds=2, T=0.5)
    first, second = run.rounds
    features: list[list[Floats]] = [[] for _ in range(CLASSES)]
    predictions: list[list[Floats]] = [[] for _ in range(CLASSES)]
    for k, up in first.up.items():
        x, y = run.held_by(k)
        logits, said = exact(network(up["model"]), x)
        for i, c in enumerate(y.tolist()):
            features[c].append(said[i])
            predictions[c].append(softmax(logits[i] / 0.5))
        for c in range(CLASSES):
            own = said[y.numpy() == c]
            expected = own.mean(0) if len(own) else np.zeros(WIDTH)
            np.testing.assert_allclose(up["class_features"][c].numpy(), expected, rtol=1e-3, atol=1e-5)
    for c in range(CLASSES):
        assert second.down["counts"][c] == len(features[c])
        for name, rows, width in (("features", features[c], WIDTH), ("predictions", predictions[c], CLASSES)):
            part = f"class_{name}"
            expected = np.mean(rows, axis=0) if rows else np.zeros(width)
            np.testing.assert_allclose(second.down[part][c].numpy(), expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(run.model_after(1), averaged(first), rtol=1e-5, atol=1e-7)


def test_fedhkds_clients_have_three_terms_and_a_clipped_gradient() -> None:
    """Row 11: CE + lambda KL(Q || softmax(h(H) / T)) + gamma MSE(f(x), H[y]), the gradient's norm cut at 1.1."""
    run = play("fedhkd", rounds=2, clip=1.1, **{"lambda": 0.9, "gamma": 1.5, "T": 0.5})
    bites = 0
    for crossed in run.rounds:
        known = [c for c in range(CLASSES) if crossed.down["counts"][c] > 0]
        h, q = crossed.down["class_features"], crossed.down["class_predictions"]
        assert bool(known) == (crossed.number > 1)
        for k, up in crossed.up.items():
            net, (x, y) = network(crossed.down["model"]), run.held_by(k)
            for ids in batches_of(k, crossed.number, len(y)):
                loss = F.cross_entropy(net(x[ids]), y[ids])
                for c in known:
                    log_p = (net.head(h[c : c + 1]) / 0.5).log_softmax(1)[0]
                    loss = loss + 0.9 * (q[c] * (q[c].log() - log_p)).sum() / len(known)
                said = net.features(x[ids])
                for i, c in enumerate(y[ids].tolist()):
                    if c in known:
                        loss = loss + 1.5 * (said[i] - h[c]).square().mean() / len(ids)
                params = list(net.parameters())
                grads = torch.autograd.grad(loss, params)
                norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
                bites += norm > 1.1
                with torch.no_grad():
                    for p, g in zip(params, grads, strict=True):
                        p.sub_(LR * min(1.0, 1.1 / norm) * g)
            assert_same_network(up["model"], net)
    assert bites


# --- CCVR, CReFF ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ccvr_draws_from_the_covariance_of_all_clients_features_and_trains_the_classifier() -> None:
    """Row 12: per class, the mean and covariance of all features at once; 1e-6 I added; cross-entropy on the draws."""
    settings = {"virtual": 12, "calibration_epochs": 3, "calibration_lr": 0.1}
    run = play("fedavg+ccvr", rounds=1, **settings)
    start = averaged(run.rounds[0])
    net = network(start)
    everyone = [run.held_by(k) for k in range(run.setup.federation.clients)]
    features, labels = exact(net, torch.cat([x for x, _ in everyone]))[1], torch.cat([y for _, y in everyone]).numpy()
    rng, virtual, classes = at_server("virtual features", 1), [], []
    for c in range(CLASSES):
        own = features[labels == c]
        if len(own) < 2:
            continue
        root = np.linalg.cholesky(np.cov(own.T) + 1e-6 * np.eye(WIDTH))
        noise = torch.randn(12, WIDTH, generator=rng, dtype=torch.float64).numpy()
        virtual.append(own.mean(0) + noise @ root.T)
        classes += [c] * 12
    x, y = torch.from_numpy(np.concatenate(virtual)).float(), torch.tensor(classes)
    for ids in epochs_of(len(y), 32, 3, at_server("calibration", 1)):
        descend(net.head, -net.head(x[ids]).log_softmax(1)[torch.arange(len(ids)), y[ids]].mean(), lr=0.1)
    assert_moved_alike(network(run.model_after(1)), net, network(start))


def head_gradient(weight: Tensor, bias: Tensor, x: Tensor, c: int) -> tuple[Tensor, Tensor]:
    """Of the mean cross-entropy of features that are all of class c: mean (p - e_c) x' and mean (p - e_c)."""
    error = (x @ weight.T + bias).softmax(1) - F.one_hot(torch.tensor(c), CLASSES)
    return error.T @ x / len(x), error.mean(0)


def as_head(vector: Tensor) -> tuple[Tensor, Tensor]:
    return vector[:-CLASSES].view(CLASSES, WIDTH).double(), vector[-CLASSES:].double()


CREFF: dict[str, Any] = {"features": 3, "match_steps": 4, "match_lr": 0.5, "retrain_epochs": 6, "retrain_lr": 0.2}
CREFF["retrain_batch"] = 8


def test_creffs_clients_send_the_re_trained_heads_gradients_on_the_features_they_were_sent() -> None:
    """Row 17: for each class the mean over draws of the gradient at the sent head, on features of the sent model."""
    run = play("creff", rounds=2, **CREFF, draws=3, draw_size=5)
    for crossed in run.rounds:
        weight, bias = as_head(crossed.down["head"])
        for k, up in crossed.up.items():
            x, y = run.held_by(k)
            features = torch.from_numpy(exact(network(crossed.down["model"]), x)[1])
            rng = stream("gradient draws", crossed.number, k)
            for c in range(CLASSES):
                own, total = features[y == c], torch.zeros(CLASSES * WIDTH + CLASSES, dtype=torch.float64)
                assert up["known"][c] == (len(own) > 0)
                for _ in range(3 if len(own) else 0):
                    some = own[torch.randint(len(own), (5,), generator=rng)]
                    total += torch.cat([part.flatten() for part in head_gradient(weight, bias, some, c)]) / 3
                torch.testing.assert_close(up["gradients"][c].double(), total, rtol=1e-3, atol=1e-5)
            assert_same_network(up["model"], locally(run, k, crossed, nothing))


def test_creffs_server_matches_the_gradients_and_re_trains_a_fresh_head() -> None:
    """Row 17: features descend sum_c sum_rows (1 - cos) to the mean gradient of the clients that have the class."""
    run = play("creff", rounds=3, **CREFF, draws=3, draw_size=5)
    shape = (CLASSES, CREFF["features"], WIDTH)
    synthetic = torch.randn(shape, generator=at_server("synthetic features", 0)).double()
    fresh = FlatNet(copy.deepcopy(run.result.model)).unflatten(run.setup.task.build("fresh classifier").read())
    for crossed, following in zip(run.rounds[:-1], run.rounds[1:], strict=True):
        torch.testing.assert_close(following.down["model"], averaged(crossed), rtol=1e-5, atol=1e-7)
        weight, bias = as_head(crossed.down["head"])
        for _ in range(CREFF["match_steps"]):
            x, distance = synthetic.clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
            for c in range(CLASSES):
                owners = [up["gradients"][c].double() for up in crossed.up.values() if up["known"][c]]
                if not owners:
                    continue
                wanted_w, wanted_b = as_head(torch.stack(owners).mean(0))
                found_w, found_b = head_gradient(weight, bias, x[c], c)
                for a, b in [*zip(found_w, wanted_w, strict=True), (found_b, wanted_b)]:
                    distance = distance + 1 - (a @ b) / (a.norm() * b.norm())
            synthetic = synthetic - CREFF["match_lr"] * torch.autograd.grad(distance, x)[0]
        w, b = fresh["head.weight"].double(), fresh["head.bias"].double()
        rows = [(synthetic[c, i : i + 1], c) for c in range(CLASSES) for i in range(CREFF["features"])]
        order = at_server("re-training", crossed.number)
        for ids in epochs_of(len(rows), CREFF["retrain_batch"], CREFF["retrain_epochs"], order):
            each = [head_gradient(w, b, *rows[i]) for i in ids.tolist()]
            w = w - CREFF["retrain_lr"] * torch.stack([g for g, _ in each]).mean(0)
            b = b - CREFF["retrain_lr"] * torch.stack([g for _, g in each]).mean(0)
        found_w, found_b = as_head(following.down["head"])
        torch.testing.assert_close(found_w, w, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found_b, b, rtol=1e-3, atol=1e-4)
