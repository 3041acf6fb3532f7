"""How each group's model does on the global test set and on its own clients' tests, where networks differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedstill.building.groups import Group
from fedstill.core.arrays import IntArray
from fedstill.data.federation import Federation
from fedstill.data.held_out import HeldOut
from fedstill.engine.base import Engine, LocalTest
from fedstill.metrics import scores
from fedstill.metrics.confusion import confusion_matrix
from fedstill.metrics.fairness import Fairness, fairness
from fedstill.metrics.records import Scores
from fedstill.metrics.scores import Metric, Outcomes, Table
from fedstill.running.evaluation import (
    Evaluation,
    fairness_of_those_tested,
    metrics_of_those_tested,
    outcomes_of,
    share,
    validation_scores,
)

Models = Sequence[tuple[Group, Tensor]]


def evaluate_groups(
    engine: Engine, federation: Federation, models: Models, metrics: Sequence[Metric] = (), named: Sequence[str] = ()
) -> tuple[Evaluation, dict[str, Evaluation]]:
    """Score every group's model on the global test set and on the tests of its own clients; all together, and each.

    Of all together, what is measured on one set of samples is the mean over the clients of their group's number.
    """
    test, classes = federation.dataset.test, len(federation.dataset.classes)
    labels = test.y.numpy()
    on_test = {g.name: outcomes_of(engine, m, "test", labels, metrics, classes, g.number) for g, m in models}
    tests = _client_tests(
        engine, federation, models, {name: found for name, (_, found) in on_test.items()}, metrics, named
    )
    validations, validation = _validate(engine, federation, models, metrics, named)
    each: dict[str, Evaluation] = {}
    for group, _ in models:
        loss, found = on_test[group.name]
        confusion = confusion_matrix(found.labels, found.predicted, classes)
        hits, counts = confusion.diagonal().tolist(), confusion.sum(1).tolist()
        fair, untested, table = tests.of(group.clients)
        on_validation, validation_table = validations.get(group.name, (Scores(), Table()))
        each[group.name] = Evaluation(
            accuracy=share(sum(hits), sum(counts)),
            loss=float(loss.mean(dtype=np.float64)) if len(loss) else math.nan,
            per_class=[share(h, n) for h, n in zip(hits, counts, strict=True)],
            confusion=confusion,
            fair=fair,
            metrics=scores.on_one_set(found, classes, metrics) | table | validation_table,
            untested=untested,
            validation=on_validation,
        )
    evaluations = list(each.values())
    weights = [len(group.clients) / federation.clients for group, _ in models]
    names = {name: None for found in evaluations for name in found.metrics.values}
    shared = {n: _mean(weights, [found.metrics.values.get(n, math.nan) for found in evaluations]) for n in names}
    fair, untested, table = tests.of(np.arange(federation.clients))
    whole = Evaluation(
        accuracy=_mean(weights, [found.accuracy for found in evaluations]),
        loss=_mean(weights, [found.loss for found in evaluations]),
        per_class=[_mean(weights, shares) for shares in zip(*(found.per_class for found in evaluations), strict=True)],
        confusion=np.sum([found.confusion for found in evaluations], axis=0),
        fair=fair,
        metrics=Table(shared, evaluations[0].metrics.reasons) | table,
        untested=untested,
        validation=validation,
    )
    return whole, each


def _mean(weights: Sequence[float], numbers: Sequence[float]) -> float:
    """Over the clients, of those groups that have a number."""
    known = [(weight, number) for weight, number in zip(weights, numbers, strict=True) if not math.isnan(number)]
    return float(np.average([n for _, n in known], weights=[w for w, _ in known])) if known else math.nan


# --- the clients' own tests -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ScoredHere:
    """Every client's tests under its own group's model."""

    outcomes: Outcomes
    offsets: IntArray  # where each client's begin
    classes: int
    metrics: Sequence[Metric]

    def of(self, clients: IntArray) -> tuple[Fairness, tuple[int, ...], Table]:
        """Of some clients: fairness to them, those of whom nothing was heard, and metrics over them."""
        places, offsets = _places(self.offsets, clients)
        own = self.outcomes.take(places)
        table = scores.over_clients(own, offsets, self.classes, self.metrics)
        return fairness(own.predicted == own.labels, offsets), (), table


@dataclass(frozen=True)
class _ReportedBySites:
    """The same where clients are elsewhere, and report how often the model is right."""

    tests: dict[int, LocalTest]
    counts: IntArray  # of each client's tests
    named: Sequence[str]

    def of(self, clients: IntArray) -> tuple[Fairness, tuple[int, ...], Table]:
        """Of some clients: fairness to them, those of whom nothing was heard, and metrics over them."""
        some = {place: self.tests[k] for place, k in enumerate(clients.tolist()) if k in self.tests}
        fair, untested = fairness_of_those_tested(some, self.counts[clients])
        return fair, tuple(int(clients[k]) for k in untested), metrics_of_those_tested(some, self.named)


def _client_tests(
    engine: Engine,
    federation: Federation,
    models: Models,
    on_test: dict[str, Outcomes],
    metrics: Sequence[Metric],
    named: Sequence[str],
) -> _ScoredHere | _ReportedBySites:
    shared, classes = federation.test_source == "test", len(federation.dataset.classes)
    if not shared and (found := engine.local_tests(_broadcasts(models))) is not None:
        return _ReportedBySites(found, federation.test_sizes, named)
    offsets, index = federation.test_offsets, federation.test_index
    labels = (federation.dataset.test if shared else federation.test_split).y.numpy()[index]
    predicted = np.zeros(len(index), np.int64)
    likely = np.zeros((len(index), classes)) if metrics else None
    for group, model in models:
        places, _ = _places(offsets, group.clients)
        if shared:
            own = on_test[group.name].take(index[places])
        else:
            bounds = _bounds(offsets, group.clients)
            own = outcomes_of(engine, model, "local", labels[places], metrics, classes, group.number, bounds)[1]
        predicted[places] = own.predicted
        if likely is not None:
            likely[places] = own.probabilities
    return _ScoredHere(Outcomes(labels, predicted, likely), offsets, classes, metrics)


def _broadcasts(models: Models) -> list[tuple[IntArray | None, dict[str, Tensor]]]:
    return [(group.clients, {"model": model}) for group, model in models]


def _bounds(offsets: IntArray, clients: IntArray) -> list[tuple[int, int]]:
    """Where the samples of some clients begin and end."""
    return [(int(offsets[k]), int(offsets[k + 1])) for k in clients]


def _places(offsets: IntArray, clients: IntArray) -> tuple[IntArray, IntArray]:
    """The samples of some clients, one client after the other, and where each client's begin among them."""
    bounds = _bounds(offsets, clients)
    places = [np.zeros(0, np.int64), *(np.arange(start, stop) for start, stop in bounds)]
    return np.concatenate(places), np.concatenate([[0], np.cumsum([stop - start for start, stop in bounds])])


