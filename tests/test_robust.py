"""Robust aggregation: each against NumPy, against outliers, and what it reduces to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byhand import Array, Uplinks, normed_net, record_crossings, tiny_server
from conftest import RunSmall, numbers, weights

import fedstill
from fedstill.methods import registry, robust
from fedstill.methods.base import Method, Server
from fedstill.methods.robust import Krum, Median, MultiKrum, NormClip, TrimmedMean

SIZES = [9, 4, 30, 1, 12, 7, 20]
WEIGHTS = 23  # of the network, before its statistics
QUICK: dict[str, Any] = {
    "model": "mlp",
    "model_options": {"hidden": [8]},
    "participation": 1.0,
    "rounds": 2,
    "fraction": 0.05,
}
NAMES = ("median", "trimmed-mean", "norm-clip", "krum", "multi-krum")


def tried(method: Method, folder: Path, clients: int = 7) -> tuple[Array, Uplinks, Server]:
    """What the method makes of one round of clients around the server's model."""
    server = tiny_server(folder, SIZES, net=normed_net())
    method.start(server)
    ups = Uplinks(server, range(clients))
    method.aggregate(server, iter(ups))
    model: Array = server.model.numpy()
    return model, ups, server


def krum_order(w: Array, f: int) -> list[int]:
    """Clients by their score, the best first."""
    scores = []
    for i in range(len(w)):
        apart = sorted(float(((w[i] - w[j])[:WEIGHTS] ** 2).sum()) for j in range(len(w)) if j != i)
        scores.append(sum(apart[: len(w) - f - 2]))
    return [int(place) for place in np.argsort(scores)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "_AT_ONCE", 7)  # so that the small networks here come in several


@pytest.mark.parametrize("clients", [7, 6, 2, 1])
def test_median_is_that_of_every_weight_and_statistic(tmp_path: Path, clients: int) -> None:
    model, ups, _ = tried(Median(), tmp_path, clients)
    np.testing.assert_allclose(model, np.median(ups.w, 0), rtol=1e-14)


@pytest.mark.parametrize(
    ("trim", "clients", "cut"),
    [(0.2, 7, 1), (0.29, 7, 2), (0.4, 7, 2), (0.49, 7, 3), (0.2, 4, 1), (0.01, 7, 1), (0.49, 2, 0), (0.4, 1, 0)],
)
def test_trimmed_mean_cuts_the_ends_off_every_weight_and_statistic(
    tmp_path: Path, trim: float, clients: int, cut: int
) -> None:
    model, ups, _ = tried(TrimmedMean(trim=trim), tmp_path, clients)
    np.testing.assert_allclose(model, np.sort(ups.w, 0)[cut : clients - cut].mean(0), rtol=1e-13, atol=1e-15)


