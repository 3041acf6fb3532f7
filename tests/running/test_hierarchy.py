"""Regions: what they are alone, together, joining, leaving, and after a kill."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedstill
from fedstill.building.config import fixed, resolve
from fedstill.building.setup import prepare
from fedstill.building.topology import Hierarchy
from fedstill.distill.split import Split
from fedstill.methods import registry
from fedstill.methods.base import Server, Uplink
from fedstill.methods.lkd import LKD
from fedstill.metrics.records import RoundRecord, value_of
from fedstill.running.callbacks import Callback, RunView
from fedstill.running.loop import refuse_changes
from fedstill.running.result import Result
from fedstill.studies.reteach import SavedEpisode
from fedstill.train.evaluate import Outputs
from support.commandline import fedstill as command
from support.runs import SMALL, RunSmall, numbers, slow, weights

NINE: dict[str, Any] = {"clients": 9, "rounds": 4, "rounds_per_episode": 2}
POOL: dict[str, Any] = {"pool": 0.2, "server_epochs": 1}


def untimed(result: Result) -> list[dict[str, Any]]:
    """The records without what depends on the clock, inside an episode's too."""
    found = numbers(result)
    for record in found:
        record.get("episode", {}).pop("server_seconds", None)
        record.get("server", {}).pop("server_seconds", None)
    return found


def arranged(**settings: Any) -> Hierarchy:
    return prepare(resolve({**SMALL, **NINE, **settings})).hierarchy


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedprox+t1", "scaffold", "fedkf"])
def test_one_region_that_is_averaged_is_its_flat_run_bit_for_bit(run_small: RunSmall, method: str) -> None:
    own = {"width": 2, "z_dim": 3} if method == "fedkf" else {}
    flat = run_small(method, **NINE, **own)
    alone = run_small(method, **NINE, **own, region=[{}])
    if "t1" not in method and method != "fedkf":  # there, what the region's clients go on with is its mean of all
        assert torch.equal(weights(flat), weights(alone))
    one_round = (
        run_small(method, clients=9, rounds=1, **own),
        run_small(method, clients=9, rounds=1, region=[{}], **own),
    )
    assert torch.equal(weights(one_round[0]), weights(one_round[1]))
    kept = ("accuracy", "loss", "amp", "bytes_up", "bytes_down", "train_loss")
    assert [value_of(one_round[0].records[0], k) for k in kept] == [value_of(one_round[1].records[0], k) for k in kept]


def test_regions_are_averaged_uniformly(run_small: RunSmall) -> None:
    """Three regions of one episode: the mean of three flat runs over their clients alone."""
    settings = {"clients": 9, "rounds": 2, "rounds_per_episode": 2, "participation": 1.0}
    together = run_small("fedavg", **settings, regions=3)
    hierarchy = prepare(resolve({**SMALL, **settings, "regions": 3})).hierarchy
    alone = []
    for region in hierarchy.regions:
        others = [k for k in range(9) if k not in region.clients]
        split = [
            {"name": "here", "clients": sorted(region.clients.tolist())},
            {"name": "elsewhere", "clients": others, "joins": 3},
        ]
        alone.append(weights(run_small("fedavg", **settings, region=split)).double())
    torch.testing.assert_close(weights(together).double(), torch.stack(alone).mean(0), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["f2l", "lkd", "mtkd", "fedavg", "fedprox+f2l"])
def test_the_same_bits_for_any_number_of_workers(run_small: RunSmall, method: str) -> None:
    own = POOL if method != "fedavg" else {}
    first = run_small(method, **NINE, **own, regions=3)
    for workers in (1, 2):
        other = run_small(method, **NINE, **own, regions=3, engine="process", workers=workers)
        assert torch.equal(weights(first), weights(other))
        assert untimed(first) == untimed(other)


class Stop(Exception):
    pass


class StopAfter(Callback):
    def __init__(self, round_: int) -> None:
        self.round = round_

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        if record["round"] == self.round:
            raise Stop


@pytest.mark.slow
@pytest.mark.parametrize("method", ["f2l", "scaffold", "f2l+t1"])
@pytest.mark.parametrize("stopped", [1, 2, 3])
def test_a_run_stopped_in_the_middle_of_an_episode_goes_on_to_the_same_bits(
    run_small: RunSmall, tmp_path: Path, method: str, stopped: int
) -> None:
    own = POOL if "f2l" in method else {}
    settings = NINE | own | {"regions": 3, "participation": 1.0}
    whole = run_small(method, **settings)
    with pytest.raises(fedstill.CallbackError):
        run_small(method, **settings, out=tmp_path / "run", callbacks=[StopAfter(stopped)])
    resumed = fedstill.resume(tmp_path / "run")
    assert torch.equal(weights(whole), weights(resumed))
    assert untimed(whole) == untimed(resumed)


