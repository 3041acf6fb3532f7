"""CIFAR-10 and CIFAR-100: the binary version and the Python pickles."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.errors import DataError, in_one_line
from fedstill.data.formats.decoded import Array, Decoded, SplitArrays

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# fmt: off
CIFAR100 = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl",
    "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair",
    "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin",
    "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp",
    "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain",
    "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck",
    "pine_tree", "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road",
    "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider",
    "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone", "television",
    "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf",
    "woman", "worm",
)
# fmt: on

SIDE = 32
PIXELS = 3 * SIDE * SIDE  # a plane of red, then green, then blue


def decode(paths: Sequence[Path], classes: tuple[str, ...]) -> Decoded:
    """Any number of training files and, last, the test file; the suffix tells binary files from pickles."""
    fine = len(classes) == len(CIFAR100)
    batches = [_read_binary(path, fine) if path.suffix == ".bin" else _read_pickle(path, fine) for path in paths]
    for path, (x, y) in zip(paths, batches, strict=True):
        if not len(x) or len(x) != len(y):
            raise DataError(f"{path}: {len(x)} images but {len(y)} labels")
        if y.min() < 0 or y.max() >= len(classes):
            raise DataError(f"{path}: damaged (labels outside 0..{len(classes) - 1})")

    def part(batches: list[tuple[Array, Array]]) -> SplitArrays:
        x = np.empty((sum(len(y) for _, y in batches), SIDE, SIDE, 3), np.uint8)
        start = 0
        for pixels, _ in batches:
            x[start : start + len(pixels)] = pixels.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
            start += len(pixels)
        return SplitArrays(x, np.concatenate([y for _, y in batches]))

    return Decoded(part(batches[:-1]), part(batches[-1:]), classes)


def _read_binary(path: Path, fine: bool) -> tuple[Array, Array]:
    """Records of one label byte (CIFAR-100: the coarse label, then the fine one) and the pixels."""
    label_bytes = 2 if fine else 1
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not len(content) or len(content) % (label_bytes + PIXELS):
        raise DataError(f"{path}: damaged or truncated ({len(content)} bytes, no multiple of a record)")
    records = content.reshape(-1, label_bytes + PIXELS)
    return records[:, label_bytes:], records[:, label_bytes - 1].astype(np.int64)


def _read_pickle(path: Path, fine: bool) -> tuple[Array, Array]:
    try:
        data = path.read_bytes()
        _check_memo(data)
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
        x, y = _values(batch["data"]), _values(batch["fine_labels" if fine else "labels"])
        if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != PIXELS:
            raise ValueError(f"data are {x.shape} of {x.dtype}, not (N, {PIXELS}) bytes")
        return x, y.astype(np.int64)
    except Exception as error:  # what is no pickle of this kind fails in many ways
        raise DataError(f"{path}: refused as a CIFAR batch ({in_one_line(error)})") from error


def _check_memo(data: bytes) -> None:
    """Refuse a pickle that numbers what it remembers by more than it has: memory is allocated for every number."""
    for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
        if "PUT" in operation.name and isinstance(argument, int) and not 0 <= argument <= count:
            raise ValueError(f"its memo has a number {argument}")


def _values(value: Any) -> Array:
    if isinstance(value, _PickledArray):
        return value.values
    if isinstance(value, list) and all(type(item) is int for item in value):
        return np.array(value, np.int64)
    raise ValueError(f"expected an array or a list of integers, found {type(value).__name__}")


class _PickledDtype:
    """Stands in for numpy.dtype: remembers its code."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        code = code.decode("ascii") if isinstance(code, bytes) else code
        if code not in ("u1", "i4", "i8"):
            raise ValueError(f"array of type {code!r}")
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in (">", b">"):
            raise ValueError("big-endian array")


class _PickledArray:
    """Stands in for numpy.ndarray: keeps nothing of the pickled state but shape, type and bytes.

    NumPy's own __setstate__ was not made for hostile input.
    """

    values: Array

    def __init__(self, *_: object) -> None:
        self.values = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, shape, dtype, fortran, raw = state
        self.values = _from_bytes(raw, dtype, shape, "F" if fortran else "C")


def _from_bytes(raw: bytes, dtype: _PickledDtype, shape: tuple[int, ...], order: str) -> Array:
    values = np.frombuffer(raw, f"<{dtype.code}")
    return values.reshape(shape) if order == "C" else values.reshape(shape[::-1]).T


class _Unpickler(pickle.Unpickler):
    """Builds dictionaries, lists, numbers, strings and plain arrays; any other name is an error."""

    def find_class(self, module: str, name: str) -> Any:
        # New functions every time: a pickle may set attributes on what it is handed.
        match module.replace("numpy._core", "numpy.core"), name:
            case "numpy", "ndarray":
                return _PickledArray
            case "numpy", "dtype":
                return _PickledDtype
            case "numpy.core.multiarray", "_reconstruct":
                return lambda *_: _PickledArray()
            case "numpy.core.numeric", "_frombuffer":
                return _frombuffer()
            case "_codecs", "encode":
                return lambda text, _encoding: text.encode("latin1")
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")


def _frombuffer() -> Any:
    def build(raw: bytes, dtype: _PickledDtype, shape: tuple[int, ...], order: str) -> _PickledArray:
        array = _PickledArray()
        array.values = _from_bytes(raw, dtype, shape, order)
        return array

    return build
