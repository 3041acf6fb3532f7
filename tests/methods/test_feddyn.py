"""FedDyn against its update rules written out, and on clients whose common optimum is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedstill
from fedstill.building.config import read_toml
from fedstill.methods.feddyn import FedDyn
from fedstill.running.directory import RunDirectory
from fedstill.running.result import Result
from support import commandline
from support.byhand import OnQuadratic, Point, Problem, Uplinks, normed_net, tiny_server
from support.recorder import record_rounds
from support.runs import RunSmall

PROBLEM = Problem.random(sizes=(2, 6, 4, 1, 3))


class FedDynOnQuadratic(OnQuadratic, FedDyn): ...


def test_the_server_updates_h_first_and_divides_it_by_all_clients(tmp_path: Path) -> None:
    server, method = tiny_server(tmp_path, sizes=[5, 50, 1, 9, 30, 2, 8]), FedDyn()
    method.start(server)
    h = np.zeros((7, 8))
    for clients in ([4, 0, 5], [1, 4, 6], [2, 0, 3]):
        ups = Uplinks(server, clients, seed=clients[0])
        method.aggregate(server, iter(ups))
        h[clients] += ups.w - ups.w_t
        np.testing.assert_allclose(server.model, ups.w.mean(0) + h.sum(0) / 7, rtol=1e-11)


def test_the_model_comes_first_and_the_mean_of_the_active_clients_second(tmp_path: Path) -> None:
    server, method = tiny_server(tmp_path, sizes=[5, 50, 1, 9]), FedDyn()
    method.start(server)
    ups = Uplinks(server, [3, 0])
    method.aggregate(server, iter(ups))
    first, second = method.models(server).values()
    assert torch.equal(first, server.model)
    np.testing.assert_allclose(second, ups.w.mean(0), rtol=1e-12)


def test_batchnorm_statistics_are_the_uniform_mean_of_the_active_clients(tmp_path: Path) -> None:
    server, method = tiny_server(tmp_path, sizes=[5, 50, 7], net=normed_net()), FedDyn()
    method.start(server)
    for _ in range(2):
        ups = Uplinks(server, [0, 2])
        method.aggregate(server, iter(ups))
        np.testing.assert_allclose(server.model[server.task.trainable :], ups.w.mean(0)[server.task.trainable :])


@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_a_run_equals_the_rules_written_out(monkeypatch: pytest.MonkeyPatch, participation: float) -> None:
    alpha, lr, total = 0.3, 0.1, 5
    crossings = record_rounds(monkeypatch)
    end = PROBLEM.run(FedDynOnQuadratic(alpha=alpha), rounds=12, participation=participation, lr=lr, epochs=2)

    w, h = np.zeros(3), np.zeros((total, 3))
    for crossing in crossings:
        np.testing.assert_allclose(crossing.down["model"], w, rtol=1e-9, atol=1e-12)
        ends = []
        for k in crossing.cohort:
            local = w
            for _ in range(2 * PROBLEM.sizes[k]):
                # the gradient of F_k + alpha <h_k, w> + (alpha/2) ||w - w_t||^2
                local = local - lr * (PROBLEM.gradient(k, local) + alpha * h[k] + alpha * (local - w))
            h[k] += local - w
            ends.append(local)
        w = np.mean(ends, axis=0) + h.sum(0) / total
    np.testing.assert_allclose(end, w, rtol=1e-9)


def test_every_client_keeps_its_own_h(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crossings = record_rounds(monkeypatch)
    PROBLEM.result(FedDynOnQuadratic(alpha=0.3), rounds=6, participation=0.4, lr=0.1, out=tmp_path / "run")
    h: dict[int, torch.Tensor] = {}
    for crossing in crossings:
        for k, up in crossing.up.items():
            h[k] = h.get(k, torch.zeros(3, dtype=torch.float64)) + (up["model"] - crossing.down["model"])
    store = RunDirectory(tmp_path / "run").client_store
    for k in range(5):
        state = store.read(k, before=10**9)
        assert (state is None) == (k not in h), "a client never active has none"
        if state is not None:
            torch.testing.assert_close(state["h"], h[k], rtol=1e-12, atol=1e-14)


def test_the_first_rounds_clients_do_what_fedprox_does(run_small: RunSmall, monkeypatch: pytest.MonkeyPatch) -> None:
    """h_k is zero at first, which leaves (alpha/2) ||w - w_t||^2."""
    crossings = record_rounds(monkeypatch)
    run_small(FedDyn(alpha=0.2), rounds=1)
    run_small("fedprox", mu=0.2, rounds=1)
    dyn, prox = crossings
    assert dyn.cohort == prox.cohort
    assert all(torch.equal(a["model"], b["model"]) for a, b in zip(dyn.up.values(), prox.up.values(), strict=True))


def test_a_vanishing_alpha_leaves_fedavgs_clients(run_small: RunSmall, monkeypatch: pytest.MonkeyPatch) -> None:
    crossings = record_rounds(monkeypatch)
    run_small(FedDyn(alpha=1e-30), rounds=1)
    run_small("fedavg", rounds=1)
    dyn, plain = crossings
    assert all(torch.equal(a["model"], b["model"]) for a, b in zip(dyn.up.values(), plain.up.values(), strict=True))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run with every client in every round."""
    out = tmp_path_factory.mktemp("feddyn") / "run"
    return PROBLEM.result(FedDynOnQuadratic(alpha=1.0), rounds=30, lr=0.2, out=out)