@pytest.mark.slow
def test_a_region_that_joins_changes_nothing_before_and_something_after(run_small: RunSmall) -> None:
    def joining(round_: int) -> Result:
        regions = [{"name": "a"}, {"name": "b"}, {"name": "new", "joins": round_}]
        return run_small("f2l", **NINE | {"rounds": 6}, **POOL, region=regions)

    never, third, fourth = joining(7), joining(3), joining(4)
    assert untimed(third)[:2] == untimed(never)[:2]
    assert untimed(fourth)[:3] == untimed(never)[:3], "also in the middle of an episode"
    assert untimed(third)[2] != untimed(never)[2]
    assert never.records[5]["episode"]["regions"] == ["a", "b"]
    assert third.records[3]["episode"]["regions"] == ["a", "b", "new"]


def test_a_region_that_leaves_is_neither_asked_nor_merged(run_small: RunSmall) -> None:
    regions = [{"name": "a"}, {"name": "b", "leaves": 4}]
    result = run_small("fedavg", **NINE, region=regions, participation=1.0)
    sizes = [len(r.clients) for r in arranged(region=regions).regions]
    assert [r["clients"] for r in result.records] == [9, 9, 9, sizes[0]]
    assert result.records[1]["episode"]["regions"] == ["a", "b"]
    assert result.records[3]["episode"]["regions"] == ["a"]
    assert result.records[3]["episode"]["bytes"] == result.records[1]["episode"]["bytes"] / 2


@pytest.mark.slow
def test_clients_that_come_late_change_nothing_before(run_small: RunSmall) -> None:
    settings = {"clients": 9, "rounds": 3, "participation": 1.0}
    late, never = (run_small("fedavg", **settings, late_clients=4, late_from=r) for r in (3, 9))
    assert [r["clients"] for r in late.records] == [5, 5, 9]
    assert untimed(late)[:2] == untimed(never)[:2]
    assert untimed(late)[2] != untimed(never)[2]
    in_regions = run_small("fedavg", **NINE, regions=3, participation=1.0, late_clients=3, late_from=3)
    assert [r["clients"] for r in in_regions.records] == [6, 6, 9, 9]


def test_clients_stay_in_their_region_or_are_dealt_anew() -> None:
    fixed, dealt = arranged(regions=3), arranged(regions=3, fixed_regions=False)

    def members(hierarchy: Hierarchy, round_: int) -> list[list[int]]:
        return [sorted(clients.tolist()) for _, clients in hierarchy.present(round_)]

    assert members(fixed, 1) == members(fixed, 4)
    assert members(dealt, 1) == members(dealt, 2), "an episode is two rounds"
    assert members(dealt, 2) != members(dealt, 3)
    for round_ in range(1, 5):
        assert sorted(k for region in members(dealt, round_) for k in region) == list(range(9))
        assert [len(region) for region in members(dealt, round_)] == [3, 3, 3]


@pytest.mark.slow
def test_each_region_may_have_a_method_and_training_of_its_own(run_small: RunSmall) -> None:
    regions: list[dict[str, Any]] = [
        {"name": "north", "clients": [0, 1, 2]},
        {"name": "south", "clients": [3, 4, 5], "method": "fedprox", "mu": 0.5, "lr": 0.01, "participation": 1.0},
        {"name": "west", "clients": [6, 7, 8], "method": "scaffold", "epochs": 2},
    ]
    hierarchy = arranged(method="fedgkd+f2l", pool=0.2, gamma=0.3, region=regions)
    north, south, west = hierarchy.regions
    assert (north.method.name, south.method.name, west.method.name) == ("fedgkd", "fedprox", "scaffold")
    assert south.method == registry.make("fedprox", {"mu": 0.5})
    assert (north.task.local.lr, south.task.local.lr, west.task.local.epochs) == (0.05, 0.01, 2)
    assert north.task.nets is south.task.nets, "networks are shared"
    assert south.participation == 1.0
    np.testing.assert_array_equal(west.clients, [6, 7, 8])
    result = run_small("fedgkd+f2l", **NINE, **POOL, gamma=0.3, region=regions)
    same = [{k: v for k, v in r.items() if k in ("name", "clients")} for r in regions]
    assert not torch.equal(weights(result), weights(run_small("fedgkd+f2l", **NINE, **POOL, gamma=0.3, region=same)))


