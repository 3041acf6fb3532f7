"""Server-side methods in runs: the same bits, composition, state, what is refused."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstill
from fedstill.distill import stage
from fedstill.methods import registry
from fedstill.methods.base import Part, fault
from fedstill.methods.dafkd import DaFKD
from fedstill.methods.fedhyb import FedHyb
from fedstill.train.evaluate import Outputs, predict
from fedstill.train.task import Samples, Task
from support.distilling import POOL, SHORT, fed, small_setup
from support.runs import SMALL, RunSmall, numbers, weights


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


def test_a_variant_may_be_written_as_a_number() -> None:
    assert registry.make("fedhyb", {"variant": 1}) == registry.make("fedhyb", {"variant": "1"})


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
