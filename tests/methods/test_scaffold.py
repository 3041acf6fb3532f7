"""SCAFFOLD against its update rules written out, and on clients whose common optimum is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import fedstill
from fedstill.aggregate.mean import weighted_mean
from fedstill.core.tree import Message
from fedstill.methods.base import Server
from fedstill.methods.scaffold import SCAFFOLD
from support.byhand import Array, OnQuadratic, Problem, Uplinks, normed_net, tiny_server
from support.recorder import record_rounds
from support.runs import RunSmall, numbers, weights

PROBLEM = Problem.random(sizes=(2, 6, 4, 1, 3))


class Uniform(fedstill.FedAvg):
    """FedAvg in which every client counts the same."""

    def aggregate(self, server: Server, uplinks: Iterator[fedstill.Uplink]) -> None:
        server.model = weighted_mean((up["model"], 1) for up in uplinks)


class Frozen(SCAFFOLD):
    """SCAFFOLD whose control variates stay at zero."""

    def uplink(self, client: fedstill.Client) -> Message:
        up = super().uplink(client)
        client.state["c"] = torch.zeros_like(client.state["c"])
        return up | {"c_change": torch.zeros_like(up["c_change"])}


class ScaffoldOnQuadratic(OnQuadratic, SCAFFOLD): ...


class UniformOnQuadratic(OnQuadratic, Uniform): ...


def test_the_server_takes_the_uniform_mean_and_sums_control_changes_over_all_clients(tmp_path: Path) -> None:
    server, method = tiny_server(tmp_path, sizes=[5, 50, 1, 9, 30, 2, 8]), SCAFFOLD()
    method.start(server)
    assert not server.state["c"].any(), "c starts at zero"
    change = np.random.default_rng(3).normal(size=(3, 8))
    c = np.zeros(8)
    for clients in ([4, 0, 5], [1, 2, 6]):
        ups = Uplinks(server, clients, parts={"c_change": list(change)})
        method.aggregate(server, iter(ups))
        c += change.sum(0) / 7  # K_total, not the three participants
        np.testing.assert_allclose(server.model, ups.w.mean(0), rtol=1e-12)
        np.testing.assert_allclose(server.state["c"], c, rtol=1e-12)


def test_the_server_learning_rate_scales_the_step_to_the_mean(tmp_path: Path) -> None:
    server, method = tiny_server(tmp_path, sizes=[5, 50]), SCAFFOLD(server_lr=0.3)
    method.start(server)
    ups = Uplinks(server, [1, 0], parts={"c_change": [np.zeros(8)] * 2})
    method.aggregate(server, iter(ups))
    np.testing.assert_allclose(server.model, ups.w_t + 0.3 * (ups.w.mean(0) - ups.w_t), rtol=1e-12)


def test_scaffold_with_frozen_control_variates_is_the_uniform_average(run_small: RunSmall) -> None:
    frozen, uniform = run_small(Frozen()), run_small(Uniform())
    assert torch.equal(weights(frozen), weights(uniform))
    sent = ("bytes_down", "bytes_up")
    plain = [[{k: v for k, v in r.items() if k not in sent} for r in numbers(run)] for run in (frozen, uniform)]
    assert plain[0] == plain[1]
    assert not torch.equal(weights(run_small(SCAFFOLD())), weights(uniform)), "otherwise they do something"


def test_the_first_round_is_the_uniform_average(run_small: RunSmall) -> None:
    assert torch.equal(weights(run_small(SCAFFOLD(), rounds=1)), weights(run_small(Uniform(), rounds=1)))


def test_a_partial_participation_run_equals_the_rules_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lr, decay, total = 0.2, 0.97, 5
    crossings = record_rounds(monkeypatch)
    end = PROBLEM.run(ScaffoldOnQuadratic(), rounds=12, participation=0.4, lr=lr, lr_decay=decay, epochs=2)

    w, c, c_k = np.zeros(3), np.zeros(3), np.zeros((total, 3))
    for t, crossing in enumerate(crossings):
        np.testing.assert_allclose(crossing.down["model"], w, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(crossing.down["c"], c, rtol=1e-9, atol=1e-12)
        rate, ends, change = lr * decay**t, [], np.zeros(3)
        for k in crossing.cohort:
            steps, local = 2 * PROBLEM.sizes[k], w
            for _ in range(steps):
                local = local - rate * PROBLEM.gradient(k, local)
                local = local - rate * (c - c_k[k])  # after each SGD step
            new = c_k[k] - c + (w - local) / (steps * rate)
            change += new - c_k[k]
            c_k[k] = new
            ends.append(local)
        w, c = np.mean(ends, axis=0), c + change / total
    assert len({k for crossing in crossings for k in crossing.cohort}) == total
    assert len(crossings[0].cohort) == 2
    np.testing.assert_allclose(end, w, rtol=1e-9)


def test_a_clients_control_variate_is_the_mean_of_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    crossings = record_rounds(monkeypatch)
    PROBLEM.run(ScaffoldOnQuadratic(), rounds=1, lr=0.1)
    for k, up in crossings[0].up.items():
        path = [PROBLEM.sgd(k, np.zeros(3), 0.1, steps) for steps in range(PROBLEM.sizes[k])]
        expected = np.mean([PROBLEM.gradient(k, w) for w in path], axis=0)
        np.testing.assert_allclose(up["c_change"], expected, rtol=1e-9)


@pytest.fixture(scope="module")
def averaged() -> Array:
    """Where the uniform average without a correction ends."""
    return PROBLEM.run(UniformOnQuadratic(), rounds=30, lr=0.2)


def test_averaging_alone_ends_at_the_fixed_point_of_its_local_steps(averaged: Array) -> None:
    """sum_k (I - (I - lr A_k)^tau_k) (w - b_k) = 0, which is not where the gradients cancel."""
    moves = [
        np.eye(3) - np.linalg.matrix_power(np.eye(3) - 0.2 * a, n)
        for a, n in zip(PROBLEM.a, PROBLEM.sizes, strict=True)
    ]
    expected = np.linalg.solve(sum(moves), sum(m @ b for m, b in zip(moves, PROBLEM.b, strict=True)))
    np.testing.assert_allclose(averaged, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("participation", "rounds"), [(1.0, 30), (0.4, 70)])
def test_scaffold_reaches_the_common_optimum_that_averaging_misses(
    averaged: Array, participation: float, rounds: int
) -> None:
    best = PROBLEM.optimum()
    corrected = PROBLEM.run(ScaffoldOnQuadratic(), rounds=rounds, lr=0.2, participation=participation)
    assert np.linalg.norm(averaged - best) > 0.1
    assert np.linalg.norm(corrected - best) < 1e-5


def test_clipping_holds_for_the_gradient_and_not_for_the_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    """c_k is then the mean of the clipped gradients, and the correction c - c_k is applied whole."""
    lr, clip = 0.1, 0.3
    crossings = record_rounds(monkeypatch)
    PROBLEM.run(ScaffoldOnQuadratic(), rounds=3, lr=lr, clip=clip)
    c_k = np.zeros((5, 3))
    for crossing in crossings:
        w, c = crossing.down["model"].numpy(), crossing.down["c"].numpy()
        for k, up in crossing.up.items():
            local = w
            for _ in range(PROBLEM.sizes[k]):
                gradient = PROBLEM.gradient(k, local)
                gradient = gradient * np.minimum(1, clip / (np.linalg.norm(gradient) + 1e-6))
                local = local - lr * gradient - lr * (c - c_k[k])
            np.testing.assert_allclose(up["model"], local, rtol=1e-5)
            c_k[k] += up["c_change"].numpy()


def test_batchnorm_statistics_stay_between_those_of_the_clients(tmp_path: Path) -> None:
    server, method = tiny_server(tmp_path, sizes=[5, 50, 7], net=normed_net()), SCAFFOLD(server_lr=3.0)
    method.start(server)
    trainable = server.task.trainable
    ups = Uplinks(server, [0, 1, 2], parts={"c_change": [np.zeros(trainable)] * 3})
    method.aggregate(server, iter(ups))
    seen, buffers = np.vstack([ups.w, ups.w_t])[:, trainable:], server.model[trainable:].numpy()
    assert (buffers >= seen.min(0)).all()
    assert (buffers <= seen.max(0)).all()


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_scaffold_refuses_anything_but_plain_sgd(run_small: RunSmall, settings: dict[str, object]) -> None:
    with pytest.raises(fedstill.SettingError, match="scaffold"):
        run_small("scaffold", **settings)
