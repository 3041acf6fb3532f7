"""What a confusion matrix tells."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def confusion_matrix(labels: IntArray, predicted: IntArray, classes: int) -> IntArray:
    """How often samples of each class (rows) were taken for each class (columns).

    >>> confusion_matrix(np.array([0, 0, 1]), np.array([0, 1, 1]), 2).tolist()
    [[1, 1], [0, 1]]
    """
    return np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)
