"""Trees as Flower's records: tensors as a named ArrayRecord, the rest as JSON. Nothing is unpickled."""

from __future__ import annotations

import io
import json
import math
import re
from itertools import islice
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedstill.core.errors import DataError, in_one_line
from fedstill.core.tree import Tree

_TENSOR = "$tensor"
_AS, _BFLOAT16 = "$as", "bfloat16"  # beside it, of numbers that are sent by their bits
MOST_TEXT = 1 << 20  # characters of an answer's JSON: names and a few numbers, as all else is in tensors
_MOST_LEVELS = 32  # of a tree; what nests deeper could be read, but not written again
_MOST_NODES = 500_000  # values and names of a tree: an empty dict has two characters, and takes 64 bytes and more
_NODE = re.compile(r'[\[{,]|"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # what begins one; a string, as it may hold the others
_HEADER = 1024  # bytes that the head of a .npy may take
_DTYPES = {str(np.dtype(name)): np.dtype(name) for name in ("float16", "float32", "float64", "bool", "uint8", "int8")}
_DTYPES |= {name: np.dtype(name) for name in ("int16", "int32", "int64")}


def to_records(tree: Tree) -> RecordDict:
    """A tree as records; each tensor is named by its place, such as `message/model`."""
    arrays: dict[str, Array] = {}

    def strip(node: Tree, place: str) -> Any:
        if isinstance(node, Tensor):
            while place in arrays:  # a name of the user's own may look like a place
                place += "'"
            tensor = node.detach().cpu().contiguous()
            short = tensor.dtype == torch.bfloat16  # which NumPy has not: sent by its bits
            arrays[place] = Array((tensor.view(torch.int16) if short else tensor).numpy())
            return {_TENSOR: place, _AS: _BFLOAT16} if short else {_TENSOR: place}
        if isinstance(node, dict):
            return {key: strip(value, f"{place}/{key}" if place else key) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [strip(value, f"{place}/{i}") for i, value in enumerate(node)]
        return node

    shape = json.dumps(strip(tree, ""))
    return RecordDict({"tensors": ArrayRecord(arrays), "tree": ConfigRecord({"json": shape})})


def from_records(records: RecordDict, *, most_bytes: int | None = None, most_text: int | None = None) -> Tree:
    """The tree that records hold; what is not such a tree, or is larger than allowed, is refused.

    Nothing is decoded before its size is known. Each tensor has one place: one that were named often would take its
    memory as often when the tree is written again.
    """
    if not isinstance(records.get("tensors"), ArrayRecord) or not isinstance(records.get("tree"), ConfigRecord):
        raise DataError("it is not a message of fedstill's")
    arrays: dict[str, Array] = dict(records.array_records["tensors"])
    text = records.config_records["tree"].get("json")
    if not isinstance(text, str):
        raise DataError("it is not a message of fedstill's")
    size = len(text) + sum(len(array.data) for array in arrays.values())
    if most_bytes is not None and size > most_bytes:
        raise DataError(f"it has {size:,} bytes, more than the {most_bytes:,} allowed")
    if most_text is not None and len(text) > most_text:
        raise DataError(f"it has {len(text):,} characters of text, more than the {most_text:,} allowed")
    if next(islice(_NODE.finditer(text), _MOST_NODES, None), None) is not None:
        raise DataError(f"it has more than the {_MOST_NODES:,} values and names allowed")
    tensors = {place: _tensor(array) for place, array in arrays.items()}

    def fill(node: Any, level: int = 0) -> Tree:
        if level > _MOST_LEVELS:
            raise DataError(f"it nests deeper than the {_MOST_LEVELS} levels allowed")
        if isinstance(node, dict):
            if _TENSOR in node:
                place = node[_TENSOR]
                if not isinstance(place, str) or place not in tensors:
                    raise DataError("it names a tensor that it lacks, or names one twice")
                tensor = tensors.pop(place)
                if node == {_TENSOR: place}:
                    return tensor
                if node != {_TENSOR: place, _AS: _BFLOAT16} or tensor.dtype != torch.int16:
                    raise DataError("it names a tensor in a way that is not known")
                return tensor.view(torch.bfloat16)
            return {key: fill(value, level + 1) for key, value in node.items()}
        return [fill(value, level + 1) for value in node] if isinstance(node, list) else node

    try:
        return fill(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise DataError(f"its JSON cannot be read: {in_one_line(error)}") from error


def _tensor(array: Array) -> Tensor:
    """An array as a tensor. Its own description is believed only where its bytes agree: NumPy would allocate by it.

    Errors repeat no text of the sender's: neither the tensor's name, nor its dtype unless it is known.
    """
    dtype, shape = _DTYPES.get(array.dtype), tuple(array.shape)
    if dtype is None or any(not isinstance(n, int) or n < 0 for n in shape):
        raise DataError(f"a tensor: it is not an array of one of {', '.join(_DTYPES)}")
    count = math.prod(shape) * dtype.itemsize
    if not 0 <= len(array.data) - count <= _HEADER:
        raise DataError(f"a tensor: {len(array.data):,} bytes do not hold {dtype} of shape {shape!s:.100}")
    stream = io.BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(stream)
        head = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        header = head(stream)
        if header[0] != shape or header[2] != dtype or len(array.data) - stream.tell() != count:
            raise DataError(f"a tensor: {len(array.data):,} bytes do not hold {dtype} of shape {shape!s:.100}")
        found = np.frombuffer(array.data, dtype, offset=stream.tell()).reshape(shape, order="F" if header[1] else "C")
    except DataError:
        raise
    except Exception as error:  # of NumPy's reader of headers, also tokenize's and the parser's
        raise DataError("a tensor: its bytes are not those of an array") from error
    return torch.from_numpy(np.array(found, order="C"))
