"""What a dataset is: tensors, class names, and how to normalise them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedstill.data.preprocessing import (
    ArrayPreprocessing,
    ImagePreprocessing,
    Preprocessing,
    TablePreprocessing,
    TextPreprocessing,
)


@dataclass(frozen=True)
class Split:
    """Samples with labels, and who owns them where the data say so.

    Images are uint8 of shape (N, C, H, W) in channels-last memory. Text is token numbers of shape (N, length), 0 for
    padding. Tables are raw numbers of shape (N, columns), NaN where one is missing. Any other input keeps its dtype.
    """

    x: Tensor
    y: Tensor  # (N,) int64
    client: Tensor | None = None  # (N,) int64 owner of each sample, 0..K-1

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return f"<fedstill.Split: {len(self):,} samples of shape {tuple(self.x.shape[1:])}>"


@dataclass(frozen=True)
class Dataset:
    """A training and a test split over the same classes."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()  # per channel of x/255; empty: x is used as it is
    std: tuple[float, ...] = ()
    client_names: tuple[str, ...] = ()
    tokenizer: str = field(default="", kw_only=True)  # of text: one of the tokenizers library, as JSON
    original_size: str = field(default="", kw_only=True)  # of images that were resized, in words
    notes: tuple[str, ...] = field(default=(), kw_only=True)  # what was done to the data, for a run's log
    table: TablePreprocessing | None = field(default=None, kw_only=True)  # of tables: what each column is

    def __repr__(self) -> str:
        samples = f"{len(self.train):,} training and {len(self.test):,} test samples of shape {tuple(self.shape)}"
        return f"<fedstill.Dataset {self.name}: {samples}, {len(self.classes)} classes>"

    @cached_property
    def vocabulary(self) -> int:
        """How many tokens there are, where samples are rows of token numbers; 0: they are not."""
        x = self.train.x
        if self.tokenizer:
            return _vocabulary(json.loads(self.tokenizer))
        if self.mean or self.table or x.dim() != 2 or x.is_floating_point():
            return 0
        return 1 + max(int(part.max()) for part in (x, self.test.x) if part.numel())

    @property
    def shape(self) -> torch.Size:
        """Shape of one sample."""
        return self.train.x.shape[1:]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample as a network sees it."""
        return self.preprocessing.input_shape

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """How raw inputs become what a network sees: all that a trained model needs of the data."""
        shape = tuple(self.shape)
        if self.table is not None:
            return self.table
        if self.tokenizer:
            return TextPreprocessing(tokenizer=self.tokenizer, length=shape[0])
        if self.mean and len(shape) == 3:
            return ImagePreprocessing(shape=(shape[0], shape[1], shape[2]), mean=self.mean, std=self.std)
        return ArrayPreprocessing(shape=shape, tokens=not self.train.x.is_floating_point())

    def normalise(self, x: Tensor) -> Tensor:
        """Turn stored samples into what a network sees: float32, (x/255 - mean)/std for images."""
        return self.preprocessing.normalise(x)


def _vocabulary(tokenizer: dict[str, Any]) -> int:
    """The number of tokens of a tokenizer, special ones included."""
    vocabulary = tokenizer["model"]["vocab"]  # names with their numbers; of some models a list
    numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return 1 + int(max((*numbers, *(added["id"] for added in tokenizer["added_tokens"]))))


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

    original = dataset.original_size or "{1}x{0}".format(*dataset.shape[1:])
    return replace(dataset, train=resize(dataset.train), test=resize(dataset.test), original_size=original)
