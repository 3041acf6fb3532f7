"""LKD, MTKD and F2L against loops written from the equations of Nguyen et al., 2022.

The teachers come from a real run. Only random draws are shared with the library: which pool samples serve what, and the
order of the batches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.metrics import roc_auc_score
from torch import Tensor

import fedstill
from fedstill.building.setup import Setup
from fedstill.core import seeds
from fedstill.core.store import Store
from fedstill.core.weights import FlatNet
from fedstill.distill.reliability import among_teachers, class_auc
from fedstill.distill.split import Split
from fedstill.distill.stage import as_samples, distil
from fedstill.methods import registry, server_side
from fedstill.methods.base import Server
from fedstill.methods.lkd import LKD
from fedstill.models import Classifier
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch, Loss
from fedstill.train.task import LocalTraining, Samples, Task
from support.runs import SMALL
from support.wiretap import Floats, exact, network, normalised, setup_of, softmax, taped

CLASSES = 10
RUN: dict[str, Any] = {"pool": 0.1, "participation": 1.0, "epochs": 2, "rounds": 2, "regions": 3}
SHORT: dict[str, Any] = {"server_epochs": 2, "server_batch": 24, "server_lr": 2e-3}


# --- what happens when the regions meet -----------------------------------------------------------------------------


@dataclass
class Step:
    """One batch of the distillation."""

    ids: Tensor
    logits: Tensor  # the student's
    student: Tensor  # its weights, before the step
    loss: float


@dataclass
class Meeting:
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
def watched() -> Iterator[list[Meeting]]:
    """Every meeting that takes place meanwhile."""
    meetings: list[Meeting] = []
    teach = LKD.teach

    def noting_teach(self: LKD, server: Server, old: Tensor, teachers: Sequence[Tensor]) -> None:
        sent = [teacher.clone() for teacher in teachers]
        start = server.model.clone()
        meetings.append(Meeting(self, server.round, old.clone(), sent, start, self.pool(server), start, {}))
        teach(self, server, old, teachers)
        meetings[-1].result, meetings[-1].notes = server.model.clone(), dict(server.notes)

    def noting_distil(
        task: Task, start: Tensor, samples: Samples, loss: Loss, training: LocalTraining, order: torch.Generator
    ) -> Tensor:
        def noted(batch: Batch, out: Outputs) -> Tensor:
            value = loss(batch, out)
            student = task.nets.get("distilled").read()
            meetings[-1].steps.append(Step(batch.ids, out.logits.detach().clone(), student, value.item()))
            return value

        return distil(task, start, samples, noted, training, order)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LKD, "teach", noting_teach)
        patch.setattr(server_side, "distil", noting_distil)
        yield meetings


@cache
def real_run() -> list[Meeting]:
    """The two meetings of three regions."""
    with watched() as meetings:
        fedstill.run("lkd", **SMALL | RUN | SHORT | {"eval_every": 0, "checkpoint_every": 9})
    return meetings


@cache
def setup() -> Setup:
    return setup_of("lkd", **RUN)


def server_in(folder: Path, **changed: Any) -> Server:
    """The global server just before the second meeting of the real run."""
    made = setup_of("lkd", **RUN | changed) if changed else setup()
    server = Server(made.task, made.federation.sizes, Store(folder / "store"), made.pool())
    server.model, server.round = real_run()[1].old, 2
    return server


def met(folder: Path, name: str, models: Sequence[Tensor] = (), **hyper: Any) -> Meeting:
    """That meeting again, with other settings and perhaps other models."""
    server, teachers = server_in(folder), models or real_run()[1].teachers  # before anything is watched
    with watched() as meetings:
        registry.make(name, SHORT | hyper).merge(server, teachers)
    return meetings[0]


# --- the same by hand -----------------------------------------------------------------------------------------------


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
    """Eq. (3), (4), (9) for one meeting, with means over the batch and a factor T²."""

    meeting: Meeting

    def __post_init__(self) -> None:
        pool = self.meeting.pool
        self.x, self.y = pool.samples.x(pool.train), pool.samples.y[pool.train]
        self.checked_x, self.checked_y = pool.samples.x(pool.check), pool.samples.y[pool.check]
        self.teachers = [exact(network(teacher), self.x)[0] for teacher in self.meeting.teachers]
        self.old = exact(network(self.meeting.old), self.x)[0]

    @cached_property
    def beta(self) -> Floats:
        return reliability([self.auc(network(t)) for t in self.meeting.teachers], self.meeting.method.Tw)

    def auc(self, net: Classifier) -> Floats:
        return auc(softmax(exact(net, self.checked_x)[0]), self.checked_y)

    def beta_old(self, student: Classifier) -> Floats:
        """Eq. (8): the old model against the student as it is now."""
        both = [self.auc(network(self.meeting.old)), self.auc(student)]
        return np.asarray(reliability(both, self.meeting.method.Tw)[0])

    def coefficients(self) -> tuple[float, float, float]:
        """lambda1, lambda2 and lambda3 by Eq. (11), (12), solved for a given lambda3."""
        method, teachers = self.meeting.method, len(self.teachers)
        if not method.update:
            return 1 - method.lambda3, 0.0, method.lambda3
        lambda1 = (1 - method.lambda3) / ((teachers + 1) / teachers)
        return lambda1, lambda1 / teachers, method.lambda3

    def loss(self, student: Tensor, ids: Tensor, beta_old: Floats) -> Tensor:
        """Eq. (9) of a batch, given the student's logits."""
        lambda1, lambda2, lambda3 = self.coefficients()
        T, n, places = self.meeting.method.T, len(ids), ids.tolist()
        labelled = sum(bool(self.meeting.pool.labelled[place]) for place in places)
        total = torch.zeros((), dtype=torch.float64)
        for logits, place in zip(student.double(), places, strict=True):
            log_q = (logits / T).log_softmax(0)
            for said, beta in zip(self.teachers, self.beta, strict=True):
                total = total + lambda1 * weighted_kl(said[place], beta, log_q, T) / n
            total = total + lambda2 * weighted_kl(self.old[place], beta_old, log_q, T) / n
            if self.meeting.pool.labelled[place]:
                total = total - lambda3 * logits.log_softmax(0)[self.y[place]] / labelled
        return total

    def batches(self) -> list[list[Tensor]]:
        """The samples of each step, epoch by epoch."""
        order = seeds.torch_rng(0, "server: label-driven distillation", self.meeting.round)
        method = self.meeting.method
        return [
            list(torch.randperm(len(self.y), generator=order).split(method.server_batch))
            for _ in range(method.server_epochs)
        ]

    def distilled(self) -> Classifier:
        """The student after all epochs of Adam."""
        method = self.meeting.method
        net = network(self.meeting.average if method.student_init == "avg" else self.meeting.old)
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
        steps = iter(self.meeting.steps)
        for epoch in self.batches():
            for number, (ids, step) in enumerate(zip(epoch, steps, strict=False)):
                student = network(step.student)
                if number == 0:
                    beta_old = self.beta_old(student)
                assert torch.equal(step.ids, ids)
                np.testing.assert_allclose(step.logits, exact(student, self.x[ids])[0], rtol=1e-3, atol=1e-4)
                assert step.loss == pytest.approx(float(self.loss(step.logits, ids, beta_old)), rel=1e-4, abs=1e-6)
        assert next(steps, None) is None
        assert len(self.meeting.steps) == sum(map(len, self.batches()))

    def assert_result(self) -> None:
        """The replayed student is the server's: Adam makes whole steps of rounding, but only in single weights."""
        start = self.meeting.average if self.meeting.method.student_init == "avg" else self.meeting.old
        expected = FlatNet(self.distilled()).read()
        assert (self.meeting.result - expected).norm() <= 0.01 * (expected - start).norm()


