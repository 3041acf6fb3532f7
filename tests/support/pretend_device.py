"""A GPU that is not there: `cuda:0` on any machine.

Tensors on it are ordinary CPU tensors, with ordinary kernels and gradients, whose memory carries a tag. What a real
GPU refuses is refused here too: an operation on tensors of both devices, and NumPy's view of a tensor that is on the
GPU. So a run on it proves that everything is where it has to be; and as the arithmetic is the CPU's, it ends with the
same bits. As a GPU does, it accepts numbers (tensors without dimensions) and indices that are on the CPU.

Memory that was made while it was not watched is the CPU's. What PyTorch makes inside an operation, or for a gradient,
without being told where belongs to either device, until it meets a tensor of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
Place = Literal["gpu", "cpu", "either"]

_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index", "aten::_index_put_impl_")
_CROSSING = ("aten::copy_", "aten::_to_copy")
_DEVICE, _IS_CUDA, _IS_CPU = (getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu"))


class MixedDevices(RuntimeError):
    """What a real GPU would have refused."""


def place(tensor: Tensor) -> Place:
    """Where a tensor is."""
    with torch._C.DisableTorchFunction():
        found: Place = getattr(tensor.untyped_storage(), "place", "cpu")
    return found


def put(tensor: Tensor, where: Place) -> Tensor:
    with torch._C.DisableTorchFunction():
        tensor.untyped_storage().place = where  # type: ignore[attr-defined]
    return tensor


@contextmanager
def pretended_gpu() -> Iterator[Counter[Place]]:
    """There is one GPU, `cuda:0`. Gives the number of operations on each device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
        patch.setattr(torch.cuda, "get_rng_state", lambda device: None)
        patch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
        with _Calls(), _Kernels() as kernels:
            yield kernels.count


class _Calls(TorchFunctionMode):
    """Calls as they are written: what names a device, or asks for one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in (_DEVICE, _IS_CUDA, _IS_CPU):
            on_gpu = place(args[0]) == "gpu"
            return (GPU if on_gpu else CPU) if func == _DEVICE else on_gpu == (func == _IS_CUDA)
        if name in ("numpy", "__array__") and place(args[0]) == "gpu":
            raise MixedDevices("NumPy cannot see a tensor that is on the GPU")
        if func in (Tensor.cpu, Tensor.cuda):
            return _moved(args[0], "cpu" if func is Tensor.cpu else "gpu")
        if func is Tensor.to:
            return _to(*args, **kwargs)
        generator = kwargs.get("generator")
        where = kwargs.get("device")
        if where is not None:
            kwargs["device"] = CPU
        if generator is not None and (_place(where) if where else "cpu") == "gpu":
            raise MixedDevices(f"{name} on the GPU with a generator of the CPU's")
        if generator is not None and any(isinstance(arg, Tensor) and place(arg) == "gpu" for arg in args):
            raise MixedDevices(f"{name} of a tensor on the GPU with a generator of the CPU's")
        result = func(*args, **kwargs)
        fresh = isinstance(result, Tensor) and not _tensors((args, kwargs))
        if isinstance(result, Tensor) and (where is not None or fresh):
            put(result, _place(where) if where is not None else "cpu")
        return result


def _place(device: Any) -> Place:
    kind = torch.device(device).type
    assert kind in ("cuda", "cpu", "meta"), kind  # meta: nothing is there, only its size is counted
    return "gpu" if kind == "cuda" else "cpu"


def _moved(tensor: Tensor, where: Place) -> Tensor:
    return tensor if place(tensor) == where else put(tensor.clone(), where)


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Tensor.to with a device, a dtype or another tensor."""
    where: Place | None = None
    if "device" in kwargs:
        device = kwargs.pop("device")
        where = None if device is None else _place(device)
    if args and isinstance(args[0], Tensor):
        where, args = place(args[0]), (args[0].dtype, *args[1:])
    elif args and isinstance(args[0], str | torch.device | int | None):
        where, args = None if args[0] is None else _place(args[0]), args[1:]
    args = tuple(arg for arg in args if arg is not None)
    if args and isinstance(args[0], bool):  # non_blocking
        args = args[1:]
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    result = tensor.to(*args, **kwargs) if args or kwargs else tensor
    return result if where is None else _moved(result, where)


class _Kernels(TorchDispatchMode):
    """Operations as they are carried out, those of gradients too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = Counter[Place]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        given = _tensors((args, kwargs))
        places = [place(tensor) for tensor in given]
        if name not in _CROSSING:
            _check(name, args, given, places)
        where: Place = "gpu" if "gpu" in places else "cpu" if "cpu" in places else "either"
        if name == "aten::copy_":
            where = places[0]
        self.count[where] += 1
        known = {_memory(tensor) for tensor in given}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if _memory(tensor) not in known:
                put(tensor, where)
        for tensor in given:  # what could be anywhere has come to be somewhere
            if name.endswith("_") and tensor is given[0] and place(tensor) == "either":
                put(tensor, where)
        return result


def _tensors(given: Any) -> list[Tensor]:
    """Those in what an operation is called with or returns, in their order."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, dict):
        given = given.values()
    elif not isinstance(given, tuple | list):
        return []
    return [tensor for each in given for tensor in _tensors(each)]


def _memory(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


def _check(name: str, args: Sequence[Any], given: list[Tensor], places: list[Place]) -> None:
    """Refuse what a real GPU refuses."""
    if "gpu" not in places or "cpu" not in places:
        return
    free = {id(index) for index in args[1]} if name in _INDEXED and places[0] != "cpu" else set()
    on_cpu = [t for t, where in zip(given, places, strict=True) if where == "cpu" and id(t) not in free]
    changed = name.endswith("_") and places[0] == "cpu"
    if changed or any(tensor.dim() for tensor in on_cpu):
        shapes = [f"{tuple(tensor.shape)} on {where}" for tensor, where in zip(given, places, strict=True)]
        raise MixedDevices(f"{name} of tensors on both devices: {', '.join(shapes)}")
