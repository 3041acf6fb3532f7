"""The IDX format of MNIST and its relatives, gzipped or not."""

from __future__ import annotations

import gzip
import math
import string
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.errors import DataError
from fedstill.data.formats.decoded import Array, Decoded, SplitArrays

DIGITS = tuple(string.digits)
FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
EMNIST_LETTERS = tuple(string.ascii_uppercase)  # either case
EMNIST_BALANCED = (*string.digits, *string.ascii_uppercase, *"abdefghnqrt")
EMNIST_BYCLASS = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)

UNSIGNED_BYTE = 0x08
_RATIO = 1032  # to which gzip can pack, at most
_MOST_AXES, _LARGEST = 8, 2**33  # of a dataset that this could be
GZIP_MAGIC = b"\x1f\x8b"


def read(path: Path) -> Array:
    """The array in an IDX file: two zero bytes, a type, the number of axes, their lengths, the values."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
        opened: Any = gzip.open if packed else open
        with opened(path, "rb") as file:
            shape = _shape(path, file)
            count = math.prod(shape)
            # Of a packed file no more than it says that it holds; and memory only for what it can hold.
            values = file.read(1 + min(count, path.stat().st_size * (_RATIO if packed else 1)))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged or truncated ({error})") from error
    if len(values) != count:
        found = f"more than {count}" if len(values) > count else str(len(values))
        raise DataError(f"{path}: damaged or truncated ({found} bytes of data, not {count})")
    # A bytearray, because PyTorch warns about memory that must not be written.
    return np.frombuffer(bytearray(values), np.uint8).reshape(shape)


def _shape(path: Path, file: Any) -> tuple[int, ...]:
    """What the header says."""
    start = file.read(4)
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] != UNSIGNED_BYTE:
        raise DataError(f"{path}: not an IDX file of bytes")
    axes = start[3]
    lengths = file.read(4 * axes)
    if not axes or len(lengths) < 4 * axes:
        raise DataError(f"{path}: damaged or truncated (no complete header)")
    shape = struct.unpack(f">{axes}I", lengths)
    if axes > _MOST_AXES or math.prod(shape) > _LARGEST:
        raise DataError(f"{path}: damaged (it claims {axes} axes and {math.prod(shape):,} values)")
    return shape


def decode(paths: Sequence[Path], classes: tuple[str, ...], first_label: int = 0, transposed: bool = False) -> Decoded:
    """Training images and labels, test images and labels, in this order.

    EMNIST stores every image with rows and columns exchanged, and its letters are numbered from 1.
    """

    def part(images: Path, labels: Path) -> SplitArrays:
        x, y = read(images), read(labels).astype(np.int64)
        if x.ndim != 3 or y.ndim != 1:
            raise DataError(f"{images if x.ndim != 3 else labels}: unexpected number of axes")
        if not len(x) or len(x) != len(y):
            raise DataError(f"{images} has {len(x)} images but {labels} has {len(y)} labels")
        y -= first_label
        if y.min() < 0 or y.max() >= len(classes):
            low, high = first_label, first_label + len(classes) - 1
            raise DataError(f"{labels}: labels outside {low}..{high}")
        return SplitArrays(np.ascontiguousarray(x.transpose(0, 2, 1) if transposed else x)[..., None], y)

    return Decoded(part(paths[0], paths[1]), part(paths[2], paths[3]), classes)
