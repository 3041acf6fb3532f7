"""Aggregations of regions by label-driven distillation, watched and computed again by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

import fedstill
from fedstill.building.setup import Setup
from fedstill.core import seeds
from fedstill.core.store import Store
from fedstill.core.weights import FlatNet
from fedstill.distill.split import Split
from fedstill.distill.stage import distil
from fedstill.methods import registry, server_side
from fedstill.methods.base import Server
from fedstill.methods.lkd import LKD
from fedstill.models import Classifier
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch, Loss
from fedstill.train.task import LocalTraining, Samples, Task
from support.runs import SMALL
from support.wiretap import Floats, exact, network, setup_of, softmax

CLASSES = 10

RUN: dict[str, Any] = {"fraction": 0.1, "pool": 0.1, "participation": 1.0, "epochs": 2, "rounds": 2, "regions": 3}

SHORT: dict[str, Any] = {"server_epochs": 2, "server_batch": 24, "server_lr": 2e-3}


@dataclass
class Step:
    """One batch of the distillation."""

    ids: Tensor
    logits: Tensor  # the student's
    student: Tensor  # its weights, before the step
    loss: float


@dataclass
class Aggregation:
    """What the server was given, every batch it trained on, and what came of it."""

    method: LKD
    round: int
    old: Tensor
    teachers: list[Tensor]
    average: Tensor
    pool: Split
    result: Tensor
    notes: dict[str, Any]
    steps: list[Step] = field(default_factory=list)


@contextmanager
def watched() -> Iterator[list[Aggregation]]:
    """Every aggregation that takes place meanwhile."""
    aggregations: list[Aggregation] = []
    teach = LKD.teach

    def noting_teach(self: LKD, server: Server, old: Tensor, teachers: Sequence[Tensor]) -> None:
        sent = [teacher.clone() for teacher in teachers]
        start = server.model.clone()
        aggregations.append(Aggregation(self, server.round, old.clone(), sent, start, self.pool(server), start, {}))
        teach(self, server, old, teachers)
        aggregations[-1].result, aggregations[-1].notes = server.model.clone(), dict(server.notes)

    def noting_distil(
        task: Task, start: Tensor, samples: Samples, loss: Loss, training: LocalTraining, order: torch.Generator
    ) -> Tensor:
        def noted(batch: Batch, out: Outputs) -> Tensor:
            value = loss(batch, out)
            student = task.nets.get("distilled").read()
            aggregations[-1].steps.append(Step(batch.ids, out.logits.detach().clone(), student, value.item()))
            return value

        return distil(task, start, samples, noted, training, order)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LKD, "teach", noting_teach)
        patch.setattr(server_side, "distil", noting_distil)
        yield aggregations


@cache
def real_run() -> list[Aggregation]:
    """The two aggregations of three regions."""
    with watched() as aggregations:
        fedstill.run("lkd", **SMALL | RUN | SHORT | {"eval_every": 0, "checkpoint_every": 9})
    return aggregations


@cache
def setup() -> Setup:
    return setup_of("lkd", **RUN)


def server_in(folder: Path, **changed: Any) -> Server:
    """The global server just before the second aggregation of the real run."""
    made = setup_of("lkd", **RUN | changed) if changed else setup()
    server = Server(made.task, made.federation.sizes, Store(folder / "store"), made.pool())
    server.model, server.round = real_run()[1].old, 2
    return server


def met(folder: Path, name: str, models: Sequence[Tensor] = (), **hyper: Any) -> Aggregation:
    """That aggregation again, with other settings and perhaps other models."""
    server, teachers = server_in(folder), models or real_run()[1].teachers  # before anything is watched
    with watched() as aggregations:
        registry.make(name, SHORT | hyper).merge(server, teachers)
    return aggregations[0]


def auc(scores: Floats, y: Tensor) -> Floats:
    """One-vs-rest ROC AUC of each class; 1/2 where a class has no positives or no negatives."""
    found = np.full(scores.shape[1], 0.5)
    for c in range(scores.shape[1]):
        positive = (y == c).numpy()
        if positive.any() and not positive.all():
            found[c] = roc_auc_score(positive, scores[:, c])
    return found


def reliability(aucs: Sequence[Floats], sharpness: float) -> Floats:
    """Eq. (7), (8): exp(Tw AUC_r^c) over the sum of the same over r."""
    beta = np.zeros((len(aucs), len(aucs[0])))
    for r, own in enumerate(aucs):
        for c in range(len(own)):
            beta[r, c] = math.exp(sharpness * own[c]) / sum(math.exp(sharpness * other[c]) for other in aucs)
    return beta


@dataclass
class ByHand:
    """Eq. (3), (4), (9) for one aggregation, with means over the batch and a factor T²."""

    aggregation: Aggregation

    def __post_init__(self) -> None:
        pool = self.aggregation.pool
        self.x, self.y = pool.samples.x(pool.train), pool.samples.y[pool.train]
        self.checked_x, self.checked_y = pool.samples.x(pool.check), pool.samples.y[pool.check]
        self.teachers = [exact(network(teacher), self.x)[0] for teacher in self.aggregation.teachers]
        self.old = exact(network(self.aggregation.old), self.x)[0]

    @cached_property
    def beta(self) -> Floats:
        return reliability([self.auc(network(t)) for t in self.aggregation.teachers], self.aggregation.method.Tw)

    def auc(self, net: Classifier) -> Floats:
        return auc(softmax(exact(net, self.checked_x)[0]), self.checked_y)

    def beta_old(self, student: Classifier) -> Floats:
        """Eq. (8): the old model against the student as it is now."""
        both = [self.auc(network(self.aggregation.old)), self.auc(student)]
        return np.asarray(reliability(both, self.aggregation.method.Tw)[0])

    def coefficients(self) -> tuple[float, float, float]:
        """lambda1, lambda2 and lambda3 by Eq. (11), (12), solved for a given lambda3."""
        method, teachers = self.aggregation.method, len(self.teachers)
        if not method.update:
            return 1 - method.lambda3, 0.0, method.lambda3
        lambda1 = (1 - method.lambda3) / ((teachers + 1) / teachers)
        return lambda1, lambda1 / teachers, method.lambda3

    def loss(self, student: Tensor, ids: Tensor, beta_old: Floats) -> Tensor:
        """Eq. (9) of a batch, given the student's logits."""
        lambda1, lambda2, lambda3 = self.coefficients()
        T, n, places = self.aggregation.method.T, len(ids), ids.tolist()
        labelled = sum(bool(self.aggregation.pool.labelled[place]) for place in places)
        total = torch.zeros((), dtype=torch.float64)
        for logits, place in zip(student.double(), places, strict=True):
            log_q = (logits / T).log_softmax(0)
            for said, beta in zip(self.teachers, self.beta, strict=True):
                total = total + lambda1 * weighted_kl(said[place], beta, log_q, T) / n
            total = total + lambda2 * weighted_kl(self.old[place], beta_old, log_q, T) / n
            if self.aggregation.pool.labelled[place]:
                total = total - lambda3 * logits.log_softmax(0)[self.y[place]] / labelled
        return total

    def batches(self) -> list[list[Tensor]]:
        """The samples of each step, epoch by epoch."""
        order = seeds.torch_rng(0, "server: label-driven distillation", self.aggregation.round)
        method = self.aggregation.method
        return [
            list(torch.randperm(len(self.y), generator=order).split(method.server_batch))
            for _ in range(method.server_epochs)
        ]

    def distilled(self) -> Classifier:
        """The student after all epochs of Adam."""
        method = self.aggregation.method
        net = network(self.aggregation.average if method.student_init == "avg" else self.aggregation.old)
        adam = torch.optim.Adam(net.parameters(), lr=method.server_lr)
        for epoch in self.batches():
            beta_old = self.beta_old(net)
            for ids in epoch:
                adam.zero_grad()
                self.loss(net(self.x[ids]), ids, beta_old).backward()
                adam.step()
        return net

    def assert_steps(self) -> None:
        """Every batch held these samples, the student said this of them, and the loss was this."""
        steps = iter(self.aggregation.steps)
        for epoch in self.batches():
            for number, (ids, step) in enumerate(zip(epoch, steps, strict=False)):
                student = network(step.student)
                if number == 0:
                    beta_old = self.beta_old(student)
                assert torch.equal(step.ids, ids)
                np.testing.assert_allclose(step.logits, exact(student, self.x[ids])[0], rtol=1e-3, atol=1e-4)
                assert step.loss == pytest.approx(float(self.loss(step.logits, ids, beta_old)), rel=1e-4, abs=1e-6)
        assert next(steps, None) is None
        assert len(self.aggregation.steps) == sum(map(len, self.batches()))

    def assert_result(self) -> None:
        """The replayed student is the server's: Adam makes whole steps of rounding, but only in single weights."""
        start = self.aggregation.average if self.aggregation.method.student_init == "avg" else self.aggregation.old
        expected = FlatNet(self.distilled()).read()
        assert (self.aggregation.result - expected).norm() <= 0.01 * (expected - start).norm()


def weighted_kl(teacher: Floats, beta: Floats, log_q: Tensor, T: float) -> Tensor:
    """beta^c T² KL(p || q) of one sample, c the class that the teacher itself predicts."""
    p = torch.from_numpy(softmax(teacher / T))
    return float(beta[teacher.argmax()]) * T**2 * (p * (p.log() - log_q)).sum()
