"""What every reader returns, and the steps that are the same for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.errors import DataError, SettingError
from fedstill.core.seeds import numpy_rng
from fedstill.data.dataset import Dataset, Split

Array: TypeAlias = npt.NDArray[Any]

HELD_OUT_EVERY = 5  # one sample in five goes to the test split when the data come without one
CHUNK = 4096  # samples at a time, so that temporary copies stay small


class SourceFile(NamedTuple):
    """A file that a dataset is made from, with what tells whether it has changed."""

    path: str
    size: int
    mtime_ns: int


def source_file(path: Path) -> SourceFile:
    """The entry for one file."""
    status = path.stat()
    return SourceFile(str(path), status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class SplitArrays:
    """Arrays of one split. uint8 with four axes means images, (N, H, W, C)."""

    x: Array
    y: Array  # (N,) int64
    client: Array | None = None  # (N,) int64


@dataclass(frozen=True)
class Decoded:
    """A dataset as arrays, ready to be stored."""

    train: SplitArrays
    test: SplitArrays
    classes: tuple[str, ...]
    client_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    tokenizer: str = ""  # of text: as JSON
    original_size: str = ""  # of images that were resized: what their sizes were, in words
    notes: tuple[str, ...] = ()  # what was done to the data that whoever reads results should know


def is_images(x: Array) -> bool:
    """Whether an array holds images as this library stores them."""
    return x.dtype == np.uint8 and x.ndim == 4


def finish(decoded: Decoded, image_size: int) -> Decoded:
    """Bring images to the wanted size and take the training split's mean and standard deviation."""
    if image_size:
        before = decoded.train.x
        train = replace(decoded.train, x=resize(before, image_size))
        test = replace(decoded.test, x=resize(decoded.test.x, image_size))
        height, width = before.shape[1:3] if is_images(before) else before.shape[2:]
        original = decoded.original_size if train.x is before else f"{width}x{height}"
        decoded = replace(decoded, train=train, test=test, original_size=original)
    if is_images(decoded.train.x):
        mean, std = channel_statistics(decoded.train.x)
        decoded = replace(decoded, mean=mean, std=std)
    return decoded


def resize(x: Array, size: int) -> Array:
    """Square images of the given side, bilinear with antialiasing; images of that size are left alone."""
    channels_last = is_images(x)
    if not channels_last and not (x.ndim == 4 and x.dtype == np.float32):
        raise SettingError(f"image_size={size} needs images, but a sample has shape {x.shape[1:]} of {x.dtype}")
    if x.shape[1:3] == (size, size) if channels_last else x.shape[2:] == (size, size):
        return x
    shape = (len(x), size, size, x.shape[3]) if channels_last else (*x.shape[:2], size, size)
    resized = np.empty(shape, x.dtype)
    for start in range(0, len(x), CHUNK):
        block = torch.from_numpy(x[start : start + CHUNK])
        block = block.permute(0, 3, 1, 2) if channels_last else block
        block = F.interpolate(block, (size, size), mode="bilinear", antialias=True, align_corners=False)
        resized[start : start + CHUNK] = (block.permute(0, 2, 3, 1) if channels_last else block).numpy()
    return resized


def channel_statistics(x: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and population standard deviation of x/255 per channel; a constant channel gets deviation 1.

    Counting the 256 values first makes the result exact, whatever the order of the samples.
    """
    channels = x.shape[3]
    counts = np.zeros((channels, 256), np.int64)
    for start in range(0, len(x), CHUNK):
        block = x[start : start + CHUNK].reshape(-1, channels)
        for channel in range(channels):
            counts[channel] += np.bincount(block[:, channel], minlength=256)
    values = np.arange(256) / 255
    share = counts / counts.sum(axis=1, keepdims=True)
    mean = share @ values
    std = np.sqrt((share * (values - mean[:, None]) ** 2).sum(axis=1))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


def hold_out(y: Array, client: Array | None = None) -> tuple[Array, Array]:
    """Indices of a training and a test part: one in five of each client's samples of each class.

    The draw is fixed, so the same data always give the same two parts.
    """
    if len(y) < HELD_OUT_EVERY:
        raise DataError(f"{len(y)} samples are too few to hold out a test split; at least {HELD_OUT_EVERY} needed")
    shuffle = numpy_rng(0, "hold-out").random(len(y))
    owner = np.zeros(len(y), np.int64) if client is None else client
    # Every fifth of a list sorted by owner and class takes its share of every group, however small.
    order = np.lexsort((shuffle, y, owner))
    held_out = np.zeros(len(y), bool)
    held_out[order[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def to_dataset(decoded: Decoded, name: str) -> Dataset:
    """Tensors that share the arrays' memory; images become (N, C, H, W) in channels-last memory."""

    def tensor(array: Array) -> Tensor:
        # PyTorch shares only memory that it may write.
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def split(part: SplitArrays) -> Split:
        x, client = tensor(part.x), None if part.client is None else tensor(part.client)
        return Split(x.permute(0, 3, 1, 2) if is_images(part.x) else x, tensor(part.y), client)

    return Dataset(
        name=name,
        train=split(decoded.train),
        test=split(decoded.test),
        classes=decoded.classes,
        mean=decoded.mean,
        std=decoded.std,
        client_names=decoded.client_names,
        tokenizer=decoded.tokenizer,
        original_size=decoded.original_size,
        notes=decoded.notes,
    )
