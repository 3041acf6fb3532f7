"""Proxy data: samples of another dataset, made to look like those that a network was built for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import DataError
from fedstill.core.seeds import numpy_rng
from fedstill.data.dataset import Dataset


def balanced(labels: Tensor, size: int, seed: int) -> Tensor:
    """Indices of `size` samples, as many of each class as there can be, in random order; all if there are fewer.

    >>> sorted(torch.tensor([0, 0, 0, 1])[balanced(torch.tensor([0, 0, 0, 1]), 3, seed=0)].tolist())
    [0, 0, 1]
    """
    rng = numpy_rng(seed, "proxy")
    order = rng.permutation(len(labels))
    shuffled = labels.numpy()[order]
    # The place of each sample among those of its class: taking the lowest places takes from all classes in turn.
    by_class = np.argsort(shuffled, kind="stable")
    starts = np.searchsorted(shuffled[by_class], shuffled[by_class])
    place = np.empty(len(labels), np.int64)
    place[by_class] = np.arange(len(labels)) - starts
    chosen = np.argsort(place, kind="stable")[:size]
    return torch.from_numpy(order[rng.permutation(chosen)])


def match_channels(x: Tensor, channels: int) -> Tensor:
    """Stored images with the number of channels asked for: grey repeated, colours averaged by luminance."""
    if x.shape[1] == channels:
        return x
    if x.shape[1] == 1:
        return x.expand(-1, channels, -1, -1)
    if channels == 1 and x.shape[1] == 3:
        weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
        grey = (x.float() * weights).sum(1, keepdim=True)
        return grey.to(x.dtype) if x.is_floating_point() else grey.round().to(x.dtype)
    raise DataError(f"images of {x.shape[1]} channels cannot stand in for images of {channels}")


def check_stands_in(source: Dataset, target: Dataset) -> None:
    """Refuse proxy data whose samples could not be those of the target, whatever is done to them."""
    if len(source.shape) != len(target.shape) or bool(source.mean) != bool(target.mean):
        raise DataError(f"samples of {source.name!r} are not of the kind of those of {target.name!r}")
    if source.tokenizer != target.tokenizer:
        raise DataError(f"{source.name!r} is in other tokens than {target.name!r}: both need the same tokenizer")
    if len(target.shape) != 3 and source.shape != target.shape:
        raise DataError(f"samples of {source.name!r} have shape {tuple(source.shape)}, needed is {tuple(target.shape)}")
    if source.shape[1:] != target.shape[1:]:
        raise DataError(f"images of {source.name!r} are not of the size of those of {target.name!r}; set image_size")
