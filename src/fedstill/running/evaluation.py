"""How a model does on the global test set and on every client's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    loss, on_test = outcomes_of(engine, model, "test", test.y.numpy(), metrics, classes)
    predicted = on_test.predicted
    confusion = confusion_matrix(on_test.labels, predicted, classes)
    table = scores.on_one_set(on_test, classes, metrics)
    hits, counts = confusion.diagonal().tolist(), confusion.sum(1).tolist()
    # Where clients are tested on samples of the global test set, that was done; BatchNorm by the batch has seen them in
    # the batches of that set.
    untested: tuple[int, ...] = ()
    if federation.test_source == "test":
        own: Outcomes | None = on_test.take(federation.test_index)
    elif (found := engine.local_tests([(None, {"model": model})]) if ask else {}) is not None:
        own, (fair, untested) = None, fairness_of_those_tested(found, federation.test_sizes)
        table |= metrics_of_those_tested(found, named)
    else:
        labels = federation.test_split.y.numpy()[federation.test_index]
        _, own = outcomes_of(engine, model, "local", labels, metrics, classes)
    if own is not None:
        fair = fairness(own.predicted == own.labels, federation.test_offsets)
        table |= scores.over_clients(own, federation.test_offsets, classes, metrics)
    validation = Scores()
    if federation.validation is not None and ask:
        validation, on_validation = _validate(engine, federation, federation.validation, model, metrics, named)
        table |= on_validation
    return Evaluation(
        accuracy=share(sum(hits), sum(counts)),
        loss=float(loss.mean(dtype=np.float64)) if len(loss) else math.nan,
        per_class=[share(h, n) for h, n in zip(hits, counts, strict=True)],
        confusion=confusion,
        fair=fair,
        metrics=table,
        untested=untested,
        validation=validation,
    )


def validation_scores(accuracy: float, loss: float, fair: Fairness) -> Scores:
    return {"val_accuracy": accuracy, "val_loss": loss, "val_amp": fair.amp, "val_fm": fair.fm, "val_wlp": fair.wlp}


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
    loss, here = outcomes_of(engine, model, "validation", labels, metrics, classes)
    right, table = here.predicted == here.labels, Table()
    found = engine.local_tests([(None, {"model": model})], "validation")
    if found is None:
        fair = fairness(right[: len(held.index)], held.offsets)
        everywhere = share(int(right.sum()), len(right))
        mean_loss = float(loss.mean(dtype=np.float64)) if len(loss) else math.nan
        table = Table({f"val_{k}": v for k, v in scores.on_one_set(here, classes, metrics).values.items()})
    else:  # sites send counts; the server's own samples are here
        fair, _ = fairness_of_those_tested(found, held.sizes)
        heard = sum(int(held.sizes[client]) for client in found)
        everywhere = share(int(right.sum()) + sum(test.hits for test in found.values()), len(right) + heard)
        mean_loss, table = math.nan, Table(reasons={"val_loss": "sites send counts, never losses"})
        pooled = metrics_of_those_tested(found, named).values
        table.values |= {f"val_{name}": pooled[f"pooled_{name}"] for name in named if f"pooled_{name}" in pooled}
    return validation_scores(everywhere, mean_loss, fair), table


def tested(engine: Engine, federation: Federation, model: Tensor, region: int) -> tuple[float, IntArray]:
    """Accuracy and confusion of a model, of a region's network, on the global test set."""
    test = federation.dataset.test
    predicted = _score(engine, model, "test", [(0, len(test.y))], region=region)["predicted"]
    confusion = confusion_matrix(test.y.numpy(), predicted.numpy(), len(federation.dataset.classes))
    return share(int(confusion.trace()), int(confusion.sum())), confusion


def fairness_of_those_tested(tests: dict[int, LocalTest], counts: IntArray) -> tuple[Fairness, tuple[int, ...]]:
    """Fairness to the clients that answered, and which did not."""
    untested = tuple(k for k in np.flatnonzero(counts).tolist() if k not in tests)
    heard = counts.copy()
    heard[list(untested)] = 0
    hits = [tests[k].hits if k in tests else 0 for k in range(len(counts))]
    return fairness_of_counts(np.array(hits, np.int64), heard), untested


def metrics_of_those_tested(tests: dict[int, LocalTest], named: Sequence[str]) -> Table:
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


def outcomes_of(
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


def share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