def test_feddyn_reaches_the_common_optimum_that_averaging_misses(finished: Result) -> None:
    best, averaged = PROBLEM.optimum(), np.zeros(3)
    for _ in range(100):
        averaged = np.mean([PROBLEM.sgd(k, averaged, 0.2, n) for k, n in enumerate(PROBLEM.sizes)], axis=0)
    assert np.linalg.norm(averaged - best) > 0.1
    assert isinstance(finished.model, Point)
    assert np.linalg.norm(finished.model.w.detach().numpy() - best) < 1e-3


def test_feddyn_reaches_it_with_some_of_the_clients_a_round() -> None:
    end = PROBLEM.run(FedDynOnQuadratic(alpha=1.0), rounds=60, lr=0.2, participation=0.6)
    assert np.linalg.norm(end - PROBLEM.optimum()) < 1e-3


def test_at_the_optimum_each_h_balances_its_clients_gradient(finished: Result) -> None:
    """h_k = -grad F_k / alpha."""
    assert finished.path is not None
    store = RunDirectory(finished.path).client_store
    for k in range(5):
        state = store.read(k, before=10**9)
        assert state is not None
        np.testing.assert_allclose(state["h"], -PROBLEM.gradient(k, PROBLEM.optimum()), atol=1e-2)


def test_alpha_has_to_be_positive(run_small: RunSmall) -> None:
    with pytest.raises(fedstill.SettingError, match="alpha"):
        run_small("feddyn", hyper={"alpha": 0.0})


def test_a_comparison_with_fedavg_divides_the_data_alike_whatever_alpha_is_meant(tmp_path: Path) -> None:
    """The partition has an alpha too; `--set alpha=` must not mean one for this method and the other for that."""
    words = [word for word in commandline.short() if not word.startswith("alpha=")]
    words = [word for word, after in zip(words, [*words[1:], ""], strict=True) if (word, after) != ("--set", "--set")]
    out = tmp_path / "both"
    answer = commandline.fedstill("compare", "fedavg", "feddyn", "--out", out, "--set", "alpha=0.7", *words)
    if answer.code == 0:
        alphas = [read_toml(out / method / "config.toml")["alpha"] for method in ("fedavg", "feddyn")]
        assert alphas[0] == alphas[1]
    else:
        assert "alpha" in answer.err
