"""How a model does on the global test set and on every client's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.building.groups import Group
from fedstill.core.arrays import IntArray
from fedstill.data.federation import Federation
from fedstill.data.held_out import HeldOut
from fedstill.engine.base import Engine, LocalTest
from fedstill.engine.worker import Score, Source
from fedstill.metrics import scores
from fedstill.metrics.confusion import confusion_matrix
from fedstill.metrics.fairness import Fairness, fairness, fairness_of_counts
from fedstill.metrics.records import Scores
from fedstill.metrics.scores import Metric, Outcomes, Table
from fedstill.train.evaluate import evaluation_bounds

_NOTHING = {"loss": torch.zeros(0), "predicted": torch.zeros(0, dtype=torch.int64)}


@dataclass(frozen=True)
class Evaluation:
    """How one model does on the global test set and on every client's own."""

    accuracy: float
    loss: float
    per_class: list[float]
    confusion: IntArray  # true classes by predicted ones, on the global test set
    fair: Fairness
    metrics: Table  # beyond accuracy
    untested: tuple[int, ...] = ()  # clients with tests of whom nothing was heard
    validation: Scores = field(default_factory=Scores)  # val_accuracy, val_amp …, where samples are held out

    def record(self) -> Scores:
        """The scores as a round's record has them."""
        fair = self.fair
        record: Scores = {
            "accuracy": self.accuracy,
            "loss": self.loss,
            "amp": fair.amp,
            "fm": fair.fm,
            "wlp": fair.wlp,
            "per_class": list(self.per_class),
            "metrics": dict(self.metrics.values),
        }
        if reasons := self._missing() | self.metrics.reasons:
            record["unmeasured"] = reasons
        return record | self.validation

    def _missing(self) -> dict[str, str]:
        """Why numbers are missing that every record has a place for."""
        tested = int((~np.isnan(self.fair.local)).sum())
        return {
            **({} if self.confusion.any() else {"accuracy": "there is no global test set"}),
            **({} if tested else {"amp": "no client has test samples"}),
            **({"fm": "only one client has test samples"} if tested == 1 else {}),
        }


def evaluate(
    engine: Engine,
    federation: Federation,
    model: Tensor,
    metrics: Sequence[Metric] = (),
    named: Sequence[str] = (),
    *,
    ask: bool = True,
) -> Evaluation:
    """Score a model on all test data there are; unless clients elsewhere may not be asked for their results.

    `metrics` are functions of probabilities; `named` are all that the settings name, of which clients elsewhere may
    send counts.
    """
    test, classes = federation.dataset.test, len(federation.dataset.classes)
    loss, on_test = _outcomes(engine, model, "test", test.y.numpy(), metrics, classes)
    predicted = on_test.predicted
    confusion = confusion_matrix(on_test.labels, predicted, classes)
    table = scores.on_one_set(on_test, classes, metrics)
    hits, counts = confusion.diagonal().tolist(), confusion.sum(1).tolist()
    # Where clients are tested on samples of the global test set, that was done; BatchNorm by the batch has seen them in
    # the batches of that set.
    untested: tuple[int, ...] = ()
    if federation.test_source == "test":
        own: Outcomes | None = on_test.take(federation.test_index)
    elif (found := engine.local_tests({"model": model}) if ask else {}) is not None:
        own, (fair, untested) = None, _fairness_of_those_tested(found, federation.test_sizes)
        table |= _metrics_of_those_tested(found, named)
    else:
        labels = federation.test_split.y.numpy()[federation.test_index]
        _, own = _outcomes(engine, model, "local", labels, metrics, classes)
    if own is not None:
        fair = fairness(own.predicted == own.labels, federation.test_offsets)
        table |= scores.over_clients(own, federation.test_offsets, classes, metrics)
    validation = Scores()
    if federation.validation is not None and ask:
        validation, on_validation = _validate(engine, federation, federation.validation, model, metrics, named)
        table |= on_validation
    return Evaluation(
        accuracy=_share(sum(hits), sum(counts)),
        loss=float(loss.mean(dtype=np.float64)) if len(loss) else math.nan,
        per_class=[_share(h, n) for h, n in zip(hits, counts, strict=True)],
        confusion=confusion,
        fair=fair,
        metrics=table,
        untested=untested,
        validation=validation,
    )