# --- what is held out for validation ----------------------------------------------------------------------------------


def _validate(
    engine: Engine, federation: Federation, models: Models, metrics: Sequence[Metric], named: Sequence[str]
) -> tuple[dict[str, tuple[Scores, Table]], Scores]:
    """Of each group, how its model does on what its own clients and the server hold out; and over all of them."""
    held = federation.validation
    if held is None:
        return {}, Scores()
    reported = engine.local_tests(_broadcasts(models), "validation")
    right = np.zeros(len(held.index), bool)  # of the clients' samples, where they are scored here
    found = {}
    for group, model in models:
        clients = group.clients if reported is None else group.clients[:0]
        loss, here, places = _held_out(engine, federation, held, group, model, clients, metrics)
        correct = here.predicted == here.labels
        if reported is None:
            right[places] = correct[: len(places)]
            fair = fairness(right[places], _places(held.offsets, clients)[1])
            mean_loss = float(loss.mean(dtype=np.float64)) if len(loss) else math.nan
            values = scores.on_one_set(here, len(federation.dataset.classes), metrics).values
            table = Table({f"val_{name}": value for name, value in values.items()})
            accuracy = share(int(correct.sum()), len(correct))
        else:
            own = _ReportedBySites(reported, held.sizes, named)
            fair, untested, pooled = own.of(group.clients)
            heard = int(held.sizes[np.setdiff1d(group.clients, untested)].sum())
            hits = sum(reported[k].hits for k in group.clients.tolist() if k in reported)
            accuracy = share(int(correct.sum()) + hits, len(correct) + heard)
            known = {n: pooled.values[f"pooled_{n}"] for n in named if f"pooled_{n}" in pooled.values}
            mean_loss = math.nan
            table = Table(
                {f"val_{n}": v for n, v in known.items()}, reasons={"val_loss": "sites send counts, never losses"}
            )
        found[group.name] = validation_scores(accuracy, mean_loss, fair), table
    weights = [len(group.clients) for group, _ in models]
    if reported is None:
        fair = fairness(right, held.offsets)
    else:
        fair, _ = fairness_of_those_tested(reported, held.sizes)
    whole = validation_scores(
        _mean(weights, [each["val_accuracy"] for each, _ in found.values()]),
        _mean(weights, [each["val_loss"] for each, _ in found.values()]),
        fair,
    )
    return found, whole


def _held_out(
    engine: Engine,
    federation: Federation,
    held: HeldOut,
    group: Group,
    model: Tensor,
    clients: IntArray,
    metrics: Sequence[Metric],
) -> tuple[NDArray[np.float32], Outcomes, IntArray]:
    """What a group's model makes of what some clients and the server hold out; and where the clients' samples are."""
    samples = held.samples
    bounds = [*_bounds(held.offsets, clients), (len(held.index), len(samples))]
    labels = np.concatenate([federation.dataset.train.y.numpy()[samples[start:stop]] for start, stop in bounds])
    classes = len(federation.dataset.classes)
    loss, here = outcomes_of(engine, model, "validation", labels, metrics, classes, group.number, bounds)
    return loss, here, _places(held.offsets, clients)[0]
