"""Arrays that users bring: NumPy arrays, tensors and `.npz` files.

How x is recognised:

- uint8 (N, H, W): grey images; uint8 (N, H, W, C): images if the last axis is 1, 3 or 4 long; otherwise
  uint8 (N, C, H, W): images if the second axis is. Images are normalised by mean and deviation per channel.
- (N, D), bool and every float type: used as they are, as float32. Images as floats are (N, C, H, W).
- whole numbers (N, D) that are said to be tokens: kept as int64.

Labels are what `labels.numbered` takes: whole numbers or words, whichever.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedstill.core.errors import DataError, in_one_line
from fedstill.data.dataset import Dataset
from fedstill.data.formats.decoded import Array, Decoded, SplitArrays, finish, hold_out, to_dataset
from fedstill.data.formats.labels import numbered

CHANNELS = (1, 3, 4)
_LAST_CHARACTER, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)  # of Unicode


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
    tokens: bool = False,
) -> Dataset:
    """A dataset from arrays or tensors; without a test part, a fifth of each client's classes is held out.

    Rows of numbers are features, used as they are; with `tokens` they are the numbers of tokens, for networks of text.

    Examples:
        >>> data = from_arrays(np.zeros((10, 8, 8), np.uint8), np.arange(10) % 2)
        >>> len(data.train), len(data.test), tuple(data.shape)
        (8, 2, (1, 8, 8))
    """
    given = {"x": x, "y": y, "x_test": x_test, "y_test": y_test, "client": client, "client_test": client_test}
    arrays = {key: as_array(value) for key, value in given.items() if value is not None}
    return to_dataset(finish(decode(arrays, classes, name, tokens=tokens), 0), name)


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


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays in an .npz, of which only the headers are read."""
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.namelist():
                with archive.open(entry) as file:
                    version = np.lib.format.read_magic(file)
                    read = np.lib.format.read_array_header_1_0
                    read = np.lib.format.read_array_header_2_0 if version >= (2, 0) else read
                    found[entry.removesuffix(".npy")] = read(file)[0]
    except Exception as error:  # as in `read_npz`
        raise DataError(f"{path}: damaged, or not an .npz of plain arrays ({in_one_line(error)})") from error
    return found


def decode(
    arrays: dict[str, Array], classes: Sequence[str] | None = None, where: str = "arrays", *, tokens: bool = False
) -> Decoded:
    """Check the arrays, recognise what they are, and hold out a test part if none is given."""
    for needed in ("x", "y", *(("x_test", "y_test") if {"x_test", "y_test"} & set(arrays) else ())):
        if needed not in arrays:
            raise DataError(f"{where}: no array {needed!r}; found {', '.join(arrays) or 'none'}")
    x = _recognise(arrays["x"], f"{where}: x", tokens=tokens)
    labels, classes = numbered({key: arrays[key] for key in ("y", "y_test") if key in arrays}, classes, where)
    y = {key.removeprefix("y"): values for key, values in labels.items()}
    client, client_names = _clients(arrays, where)
    x_test = _recognise(arrays["x_test"], f"{where}: x_test", tokens=tokens) if "x_test" in arrays else x[:0]
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


def _recognise(x: Array, what: str, *, tokens: bool) -> Array:
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
    if tokens:
        if x.dtype.kind not in "iu" or x.ndim != 2:
            raise DataError(f"{what}: tokens are whole numbers of two axes, and these are {x.dtype} of shape {x.shape}")
        return np.ascontiguousarray(x, np.int64)
    if x.dtype.kind == "f" or x.dtype == np.bool_ or (x.dtype.kind in "iu" and x.ndim == 2):
        x = np.ascontiguousarray(x, np.float32)
        check_finite(x, what)
        return x
    raise DataError(f"{what}: {x.dtype} of shape {x.shape} is not understood; images are uint8, other inputs float")


def check_finite(x: Array, what: str) -> None:
    """Refuse NaN and infinite values, with how many there are and in which columns."""
    if np.isfinite(x).all():
        return
    wrong = ~np.isfinite(x)
    samples = int(wrong.reshape(len(x), -1).any(axis=1).sum())
    found = f"{what}: {int(wrong.sum()):,} values are NaN or infinite, in {samples:,} of {len(x):,} samples"
    if x.ndim == 2:
        columns = np.flatnonzero(wrong.any(axis=0))
        more = f" and {len(columns) - 5} more" if len(columns) > 5 else ""
        found += f", columns {', '.join(map(str, columns[:5]))}{more} (the first is 0)"
    raise DataError(f"{found}; fill them in, or leave these samples out")


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


def as_array(value: Any) -> Array:
    """An array of an array, a tensor or a list."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        found: Array = (tensor.float() if tensor.is_floating_point() else tensor).numpy()  # NumPy has no bfloat16
        return found
    return np.asarray(value)