def test_a_regions_settings_alone_change_the_runs_method() -> None:
    regions = [{"mu": 0.5}, {}]
    first, second = arranged(method="fedprox+f2l", pool=0.2, mu=0.1, region=regions).regions
    assert first.method == registry.make("fedprox", {"mu": 0.5})
    assert second.method == registry.make("fedprox", {"mu": 0.1})


def test_an_episode_tells_what_it_came_to(run_small: RunSmall) -> None:
    result = run_small("f2l", **NINE, **POOL, regions=3)
    assert [r["evaluated"] for r in result.records] == [False, True, False, True]
    episode = result.records[1]["episode"]
    test = len(fedstill.load_dataset("fashion-mini").test.y)
    for teacher in episode["teachers"].values():
        matrix = np.array(teacher["confusion"])
        assert matrix.sum() == test
        assert matrix.trace() / test == pytest.approx(teacher["accuracy"])
    assert np.array(episode["student"]["confusion"]).trace() / test == pytest.approx(result.records[1]["accuracy"])
    assert np.array(episode["reliability"]).shape == (3, 10)
    assert set(result.records[2]["teachers_after"]) == set(episode["regions"])
    assert episode["server_seconds"] > 0
    assert episode["bytes"] == 2 * 3 * 4 * result.summary["parameters"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rounds": 5}, "whole number of episodes"),
        ({"regions": 10}, "regions=10"),
        ({"regions": 2, "region": [{}]}, "there are 1"),
        ({"region": [{"clients": [0, 1]}, {"clients": [1, 2]}]}, "exactly once"),
        ({"region": [{"clients": 4}, {"clients": 4}]}, "there are 9 in all"),
        ({"region": [{"clients": [0]}, {}]}, "either all"),
        ({"region": [{"name": "a"}, {"name": "a"}]}, "a name of its own"),
        ({"region": [{"joins": 2}, {"joins": 3}]}, "round 1"),
        ({"region": [{"leaves": 3}]}, "no region is there in round 3"),
        ({"region": [{"method": "nothing"}]}, "nothing"),
        ({"region": [{"mu": 1}]}, "mu"),
        ({"region": [{"lr": -1}]}, "lr"),
        ({"region": "north"}, "list of tables"),
        ({"region": [{"method": "moon"}, {}]}, "changes the network"),
        ({"region": [{"method": "feddistill"}, {}]}, "no global model"),
        ({"fixed_regions": False, "region": [{"method": "fedprox"}, {}]}, "one method in all"),
        ({"fixed_regions": False, "method": "fedavg+t1"}, "one method in all"),
        ({"method": "f2l"}, "labelled samples"),
        ({"region": [{"method": "lkd"}, {}]}, "region 1: its method needs labelled samples"),
        ({"region": [{"joins": 3, "leaves": 2}, {}]}, "leaves in round 2"),
        ({"region": [{"clients": -1}, {"clients": 10}]}, "clients"),
        ({"region": [{"hyper": 3}, {}]}, "table of settings"),
        ({"fixed_regions": False, "clients": 6, "late_clients": 5, "late_from": 4}, "none of the clients"),
        ({"late_clients": 9, "late_from": 2}, "must be there at once"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_round(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(fedstill.SettingError, match=reason):
        arranged(**{"regions": len(settings.get("region", "xyz")), "method": "fedavg"} | settings)


@pytest.mark.slow
def test_saved_teachers_can_be_used_again(run_small: RunSmall, tmp_path: Path) -> None:
    """The run's own settings give the run's own student; others give others, without training a client."""
    run_small("lkd", **NINE, **POOL, regions=3, save_teachers=True, out=tmp_path / "run")
    result = fedstill.resume(tmp_path / "run")
    for number, round_ in ((1, 2), (2, 4)):
        saved = SavedEpisode(tmp_path / "run", number)
        same, other = saved.teach([{}, {"lambda3": 0.9, "server_epochs": 3}])
        assert same.accuracy == result.records[round_ - 1]["accuracy"]
        assert other.accuracy != same.accuracy
        before = result.records[round_ - 1]["episode"]["teachers"]
        for name, model in saved.teachers.items():
            assert saved.accuracy(model) == pytest.approx(before[name]["accuracy"])
    shown = command("reteach", str(tmp_path / "run"), "--sweep", "lambda3=0,0.5", "--set", "update=false")
    assert shown.code == 0, shown.err
    assert "lambda3=0.5" in shown.out
    assert command("reteach", str(tmp_path / "run"), "--set", "rounds=3").code == 2
    assert command("reteach", str(tmp_path / "run"), "--sweep", "lambda4=3").code == 2


def test_with_episodes_of_one_round_the_regions_are_seen_before_they_meet_again(run_small: RunSmall) -> None:
    result = run_small("f2l", **NINE | {"rounds_per_episode": 1, "rounds": 3}, **POOL, regions=3)
    for record in result.records[1:]:
        met = {name: teacher["accuracy"] for name, teacher in record["episode"]["teachers"].items()}
        assert record["teachers_after"] == met
    assert len(set(result.records[1]["teachers_after"].values())) > 1


def test_a_refused_resume_leaves_a_run_that_can_go_on(run_small: RunSmall, tmp_path: Path) -> None:
    run_small("fedavg", **NINE, regions=3, out=tmp_path / "run")
    with pytest.raises(fedstill.SettingError, match="whole number of episodes"):
        fedstill.resume(tmp_path / "run", rounds=5)
    assert fedstill.resume(tmp_path / "run", rounds=6).summary["rounds"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedkf+f2l", "fedavg+t1+f2l", "fedavg+t1+ccvr", "fedavg+f2l+ccvr"])
def test_what_averages_all_clients_of_a_region_can_be_merged(run_small: RunSmall, method: str) -> None:
    hyper = {"width": 2, "z_dim": 3} if "fedkf" in method else {}
    result = run_small(method, **NINE, **hyper, **(POOL if "f2l" in method else {}), regions=3)
    assert result.summary["dropped"] == 0
    assert result.summary["bytes_regions"] == 2 * 2 * 3 * 4 * result.summary["parameters"]


def test_the_server_may_hold_samples_of_its_own_beside_given_clients() -> None:
    x, y = np.random.default_rng(0).random((60, 8), np.float32), np.arange(60) % 3
    clients = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 48, 8)]
    federation = fedstill.from_clients(clients, test=(x, y), pool=(x[48:], y[48:]))
    assert federation.clients == 6
    np.testing.assert_array_equal(federation.dataset.train.x[federation.pool_index], x[48:])
    assert not set(federation.pool_index) & set(federation.train_index)
    net = torch.nn.Linear(8, 3)
    small: dict[str, Any] = {"model": net, "rounds": 1, "rounds_per_episode": 1, "engine": "inline", "server_epochs": 1}
    assert fedstill.run("f2l", data=federation, **small).records[0]["episode"]["stage"] in ("lkd", "average")
    double = torch.nn.Sequential(torch.nn.Linear(8, 3)).double()
    assert weights(fedstill.run("lkd", data=federation, **small | {"model": AsDouble(double)})).dtype == torch.float64


class AsDouble(torch.nn.Module):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        said: torch.Tensor = self.net(x.double())
        return said


NETWORKS: list[dict[str, Any]] = [
    {"name": "north", "model": "mlp", "model_options": {"hidden": [8]}, "clients": [0, 1, 4]},
    {"name": "south", "model": "cnn", "clients": [2, 3, 5]},
]
APART: dict[str, Any] = {k: v for k, v in SMALL.items() if k != "model"} | POOL | {"rounds": 4, "rounds_per_episode": 2}


@pytest.mark.parametrize("method", ["f2l", slow("lkd"), slow("fedavg")])
def test_regions_that_name_the_same_network_are_merged_as_if_it_were_the_runs(method: str, run_small: RunSmall) -> None:
    own = {} if method == "fedavg" else POOL
    plain = [{"name": "north"}, {"name": "south"}]
    common = run_small(method, **NINE, **own, region=plain)
    named = run_small(method, **NINE, **own, region=[region | {"model": "cnn"} for region in plain])
    assert torch.equal(weights(named), weights(common))
    for one, other in zip(untimed(named), untimed(common), strict=True):
        assert one.get("episode", {}).get("teachers") == other.get("episode", {}).get("teachers")
        assert one["bytes_up"] == other["bytes_up"]


def test_regions_with_different_networks_teach_one_student_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """All regions' models are the teachers, each through its own network; the old one is what the last episode gave."""
    merged: list[Sequence[Uplink]] = []
    taught: list[tuple[int, Tensor, Tensor]] = []
    merge, distil = LKD.merge_networks, LKD.distil_outputs

    def merging(self: LKD, servers: Sequence[Server], regions: Sequence[Uplink]) -> None:
        merged.append(regions)
        merge(self, servers, regions)

    def distilling(
        self: LKD, server: Server, old: Tensor, pool: Split, outputs: Sequence[Outputs], began: float
    ) -> None:
        x = pool.samples.x(torch.arange(len(pool.samples)))
        for up, found in zip(merged[-1], outputs, strict=True):
            assert up.task is not None
            net = up.task.build()
            net.load(up["model"])
            with torch.no_grad():
                torch.testing.assert_close(found.logits, net.module.eval()(x), rtol=1e-4, atol=1e-5)
        assert torch.equal(server.model, merged[-1][server.region]["model"])  # the mean of one
        distil(self, server, old, pool, outputs, began)
        taught.append((server.region, old, server.model))

    monkeypatch.setattr(LKD, "merge_networks", merging)
    monkeypatch.setattr(LKD, "distil_outputs", distilling)
    result = fedstill.run("f2l", **APART, region=NETWORKS, epsilon=0.0)
    assert [len(regions) for regions in merged] == [2, 2]
    assert [region for region, _, _ in taught] == [0, 1, 0, 1]
    for first, second in zip(taught[:2], taught[2:], strict=True):
        assert torch.equal(second[1], first[2])
    record = result.records[-1]
    assert set(record["groups"]) == set(record["episode"]["regions"]) == {"north", "south"}
    assert record["episode"]["stage"] == "lkd"
    assert record["episode"]["bytes"] == 2 * 4 * sum(len(up["model"]) for up in merged[-1])


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [2, 3])
def test_a_run_of_regions_with_different_networks_goes_on_to_the_same_bits(stopped: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = APART | {"region": [NETWORKS[0], NETWORKS[1] | {"joins": 3}], "epsilon": 0.0}
    whole = fedstill.run("f2l", **settings)
    with pytest.raises(fedstill.CallbackError):
        fedstill.run("f2l", **settings, out=tmp_path / "run", callbacks=[StopAfter(stopped)])
    again = fedstill.resume(tmp_path / "run")
    assert untimed(again) == untimed(whole)
    assert "south" not in whole.records[1]["episode"]["regions"]
    assert whole.records[1]["groups"]["south"]["loss"] != pytest.approx(np.log(10), abs=1e-3), "others have taught it"


@pytest.mark.slow
def test_regions_with_different_networks_give_the_same_bits_with_workers() -> None:
    settings: dict[str, Any] = APART | {"region": NETWORKS, "epsilon": 0.0}
    inline, workers = (fedstill.run("f2l", **settings | e) for e in ({}, {"engine": "process", "workers": 2}))
    assert untimed(inline) == untimed(workers)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fixed_regions": False}, "clients would change their network with the region"),
        ({"save_teachers": True}, "save_teachers keeps models of one network"),
        ({"save_models": 1}, "save_models keeps one model"),
        ({"models": ["mlp", "cnn"]}, "or give each"),
        ({"method": "fedproto"}, "needs features of one size|has no global model"),
        ({"method": "fedavg+ccvr"}, "needs one network for all clients"),
    ],
)
def test_what_cannot_work_with_networks_of_regions_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(fedstill.SettingError, match=words):
        prepare(resolve({"method": "f2l"} | _without_epochs(APART) | {"region": NETWORKS} | settings))


