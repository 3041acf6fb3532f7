"""UCI's heart disease data, the four hospitals of FLamby's Fed-Heart-Disease: 13 features, and whether there is any.

The files processed.NAME.data have 14 numbers a line, separated by commas, "?" where one is missing; the last, num, is 0
without the disease and 1 to 4 with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedstill.core.errors import DataError
from fedstill.data.dataset import Dataset
from fedstill.data.formats.table import from_frame
from fedstill.data.formats.text import lines

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
FILES = tuple(f"processed.{name}.data" for name in HOSPITALS)
FEATURES = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal"),
)
CATEGORICAL = ("cp", "restecg", "slope", "thal")  # those of more than two values, in no order
CLASSES = ("absent", "present")


def read(paths: Sequence[Path]) -> Dataset:
    """The four files as one dataset, whose owners are the hospitals."""
    rows: list[list[float]] = []
    hospitals: list[str] = []
    for hospital, path in zip(HOSPITALS, paths, strict=True):
        found = [_numbers(path, number, line) for number, line in enumerate(lines(path), 1) if line.strip()]
        if not found:
            raise DataError(f"{path}: no patients")
        rows += found
        hospitals += [hospital] * len(found)
    values = np.array(rows)
    columns = {
        **dict(zip(FEATURES, values.T, strict=False)),
        "diagnosis": np.where(values[:, -1] > 0, CLASSES[1], CLASSES[0]),
        "hospital": np.array(hospitals),
    }
    return from_frame(columns, "diagnosis", "hospital", categorical=CATEGORICAL, name="heart-disease")


def _numbers(path: Path, number: int, line: str) -> list[float]:
    try:
        found = [float("nan") if cell.strip() == "?" else float(cell) for cell in line.split(",")]
    except ValueError:
        found = []
    if len(found) != len(FEATURES) + 1 or np.isinf(found).any() or np.isnan(found[-1]):
        raise DataError(f'{path}, line {number}: not 14 numbers, or "?", separated by commas, the last of them known')
    return found
