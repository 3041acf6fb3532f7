"""Trees of named tensors and plain values, as bytes: messages, client state and checkpoints are all this.

A tree is a tensor, None, bool, int, float, str, or a dict (with string keys) or list of trees. It is written as
safetensors, with the shape of the tree as JSON in the header, so reading one can build nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedstill.core.device import to_current_device
from fedstill.core.errors import DataError, in_one_line

Tree = Any
Message = dict[str, Tensor]
"""What crosses between client and server: tensors with names. A whole network is one flat vector."""

_TENSOR = "$tensor"
_DIGEST = re.compile(rb'"sha256":"([0-9a-f]{64})"')  # in the header; within strings the quotes would be escaped
_BLANK = b"0" * 64
_HEADER = 100_000_000  # bytes that safetensors allows for it


def encode(tree: Tree) -> bytes:
    """Bytes that `decode` turns into an equal tree.

    >>> decode(encode({"w": torch.ones(2), "rounds": [1, 2]}))
    {'w': tensor([1., 1.]), 'rounds': [1, 2]}
    """
    return _encoded(tree, {})


def check(tree: Tree) -> None:
    """TypeError if something in it cannot be kept or sent."""
    _strip(tree, {}, set())


def _encoded(tree: Tree, metadata: dict[str, str]) -> bytes:
    tensors: dict[str, Tensor] = {}
    shape = json.dumps(_strip(tree, tensors, set()))
    return save_tensors(tensors, metadata={"tree": shape, **metadata})


def seal(tree: Tree, label: str) -> bytes:
    """The tree as bytes that carry a digest of themselves and of a label, which says what they are and whose.

    >>> unseal(seal({"rounds": 2}, "client 5"), "client 5")[0]
    {'rounds': 2}
    """
    data = _encoded(tree, {"sha256": _BLANK.decode()})
    digest = _digest(data, label)[1].encode()
    found = _DIGEST.search(data, 0, header_size(data))
    assert found
    view = memoryview(data)
    return b"".join([view[: found.start(1)], digest, view[found.end(1) :]])


def unseal(data: bytes, label: str) -> tuple[Tree, str]:
    """The tree that was sealed under this label, and its digest; empty if the bytes have none.

    DataError if these are other bytes than were sealed, or under another label.
    """
    carried, found = _digest(data, label)
    if carried != found:
        raise DataError("its digest does not fit: it is damaged, or the file of something else")
    return decode(data), carried


def header_size(data: bytes) -> int:
    """Bytes of the header with its length, as its first 8 bytes say."""
    return 8 + min(int.from_bytes(data[:8], "little"), _HEADER)


def carried_digest(header: bytes) -> str:
    """The digest in the header of a sealed tree; empty if there is none."""
    found = _DIGEST.search(header)
    return found[1].decode() if found else ""


def _digest(data: bytes, label: str) -> tuple[str, str]:
    """The digest that bytes carry, and the one that they should; both empty if they carry none."""
    found = _DIGEST.search(data, 0, header_size(data))
    if not found:
        return "", ""
    computed, view = hashlib.sha256(label.encode() + b"\0"), memoryview(data)
    for part in (view[: found.start(1)], _BLANK, view[found.end(1) :]):
        computed.update(part)
    return found[1].decode(), computed.hexdigest()


def copied(node: Tree) -> Tree:
    """The tree with tensors of its own, in main memory: what it was, whatever becomes of the other."""
    if isinstance(node, Tensor):
        return node.detach().to("cpu", copy=True)
    if isinstance(node, dict):
        return {key: copied(value) for key, value in node.items()}
    return [copied(value) for value in node] if isinstance(node, list | tuple) else node


# Functions of the module, not of the calls: a closure that calls itself is a cycle, which would keep every tensor that
# it has seen until the next garbage collection.


def _strip(node: Tree, tensors: dict[str, Tensor], memory: set[int]) -> Tree:
    """The node with names for its tensors, which are added to `tensors`."""
    if isinstance(node, Tensor):
        if node.layout is not torch.strided:
            raise TypeError(f"cannot be kept or sent: a tensor of layout {node.layout}; make it dense")
        name = str(len(tensors))
        tensor = node.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory: give each its own.
        tensors[name] = tensor.clone() if tensor.untyped_storage().data_ptr() in memory else tensor
        memory.add(tensor.untyped_storage().data_ptr())
        return {_TENSOR: name}
    if isinstance(node, dict):
        for key in node:
            if not isinstance(key, str) or key == _TENSOR:
                raise TypeError(f"cannot be kept or sent: a dict with the key {key!r}; keys must be strings")
        return {k: _strip(v, tensors, memory) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return [_strip(v, tensors, memory) for v in node]
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise TypeError(f"cannot be kept or sent: {type(node).__name__}; use tensors, numbers, strings, lists, dicts")


def decode(data: bytes) -> Tree:
    """The tree that `encode` was given; DataError if the bytes are not one."""
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        shape = json.loads(header["__metadata__"]["tree"])
        return _fill(shape, {name: to_current_device(tensor) for name, tensor in load_tensors(data).items()})
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise DataError(f"damaged data: {in_one_line(error)}") from error


def _fill(node: Tree, tensors: dict[str, Tensor]) -> Tree:
    if isinstance(node, dict):
        # Taken out: `encode` names each tensor once, and one that is named again would be a copy when it is written.
        return tensors.pop(node[_TENSOR]) if _TENSOR in node else {k: _fill(v, tensors) for k, v in node.items()}
    if isinstance(node, list):
        return [_fill(v, tensors) for v in node]
    return node


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The named tensors in a safetensors file, such as a model."""
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DataError(f"{path} is damaged: {in_one_line(error)}") from error


def metadata(path: Path) -> dict[str, str]:
    """The words in the header of a safetensors file; none if it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError):
        return {}


def tensors(node: Tree, name: str) -> dict[str, Tensor]:
    """Every tensor of a tree, by its place there.

    >>> list(tensors({"a": [torch.zeros(1)], "b": 1}, "state"))
    ['state/a/0']
    """
    if isinstance(node, Tensor):
        return {name: node}
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
    return {place: part for key, each in pairs for place, part in tensors(each, f"{name}/{key}").items()}


def nbytes(tree: Tree) -> int:
    """Bytes of the tensors in a tree."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, dict):
        return sum(map(nbytes, tree.values()))
    return sum(map(nbytes, tree)) if isinstance(tree, list) else 0


def first_not_finite(message: Message) -> str | None:
    """Name of a part that holds NaN or infinity, if any."""
    for name, tensor in message.items():
        number = isinstance(tensor, Tensor) and tensor.is_floating_point()
        # The sum is the quick test: it is finite unless a part is not, or it overflows.
        if number and not math.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            return name
    return None
