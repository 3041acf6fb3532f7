"""Random changes to whole batches of images, from a short text such as "crop,flip"."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fedstill.core.errors import SettingError, unknown

Augmentation: TypeAlias = Callable[[Tensor, Generator], Tensor]

STEPS = ("crop", "flip", "rotate", "scale")


def parse(spec: str) -> Augmentation | None:
    """The function a text stands for: steps separated by commas, applied in that order.

    `crop` or `crop:N` cuts the image out of itself padded by 4 (N) zeros on each side; `flip` mirrors about
    every second image left to right; `rotate:D` turns by up to D degrees either way; `scale:A-B` draws the
    image A to B times as large, repeating its border where it gets smaller. "" or "none" gives None.

    >>> augment = parse("crop,flip")
    >>> augment(torch.zeros(2, 3, 8, 8), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 8, 8])
    """
    if spec.strip() in ("", "none"):
        return None
    steps = [_step(word.strip(), spec) for word in spec.split(",")]

    def augment(x: Tensor, generator: Generator) -> Tensor:
        for step in steps:
            x = step(x, generator)
        return x.contiguous(memory_format=torch.channels_last)

    return augment


def _step(word: str, spec: str) -> Augmentation:
    name, colon, argument = word.partition(":")
    if name not in STEPS:
        raise unknown("augmentation", name, STEPS)
    try:
        match name:
            case "crop":
                padding = int(argument) if colon else 4
                if padding > 0:
                    return partial(random_crop, padding=padding)
            case "flip" if not colon:
                return random_flip
            case "rotate":
                degrees = float(argument)
                if 0 < degrees <= 180:
                    return partial(random_rotation, degrees=degrees)
            case "scale":
                low, high = (float(part) for part in argument.split("-"))
                if 0 < low <= high < math.inf:
                    return partial(random_scale, low=low, high=high)
    except ValueError:
        pass
    raise SettingError(
        f"augmentation {word!r} in {spec!r}; use crop, crop:PIXELS, flip, rotate:DEGREES or scale:LOW-HIGH"
    )


def random_crop(x: Tensor, generator: Generator, padding: int) -> Tensor:
    """Each image shifted by its own whole number of pixels, up to `padding` each way; zeros come in."""
    offsets = torch.randint(0, 2 * padding + 1, (2, len(x)), generator=generator).to(x.device)
    return crop_at(x, offsets[0], offsets[1], padding)


def crop_at(x: Tensor, top: Tensor, left: Tensor, padding: int) -> Tensor:
    """Each image cut out of its padded self at its own corner, all by one gather."""
    height, width = x.shape[2:]
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, padding, padding, padding, padding))
    windows = padded.unfold(1, height, 1).unfold(2, width, 1)  # (B, corners, corners, C, H, W), a view
    cut = windows.permute(0, 1, 2, 4, 5, 3)[torch.arange(len(x), device=x.device), top, left]
    return cut.permute(0, 3, 1, 2)


def random_flip(x: Tensor, generator: Generator) -> Tensor:
    """Each image mirrored left to right with probability one half."""
    return flip_where(x, (torch.rand(len(x), generator=generator) < 0.5).to(x.device))


def flip_where(x: Tensor, mirrored: Tensor) -> Tensor:
    """Those images mirrored left to right that are marked."""
    return torch.where(mirrored.view(-1, 1, 1, 1), x.flip(3), x)


def random_rotation(x: Tensor, generator: Generator, degrees: float) -> Tensor:
    """Each image turned about its centre by an angle uniform in ±degrees."""
    return rotate_by(x, (torch.rand(len(x), generator=generator).to(x) * 2 - 1) * degrees)


def rotate_by(x: Tensor, degrees: Tensor) -> Tensor:
    """Each image turned counter-clockwise by its own angle."""
    angle = torch.deg2rad(degrees)
    cos, sin = angle.cos(), angle.sin()
    # Coordinates run from -1 to 1 on both axes, so an image that is not square needs its aspect undone.
    aspect = x.shape[2] / x.shape[3]
    matrix = torch.stack([torch.stack([cos, -sin * aspect], 1), torch.stack([sin / aspect, cos], 1)], 1)
    return _sample(x, matrix)


def random_scale(x: Tensor, generator: Generator, low: float, high: float) -> Tensor:
    """Each image drawn about its centre at a size uniform in low..high times its own."""
    return scale_by(x, low + torch.rand(len(x), generator=generator).to(x) * (high - low))


def scale_by(x: Tensor, factor: Tensor) -> Tensor:
    """Each image drawn at its own multiple of its size."""
    return _sample(x, torch.eye(2).to(x) / factor.view(-1, 1, 1))


def _sample(x: Tensor, matrix: Tensor) -> Tensor:
    """Look up every output pixel where `matrix` (B, 2, 2) sends it; beyond the border, the border."""
    theta = F.pad(matrix, (0, 1))
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