def test_trimmed_mean_without_trimming_is_the_uniform_mean(tmp_path: Path) -> None:
    model, ups, _ = tried(TrimmedMean(trim=0), tmp_path)
    np.testing.assert_allclose(model, ups.w.mean(0), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("max_norm", [0.0, 4.5])
def test_norm_clip_shortens_long_updates_and_leaves_statistics(tmp_path: Path, max_norm: float) -> None:
    model, ups, _ = tried(NormClip(max_norm=max_norm), tmp_path)
    norms = np.linalg.norm((ups.w - ups.w_t)[:, :WEIGHTS], axis=1)
    longest = max_norm or np.median(norms)
    assert 0 < (norms > longest).sum() < 7
    w = ups.w.copy()
    w[:, :WEIGHTS] = ups.w_t[:WEIGHTS] + np.minimum(1, longest / norms)[:, None] * (ups.w - ups.w_t)[:, :WEIGHTS]
    np.testing.assert_allclose(model, ups.n @ w / ups.n.sum(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("f", [0, 1, 2])
def test_krum_takes_the_model_nearest_to_its_nearest(tmp_path: Path, f: int) -> None:
    model, ups, server = tried(Krum(byzantine=f), tmp_path)
    best = krum_order(ups.w, f)[0]
    np.testing.assert_allclose(model, ups.w[best], rtol=1e-15)
    assert server.notes["chosen"] == [best]


@pytest.mark.parametrize(("f", "keep", "kept"), [(1, 0, 6), (2, 0, 5), (2, 3, 3), (1, 99, 7)])
def test_multi_krum_averages_the_best(tmp_path: Path, f: int, keep: int, kept: int) -> None:
    model, ups, _ = tried(MultiKrum(byzantine=f, keep=keep), tmp_path)
    best = krum_order(ups.w, f)[:kept]
    np.testing.assert_allclose(model, ups.n[best] @ ups.w[best] / ups.n[best].sum(), rtol=1e-12, atol=1e-14)


def test_among_equals_krum_takes_the_first(tmp_path: Path) -> None:
    server = tiny_server(tmp_path, SIZES)
    ups = Uplinks(server, range(7), spread=0.0)
    Krum().aggregate(server, iter(ups))
    assert server.notes["chosen"] == [0]


@pytest.mark.parametrize("name", NAMES)
def test_one_outlier_moves_the_mean_and_no_robust_aggregate(tmp_path: Path, name: str) -> None:
    server = tiny_server(tmp_path, [10] * 7)
    sent = server.model
    ups = Uplinks(server, range(7), spread=0.1)
    ups.w[2] = 1e6 * np.random.default_rng(5).normal(size=len(ups.w_t))
    honest = np.delete(ups.w, 2, 0).mean(0)
    registry.make(f"fedavg+{name}").aggregate(server, iter(ups))
    assert np.abs(server.model.numpy() - honest).max() < 0.3
    server.model = sent
    fedstill.FedAvg().aggregate(server, iter(ups))
    assert np.abs(server.model.numpy() - honest).max() > 1e4


@pytest.mark.parametrize(
    ("name", "settings"), [("norm-clip", {"max_norm": 1e9}), ("multi-krum", {"byzantine": 0, "keep": 6})]
)
def test_with_everything_allowed_it_is_fedavg_bit_for_bit(
    run_small: RunSmall, name: str, settings: dict[str, Any]
) -> None:
    assert torch.equal(weights(run_small(f"fedavg+{name}", **QUICK, **settings)), weights(run_small(**QUICK)))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_on_both_engines(run_small: RunSmall, name: str) -> None:
    settings = QUICK | {"attack": "noise", "attackers": 1}
    inline = run_small(f"fedprox+{name}", **settings)
    processes = run_small(f"fedprox+{name}", **settings, engine="process", workers=2)
    assert torch.equal(weights(inline), weights(processes))
    assert numbers(inline) == numbers(processes)


@pytest.mark.parametrize("name", ["fedprox+krum", "scaffold+median", "fednova+norm-clip", "fedkf+trimmed-mean"])
def test_any_method_that_sends_models_can_be_defended(run_small: RunSmall, name: str) -> None:
    own = {"width": 2, "z_dim": 3} if "fedkf" in name else {}
    method, rule = name.split("+")
    plain, defended = run_small(method, **QUICK, **own), run_small(name, **QUICK, **own)
    assert rule in registry.modifiers()
    assert np.isfinite(defended.summary["final_loss"])
    assert not torch.equal(weights(plain), weights(defended))
    assert defended.summary["bytes_up"] == plain.summary["bytes_up"]


def test_a_server_side_starts_from_the_robust_mean(run_small: RunSmall) -> None:
    """Without a step of its own, `fedavg+median+feddf` is `fedavg+median`."""
    proxy = {"pool": 0.1, "proxy": "pool"}
    taught, plain = (
        run_small(name, **QUICK, **proxy, **own)
        for name, own in (("fedavg+median+feddf", {"server_steps": 1, "server_lr": 1e-30}), ("fedavg+median", {}))
    )
    torch.testing.assert_close(weights(taught), weights(plain), rtol=1e-6, atol=1e-8)


def test_before_a_server_side_only_those_chosen_teach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taught_by: list[list[int]] = []
    method = registry.make("feddf+multi-krum", {"keep": 3})
    assert isinstance(method, MultiKrum)
    monkeypatch.setattr(
        type(method.inner), "improve", lambda self, server, ups: taught_by.append([up.client for up in ups])
    )
    _, ups, server = tried(method, tmp_path)
    assert taught_by == [server.notes["chosen"]] == [sorted(krum_order(ups.w, 1)[:3])]


def test_t1_remembers_what_was_sent_before_it_and_what_is_defended_after_it(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossings, settings = record_crossings(monkeypatch), QUICK | {"rounds": 1}
    before, after, plain = (
        run_small(f"fedavg{n}", **settings) for n in ("+trimmed-mean+t1", "+t1+trimmed-mean", "+t1")
    )
    assert torch.equal(weights(before), weights(plain)), "the mean of all clients' models as they came"
    sent = np.sort([up["model"].double().numpy() for up in crossings[0].up], 0)
    np.testing.assert_allclose(weights(after), sent[1:-1].mean(0), rtol=1e-6, atol=1e-8)
    assert before.records[0]["also"]["without T1"] == after.records[0]["also"]["without T1"]


class OneBroken(fedstill.FedAvg):
    """One client's answers are not finite."""

    def uplink(self, client: fedstill.Client) -> dict[str, torch.Tensor]:
        up = super().uplink(client)
        return {"model": up["model"] * torch.nan} if client.id == 2 else up


def test_krum_goes_on_with_fewer_clients_and_says_so(run_small: RunSmall, tmp_path: Path) -> None:
    settings = QUICK | {"clients": 5}
    result = run_small(Krum(inner=OneBroken()), **settings, out=tmp_path / "run")
    assert [r["dropped"] for r in result.records] == [1, 1]
    assert "krum withstands 0 malicious among 4 clients, not byzantine = 1" in (tmp_path / "run/log.txt").read_text()
    server = tiny_server(tmp_path / "two", SIZES)
    server.round = 1
    with pytest.raises(fedstill.FedstillError, match=r"round 1: krum compares at least three.*participation"):
        Krum().aggregate(server, iter(Uplinks(server, range(2))))


def test_krum_is_refused_before_the_run_where_a_round_has_too_few_clients(run_small: RunSmall, tmp_path: Path) -> None:
    for settings, reason in (
        ({"participation": 0.5}, "krum asks for at least 5 clients a round, and round 1 has 3; raise participation"),
        ({"late_clients": 2, "late_from": 2}, "krum asks for at least 5 clients a round, and round 1 has 4"),
        ({"regions": 2, "rounds_per_episode": 1}, "region 1: krum asks for at least 5 .* round 1 has 3"),
    ):
        with pytest.raises(fedstill.SettingError, match=reason):
            run_small("fedavg+krum", **QUICK | settings, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()
    run_small("fedavg+krum", **QUICK | {"participation": 0.5}, byzantine=0)


@pytest.mark.parametrize(
    ("method", "settings", "reason"),
    [
        ("feddistill+median", {}, "median compares the clients' models.*do not send any"),
        ("feddistill+krum", {}, "krum compares"),
        ("fedavg+krum", {"byzantine": 2}, "krum asks for at least 7 clients a round, and round 1 has 6"),
        ("fedavg+multi-krum", {"keep": -1}, "keep = -1"),
        ("fedavg+trimmed-mean", {"trim": 0.5}, r"trim = 0\.5: should be less than 0\.5"),
        ("fedavg+norm-clip", {"max_norm": -1.0}, r"max_norm = -1\.0"),
        ("fedavg+krumm", {}, "did you mean 'krum'"),
    ],
)
def test_what_cannot_work_is_refused(run_small: RunSmall, method: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(fedstill.SettingError, match=reason):
        run_small(method, **QUICK, **settings)