def weighted_kl(teacher: Floats, beta: Floats, log_q: Tensor, T: float) -> Tensor:
    """beta^c T² KL(p || q) of one sample, c the class that the teacher itself predicts."""
    p = torch.from_numpy(softmax(teacher / T))
    return float(beta[teacher.argmax()]) * T**2 * (p * (p.log() - log_q)).sum()


# --- reliability ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_auc_is_scikit_learns_with_ties_and_absent_classes(seed: int) -> None:
    """One-vs-rest; ties count half; 1/2 for a class without positives, or without negatives."""
    rng = np.random.default_rng(seed)
    logits, y = 2 * rng.normal(size=(60, 6)), rng.integers(0, 5, 60)  # nothing is of class 5
    logits[rng.integers(0, 60, 30)] = logits[0]  # many samples with the very same scores
    labels = torch.from_numpy(y)
    found = class_auc(torch.from_numpy(logits), labels)
    np.testing.assert_allclose(found, auc(softmax(logits), labels), rtol=1e-12)
    assert found[5] == 0.5
    assert class_auc(torch.from_numpy(logits), torch.full((60,), 2)).tolist() == [0.5] * 6


def test_auc_counts_pairs() -> None:
    """The chance that a sample of the class scores above one of another."""
    rng = np.random.default_rng(9)
    logits, y = rng.integers(0, 3, (20, 1)) * np.ones((1, 3)) * [1, 0, 0], torch.arange(20) % 3
    p = softmax(logits)
    for c, found in enumerate(class_auc(torch.from_numpy(logits), y).tolist()):
        pairs = [(p[i, c], p[j, c]) for i in range(20) if y[i] == c for j in range(20) if y[j] != c]
        assert found == pytest.approx(sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs))


