"""SVHN's cropped digits: MATLAB files with X (32, 32, 3, N) and y (N, 1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedstill.core.errors import DataError, in_one_line
from fedstill.data.formats.decoded import Decoded, Part
from fedstill.data.formats.idx import DIGITS


def decode(paths: Sequence[Path]) -> Decoded:
    """The training and the test file, in this order; the digit 0 is stored as 10."""
    return Decoded(_read(paths[0]), _read(paths[1]), DIGITS)


def _read(path: Path) -> Part:
    import scipy.io  # costs every start a tenth of a second, and only SVHN needs it

    try:
        content = scipy.io.loadmat(path, variable_names=["X", "y"])
        images, labels = content["X"], content["y"].reshape(-1).astype(np.int64)
    except Exception as error:  # SciPy raises of many kinds
        raise DataError(f"{path}: damaged, or not a MATLAB file with X and y ({in_one_line(error)})") from error
    if images.ndim != 4 or images.shape[2] != 3 or images.dtype != np.uint8 or images.shape[3] != len(labels):
        raise DataError(
            f"{path}: expected X as (height, width, 3, N) bytes with N labels, "
            f"found {images.shape} of {images.dtype} with {len(labels)} labels"
        )
    if not len(labels) or labels.min() < 0 or labels.max() > 10:
        raise DataError(f"{path}: labels outside 1..10")
    return Part(np.ascontiguousarray(images.transpose(3, 0, 1, 2)), labels % 10)
