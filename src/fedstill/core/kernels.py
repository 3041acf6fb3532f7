"""Convolutions that no kernel may compute as they stand.

PyTorch's oneDNN kernel for AVX2 writes outside its memory in the backward pass of a 1x1 convolution with a stride, on
channels-last tensors with 2 to 7 input channels; and in the forward pass of such a transposed one, with 2 to 7 outputs.
`tools/kernel_sweep.py` found these cases and no others among 2-D convolutions. A 1x1 convolution with a stride is one
without, on every `stride`-th pixel: that is what is computed instead, on every processor, so that all do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedstill.core.errors import SettingError

_CHANNELS = range(2, 8)
# The arguments of PyTorch's functions, in their order.
_PLAIN = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


def corrupts_memory(channels: int, kernel: Sequence[int], stride: Sequence[int], groups: int) -> bool:
    """Whether a kernel for a convolution of this geometry may write outside its memory.

    >>> corrupts_memory(4, (1, 1), (2, 2), groups=1), corrupts_memory(8, (1, 1), (2, 2), groups=1)
    (True, False)
    """
    return groups == 1 and channels in _CHANNELS and len(kernel) == 2 and max(kernel) == 1 and max(stride) > 1


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: str | Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """`torch.nn.functional.conv2d`, but for what corrupts memory."""
    if corrupts_memory(x.shape[-3], weight.shape[2:], stride, groups):
        if not isinstance(padding, str) and any(padding):
            x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
        return F.conv2d(x[..., :: stride[0], :: stride[1]], weight, bias)
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


@dataclass(frozen=True)
class _Convolve:
    """Stands in for `nn.Conv2d._conv_forward`; it holds numbers alone, so that a copied layer uses its own weights."""

    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


def protect(module: nn.Module) -> None:
    """Let no `nn.Conv2d` of a network corrupt memory; the others stay as they are."""
    for layer in module.modules():
        if (
            isinstance(layer, nn.Conv2d)
            and layer.padding_mode == "zeros"
            and corrupts_memory(layer.in_channels, layer.kernel_size, layer.stride, layer.groups)
        ):
            layer._conv_forward = _Convolve(layer.stride, layer.padding, layer.dilation, layer.groups)  # type: ignore[assignment]


class Refusing(TorchFunctionMode):
    """Entered around a pass, it makes a convolution that `protect` cannot reach, and corrupts memory, an error."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (torch.conv2d, torch.conv_transpose2d):
            transposed = func is torch.conv_transpose2d
            named = dict(zip(_TRANSPOSED if transposed else _PLAIN, args, strict=False)) | given
            weight, stride, groups = named["weight"], named.get("stride", 1), named.get("groups", 1)
            stride = (stride, stride) if isinstance(stride, int) else tuple(stride)
            channels = weight.shape[1] if transposed else named["input"].shape[-3]
            if corrupts_memory(channels, weight.shape[2:], stride, groups):
                raise SettingError(
                    f"the network has a 1x1 {'transposed ' * transposed}convolution with stride {stride} on "
                    f"{channels} channels that is no nn.Conv2d layer: PyTorch's kernel for it writes outside its "
                    "memory on some processors; make it such a layer, or stride by slicing: x[:, :, ::2, ::2]"
                )
        return func(*args, **given)
