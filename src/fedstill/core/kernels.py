"""Convolutions that no kernel may compute as they stand.

For the gradient of the weights of a 1x1 convolution with a stride, oneDNN's kernel for AVX2 copies the pixels that are
used into a buffer. It has room for `pixels x channels` numbers, but pixel i is written at `8 i`: with fewer than 8
channels that may lie behind its end. The kernel takes float32 in channels-last order, in 1-D or 2-D, with one group, no
padding, and sides that the stride divides; the channels are the inputs, of a transposed convolution the outputs.
`tools/kernel_sweep.py` finds these cases and no others, and none on SSE4.1, AVX and AVX-512.

A 1x1 convolution with a stride is one without, on every `stride`-th pixel, and that is computed instead:

- for `nn.Conv2d` layers with 2 to 7 channels on every processor;
- for all others (functions, TorchScript, a method's own modules, 1-D) in the backward pass, at the one place through
  which PyTorch reaches its kernels. Each backward pass of a convolution then goes through Python, which takes about 10
  microseconds; so this is done only where oneDNN uses AVX2.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def corrupts_memory(channels: int, kernel: Sequence[int], stride: Sequence[int], groups: int) -> bool:
    """Whether a kernel for a convolution of this geometry may write outside its memory.

    >>> corrupts_memory(4, (1, 1), (2, 2), groups=1), corrupts_memory(8, (1, 1), (2, 2), groups=1)
    (True, False)
    """
    return channels < 8 and groups == 1 and max(stride) > 1 and max(kernel) == 1 and len(kernel) < 3


def protect(module: nn.Module) -> None:
    """Let no `nn.Conv2d` of a network corrupt memory; the others stay as they are."""
    for layer in module.modules():
        if (
            isinstance(layer, nn.Conv2d)
            and layer.padding_mode == "zeros"
            and layer.in_channels > 1
            and corrupts_memory(layer.in_channels, layer.kernel_size, layer.stride, layer.groups)
        ):
            layer._conv_forward = _Convolve(layer.stride, layer.padding, layer.dilation, layer.groups)  # type: ignore[assignment]


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: str | Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """`torch.nn.functional.conv2d`, but for what corrupts memory; of a single channel, `_guard` sees to it."""
    if x.shape[-3] > 1 and corrupts_memory(x.shape[-3], weight.shape[2:], stride, groups):
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


def kernels_are_sound() -> bool:
    """Whether oneDNN uses no kernel for AVX2: it has those for AVX-512, or this is no x86 processor."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL"
    newest = allowed.upper().startswith(("ALL", "DEFAULT", "AVX512", "AVX10"))
    return newest and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _guard() -> torch.library.Library:
    """Compute the backward pass of such convolutions another way, as long as the library lives."""
    backward = torch.library.get_kernel("aten::convolution_backward", "CPU").call_boxed

    def guarded(
        keys: Any,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Sequence[int] | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
        wanted: Sequence[bool],
    ) -> Any:
        kernel = weight.shape[2:]
        if any(padding) or not corrupts_memory(weight.shape[1], kernel, stride, groups):
            return backward(
                keys, grad, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, wanted
            )
        used: tuple[Any, ...] = (..., *(slice(None, None, step) for step in stride))
        unit, none = [1] * len(kernel), [0] * len(kernel)
        if transposed:  # the bias is added to all pixels of the output
            of_x, of_weight, _ = backward(
                keys, grad[used], x, weight, None, unit, none, unit, True, none, 1, [*wanted[:2], False]
            )
            return of_x, of_weight, grad.sum([0, *range(2, grad.dim())]) if wanted[2] else None
        few, of_weight, of_bias = backward(keys, grad, x[used], weight, bias, unit, none, unit, False, none, 1, wanted)
        if few is None:
            return None, of_weight, of_bias
        of_x = torch.zeros_like(x)
        of_x[used] = few
        return of_x, of_weight, of_bias

    library = torch.library.Library("aten", "IMPL")
    library.impl("convolution_backward", guarded, "CPU", with_keyset=True)
    return library


_LIBRARY = None if kernels_are_sound() else _guard()
