"""q-FFL against its update rule written out, and on clients whose fair optimum is known."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import fedstill
from fedstill.aggregate.mean import weighted_mean
from fedstill.methods.base import Server
from fedstill.methods.qffl import QFFL
from fedstill.train.loop import Objective
from support.byhand import Array, OnQuadratic, Problem, Uplinks, normed_net, tiny_server
from support.recorder import record_rounds
from support.runs import SMALL, RunSmall, numbers, weights

PROBLEM = Problem.random(sizes=(1, 1, 1, 1), seed=2)


class Uniform(fedstill.FedAvg):
    """FedAvg in which every client counts the same."""

    def aggregate(self, server: Server, uplinks: Iterator[fedstill.Uplink]) -> None:
        server.model = weighted_mean((up["model"], 1) for up in uplinks)


class QFFLOnQuadratic(OnQuadratic, QFFL):
    """q-FFL whose loss is the quadratic as well, not only its steps."""

    def objective(self, client: fedstill.Client) -> Objective:
        objective = super().objective(client)
        client.notes["loss"] = PROBLEM.losses(client.down["model"].numpy())[client.id]
        return objective


def server_step(w_t: Array, w: Array, losses: Array, q: float, lr: float) -> Array:
    """Row 3 of the digest, literally."""
    f, d = losses + 1e-10, (w_t - w) / lr
    u = f[:, None] ** q * d
    h = q * f ** (q - 1) * (d**2).sum(1) + f**q / lr
    step: Array = w_t - u.sum(0) / h.sum()
    return step


@pytest.mark.parametrize("q", [0.0, 1e-4, 0.5, 1.0, 5.0])
def test_the_server_step_equals_the_rule_written_out(tmp_path: Path, q: float) -> None:
    server, method = tiny_server(tmp_path, sizes=[5, 50, 1, 9], lr=0.3), QFFL(q=q)
    losses = np.array([2.3, 0.4, 1.1])
    for clients in ([3, 0, 2], [1, 2, 3]):
        ups = Uplinks(server, clients, parts={"loss": list(losses)})
        method.aggregate(server, iter(ups))
        np.testing.assert_allclose(server.model, server_step(ups.w_t, ups.w, losses, q, 0.3), rtol=1e-10)


def test_the_learning_rate_of_the_rule_is_that_of_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    crossings = record_rounds(monkeypatch)
    end = PROBLEM.run(QFFLOnQuadratic(q=2.0), rounds=4, lr=0.3, lr_decay=0.5, epochs=3)
    after = [*(c.down["model"].numpy() for c in crossings[1:]), end]
    for t, (crossing, model) in enumerate(zip(crossings, after, strict=True)):
        w_t, lr = crossing.down["model"].numpy(), 0.3 * 0.5**t
        w = np.array([PROBLEM.sgd(k, w_t, lr, 3) for k in crossing.cohort])
        expected = server_step(w_t, w, PROBLEM.losses(w_t)[crossing.cohort], 2.0, lr)
        np.testing.assert_allclose(model, expected, rtol=1e-9)


def test_the_loss_a_client_sends_is_that_of_the_sent_model_on_all_its_training_data(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossings = record_rounds(monkeypatch)
    run_small("qffl", model="mlp", model_options={"hidden": []}, rounds=2, q=0.5, epochs=2)
    names = ("clients", "alpha", "fraction")
    dataset = fedstill.load_dataset("fashion-mini", image_size=SMALL["image_size"])
    federation = fedstill.federate(dataset, seed=0, **{name: SMALL[name] for name in names})
    for crossing in crossings:
        w = crossing.down["model"].double().numpy()
        matrix, bias = w[: 10 * 256].reshape(10, 256), w[10 * 256 :]
        for k, up in crossing.up.items():
            index = federation.train(k)
            x = (dataset.train.x[index].double().numpy().reshape(len(index), -1) / 255 - dataset.mean[0]) / dataset.std[
                0
            ]
            logits, y = x @ matrix.T + bias, dataset.train.y[index].numpy()
            loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
            assert float(up["loss"]) == pytest.approx(loss.mean(), rel=1e-5)


def test_a_run_on_images_follows_the_rule_from_what_crossed(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossings = record_rounds(monkeypatch)
    run_small("qffl", rounds=4, q=1.0, lr=0.02)
    for before, after in pairwise(crossings):
        w_t = before.down["model"].double().numpy()
        w = np.array([up["model"].double().numpy() for up in before.up.values()])
        losses = np.array([float(up["loss"]) for up in before.up.values()])
        expected = server_step(w_t, w, losses, 1.0, 0.02)
        np.testing.assert_allclose(after.down["model"], expected, rtol=1e-5, atol=1e-7)


def test_qffl_with_q_zero_is_the_uniform_average(run_small: RunSmall) -> None:
    fair, uniform = run_small("qffl", q=0.0), run_small(Uniform())
    assert torch.equal(weights(fair), weights(uniform))
    assert [r | {"bytes_up": 0} for r in numbers(fair)] == [r | {"bytes_up": 0} for r in numbers(uniform)]
    assert not torch.equal(weights(run_small("qffl", q=1.0)), weights(uniform)), "otherwise q does something"


def fair_optimum(q: float) -> Array:
    """argmin of sum_k F_k^(q+1) / (q+1), by a solver that knows nothing of federations."""

    def value(w: Array) -> float:
        return float((PROBLEM.losses(w) ** (q + 1)).sum() / (q + 1))

    def slope(w: Array) -> Array:
        gradients = np.array([PROBLEM.gradient(k, w) for k in range(len(PROBLEM.sizes))])
        total: Array = PROBLEM.losses(w) ** q @ gradients
        return total

    best: Array = minimize(value, PROBLEM.optimum(), jac=slope, method="BFGS", options={"gtol": 1e-10}).x
    return best


ROUNDS = {0.0: 25, 1.0: 50, 4.0: 120}  # by q, whose steps become shorter as it grows


@pytest.fixture(scope="module")
def ends() -> dict[float, Array]:
    """Where runs with one local step end, by q: D_k is then the gradient of F_k."""
    return {q: PROBLEM.run(QFFLOnQuadratic(q=q), rounds=rounds, lr=0.5) for q, rounds in ROUNDS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("q", ROUNDS)
def test_a_run_ends_at_the_fair_optimum(ends: dict[float, Array], q: float) -> None:
    """The rule stops where sum_k F_k^q grad F_k is zero."""
    np.testing.assert_allclose(ends[q], fair_optimum(q), atol=1e-4)


@pytest.mark.slow
def test_a_larger_q_makes_the_clients_losses_more_equal(ends: dict[float, Array]) -> None:
    losses = [PROBLEM.losses(ends[q]) for q in ROUNDS]
    spread, worst, mean = ([f.var() for f in losses], [f.max() for f in losses], [f.mean() for f in losses])
    assert spread[0] > 1.3 * spread[1] > 1.5 * spread[2]
    assert worst[0] > worst[1] > worst[2]
    assert mean[0] < mean[1] < mean[2], "which is what it costs"


def test_batchnorm_statistics_are_no_part_of_the_gradient(tmp_path: Path) -> None:
    """||D_k|| is the length of a gradient; a count of batches in it would shrink every step."""
    server, method, losses = tiny_server(tmp_path, sizes=[5, 50], net=normed_net()), QFFL(q=1.0), np.array([2.0, 1.0])
    trainable = server.task.trainable
    ups = Uplinks(server, [1, 0], spread=0.1, parts={"loss": list(losses)})
    ups.w[:, -1] += 500  # num_batches_tracked
    method.aggregate(server, iter(ups))
    expected = server_step(ups.w_t[:trainable], ups.w[:, :trainable], losses, 1.0, 0.1)
    np.testing.assert_allclose(server.model[:trainable], expected, rtol=1e-10)


def test_a_client_without_any_loss_left_does_no_harm(tmp_path: Path) -> None:
    server = tiny_server(tmp_path, sizes=[5, 50])
    ups = Uplinks(server, [1, 0], parts={"loss": [0.0, 1.5]})
    QFFL().aggregate(server, iter(ups))
    assert torch.isfinite(server.model).all()


@pytest.mark.parametrize("settings", [{"q": -1.0}, {"q": "fair"}])
def test_a_wrong_q_is_refused(run_small: RunSmall, settings: dict[str, Any]) -> None:
    with pytest.raises(fedstill.SettingError, match="q = "):
        run_small("qffl", **settings)
