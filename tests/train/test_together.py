"""Clients of one size trained at once are trained as one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.core.tree import Message
from fedstill.data.federation import Federation, from_clients
from fedstill.methods import registry
from fedstill.running.directory import RunDirectory
from fedstill.running.result import Result
from fedstill.train import together
from fedstill.train.loop import Objective
from support.pretend_device import pretended_gpu
from support.quick import QUICKER, needed
from support.recorder import record_rounds
from support.runs import numbers, weights

SIZES = (20, 20, 20, 13, 13, 7)
PLAIN: dict[str, Any] = {"participation": 1.0, "rounds": 2, "epochs": 2, "batch_size": 6, "eval_every": 0}
PLAIN |= {"engine": "inline", "rounds_per_episode": 1}


def federation(sizes: tuple[int, ...] = SIZES) -> Federation:
    """Clients of these sizes, some of them equal."""
    rng = np.random.default_rng(0)
    clients = []
    for n in sizes:
        y = rng.integers(0, 3, n)
        clients.append((rng.normal(size=(n, 1, 8, 8)) + 0.5 * y.reshape(-1, 1, 1, 1), y))
    return from_clients(clients, classes=["a", "b", "c"], test_fraction=0.0)


class Net(nn.Sequential):
    """A small convolutional network in float64, in which rounding is out of sight."""

    def __init__(self, norm: bool = False) -> None:
        norms = [nn.BatchNorm2d(4)] if norm else []
        conv = nn.Conv2d(1, 4, 3, stride=2)
        super().__init__(Double(), conv, *norms, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(36, 5), nn.Linear(5, 3))
        self.double()


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


@dataclass(frozen=True)
class Outcome:
    result: Result
    crossed: list[Message]
    states: dict[int, Any]


def outcome(method: Any, tmp_path: Path, count: int, **settings: Any) -> Outcome:
    """A run with so many clients at once: its model, what clients sent, and what they keep."""
    merged: dict[str, Any] = PLAIN | {"data": federation(), "model": Net} | settings
    path = tmp_path / f"{count}"
    with pytest.MonkeyPatch.context() as patch:
        crossings = record_rounds(patch)
        result = fedstill.run(method, **merged, together=count, out=path)
    store = RunDirectory(path).client_store
    sent = [up for crossing in crossings for up in crossing.up.values()]
    return Outcome(result, sent, {k: store.latest(k) for k in range(6)})


def close(a: Any, b: Any, rtol: float) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            close(a[key], b[key], rtol)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            close(x, y, rtol)
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)
    elif a is None:
        assert b is None
    else:
        assert a == pytest.approx(b, rel=max(rtol, 1e-6))


def compare(method: Any, tmp_path: Path, rtol: float, **settings: Any) -> None:
    alone, joint = (outcome(method, tmp_path, count, **settings) for count in (1, 4))
    close(alone.crossed, joint.crossed, rtol)
    close(alone.states, joint.states, rtol)
    torch.testing.assert_close(weights(alone.result), weights(joint.result), rtol=rtol, atol=rtol)
    for name in ("train_loss", "bytes_up", "clients"):
        close([r[name] for r in alone.result.records], [r[name] for r in joint.result.records], rtol)


@pytest.fixture
def joint_fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients each joint training had."""
    found: list[int] = []
    original = together.fit_together

    def counted(rows: Any, clients: Any, objectives: Any) -> None:
        found.append(len(clients))
        original(rows, clients, objectives)

    monkeypatch.setattr("fedstill.engine.worker.fit_together", counted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "fedgkd", "feddyn", "fednova", "qffl"])
def test_clients_trained_together_learn_what_they_learn_alone(
    method: str, tmp_path: Path, joint_fits: list[int]
) -> None:
    compare(method, tmp_path, 1e-9)
    assert joint_fits == [3, 2] * 2, "of sizes 20 and 13, in two rounds; the last client trains as ever"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"clip": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        {"model": lambda: Net(norm=True), "weight_decay": 0.5, "decay_norms": False},
        {"optimizer": "adam", "lr": 0.01, "lr_decay": 0.5},
        {"local_unit": "equal_steps"},
        {"augment": "crop:1,flip"},
        {"batch_size": 4, "epochs": 1},
    ],
    ids=",".join,
)
def test_settings_of_local_training_mean_the_same_together(settings: dict[str, Any], tmp_path: Path) -> None:
    compare("fedgkd", tmp_path, 1e-7, **settings)


@pytest.mark.parametrize("buffers", ["average", "local", "drop"])
def test_batchnorm_keeps_each_clients_statistics_apart(buffers: str, tmp_path: Path) -> None:
    sizes = (19, 19, 19, 13, 13, 1)  # a last batch of one joins the one before; a single sample uses what was sent
    compare("fedavg", tmp_path, 1e-9, model=lambda: Net(norm=True), buffers=buffers, data=federation(sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedkf", {"width": 2, "z_dim": 3}),
        ("fedkf", {"width": 2, "z_dim": 3, "gen_adversarial": True, "gen_first": False}),
        ("fedgen", {"generator_steps": 1}),
        ("fedhkd", {}),
        ("fedhyb", {"variant": "2"}),
        ("feddistill-plus", {}),
        ("fedgkd+t1", {}),
        ("moon", {}),
        ("moon", {"augment": "flip"}),  # teachers that see each batch as it comes, others for each client
    ],
)
def test_objectives_with_networks_of_their_own_can_be_trained_together(
    method: str, settings: dict[str, Any], tmp_path: Path, joint_fits: list[int]
) -> None:
    compare(method, tmp_path, 2e-3, **settings, model="mlp", model_options={"hidden": [6]}, lr=0.01)
    assert joint_fits == [3, 2] * 2