def evaluate_groups(
    engine: Engine, federation: Federation, models: Sequence[tuple[Group, Tensor]], metrics: Sequence[Metric] = ()
) -> tuple[Evaluation, dict[str, Evaluation]]:
    """Score every group's model on the global test set and on the tests of its own clients; all together, and each.

    Of all together, what is measured on one set of samples is the mean over the clients of their group's number.
    """
    test, classes = federation.dataset.test, len(federation.dataset.classes)
    offsets, index = federation.test_offsets, federation.test_index
    labels = (test if federation.test_source == "test" else federation.test_split).y.numpy()[index]
    predicted = np.zeros(len(index), np.int64)
    likely = np.zeros((len(index), classes)) if metrics else None
    held = federation.validation
    validated = np.zeros(0 if held is None else len(held.index), bool)  # which of the clients' samples were right
    each: dict[str, Evaluation] = {}
    for group, model in models:
        loss, on_test = _outcomes(engine, model, "test", test.y.numpy(), metrics, classes, group.number)
        bounds = [(int(offsets[k]), int(offsets[k + 1])) for k in group.clients]
        places = np.concatenate([np.arange(start, stop) for start, stop in bounds])
        if federation.test_source == "test":
            own = on_test.take(index[places])
        else:
            own = _outcomes(engine, model, "local", labels[places], metrics, classes, group.number, bounds)[1]
        predicted[places] = own.predicted
        if likely is not None:
            likely[places] = own.probabilities
        own_offsets = np.concatenate([[0], np.cumsum([stop - start for start, stop in bounds])])
        table = scores.on_one_set(on_test, classes, metrics) | scores.over_clients(own, own_offsets, classes, metrics)
        found = _evaluation(loss, confusion_matrix(on_test.labels, on_test.predicted, classes), own, own_offsets, table)
        if held is not None:
            validation, on_validation, right = _validate_group(engine, federation, held, group, model, metrics)
            found = replace(found, validation=validation, metrics=table | on_validation)
            for k in group.clients:
                validated[held.offsets[k] : held.offsets[k + 1]] = right[k]
        each[group.name] = found
    weights = [len(group.clients) / federation.clients for group, _ in models]
    evaluations = list(each.values())

    def mean(numbers: Sequence[float]) -> float:
        known = [(weight, number) for weight, number in zip(weights, numbers, strict=True) if not math.isnan(number)]
        return float(np.average([n for _, n in known], weights=[w for w, _ in known])) if known else math.nan

    table = scores.over_clients(everyone := Outcomes(labels, predicted, likely), offsets, classes, metrics)
    first = evaluations[0].metrics
    shared = {name: mean([e.metrics.values[name] for e in evaluations]) for name in first.values}
    validation = Scores()
    if held is not None:
        validation = _validation(
            mean([e.validation["val_accuracy"] for e in evaluations]),
            mean([e.validation["val_loss"] for e in evaluations]),
            fairness(validated, held.offsets),
        )
    whole = Evaluation(
        accuracy=mean([e.accuracy for e in evaluations]),
        loss=mean([e.loss for e in evaluations]),
        per_class=[mean(shares) for shares in zip(*(e.per_class for e in evaluations), strict=True)],
        confusion=np.sum([e.confusion for e in evaluations], axis=0),
        fair=fairness(everyone.predicted == everyone.labels, offsets),
        metrics=Table(shared, first.reasons) | table,
        validation=validation,
    )
    return whole, each


def _validate_group(
    engine: Engine,
    federation: Federation,
    held: HeldOut,
    group: Group,
    model: Tensor,
    metrics: Sequence[Metric],
) -> tuple[Scores, Table, dict[int, NDArray[np.bool_]]]:
    """How a group's model does on what its own clients and the server hold out; which of each client's are right."""
    classes, samples = len(federation.dataset.classes), held.samples
    bounds = [(int(held.offsets[k]), int(held.offsets[k + 1])) for k in group.clients]
    offsets = np.concatenate([[0], np.cumsum([stop - start for start, stop in bounds])])
    bounds.append((len(held.index), len(samples)))
    labels = np.concatenate([federation.dataset.train.y.numpy()[samples[start:stop]] for start, stop in bounds])
    loss, here = _outcomes(engine, model, "validation", labels, metrics, classes, group.number, bounds)
    right = here.predicted == here.labels
    table = Table({f"val_{k}": v for k, v in scores.on_one_set(here, classes, metrics).values.items()})
    mean_loss = float(loss.mean(dtype=np.float64)) if len(loss) else math.nan
    found = _validation(_share(int(right.sum()), len(right)), mean_loss, fairness(right[: offsets[-1]], offsets))
    return found, table, {k: right[a:b] for k, a, b in zip(group.clients.tolist(), offsets, offsets[1:], strict=False)}


def _validation(accuracy: float, loss: float, fair: Fairness) -> Scores:
    return {"val_accuracy": accuracy, "val_loss": loss, "val_amp": fair.amp, "val_fm": fair.fm, "val_wlp": fair.wlp}


def _evaluation(
    loss: NDArray[np.float32], confusion: IntArray, own: Outcomes, offsets: IntArray, table: Table
) -> Evaluation:
    hits, counts = confusion.diagonal().tolist(), confusion.sum(1).tolist()
    return Evaluation(
        accuracy=_share(sum(hits), sum(counts)),
        loss=float(loss.mean(dtype=np.float64)) if len(loss) else math.nan,
        per_class=[_share(h, n) for h, n in zip(hits, counts, strict=True)],
        confusion=confusion,
        fair=fairness(own.predicted == own.labels, offsets),
        metrics=table,
    )


