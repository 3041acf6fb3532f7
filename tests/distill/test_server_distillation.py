"""The shared server stage, and what the methods on it reduce to."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import Setup, prepare
from fedstill.core.store import Store
from fedstill.data.proxy import match_channels
from fedstill.distill import stage
from fedstill.distill.auxiliary import Generator
from fedstill.distill.ensemble import diversity, label_weights, normalised
from fedstill.distill.generators import ConditionalGenerator, ShrinkingGenerator, TransposedGenerator
from fedstill.methods import registry
from fedstill.methods.base import Part, Server, Uplink, fault
from fedstill.methods.ccvr import pooled
from fedstill.methods.ccvr import root as ccvr_root
from fedstill.methods.creff import CReFF, flat, unflat
from fedstill.methods.dafkd import DaFKD
from fedstill.methods.fedhyb import FedHyb
from fedstill.running.directory import RunDirectory
from fedstill.train.evaluate import Outputs, predict
from fedstill.train.loop import Batch, Loss
from fedstill.train.task import Samples, Task
from support.runs import SMALL, RunSmall, numbers, weights

POOL = {"pool": 0.2, "proxy": "pool"}
SHORT: dict[str, dict[str, Any]] = {
    "feddf": {"server_steps": 3},
    "dafkd": {"batches": 2, "server_batch": 8, "z_dim": 4},
    "fedhyb": {},
    "fedgen": {"generator_steps": 3},
    "fedftg": {"iterations": 1, "server_batch": 4},
    "fedbe": {"server_epochs": 1, "samples": 2},
    "fedmd": {},
    "fedhkd": {},
    "creff": {"match_steps": 2, "retrain_epochs": 5, "features": 4, "draws": 2},
}


def small_setup(method: str, **settings: Any) -> Setup:
    return prepare(resolve({**SMALL, **POOL, "method": method, **settings}))


def fed(setup: Setup, tmp_path: Path, clients: int = 3) -> tuple[Server, list[Uplink]]:
    """A server in round 2, and what some clients answer to what it sends."""
    server = Server(setup.task, setup.federation.sizes, Store(tmp_path / "server"), setup.pool())
    setup.method.start(server)
    server.round = 2
    g = torch.Generator().manual_seed(5)
    wire = setup.method.wire(setup.task)
    ups = []
    for k in range(clients):
        message = {name: torch.rand(part.shape, generator=g).to(part.dtype) for name, part in wire.up.items()}
        message["model"] = server.model + 0.05 * torch.randn(len(server.model), generator=g)
        ups.append(Uplink(k, 10 + k, message))
    return server, ups


def targets_of(monkeypatch: pytest.MonkeyPatch, method: str) -> list[torch.Tensor]:
    """The soft targets that a method's server stage is about to match."""
    seen: list[torch.Tensor] = []

    def noting(targets: torch.Tensor, temperature: float = 1.0) -> Loss:
        seen.append(targets)
        return stage.match_probabilities(targets, temperature)

    monkeypatch.setattr(f"fedstill.methods.{method}.match_probabilities", noting)
    return seen


def test_teachers_are_asked_on_several_threads_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    task = small_setup("feddf").task
    assert task.proxy is not None
    teachers = [task.initial + 0.05 * torch.randn(task.size) for _ in range(5)]
    asked_by: set[tuple[int, str]] = set()
    calls, together = count(), threading.Barrier(3, timeout=60)  # passed only when three are under way at once

    def noting(task: Task, vector: Tensor, samples: Samples, role: str = "teacher") -> Outputs:
        asked_by.add((threading.get_ident(), role))
        if next(calls) < 3:
            together.wait()
        return predict(task, vector, samples, role)

    alone = stage.predict_all(task, teachers, task.proxy)
    monkeypatch.setattr(stage, "predict", noting)
    at_once = stage.predict_all(task, teachers, task.proxy, threads=3)
    assert len({role for _, role in asked_by}) == 3
    assert threading.main_thread().ident not in {thread for thread, _ in asked_by}
    for a, b in zip(alone, at_once, strict=True):
        assert torch.equal(a.logits, b.logits)
        assert torch.equal(a.features, b.features)


