"""Random numbers for privacy: repeatable in simulations, secret where there is somebody to protect."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

_SUMMANDS = 4  # of one secure draw


def gaussian(count: int, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers in float64; without a generator, of the system's secure randomness.

    A generator is for simulations: whoever knows its seed knows the noise.
    """
    if generator is not None:
        return torch.randn(count, generator=generator, dtype=torch.float64)
    # The sum of several draws has bits that the rounding of no single one gives away (Holohan and Braghin 2021).
    draws = _box_muller(_SUMMANDS * count).reshape(_SUMMANDS, count)
    return torch.from_numpy(draws.sum(0) / np.sqrt(_SUMMANDS))


def _box_muller(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Normal numbers, two of each pair of uniform ones."""
    pairs = -(-count // 2)
    whole = np.frombuffer(os.urandom(16 * pairs), np.uint64) >> np.uint64(11)  # 53 bits
    first, second = ((whole + 0.5) * 2.0**-53).reshape(2, pairs)  # above 0 and below 1
    length, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
    return np.concatenate([length * np.cos(angle), length * np.sin(angle)])[:count]


def uniform(count: int, generator: torch.Generator | None) -> Tensor:
    """Numbers from 0 to 1; without a generator, of the system's secure randomness."""
    if generator is not None:
        return torch.rand(count, generator=generator, dtype=torch.float64)
    return torch.from_numpy((np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(11)) * 2.0**-53)
