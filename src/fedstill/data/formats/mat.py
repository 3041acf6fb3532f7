"""SVHN's cropped digits: MATLAB files with X (32, 32, 3, N) and y (N, 1).

Read here and not by SciPy, which a damaged file can crash: it is C that believes the lengths in the file.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedstill.core.errors import DataError, in_one_line
from fedstill.data.formats.decoded import Array, Decoded, SplitArrays
from fedstill.data.formats.idx import DIGITS

# Of the format's level 5: what data elements are made of, and the classes of arrays of numbers.
_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
_MATRIX, _COMPRESSED, _COMPLEX = 14, 15, 0x0800
_HEADER, _LARGEST = 128, 2**33


def decode(paths: Sequence[Path]) -> Decoded:
    """The training and the test file, in this order; the digit 0 is stored as 10."""
    return Decoded(_read(paths[0]), _read(paths[1]), DIGITS)


def _read(path: Path) -> SplitArrays:
    try:
        content = _variables(path.read_bytes())
        images, labels = content["X"], content["y"].reshape(-1).astype(np.int64)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, StopIteration, struct.error, zlib.error) as error:
        raise DataError(f"{path}: damaged, or not a MATLAB file with X and y ({in_one_line(error)})") from error
    if images.ndim != 4 or images.shape[2] != 3 or images.dtype != np.uint8 or images.shape[3] != len(labels):
        raise DataError(
            f"{path}: expected X as (height, width, 3, N) bytes with N labels, "
            f"found {images.shape} of {images.dtype} with {len(labels)} labels"
        )
    if not len(labels) or labels.min() < 0 or labels.max() > 10:
        raise DataError(f"{path}: labels outside 1..10")
    return SplitArrays(np.ascontiguousarray(images.transpose(3, 0, 1, 2)), labels % 10)


def _variables(data: bytes) -> dict[str, Array]:
    """The arrays of numbers in a file, by name."""
    order = {b"IM": "<", b"MI": ">"}.get(data[_HEADER - 2 : _HEADER])
    if order is None or struct.unpack(f"{order}H", data[_HEADER - 4 : _HEADER - 2])[0] != 0x0100:
        raise ValueError("its header is not that of a level 5 file")
    found = {}
    for kind, content in _elements(memoryview(data)[_HEADER:], order):
        matrix = _unpacked(content, order) if kind == _COMPRESSED else content
        if kind in (_MATRIX, _COMPRESSED) and (variable := _matrix(matrix, order)):
            found[variable[0]] = variable[1]
    return found


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Types and contents of the data elements in a row."""
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from(f"{order}II", data, at)
        if kind >> 16:  # a small one: its bytes are in the tag
            kind, size, start, end = kind & 0xFFFF, kind >> 16, at + 4, at + 8
        else:
            start = at + 8
            end = start + size + (0 if kind == _COMPRESSED else -size % 8)
        if start + size > min(end, len(data)):
            raise ValueError("an element is cut off")
        yield kind, data[start : start + size]
        at = end


def _unpacked(content: memoryview, order: str) -> memoryview:
    """The matrix in a compressed element: as many bytes as it says, and no more."""
    unpacker = zlib.decompressobj()
    head = unpacker.decompress(content, 8)
    kind, size = struct.unpack(f"{order}II", head)
    if kind != _MATRIX or not 0 < size <= _LARGEST:
        return memoryview(b"")
    return memoryview(unpacker.decompress(unpacker.unconsumed_tail, size))


def _matrix(data: memoryview, order: str) -> tuple[str, Array] | None:
    """Name and values of a matrix; None if they are not real numbers."""
    if not len(data):
        return None
    parts = _elements(data, order)
    (_, flags), (_, lengths), (_, name) = next(parts), next(parts), next(parts)
    flag = struct.unpack_from(f"{order}I", flags)[0]
    if flag & 0xFF not in _CLASSES or flag & _COMPLEX:
        return None
    kind, values = next(parts)
    if kind not in _TYPES:
        raise ValueError(f"values of type {kind}")
    array = np.frombuffer(values, order + _TYPES[kind])
    shape = tuple(np.frombuffer(lengths, f"{order}i4").tolist())
    if len(shape) > 8 or min(shape) < 0 or math.prod(shape) != len(array):
        raise ValueError(f"{len(array)} values for shape {shape}")
    return bytes(name).decode("ascii"), array.reshape(shape, order="F").astype(_CLASSES[flag & 0xFF])
