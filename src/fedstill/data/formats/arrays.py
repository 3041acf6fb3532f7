"""Arrays that users bring: NumPy arrays, tensors, `.npz` files and PyTorch datasets.

How x is recognised:

- uint8 (N, H, W): grey images; uint8 (N, H, W, C): images if the last axis is 1, 3 or 4 long; otherwise
  uint8 (N, C, H, W): images if the second axis is. Images are normalised by mean and deviation per channel.
- uint8 (N, D), bool and every float type: used as they are, as float32. Images as floats are (N, C, H, W).
- any other integer type with at most two axes: token or category numbers, kept as int64.

Labels are integers from 0, kept as they are, or strings, numbered in sorted order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.utils.data
from torch import Tensor

from fedstill.core.errors import DataError, in_one_line
from fedstill.data.dataset import Dataset
from fedstill.data.formats.decoded import Array, Decoded, SplitArrays, finish, hold_out, to_dataset
from fedstill.data.formats.images import class_order

CHANNELS = (1, 3, 4)
_LAST_CHARACTER, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)  # of Unicode
MOST_CLASSES = 100_000  # a larger label is a mistake: an identifier, or a regression target


def from_arrays(
    x: Array | Tensor,
    y: Array | Tensor,
    x_test: Array | Tensor | None = None,
    y_test: Array | Tensor | None = None,
    client: Array | Tensor | None = None,
    *,
    classes: Sequence[str] | None = None,
    name: str = "arrays",
    client_test: Array | Tensor | None = None,
) -> Dataset:
    """A dataset from arrays or tensors; without a test part, a fifth of each client's classes is held out.

    >>> data = from_arrays(np.zeros((10, 8, 8), np.uint8), np.arange(10) % 2)
    >>> len(data.train), len(data.test), tuple(data.shape)
    (8, 2, (1, 8, 8))
    """
    given = {"x": x, "y": y, "x_test": x_test, "y_test": y_test, "client": client, "client_test": client_test}
    arrays = {key: _as_array(value) for key, value in given.items() if value is not None}
    return to_dataset(finish(decode(arrays, classes, name), 0), name)


def from_torch(
    dataset: torch.utils.data.Dataset[Any],
    test: torch.utils.data.Dataset[Any] | None = None,
    name: str = "torch",
) -> Dataset:
    """A dataset from a map-style PyTorch dataset of (x, y), where x is a tensor, an array or a PIL image.

    >>> pairs = torch.utils.data.TensorDataset(torch.randn(10, 3), torch.arange(10) % 2)
    >>> tuple(from_torch(pairs).shape)
    (3,)
    """
    x, y = _stack(dataset, name)
    x_test, y_test = (None, None) if test is None else _stack(test, name)
    return from_arrays(x, y, x_test, y_test, name=name)


def read_npz(path: Path) -> Decoded:
    """`x, y` or `x_train, y_train`, and optionally `x_test, y_test`, `client`, `client_test`, `classes`."""
    arrays = read_arrays(path)
    classes = arrays.pop("classes", None)
    return decode(arrays, None if classes is None else [str(name) for name in classes.reshape(-1)], str(path))


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an `.npz` by name, `_train` left out; nothing is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as content:
            arrays = {key.removesuffix("_train"): content[key] for key in content.files}
    except Exception as error:  # NumPy, zipfile and what they call raise of many kinds, tokenize's among them
        raise DataError(f"{path}: damaged, or not an .npz of plain arrays ({in_one_line(error)})") from error
    if other := [key for key, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise DataError(f"{path}: damaged, or not an .npz of plain arrays ({other[0]!r} is none)")
    return {key: _text(array, f"{path}: {key}") for key, array in arrays.items()}


def _text(array: Array, what: str) -> Array:
    """Strings that can be written down; any other array as it is."""
    try:
        if array.dtype.kind == "S":
            array = np.char.decode(array, "utf-8")
        if array.dtype.kind == "U" and array.dtype.itemsize and array.size:
            code = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).view(np.uint32)
            if ((code > _LAST_CHARACTER) | ((code >= _SURROGATES[0]) & (code <= _SURROGATES[1]))).any():
                raise DataError(f"{what}: damaged (it holds what is no character)")
    except UnicodeDecodeError as error:
        raise DataError(f"{what}: its text is not UTF-8 ({error})") from error
    return array


def decode(arrays: dict[str, Array], classes: Sequence[str] | None = None, where: str = "arrays") -> Decoded:
    """Check the arrays, recognise what they are, and hold out a test part if none is given."""
    for needed in ("x", "y", *(("x_test", "y_test") if {"x_test", "y_test"} & set(arrays) else ())):
        if needed not in arrays:
            raise DataError(f"{where}: no array {needed!r}; found {', '.join(arrays) or 'none'}")
    x = _recognise(arrays["x"], f"{where}: x")
    y, classes = _labels(arrays, classes, where)
    client, client_names = _clients(arrays, where)
    x_test = _recognise(arrays["x_test"], f"{where}: x_test") if "x_test" in arrays else x[:0]
    for part, pixels in (("", x), ("_test", x_test)):
        lengths = {key: len(v[part]) for key, v in (("y", y), ("client", client)) if part in v}
        for key, length in lengths.items():
            if length != len(pixels):
                raise DataError(f"{where}: x{part} has {len(pixels)} samples but {key}{part} has {length}")
    if "" in y and not len(y[""]):
        raise DataError(f"{where}: no samples")
    if "_test" in y:
        if x_test.shape[1:] != x.shape[1:] or x_test.dtype != x.dtype or not len(x_test):
            raise DataError(
                f"{where}: test samples are {len(x_test)} of {x_test.shape[1:]} {x_test.dtype}, "
                f"training samples {x.shape[1:]} {x.dtype}"
            )
        train, test = SplitArrays(x, y[""], client.get("")), SplitArrays(x_test, y["_test"], client.get("_test"))
    else:
        owner = client.get("")
        at = hold_out(y[""], owner)
        train, test = (SplitArrays(x[i], y[""][i], None if owner is None else owner[i]) for i in at)
    return Decoded(train, test, tuple(classes), client_names)


def _recognise(x: Array, what: str) -> Array:
    if x.dtype == np.uint8 and x.ndim == 3:
        return np.ascontiguousarray(x)[..., None]
    if x.dtype == np.uint8 and x.ndim == 4:
        if x.shape[3] in CHANNELS:
            return np.ascontiguousarray(x)
        if x.shape[1] in CHANNELS:
            return np.ascontiguousarray(x.transpose(0, 2, 3, 1))
        raise DataError(f"{what}: images of shape {x.shape} have no axis of 1, 3 or 4 channels first or last")
    if x.ndim < 2:
        raise DataError(f"{what}: shape {x.shape} has no axis beside that of the samples")
    if x.dtype.kind == "f" or x.dtype == np.bool_ or (x.dtype == np.uint8 and x.ndim == 2):
        x = np.ascontiguousarray(x, np.float32)
        if not np.isfinite(x).all():
            raise DataError(f"{what}: holds NaN or infinite values")
        return x
    if x.dtype.kind in "iu" and x.ndim == 2:
        return np.ascontiguousarray(x, np.int64)
    raise DataError(f"{what}: {x.dtype} of shape {x.shape} is not understood; images are uint8, other inputs float")


def _labels(
    arrays: dict[str, Array], classes: Sequence[str] | None, where: str
) -> tuple[dict[str, Array], Sequence[str]]:
    """Labels per part ("" and "_test") as int64, and the class names."""
    labels = {}
    for part in ("", "_test"):
        if f"y{part}" in arrays:
            y = arrays[f"y{part}"]
            y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
            if y.ndim != 1 or y.dtype.kind not in "iuUS":
                raise DataError(f"{where}: y{part} must be one integer or string per sample, not {y.dtype} {y.shape}")
            labels[part] = y.astype(str) if y.dtype.kind in "US" else y
    if any(y.dtype.kind == "U" for y in labels.values()):
        names = class_order(str(name) for y in labels.values() for name in np.unique(y)) if classes is None else classes
        number = {name: index for index, name in enumerate(names)}
        try:
            return {part: np.array([number[str(v)] for v in y], np.int64) for part, y in labels.items()}, names
        except KeyError as error:
            raise DataError(f"{where}: label {error} is not among the classes") from error
    for part, y in labels.items():
        if len(y) and (y.min() < 0 or y.max() >= MOST_CLASSES):
            raise DataError(
                f"{where}: y{part} holds label {y.min() if y.min() < 0 else y.max()}; labels are 0, 1, 2, …"
            )
    count = 1 + max((int(y.max()) for y in labels.values() if len(y)), default=0)
    if classes is not None and len(classes) < count:
        raise DataError(f"{where}: {len(classes)} class names, but labels reach {count - 1}")
    names = [str(index) for index in range(count)] if classes is None else list(classes)
    return {part: y.astype(np.int64) for part, y in labels.items()}, names


def _clients(arrays: dict[str, Array], where: str) -> tuple[dict[str, Array], tuple[str, ...]]:
    """Owners per part, numbered from 0 in the order of their names."""
    owners = {part: arrays[f"client{part}"] for part in ("", "_test") if f"client{part}" in arrays}
    if not owners:
        return {}, ()
    if any(owner.ndim != 1 or owner.dtype.kind not in "iuUS" for owner in owners.values()):
        raise DataError(f"{where}: client must be one integer or string per sample")
    if "" not in owners or ("_test" in owners and "x_test" not in arrays):
        raise DataError(f"{where}: client_test needs client and x_test")
    values, numbers = np.unique(np.concatenate(list(owners.values())), return_inverse=True)
    borders = np.cumsum([len(owner) for owner in owners.values()])[:-1]
    parts = np.split(numbers.astype(np.int64), borders)
    return dict(zip(owners, parts, strict=True)), tuple(
        value.decode() if isinstance(value, bytes) else str(value) for value in values
    )


def _as_array(value: Array | Tensor) -> Array:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return (value.float() if value.is_floating_point() else value).numpy()  # NumPy has no bfloat16
    return np.asarray(value)


def _stack(dataset: torch.utils.data.Dataset[Any], name: str) -> tuple[Array, Array]:
    if not hasattr(dataset, "__len__"):
        raise DataError(f"{name}: a dataset without a length (an iterable one) cannot be divided among clients")
    pairs = [dataset[index] for index in range(len(dataset))]
    if not pairs:
        raise DataError(f"{name}: no samples")
    samples = [_as_array(pair[0]) for pair in pairs]
    if len({sample.shape for sample in samples}) > 1:
        raise DataError(f"{name}: samples have different shapes: {sorted({sample.shape for sample in samples})[:3]}")
    return np.stack(samples), np.array([_as_array(pair[1]).item() for pair in pairs])
