"""How a model does on the global test set and on every client's own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedstill.data.federation import Federation
from fedstill.data.partition import IntArray
from fedstill.engine.base import Engine
from fedstill.engine.worker import Score, Source
from fedstill.metrics.confusion import confusion_matrix
from fedstill.metrics.fairness import Fairness, fairness, fairness_of_counts
from fedstill.metrics.records import Scores
from fedstill.train.evaluate import evaluation_bounds

_NOTHING = {
    "loss": torch.zeros(0),
    "predicted": torch.zeros(0, dtype=torch.int64),
    "right": torch.zeros(0, dtype=torch.int8),
}


@dataclass(frozen=True)
class Evaluation:
    """How one model does on the global test set and on every client's own."""

    accuracy: float
    loss: float
    per_class: list[float]
    confusion: IntArray  # true classes by predicted ones, on the global test set
    fair: Fairness
    untested: tuple[int, ...] = ()  # clients with tests of whom nothing was heard

    def record(self) -> Scores:
        """The scores as a round's record has them."""
        fair = self.fair
        return {
            "accuracy": self.accuracy,
            "loss": self.loss,
            "amp": fair.amp,
            "fm": fair.fm,
            "wlp": fair.wlp,
            "per_class": list(self.per_class),
        }


def evaluate(engine: Engine, federation: Federation, model: Tensor) -> Evaluation:
    """Score a model on all test data there are."""
    test = federation.dataset.test
    scores = _score(engine, model, "test", len(test.y))
    loss, predicted = scores["loss"].numpy(), scores["predicted"].numpy()
    confusion = confusion_matrix(test.y.numpy(), predicted, len(federation.dataset.classes))
    hits, counts = confusion.diagonal().tolist(), confusion.sum(1).tolist()
    # Where clients are tested on samples of the global test set, that was done; BatchNorm by the batch has seen them in
    # the batches of that set.
    untested: tuple[int, ...] = ()
    if federation.test_source == "test":
        fair = fairness((predicted == test.y.numpy())[federation.test_index], federation.test_offsets)
    elif (found := engine.local_hits({"model": model})) is not None:
        fair, untested = _fair_to_those_heard(found, federation.test_sizes)
    else:
        right = _score(engine, model, "local", int(federation.test_offsets[-1]))["right"].numpy()
        fair = fairness(right > 0, federation.test_offsets)
    return Evaluation(
        accuracy=_share(sum(hits), sum(counts)),
        loss=float(loss.mean(dtype=np.float64)) if len(loss) else math.nan,
        per_class=[_share(h, n) for h, n in zip(hits, counts, strict=True)],
        confusion=confusion,
        fair=fair,
        untested=untested,
    )


def tested(engine: Engine, federation: Federation, model: Tensor) -> tuple[float, IntArray]:
    """Accuracy and confusion of a model on the global test set."""
    test = federation.dataset.test
    predicted = _score(engine, model, "test", len(test.y))["predicted"]
    confusion = confusion_matrix(test.y.numpy(), predicted.numpy(), len(federation.dataset.classes))
    return _share(int(confusion.trace()), int(confusion.sum())), confusion


def _fair_to_those_heard(hits: dict[int, int], counts: IntArray) -> tuple[Fairness, tuple[int, ...]]:
    """Fairness to the clients that answered, and which did not."""
    untested = tuple(k for k in np.flatnonzero(counts).tolist() if k not in hits)
    heard = counts.copy()
    heard[list(untested)] = 0
    return fairness_of_counts(np.array([hits.get(k, 0) for k in range(len(counts))], np.int64), heard), untested


def _score(engine: Engine, model: Tensor, source: Source, n: int) -> dict[str, Tensor]:
    """What is known of every sample of a source."""
    requests = [Score(source, start, stop) for start, stop in evaluation_bounds(n)]
    answers = list(engine.run(requests, {"model": model})) or [_NOTHING]
    return {key: torch.cat([answer[key].cpu() for answer in answers]) for key in answers[0]}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
