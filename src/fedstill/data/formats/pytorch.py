"""Map-style datasets of PyTorch: torchvision's, and any other that gives pairs of a sample and a label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.utils.data
from PIL import Image

from fedstill.core.errors import DataError
from fedstill.data.dataset import Dataset
from fedstill.data.formats import images
from fedstill.data.formats.arrays import as_array, from_arrays
from fedstill.data.formats.decoded import Array


def from_torch(
    dataset: torch.utils.data.Dataset[Any],
    test: torch.utils.data.Dataset[Any] | None = None,
    name: str = "torch",
) -> Dataset:
    """A dataset from a map-style PyTorch dataset of (x, y), where x is a tensor, an array or a PIL image.

    Every sample is read once, through the dataset's own transforms: random ones belong into the setting `augment`. The
    names of the classes are the dataset's `classes`, if it has any.

    Examples:
        >>> pairs = torch.utils.data.TensorDataset(torch.randn(10, 3), torch.arange(10) % 2)
        >>> tuple(from_torch(pairs).shape)
        (3,)
    """
    parts = [_read(part, name) for part in (dataset, test) if part is not None]
    original = ""
    if all(isinstance(sample, Image.Image) for part in parts for sample in part.samples):
        size, original = images.chosen_size(*(part.samples for part in parts))
        made = [images.pixels(part.samples, size, resize=True) for part in parts]
        grey = all(each for _, each in made)
        x: list[Array] = [pixels[..., :1] if grey else pixels for pixels, _ in made]
    else:
        x = [_stacked(part.samples, name) for part in parts]
    y = [np.array(part.labels) for part in parts]
    x_test, y_test = (None, None) if test is None else (x[1], y[1])
    found = from_arrays(x[0], y[0], x_test, y_test, classes=_classes(dataset, y), name=name)
    return replace(found, original_size=original)


@dataclass
class _Part:
    samples: list[Any]
    labels: list[Any]


def _read(dataset: Any, name: str) -> _Part:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(f"{name}: a dataset without a length (an iterable one) cannot be divided among clients")
    part = _Part([], [])
    for index in range(len(dataset)):
        pair = dataset[index]
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            what = f"{len(pair)} things" if isinstance(pair, tuple | list) else f"a {type(pair).__name__}"
            raise DataError(f"{name}: sample {index} is {what}; a pair of a sample and its label is needed")
        part.samples.append(pair[0] if isinstance(pair[0], Image.Image) else as_array(pair[0]))
        label = as_array(pair[1])
        if label.size != 1:
            raise DataError(f"{name}: the label of sample {index} has {label.size} numbers; give one class a sample")
        part.labels.append(label.item())
    if not part.labels:
        raise DataError(f"{name}: no samples")
    return part


def _stacked(samples: list[Any], name: str) -> Array:
    found = [np.asarray(images.opened(each)) if isinstance(each, Image.Image) else each for each in samples]
    if len({each.shape for each in found}) > 1:
        raise DataError(f"{name}: samples have different shapes: {sorted({each.shape for each in found})[:3]}")
    return np.stack(found)


def _classes(dataset: Any, labels: Sequence[Array]) -> Sequence[str] | None:
    """The names of the classes, also where the dataset is a part of another."""
    while not hasattr(dataset, "classes") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    found = getattr(dataset, "classes", None)
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        return None
    whole = all(each.dtype.kind in "iu" for each in labels)
    return [str(name) for name in found] if whole else None
