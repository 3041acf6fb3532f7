"""Robust aggregation: each against NumPy, against outliers, and what it reduces to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill
from fedstill.methods import registry
from fedstill.methods.base import Method, Server
from fedstill.methods.robust import (
    Bulyan,
    CenteredClip,
    FLTrust,
    GeoMed,
    Krum,
    Median,
    MultiKrum,
    NormClip,
    TrimmedMean,
    rule,
)
from support.byhand import Array, Uplinks, normed_net, tiny_server
from support.recorder import record_rounds
from support.runs import RunSmall, numbers, weights

SIZES = [9, 4, 30, 1, 12, 7, 20]
WEIGHTS = 23  # of the network, before its statistics
QUICK: dict[str, Any] = {
    "model": "mlp",
    "model_options": {"hidden": [8]},
    "participation": 1.0,
    "rounds": 2,
    "fraction": 0.05,
}
NAMES = ("median", "trimmed-mean", "norm-clip", "krum", "multi-krum", "bulyan", "geomed", "centered-clip")


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
    monkeypatch.setattr(rule, "_AT_ONCE", 7)  # so that the small networks here come in several


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


def with_median_statistics(weights: Array, w: Array) -> Array:
    """A model with these weights, and the median of all clients' statistics."""
    return np.append(weights[:WEIGHTS], np.median(w, 0)[WEIGHTS:])


@pytest.mark.parametrize("max_norm", [0.0, 4.5])
def test_norm_clip_shortens_long_updates_and_caps_counts(tmp_path: Path, max_norm: float) -> None:
    model, ups, _ = tried(NormClip(max_norm=max_norm), tmp_path)
    norms = np.linalg.norm((ups.w - ups.w_t)[:, :WEIGHTS], axis=1)
    longest = max_norm or np.median(norms)
    assert 0 < (norms > longest).sum() < 7
    clipped = ups.w_t + np.minimum(1, longest / norms)[:, None] * (ups.w - ups.w_t)
    n = np.minimum(ups.n, 9)  # the median of SIZES
    expected = with_median_statistics(n @ clipped / n.sum(), ups.w)
    np.testing.assert_allclose(model, expected, rtol=1e-12, atol=1e-14)


def test_the_geometric_median_is_where_the_sum_of_distances_is_smallest(tmp_path: Path) -> None:
    """Its unit vectors towards the clients add up to zero: the condition of the optimum, not the algorithm."""
    model, ups, _ = tried(GeoMed(iterations=500), tmp_path)
    away = ups.w[:, :WEIGHTS] - model[:WEIGHTS]
    directions = away / np.linalg.norm(away, axis=1, keepdims=True)
    np.testing.assert_allclose(directions.sum(0), 0, atol=1e-7)
    np.testing.assert_allclose(model, with_median_statistics(model, ups.w), rtol=1e-14)
    few, _, _ = tried(GeoMed(), tmp_path / "few")
    assert np.linalg.norm((few - model)[:WEIGHTS]) < 0.01 * np.linalg.norm(away, axis=1).min()


def test_geomed_of_three_in_a_line_is_the_one_between_them(tmp_path: Path) -> None:
    server = tiny_server(tmp_path, [5, 5, 5])
    ups = Uplinks(server, range(3))
    ups.w[1], ups.w[2] = ups.w[0] + 1, ups.w[0] + 1e9
    GeoMed().aggregate(server, iter(ups))
    np.testing.assert_allclose(server.model.numpy(), ups.w[1], atol=1e-6)


@pytest.mark.parametrize("tau", [0.0, 2.0])
def test_centered_clip_clips_around_the_update_of_the_round_before(tmp_path: Path, tau: float) -> None:
    method = CenteredClip(tau=tau, iterations=2)
    server = tiny_server(tmp_path, SIZES, net=normed_net())
    method.start(server)
    last = np.zeros(WEIGHTS)
    for round_ in range(2):
        ups = Uplinks(server, range(7), seed=round_)
        method.aggregate(server, iter(ups))
        x, v = ups.w[:, :WEIGHTS], ups.w_t[:WEIGHTS] + last
        for _ in range(2):
            away = np.linalg.norm(x - v, axis=1)
            v = v + (np.minimum(1, (tau or np.median(away)) / away)[:, None] * (x - v)).mean(0)
        np.testing.assert_allclose(server.model.numpy(), with_median_statistics(v, ups.w), rtol=1e-12, atol=1e-13)
        last = v - ups.w_t[:WEIGHTS]