def test_networks_that_draw_while_they_are_asked_have_the_same_bits_too() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn(x.shape)

    setup = small_setup("feddf")
    layers = nn.Sequential(nn.Flatten(), Noisy(), nn.Linear(setup.task.dataset.shape.numel(), 10))
    task = replace(setup.task, make_network=lambda: fedstill.models.as_classifier(copy.deepcopy(layers)))

    def asked(threads: int) -> list[Outputs]:
        torch.manual_seed(0)
        assert task.proxy is not None
        return stage.predict_all(task, [task.initial] * 4, task.proxy, threads)

    for a, b in zip(asked(1), asked(3), strict=True):
        assert torch.equal(a.logits, b.logits)


def test_what_goes_wrong_while_a_teacher_is_asked_is_said() -> None:
    task = small_setup("feddf").task
    assert task.proxy is not None
    with pytest.raises(RuntimeError, match="size"):
        stage.predict_all(task, [task.initial, task.initial[:-1]], task.proxy, threads=2)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["feddf", "fedbe", "fedhyb", "dafkd", "lkd"])
def test_a_server_on_two_cores_gives_the_bits_of_one(run_small: RunSmall, method: str) -> None:
    settings = quickly(method) | {"engine": "process"}
    if method == "fedhyb":
        settings |= {"model": "lenet5", "image_size": 32, "model_options": {}}
    one, two = (run_small(method, **settings, workers=workers) for workers in (1, 2))
    assert torch.equal(weights(one), weights(two))


SERVER_SIDES = ("feddf", "dafkd", "fedhyb", "fedgen", "fedftg", "fedbe", "creff", "lkd")


def quickly(method: str) -> dict[str, Any]:
    """Settings for a short run of methods composed by +, each setting under the name it has there."""
    known = {parameter.name for parameter in registry.hyper_parameters(method)}
    found: dict[str, Any] = {}
    for part in method.split("+"):
        for key, value in (SHORT | {"lkd": {"server_epochs": 1}}).get(part, {}).items():
            found |= {name: value for name in (key, f"{part}.{key}") if name in known}
    return POOL | {
        "hyper": found,
        "rounds": 2,
        "fraction": 0.03,
        "model": "mlp",
        "image_size": 16,
        "model_options": {"hidden": [8]},
    }


@pytest.mark.slow
@pytest.mark.parametrize("second", SERVER_SIDES)
@pytest.mark.parametrize("first", [*SERVER_SIDES, "fedkf", "fedhkd", "fedmd", "scaffold"])
def test_any_two_run_together_or_say_why_not(run_small: RunSmall, first: str, second: str) -> None:
    name = f"{first}+{second}"
    if first in (second, "fedkf"):
        with pytest.raises(fedstill.SettingError, match=r"composed once|put \+t1 last"):
            run_small(name, **quickly(name))
        return
    settings = quickly(name)
    if "fedhyb" in name:  # a network without convolutions has no transformed images
        known = {parameter.name for parameter in registry.hyper_parameters(name)}
        settings["hyper"]["fedhyb.variant" if "fedhyb.variant" in known else "variant"] = "3"
    result = run_small(name, **settings)
    assert result.summary["dropped"] == 0


class WithDropout(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 8), torch.nn.ReLU())
        self.drop, self.fc = torch.nn.Dropout(0.5), torch.nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        said: torch.Tensor = self.fc(self.drop(self.body(x)))
        return said


@pytest.mark.slow
@pytest.mark.parametrize("method", ["feddf", "fedftg", "dafkd", "fedbe", "fedavg+ccvr", "lkd"])
def test_layers_that_draw_at_random_give_the_same_bits_too(run_small: RunSmall, method: str) -> None:
    settings = quickly(method) | {"model": WithDropout(), "model_options": {}}
    torch.manual_seed(1)
    first = run_small(method, **settings)
    torch.manual_seed(2)
    drawn = torch.rand(1)
    again = run_small(method, **settings, engine="process", workers=2)
    assert torch.equal(weights(first), weights(again))
    torch.manual_seed(2)
    assert torch.equal(torch.rand(1), drawn), "and the caller's stream is the caller's"


