"""FedMGDA+: the small quadratic programme against brute force, and the server's step written out."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import fedstill
from fedstill.methods.fedmgda_plus import FedMGDAPlus, common_descent
from support.byhand import Array, OnQuadratic, Problem, Uplinks, normed_net, tiny_server
from support.recorder import record_rounds
from support.runs import RunSmall

EPSILONS = [0.0, 0.05, 0.1, 0.4, 1.0]


def directions(clients: int, d: int, seed: int, common: float = 0.0) -> Array:
    """Random unit vectors, drawn towards a common one."""
    rng = np.random.default_rng(seed)
    raw = rng.normal(size=(clients, d)) + common * rng.normal(size=d)
    unit: Array = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    return unit


def random_prior(clients: int, seed: int) -> Array:
    n = np.random.default_rng(seed + 1000).integers(1, 60, clients)
    prior: Array = n / n.sum()
    return prior


def brute_force(gram: Array, prior: Array, epsilon: float, points: int) -> float:
    """The least ||sum_k lambda_k g_k||^2 on a grid over the box and the simplex, for two or three clients."""
    axes = [np.linspace(max(p - epsilon, 0), min(p + epsilon, 1), points) for p in prior[:-1]]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
    last = 1 - grid.sum(1)
    inside = (last >= max(prior[-1] - epsilon, 0) - 1e-12) & (last <= min(prior[-1] + epsilon, 1) + 1e-12)
    weights = np.column_stack([grid, last])[inside]
    return float(np.einsum("ni,ij,nj->n", weights, gram, weights).min())


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", EPSILONS[1:])
@pytest.mark.parametrize(("clients", "points"), [(2, 200_001), (3, 1001)])
def test_the_weights_do_as_well_as_brute_force(clients: int, points: int, epsilon: float) -> None:
    for seed in range(5):
        g, prior = directions(clients, 4, seed, common=seed % 3), random_prior(clients, seed)
        weights = common_descent(g @ g.T, prior, epsilon)
        least = brute_force(g @ g.T, prior, epsilon, points)
        assert float(weights @ g @ g.T @ weights) <= least + 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("clients", [1, 2, 3, 10, 40])
def test_the_weights_lie_on_the_simplex_and_in_the_box(clients: int, epsilon: float) -> None:
    for seed in range(5):
        g, prior = directions(clients, 20, seed, common=1), random_prior(clients, seed)
        weights = common_descent(g @ g.T, prior, epsilon)
        assert weights.sum() == pytest.approx(1, abs=1e-12)
        assert (weights >= 0).all()
        assert np.abs(weights - prior).max() <= epsilon + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", EPSILONS[1:])
@pytest.mark.parametrize("clients", [4, 10, 40])
def test_the_weights_meet_the_conditions_of_optimality(clients: int, epsilon: float) -> None:
    """For some mu: the slope of the square is mu inside the box, at least mu at its floor, at most mu at its top."""
    for seed in range(5):
        g, prior = directions(clients, 30, seed, common=seed / 2), random_prior(clients, seed)
        weights = common_descent(g @ g.T, prior, epsilon)
        slope = g @ (g.T @ weights)
        at_floor = weights <= np.maximum(prior - epsilon, 0) + 1e-7
        at_top = weights >= np.minimum(prior + epsilon, 1) - 1e-7
        highest_that_could_give = slope[~at_floor].max(initial=-np.inf)
        lowest_that_could_take = slope[~at_top].min(initial=np.inf)
        assert highest_that_could_give <= lowest_that_could_take + 1e-5, "moving weight would shorten the direction"


def test_with_the_whole_simplex_the_direction_serves_every_client() -> None:
    """The shortest vector d of a convex hull has <d, g_k> >= ||d||^2 for every g_k, so -d harms nobody."""
    for seed in range(10):
        for clients in (2, 5, 12):
            g = directions(clients, 15, seed, common=1)
            d = common_descent(g @ g.T, random_prior(clients, seed), 1.0) @ g
            assert (g @ d >= d @ d - 1e-5).all()
            assert (g @ d >= 0).all()


def test_a_small_epsilon_can_leave_a_client_worse_off() -> None:
    """Else the test above would say nothing of the weights."""
    g, prior = np.array([[1.0, 0.0], [-0.9, np.sqrt(1 - 0.81)]]), np.array([0.9, 0.1])
    assert (g @ (common_descent(g @ g.T, prior, 0.1) @ g)).min() < 0
    assert (g @ (common_descent(g @ g.T, prior, 1.0) @ g)).min() > 0


def test_two_clients_have_a_closed_form(tmp_path: Path) -> None:
    """Unit vectors: half each, or as near to it as the box allows."""
    g = directions(2, 5, 0)
    for prior, epsilon, expected in [(0.3, 1.0, 0.5), (0.3, 0.2, 0.5), (0.3, 0.05, 0.35), (0.9, 0.1, 0.8)]:
        weights = common_descent(g @ g.T, np.array([prior, 1 - prior]), epsilon)
        np.testing.assert_allclose(weights, [expected, 1 - expected], atol=1e-6)


@pytest.mark.parametrize("eta", [1.0, 0.2])
def test_the_server_step_has_unit_updates_and_the_weights_of_the_programme(tmp_path: Path, eta: float) -> None:
    server, method = tiny_server(tmp_path, sizes=[5, 50, 20]), FedMGDAPlus(epsilon=0.2, eta=eta)
    for clients in ([2, 0], [1, 2]):
        ups = Uplinks(server, clients)
        ups.w[0] = ups.w_t + 1000 * (ups.w[0] - ups.w_t)  # a client that runs far counts no more for it
        method.aggregate(server, iter(ups))
        g = ups.w_t - ups.w
        g /= np.linalg.norm(g, axis=1, keepdims=True)
        prior = ups.n[0] / ups.n.sum()
        first = np.clip(0.5, prior - 0.2, prior + 0.2)  # the closed form above
        expected = ups.w_t - eta * (first * g[0] + (1 - first) * g[1])
        np.testing.assert_allclose(server.model, expected, rtol=1e-6)


def test_with_epsilon_zero_and_updates_of_one_length_it_is_fedavg(tmp_path: Path) -> None:
    length = 0.37
    for net in (None, normed_net()):
        models = []
        for method in (FedMGDAPlus(epsilon=0.0, eta=length), fedstill.FedAvg()):
            server = tiny_server(tmp_path, sizes=[5, 50, 1, 9], net=net)
            trainable = server.task.trainable
            ups = Uplinks(server, [3, 0, 2])
            moved = ups.w[:, :trainable] - ups.w_t[:trainable]
            ups.w[:, :trainable] = ups.w_t[:trainable] + length * moved / np.linalg.norm(moved, axis=1, keepdims=True)
            method.aggregate(server, iter(ups))
            models.append(server.model)
        torch.testing.assert_close(models[0], models[1], rtol=1e-12, atol=1e-12)


def test_a_run_with_epsilon_zero_steps_along_the_weighted_unit_updates(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossings = record_rounds(monkeypatch)
    run_small("fedmgda-plus", epsilon=0.0, eta=0.5, rounds=4)
    for before, after in pairwise(crossings):
        w_t = before.down["model"].double().numpy()
        g = w_t - np.array([up["model"].double().numpy() for up in before.up.values()])
        g /= np.linalg.norm(g, axis=1, keepdims=True)
        n = np.array(list(before.samples.values()))
        expected = w_t - 0.5 * (n / n.sum()) @ g
        np.testing.assert_allclose(after.down["model"], expected, rtol=1e-5, atol=1e-7)


class FedMGDAOnQuadratic(OnQuadratic, FedMGDAPlus): ...


def test_small_steps_with_the_whole_simplex_lower_every_clients_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.random(sizes=(1, 1, 1), seed=4)
    crossings = record_rounds(monkeypatch)
    problem.run(FedMGDAOnQuadratic(epsilon=1.0, eta=0.02), rounds=20, lr=0.1)
    losses = np.array([problem.losses(crossing.down["model"].numpy()) for crossing in crossings])
    assert (np.diff(losses, axis=0) < 0).all()


def test_a_client_that_did_not_move_does_no_harm(tmp_path: Path) -> None:
    server = tiny_server(tmp_path, sizes=[5, 50, 20])
    ups = Uplinks(server, [0, 1, 2])
    ups.w[1] = ups.w_t
    FedMGDAPlus().aggregate(server, iter(ups))
    assert torch.isfinite(server.model).all()
    assert np.linalg.norm(server.model.numpy() - ups.w_t) <= 1


@pytest.mark.parametrize("settings", [{"epsilon": -0.1}, {"epsilon": 1.5}, {"eta": 0.0}])
def test_wrong_settings_are_refused(run_small: RunSmall, settings: dict[str, float]) -> None:
    with pytest.raises(fedstill.SettingError, match=next(iter(settings))):
        run_small("fedmgda-plus", **settings)
