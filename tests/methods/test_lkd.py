"""Label-driven distillation: the switch, which samples serve what, what it costs."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedstill
from fedstill.distill.split import Split
from fedstill.distill.stage import as_samples
from fedstill.methods.base import Server
from fedstill.methods.lkd import LKD
from fedstill.models import Classifier
from support.lkd import (
    CLASSES,
    RUN,
    SHORT,
    Aggregation,
    ByHand,
    met,
    real_run,
    reliability,
    server_in,
    setup,
    watched,
)
from support.runs import SMALL
from support.wiretap import Floats, network, normalised, taped


def gaps(aggregation: Aggregation) -> Floats:
    """max_r beta_r^c - min_r beta_r^c of each class."""
    beta = reliability([np.asarray(row) for row in aggregation.notes["reliability"]], aggregation.method.Tw)
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
    aggregation = met(tmp_path, "lkd", student_init=init, server_lr=1e-12)
    assert torch.equal(aggregation.steps[0].student, getattr(aggregation, nearer))
    torch.testing.assert_close(aggregation.result, getattr(aggregation, nearer), rtol=0, atol=1e-8)
    assert not torch.equal(aggregation.average, aggregation.old)


@pytest.mark.parametrize("hyper", [{}, {"labelled_frac": 0.5, "val_split": 0.4}, {"update": False}])
def test_each_teacher_is_asked_once_and_the_student_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hyper: dict[str, Any]
) -> None:
    """Samples that go through each network in a aggregation; a network is known by the weights of its head."""
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
        aggregation = met(tmp_path, "lkd", **hyper)

    def known_as(vector: Tensor) -> tuple[float, ...]:
        return tuple(network(vector).head.state_dict()["bias"].tolist())

    pool, epochs = aggregation.pool, SHORT["server_epochs"]
    for teacher in aggregation.teachers:
        assert asked.pop(known_as(teacher)) == len(pool.samples)
    assert taught == epochs * len(pool.train)
    if aggregation.method.update:
        assert asked.pop(known_as(aggregation.old)) == len(pool.samples)
        starts = aggregation.steps[:: len(aggregation.steps) // epochs]
        assert [asked.pop(known_as(step.student)) for step in starts] == [len(pool.check)] * epochs
    assert not asked


def test_without_regions_clients_are_the_teachers() -> None:
    """Fig. 2(a), flat LKD: the clients of a round teach their average, and the model that was sent to them too."""
    with watched() as aggregations:
        result, tape = taped("lkd", **RUN | SHORT | {"regions": 1, "participation": 0.5})
    assert [aggregation.round for aggregation in aggregations] == [1, 2]
    assert all("server" in record and "episode" not in record for record in result.records)
    for aggregation, crossed in zip(aggregations, tape, strict=True):
        assert len(aggregation.teachers) == len(crossed.up) == 3
        for teacher, message in zip(aggregation.teachers, crossed.up.values(), strict=True):
            assert torch.equal(teacher, message["model"])
        assert torch.equal(aggregation.old, crossed.down["model"])
        sizes = np.array(list(crossed.samples.values()), float)
        vectors = np.array([teacher.double().numpy() for teacher in aggregation.teachers])
        np.testing.assert_allclose(aggregation.average.numpy(), sizes @ vectors / sizes.sum(), rtol=1e-5, atol=1e-7)
    assert torch.equal(tape[1].down["model"], aggregations[0].result)
    by_hand = ByHand(aggregations[1])
    by_hand.assert_steps()
    by_hand.assert_result()
