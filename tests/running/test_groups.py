"""Clients with different networks: who gets which, the same bits everywhere, and one line where it cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstill
from fedstill.building.config import resolve
from fedstill.building.members import clients_of_groups
from fedstill.building.setup import prepare
from fedstill.core.errors import SettingError
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.policy import Policy
from fedstill.deployment.site import Site
from fedstill.running.result import Result
from fedstill.running.rollback import rollback
from support.quick import QUICK, TINY, needed
from support.runs import numbers, slow
from support.sites import NAMES, Wire, served

GROUPS = [
    {"name": "small", "model": "mlp", "model_options": {"hidden": [8]}},
    {"name": "deep", "model": "mlp", "model_options": {"hidden": [12, 8]}},
]
MIXED: dict[str, Any] = {k: v for k, v in TINY.items() if k not in ("model", "model_options")} | {"group": GROUPS}


def run_of(method: str) -> dict[str, Any]:
    return MIXED | {"rounds": 2} | QUICK.get(method, {}) | needed(method, pool=0.1)


# --- who gets which -------------------------------------------------------------------------------------------------


def dealt(clients: int = 6, **settings: Any) -> list[list[int]]:
    config = resolve({"method": "local"} | settings)
    return [part.tolist() for part in clients_of_groups(config, [f"site {k}" for k in range(clients)])]


def test_networks_are_dealt_in_turn_and_one_named_twice_goes_to_twice_as_many() -> None:
    assert dealt(models=["lenet5", "cnn"]) == [[0, 2, 4], [1, 3, 5]]
    assert dealt(models="lenet5,cnn,lenet5") == [[0, 2, 3, 5], [1, 4]]


def test_groups_name_their_clients_or_ask_for_a_number_or_a_share() -> None:
    named = dealt(group=[{"model": "cnn", "clients": ["site 4", 1]}, {"model": "lenet5"}])
    assert named == [[1, 4], [0, 2, 3, 5]]
    groups = [{"model": "cnn", "share": 0.25}, {"model": "mlp", "clients": 5}, {"model": "lenet5"}]
    parts = dealt(12, group=groups)
    assert [len(part) for part in parts] == [3, 5, 4]
    assert sorted(k for part in parts for k in part) == list(range(12))
    assert parts != dealt(12, seed=1, group=groups)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"models": ["cnn"] * 6 + ["mlp"]}, "group 'mlp' has none of the 6 clients"),
        ({"group": [{"model": "cnn", "clients": [7]}, {"model": "mlp"}]}, "clients are 0 to 5, and 7 is named"),
        ({"group": [{"model": "cnn", "clients": [1, 1]}, {"model": "mlp"}]}, "client 1 is named twice"),
        ({"group": [{"model": "cnn", "clients": 2}, {"model": "mlp", "clients": 3}]}, "there are 6 in all"),
        ({"group": [{"model": "cnn"}], "models": ["cnn"]}, "leave one out"),
        ({"group": [{"model": "cnn", "clients": 2, "share": 0.5}, {"model": "mlp"}]}, "leave one out"),
        ({"group": [{"model": "cnn", "clients": [-1]}]}, r"group\.0\.clients\.0 = -1: should be greater"),
        ({"models": ["cnn", "mlp"], "regions": 2}, "cannot be divided into regions"),
    ],
)
def test_what_cannot_be_dealt_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        dealt(**settings)


def test_shares_that_make_a_whole_are_rounded_to_all_clients() -> None:
    halves = [{"name": "a", "model": "cnn", "share": 0.5}, {"name": "b", "model": "mlp", "share": 0.5}]
    assert sorted(map(len, dealt(clients=5, group=halves))) == [2, 3]
    thirds = [
        {"name": name, "model": "cnn", "share": share} for name, share in zip("abc", (0.34, 0.33, 0.33), strict=True)
    ]
    assert list(map(len, dealt(clients=20, group=thirds))) == [7, 7, 6]


# --- what methods need ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            "fedavg+ccvr",
            r"ccvr needs one network for all clients, and there are 2; with any networks work local, ",
        ),
        ("fedproto", r"features of one size, and there are cnn with 84, mlp with 200; model_options.feature_size=84"),
        ("lg-fedavg", r"features and heads of one size, and there are cnn with 84, mlp with 200"),
    ],
)
def test_a_method_that_needs_more_in_common_says_what_would_work(method: str, words: str) -> None:
    settings = {k: v for k, v in TINY.items() if k not in ("model", "model_options")}
    with pytest.raises(SettingError, match=words):
        prepare(resolve(settings | {"method": method, "models": ["cnn", "mlp"]}))


def test_features_of_one_size_let_networks_share_prototypes_and_heads() -> None:
    settings = {k: v for k, v in TINY.items() if k not in ("model", "model_options")} | {"models": ["cnn", "mlp"]}
    setup = prepare(resolve(settings | {"method": "lg-fedavg", "model_options": {"feature_size": 12}}))
    assert [group.task.feature_dim for group in setup.groups] == [12, 12]
    assert {setup.method.wire(group.task).up["head"].shape for group in setup.groups} == {(12 * 10 + 10,)}


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    ["fedtgp", *map(slow, ("fedkd", "feddf", "lkd", "dafkd", "fedprox+t1", "lg-fedavg", "fedgkd", "fedkf"))],
)
def test_the_same_bits_after_a_kill_in_every_round(method: str, tmp_path: Path) -> None:
    across = {"across": True} if method in ("fedgkd", "fedkf") else {}
    settings = run_of(method.removesuffix("+t1")) | across
    whole = fedstill.run(method, **settings, out=tmp_path / "whole")
    fedstill.run(method, **settings | {"rounds": 1}, out=tmp_path / "cut")
    again = fedstill.resume(tmp_path / "cut", rounds=2)
    assert _all_without(again, "server") == _all_without(whole, "server")  # it has seconds
    assert {name: scores["clients"] for name, scores in whole.records[-1]["groups"].items()} == {"small": 3, "deep": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "own"),
    [("fedproto", {}), ("feddf", {}), ("dafkd", {}), ("fedgkd", {"across": True}), ("fedkf", {"across": True})],
)
def test_the_same_bits_with_workers(method: str, own: dict[str, Any]) -> None:
    settings = run_of(method) | own
    inline, workers = (fedstill.run(method, **settings | e) for e in ({}, {"engine": "process", "workers": 2}))
    assert numbers(inline) == numbers(workers)


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("fedavg", {"models": ["mlp", "mlp"]}),  # one group
        pytest.param("dafkd", {"models": ["mlp", "mlp"]} | QUICK["dafkd"], marks=pytest.mark.slow),
        ("fedgkd", {"models": ["mlp", "mlp"], "across": True}),
        pytest.param("fedkf", {"models": ["mlp", "mlp"], "across": True} | QUICK["fedkf"], marks=pytest.mark.slow),
        ("fedproto", {"group": [{"name": name, "model": "mlp"} for name in ("a", "b")]}),  # no weights cross
    ],
)
def test_where_all_networks_are_one_the_bits_are_those_of_the_homogeneous_run(method: str, own: dict[str, Any]) -> None:
    plain = _without(TINY, "model") | {"rounds": 2}
    hyper = _without(own, "models", "group", "across")
    alone, groups = fedstill.run(method, model="mlp", **plain, **hyper), fedstill.run(method, **plain, **own)
    assert _all_without(groups, "groups") == numbers(alone)


def test_every_clients_tests_are_those_of_its_groups_model(tmp_path: Path) -> None:
    result = fedstill.run("fedavg", **run_of("fedavg"), out=tmp_path / "run")
    setup = prepare(resolve({"method": "fedavg"} | run_of("fedavg")))
    x, y = setup.federation.test_split.x, setup.federation.test_split.y
    columns = result.client_columns
    for k, group in enumerate(columns["group"]):
        index = torch.from_numpy(setup.federation.test(k))
        model = fedstill.load(tmp_path / "run", which=group).module.network
        logits = model(setup.task.dataset.normalise(x[index]))
        assert columns["accuracy"][k] == pytest.approx(float((logits.argmax(1) == y[index]).double().mean()))
    tests = setup.federation.test_sizes
    pooled = np.average(columns["accuracy"][tests > 0], weights=tests[tests > 0])
    assert result.records[-1]["amp"] == pytest.approx(pooled)


def test_validation_is_of_each_groups_model_on_what_its_own_clients_and_the_server_hold_out(tmp_path: Path) -> None:
    settings = run_of("fedavg") | {"validation": 0.25, "pool": 0.1, "rounds": 1}
    result = fedstill.run("fedavg", **settings, out=tmp_path / "run")
    setup = prepare(resolve({"method": "fedavg"} | settings))
    held, train = setup.federation.validation, setup.federation.dataset.train
    assert held is not None
    record, local = result.records[-1], np.zeros(6)
    for group in setup.groups:
        network = fedstill.load(tmp_path / "run", which=group.name).module.network
        parts = [held.of(k) for k in group.clients] + [held.pool_index]
        samples = torch.from_numpy(np.concatenate(parts))
        with torch.no_grad():
            logits = network(setup.task.dataset.normalise(train.x[samples]))
        right = (logits.argmax(1) == train.y[samples]).double().numpy()
        own = np.split(right, np.cumsum([len(part) for part in parts])[:-1])[:-1]
        local[group.clients] = [each.mean() for each in own]
        scores = record["groups"][group.name]
        assert scores["val_accuracy"] == pytest.approx(right.mean())
        assert scores["val_loss"] == pytest.approx(
            float(nn.functional.cross_entropy(logits, train.y[samples])), rel=1e-5
        )
        assert scores["val_amp"] == pytest.approx(np.concatenate(own).mean())
        assert scores["val_wlp"] == pytest.approx(min(each.mean() for each in own))
    assert record["val_accuracy"] == pytest.approx(np.mean([g["val_accuracy"] for g in record["groups"].values()]))
    assert record["val_amp"] == pytest.approx(np.average(local, weights=held.sizes))
    assert record["val_wlp"] == pytest.approx(local.min())
    assert record["val_fm"] == pytest.approx(local.var())
    assert result.summary["groups"]["small"]["final_val_amp"] == record["groups"]["small"]["val_amp"]  # type: ignore[typeddict-item]


def test_where_clients_keep_their_own_models_validation_is_of_these_by_group() -> None:
    settings = run_of("local") | {"validation": 0.25, "rounds": 1, "participation": 1.0}
    record = fedstill.run("local", **settings).records[-1]
    by_group = [scores["val_amp"] for scores in record["groups"].values()]
    assert record["val_amp"] == pytest.approx(np.mean(by_group))  # three clients each
    assert record["val_wlp"] == min(scores["val_wlp"] for scores in record["groups"].values())


@pytest.mark.parametrize("method", ["fedgkd", slow("fedkf")])
def test_with_gamma_zero_groups_that_teach_each_other_are_fedavg_in_each(method: str) -> None:
    settings = run_of(method) | {"eval_every": 1} | ({"t1": False} if method == "fedkf" else {})
    zero = fedstill.run(method, **settings, across=True, gamma=0.0)
    plain = fedstill.run("fedavg", **run_of("fedavg") | {"eval_every": 1})
    assert _all_without(zero, "bytes_down") == _all_without(plain, "bytes_down")


@pytest.mark.slow
def test_feddf_without_steps_is_fedavg_in_each_group_and_with_some_each_learns() -> None:
    plain, taught = (fedstill.run("feddf", **run_of("feddf") | {"server_steps": steps}) for steps in (0, 2))
    averaged = fedstill.run("fedavg", **_without(run_of("feddf"), "server_steps"))
    assert numbers(plain) == numbers(averaged)
    for name, scores in taught.records[0]["groups"].items():
        assert scores["loss"] != plain.records[0]["groups"][name]["loss"]


def _all_without(result: Result, *names: str) -> list[dict[str, Any]]:
    return [_without(record, *names) for record in numbers(result)]


def _without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in names}


def test_networks_of_ones_own_and_a_clients_model_is_of_its_own_network(tmp_path: Path) -> None:
    nets = [nn.Sequential(nn.Flatten(), nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 10)) for width in (4, 5)]
    plain = _without(MIXED, "group") | {"rounds": 1, "participation": 1.0}
    fedstill.run("local", **plain, models=nets, out=tmp_path / "run")
    mine = fedstill.load(tmp_path / "run", client=1, model=nets[1])
    assert [p.shape[0] for p in mine.module.network.parameters()] == [5, 5, 10, 10]
    again = fedstill.resume(tmp_path / "run", rounds=2, models=nets)
    assert again.summary["rounds"] == 2


# --- the best round -------------------------------------------------------------------------------------------------

CHOSEN: dict[str, Any] = {"validation": 0.25, "select": "val_amp", "restore_best": True, "rounds": 3, "lr": 0.1}
MODELS = ("model.safetensors", "model-deep.safetensors")


class Interrupt(fedstill.Callback):
    """Interrupts a run before its third round."""

    def on_round_start(self, run: fedstill.RunView, round_: int, clients: int) -> None:
        if round_ == 3:
            raise KeyboardInterrupt


def contents(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in run.glob("*.safetensors")}


@pytest.mark.parametrize(
    ("method", "own"),
    [("fedavg", {}), slow("feddf", {}), slow("fedprox+t1", {"rounds": 4}), slow("fedgkd", {"across": True})],
)
def test_all_groups_models_are_those_of_the_one_round_that_is_best_over_all_groups(
    method: str, own: dict[str, Any], tmp_path: Path
) -> None:
    settings = run_of(method.removesuffix("+t1")) | CHOSEN | own
    result = fedstill.run(method, **settings, out=tmp_path / "run")
    values = [record["val_amp"] for record in result.records]
    best = 1 + values.index(max(values))
    assert best < len(values), "else nothing is restored"
    assert result.summary["restored_round"] == best
    record, selected = result.records[best - 1], result.summary["selected"]
    assert {
        "round": best,
        "by": "val_amp",
        "amp": record["amp"],
        "groups": record["groups"],
    }.items() <= selected.items()
    fedstill.run(method, **settings | {"rounds": best, "select": "", "restore_best": False}, out=tmp_path / "short")
    for name in (*MODELS, "clients.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "short" / name).read_bytes()
    for group in ("small", "deep"):
        kept = fedstill.load(tmp_path / f"run/best-{group}.safetensors").module.state_dict()
        ended = fedstill.load(tmp_path / "short", which=group).module.state_dict()
        assert kept.keys() == ended.keys()
        assert all(torch.equal(kept[name], ended[name]) for name in kept)


@pytest.mark.parametrize("engine", [{}, slow({"engine": "process", "workers": 2})])
def test_the_best_round_of_groups_is_the_same_after_a_kill_on_the_way_or_at_the_end(
    engine: dict[str, Any], tmp_path: Path
) -> None:
    settings = run_of("fedavg") | CHOSEN
    whole = fedstill.run("fedavg", **settings, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedstill.run("fedavg", **settings | engine, out=tmp_path / "cut", callbacks=[Interrupt()])
    again = fedstill.resume(tmp_path / "cut")
    assert (numbers(again), again.summary["selected"]) == (numbers(whole), whole.summary["selected"])
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    for name in ("summary.json", *MODELS):  # as if it was killed after the last round
        (tmp_path / "cut" / name).unlink()
    assert fedstill.resume(tmp_path / "cut").summary["restored_round"] == whole.summary["restored_round"]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_going_back_forgets_the_best_models_of_later_rounds(tmp_path: Path) -> None:
    settings = run_of("fedavg") | CHOSEN | {"keep_checkpoints": 4}
    best = fedstill.run("fedavg", **settings, out=tmp_path / "run").summary["selected"]["round"]
    before = contents(tmp_path / "run")
    rollback(tmp_path / "run", best - 1)
    assert contents(tmp_path / "run") == {}
    fedstill.resume(tmp_path / "run")
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("method", ["local", "fedtgp"])
def test_where_clients_keep_their_own_models_there_is_none_to_select(method: str) -> None:
    with pytest.raises(SettingError, match=f"^select: with {method} every client keeps a model of its own"):
        fedstill.run(method, **run_of(method) | CHOSEN)


def test_a_callback_restores_the_models_of_all_groups_or_none() -> None:
    class First(fedstill.Callback):
        def on_round_end(self, run: fedstill.RunView, record: Any) -> None:
            run.restore(record["round"], run.weights())

    with pytest.raises(SettingError, match="there is a model for each group"):
        fedstill.run("fedavg", **run_of("fedavg"), callbacks=[First()])


def test_groups_whose_models_would_be_one_file_are_refused() -> None:
    groups = [own | {"name": name} for own, name in zip(GROUPS, ("site a", "Site-A"), strict=True)]
    with pytest.raises(SettingError, match=r"'site a' and 'Site-A' would be one file, model-site-a\.safetensors"):
        fedstill.run("fedavg", **run_of("fedavg") | {"group": groups})


def test_a_round_that_a_callback_makes_the_last_has_numbers_by_group_too() -> None:
    settings = run_of("fedavg") | {"rounds": 5, "eval_every": 2}
    result = fedstill.run("fedavg", **settings, callbacks=[fedstill.Budget(bytes=1)])
    assert len(result.records) == 1
    assert result.summary["groups"].keys() == {"small", "deep"}


@pytest.mark.slow
def test_regions_with_networks_of_their_own_select_the_models_of_one_episode(tmp_path: Path) -> None:
    regions = [{"name": group["name"], "model": "mlp", "model_options": group["model_options"]} for group in GROUPS]
    settings = _without(MIXED, "group") | CHOSEN | {"region": regions, "pool": 0.1, "rounds_per_episode": 2, "lr": 1.0}
    best = fedstill.run("f2l", **settings | {"rounds": 4}, out=tmp_path / "run").summary["restored_round"]
    assert best == 2
    fedstill.run("f2l", **settings | {"rounds": best, "select": "", "restore_best": False}, out=tmp_path / "short")
    for name in MODELS:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "short" / name).read_bytes()


# --- sites ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_site_trains_the_network_it_was_dealt_or_its_own_and_no_weights_leave_it(tmp_path: Path) -> None:
    wire = Wire(tmp_path)
    policy = Policy(allow=("fedproto",))
    own = {"south": LocalInputs(model="cnn")}
    wire.sites = {name: Site(tmp_path / name, own.get(name, LocalInputs()), policy) for name in NAMES}
    models, options = ["mlp", "mlp", "resnet8"], {"feature_size": 8}
    result = served(wire, tmp_path / "run", "fedproto", rounds=1, models=models, model_options=options, fraction=0.02)
    assert result.summary["dropped"] == 0
    networks = [fedstill.load(tmp_path / name).description.network for name in NAMES]
    assert networks == ["mlp", "cnn", "resnet8"]
    assert result.summary["bytes_up"] == 3 * 4 * (10 * 8 + 10)
