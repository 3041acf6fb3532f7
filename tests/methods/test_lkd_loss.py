"""Label-driven distillation: reliability, the joint loss and its theorems, by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import fedstill
from fedstill.distill.reliability import among_teachers, class_auc
from fedstill.methods import registry
from fedstill.methods.lkd import LKD
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch
from support.lkd import (
    CLASSES,
    ByHand,
    auc,
    met,
    real_run,
    reliability,
    server_in,
    setup,
)
from support.wiretap import Floats, network, softmax


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


@pytest.mark.slow
def test_every_batch_and_the_student_of_real_aggregations() -> None:
    """Eq. (3), (4), (8), (9) in both aggregations of a run; the second's old model is what the first came to."""
    first, second = real_run()
    assert torch.equal(first.old, setup().task.initial)
    assert torch.equal(second.old, first.result)
    for aggregation in (first, second):
        by_hand = ByHand(aggregation)
        assert len(by_hand.teachers) == 3
        by_hand.assert_steps()
        by_hand.assert_result()
        measured = [by_hand.auc(network(teacher)) for teacher in aggregation.teachers]
        np.testing.assert_allclose(aggregation.notes["reliability"], measured, atol=2e-3)


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
    torch.testing.assert_close(*(aggregation.result for aggregation in alike), rtol=1e-4, atol=1e-5)


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
    aggregation = met(tmp_path, "lkd", update=False, lambda3=0.0, server_epochs=0)
    by_hand, method, ids = ByHand(aggregation), aggregation.method, torch.arange(4)
    answers = [Outputs(torch.from_numpy(said).float(), torch.empty(0)) for said in by_hand.teachers]
    loss = method.joint_loss(
        server_in(tmp_path), aggregation.pool, answers, torch.from_numpy(by_hand.beta), aggregation.old
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
