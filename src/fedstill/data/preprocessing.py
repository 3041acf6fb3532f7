"""What is done to a sample before a network sees it, as data: saved with a model, so that the model takes raw inputs.

Two steps. `encode` takes inputs as people have them (pixels, rows of a table, strings) to samples as a `Dataset` stores
them; it runs once. `normalise` takes stored samples to what the network sees; it runs on every batch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter
from torch import Tensor
from torch.nn import functional as F

from fedstill.core.errors import DataError

Array = npt.NDArray[Any]


class _Preprocessing(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample as the network sees it."""

    @abstractmethod
    def encode(self, raw: Any) -> Tensor:
        """Samples as a dataset stores them, from inputs as people have them; DataError if they do not fit."""

    @abstractmethod
    def normalise(self, x: Tensor) -> Tensor:
        """What a network sees of stored samples."""


class ImagePreprocessing(_Preprocessing):
    """Images: brought to one size and number of channels, then (x/255 - mean)/std for each channel."""

    kind: Literal["image"] = "image"
    shape: tuple[PositiveInt, PositiveInt, PositiveInt]  # channels, height, width
    mean: tuple[float, ...]  # of x/255, for each channel
    std: tuple[PositiveFloat, ...]

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.shape

    def encode(self, raw: Any) -> Tensor:
        """Pixels of 0 to 255, or of 0 to 1 where they are floats; arrays, PIL images, or files, one or many.

        >>> grey = ImagePreprocessing(shape=(1, 4, 4), mean=(0.5,), std=(0.5,))
        >>> grey.encode(np.zeros((2, 8, 8), np.uint8)).shape
        torch.Size([2, 1, 4, 4])
        """
        many = list(raw) if isinstance(raw, Sequence) and not isinstance(raw, str) else [raw]
        if many and all(isinstance(one, str | Path) or hasattr(one, "convert") for one in many):
            return torch.cat([_from_pillow(one, self.shape) for one in many])
        x = _pixels(raw, self.shape[0])
        x = _with_channels(x, self.shape[0])
        if x.shape[2:] != self.shape[1:]:
            x = F.interpolate(x, self.shape[1:], mode="bilinear", antialias=True, align_corners=False)
        return x.contiguous(memory_format=torch.channels_last)

    def normalise(self, x: Tensor) -> Tensor:
        mean, std = torch.tensor(self.mean, device=x.device), torch.tensor(self.std, device=x.device)
        scale, shift = (1 / (255 * std)).view(-1, 1, 1), (mean / std).view(-1, 1, 1)
        if x.is_floating_point():
            return x * scale - shift
        return x.to(torch.float32, memory_format=torch.channels_last).mul_(scale).sub_(shift)


class TextPreprocessing(_Preprocessing):
    """Strings: rows of token numbers, 0 for padding."""

    kind: Literal["text"] = "text"
    tokenizer: str = Field(repr=False)  # of the tokenizers library, as JSON
    length: PositiveInt

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.length,)

    def encode(self, raw: Any) -> Tensor:
        from fedstill.data import tokens

        texts = [raw] if isinstance(raw, str) else list(raw)
        if wrong := next((type(text).__name__ for text in texts if not isinstance(text, str)), None):
            raise DataError(f"the model takes texts, as strings, not {wrong}")
        return torch.from_numpy(tokens.encode(self.tokenizer, texts, self.length))

    def normalise(self, x: Tensor) -> Tensor:
        return x


