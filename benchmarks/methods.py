"""What a round costs with each method, against FedAvg's in the same run, and what it would without the caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import fedstill
from benchmarks.work import Work
from fedstill.data.federation import Federation
from fedstill.distill import stage
from fedstill.metrics.records import RoundRecord
from fedstill.running.callbacks import Callback, RunView
from fedstill.train.evaluate import predict
from fedstill.train.task import LocalTraining


@dataclass(frozen=True)
class Case:
    """A method to time."""

    method: str
    settings: dict[str, Any]
    at_most: float | None = None  # times FedAvg's cost
    teacher_epochs: int = 0  # in which teachers predict, where their outputs are not cached; 0: none do

    @property
    def name(self) -> str:
        return " ".join([self.method, *(f"{name}={value}" for name, value in self.settings.items())])


# ResNet-8 at 5 local epochs; every client is active, so that each method has all its state from the second round on.
WORK = Work("ResNet-8, 4 clients x 128 samples, batch 64, 5 epochs", "resnet8", (3, 32, 32), 4, 128, 4, 64, 5)

CASES = (
    Case("fedprox", {}, 1.10),
    Case("scaffold", {}, 1.10),
    Case("feddyn", {}, 1.10),
    Case("fednova", {}),
    Case("qffl", {}),
    Case("fedmgda-plus", {}),
    Case("local", {}),
    Case("fedproto", {}),
    Case("fedtgp", {}),
    Case("fml", {}),
    Case("fedkd", {}),
    Case("lg-fedavg", {}),
    Case("feddistill", {}),
    Case("feddistill-plus", {}),
    Case("fedavg+t1", {}),
    Case("fedavg+compress", {}),
    Case("fedavg+dp", {"noise_multiplier": 1.0}, 1.10),
    Case("fedavg+dp-sgd", {"noise_multiplier": 1.0}),
    Case("fedavg+median", {}),
    Case("fedavg+trimmed-mean", {}),
    Case("fedavg+krum", {"byzantine": 0}),
    Case("fedavg+multi-krum", {"byzantine": 0}),
    Case("fedavg+bulyan", {"byzantine": 0}),
    Case("fedavg+norm-clip", {}),
    Case("fedavg+geomed", {}),
    Case("fedavg+centered-clip", {}),
    Case("fedavg+ccvr", {}),
    Case("fedgkd", {}, 1.10, teacher_epochs=5),
    Case("fedgkd-vote", {"buffer": 5}, 1.40, teacher_epochs=5),
    Case("fedgkd-plus", {}, teacher_epochs=5),
    Case("moon", {}, 1.35, teacher_epochs=5),
    Case("fedhkd", {}),
    Case("fedkf", {"width": 32}),
)

# Methods whose server does most of the work: a short local round shows it. The server has 100 samples.
SERVER_WORK = replace(WORK, name="ResNet-8, 4 clients x 128 samples, batch 64, 1 epoch", epochs=1)
_PROXY = {"proxy": "pool"}
SERVER_CASES = (
    Case("feddf", _PROXY | {"server_steps": 50}, teacher_epochs=50),  # each step sees all 100 samples
    Case("fedbe", _PROXY, teacher_epochs=20),
    Case("lkd", {}, teacher_epochs=10),
    Case("mtkd", {}, teacher_epochs=10),
    Case("f2l", {"regions": 1, "epsilon": 0}, teacher_epochs=10),  # distils, however much the clients agree
    Case("fedhyb", _PROXY),  # one epoch on the server
    Case("dafkd", {"batches": 10}, teacher_epochs=5),
    Case("fedgen", {}),
    Case("fedftg", {"iterations": 2}),
    Case("fedmd", _PROXY),
    Case("fedavg+votes", _PROXY | {"noise_multiplier": 1.0, "queries": 100}),
    Case("fedavg+fltrust", {}),
    Case("creff", {}),
)


@dataclass(frozen=True)
class Cost:
    """Seconds of a round: its own, its clients' together, and its server's without waiting for them."""

    whole: float
    clients: float
    server: float


class Costs(Callback):
    """Of each round, from the records."""

    def __init__(self) -> None:
        self.rounds: list[Cost] = []

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        self.rounds.append(Cost(record["seconds"], record["client_seconds"], record["server_seconds"]))


@contextmanager
def without_caches(epochs: int) -> Iterator[None]:
    """Samples are gathered for every batch, and teachers predict it in every epoch, as the equations read.

    What a method keeps by itself (LKD's old model, VOTE's losses, T1's sum) is kept here too.
    """

    def predict_again(*what: Any) -> Any:
        for _ in range(epochs - 1):
            predict(*what)
        return predict(*what)

    with patch.object(LocalTraining, "drawn", lambda *_: 0), patch.object(stage, "predict", predict_again):
        yield


def with_pool(work: Work) -> Federation:
    """The federation of the work, with samples for the server beside."""
    extra = replace(work, clients=work.clients + 1)
    x, y = extra.data()
    whole = extra.federation(x, y)
    clients = work.clients * work.samples
    return Federation(
        whole.dataset,
        np.arange(clients),
        whole.train_offsets[:-1],
        whole.test_index,
        whole.test_offsets[:-1],
        np.arange(clients, clients + 100),
    )


def cost(case: Case, work: Work, federation: Federation, rounds: int, *, cached: bool = True) -> Cost:
    """The median of a run's last rounds: the first have no teacher yet, and VOTE's buffer fills up."""
    costs, rounds = Costs(), rounds + case.settings.get("buffer", 1)
    with nullcontext() if cached else without_caches(case.teacher_epochs):
        fedstill.run(
            case.method, data=federation, model=work.model, rounds=rounds + 1, participation=work.cohort / work.clients,
            batch_size=work.batch_size, epochs=work.epochs, lr=work.lr, workers=2, eval_every=0, callbacks=[costs],
            **case.settings,
        )  # fmt: skip
    return sorted(costs.rounds[-3:], key=lambda cost: cost.whole)[1]


@dataclass(frozen=True)
class RoundCosts:
    """A method's cost, and FedAvg's beside it."""

    case: Case
    cost: Cost
    without: Cost | None  # the caches
    fedavg: Cost


def round_costs(cases: Sequence[Case], work: Work, *, rounds: int, repeats: int) -> Iterator[RoundCosts]:
    """Each method's round, next to one of FedAvg's: the best of several, taken in turn."""
    torch.set_num_threads(1)
    federation, plain = with_pool(work), Case("fedavg", {})
    for case in cases:
        runs = [(plain, True), (case, True)] + [(case, False)] * (case.teacher_epochs > 1)
        taken = [
            [cost(which, work, federation, rounds, cached=cached) for which, cached in runs] for _ in range(repeats)
        ]
        best = [min(costs, key=lambda cost: cost.whole) for costs in zip(*taken, strict=True)]
        yield RoundCosts(case, best[1], best[2] if len(best) > 2 else None, best[0])
