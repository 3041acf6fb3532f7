"""Runs on another device: everything is where it has to be, and the numbers are those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedstill
from fedstill.core import device, tree
from fedstill.core.weights import FlatNet
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.site import Site
from fedstill.methods import registry
from fedstill.running.directory import RunDirectory
from fedstill.running.result import Result
from fedstill.train.task import Samples
from support.pretend_device import GPU, MixedDevices, place, pretended_gpu
from support.quick import QUICK, QUICKER, needed
from support.runs import SMALL, weights
from support.sites import NAMES, POLICY, Wire, served

CPU = device.CPU
TINY: dict[str, Any] = SMALL | {
    "clients": 3,
    "participation": 1.0,
    "rounds": 2,
    "fraction": 0.05,
    "image_size": 8,
    "regions": 1,
}
TINY |= {"model": "mlp", "model_options": {"hidden": [8]}}
SOME_WORK = 1000  # operations


# --- the device that is pretended ---


def test_the_pretended_device_keeps_tensors_apart() -> None:
    with pretended_gpu():
        a, b = torch.ones(3, device="cuda:0"), torch.ones(3)
        assert (a.device, b.device) == (GPU, CPU)
        assert (a.is_cuda, a.is_cpu, b.is_cuda, b.is_cpu) == (True, False, False, True)
        assert b.to(GPU).device == b.cuda().device == b.to(a).device == GPU
        assert a.cpu().device == a.to("cpu", torch.float64).device == CPU
        assert a[1:].device == (2 * a).exp().device == torch.zeros_like(a).device == a.new_zeros(2).device == GPU
        assert (a + torch.tensor(1.0)).device == a[torch.tensor([0, 2])].device == GPU
        b.copy_(a)
        assert b.device == CPU


@pytest.mark.parametrize(
    "mixes",
    [
        lambda a, b: a + b,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: b.add_(a),
        lambda a, b: b[0].add_(a[0]),
        lambda a, b: b * a[0],
        lambda a, b: b[torch.zeros(1, dtype=torch.long, device=GPU)],
        lambda a, b: a.index_add_(0, torch.zeros(3, dtype=torch.long), a),
        lambda a, b: F.linear(a, torch.ones(2, 3)),
        lambda a, b: a.numpy(),
        lambda a, b: np.asarray(a),
        lambda a, b: torch.rand(2, device=GPU, generator=torch.Generator()),
        lambda a, b: a.uniform_(generator=torch.Generator()),
    ],
)
def test_the_pretended_device_refuses_what_a_real_one_refuses(mixes: Any) -> None:
    with pretended_gpu():
        a, b = torch.ones(3, device="cuda:0"), torch.ones(3)
        with pytest.raises(MixedDevices):
            mixes(a, b)


def test_gradients_are_on_the_pretended_device_too() -> None:
    with pretended_gpu():
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(GPU)
        net(torch.ones(4, 3, device=GPU)).square().sum().backward()
        assert {p.grad.device for p in net.parameters() if p.grad is not None} == {GPU}
        with pytest.raises(MixedDevices):
            net(torch.ones(4, 3))


# --- where things are made ---


def test_everything_is_made_on_the_device_and_numbers_are_drawn_on_the_cpu() -> None:
    def drawn() -> list[torch.Tensor]:
        rng = torch.Generator().manual_seed(3)
        return [
            torch.randn(3, generator=rng),
            torch.randperm(5, generator=rng),
            torch.randint(0, 9, (4,), generator=rng),
            torch.empty(4, dtype=torch.float64).exponential_(generator=rng),
            torch.multinomial(torch.ones(3), 2, generator=rng),
            torch.multinomial(input=torch.ones(3), num_samples=2, generator=rng),
            torch.nn.init.normal_(torch.zeros(3), generator=rng),
            torch.randperm(4, generator=rng, out=torch.zeros(4, dtype=torch.int64)),
        ]

    expected = drawn()
    with pretended_gpu(), device.on(GPU):
        assert torch.zeros(2).device == torch.tensor(1.0).device == torch.arange(3).device == GPU
        there = drawn()
        assert {t.device for t in there} == {GPU}
        assert tree.decode(tree.encode({"w": there[0]}))["w"].device == GPU
        with device.on(CPU):
            assert torch.zeros(2).device == torch.randn(2, generator=torch.Generator()).device == CPU
        weights, places = torch.nn.Parameter(torch.zeros(3)), torch.zeros(4, dtype=torch.int64)
        torch.nn.init.uniform_(weights, 1.0, 2.0, generator=torch.Generator())
        torch.randperm(4, generator=torch.Generator(), out=places)
        assert weights.min() >= 1, "what is to be filled is filled"
        assert places.sum() == 6
    assert all(torch.equal(a, b) for a, b in zip(there, expected, strict=True))
    assert device.current() == CPU


def test_on_the_cpu_nothing_is_active() -> None:
    with device.on(CPU):
        assert not torch.overrides._get_current_function_mode_stack()


def test_networks_that_share_frozen_weights_share_them_on_the_device_too() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def net() -> FlatNet:
        module = nn.Linear(2, 1)
        module.register_parameter("frozen", frozen)
        return FlatNet(module)

    with pretended_gpu():
        here, *there = net(), net().to(GPU), net().to(GPU)
        assert here.module.frozen is frozen
        assert frozen.device == CPU
        assert there[0].module.frozen is there[1].module.frozen
        assert {p.device for p in there[0].module.parameters()} == {GPU}


# --- the setting ---


@pytest.mark.parametrize(
    ("name", "reason"),
    [("banana", "cpu, cuda, cuda:1"), ("cuda:x", "cpu, cuda, cuda:1"), ("mps", "float64"), ("cuda:7", "no GPUs")],
)
def test_a_device_that_is_none_is_refused_before_anything_begins(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(fedstill.SettingError, match=f"device = '{name}'.*{reason}"):
        fedstill.run(**TINY, device=name, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_on_a_cluster_it_is_to_be_said_what_workers_have_of_a_gpu() -> None:
    with pretended_gpu(), pytest.raises(fedstill.SettingError, match=r"worker_gpus = 1, or 0\.25 if four"):
        fedstill.run(**TINY | {"engine": "ray"}, device="cuda")
    with pytest.raises(fedstill.SettingError, match="worker_gpus is for engine = 'ray', and engine is 'inline'"):
        fedstill.run(**TINY, worker_gpus=0.5)


def test_auto_is_a_gpu_if_there_is_one() -> None:
    assert device.find("auto") == CPU
    with pretended_gpu():
        assert device.find("auto") == device.find("cuda") == GPU
        with pytest.raises(fedstill.SettingError, match="sees 1 GPUs"):
            device.find("cuda:1")


# --- whole runs ---


def both(method: Any, **settings: Any) -> tuple[Result, Result]:
    """The same run on the CPU and on the pretended device."""
    merged = TINY | settings
    here = fedstill.run(method, **merged)
    with pretended_gpu() as work:
        there = fedstill.run(method, **merged, device="cuda")
    assert work["gpu"] > SOME_WORK
    return here, there


def same(here: Result, there: Result) -> None:
    assert torch.equal(weights(here), weights(there))
    assert {place(p) for p in there.model.state_dict().values()} == {"cpu"}
    assert [r["accuracy"] for r in here.records] == [r["accuracy"] for r in there.records]
    assert [r["train_loss"] for r in here.records] == [r["train_loss"] for r in there.records]


@pytest.mark.slow
@pytest.mark.parametrize("method", registry.names())
def test_every_method_ends_with_the_same_bits_on_another_device(method: str) -> None:
    same(*both(method, **QUICKER.get(method, {}) | needed(method)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("f2l", {"regions": 2, "rounds_per_episode": 1, "pool": 0.2, "server_epochs": 1, "epsilon": 0.0}),
        (
            "fedprox+t1",
            {"clients": 4, "rounds": 3, "participation": 0.5, "clip": 1.0, "momentum": 0.9, "optimizer": "adam"},
        ),
        ("fedavg+ccvr", {"virtual": 4, "calibration_epochs": 1}),
        ("fedavg+median", {"participation": 1.0, "attack": "noise", "attackers": 1}),
        ("scaffold+norm-clip", {"participation": 1.0, "attack": "sign-flip", "attackers": 1}),
        ("fedavg+multi-krum", {"clients": 5, "participation": 1.0, "attack": "mirror-flip", "attackers": 1}),
        ("fedbe", {"pool": 0.2, "proxy": "pool", "distribution": "dirichlet", "samples": 2, "server_epochs": 1}),
        ("fedmd", {"pool": 0.2, "proxy": "pool", "average_weights": False, "digest": "first"}),
        ("fedkf", {"width": 2, "z_dim": 3, "gen_first": False, "gen_adversarial": True, "rounds": 3}),
        ("dafkd", {"z_dim": 3, "batches": 1, "server_batch": 8, "server_epochs": 1, "private": True}),
    ],
)
def test_variants_end_with_the_same_bits_on_another_device(method: str, settings: dict[str, Any]) -> None:
    same(*both(method, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_batchnorm_and_augmentation_give_the_same_bits_on_another_device(buffers: str) -> None:
    settings = {
        "model": "resnet8",
        "model_options": {"norm": "batch"},
        "augment": "crop:1,flip,rotate:15,scale:0.8-1.0",
    }
    same(*both("fedgkd", **settings, buffers=buffers, clients=3, fraction=0.02))


@pytest.mark.parametrize("model", ["bag", "transformer"])
def test_text_gives_the_same_bits_on_another_device(model: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(1, 30, (60, 12)), np.arange(60) % 3
    data = fedstill.from_arrays(x, y, x[:20], y[:20], tokens=True)
    options = {"dim": 8} | ({"layers": 1, "heads": 2} if model == "transformer" else {})
    same(*both("fedgkd", data=data, model=model, model_options=options, image_size=0, fraction=1.0))


def test_samples_that_are_too_many_to_prepare_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Samples, "PREPARE_UP_TO", 0)
    same(*both("feddf", **QUICK["feddf"] | needed("feddf")))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_goes_on_on_another_device(first: str, then: str, tmp_path: Path) -> None:
    settings = TINY | {"rounds": 4, "save_models": 1}
    whole = fedstill.run("fedkf", **settings, **QUICK["fedkf"])
    with pretended_gpu():
        fedstill.run("fedkf", **settings | {"rounds": 2}, **QUICK["fedkf"], device=first, out=tmp_path / "run")
        last = fedstill.resume(tmp_path / "run", rounds=4, device=then)
    same(whole, last)
    assert RunDirectory.open(tmp_path / "run").config().device == then


class Apart(Wire):
    """Sites in processes of their own, as far as a device is concerned."""

    def __init__(self, folder: Path, device_: str) -> None:
        super().__init__(folder)
        self.sites = {name: Site(folder / name, LocalInputs(device=device_), POLICY) for name in NAMES}

    def answer(self, name: str, request: Any) -> Any:
        with device.on(CPU):
            return super().answer(name, request)


@pytest.mark.slow
def test_a_server_and_its_sites_each_have_a_device_of_their_own(tmp_path: Path) -> None:
    here = served(Apart(tmp_path / "a", "cpu"), tmp_path / "here", "scaffold")
    with pretended_gpu():
        server = served(Apart(tmp_path / "b", "cpu"), tmp_path / "server", "scaffold", device="cuda")
        sites = served(Apart(tmp_path / "c", "cuda"), tmp_path / "sites", "scaffold")
    same(here, server)
    same(here, sites)