def _validate(
    engine: Engine,
    federation: Federation,
    held: HeldOut,
    model: Tensor,
    metrics: Sequence[Metric],
    named: Sequence[str],
) -> tuple[Scores, Table]:
    """How a model does on the samples that are held out: all of them together, and over the clients."""
    classes, labels = len(federation.dataset.classes), federation.dataset.train.y.numpy()[held.samples]
    loss, here = _outcomes(engine, model, "validation", labels, metrics, classes)
    right, table = here.predicted == here.labels, Table()
    found = engine.local_tests({"model": model}, "validation")
    if found is None:
        fair = fairness(right[: len(held.index)], held.offsets)
        everywhere = _share(int(right.sum()), len(right))
        mean_loss = float(loss.mean(dtype=np.float64)) if len(loss) else math.nan
        table = Table({f"val_{k}": v for k, v in scores.on_one_set(here, classes, metrics).values.items()})
    else:  # sites send counts; the server's own samples are here
        fair, _ = _fairness_of_those_tested(found, held.sizes)
        heard = sum(int(held.sizes[client]) for client in found)
        everywhere = _share(int(right.sum()) + sum(test.hits for test in found.values()), len(right) + heard)
        mean_loss, table = math.nan, Table(reasons={"val_loss": "sites send counts, never losses"})
        pooled = _metrics_of_those_tested(found, named).values
        table.values |= {f"val_{name}": pooled[f"pooled_{name}"] for name in named if f"pooled_{name}" in pooled}
    return _validation(everywhere, mean_loss, fair), table


def tested(engine: Engine, federation: Federation, model: Tensor, region: int) -> tuple[float, IntArray]:
    """Accuracy and confusion of a model, of a region's network, on the global test set."""
    test = federation.dataset.test
    predicted = _score(engine, model, "test", [(0, len(test.y))], region=region)["predicted"]
    confusion = confusion_matrix(test.y.numpy(), predicted.numpy(), len(federation.dataset.classes))
    return _share(int(confusion.trace()), int(confusion.sum())), confusion


def _fairness_of_those_tested(tests: dict[int, LocalTest], counts: IntArray) -> tuple[Fairness, tuple[int, ...]]:
    """Fairness to the clients that answered, and which did not."""
    untested = tuple(k for k in np.flatnonzero(counts).tolist() if k not in tests)
    heard = counts.copy()
    heard[list(untested)] = 0
    hits = [tests[k].hits if k in tests else 0 for k in range(len(counts))]
    return fairness_of_counts(np.array(hits, np.int64), heard), untested


def _metrics_of_those_tested(tests: dict[int, LocalTest], named: Sequence[str]) -> Table:
    """The metrics over the clients that sent counts by class; of functions of probabilities, their own values."""
    counts = {k: test.by_class for k, test in tests.items() if test.by_class is not None}
    table = scores.over_sites(counts, named)
    for name in named:
        if name not in scores.COUNTED:
            short = scores.short_name(name)
            table.reasons[f"pooled_{short}"] = "sites send their own value, never probabilities"
            own = [test.scores[name] for test in tests.values() if name in test.scores]
            if own:
                table.add_each_client(short, np.array(own))
            if len(own) < len(tests):
                table.reasons[f"worst_{short}"] = (
                    f"undefined at, or not sent by, {len(tests) - len(own)} of {len(tests)} sites"
                )
        elif len(counts) < len(tests):
            table.reasons[f"pooled_{name}"] = (
                f"{len(tests) - len(counts)} of {len(tests)} sites send no counts by class (join --allow class-counts)"
            )
    return table


def _outcomes(
    engine: Engine,
    model: Tensor,
    source: Source,
    labels: IntArray,
    metrics: Sequence[Metric],
    classes: int,
    region: int = 0,
    parts: Sequence[tuple[int, int]] | None = None,
) -> tuple[NDArray[np.float32], Outcomes]:
    """The loss of each sample of a source, or of parts of it, and what the model makes of it."""
    found = _score(engine, model, source, parts or [(0, len(labels))], region=region, probabilities=bool(metrics))
    likely = None
    if metrics:
        likely = found["probabilities"].double().numpy() if len(labels) else np.zeros((0, classes))
    return found["loss"].numpy(), Outcomes(labels, found["predicted"].numpy(), likely)


def _score(
    engine: Engine,
    model: Tensor,
    source: Source,
    parts: Sequence[tuple[int, int]],
    *,
    region: int = 0,
    probabilities: bool = False,
) -> dict[str, Tensor]:
    """What is known of every sample of these parts of a source."""
    requests = [
        Score(source, first + start, first + stop, probabilities, region)
        for first, last in parts
        for start, stop in evaluation_bounds(last - first)
    ]
    answers = list(engine.run(requests, {"model": model})) or [_NOTHING]
    return {key: torch.cat([answer[key].cpu() for answer in answers]) for key in answers[0]}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