def with_batchnorm() -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["feddf", "fedftg", "fedbe", "lkd", "dafkd"])
def test_a_server_that_hardly_learns_changes_no_statistics(run_small: RunSmall, method: str) -> None:
    """With a rate of almost zero the result is the average, BatchNorm's statistics included."""
    settings = quickly(method) | {"model": with_batchnorm, "model_options": {}, "rounds": 1}
    settings["hyper"] |= {"server_lr": 1e-20}
    plain = run_small("fedavg", **{k: v for k, v in settings.items() if k != "hyper"})
    if method == "dafkd":  # there clients train otherwise
        settings["hyper"] |= {"variant": "no-sharing"}
        settings["participation"] = 0.1
        plain = run_small("fedavg", **{k: v for k, v in settings.items() if k != "hyper"})
    assert torch.equal(weights(plain), weights(run_small(method, **settings)))


def test_one_sample_clients_with_batchnorm(run_small: RunSmall) -> None:
    x, y = np.random.default_rng(0).random((9, 1, 16, 16), np.float32), np.arange(9) % 3
    data = fedstill.from_clients(
        [(x[:4], y[:4]), (x[4:5], y[4:5]), (x[5:], y[5:])], test=(x, y), test_fraction=0, classes=list("0123456789")
    )
    own: dict[str, Any]
    for method, own in (("dafkd", {"variant": "no-sharing"}), ("dafkd", {})):
        run = fedstill.run(method, data=data, model=with_batchnorm, rounds=2, participation=1.0, engine="inline",
                           epochs=1, hyper=own | {"batches": 2, "server_batch": 8})  # fmt: skip
        assert run.summary["dropped"] == 0


def test_fedhyb_refuses_features_that_a_network_does_not_show(run_small: RunSmall) -> None:
    nn = torch.nn
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(256, 10), nn.LogSoftmax(1))
    with pytest.raises(fedstill.SettingError, match="nu > 0"):
        run_small("fedhyb", **POOL, variant="3", model=hidden)
    run_small("fedhyb", **POOL, variant="3", model=hidden, nu=0.0, rounds=1)


def test_settings_of_method_objects_are_checked() -> None:
    with pytest.raises(fedstill.SettingError, match="variant"):
        fedstill.run(DaFKD(variant="nosharing"), **SMALL)  # type: ignore[arg-type]
    assert registry.checked(FedHyb(variant=1)) == FedHyb(variant="1")  # type: ignore[arg-type]


