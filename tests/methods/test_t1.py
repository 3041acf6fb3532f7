"""T1: the mean of every client's latest model, kept incrementally, for any method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill
from fedstill.aggregate.latest import CacheInit, LatestMean
from fedstill.core import tree
from fedstill.core.store import Store
from fedstill.core.tree import Message
from fedstill.methods import registry
from fedstill.methods.base import Uplink
from fedstill.methods.t1 import T1
from fedstill.metrics.records import RoundRecord, value_of
from fedstill.running.callbacks import Callback, RunView
from fedstill.running.directory import RunDirectory
from fedstill.running.result import Result
from support.byhand import Array, tiny_server
from support.recorder import Round, record_rounds
from support.runs import SMALL, RunSmall, numbers, weights

QUICK: dict[str, Any] = {"model": "mlp", "model_options": {"hidden": [8]}, "fraction": 0.1, "rounds": 4}
OWN: dict[str, dict[str, Any]] = {
    "fedgkd-vote": {"pool": 0.1, "buffer": 2},
    "fedkf": {"width": 2, "z_dim": 3, "t1": False},  # FedKF-, which leaves T1 to the modifier
}
MODES: list[CacheInit] = ["seen", "w0"]
COMPOSED = [
    *("fedavg", "fedprox", "fedgkd", "fedgkd-vote", "fedgkd-plus", "fedkf", "moon", "feddistill-plus"),
    *("qffl", "fedmgda-plus", "scaffold", "fednova", "feddyn"),
]


def direct_mean(latest: dict[int, Array], sizes: Array, w0: Array | None) -> Array:
    """sum_k n_k w_k / sum_k n_k over all cached models; with w0, of every client."""
    clients = range(len(sizes)) if w0 is not None else sorted(latest)
    models = np.array([latest[k] if k in latest or w0 is None else w0 for k in clients])
    n = np.array([sizes[k] for k in clients], float)
    mean: Array = n @ models / n.sum()
    return mean


@pytest.mark.parametrize("mode", MODES)
def test_after_50_random_rounds_the_mean_is_that_of_all_cached_models(tmp_path: Path, mode: CacheInit) -> None:
    rng, clients, size = np.random.default_rng(0), 20, 1000
    sizes = rng.integers(1, 3000, clients)
    w0 = rng.normal(size=size).astype(np.float32)
    store = Store(tmp_path)
    state = LatestMean.start(store, torch.from_numpy(w0), sizes, mode).state()
    latest: dict[int, Array] = {}
    for round_ in range(1, 51):
        kept = LatestMean.restore(store, tree.decode(tree.encode(state)))  # as a checkpoint does
        for k in rng.choice(clients - 3, rng.integers(1, 6), replace=False):  # three are never active
            model = (rng.normal(size=size) * 10 ** rng.uniform(-3, 1)).astype(np.float32)
            kept.replace(int(k), round_, torch.from_numpy(model), int(sizes[k]))
            latest[int(k)] = model.astype(np.float64)
        state = kept.state()
        expected = direct_mean(latest, sizes.astype(np.float64), w0.astype(np.float64) if mode == "w0" else None)
        np.testing.assert_allclose(kept.mean(torch.from_numpy(w0).double()).numpy(), expected, rtol=0, atol=1e-13)
    assert len(latest) == clients - 3


@pytest.mark.parametrize("mode", MODES)
def test_clients_that_come_later_count_from_then_on(tmp_path: Path, mode: CacheInit) -> None:
    """Sites may join a run that has begun."""
    w0, models = torch.full((3,), 5.0, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    kept = LatestMean.start(Store(tmp_path), w0, np.array([10, 0, 0]), mode)
    joined = np.array([10, 30, 20])
    assert list(kept.updated(iter([Uplink(1, 30, {"model": models[1]})]), 1, joined))
    expected = models[1] if mode == "seen" else (30 * models[1] + 30 * w0) / 60
    torch.testing.assert_close(kept.mean(w0), expected)
    assert list(kept.updated(iter(Uplink(k, 10, {"model": models[k]}) for k in (0, 2)), 2, joined))
    torch.testing.assert_close(kept.mean(w0), (10 * models[0] + 30 * models[1] + 20 * models[2]) / 60)


def test_of_clients_of_whom_none_counts_the_mean_is_the_model_there_is(tmp_path: Path) -> None:
    for mode in MODES:
        kept = LatestMean.start(Store(tmp_path), torch.zeros(2), np.array([0, 0]), mode)
        assert kept.mean(torch.ones(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("mode", MODES)
def test_t1_hands_every_uplink_on_and_evaluates_the_mean(tmp_path: Path, mode: CacheInit) -> None:
    sizes = [5, 50, 1, 9, 30]
    server, plain = tiny_server(tmp_path / "a", sizes), tiny_server(tmp_path / "b", sizes)
    method, rng = T1(inner=fedstill.FedAvg(), cache_init=mode), np.random.default_rng(0)
    w0 = server.model.numpy().copy()
    method.start(server)
    latest: dict[int, Array] = {}
    for round_ in range(1, 51):
        server.round = plain.round = round_
        active = rng.choice(4, 2, replace=False).tolist()  # client 4 is never active
        models = {k: rng.normal(size=8) for k in active}
        ups = [Uplink(k, sizes[k], {"model": torch.from_numpy(w)}) for k, w in models.items()]
        method.aggregate(server, iter(ups))
        fedstill.FedAvg().aggregate(plain, iter(ups))
        latest |= models
        evaluated = method.models(server)
        assert list(evaluated) == ["with T1", "without T1"]
        assert torch.equal(evaluated["without T1"], plain.model)
        assert torch.equal(method.downlink(server)["model"], plain.model), "the mean of all is never sent"
        expected = direct_mean(latest, np.array(sizes, float), w0 if mode == "w0" else None)
        np.testing.assert_allclose(evaluated["with T1"], expected, rtol=0, atol=1e-14)


def composed(name: str) -> dict[str, Any]:
    return QUICK | OWN.get(name, {})


@pytest.mark.parametrize("name", COMPOSED)
def test_x_with_t1_is_the_same_run_as_x_and_reports_both_rows(run_small: RunSmall, name: str) -> None:
    settings = composed(name) | {"rounds": 3}
    plain, with_t1 = run_small(name, **settings), run_small(f"{name}+t1", **settings)
    quality = ("accuracy", "loss", "amp", "fm", "wlp", "per_class", "metrics")
    for a, b in zip(numbers(plain), numbers(with_t1), strict=True):
        assert b["also"]["without T1"] == {key: a[key] for key in quality}
        others = (*quality, "also")
        assert {k: v for k, v in b.items() if k not in others} == {k: v for k, v in a.items() if k not in others}
    assert with_t1.records[-1]["loss"] != plain.records[-1]["loss"], "and the other row is another model's"
    row = with_t1.summary["also"]["without T1"]
    for key in quality[:-2]:
        for which in (f"best_{key}", f"final_{key}"):
            assert value_of(row, which) == value_of(plain.summary, which) is not None
    for key in ("bytes_down", "bytes_up", "parameters"):
        assert value_of(plain.summary, key) == value_of(with_t1.summary, key) is not None


def latest_models(crossings: list[Round]) -> dict[int, Array]:
    return {k: up["model"].double().numpy() for crossing in crossings for k, up in crossing.up.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedgkd", "scaffold", "moon", "feddyn"])
@pytest.mark.parametrize("mode", MODES)
def test_the_returned_model_is_the_mean_of_the_models_that_crossed_last(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch, name: str, mode: CacheInit
) -> None:
    crossings = record_rounds(monkeypatch)
    result = run_small(f"{name}+t1", cache_init=mode, seed=3, **composed(name))
    sizes = {k: n for crossing in crossings for k, n in crossing.samples.items()}
    federation = fedstill.federate(
        fedstill.load_dataset("fashion-mini", image_size=SMALL["image_size"]),
        clients=SMALL["clients"],
        alpha=SMALL["alpha"],
        fraction=QUICK["fraction"],
        seed=3,
    )
    assert all(federation.sizes[k] == n for k, n in sizes.items())
    w0 = crossings[0].down["model"].double().numpy() if mode == "w0" else None
    expected = direct_mean(latest_models(crossings), federation.sizes.astype(float), w0)
    np.testing.assert_allclose(weights(result), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_the_two_initialisations_differ_until_every_client_was_active(run_small: RunSmall) -> None:
    seen, w0 = (run_small("fedavg+t1", cache_init=mode, **(QUICK | {"rounds": 1})) for mode in MODES)
    assert not torch.allclose(weights(seen), weights(w0))
    everyone = QUICK | {"participation": 1.0, "rounds": 2}
    seen, w0 = (run_small("fedavg+t1", cache_init=mode, **everyone) for mode in MODES)
    torch.testing.assert_close(weights(seen), weights(w0), rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_full_participation_makes_oca_equal_aca(run_small: RunSmall) -> None:
    first, plain = (run_small(m, participation=1.0, **(QUICK | {"rounds": 1})) for m in ("fedavg+t1", "fedavg"))
    assert torch.equal(weights(first), weights(plain)), "bit for bit where nothing was replaced yet"
    result, plain = (run_small(m, participation=1.0, **QUICK) for m in ("fedavg+t1", "fedavg"))
    torch.testing.assert_close(weights(result), weights(plain), rtol=1e-6, atol=1e-8)
    for record in result.records:
        assert record["accuracy"] == record["also"]["without T1"]["accuracy"]
        assert record["loss"] == pytest.approx(record["also"]["without T1"]["loss"], rel=1e-6)


def test_a_client_never_seen_costs_nothing(run_small: RunSmall, tmp_path: Path) -> None:
    many = {"clients": 12, "participation": 0.1, "min_size": 1}
    for mode in MODES:
        out = tmp_path / mode
        run_small("fedavg+t1", out=out, cache_init=mode, **(QUICK | many))
        store = RunDirectory(out).server_store
        files = {int(path.name.split(".")[0]) for path in store.root.rglob("*.safetensors")}
        assert 1 <= len(files) <= 4, "at most one client for each of the four rounds"
        assert sum(store.read(k, before=10**9) is not None for k in range(12)) == len(files)


def test_what_a_checkpoint_holds_does_not_grow_with_the_clients(run_small: RunSmall, tmp_path: Path) -> None:
    sizes = []
    for clients in (4, 16):
        out = tmp_path / str(clients)
        run_small("fedavg+t1", out=out, clients=clients, participation=0.5, min_size=1, **(QUICK | {"rounds": 2}))
        sizes.append(max(path.stat().st_size for path in (out / "checkpoints").glob("round-*")))
    assert sizes[1] <= sizes[0] + 64


def test_a_round_reads_and_writes_one_file_for_each_active_client(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, list[int]] = {"read": [], "write": []}
    read, write = Store.read, Store.write

    def counted_read(self: Store, client: int, before: int) -> Any:
        calls["read"] += [before] * (self.root.name == "server")
        return read(self, client, before)

    def counted_write(self: Store, client: int, round_: int, state: Any) -> None:
        calls["write"] += [round_] * (self.root.name == "server")
        write(self, client, round_, state)

    monkeypatch.setattr(Store, "read", counted_read)
    monkeypatch.setattr(Store, "write", counted_write)
    run_small("fedavg+t1", **(QUICK | {"clients": 20, "participation": 0.15, "min_size": 1}))
    assert calls["read"] == calls["write"] == [round_ for round_ in (1, 2, 3, 4) for _ in range(3)]


def all_models(path: Path) -> dict[int, Any]:
    store = RunDirectory(path).server_store
    states = {k: store.read(k, before=10**9) for k in range(SMALL["clients"])}
    return {k: state for k, state in states.items() if state is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg+t1", "scaffold+t1"])
def test_resumed_after_every_round_and_in_processes_gives_the_same_bits(
    run_small: RunSmall, tmp_path: Path, name: str
) -> None:
    whole = run_small(name, out=tmp_path / "whole", **QUICK)
    broken = tmp_path / "broken"
    run_small(name, out=broken, engine="process", workers=2, **(QUICK | {"rounds": 1}))
    last: Result | None = None
    for rounds in (2, 3, 4):
        last = fedstill.resume(broken, rounds=rounds)
    assert last is not None
    assert torch.equal(weights(last), weights(whole))
    assert numbers(last) == numbers(whole)
    ours, theirs = all_models(broken), all_models(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    for k, state in theirs.items():
        assert torch.equal(ours[k]["model"], state["model"])
        assert ours[k]["samples"] == state["samples"]


class Impatient(Callback):
    """Stops a run after its third round, which has no checkpoint."""

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt


def test_stopped_between_checkpoints_the_older_models_are_found_again(run_small: RunSmall, tmp_path: Path) -> None:
    settings = QUICK | {"checkpoint_every": 2, "rounds": 5, "participation": 0.7}
    whole = run_small("feddyn+t1", **settings)
    with pytest.raises(KeyboardInterrupt):
        run_small("feddyn+t1", out=tmp_path / "run", callbacks=[Impatient()], **settings)
    resumed = fedstill.resume(tmp_path / "run")
    assert torch.equal(weights(resumed), weights(whole))
    assert numbers(resumed) == numbers(whole)


def test_a_run_keeps_the_mean_as_its_model(run_small: RunSmall, tmp_path: Path) -> None:
    result = run_small("fedavg+t1", out=tmp_path / "run", **QUICK)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    last = [r["accuracy"] for r in result.records]
    assert summary["final_accuracy"] == pytest.approx(np.mean(last)), "the headline is the row with T1"
    assert list(summary["also"]) == ["without T1"]


class SometimesBroken(fedstill.FedAvg):
    """From its second round on, one client's answers are not finite."""

    def uplink(self, client: fedstill.Client) -> Message:
        up = super().uplink(client)
        return {"model": up["model"] * torch.nan} if client.id == 2 and client.round > 1 else up


