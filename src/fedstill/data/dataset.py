"""What a dataset is: tensors, class names, and how to normalise them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


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
