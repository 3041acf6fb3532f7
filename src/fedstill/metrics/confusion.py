"""What a confusion matrix tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def confusion_matrix(labels: IntArray, predicted: IntArray, classes: int) -> IntArray:
    """How often samples of each class (rows) were taken for each class (columns).

    >>> confusion_matrix(np.array([0, 0, 1]), np.array([0, 1, 1]), 2).tolist()
    [[1, 1], [0, 1]]
    """
    return np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)


def recalls(confusion: IntArray) -> FloatArray:
    """The share of each class's samples that was recognised; NaN of a class without samples."""
    return _divided(confusion.diagonal(), confusion.sum(1))


def balanced_accuracy(confusion: IntArray) -> float:
    """The mean recall of the classes that have samples."""
    return float(np.nanmean(recalls(confusion)))


def macro_f1(confusion: IntArray) -> float:
    """The mean of 2 hits / (samples + predictions) over the classes that have samples or were predicted."""
    return float(np.nanmean(_divided(2 * confusion.diagonal(), confusion.sum(0) + confusion.sum(1))))


def _divided(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> FloatArray:
    found: FloatArray = np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
    return found