def test_a_client_whose_answer_is_dropped_keeps_its_older_model_in_the_mean(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossings = record_rounds(monkeypatch)
    result = run_small(T1(inner=SometimesBroken()), participation=1.0, **QUICK)
    assert [r["dropped"] for r in result.records] == [0, 1, 1, 1]
    latest: dict[int, Array] = {}
    sizes = np.zeros(SMALL["clients"])
    for crossing in crossings:
        for k, up in crossing.up.items():
            sizes[k] = crossing.samples[k]
            if torch.isfinite(up["model"]).all():
                latest[k] = up["model"].double().numpy()
    np.testing.assert_allclose(weights(result), direct_mean(latest, sizes, None), rtol=1e-5, atol=1e-7)


def test_t1_refuses_a_method_whose_clients_send_no_model(run_small: RunSmall) -> None:
    with pytest.raises(fedstill.SettingError, match=r"t1 averages the clients' models.*do not send any"):
        run_small("feddistill+t1", **QUICK)


def test_t1_joins_a_method_of_the_users_own(run_small: RunSmall, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from fedstill.methods.fedprox import FedProx\nclass Mine(FedProx): pass\n")
    mine, prox = run_small(f"{file}:Mine+t1", mu=0.5, **QUICK), run_small("fedprox+t1", mu=0.5, **QUICK)
    assert torch.equal(weights(mine), weights(prox))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["fedavg+feddf+t1"])
def test_clients_weigh_by_their_samples_in_t1_after_a_uniform_server_side(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch, name: str, mode: CacheInit
) -> None:
    """A server side that averages uniformly says so to its own average, and not to T1."""
    crossings = record_rounds(monkeypatch)
    server_side: dict[str, Any] = {"pool": 0.1, "proxy": "pool", "server_steps": 1, "uniform": True}
    result = run_small(name, cache_init=mode, participation=0.7, **(QUICK | server_side))
    sizes = {k: n for crossing in crossings for k, n in crossing.samples.items()}
    assert len(sizes) == SMALL["clients"], "all were active, so that both initialisations agree"
    n = np.array([sizes[k] for k in sorted(sizes)], float)
    np.testing.assert_allclose(weights(result), direct_mean(latest_models(crossings), n, None), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["fedkf+t1", "fedavg+t1+t1"])
def test_t1_on_a_method_that_has_it_already_is_refused_in_words_or_runs(run_small: RunSmall, name: str) -> None:
    own = {"width": 2, "z_dim": 3} if "fedkf" in name else {}
    try:
        run_small(name, **QUICK, **own)
    except fedstill.SettingError as error:
        assert "t1" in str(error).lower()  # noqa: PT017 - either is fine, an exception of another kind is not


def test_settings_of_the_method_and_of_t1_are_told_apart(run_small: RunSmall) -> None:
    method = registry.make("fedprox+t1", {"mu": 0.3, "cache_init": "w0"})
    assert registry.settings_of(method) == {"mu": 0.3, "cache_init": "w0"}
    with pytest.raises(fedstill.SettingError, match="cache_init"):
        run_small("fedavg+t1", cache_init="none")
    with pytest.raises(fedstill.SettingError, match="nothing"):
        run_small("fedavg+nothing")
