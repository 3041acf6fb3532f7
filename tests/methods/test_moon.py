"""MOON against its loss, written out; the previous models are each client's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedstill.methods.moon import MOON
from fedstill.models import Classifier, build
from fedstill.models.heads import Projected
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch
from support.runs import SMALL, RunSmall, numbers, weights
from support.wiretap import (
    LR,
    Extra,
    Floats,
    Headed,
    assert_as_declared,
    assert_same_network,
    assert_same_tree,
    client_of,
    client_states,
    exact,
    held_by,
    local_round,
    network,
    resumed_after_every_round,
    setup_of,
    taped,
    trained,
)


def moved(vector: Tensor, seed: int) -> Tensor:
    """Weights somewhere near."""
    return vector + 0.1 * torch.randn(len(vector), generator=torch.Generator().manual_seed(seed))


def cosine(a: Floats, b: Floats) -> Floats:
    return np.asarray((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)))


def contrast(z: Floats, z_global: Floats, z_previous: list[Floats], tau: float) -> float:
    """-log( e^(cos(z, z_glob)/tau) / (e^(cos(z, z_glob)/tau) + sum e^(cos(z, z_prev)/tau)) ), on average."""
    positive = np.exp(cosine(z, z_global) / tau)
    negative = sum(np.exp(cosine(z, previous) / tau) for previous in z_previous)
    return float(-np.log(positive / (positive + negative)).mean())


def slope(z: Floats, z_global: Floats, z_previous: list[Floats], tau: float, step: float = 1e-6) -> Floats:
    """Gradient of the contrast in z, by central differences."""
    found = np.zeros_like(z)
    for at in np.ndindex(z.shape):
        move = np.zeros_like(z)
        move[at] = step
        ahead, behind = (contrast(z + sign * move, z_global, z_previous, tau) for sign in (1, -1))
        found[at] = (ahead - behind) / (2 * step)
    return found


def contrasted(mu: float, tau: float, global_model: Tensor, previous: list[Tensor]) -> Extra:
    """The same loss for a plain loop."""
    teachers = [network(w, head=True) for w in (global_model, *previous)]

    def extra(net: Classifier, x: Tensor, y: Tensor) -> Tensor:
        z = net.features(x)
        z = z / z.norm(dim=1, keepdim=True)
        with torch.no_grad():
            others = [teacher.features(x) for teacher in teachers]
        scores = torch.stack([(z * other / other.norm(dim=1, keepdim=True)).sum(1) / tau for other in others])
        return -mu * (scores[0] - scores.exp().sum(0).log()).mean()

    return extra


@pytest.mark.parametrize("previous_models", [1, 2])
def test_the_loss_is_the_contrast_of_global_and_previous_features(previous_models: int) -> None:
    mu, tau = 1.7, 0.3
    setup = setup_of("moon", mu=mu, tau=tau, buffer=previous_models)
    w0 = setup.task.initial
    down, previous = {"model": moved(w0, 1)}, [moved(w0, 2 + i) for i in range(previous_models)]
    objective = setup.method.objective(client_of(setup, 3, 2, down, {"previous": previous}))
    x, y = held_by(3)
    ids = torch.tensor([5, 0, 7])
    z = torch.randn(3, 256, generator=torch.Generator().manual_seed(3), requires_grad=True)
    assert objective.term is not None
    loss = objective.term(Batch(x[ids], y[ids], ids), Outputs(torch.zeros(3, 10), z))
    loss.backward()

    features = [exact(network(w, head=True), x[ids])[1] for w in (down["model"], *previous)]
    z64 = z.detach().double().numpy()
    assert loss.item() == pytest.approx(mu * contrast(z64, features[0], features[1:], tau), rel=1e-5)
    assert z.grad is not None
    np.testing.assert_allclose(z.grad.numpy(), mu * slope(z64, features[0], features[1:], tau), rtol=2e-3, atol=1e-6)


def test_with_the_global_model_as_previous_one_the_loss_is_log_2_whatever_the_client_learns() -> None:
    g = torch.Generator().manual_seed(0)
    z = torch.randn(6, 256, generator=g, dtype=torch.float64, requires_grad=True)
    z_global = torch.randn(6, 256, generator=g, dtype=torch.float64)
    loss = MOON(tau=0.5).contrast(z, [z_global, z_global])
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert z.grad is not None
    assert float(z.grad.abs().max()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("buffer", [1, 2])
def test_a_client_is_contrasted_with_its_own_last_models_and_no_others(buffer: int) -> None:
    _, tape = taped("moon", mu=5.0, buffer=buffer, rounds=5)
    sent: dict[int, list[Tensor]] = {}  # by client, newest first
    contrasts = 0
    for crossed in tape:
        for k, up in crossed.up.items():
            own = sent.setdefault(k, [])
            extra = contrasted(5.0, 0.5, crossed.down["model"], own[:buffer]) if own else None
            contrasts += len(own[:buffer])
            expected = trained(crossed.down["model"], k, crossed.number, extra, head=True)
            assert_same_network(up["model"], expected, head=True)
            own.insert(0, up["model"])
    assert contrasts > 8, "clients must have come back for this test to say anything"


def test_a_client_keeps_its_own_last_models_as_it_sent_them(tmp_path: Path) -> None:
    _, tape = taped("moon", buffer=2, rounds=4, participation=0.34, out=tmp_path / "run")
    states = client_states(tmp_path / "run")
    active = {k for crossed in tape for k in crossed.up}
    assert set(states) == active
    assert len(active) < SMALL["clients"], "a client never active has no state"
    for k, state in states.items():
        sent = [crossed.up[k]["model"] for crossed in reversed(tape) if k in crossed.up]
        assert_same_tree(state["previous"], sent[:2])


def test_a_first_round_is_plain_training_at_any_mu() -> None:
    _, plain = taped(Headed(), rounds=1)
    _, moon = taped("moon", rounds=1, mu=100.0)
    for k, up in plain[0].up.items():
        assert torch.equal(moon[0].up[k]["model"], up["model"])


def test_with_mu_zero_it_is_fedavg_on_the_network_with_the_head(run_small: RunSmall) -> None:
    headed, zero = run_small(Headed()), run_small("moon", mu=0.0)
    assert torch.equal(weights(zero), weights(headed))
    assert numbers(zero) == numbers(headed)
    assert not torch.equal(weights(run_small("moon", mu=5.0)), weights(headed))


def test_the_frozen_models_get_no_gradient() -> None:
    setup = setup_of("moon", augment="scale:1.0-1.0")  # live teachers
    down, previous = {"model": moved(setup.task.initial, 1)}, moved(setup.task.initial, 2)
    local_round(setup.method, client_of(setup, 0, 2, down, {"previous": [previous]}))
    for role, vector in (("live teacher 1", down["model"]), ("live teacher 2", previous)):
        teacher = setup.task.nets.get(role)
        assert torch.equal(teacher.read(), vector)
        assert all(p.grad is None for p in teacher.params)


def test_the_head_is_d_d_256_and_the_classifier_follows_it() -> None:
    net = Projected(build("cnn", (1, 16, 16), 10))
    layers = [(m.in_features, m.out_features) for m in [*net.projection, net.head] if isinstance(m, nn.Linear)]
    assert layers == [(84, 84), (84, 256), (256, 10)]
    assert isinstance(net.projection[1], nn.ReLU)
    assert len(net.projection) == 3
    x = torch.randn(4, 1, 16, 16)
    assert net.features(x).shape == (4, 256)
    torch.testing.assert_close(net(x), net.head(net.features(x)))
    body = sum(p.numel() for p in build("cnn", (1, 16, 16), 10).parameters()) - (84 * 10 + 10)
    assert sum(p.numel() for p in net.parameters()) == body + sum(i * o + o for i, o in layers), "no second classifier"


@pytest.mark.parametrize("buffer", [1, 3])
def test_what_crosses_is_what_is_declared(buffer: int) -> None:
    _, tape = taped("moon", buffer=buffer)
    assert_as_declared("moon", tape, buffer=buffer)
    for crossed in tape:
        assert set(crossed.down) == {"model"}
        assert all(set(up) == {"model"} for up in crossed.up.values())


@pytest.mark.slow
def test_resumed_after_every_round_gives_the_same_bits(run_small: RunSmall, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"buffer": 2, "rounds": 4, "lr": LR}
    whole = run_small("moon", out=tmp_path / "whole", **settings)
    broken = resumed_after_every_round("moon", tmp_path / "broken", **settings)
    assert torch.equal(weights(broken), weights(whole))
    assert numbers(broken) == numbers(whole)
    assert_same_tree(client_states(tmp_path / "broken"), client_states(tmp_path / "whole"))


def test_same_bits_in_worker_processes(run_small: RunSmall, tmp_path: Path) -> None:
    inline = run_small("moon", out=tmp_path / "inline")
    process = run_small("moon", out=tmp_path / "process", engine="process", workers=2)
    assert torch.equal(weights(inline), weights(process))
    assert_same_tree(client_states(tmp_path / "inline"), client_states(tmp_path / "process"))
