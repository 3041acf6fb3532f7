"""The IDX format of MNIST and its relatives, gzipped or not."""

from __future__ import annotations

import gzip
import math
import string
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedstill.core.errors import DataError
from fedstill.data.formats.decoded import Array, Decoded, Part

DIGITS = tuple(string.digits)
FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
EMNIST_LETTERS = tuple(string.ascii_uppercase)  # either case
EMNIST_BALANCED = (*string.digits, *string.ascii_uppercase, *"abdefghnqrt")
EMNIST_BYCLASS = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)

UNSIGNED_BYTE = 0x08
GZIP_MAGIC = b"\x1f\x8b"


def read(path: Path) -> Array:
    """The array in an IDX file: two zero bytes, a type, the number of axes, their lengths, the values."""
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if raw.startswith(GZIP_MAGIC) else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged or truncated ({error})") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != UNSIGNED_BYTE:
        raise DataError(f"{path}: not an IDX file of bytes")
    axes = content[3]
    start = 4 + 4 * axes
    if not axes or len(content) < start:
        raise DataError(f"{path}: damaged or truncated (no complete header)")
    shape = struct.unpack(f">{axes}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DataError(f"{path}: damaged or truncated ({len(content) - start} bytes of data, not {math.prod(shape)})")
    # A bytearray, because PyTorch warns about memory that must not be written.
    return np.frombuffer(bytearray(memoryview(content)[start:]), np.uint8).reshape(shape)


def decode(paths: Sequence[Path], classes: tuple[str, ...], first_label: int = 0, transposed: bool = False) -> Decoded:
    """Training images and labels, test images and labels, in this order.

    EMNIST stores every image with rows and columns exchanged, and its letters are numbered from 1.
    """

    def part(images: Path, labels: Path) -> Part:
        x, y = read(images), read(labels).astype(np.int64)
        if x.ndim != 3 or y.ndim != 1:
            raise DataError(f"{images if x.ndim != 3 else labels}: unexpected number of axes")
        if not len(x) or len(x) != len(y):
            raise DataError(f"{images} has {len(x)} images but {labels} has {len(y)} labels")
        y -= first_label
        if y.min() < 0 or y.max() >= len(classes):
            low, high = first_label, first_label + len(classes) - 1
            raise DataError(f"{labels}: labels outside {low}..{high}")
        return Part(np.ascontiguousarray(x.transpose(0, 2, 1) if transposed else x)[..., None], y)

    return Decoded(part(paths[0], paths[1]), part(paths[2], paths[3]), classes)
