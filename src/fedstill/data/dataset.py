"""What a dataset is: tensors, class names, and how to normalise them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Split:
    """Samples with labels, and who owns them where the data say so.

    Images are uint8 of shape (N, C, H, W) in channels-last memory; any other input keeps its dtype.
    """

    x: Tensor
    y: Tensor  # (N,) int64
    client: Tensor | None = None  # (N,) int64 owner of each sample, 0..K-1

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Dataset:
    """A training and a test split over the same classes."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()  # per channel of x/255; empty: x is used as it is
    std: tuple[float, ...] = ()
    client_names: tuple[str, ...] = field(default=(), repr=False)

    @property
    def shape(self) -> torch.Size:
        """Shape of one sample."""
        return self.train.x.shape[1:]

    def normalise(self, x: Tensor) -> Tensor:
        """Turn stored samples into what a network sees: float32, (x/255 - mean)/std for images."""
        if not self.mean:
            return x.float() if x.is_floating_point() else x
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        scale, shift = (1 / (255 * std)).view(-1, 1, 1), (mean / std).view(-1, 1, 1)
        return x.to(torch.float32, memory_format=torch.channels_last).mul_(scale).sub_(shift)


def sized(dataset: Dataset, size: int) -> Dataset:
    """The dataset with its images brought to a square of this side; 0, or no images: as it is.

    >>> split = Split(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]))
    >>> tuple(sized(Dataset("tiny", split, split, ("a", "b"), (0.5,), (0.5,)), 4).shape)
    (1, 4, 4)
    """
    if not size or len(dataset.shape) != 3 or dataset.shape[1:] == (size, size):
        return dataset

    def resize(split: Split) -> Split:
        x = F.interpolate(split.x, (size, size), mode="bilinear", antialias=True, align_corners=False)
        return replace(split, x=x.contiguous(memory_format=torch.channels_last))

    return replace(dataset, train=resize(dataset.train), test=resize(dataset.test))