def _without_epochs(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "server_epochs"}


@pytest.mark.slow
def test_the_command_line_shows_episodes_and_confusion(tmp_path: Path) -> None:
    small = [f"--set={k}={v}" for k, v in (SMALL | NINE | POOL).items() if k not in ("clients", "rounds", "model")]
    out, picture = tmp_path / "run", tmp_path / "confusion.png"
    flags = ["--clients", "9", "--rounds", "4", "--regions", "3", "--model", "cnn", "--out", str(out)]
    ran = command("run", "f2l", *flags, *small)
    assert ran.code == 0, ran.err
    shown = command("episodes", str(out), "--classes", "--out", str(picture))
    assert shown.code == 0, shown.err
    assert "region 3" in shown.out
    assert "Sneaker" in shown.out
    assert picture.stat().st_size > 10_000
    flat = command("episodes", str(tmp_path))
    assert flat.code == 2


def test_a_run_of_before_there_were_these_settings_goes_on() -> None:
    now = fixed(resolve({"method": "fedgkd", "region": [{"name": "north"}, {"name": "south"}]}))
    region = now["region"].replace("'model': '', 'model_options': {}, ", "")
    before = now | {"hyper": now["hyper"].replace("'across': False, ", ""), "region": region}
    assert {name for name in now if before[name] != now[name]} == {"hyper", "region"}
    refuse_changes(before, now)
    other = fixed(resolve({"method": "fedgkd", "across": True, "region": [{"name": "north"}, {"name": "south"}]}))
    with pytest.raises(fedstill.SettingError, match="hyper was"):
        refuse_changes(before, other)
    elsewhere = fixed(resolve({"method": "fedgkd", "region": [{"name": "north", "model": "cnn"}, {"name": "south"}]}))
    with pytest.raises(fedstill.SettingError, match="region was"):
        refuse_changes(before, elsewhere)