def test_reliability_is_shared_among_teachers_and_a_larger_Tw_sharpens() -> None:
    """Eq. (7)."""
    aucs = torch.rand(4, 7, generator=torch.Generator().manual_seed(0)).double()
    leads = []
    for Tw in (0.0, 1.0, 4.0, 20.0):
        beta = among_teachers(aucs, Tw)
        np.testing.assert_allclose(beta, reliability(list(aucs.numpy()), Tw), rtol=1e-12)
        np.testing.assert_allclose(beta.sum(0), np.ones(7), rtol=1e-12)
        assert torch.equal(beta.argmax(0), aucs.argmax(0)) or Tw == 0
        leads.append(float((beta.max(0).values - beta.min(0).values).min()))
    assert leads[0] == 0
    assert leads == sorted(set(leads))


# --- the joint loss -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_batch_and_the_student_of_real_meetings() -> None:
    """Eq. (3), (4), (8), (9) in both meetings of a run; the second's old model is what the first came to."""
    first, second = real_run()
    assert torch.equal(first.old, setup().task.initial)
    assert torch.equal(second.old, first.result)
    for meeting in (first, second):
        by_hand = ByHand(meeting)
        assert len(by_hand.teachers) == 3
        by_hand.assert_steps()
        by_hand.assert_result()
        measured = [by_hand.auc(network(teacher)) for teacher in meeting.teachers]
        np.testing.assert_allclose(meeting.notes["reliability"], measured, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("lkd", {"update": False, "lambda3": 0.3}),
        ("lkd", {"lambda3": 0.5, "labelled_frac": 0.5, "val_split": 0.3}),
        ("lkd", {"Tw": 12.0, "T": 1.0, "student_init": "old", "server_frac": 0.6, "labelled_frac": 0.2}),
        ("f2l", {"epsilon": 0.0, "lambda3": 0.0}),
        ("mtkd", {"update": True}),
        ("mtkd", {}),
    ],
)
def test_every_batch_and_the_student_with_other_settings(tmp_path: Path, name: str, hyper: dict[str, Any]) -> None:
    by_hand = ByHand(met(tmp_path, name, **hyper))
    by_hand.assert_steps()
    by_hand.assert_result()