class Column(BaseModel):
    """A column of a table. Numbers are standardised; of categories, each is 1 where it is the one and 0 elsewhere.

    Where a number is missing it is the mean; if some were missing in training, another input says so. A category that
    is missing, or was never seen, is 0 everywhere.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    categories: tuple[str, ...] | None = None  # None: numbers
    mean: float = 0.0
    std: PositiveFloat = 1.0
    missing: bool = False  # whether numbers were missing in training

    @property
    def width(self) -> int:
        """How many numbers the network sees of it."""
        return 1 + self.missing if self.categories is None else len(self.categories)


class TablePreprocessing(_Preprocessing):
    """Rows of a table, by the names of its columns; stored as raw numbers, NaN where one is missing."""

    kind: Literal["table"] = "table"
    columns: tuple[Column, ...] = Field(min_length=1)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (sum(column.width for column in self.columns),)

    def encode(self, raw: Any) -> Tensor:
        """From a DataFrame, a mapping of columns, a list of rows as mappings, or an array in the columns' order.

        >>> age = TablePreprocessing(columns=(Column(name="age", mean=50, std=10),))
        >>> age.normalise(age.encode([{"age": 70}, {"age": None}])).tolist()
        [[2.0], [0.0]]
        """
        given = _columns(raw, [column.name for column in self.columns])
        lengths = {name: len(values) for name, values in given.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"columns differ in length: {', '.join(f'{k} has {v}' for k, v in lengths.items())}")
        stored = np.empty((max(lengths.values()), len(self.columns)))
        for place, column in enumerate(self.columns):
            values = given[column.name]
            stored[:, place] = (
                numbers(values, column.name) if column.categories is None else places(values, column.categories)
            )
        return torch.from_numpy(stored)

    def normalise(self, x: Tensor) -> Tensor:
        place, mean, std, category, flag = (part.to(x.device) for part in self._inputs)
        values = x.double()[:, place]
        found = ((values - mean) / std).nan_to_num(0.0)
        if any(column.categories for column in self.columns):
            found = torch.where(category >= 0, (values == category).double(), found)
        if any(column.missing for column in self.columns):
            found = torch.where(flag, values.isnan().double(), found)
        return found.float()

    @cached_property
    def _inputs(self) -> tuple[Tensor, ...]:
        """For each number the network sees: its column, mean, deviation, category, and whether it says "missing"."""
        rows = []
        for place, column in enumerate(self.columns):
            if column.categories is None:
                rows.append((place, column.mean, column.std, -1, False))
                rows += [(place, 0.0, 1.0, -1, True)] * column.missing
            else:
                rows += [(place, 0.0, 1.0, category, False) for category in range(len(column.categories))]
        places, means, stds, categories, flags = zip(*rows, strict=True) if rows else ((),) * 5
        doubles = (torch.tensor(part, dtype=torch.float64) for part in (means, stds))
        return torch.tensor(places, dtype=torch.int64), *doubles, torch.tensor(categories), torch.tensor(flags)


class ArrayPreprocessing(_Preprocessing):
    """Numbers that a network sees as they are."""

    kind: Literal["array"] = "array"
    shape: tuple[NonNegativeInt, ...]
    tokens: bool = False  # whole numbers, which stay whole

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.shape

    def encode(self, raw: Any) -> Tensor:
        x = raw if isinstance(raw, Tensor) else torch.from_numpy(np.array(raw))
        if tuple(x.shape) == self.shape:
            x = x.unsqueeze(0)
        if tuple(x.shape[1:]) != self.shape:
            got, wanted = ("x".join(map(str, shape)) or "single numbers" for shape in (x.shape[1:], self.shape))
            raise DataError(f"the model takes samples of {wanted}, and these are {got}")
        return x if self.tokens else x.float()

    def normalise(self, x: Tensor) -> Tensor:
        return x.float() if x.is_floating_point() else x


Preprocessing = ImagePreprocessing | TextPreprocessing | TablePreprocessing | ArrayPreprocessing
_ANY: TypeAdapter[Preprocessing] = TypeAdapter(Annotated[Preprocessing, Field(discriminator="kind")])


def from_json(text: str | bytes) -> Preprocessing:
    """A preprocessing from its `model_dump_json()`; DataError if it is none.

    >>> from_json(ArrayPreprocessing(shape=(3,)).model_dump_json())
    ArrayPreprocessing(kind='array', shape=(3,), tokens=False)
    """
    try:
        return _ANY.validate_json(text)
    except ValueError as error:
        raise DataError(f"this is no preprocessing: {str(error).splitlines()[0]}") from error


# --- pixels ---


def _from_pillow(image: Any, shape: tuple[int, int, int]) -> Tensor:
    """An image file or PIL image as folders of images are read."""
    from fedstill.data.formats.images import opened, resized

    found = resized(opened(image), shape[2], shape[1])
    pixels = torch.from_numpy(np.array(found))
    pixels = pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1)
    return _with_channels(pixels.unsqueeze(0), shape[0])


def _pixels(raw: Any, channels: int) -> Tensor:
    """Images of any layout as (N, C, H, W), of 0 to 255."""
    x = raw if isinstance(raw, Tensor) else torch.from_numpy(np.array(raw))
    shape = "x".join(map(str, x.shape))
    possible = (channels, 1, 3, 4)
    if x.dim() == 2:
        x = x[None, None]
    elif x.dim() == 3:
        # To a model of grey images, three of them are not one in colour: that is how training data are read too.
        first = next((c for c in possible if x.shape[0] == c and channels > 1), None)
        last = next((c for c in possible if x.shape[2] == c), None)
        if first is not None and (last is None or first == channels):
            x = x.unsqueeze(0)
        elif last is not None:
            x = x.permute(2, 0, 1).unsqueeze(0)
        else:
            x = x.unsqueeze(1)  # many grey images
    elif x.dim() == 4 and x.shape[1] not in possible and x.shape[3] in possible:
        x = x.permute(0, 3, 1, 2)
    if x.dim() != 4 or x.shape[1] not in possible:
        raise DataError(f"the model takes images, one or many, and this is an array of {shape}")
    if x.dtype == torch.bool:
        return x.to(torch.uint8) * 255
    if not x.is_floating_point():
        if x.numel() and (x.min() < 0 or x.max() > 255):
            raise DataError(f"pixels are 0 to 255, and these reach from {x.min()} to {x.max()}")
        return x.to(torch.uint8)
    least, most = (float(x.min()), float(x.max())) if x.numel() else (0.0, 0.0)
    if not (least >= 0 and most <= 255):
        raise DataError(
            f"pixels are 0 to 255, or 0 to 1, and these reach from {least:g} to {most:g}; "
            "give them as they are, the model standardises them itself"
        )
    return x.float() * (255 if most <= 1 else 1)


def _with_channels(x: Tensor, channels: int) -> Tensor:
    """Grey images in colour, colour images in grey, and none with transparency."""
    x = x[:, :3] if x.shape[1] == 4 else x
    if x.shape[1] == channels:
        return x
    if x.shape[1] == 1:
        return x.expand(-1, channels, -1, -1)
    if channels == 1:
        grey = (x.float() * torch.tensor([0.299, 0.587, 0.114]).view(-1, 1, 1)).sum(1, keepdim=True)
        return grey if x.is_floating_point() else grey.round().to(torch.uint8)
    raise DataError(f"the model takes images of {channels} channels, and these have {x.shape[1]}")


# --- tables ---


def numbers(values: Sequence[Any] | Array, column: str) -> Array:
    """A column of numbers as float64, NaN where one is missing.

    >>> numbers(["1.5", " ", "?", 2], "age")
    array([1.5, nan, nan, 2. ])
    """
    found = floats(values)
    if found is None:
        wrong = next(value for value in values if not is_missing(value) and floats([value]) is None)
        raise DataError(f"column {column!r} is numbers, and one of them is {str(wrong)[:40]!r}")
    if np.isinf(found).any():
        raise DataError(f"column {column!r} has a number that is not finite; leave it empty where it is not known")
    return found


def floats(values: Sequence[Any] | Array) -> Array | None:
    """Values as float64; None if some of them are no numbers."""
    array = values if isinstance(values, np.ndarray) else None
    if array is not None and array.dtype.kind in "iufb":
        return array.astype(np.float64)
    for known in (values, ("nan" if is_missing(value) else value for value in values)):
        with suppress(TypeError, ValueError):
            return np.array(list(known), np.float64)
    return None


def places(values: Sequence[Any] | Array, categories: Sequence[str]) -> Array:
    """The place of each value among the categories, as float64; NaN where it is missing or none of them.

    >>> places(["b", None, "c", 1.0], ["1", "b"])
    array([ 1., nan, nan,  0.])
    """
    place = {name: float(number) for number, name in enumerate(categories)}
    listed = values.tolist() if isinstance(values, np.ndarray) else list(values)
    of_value = {value: place.get(category(value), math.nan) for value in set(listed)}  # a column repeats itself
    return np.fromiter((of_value[value] for value in listed), np.float64, len(listed))


def category(value: Any) -> str:
    """A cell of a column of categories, as text; empty if it is missing."""
    if is_missing(value):
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of whole numbers with a gap is read as floats
    text = str(value).strip()
    return text.removesuffix(".0") if text.removesuffix(".0").lstrip("-").isdecimal() else text


MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})


def is_missing(value: Any) -> bool:
    """Whether a cell is empty, or says so."""
    if value is None:
        return True
    if isinstance(value, str):
        return value.strip().lower() in MISSING
    try:
        return bool(value != value)  # noqa: PLR0124 (NaN, NaT)
    except TypeError:  # pandas.NA is neither the same nor another
        return True


def _columns(raw: Any, names: Sequence[str]) -> dict[str, Sequence[Any] | Array]:
    """The named columns of a table in any form."""
    if hasattr(raw, "to_dict") and hasattr(raw, "columns"):  # a DataFrame
        raw = {str(name): raw[name].to_numpy() for name in raw.columns}
    if isinstance(raw, Mapping):
        if raw and not any(isinstance(v, Sequence | np.ndarray) and not isinstance(v, str) for v in raw.values()):
            raw = {name: [value] for name, value in raw.items()}  # one row
        given = {str(name): values if isinstance(values, np.ndarray) else list(values) for name, values in raw.items()}
    elif isinstance(raw, Sequence) and raw and all(isinstance(row, Mapping) for row in raw):
        given = {name: [row.get(name) for row in raw] for name in {str(k) for row in raw for k in row}}
    else:
        rows = np.array(raw, dtype=object)
        rows = rows[None] if rows.ndim == 1 else rows
        if rows.ndim != 2 or rows.shape[1] != len(names):
            raise DataError(f"the model takes rows of {len(names)} columns: {', '.join(names[:20])}")
        return {name: rows[:, place].tolist() for place, name in enumerate(names)}
    if lacking := [name for name in names if name not in given]:
        raise DataError(f"no column {lacking[0]!r}; there are {', '.join(sorted(given)[:20]) or 'none'}")
    return {name: given[name] for name in names}