@pytest.mark.slow
def test_what_cannot_be_trained_together_is_trained_as_ever(tmp_path: Path, joint_fits: list[int]) -> None:
    settings = QUICKER["dafkd"] | needed("dafkd") | {"model": "mlp", "model_options": {"hidden": [6]}}
    alone, joint = (outcome("dafkd", tmp_path, count, **settings) for count in (1, 4))
    assert not joint_fits
    assert torch.equal(weights(alone.result), weights(joint.result))
    for a, b in zip(alone.crossed, joint.crossed, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


# Tested above; and those that train a second network of each client's beside the first.
ALONE = ("fedavg", "fedprox", "fedkf", "dafkd", "fml", "fedkd")


@pytest.mark.slow
@pytest.mark.parametrize("method", [m for m in registry.names() if m not in ALONE])
def test_every_method_runs_with_clients_together(method: str, joint_fits: list[int]) -> None:
    images = {"data": "fashion-mini", "clients": 3, "partition": "iid", "fraction": 0.05, "image_size": 8, "regions": 1}
    images |= {"model": "mlp", "model_options": {"hidden": [6]}, "epochs": 1, "batch_size": 16, "lr": 0.01}
    settings = PLAIN | images | QUICKER.get(method, {}) | needed(method)
    alone, joint = (fedstill.run(method, **settings, together=count) for count in (1, 4))
    start = prepare(resolve(settings | {"method": method})).task.build().module.state_dict().values()
    moved = weights(alone) - torch.cat([p.flatten() for p in start])
    assert (weights(alone) - weights(joint)).norm() <= 0.01 * moved.norm()  # FedDistill has no model to move
    close([r["train_loss"] for r in alone.records], [r["train_loss"] for r in joint.records], 2e-3)
    assert joint_fits


def test_same_bits_with_worker_processes(tmp_path: Path) -> None:
    inline = outcome("scaffold", tmp_path / "a", 2)
    workers = outcome("scaffold", tmp_path / "b", 2, engine="process", workers=2)
    assert torch.equal(weights(inline.result), weights(workers.result))
    assert numbers(inline.result) == numbers(workers.result)


def test_regions_train_their_own_clients_together(tmp_path: Path, joint_fits: list[int]) -> None:
    regions = [{"clients": [0, 1, 3], "lr": 0.1}, {"clients": [2, 4, 5], "method": "fedprox"}]
    compare("fedavg", tmp_path, 1e-9, region=regions)
    assert joint_fits == [2, 2]


def test_the_same_bits_together_on_another_device(tmp_path: Path) -> None:
    model = {"model": lambda: Net(norm=True)}
    here = outcome("scaffold", tmp_path / "a", 4, **model)
    with pretended_gpu():
        there = outcome("scaffold", tmp_path / "b", 4, **model, device="cuda")
    assert torch.equal(weights(here.result), weights(there.result))


def test_lower_precision_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # see test_precision
    model = {"model": "mlp", "model_options": {"hidden": [6]}, "precision": "bfloat16"}
    compare("fedavg", tmp_path, 0.02, **model)


def test_dropout_draws_for_each_client(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Same(fedstill.FedAvg):
        """All clients have the same samples in the same order: only dropout tells them apart."""

    x, y = np.random.default_rng(0).random((8, 4), np.float32), np.arange(8) % 2
    data = from_clients([(x, y)] * 3, test_fraction=0.0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    result = outcome(Same(), tmp_path, 3, data=data, model=net, batch_size=8, epochs=1, rounds=1)
    a, b, c = (up["model"] for up in result.crossed)
    assert not torch.equal(a, b)
    assert not torch.equal(b, c)


def test_a_network_that_cannot_be_trained_together_is_refused_before_the_first_round() -> None:
    x, y = np.random.default_rng(0).integers(1, 30, (12, 6)), np.arange(12) % 3
    text = fedstill.from_arrays(x, y, x, y, tokens=True)
    with pytest.raises(fedstill.SettingError, match="together: this network cannot be trained"):
        fedstill.run(data=text, model="bag", clients=2, together=2)


def test_a_check_leaves_no_trace() -> None:
    settings = {"model": "resnet8", "model_options": {"norm": "batch"}, "image_size": 16, "fraction": 0.02}
    one, more = (prepare(resolve(settings | {"together": count})).task.initial for count in (1, 3))
    assert torch.equal(one, more)


@dataclass(frozen=True)
class Watched(fedstill.FedAvg):
    """Reports what its objective is asked for."""

    def objective(self, client: fedstill.Client) -> Objective:
        seen: list[str] = []
        client.notes["seen"] = seen
        return Objective(after=lambda batch: seen.append("after"), done=lambda: seen.append("done"))

    def uplink(self, client: fedstill.Client) -> Message:
        assert client.notes["seen"] == ["after"] * 8 + ["done"]
        return super().uplink(client)


def test_what_an_objective_asks_for_is_done_for_each_client(tmp_path: Path, joint_fits: list[int]) -> None:
    outcome(Watched(), tmp_path, 4, data=federation((20, 20, 20)))
    assert joint_fits == [3, 3]