def test_proxy_data_may_come_from_python_and_not_from_the_clients_own(run_small: RunSmall, tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((40, 3, 16, 16), np.float32), np.arange(40) % 4
    mine = fedstill.from_arrays((255 * x).astype(np.uint8), y)
    result = run_small("feddf", server_steps=2, proxy=mine, proxy_size=20, out=tmp_path / "run")
    assert torch.equal(weights(result), weights(fedstill.resume(tmp_path / "run", proxy=mine)))
    with pytest.raises(fedstill.SettingError, match="proxy"):
        fedstill.resume(tmp_path / "run")
    with pytest.raises(fedstill.SettingError, match="proxy=pool"):
        run_small("feddf", proxy="fashion-mini")


def test_grey_of_colours_between_0_and_1_is_not_rounded() -> None:
    grey = match_channels(torch.rand(2, 3, 4, 4), 1)
    assert ((grey > 0.01) & (grey < 0.99)).any()


def test_ccvr_survives_clients_that_send_what_is_no_covariance() -> None:
    bad = torch.tensor([[1.0, 3.0], [3.0, 1.0]], dtype=torch.float64)  # an eigenvalue of -2
    L = ccvr_root(bad)
    torch.testing.assert_close(L @ L.T, torch.full((2, 2), 2.0).double(), rtol=1e-5, atol=1e-5)


def test_what_is_sent_after_the_last_round_is_counted(run_small: RunSmall) -> None:
    plain, calibrated = run_small("fedavg"), run_small("fedavg+ccvr")
    setup = small_setup("fedavg+ccvr")
    each = sum(part.nbytes for part in setup.method.wire(setup.task).last.values())
    assert calibrated.summary["bytes_up"] == plain.summary["bytes_up"] + 6 * each


def test_a_count_below_zero_is_dropped() -> None:
    part = {"counts": Part((2,), "samples of each class", least=0)}
    assert fault({"counts": torch.tensor([1.0, -1.0])}, part) == "counts holds numbers below 0"
    assert fault({"counts": torch.tensor([1.0, 0.0])}, part) is None


OFF: list[tuple[str, dict[str, Any]]] = [
    ("feddf", {"server_steps": 0}),
    ("fedhyb", {"a": 0.0, "eta": 0.0, "nu": 0.0}),
    ("fedbe", {"server_epochs": 0}),
    ("fedftg", {"iterations": 0}),
    ("fedgen", {"hyper": {"alpha": 0.0, "beta": 0.0}, "generator_steps": 1}),
    ("fedmd", {"weight": 0.0}),
    ("fedhkd", {"lambda": 0.0, "gamma": 0.0}),
]


@pytest.mark.parametrize(("method", "off"), OFF, ids=[m for m, _ in OFF])
def test_with_everything_off_it_is_fedavg_bit_for_bit(run_small: RunSmall, method: str, off: dict[str, Any]) -> None:
    plain, switched = run_small("fedavg", **POOL), run_small(method, **POOL, **off)
    assert torch.equal(weights(plain), weights(switched))
    assert [r["accuracy"] for r in plain.records] == [r["accuracy"] for r in switched.records]


@pytest.mark.slow
@pytest.mark.parametrize("method", SHORT)
def test_on_it_is_not_fedavg_and_has_the_same_bits_on_both_engines(run_small: RunSmall, method: str) -> None:
    plain = run_small("fedavg", **POOL)
    inline = run_small(method, **POOL, **SHORT[method])
    processes = run_small(method, **POOL, **SHORT[method], engine="process", workers=2)
    assert not torch.equal(weights(plain), weights(inline))
    assert torch.equal(weights(inline), weights(processes))
    assert numbers(inline) == numbers(processes)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dafkd", "fedgen", "fedftg", "fedhkd", "fedmd", "creff"])
def test_state_survives_a_resume_after_every_round(run_small: RunSmall, tmp_path: Path, method: str) -> None:
    whole = run_small(method, **POOL, **SHORT[method])
    path = tmp_path / "run"
    run_small(method, **POOL, **SHORT[method], rounds=1, out=path)
    for rounds in (2, 3):
        last = fedstill.resume(path, rounds=rounds)
    assert torch.equal(weights(last), weights(whole))


@pytest.mark.parametrize("method", ["feddf", "dafkd", "fedbe", "fedhyb"])
def test_each_teacher_sees_each_server_sample_once_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    extra = {"clients_teach": True, "samples": 2, "server_epochs": 3} if method == "fedbe" else SHORT[method]
    setup = small_setup(method, **extra)
    server, ups = fed(setup, tmp_path)
    asked: list[int] = []

    def counting(task: Any, teacher: Any, samples: Any) -> Outputs:
        asked.append(len(samples))
        return predict(task, teacher, samples)

    monkeypatch.setattr(stage, "predict", counting)
    setup.method.aggregate(server, iter(ups))
    teachers = len(ups) + (3 if method == "fedbe" else 0)
    assert len(asked) == teachers
    assert len(set(asked)) == 1


def test_feddf_matches_the_softmax_of_the_mean_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = small_setup("feddf", server_steps=1)
    server, ups = fed(setup, tmp_path)
    assert setup.task.proxy is not None
    logits = [predict(setup.task, up["model"], setup.task.proxy).logits.double().numpy() for up in ups]
    mean = np.mean(logits, axis=0)
    expected = np.exp(mean) / np.exp(mean).sum(1, keepdims=True)
    seen = targets_of(monkeypatch, "feddf")
    setup.method.aggregate(server, iter(ups))
    np.testing.assert_allclose(seen[0].numpy(), expected, rtol=1e-4, atol=1e-6)


def test_ensemble_weights_against_a_loop() -> None:
    g = torch.Generator().manual_seed(0)
    answers = [Outputs(torch.randn(4, 3, generator=g), torch.randn(4, 2, generator=g)) for _ in range(3)]
    alpha = torch.rand(3, 4, generator=g)
    found = stage.mean_probabilities(answers, normalised(alpha)).numpy()
    for i in range(4):
        total = sum(float(alpha[k, i]) for k in range(3))
        expected = np.zeros(3)
        for k in range(3):
            z = answers[k].logits[i].double().numpy()
            expected += float(alpha[k, i]) / total * np.exp(z) / np.exp(z).sum()
        np.testing.assert_allclose(found[i], expected, rtol=1e-5)
    np.testing.assert_allclose(
        stage.mean_features(answers).numpy(), np.mean([a.features.numpy() for a in answers], axis=0), rtol=1e-6
    )


def test_correlation_factors_sum_to_one_and_fall_back_to_uniform() -> None:
    alpha = torch.tensor([[0.2, 0.0, 1.0], [0.6, 0.0, 0.0]])
    found = normalised(alpha)
    torch.testing.assert_close(found.sum(0), torch.ones(3))
    torch.testing.assert_close(found[:, 0], torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(found[:, 1], torch.tensor([0.5, 0.5]))


def test_a_constant_discriminator_gives_the_uniform_ensemble(tmp_path: Path) -> None:
    models = {}
    _, ups = fed(small_setup("dafkd", **SHORT["dafkd"]), tmp_path)
    for up in ups:
        up["discriminator"].zero_()  # says 1/2 of everything
    for variant in ("full", "no-correlation"):
        setup = small_setup("dafkd", variant=variant, **SHORT["dafkd"])
        server, _ = fed(setup, tmp_path)
        setup.method.aggregate(server, iter(ups))
        models[variant] = server.model
    torch.testing.assert_close(models["full"], models["no-correlation"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_in_the_private_variant_no_discriminator_leaves_a_client(run_small: RunSmall) -> None:
    setup = small_setup("dafkd", private=True, **SHORT["dafkd"])
    assert sorted(setup.method.wire(setup.task).up) == ["generator", "model", "predictions"]
    result = run_small("dafkd", **POOL, **SHORT["dafkd"], private=True)
    assert result.summary["dropped"] == 0
    assert not torch.equal(weights(result), weights(run_small("dafkd", **POOL, variant="no-distill")))


def test_private_targets_are_the_correlation_weighted_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = small_setup("dafkd", private=True, **SHORT["dafkd"])
    server, ups = fed(setup, tmp_path)
    g = torch.Generator().manual_seed(1)
    n, c = ups[0]["predictions"].shape
    alphas = torch.rand(len(ups), n, generator=g)
    soft = torch.randn(len(ups), n, c, generator=g).softmax(2)
    for up, alpha, p in zip(ups, alphas, soft, strict=True):
        up.message["predictions"] = alpha.unsqueeze(1) * p
    seen = targets_of(monkeypatch, "dafkd")
    setup.method.aggregate(server, iter(ups))
    expected = (alphas.unsqueeze(2) * soft).sum(0) / alphas.sum(0).unsqueeze(1)
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-6)


def test_logits_may_be_averaged_and_matched_at_a_temperature() -> None:
    """The softmax of the weighted mean logits over T, and T² KL: by NumPy."""
    g = np.random.default_rng(0)
    said, weight, student = g.normal(size=(3, 5, 4)), g.dirichlet(np.ones(3), 5).T, g.normal(size=(5, 4))
    answers = [Outputs(torch.from_numpy(k), torch.zeros(5, 0)) for k in said]

    def softmax(z: Any) -> Any:
        return np.exp(z) / np.exp(z).sum(-1, keepdims=True)

    mean = (weight[:, :, None] * said).sum(0)
    p, q = softmax(mean / 20), softmax(student / 20)
    ours = stage.mean_logits(answers, torch.from_numpy(weight))
    np.testing.assert_allclose(ours.numpy(), mean)
    loss = stage.match_probabilities(torch.from_numpy(p), 20.0)
    batch = Batch(torch.zeros(0), torch.zeros(0), torch.arange(5))
    found = loss(batch, Outputs(torch.from_numpy(student), torch.zeros(5, 0)))
    assert float(found) == pytest.approx(400 * (p * np.log(p / q)).sum(1).mean())


@pytest.mark.slow
def test_dafkd_can_match_logits(run_small: RunSmall) -> None:
    by_logits = run_small("dafkd", **POOL, **SHORT["dafkd"], logit_T=20.0)
    assert not torch.equal(weights(by_logits), weights(run_small("dafkd", **POOL, **SHORT["dafkd"])))
    with pytest.raises(fedstill.SettingError, match="private"):
        run_small("dafkd", private=True, logit_T=20.0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["no-sharing", "full"])
def test_generated_samples_leave_no_trace_in_a_clients_statistics(run_small: RunSmall, variant: str) -> None:
    """BatchNorm counts one batch a step; without sharing, the classifier trains as in FedAvg, bit for bit."""
    settings = {"model": "resnet8", "model_options": {"norm": "batch", "width": 4}, "rounds": 1, "participation": 0.1}
    plain = run_small("fedavg", **settings).model.state_dict()
    ours = run_small("dafkd", variant=variant, **settings).model.state_dict()
    counts = [name for name in plain if name.endswith("num_batches_tracked")]
    assert counts
    assert all(torch.equal(plain[name], ours[name]) for name in counts)
    assert all(torch.equal(plain[name], ours[name]) for name in plain) == (variant == "no-sharing")


def test_a_variant_may_be_written_as_a_number() -> None:
    assert registry.make("fedhyb", {"variant": 1}) == registry.make("fedhyb", {"variant": "1"})


def test_a_client_that_leaves_its_predictions_out_has_no_say(tmp_path: Path) -> None:
    setup = small_setup("dafkd", private=True, **SHORT["dafkd"])
    _, ups = fed(setup, tmp_path)
    models = []
    for silent in ([0], [0, 1, 2]):
        server, _ = fed(setup, tmp_path)
        told = [
            Uplink(u.client, u.samples, {k: v for k, v in u.message.items() if k != "predictions"})
            if u.client in silent
            else u
            for u in ups
        ]
        setup.method.aggregate(server, iter(told))
        models.append(server.model)
    average = torch.stack([up["model"] for up in ups]).double().mean(0).float()
    torch.testing.assert_close(models[1], average, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(models[0], average, rtol=1e-5, atol=1e-7)


class Gaussian(Generator):
    """Draws from N(-1, 1), as constant images."""

    def draw(self, count: int, noise: torch.Generator, y: Tensor | None = None) -> Tensor:
        value = -1 + torch.randn(count, 1, 1, 1, generator=noise)
        nothing = sum(p.sum() for p in self.net.params)
        return value.expand(-1, 1, 4, 4) + 0 * nothing


@dataclass(frozen=True)
class KnownDensity(DaFKD):
    """DaFKD whose generator has a density that is known."""

    def generator(self, task: Task) -> Generator:
        plain = super().generator(task)
        return Gaussian(task, plain.role, plain.purpose, plain.make, plain.z_dim)


class MeanPixel(fedstill.Classifier):
    """A trunk that shows the one number there is in a constant image."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.feature_dim = torch.nn.Linear(1, 2), 1

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1).mean(1, keepdim=True)


def test_trained_discriminators_approach_the_ratio_of_densities(tmp_path: Path) -> None:
    """Theorem 1 on two clients with Gaussians: D_k(x) -> p_k(x) / (p_k(x) + p(x)), p the generator's density."""
    rng, means, n = np.random.default_rng(0), (1.0, 0.0), 4000
    clients = []
    for mean in means:
        value = rng.normal(mean, 1, (n, 1, 1, 1)).astype(np.float32)
        clients.append((np.tile(value, (1, 1, 4, 4)), np.arange(n) % 2))
    fedstill.run(
        KnownDensity(variant="no-distill", z_dim=2),
        data=fedstill.from_clients(clients, test_fraction=0),
        model=MeanPixel(),
        rounds=1, epochs=4, batch_size=200, lr=1.0, participation=1.0, engine="inline", out=tmp_path / "run",
    )  # fmt: skip
    x = torch.linspace(-3, 3, 13)
    for k, mean in enumerate(means):
        state = RunDirectory.open(tmp_path / "run", lock=False).client_store.latest(k)
        assert state is not None
        weight, bias = state["discriminator"]
        own, made = (torch.exp(-((x - m) ** 2) / 2) for m in (mean, -1.0))
        torch.testing.assert_close((weight * x + bias).sigmoid(), own / (own + made), atol=0.04, rtol=0)


def test_fedhyb_self_distillation_against_numpy() -> None:
    g = torch.Generator().manual_seed(0)
    teacher, student = torch.randn(5, 4, generator=g), torch.randn(5, 4, generator=g)
    y = torch.tensor([0, 1, 2, 3, 0])
    t, s = teacher.double().numpy(), student.double().numpy()
    p = np.exp(t) / np.exp(t).sum(1, keepdims=True)
    log_q = s - np.log(np.exp(s).sum(1, keepdims=True))
    each = (p * (np.log(p) - log_q)).sum(1)
    ce = -log_q[np.arange(5), y.numpy()]
    assert float(FedHyb(variant="1").weighted(teacher, student, y)) == pytest.approx(each.mean(), rel=1e-5)
    beta = 1 / (1 + np.exp(ce.mean()))
    assert float(FedHyb().weighted(teacher, student, y)) == pytest.approx(beta * each.mean(), rel=1e-5)
    by_sample = (each / (1 + np.exp(ce))).mean()
    assert float(FedHyb(beta_per_sample=True).weighted(teacher, student, y)) == pytest.approx(by_sample, rel=1e-5)
    student.requires_grad_()
    loss = FedHyb().weighted(teacher, student, y)
    (grad,) = torch.autograd.grad(loss, student)
    q = np.exp(log_q)
    np.testing.assert_allclose(grad.numpy(), beta * (q - p) / 5, rtol=1e-4, atol=1e-7)  # beta gets no gradient


def test_label_weights_and_diversity_against_loops() -> None:
    counts = torch.tensor([[3.0, 0.0, 1.0], [1.0, 0.0, 4.0]])
    found = label_weights(counts)
    torch.testing.assert_close(found, torch.tensor([[0.75, 0.5, 0.2], [0.25, 0.5, 0.8]]))
    z, x = torch.rand(4, 3), torch.rand(4, 2, 2)
    total = 0.0
    for i in range(4):
        for j in range(4):
            total += float(((z[i] - z[j]) ** 2).mean()) * float((x[i] - x[j]).abs().mean())
    assert float(diversity(z, x)) == pytest.approx(np.exp(-total / 16), rel=1e-5)


def test_generators_have_the_published_sizes() -> None:
    def count(net: torch.nn.Module) -> int:
        return sum(p.numel() for p in net.parameters())

    assert count(ConditionalGenerator((3, 32, 32), 10)) == 682_499
    assert count(ShrinkingGenerator((1, 28, 28))) == 328_764
    assert round(count(TransposedGenerator((3, 32, 32))) / 1e6, 2) == 1.07
    for net, shape in ((ShrinkingGenerator((1, 28, 28)), (1, 28, 28)), (TransposedGenerator((3, 32, 32)), (3, 32, 32))):
        made = net(torch.randn(4, 100))
        assert made.shape == (4, *shape)
        assert 0 <= made.min() <= made.max() <= 1


@pytest.mark.slow
def test_a_client_side_and_a_server_side_combine(run_small: RunSmall) -> None:
    alone = run_small("fedgkd", **POOL, buffer=2, gamma=1.0)
    both = run_small("fedgkd+feddf", **POOL, buffer=2, gamma=1.0, server_steps=0)
    assert torch.equal(weights(alone), weights(both))
    taught = run_small("fedhkd+dafkd", **POOL, **SHORT["dafkd"])
    assert taught.summary["dropped"] == 0


@pytest.mark.slow
def test_generated_samples_for_fedhyb_come_from_dafkd(run_small: RunSmall) -> None:
    result = run_small("dafkd+fedhyb", pool=0, source="generated", **SHORT["dafkd"])
    assert result.summary["dropped"] == 0
    with pytest.raises(fedstill.SettingError, match=r"dafkd\+fedhyb"):
        run_small("fedhyb", source="generated")


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        ("feddf+fedprox", "client side"),
        ("feddistill+feddf", "do not send any"),
        ("fedavg+t2", "unknown"),
    ],
)
def test_a_pair_that_cannot_work_says_why(run_small: RunSmall, pair: str, reason: str) -> None:
    with pytest.raises(fedstill.SettingError, match=reason):
        run_small(pair, **POOL)


def test_settings_that_two_joined_methods_share_are_told_apart_by_id() -> None:
    made = registry.make("dafkd+fedhyb", {"dafkd.server_lr": 0.5, "fedhyb.server_lr": 0.25})
    assert isinstance(made, FedHyb)
    assert isinstance(made.inner, DaFKD)
    assert (made.inner.server_lr, made.server_lr) == (0.5, 0.25)
    with pytest.raises(fedstill.SettingError, match="unknown setting"):
        registry.make("dafkd+fedhyb", {"server_lr": 0.5})


def test_ccvr_pools_to_the_covariance_of_all_samples() -> None:
    g = torch.Generator().manual_seed(0)
    shares = [torch.randn(n, 3, generator=g, dtype=torch.float64) + k for k, n in enumerate((5, 1, 9))]
    ups = []
    for k, x in enumerate(shares):
        covariance = torch.cov(x.T) if len(x) > 1 else torch.zeros(3, 3, dtype=torch.float64)
        message = {
            "counts": torch.tensor([float(len(x))], dtype=torch.float64),
            "means": x.mean(0, keepdim=True),
            "covariances": covariance.unsqueeze(0),
        }
        ups.append(Uplink(k, len(x), message))
    n, mean, covariance = pooled(iter(ups))
    everything = torch.cat(shares).numpy()
    assert n.tolist() == [15]
    np.testing.assert_allclose(mean[0].numpy(), everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(covariance[0].numpy(), np.cov(everything.T), rtol=1e-10)


@pytest.mark.slow
def test_ccvr_changes_the_classifier_alone_and_only_at_the_end(run_small: RunSmall) -> None:
    plain, calibrated = run_small("fedavg", lr=0.2), run_small("fedavg+ccvr", lr=0.2)
    assert numbers(plain) == numbers(calibrated)
    before, after = plain.model.state_dict(), calibrated.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias"}
    assert calibrated.summary["also"]["after the last exchange"]["final_loss"] < plain.records[-1]["loss"]
    twice = run_small("fedavg+ccvr", lr=0.2, engine="process", workers=2)
    assert torch.equal(weights(twice), weights(calibrated))


def test_creff_matches_gradients_and_retrains_a_classifier() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(5, 3)
    method = CReFF(features=8, match_steps=150, match_lr=1.0, retrain_epochs=200, retrain_lr=0.5)
    centres = 3 * torch.eye(3, 5)
    real = []
    for c in range(3):
        loss = F.cross_entropy(head(centres[c] + 0.1 * torch.randn(50, 5)), torch.full((50,), c))
        real.append(flat(torch.autograd.grad(loss, list(head.parameters()))))
    start = torch.randn(3, 8, 5)

    def distance(features: torch.Tensor) -> float:
        total = 0.0
        for c in range(3):
            loss = F.cross_entropy(head(features[c]), torch.full((8,), c))
            found = torch.autograd.grad(loss, list(head.parameters()))
            for a, b in zip(found, unflat(real[c], found), strict=True):
                rows = zip(a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), strict=True)
                total += sum(float(1 - u @ v / (u.norm() * v.norm())) for u, v in rows)
        return total

    learnt = method.match(head, start, torch.stack(real), [0, 1, 2])
    assert distance(learnt) < 0.2 * distance(start)
    torch.manual_seed(1)
    fresh = torch.nn.Linear(5, 3)
    method.retrain(fresh, learnt, torch.Generator().manual_seed(0))
    assert (fresh(centres).argmax(1) == torch.arange(3)).all()


def test_creff_evaluates_the_re_trained_classifier_on_the_averaged_body(run_small: RunSmall) -> None:
    plain, result = run_small("fedavg"), run_small("creff", **SHORT["creff"])
    before, after = plain.model.state_dict(), result.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias"}
    assert result.summary["also"]["before re-training"]["final_accuracy"] == plain.summary["final_accuracy"]