def test_centered_clip_with_an_endless_radius_is_the_uniform_mean(tmp_path: Path) -> None:
    model, ups, _ = tried(CenteredClip(tau=1e30, iterations=1), tmp_path)
    np.testing.assert_allclose(model[:WEIGHTS], ups.w.mean(0)[:WEIGHTS], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("f", "clients"), [(0, 7), (1, 7), (2, 11)])
def test_bulyan_averages_what_is_nearest_to_the_median_of_those_that_krum_chooses(
    tmp_path: Path, f: int, clients: int
) -> None:
    server = tiny_server(tmp_path, [4] * clients, net=normed_net())
    ups = Uplinks(server, range(clients))
    Bulyan(byzantine=f).aggregate(server, iter(ups))
    left, chosen = list(range(clients)), list[int]()
    while len(chosen) < clients - 2 * f:
        scores = []
        for i in left:
            apart = sorted(float(((ups.w[i] - ups.w[j])[:WEIGHTS] ** 2).sum()) for j in left if j != i)
            scores.append(sum(apart[: max(1, len(left) - f - 2)]))
        chosen.append(left.pop(int(np.argmin(scores))))
    assert server.notes["chosen"] == sorted(chosen)
    expected = []
    for values in np.sort(ups.w[chosen], 0).T:
        away = np.abs(values - np.median(values))
        expected.append(values[np.argsort(away, kind="stable")[: clients - 4 * f]].mean())
    np.testing.assert_allclose(server.model.numpy(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("f", [0, 1, 2])
def test_krum_takes_the_model_nearest_to_its_nearest(tmp_path: Path, f: int) -> None:
    model, ups, server = tried(Krum(byzantine=f), tmp_path)
    best = krum_order(ups.w, f)[0]
    np.testing.assert_allclose(model, with_median_statistics(ups.w[best], ups.w), rtol=1e-15)
    assert server.notes["chosen"] == [best]


@pytest.mark.parametrize(("f", "keep", "kept"), [(1, 0, 6), (2, 0, 5), (2, 3, 3), (1, 99, 7)])
def test_multi_krum_averages_the_best(tmp_path: Path, f: int, keep: int, kept: int) -> None:
    model, ups, _ = tried(MultiKrum(byzantine=f, keep=keep), tmp_path)
    best = krum_order(ups.w, f)[:kept]
    expected = with_median_statistics(ups.w[best].mean(0), ups.w)
    np.testing.assert_allclose(model, expected, rtol=1e-12, atol=1e-14)


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
def test_with_everything_allowed_and_equal_counts_it_is_fedavg_bit_for_bit(
    run_small: RunSmall, name: str, settings: dict[str, Any]
) -> None:
    equal = QUICK | {"partition": "iid"}
    assert torch.equal(weights(run_small(f"fedavg+{name}", **equal, **settings)), weights(run_small(**equal)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_on_both_engines(run_small: RunSmall, name: str) -> None:
    settings = QUICK | {"attack": "noise", "attackers": 1, "clients": 8}
    inline = run_small(f"fedprox+{name}", **settings)
    processes = run_small(f"fedprox+{name}", **settings, engine="process", workers=2)
    assert torch.equal(weights(inline), weights(processes))
    assert numbers(inline) == numbers(processes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedprox+krum", "scaffold+median", "fedkf+norm-clip", "fedkf+trimmed-mean"])
def test_any_method_that_sends_models_can_be_defended(run_small: RunSmall, name: str) -> None:
    own = {"width": 2, "z_dim": 3} if "fedkf" in name else {}
    method, rule = name.split("+")
    plain, defended = run_small(method, **QUICK, **own), run_small(name, **QUICK, **own)
    assert rule in registry.modifiers()
    assert np.isfinite(defended.summary["final_loss"])
    assert not torch.equal(weights(plain), weights(defended))
    assert defended.summary["bytes_up"] == plain.summary["bytes_up"]


def test_before_a_server_side_only_those_chosen_teach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taught_by: list[list[int]] = []
    method = registry.make("feddf+multi-krum", {"keep": 3})
    assert isinstance(method, MultiKrum)
    monkeypatch.setattr(
        type(method.inner), "improve", lambda self, server, ups: taught_by.append([up.client for up in ups])
    )
    _, ups, server = tried(method, tmp_path)
    assert taught_by == [server.notes["chosen"]] == [sorted(krum_order(ups.w, 1)[:3])]


def test_t1_remembers_what_is_defended(run_small: RunSmall, monkeypatch: pytest.MonkeyPatch) -> None:
    crossings, settings = record_rounds(monkeypatch), QUICK | {"rounds": 1}
    defended = run_small("fedavg+t1+trimmed-mean", **settings)
    sent = np.sort([up["model"].double().numpy() for up in crossings[0].up.values()], 0)
    np.testing.assert_allclose(weights(defended), sent[1:-1].mean(0), rtol=1e-6, atol=1e-8)


# --- what one client of seven cannot do -------------------------------------------------------------------------------


def attacked(method: Method, folder: Path, **forged: Any) -> tuple[Server, Array]:
    """A round in which client 2 sends other parts, or claims another count, and the mean of the honest models."""
    server = tiny_server(folder, [10] * 7, net=normed_net())
    control = np.random.default_rng(3).normal(size=(7, WEIGHTS))
    parts = {"c_change": list(control)} if any(part.name == "scaffold" for part in method.parts()) else {}
    method.start(server)
    ups = Uplinks(server, range(7), spread=0.1, parts=parts)
    honest = np.delete(ups.w, 2, 0).mean(0)
    if "model" in forged:
        ups.w[2] = ups.w_t + forged["model"]
    ups.w[2, WEIGHTS:] = forged.get("buffers", ups.w[2, WEIGHTS:])
    if "c_change" in forged:
        parts["c_change"][2] = np.full(WEIGHTS, forged["c_change"])
    claim = forged.get("samples", 10)
    server.sizes[2] = claim
    for _ in range(2):  # T1 has models of the first round in the second
        method.aggregate(server, (replace(up, samples=claim) if up.client == 2 else up for up in ups))
        server.round += 1
    return server, honest


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inner", ["fedavg", "fedavg+t1"])
def test_a_claimed_count_changes_nothing(tmp_path: Path, name: str, inner: str) -> None:
    """Neither that of the uplink nor that of `server.sizes`, which T1 weighs by."""
    found = []
    for claim in (10, 10**8):
        method = registry.make(f"{inner}+{name}")
        server, _ = attacked(method, tmp_path / str(claim), model=0.05, samples=claim)
        assert server.sizes[2] == claim, "others still see what was claimed"
        found.append(method.models(server).values())
    for honest, claimed in zip(*found, strict=True):
        assert torch.equal(honest, claimed)


@pytest.mark.parametrize("name", NAMES)
def test_statistics_of_one_client_do_not_reach_the_model(tmp_path: Path, name: str) -> None:
    server, honest = attacked(registry.make(f"fedavg+{name}"), tmp_path, buffers=1e12)
    assert np.abs(server.model.numpy() - honest).max() < 0.4
    server, honest = attacked(fedstill.FedAvg(), tmp_path / "plain", buffers=1e12)
    assert np.abs(server.model.numpy() - honest).max() > 1e10


@pytest.mark.parametrize("name", NAMES)
def test_no_other_part_of_an_uplink_is_a_way_in(tmp_path: Path, name: str) -> None:
    server, _ = attacked(registry.make(f"scaffold+{name}"), tmp_path, c_change=1e3)
    assert float(server.state["c"].abs().max()) < 3
    server, _ = attacked(registry.make("scaffold"), tmp_path / "plain", c_change=1e3)
    assert float(server.state["c"].abs().max()) > 100


def test_a_part_does_not_hide_behind_the_size_of_another(tmp_path: Path) -> None:
    """Control variates a thousand times smaller than the models' spread still decide who is chosen."""
    server = tiny_server(tmp_path, [10] * 7)
    method = registry.make("scaffold+multi-krum")
    method.start(server)
    small = [1e-4 * value for value in np.random.default_rng(3).normal(size=(7, 8))]
    small[2] = np.full(8, 1e-2)
    ups = Uplinks(server, range(7), parts={"c_change": small})
    ups.w[2] = np.delete(ups.w, 2, 0).mean(0)  # the best model of all
    method.aggregate(server, iter(ups))
    assert 2 not in server.notes["chosen"]


def test_a_rule_inside_another_sees_what_the_other_lets_through(tmp_path: Path) -> None:
    model, ups, _ = tried(registry.make("fedavg+median+multi-krum", {"keep": 3}), tmp_path)
    best = krum_order(ups.w, 1)[:3]
    np.testing.assert_allclose(model[:WEIGHTS], np.median(ups.w[best], 0)[:WEIGHTS], rtol=1e-12)


# --- FLTrust ----------------------------------------------------------------------------------------------------------


def test_fltrust_is_its_formula(run_small: RunSmall, monkeypatch: pytest.MonkeyPatch) -> None:
    crossings, seen = record_rounds(monkeypatch), []
    begin = FLTrust.begin

    def noted(self: FLTrust, server: Server) -> None:
        begin(self, server)
        assert server.pool is not None
        seen.append((server.state["fltrust"].double().numpy(), len(server.pool)))

    monkeypatch.setattr(FLTrust, "begin", noted)
    result = run_small("fedprox+fltrust", **QUICK | {"rounds": 1}, pool=40, attack="sign-flip", attackers=2)
    (reference, held), crossing = seen[0], crossings[0]
    assert held == 40
    w_t = crossing.down["model"].double().numpy()
    g = np.array([up["model"].double().numpy() for up in crossing.up.values()]) - w_t
    g_0 = reference - w_t
    assert np.linalg.norm(g_0) > 0
    trust = np.maximum(0, g @ g_0 / np.linalg.norm(g, axis=1) / np.linalg.norm(g_0))
    scaled = g * (np.linalg.norm(g_0) / np.linalg.norm(g, axis=1))[:, None]
    np.testing.assert_allclose(weights(result), w_t + trust @ scaled / trust.sum(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(result.records[0]["server"]["trust"], trust, atol=1e-4)
    assert (trust == 0).sum() == 2, "those who step backwards are not trusted"


def test_where_fltrust_trusts_nobody_the_model_stays(tmp_path: Path) -> None:
    server = tiny_server(tmp_path, SIZES)
    ups = Uplinks(server, range(7))
    ups.w[:] = ups.w_t - 1
    server.state["fltrust"] = server.model + 1
    FLTrust().aggregate(server, iter(ups))
    np.testing.assert_allclose(server.model.numpy(), ups.w_t, rtol=1e-14)


@pytest.mark.slow
def test_fltrust_gives_the_same_bits_on_both_engines_and_after_an_interruption(
    run_small: RunSmall, tmp_path: Path
) -> None:
    settings = QUICK | {"pool": 40, "attack": "sign-flip", "attackers": 2, "model": "cnn", "model_options": {}}
    inline = run_small("fedavg+fltrust", **settings)
    run_small("fedavg+fltrust", **settings | {"rounds": 1}, out=tmp_path / "run", engine="process", workers=2)
    assert torch.equal(weights(inline), weights(fedstill.resume(tmp_path / "run", rounds=2)))


# --- what is refused --------------------------------------------------------------------------------------------------


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


@pytest.mark.slow
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
        ("fedavg+bulyan", {}, "bulyan asks for at least 7 clients a round, and round 1 has 6"),
        ("fedavg+fltrust", {}, "needs labelled samples on the server: set pool"),
        ("scaffold+fltrust", {"pool": 40}, r"fltrust does not defend 'c_change' .*; use \+median or \+multi-krum"),
        ("fednova+median", {}, r"median does not defend 'a' .*; no rule does; .* for example fedavg\+median"),
        ("fednova+krum", {}, "krum does not defend 'a'"),
        ("qffl+geomed", {}, "geomed does not defend 'loss'"),
        ("feddistill-plus+median", {}, r"median does not defend 'logits' .*; use \+krum or \+multi-krum"),
        ("fedavg+median+t1", {}, "t1 after median uses what clients send as it comes, undefended; put median last"),
        ("fedavg+krum+feddf", {"pool": 40, "proxy": "pool"}, "feddf after krum .*; put krum last"),
        ("fedavg+median+ccvr", {}, "ccvr after median .*; leave ccvr out"),
        ("fedavg+ccvr+median", {}, "median does not defend what ccvr collects after the last round; leave it out"),
        ("feddf+norm-clip", {"pool": 40, "proxy": "pool"}, "not what each of them teaches feddf; use"),
    ],
)
def test_what_cannot_work_is_refused(run_small: RunSmall, method: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(fedstill.SettingError, match=reason):
        run_small(method, **QUICK, **settings)
