"""How much work a round is, counted rather than timed: a change that makes any of it more is seen here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import SMALL
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import fedstill
from fedstill.core.tree import nbytes
from fedstill.core.weights import FlatNet
from fedstill.engine.base import Inline
from fedstill.methods import registry
from fedstill.metrics.records import RoundRecord
from fedstill.models.base import Stacked
from fedstill.running.loop import Listener

EPOCHS, CLIENTS = 3, 3
SETTINGS: dict[str, Any] = SMALL | {"clients": CLIENTS, "participation": 1.0, "rounds": 4, "epochs": EPOCHS}
SETTINGS |= {"eval_every": 0, "model": "mlp", "model_options": {"hidden": [8]}, "regions": 1}
QUICK: dict[str, dict[str, Any]] = {
    "fedkf": {"width": 2, "z_dim": 3},
    "feddf": {"steps": 2},
    "dafkd": {"z_dim": 3, "batches": 1, "sample_batch": 8, "server_epochs": 1},
    "fedavg+krum": {"byzantine": 0},
    "fedavg+multi-krum": {"byzantine": 0},
    "fedavg+bulyan": {"byzantine": 0},
    "fedftg": {"z_dim": 3, "iterations": 1, "student_steps": 1, "server_batch": 4},
}
HELD = 479  # samples of the three clients; 384 where the server has a pool, of 120
# Of the third round: samples that a network sees in training, of clients and on the server; samples that a frozen one
# is asked about; copies of all weights; bytes down and up; calls of layers, of generators and discriminators too. A
# teacher that does not change in a round is asked once a sample, not once an epoch.
ROUND = {
    "fedavg": (EPOCHS * HELD, 0, 6, 51_504, 372),
    "fedprox": (EPOCHS * HELD, 0, 6, 51_504, 372),
    "fedgkd": (EPOCHS * HELD, HELD, 9, 77_256, 408),
    "fedgkd-vote": (EPOCHS * 384, 2 * 384 + 120, 13, 77_316, 384),
    "fedgkd-plus": (EPOCHS * HELD, HELD, 9, 252_072, 714),
    "fedkf": (3 * EPOCHS * HELD, 3 * HELD, 15, 77_256, 3_348),
    "moon": (EPOCHS * HELD, 2 * HELD, 12, 168_048, 777),
    "feddistill": (EPOCHS * HELD, 0, 6, 2_640, 372),
    "feddistill-plus": (EPOCHS * HELD, 0, 6, 54_144, 372),
    "qffl": (EPOCHS * HELD, HELD, 9, 51_528, 408),
    "fedmgda-plus": (EPOCHS * HELD, 0, 6, 51_504, 372),
    "scaffold": (EPOCHS * HELD, 0, 6, 103_008, 372),
    "fednova": (EPOCHS * HELD, 0, 6, 51_528, 372),
    "feddyn": (EPOCHS * HELD, 0, 6, 51_504, 372),
    "feddf": (EPOCHS * 384 + 2 * 120, 3 * 120, 11, 51_504, 344),
    "dafkd": (4_319, 3 * 8, 30, 15_921_636, 2_913),
    "fedhyb": (3_576, 3 * 120, 11, 51_504, 968),
    "fedgen": (EPOCHS * HELD, 0, 14, 220_692, 1_652),
    "fedftg": (EPOCHS * HELD + 28, 3 * 4, 13, 51_624, 468),
    "fedbe": (3_552, 14 * 120, 22, 51_504, 504),
    "fedmd": (6 * 384, 3 * 120, 12, 80_304, 336),
    "fedhkd": (EPOCHS * HELD, HELD, 6, 56_064, 501),
    "creff": (EPOCHS * HELD, HELD, 17, 63_504, 10_408),
    "lkd": (EPOCHS * 384 + 10 * 120, 14 * 120, 32, 51_504, 464),
    "mtkd": (EPOCHS * 384 + 10 * 120, 3 * 120, 11, 51_504, 376),
    "f2l": (EPOCHS * 384 + 10 * 120, 14 * 120, 32, 51_504, 464),
    "fedavg+fltrust": (EPOCHS * (384 + 120), 0, 8, 51_504, 408),  # the server trains as a client does
}


class Counting(Listener):
    """Counts by round."""

    def __init__(self) -> None:
        self.rounds = [Counter[str]()]

    def add(self, what: str, count: int = 1) -> None:
        self.rounds[-1][what] += count

    def round_done(self, record: RoundRecord) -> None:
        self.rounds.append(Counter())


@contextmanager
def counted() -> Iterator[Counting]:
    seen = Counting()

    def count_layer(layer: nn.Module, _: Any) -> None:
        if next(layer.children(), None) is None:
            seen.add("layers")

    features, load, read, run = Stacked.features, FlatNet.load, FlatNet.read, Inline.run

    def count_features(self: Stacked, x: Tensor) -> Tensor:
        seen.add("trained on" if torch.is_grad_enabled() else "asked", len(x))
        return features(self, x)

    def count_load(self: FlatNet, vector: Tensor) -> None:
        seen.add("copies")
        load(self, vector)

    def count_read(self: FlatNet) -> Tensor:
        seen.add("copies")
        return read(self)

    def count_run(self: Inline, requests: Any, down: Any) -> Any:
        seen.add("messages", len(requests))
        for answer in run(self, requests, down):
            seen.add("bytes", nbytes(down) + nbytes(answer.get("message", {})))
            yield answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stacked, "features", count_features)
        patch.setattr(FlatNet, "load", count_load)
        patch.setattr(FlatNet, "read", count_read)
        patch.setattr(Inline, "run", count_run)
        with register_module_forward_pre_hook(count_layer):
            yield seen


def work(method: str) -> dict[str, int]:
    """What the third round takes."""
    needs = registry.make(method).needs()
    settings = SETTINGS | QUICK.get(method, {})
    settings |= {"pool": 0.2} if needs.server_labels or needs.proxy_data else {}
    settings |= {"proxy": "pool"} if needs.proxy_data else {}
    with counted() as seen:
        fedstill.run(method, **settings, listener=seen)
    return dict(seen.rounds[2])


@pytest.mark.parametrize("method", [*registry.names(), *(f"fedavg+{name}" for name in registry.modifiers())])
def test_a_round_takes_no_more_work_than_it_did(method: str) -> None:
    found = work(method)
    assert found["messages"] == CLIENTS
    counts = [found.get(what, 0) for what in ("trained on", "asked", "copies", "bytes", "layers")]
    assert counts == list(ROUND.get(method, ROUND[method.partition("+")[0]])), "most modifiers add none of it"


def test_a_teacher_is_asked_once_a_sample_however_many_epochs_follow() -> None:
    def asked(epochs: int) -> int:
        with counted() as seen:
            fedstill.run("fedgkd", **SETTINGS | {"epochs": epochs}, listener=seen)
        return seen.rounds[2]["asked"]

    assert asked(1) == asked(4) == HELD


def test_clients_that_are_tested_on_the_global_test_set_take_no_further_pass_over_it() -> None:
    data = fedstill.load("fashion-mini")
    federation = fedstill.federate(data, clients=4, fraction=0.1, alpha=0.5, local_test="matched")
    settings: dict[str, Any] = {"model": "mlp", "model_options": {"hidden": [8]}, "epochs": 1, "engine": "inline"}
    with counted() as seen:
        result = fedstill.run("fedavg", data=federation, participation=1.0, rounds=1, **settings, listener=seen)
    local = int(federation.test_offsets[-1])  # each client measures the model it trained
    before = 2  # the first samples, when the run is prepared
    assert seen.rounds[0]["asked"] == before + local + len(data.test.y)
    with torch.no_grad():
        right = (result.model(data.normalise(data.test.x)).argmax(1) == data.test.y).double()
    accuracies = [float(right[federation.test(k)].mean()) for k in range(4)]
    assert result.records[-1]["amp"] == pytest.approx(float(right[federation.test_index].mean()))
    assert result.records[-1]["wlp"] == pytest.approx(min(accuracies))
