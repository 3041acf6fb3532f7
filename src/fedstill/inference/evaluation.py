"""How a trained model does on labelled inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstill.core.errors import DataError
from fedstill.metrics.confusion import IntArray, balanced_accuracy, confusion_matrix, macro_f1, recalls


@dataclass(frozen=True)
class Evaluation:
    """The confusion of classes, and what it comes to."""

    classes: tuple[str, ...]
    confusion: IntArray  # true classes by predicted ones

    @classmethod
    def of(cls, labels: Sequence[str], predicted: Sequence[str], classes: tuple[str, ...]) -> Evaluation:
        """From the names of classes, true and predicted."""
        number = {name: place for place, name in enumerate(classes)}
        for row, label in enumerate(labels, 1):
            if label not in number:
                known = ", ".join(classes[:20])
                raise DataError(f"the label {label[:40]!r} (input {row}) is none of the model's classes: {known}")
        true, found = (np.array([number[name] for name in names], np.int64) for names in (labels, predicted))
        return cls(classes, confusion_matrix(true, found, len(classes)))

    @property
    def samples(self) -> int:
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        return float(self.confusion.trace() / self.samples)

    @property
    def balanced_accuracy(self) -> float:
        return balanced_accuracy(self.confusion)

    @property
    def macro_f1(self) -> float:
        return macro_f1(self.confusion)

    @property
    def recall(self) -> dict[str, float]:
        """By class; NaN of one without samples."""
        return dict(zip(self.classes, recalls(self.confusion).tolist(), strict=True))

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "samples": self.samples,
            "accuracy": self.accuracy,
            "balanced_accuracy": self.balanced_accuracy,
            "macro_f1": self.macro_f1,
            "recall": {name: None if math.isnan(value) else value for name, value in self.recall.items()},
            "confusion": {
                true: dict(zip(self.classes, row.tolist(), strict=True))
                for true, row in zip(self.classes, self.confusion, strict=True)
            },
        }