def test_equal_weights_are_mtkd(tmp_path: Path) -> None:
    """Eq. (1) with the mean over the teachers: LKD with Tw = 0, and LKD where all are equally reliable."""
    plain = met(tmp_path, "mtkd", lambda3=0.2)
    assert torch.equal(plain.result, met(tmp_path, "lkd", Tw=0.0, update=False, lambda3=0.2).result)
    assert not torch.equal(plain.result, met(tmp_path, "lkd", update=False, lambda3=0.2).result)
    np.testing.assert_allclose(ByHand(plain).beta, np.full((3, CLASSES), 1 / 3))
    with pytest.raises(fedstill.SettingError, match="Tw"):
        registry.make("mtkd", {"Tw": 1.0})
    same = [real_run()[1].teachers[0]] * 2
    alike = (met(tmp_path, name, same, update=False, student_init="old") for name in ("lkd", "mtkd"))
    torch.testing.assert_close(*(meeting.result for meeting in alike), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("teachers", [1, 3, 10])
@pytest.mark.parametrize("lambda3", [0.0, 0.01, 0.5, 1.0])
def test_the_coefficients_follow_from_lambda3(teachers: int, lambda3: float) -> None:
    """Eq. (11), (12): lambda2 = lambda1 / R and lambda3 = 1 - (R + 1) / R lambda1; without Eq. (4) 0, 1 - lambda1."""
    lambda1, lambda2 = LKD(lambda3=lambda3).coefficients(teachers)
    assert lambda2 == pytest.approx(lambda1 / teachers)
    assert lambda3 == pytest.approx(1 - (teachers + 1) / teachers * lambda1)
    lambda1, lambda2 = LKD(lambda3=lambda3, update=False).coefficients(teachers)
    assert (lambda1, lambda2) == pytest.approx((1 - lambda3, 0))
    assert LKD(lambda3=0.01).coefficients(3) == pytest.approx((0.7425, 0.2475))


def test_the_best_student_is_the_teachers_mixture_by_reliability(tmp_path: Path) -> None:
    """Eq. (27) is least, for each sample, at q = sum_r beta_r p_r / sum_r beta_r, beta_r by teacher r's prediction."""
    meeting = met(tmp_path, "lkd", update=False, lambda3=0.0, server_epochs=0)
    by_hand, method, ids = ByHand(meeting), meeting.method, torch.arange(4)
    answers = [Outputs(torch.from_numpy(said).float(), torch.empty(0)) for said in by_hand.teachers]
    loss = method.joint_loss(
        server_in(tmp_path), meeting.pool, answers, torch.from_numpy(by_hand.beta), meeting.old
    )  # every sample is taught, in the pool's order
    free = torch.zeros(4, CLASSES, requires_grad=True)
    descent = torch.optim.LBFGS([free], max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        descent.zero_grad()
        value = loss(Batch(by_hand.x[ids], by_hand.y[ids], ids), Outputs(free, torch.empty(0)))
        value.backward()
        return value

    descent.step(closure)
    for place, found in enumerate((free.detach() / method.T).softmax(1)):
        weights = [beta[said[place].argmax()] for said, beta in zip(by_hand.teachers, by_hand.beta, strict=True)]
        p = [softmax(said[place] / method.T) for said in by_hand.teachers]
        np.testing.assert_allclose(found, np.average(p, axis=0, weights=weights), atol=2e-3)


# --- Lemma 1, Theorems 1 and 2 --------------------------------------------------------------------------------------

MEANS, VARIANCES = np.array([0.1, 0.5, 1.2]), np.array([0.3, 0.7, 1.5])
SHARES = among_teachers(torch.tensor([[0.9], [0.7], [0.4]]).double(), 1.0)[:, 0].numpy()  # e^tau_r / sum e^tau


def best_gaussian(means: Floats) -> Floats:
    """The mean and variance that minimise sum_r beta_r KL(N_r || N_g), numerically (Eq. 39, 40)."""

    def divergence(at: Floats) -> float:
        mean, variance = at[0], math.exp(at[1])
        each = (means - mean) ** 2 / variance + VARIANCES / variance - 1 - np.log(VARIANCES / variance)
        return float((SHARES * each).sum() / 2)

    found = minimize(divergence, [0.0, 0.0], tol=1e-12).x
    return np.array([found[0], math.exp(found[1])])


def test_lemma_1_holds_for_the_mean_and_for_the_variance_of_teachers_with_one_mean() -> None:
    """Lemma 1 (Eq. 49, 50): mean and variance of the best student are the teachers', weighted by e^tau_r.

    That is so for the mean. For the variance the proof minimises only the second part of Eq. (41), without the
    squares of mu_r - mu_g. The true minimiser has their weighted mean too, the spread of the teachers' means; the
    stated one is right if they coincide.
    """
    mean, variance = best_gaussian(MEANS)
    assert mean == pytest.approx(SHARES @ MEANS, abs=1e-4)
    assert variance == pytest.approx(SHARES @ VARIANCES + SHARES @ (MEANS - SHARES @ MEANS) ** 2, abs=1e-4)
    assert variance > SHARES @ VARIANCES + 0.1
    together = best_gaussian(np.full(3, 0.4))
    np.testing.assert_allclose(together, [0.4, SHARES @ VARIANCES], atol=1e-4)


def test_theorem_1_and_what_holds_of_theorem_2() -> None:
    """Reliability that falls where variance grows makes sum_r beta_r sigma_r² no larger than the plain mean (Eq. 31).

    The same holds of weighted distances, sum_r beta_r |mu_r - mu| (Eq. 34). Theorem 2 is of |sum_r beta_r mu_r - mu|
    and does not follow: errors of opposite signs cancel best with equal weights.
    """
    assert VARIANCES.mean() >= SHARES @ VARIANCES
    assert MEANS.mean() >= SHARES @ MEANS  # distances from mu = 0
    opposite, beta = np.array([0.99, -1.0]), reliability([np.array([0.9]), np.array([0.7])], 1.0)[:, 0]
    assert abs(opposite).mean() >= beta @ abs(opposite)
    assert abs(opposite.mean()) < abs(beta @ opposite)


# --- the switch -----------------------------------------------------------------------------------------------------


def gaps(meeting: Meeting) -> Floats:
    """max_r beta_r^c - min_r beta_r^c of each class."""
    beta = reliability([np.asarray(row) for row in meeting.notes["reliability"]], meeting.method.Tw)
    return np.array([max(column) - min(column) for column in beta.T])


@pytest.mark.parametrize("reduce", ["max", "mean", "l2"])
def test_the_switch_has_two_sides(tmp_path: Path, reduce: str) -> None:
    """Algorithm 1: LKD if ‖max_r beta_r - min_r beta_r‖ >= epsilon, else w = 1/R sum_r w_r."""
    first = met(tmp_path, "f2l", reduce=reduce, epsilon=9.0)
    found = first.notes["disagreement"]
    by_hand = gaps(first)
    expected = {"max": max(by_hand), "mean": sum(by_hand) / CLASSES, "l2": math.sqrt(sum(by_hand**2))}[reduce]
    assert found == pytest.approx(expected)
    assert found > 0
    for epsilon in (found, found - 1e-9):
        distilled = met(tmp_path, "f2l", reduce=reduce, epsilon=epsilon)
        assert (distilled.notes["stage"], len(distilled.steps)) == ("lkd", 6)
        assert torch.equal(distilled.result, met(tmp_path, "lkd").result)
    averaged = met(tmp_path, "f2l", reduce=reduce, epsilon=found + 1e-9)
    assert (averaged.notes["stage"], averaged.steps) == ("average", [])
    mean = sum(teacher.double() for teacher in averaged.teachers) / len(averaged.teachers)
    assert torch.equal(averaged.result, torch.as_tensor(mean).float())


def test_lkd_comes_back_when_a_region_joins_that_disagrees() -> None:
    """Sec. 3.1: two regions with alike clients are averaged; a third, whose training goes wrong, changes that."""
    regions: list[dict[str, Any]] = [{"name": "a", "clients": [0, 1]}, {"name": "b", "clients": [2, 3]}]
    regions.append({"name": "new", "clients": [4, 5], "joins": 2, "lr": 1.0})
    settings = SMALL | RUN | {"pool": 0.2, "partition": "iid", "region": regions, "server_epochs": 1}
    stages = {}
    for epsilon in (0.25, 1.0):
        run = fedstill.run("f2l", **settings, epsilon=epsilon)
        episodes = [record["episode"] for record in run.records]
        stages[epsilon] = [episode["stage"] for episode in episodes]
        quiet, loud = (episode["disagreement"] for episode in episodes)
        assert quiet < 0.25 < loud < 1
    assert stages == {0.25: ["average", "lkd"], 1.0: ["average", "average"]}


# --- which samples serve what ---------------------------------------------------------------------------------------


def counts(y: Tensor) -> list[int]:
    return torch.bincount(y, minlength=CLASSES).tolist()


def test_the_whole_pool_serves_everything_by_default(tmp_path: Path) -> None:
    pool, index = LKD().pool(server_in(tmp_path)), torch.from_numpy(setup().federation.pool_index)
    everything = torch.arange(len(index))
    train = setup().federation.dataset.train
    torch.testing.assert_close(pool.samples.x(everything), normalised(train.x[index]), rtol=1e-5, atol=1e-5)
    assert torch.equal(pool.samples.y, train.y[index])
    assert torch.equal(pool.train, everything)
    assert torch.equal(pool.check, everything)
    assert pool.labelled.all()


@pytest.mark.parametrize("choice", ["proportional", "balanced"])
@pytest.mark.parametrize("share", [0.5, 0.2])
def test_server_frac_takes_a_share_of_a_long_tailed_pool(tmp_path: Path, choice: Any, share: float) -> None:
    """Of each class its share, at least one; or of all classes alike, as far as they have enough."""
    server = server_in(tmp_path, imbalance_factor=6, fraction=0.3, pool=0.4)
    assert server.pool is not None
    held = counts(server.pool.y)
    assert max(held) > 3 * min(held)
    pool = LKD(server_frac=share, pool_choice=choice).pool(server)
    even = round(share * sum(held) / CLASSES)
    expected = [min(n, even) if choice == "balanced" else max(1, round(share * n)) for n in held]
    assert counts(pool.samples.y) == expected
    again = LKD(server_frac=share, pool_choice=choice).pool(server)
    assert torch.equal(again.samples.x(again.train), pool.samples.x(pool.train)), "the same in every round"


def test_labelled_frac_and_val_split_divide_the_pool(tmp_path: Path) -> None:
    server = server_in(tmp_path)
    assert server.pool is not None
    n = len(server.pool)
    half = LKD(labelled_frac=0.5).pool(server)
    assert torch.equal(half.train, torch.arange(n)), "the unlabelled are taught with too"
    assert torch.equal(half.check, torch.nonzero(half.labelled).flatten()), "only the labelled are checked"
    assert counts(half.samples.y[half.check]) == [round(0.5 * c) for c in counts(server.pool.y)]
    both = LKD(labelled_frac=0.5, val_split=0.25).pool(server)
    assert not set(both.train.tolist()) & set(both.check.tolist())
    assert sorted(both.train.tolist() + both.check.tolist()) == list(range(n))
    assert set(both.check.tolist()) <= set(half.check.tolist()), "kept from the labelled"
    assert int(both.labelled.sum()) + len(both.check) == len(half.check), "what is left of them has its labels"
    expected = [max(1, round(0.25 * c)) for c in counts(half.samples.y[half.check])]
    assert counts(both.samples.y[both.check]) == expected


@pytest.mark.parametrize("hyper", [{"labelled_frac": 0.5}, {"labelled_frac": 0.5, "val_split": 0.4}])
def test_labels_beyond_labelled_frac_are_never_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hyper: dict[str, Any]
) -> None:
    hyper |= {"lambda3": 0.5}
    honest = met(tmp_path, "lkd", **hyper)
    known = torch.zeros(len(honest.pool.samples), dtype=torch.bool)
    known[honest.pool.check] = True
    known[honest.pool.train[honest.pool.labelled]] = True
    original = LKD.pool

    def with_false_labels(self: LKD, server: Server) -> Split:
        pool, everything = original(self, server), torch.arange(len(known))
        labels = torch.where(known, pool.samples.y, (pool.samples.y + 1) % CLASSES)
        return Split(as_samples(pool.samples.x(everything), labels), pool.train, pool.check, pool.labelled)

    monkeypatch.setattr(LKD, "pool", with_false_labels)
    assert 0 < known.sum() < len(known)
    assert torch.equal(met(tmp_path, "lkd", **hyper).result, honest.result)


@pytest.mark.parametrize(("init", "nearer"), [("avg", "average"), ("old", "old")])
def test_student_init_is_where_the_student_starts(tmp_path: Path, init: str, nearer: str) -> None:
    meeting = met(tmp_path, "lkd", student_init=init, server_lr=1e-12)
    assert torch.equal(meeting.steps[0].student, getattr(meeting, nearer))
    torch.testing.assert_close(meeting.result, getattr(meeting, nearer), rtol=0, atol=1e-8)
    assert not torch.equal(meeting.average, meeting.old)


# --- what it costs, and the flat federation -------------------------------------------------------------------------


@pytest.mark.parametrize("hyper", [{}, {"labelled_frac": 0.5, "val_split": 0.4}, {"update": False}])
def test_each_teacher_is_asked_once_and_the_student_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hyper: dict[str, Any]
) -> None:
    """Samples that go through each network in a meeting; a network is known by the weights of its head."""
    asked: Counter[tuple[float, ...]] = Counter()
    taught = 0
    both = Classifier.both

    def counting(self: Classifier, x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal taught
        if self.training:
            taught += len(x)
        else:
            asked[tuple(self.head.state_dict()["bias"].tolist())] += len(x)
        return both(self, x)

    real_run()
    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "both", counting)
        meeting = met(tmp_path, "lkd", **hyper)

    def known_as(vector: Tensor) -> tuple[float, ...]:
        return tuple(network(vector).head.state_dict()["bias"].tolist())

    pool, epochs = meeting.pool, SHORT["server_epochs"]
    for teacher in meeting.teachers:
        assert asked.pop(known_as(teacher)) == len(pool.samples)
    assert taught == epochs * len(pool.train)
    if meeting.method.update:
        assert asked.pop(known_as(meeting.old)) == len(pool.samples)
        starts = meeting.steps[:: len(meeting.steps) // epochs]
        assert [asked.pop(known_as(step.student)) for step in starts] == [len(pool.check)] * epochs
    assert not asked


def test_without_regions_clients_are_the_teachers() -> None:
    """Fig. 2(a), flat LKD: the clients of a round teach their average, and the model that was sent to them too."""
    with watched() as meetings:
        result, tape = taped("lkd", **RUN | SHORT | {"regions": 1, "participation": 0.5})
    assert [meeting.round for meeting in meetings] == [1, 2]
    assert all("server" in record and "episode" not in record for record in result.records)
    for meeting, crossed in zip(meetings, tape, strict=True):
        assert len(meeting.teachers) == len(crossed.up) == 3
        for teacher, message in zip(meeting.teachers, crossed.up.values(), strict=True):
            assert torch.equal(teacher, message["model"])
        assert torch.equal(meeting.old, crossed.down["model"])
        sizes = np.array(list(crossed.samples.values()), float)
        vectors = np.array([teacher.double().numpy() for teacher in meeting.teachers])
        np.testing.assert_allclose(meeting.average.numpy(), sizes @ vectors / sizes.sum(), rtol=1e-5, atol=1e-7)
    assert torch.equal(tape[1].down["model"], meetings[0].result)
    by_hand = ByHand(meetings[1])
    by_hand.assert_steps()
    by_hand.assert_result()
