"""FedNova against its update rule written out, and on clients that make different numbers of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstill
from fedstill.data.federation import from_clients
from fedstill.methods.fednova import FedNova, normalised_steps
from support.byhand import Array, OnQuadratic, Problem, Uplinks, normed_net, tiny_server
from support.recorder import record_rounds
from support.runs import RunSmall, numbers, weights

PROBLEM = Problem.random(sizes=(2, 9, 4, 1, 3))


class FedNovaOnQuadratic(OnQuadratic, FedNova): ...


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.9, 0.99])
@pytest.mark.parametrize("tau", [1, 2, 7, 60])
def test_normalised_steps_are_the_sum_of_the_coefficients_of_the_gradients(tau: int, rho: float) -> None:
    coefficients, velocity = np.zeros(tau), np.zeros(tau)
    for step in range(tau):
        velocity *= rho
        velocity[step] += 1  # v <- rho v + g_step
        coefficients += velocity  # w <- w - lr v
    assert normalised_steps(tau, rho) == pytest.approx(coefficients.sum(), rel=1e-9)


def test_without_momentum_the_normalised_steps_are_the_steps_themselves() -> None:
    assert [normalised_steps(tau, 0.0) for tau in (1, 3, 1000)] == [1.0, 3.0, 1000.0]


def test_the_server_step_equals_the_rule_written_out(tmp_path: Path) -> None:
    server = tiny_server(tmp_path, sizes=[5, 50, 1, 9, 30])
    a = np.array([3.0, 17.5, 1.0])
    for clients in ([4, 0, 2], [1, 3, 0]):
        ups = Uplinks(server, clients, parts={"a": list(a)})
        FedNova().aggregate(server, iter(ups))
        p = ups.n / ups.n.sum()  # over the participants
        d = (ups.w_t - ups.w) / a[:, None]
        np.testing.assert_allclose(server.model, ups.w_t - (p @ a) * (p @ d), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_with_equal_steps_is_fedavg(run_small: RunSmall, momentum: float) -> None:
    settings = {"local_unit": "equal_steps", "epochs": 2, "momentum": momentum, "lr": 0.01}
    plain, nova = run_small("fedavg", **settings), run_small("fednova", **settings)
    assert torch.equal(weights(nova), weights(plain))
    assert [r | {"bytes_up": 0} for r in numbers(nova)] == [r | {"bytes_up": 0} for r in numbers(plain)]
    assert not torch.equal(weights(run_small("fednova", lr=0.01)), weights(run_small("fedavg", lr=0.01))), "else not"


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_a_run_equals_the_rules_written_out(monkeypatch: pytest.MonkeyPatch, momentum: float) -> None:
    lr = 0.05
    crossings = record_rounds(monkeypatch)
    end = PROBLEM.run(FedNovaOnQuadratic(), rounds=8, lr=lr, momentum=momentum, participation=0.6)
    w = np.zeros(3)
    for crossing in crossings:
        np.testing.assert_allclose(crossing.down["model"], w, rtol=1e-9, atol=1e-12)
        steps = np.array([PROBLEM.sizes[k] for k in crossing.cohort])
        p = steps / steps.sum()
        # v after s steps holds gradient i with weight rho^(s-i): summed over s, (1 - rho^(tau-i)) / (1 - rho), i from 0
        a = np.array([sum((1 - momentum ** (tau - i)) / (1 - momentum) for i in range(tau)) for tau in steps])
        d = [
            (w - PROBLEM.sgd(k, w, lr, n, momentum)) / a_k for k, n, a_k in zip(crossing.cohort, steps, a, strict=True)
        ]
        assert [float(up["a"]) for up in crossing.up.values()] == pytest.approx(a, rel=1e-9)
        w = w - (p @ a) * (p @ np.array(d))
    np.testing.assert_allclose(end, w, rtol=1e-9)


UNEVEN = Problem.random(sizes=(1, 4, 2), seed=1)


def fixed_point(lr: float, *, normalised: bool) -> Array:
    """Where sum_k n_k (w - w_k) / a_k is zero, a_k being the steps, or one if not normalised."""
    moves = [
        n * (np.eye(3) - np.linalg.matrix_power(np.eye(3) - lr * a, n)) / (n if normalised else 1)
        for a, n in zip(UNEVEN.a, UNEVEN.sizes, strict=True)
    ]
    point: Array = np.linalg.solve(sum(moves), sum(m @ b for m, b in zip(moves, UNEVEN.b, strict=True)))
    return point


@pytest.mark.slow
def test_with_unequal_steps_fednova_nears_the_weighted_optimum_that_fedavg_misses() -> None:
    lr, best = 0.02, UNEVEN.optimum(weights=UNEVEN.sizes)
    nova = UNEVEN.run(FedNovaOnQuadratic(), rounds=100, lr=lr)
    averaged = UNEVEN.run(OnQuadratic(), rounds=100, lr=lr)
    np.testing.assert_allclose(nova, fixed_point(lr, normalised=True), atol=1e-3)
    np.testing.assert_allclose(averaged, fixed_point(lr, normalised=False), atol=1e-3)
    assert np.linalg.norm(averaged - best) > 10 * np.linalg.norm(nova - best)


def test_what_is_left_of_the_bias_falls_with_the_learning_rate() -> None:
    """The fixed point of FedNova, which runs reach, goes to the weighted optimum; that of FedAvg does not."""
    best, rates = UNEVEN.optimum(weights=UNEVEN.sizes), (1e-2, 1e-3, 1e-4)
    nova = [np.linalg.norm(fixed_point(lr, normalised=True) - best) for lr in rates]
    averaged = [np.linalg.norm(fixed_point(lr, normalised=False) - best) for lr in rates]
    assert nova[0] > 9 * nova[1] > 80 * nova[2]
    assert averaged[2] > 0.9 * averaged[0]


def test_batchnorm_statistics_stay_between_those_of_the_clients(tmp_path: Path) -> None:
    """A step beyond the clients' mean is right for weights; a running variance it can make negative."""
    server = tiny_server(tmp_path, sizes=[5, 50, 7], net=normed_net())
    ups = Uplinks(server, [0, 1, 2], parts={"a": [1.0, 10.0, 2.0]})
    FedNova().aggregate(server, iter(ups))
    trainable = server.task.trainable
    seen, buffers = np.vstack([ups.w, ups.w_t])[:, trainable:], server.model[trainable:].numpy()
    assert (buffers >= seen.min(0)).all()
    assert (buffers <= seen.max(0)).all()


def test_fednova_trains_a_network_with_batchnorm_on_clients_of_very_different_sizes() -> None:
    """Ten clients make one step each, one makes 50; the features vary less than BatchNorm assumes at first."""
    rng = np.random.default_rng(0)
    shares = [(0.1 * rng.normal(size=(n, 4)).astype(np.float32), np.arange(n) % 2) for n in [200, *[4] * 10]]
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    data = from_clients(shares, test=shares[0], test_fraction=0)
    settings: dict[str, Any] = {"rounds": 1, "epochs": 1, "batch_size": 4, "participation": 1.0, "engine": "inline"}
    result = fedstill.run("fednova", data=data, model=model, **settings)
    assert (result.model.state_dict()["1.running_var"] > 0).all()
    assert np.isfinite(result.records[0]["loss"])


def test_fednova_refuses_steps_that_it_cannot_count(run_small: RunSmall) -> None:
    with pytest.raises(fedstill.SettingError, match="fednova"):
        run_small("fednova", optimizer="adam")
