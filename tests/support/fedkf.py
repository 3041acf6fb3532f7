"""What tests of FedKF share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Z, WIDTH = 6, 8

TINY: dict[str, Any] = {"z_dim": Z, "width": WIDTH}

SHAPE = (1, 16, 16)


def moved(vector: Tensor, seed: int) -> Tensor:
    """Weights somewhere near."""
    return vector + 0.1 * torch.randn(len(vector), generator=torch.Generator().manual_seed(seed))


def generated(named: Mapping[str, Tensor], z: Tensor, side: int = 16, width: int = WIDTH) -> Tensor:
    """Images from noise: Linear, BN, up, conv, BN(0.8), LReLU, up, conv, BN(0.8), LReLU, conv, sigmoid."""

    def norm(h: Tensor, layer: str, eps: float) -> Tensor:
        mean, var = h.mean((0, 2, 3), keepdim=True), h.var((0, 2, 3), keepdim=True, unbiased=False)
        scale, shift = (named[f"stages.{layer}.{part}"].view(1, -1, 1, 1) for part in ("weight", "bias"))
        return (h - mean) / (var + eps).sqrt() * scale + shift

    def conv(h: Tensor, layer: str) -> Tensor:
        return F.conv2d(h, named[f"stages.{layer}.weight"], named[f"stages.{layer}.bias"], padding=1)

    def doubled(h: Tensor) -> Tensor:
        return h.repeat_interleave(2, 2).repeat_interleave(2, 3)

    def leaky(h: Tensor) -> Tensor:
        return torch.where(h > 0, h, 0.2 * h)

    h = z @ named["fc.weight"].T + named["fc.bias"]
    h = h.view(len(z), side // 4, side // 4, width).permute(0, 3, 1, 2)
    h = conv(doubled(norm(h, "0", 1e-5)), "2")
    h = conv(doubled(leaky(norm(h, "3", 0.8))), "6")
    h = conv(leaky(norm(h, "7", 0.8)), "9")
    return 1 / (1 + (-h).exp())
