"""Differential privacy of clients: what one client can move, the noise on it, and what is accounted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import fedstill
from fedstill.core.store import Store
from fedstill.methods import registry
from fedstill.methods.base import Method, Server, Uplink
from fedstill.methods.dp import DP
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.scaffold import SCAFFOLD
from fedstill.privacy.accounting import Plan, epsilon
from fedstill.privacy.noise import gaussian
from fedstill.running.cohorts import Cohorts
from support.byhand import Array, Uplinks, normed_net, tiny_server
from support.runs import SMALL, numbers, slow, weights
from support.wiretap import setup_of

pytest.importorskip("dp_accounting")

LITTLE = 1e-9  # noise that leaves the mean as it is
QUICK: dict[str, Any] = SMALL | {
    "model": "mlp",
    "model_options": {"hidden": [8]},
    "fraction": 0.05,
    "rounds": 4,
    "eval_every": 2,
    "noise_multiplier": 2.0,
    "delta": 1e-3,
}


@dataclass(frozen=True)
class Seeing(FedAvg):
    """Notes the messages that the server side gets."""

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        server.notes["seen"] = [(up.samples, up.message) for up in uplinks]


@dataclass(frozen=True)
class SeeingControl(SCAFFOLD):
    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        server.notes["seen"] = [(up.samples, up.message) for up in uplinks]


def aggregated(folder: Path, method: DP, clients: list[int], expected: int = 4, **parts: list[Any]) -> Server:
    """A server after a round in which these of seven clients answered."""
    server = tiny_server(folder, [9, 4, 30, 1, 12, 7, 20])
    server.drawn = 7, expected
    method.start(server)
    everyone = Uplinks(server, range(7), parts=parts)
    method.aggregate(server, (up for up in everyone if up.client in clients))
    return server


def seen(server: Server, name: str = "model") -> Array:
    """The noisy mean of the updates."""
    (samples, first), *others = server.notes["seen"]
    assert samples == 1
    assert all(torch.equal(first[name], other[name]) for _, other in others)
    mean: Array = first[name].numpy() - (server.model.numpy() if name == "model" else 0)
    return mean


# --- what one client can move -----------------------------------------------------------------------------------------


def test_updates_are_clipped_summed_and_divided_by_the_expected_number(tmp_path: Path) -> None:
    server = aggregated(tmp_path, DP(noise_multiplier=LITTLE, clip=2.0, inner=Seeing()), [0, 2, 5])
    ups = Uplinks(server, range(7))
    away = (ups.w - ups.w_t)[[0, 2, 5]]
    lengths = np.linalg.norm(away, axis=1, keepdims=True)
    assert (lengths > 2).any()
    np.testing.assert_allclose(seen(server), (away * np.minimum(1, 2 / lengths)).sum(0) / 4, atol=1e-8)
    assert len(server.notes["seen"]) == 4  # not the three that came


def test_all_parts_are_clipped_together_each_by_its_scale(tmp_path: Path) -> None:
    """The vector (update / 1, control / 5) has norm 3 at most."""
    control = [np.full(8, 10.0 * k) for k in range(7)]
    method = DP(noise_multiplier=LITTLE, clip=3.0, scales="c_change=5", inner=SeeingControl())
    server = aggregated(tmp_path, method, [1, 6], c_change=control)
    ups = Uplinks(server, range(7))
    moved = sum_c = 0.0
    for k in (1, 6):
        joint = np.concatenate([ups.w[k] - ups.w_t, control[k] / 5])
        factor = min(1, 3 / np.linalg.norm(joint))
        moved, sum_c = moved + factor * joint[:8], sum_c + factor * joint[8:] * 5
    np.testing.assert_allclose(seen(server), np.asarray(moved) / 4, atol=1e-7)
    np.testing.assert_allclose(seen(server, "c_change"), np.asarray(sum_c) / 4, atol=1e-7)


@pytest.mark.parametrize("left_out", range(7))
def test_no_client_moves_the_noisy_sum_by_more_than_the_clip(tmp_path: Path, left_out: int) -> None:
    """With the same noise, which the seed gives, the difference is what this client did."""
    method, everyone = DP(noise_multiplier=1.0, clip=1.5, inner=Seeing()), list(range(7))
    others = [k for k in everyone if k != left_out]
    with_it, without = (seen(aggregated(tmp_path / str(len(c)), method, c)) for c in (everyone, others))
    assert 0 < np.linalg.norm(4 * (with_it - without)) <= 1.5 + 1e-12


def test_the_noise_has_the_size_that_is_accounted_also_when_nobody_came(tmp_path: Path) -> None:
    """Nobody answered: what the server gets is the noise alone, of noise_multiplier x clip x scale / expected."""
    method = DP(noise_multiplier=3.0, clip=0.5, scales="c_change=10", inner=SeeingControl())
    drawn: dict[str, list[float]] = {"model": [], "c_change": []}
    for round_ in range(1, 60):
        server = tiny_server(tmp_path, [1] * 7)
        server.drawn, server.round = (7, 5), round_
        method.start(server)
        method.aggregate(server, iter(()))
        for name in drawn:
            drawn[name] += seen(server, name).tolist()
    for name, scale in (("model", 1), ("c_change", 10)):
        assert stats.kstest(drawn[name], stats.norm(0, 3.0 * 0.5 * scale / 5).cdf).pvalue > 0.01


def test_sample_counts_do_not_count(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Weighing(Seeing):
        def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
            super().aggregate(server, uplinks)
            server.notes["sizes"] = server.sizes.tolist()

    server = aggregated(tmp_path, DP(noise_multiplier=1.0, inner=Weighing()), [0, 2])
    assert server.notes["sizes"] == [1] * 7
    assert server.sizes.tolist() == [9, 4, 30, 1, 12, 7, 20]


# --- noise ------------------------------------------------------------------------------------------------------------


def test_secure_noise_is_normal_and_never_the_same() -> None:
    first, second = gaussian(4001, None), gaussian(4001, None)
    assert stats.kstest(first.numpy(), "norm").pvalue > 1e-6  # it is drawn anew every time the test is run
    assert abs(float(np.corrcoef(first.numpy(), second.numpy())[0, 1])) < 0.1


def test_a_simulation_repeats_its_noise_and_a_served_run_does_not(tmp_path: Path) -> None:
    def noise(folder: str, *, simulated: bool) -> Array:
        server = tiny_server(tmp_path / folder, [1] * 3)
        server.simulated = simulated
        method = DP(noise_multiplier=1.0, inner=Seeing())
        method.start(server)
        method.aggregate(server, iter(()))
        return seen(server)

    assert (noise("a", simulated=True) == noise("b", simulated=True)).all()
    assert (noise("c", simulated=False) != noise("d", simulated=False)).all()


# --- adaptive clipping ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0.5, 60.0])
def test_an_adaptive_clip_comes_to_the_quantile_from_either_side(tmp_path: Path, start: float) -> None:
    """Of 200 updates with lengths 0.05, 0.10 … 10, seven in ten are no longer than 7."""
    method = DP(noise_multiplier=LITTLE, clip=start, adaptive_clip=0.7, inner=Seeing())
    server = tiny_server(tmp_path, [1] * 200)
    method.start(server)
    model = server.model.clone()
    direction = torch.eye(len(model), dtype=model.dtype)[0]
    ups = [Uplink(k, 1, {"model": model + 0.05 * (k + 1) * direction}) for k in range(200)]
    for round_ in range(1, 60):
        server.round = round_
        method.aggregate(server, iter(ups))
    assert server.state["dp"]["clip"] == pytest.approx(7, rel=0.15)  # the count has its noise: 0.05


@pytest.mark.parametrize(("z", "expected"), [(1.0, 100), (4.0, 20)])
def test_the_noise_of_the_count_is_accounted(z: float, expected: int) -> None:
    """Two Gaussian mechanisms, of the updates and of counts that a client moves by a half, are one of noise z."""
    updates, count = DP(noise_multiplier=z, adaptive_clip=0.5)._split(expected)
    assert updates**-2 + (0.5 / count) ** 2 == pytest.approx(z**-2)


# --- which methods ----------------------------------------------------------------------------------------------------

REFUSED = {
    *("fedkf", "qffl", "fedmgda-plus", "fednova", "fedhkd", "feddistill", "fedavg+t1", "fedavg+ccvr", "fedavg+dp-sgd"),
    *("fedavg+compress", "fedavg+votes", "local", "fedproto", "fedtgp", "fml", "fedkd", "lg-fedavg"),
    *("feddf", "dafkd", "fedhyb", "fedgen", "fedftg", "fedbe", "creff", "lkd", "mtkd", "f2l"),
    *(f"fedavg+{name}" for name in registry.modifiers() if registry.find_part(name).rule),  # type: ignore[attr-defined]
}
COMPOSITIONS = [*registry.names(), *(f"fedavg+{name}" for name in registry.modifiers() if name != "dp")]


def tiny_task(name: str) -> Any:
    settings: dict[str, Any] = {"pool": 0.2, "proxy": "pool", "fraction": 0.05, "regions": 1, "image_size": 16}
    return setup_of(name.partition("+")[0], model="mlp", model_options={"hidden": [4]}, **settings).task


@pytest.mark.parametrize("later", ["compress", "median"])
def test_nothing_comes_between_the_noise_and_the_method(later: str) -> None:
    with pytest.raises(fedstill.SettingError, match="would use what clients send as it comes"):
        setup_of(f"fedavg+dp+{later}", model="mlp", hyper={"noise_multiplier": 1.0})


def test_without_noise_nothing_is_aggregated(tmp_path: Path) -> None:
    task = tiny_task("fedavg")
    server = Server(task, np.full(6, 1), Store(tmp_path))
    private = DP()
    private.start(server)
    with pytest.raises(fedstill.FedstillError, match="no noise"):
        private.aggregate(server, iter([]))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"class_weight": "balanced"}, "without noise"), ({"validation": 0.2, "select": "val_amp"}, "not private")],
)
def test_what_counts_clients_exactly_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(fedstill.SettingError, match=reason):
        setup_of("fedavg+dp", model="mlp", hyper={"noise_multiplier": 1.0}, **settings)


@pytest.mark.parametrize("name", sorted(set(COMPOSITIONS)))
def test_a_method_takes_sums_alone_or_is_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    """What it makes of the updates of four clients is what it makes of four times their mean."""
    task, method = tiny_task(name), registry.make(name)
    private = DP(noise_multiplier=1.0, inner=method)
    if name in REFUSED:
        with pytest.raises(fedstill.SettingError) as refused:
            private.check(task)
        assert str(refused.value).startswith("dp")
        assert "\n" not in str(refused.value)
        return
    private.check(task)
    rng = torch.Generator().manual_seed(1)
    known = torch.tensor([[1, 0, 1, 1, 0, 1, 1, 1, 0, 1], [1, 1, 0, 1, 1, 1, 0, 1, 0, 1]] * 2).float()
    ups = []
    for k in range(4):
        message = {p: torch.randn(part.shape, generator=rng).to(part.dtype) for p, part in method.wire(task).up.items()}
        if "known" in message:  # a client has no logits of a class that it does not have
            message |= {"known": known[k], "logits": message["logits"] * known[k].unsqueeze(1)}
        ups.append(Uplink(k, 1, message))
    mean = {p: torch.stack([up[p].double() for up in ups]).mean(0).to(ups[0][p].dtype) for p in ups[0].message}
    results = []
    for folder, given in (("single", ups), ("mean", [replace(up, message=dict(mean)) for up in ups])):
        server = Server(task, np.full(6, 1), Store(tmp_path / folder))
        server.round = 1
        method.start(server)
        method.aggregate(server, iter(given))
        results.append({"model": server.model} | {k: v for k, v in server.state.items() if torch.is_tensor(v)})
    for key, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("fedavg+dp", {"target_epsilon": 1e6}, "is met with less noise"),
        ("fedavg+t1+dp", {"noise_multiplier": 1.0}, "t1 keeps every client's latest model"),
        ("fedkf+dp", {"noise_multiplier": 1.0}, "set t1=false"),
        ("fedavg+dp+t1", {"noise_multiplier": 1.0}, "t1 after dp"),
        ("fedavg+dp+median", {"noise_multiplier": 1.0}, "median after dp"),
        ("feddf+dp", {"noise_multiplier": 1.0, "proxy": "pool", "pool": 0.2}, "feddf works with every client's own"),
        (
            "fedavg+dp",
            {"noise_multiplier": 1.0, "model": "resnet8", "model_options": {"norm": "batch"}},
            "BatchNorm's statistics",
        ),
        ("fedavg+dp", {"noise_multiplier": 0.3, "target_epsilon": 0.5}, "the first 1 of the rounds already spend"),
        ("fedavg+dp", {"noise_multiplier": 1.0, "scales": "logits=1"}, "clients do not send 'logits'"),
        ("fedavg+dp", {"noise_multiplier": 1.0, "scales": "model=-1"}, "'model=-1' is not a part and a number"),
    ],
)
def test_what_cannot_be_private_is_refused_before_the_run(name: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(fedstill.SettingError, match=reason):
        setup_of(name, **settings)


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_each_client_is_drawn_by_chance_on_its_own() -> None:
    setup = setup_of("fedavg+dp", noise_multiplier=1.0, clients=40, participation=0.25)
    cohorts = Cohorts(setup.hierarchy, setup.federation.sizes, 0)
    able = np.flatnonzero(setup.federation.sizes)
    drawn = np.zeros((400, 40))
    for round_ in range(400):
        ((_, cohort),) = cohorts.draw(round_ + 1, set())
        drawn[round_, cohort] = 1
    assert cohorts.drawn == {0: (len(able), 10)}
    share = 10 / len(able)
    assert stats.binomtest(int(drawn.sum()), 400 * len(able), share).pvalue > 0.001
    assert drawn.sum(1).var() == pytest.approx(len(able) * share * (1 - share), rel=0.25)  # a fixed number has none


@pytest.mark.parametrize("sampling", ["poisson", slow("fixed")])
def test_every_record_has_the_epsilon_of_its_rounds(sampling: Any) -> None:
    result = fedstill.run("fedavg+dp", **QUICK | {"sampling": sampling, "rounds": 2})
    expected = [epsilon(Plan(6, 3, n, sampling), 2.0, 1e-3) for n in (1, 2)]
    assert [record["epsilon"] for record in result.records] == pytest.approx(expected)
    assert result.summary["epsilon"] == result.records[-1]["epsilon"]
    assert all(record["train_loss"] is None and record["local_accuracy"] is None for record in result.records)
    assert result.records[0]["privacy"]["not sent"] == ["train_loss", "local_accuracy"]


def test_the_noise_is_found_for_the_epsilon_that_was_asked_for() -> None:
    found = {"noise_multiplier": 0.0, "target_epsilon": 3.0, "participation": 1.0}
    result = fedstill.run("fedgkd+dp", **QUICK | found)
    assert 2.95 < result.summary["epsilon"] <= 3.0


def test_a_budget_ends_the_run_before_it_is_spent_also_after_a_resume(tmp_path: Path) -> None:
    two_rounds = epsilon(Plan(6, 3, 2, "poisson"), 2.0, 1e-3)
    budget = QUICK | {"target_epsilon": two_rounds + 1e-6}
    result = fedstill.run("fedavg+dp", out=tmp_path / "run", **budget)
    assert result.summary["stopped_by"] == "privacy budget"
    assert [record["epsilon"] for record in result.records][-1] == pytest.approx(two_rounds)
    assert len(result.records) == 2
    again = fedstill.resume(tmp_path / "run")
    assert len(again.records) == 2


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on_with_its_ledger_and_its_noise(tmp_path: Path) -> None:
    class Interrupt(fedstill.Callback):
        def on_round_start(self, run: Any, round_: int, clients: int) -> None:
            if round_ == 3:
                raise KeyboardInterrupt

    settings = QUICK | {"adaptive_clip": 0.5}
    whole = fedstill.run("scaffold+dp", **settings)
    with pytest.raises(KeyboardInterrupt):
        fedstill.run("scaffold+dp", out=tmp_path / "run", callbacks=[Interrupt()], **settings)
    resumed = fedstill.resume(tmp_path / "run")
    assert numbers(resumed) == numbers(whole)
    assert torch.equal(weights(resumed), weights(whole))
    assert whole.records[-1]["privacy"]["clip"] != whole.records[0]["privacy"]["clip"]


def test_regions_that_are_private_inside_may_teach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """LKD gets the regions' models alone, so that it adds nothing to what each region has spent."""
    from fedstill.methods.lkd import LKD

    teachers: list[int] = []
    original = LKD.merge

    def merge(self: LKD, server: Server, models: Any) -> None:
        teachers.append(len(models))
        original(self, server, models)

    monkeypatch.setattr(LKD, "merge", merge)
    more = {"regions": 2, "pool": 0.2, "server_epochs": 1, "participation": 1.0, "rounds_per_episode": 2}
    result = fedstill.run("fedavg+dp+lkd", **QUICK | more)
    assert teachers == [2, 2]
    assert result.summary["epsilon"] == pytest.approx(epsilon(Plan(3, 3, 4), 2.0, 1e-3))
    with pytest.raises(fedstill.SettingError, match="lkd after dp"):
        setup_of("fedavg+dp+lkd", noise_multiplier=1.0, pool=0.2)


def test_one_region_without_privacy_is_refused() -> None:
    regions = [{"method": "fedavg"}, {}]
    with pytest.raises(fedstill.SettingError, match="region 1: its method has no dp"):
        setup_of("fedavg+dp", noise_multiplier=1.0, region=regions)


def test_batchnorms_statistics_stay_as_they_were_sent(tmp_path: Path) -> None:
    server = tiny_server(tmp_path, [4] * 3, net=normed_net())
    method: Method = DP(noise_multiplier=1.0)
    method.start(server)
    before, trained = server.model.clone(), server.task.trainable
    method.aggregate(server, iter(Uplinks(server, range(3))))
    torch.testing.assert_close(server.model[trained:], before[trained:], rtol=1e-14, atol=0)
    assert not torch.isclose(server.model[:trained], before[:trained]).any()
    assert math.isfinite(float(server.model.sum()))
