"""How a trained model does on labelled inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstill.core.errors import DataError
from fedstill.metrics.confusion import IntArray, confusion_matrix
from fedstill.metrics.scores import Metric, Numbers, Outcomes, on_one_set


@dataclass(frozen=True)
class Evaluation:
    """The confusion of classes, and what it and the probabilities come to."""

    classes: tuple[str, ...]
    confusion: IntArray  # true classes by predicted ones
    metrics: dict[str, float]  # beyond accuracy; NaN where there is none
    reasons: dict[str, str]  # why there is none

    @classmethod
    def of(
        cls, labels: Sequence[str], probabilities: Numbers, classes: tuple[str, ...], metrics: Sequence[Metric] = ()
    ) -> Evaluation:
        """From the names of the true classes, and the probabilities (N, classes) that a model gives."""
        number = {name: place for place, name in enumerate(classes)}
        for row, label in enumerate(labels, 1):
            if label not in number:
                given, known = f"the label {label[:40]!r}" if label else "an empty label", ", ".join(classes[:20])
                raise DataError(f"{given} (input {row}) is none of the model's classes: {known}")
        true = np.array([number[name] for name in labels], np.int64)
        found = Outcomes(true, probabilities.argmax(1), probabilities)
        table = on_one_set(found, len(classes), metrics)
        return cls(classes, confusion_matrix(true, found.predicted, len(classes)), table.values, table.reasons)

    @property
    def samples(self) -> int:
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        return float(self.confusion.trace() / self.samples)

    @property
    def recall(self) -> dict[str, float]:
        """By class; NaN of one without samples."""
        rows = zip(self.classes, self.confusion.diagonal(), self.confusion.sum(1), strict=True)
        return {name: float(right / samples) if samples else math.nan for name, right, samples in rows}

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "samples": self.samples,
            "accuracy": self.accuracy,
            **_without_nan(self.metrics),
            "recall": _without_nan(self.recall),
            "confusion": {
                true: dict(zip(self.classes, row.tolist(), strict=True))
                for true, row in zip(self.classes, self.confusion, strict=True)
            },
        }


def _without_nan(values: dict[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in values.items()}
