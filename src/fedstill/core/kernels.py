"""Convolutions that no kernel may compute as they stand.

For the gradient of the weights of a 1x1 convolution with a stride, oneDNN's kernels copy the pixels in use into a
buffer. It has room for `pixels x channels` numbers, but a later piece of the image, from pixel i on, is written at
`block x i`, where a block is 8 channels with AVX2 and 16 with AVX-512: with fewer channels that lies behind its end. So
it happens where an image has several pieces, with AVX2 nearly always, with AVX-512 where more than 512 pixels are used
or threads share an image. The kernels take float32 in channels-last order, in 1-D or 2-D, with one group, no padding,
and sides that the stride divides; the channels are the inputs, of a transposed convolution the outputs.
`tools/kernel_sweep.py` finds these cases and no others, and none with SSE4.1 and AVX.

A 1x1 convolution with a stride is one without, on every `stride`-th pixel, and that is computed instead:

- for `nn.Conv2d` layers with 2 to 7 channels everywhere, forward and backward;
- for all others (functions, TorchScript, a method's own modules, 1-D) in the backward pass, at the one place through
  which PyTorch reaches its kernels. Each backward pass of a convolution then goes through Python, which takes about 10
  microseconds.

oneDNN keeps the kernels that it has made, 1,024 of them. FedHyb's sub-networks have another width in every step: those
of ShuffleNetV2 need more, which were made again and again (46 ms a step instead of 35). Here 8,192 are kept.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")  # read when the first kernel is made


def block() -> int:
    """How many channels oneDNN's kernels take together on this processor; 0: it has none of these kernels."""
    has = torch.cpu.get_capabilities()
    newest = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL").upper()
    if not has.get("avx2") or newest in ("SSE41", "AVX"):
        return 0
    return 16 if has.get("avx512_f") and not newest.startswith("AVX2") else 8


def narrow(channels: int, below: int, kernel: Sequence[int], stride: Sequence[int], groups: int) -> bool:
    """Whether this is a 1x1 convolution with a stride on fewer channels than that.

    >>> narrow(4, 8, (1, 1), (2, 2), groups=1), narrow(8, 8, (1, 1), (2, 2), groups=1)
    (True, False)
    """
    return max(stride) > 1 and channels < below and groups == 1 and max(kernel) == 1 and len(kernel) < 3


def protect(module: nn.Module) -> None:
    """Let `nn.Conv2d` layers with 2 to 7 channels do without a stride; the others stay as they are."""
    for layer in module.modules():
        if (
            isinstance(layer, nn.Conv2d)
            and layer.padding_mode == "zeros"
            and layer.in_channels > 1
            and narrow(layer.in_channels, 8, layer.kernel_size, layer.stride, layer.groups)
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
    """`torch.nn.functional.conv2d`, but for 2 to 7 channels."""
    if x.shape[-3] > 1 and narrow(x.shape[-3], 8, weight.shape[2:], stride, groups):
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


def _guard(channels: int) -> torch.library.Library:
    """Compute the backward pass of convolutions with fewer channels another way, as long as the library lives."""
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
        if (
            not narrow(weight.shape[1], channels, kernel, stride, groups)
            or any(padding)
            or (channels == 16 and torch.get_num_threads() == 1 and (x if transposed else grad)[0, 0].numel() <= 512)
        ):
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


_LIBRARY = _guard(block()) if block() else None
