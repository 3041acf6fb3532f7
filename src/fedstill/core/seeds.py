"""Every random draw comes from a stream keyed by (seed, purpose, round, client)."""

from __future__ import annotations

import zlib

import numpy as np
import torch


def key(seed: int, purpose: str, *where: int) -> int:
    """A 63-bit seed for one purpose at one place (usually round, client).

    >>> key(0, "cohort", 1) == key(0, "cohort", 1), key(0, "cohort", 1) == key(0, "batches", 1)
    (True, False)
    """
    sequence = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *where])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def numpy_rng(seed: int, purpose: str, *where: int) -> np.random.Generator:
    """A NumPy generator for one purpose."""
    return np.random.default_rng(key(seed, purpose, *where))


def torch_rng(seed: int, purpose: str, *where: int) -> torch.Generator:
    """A PyTorch generator for one purpose."""
    return torch.Generator().manual_seed(key(seed, purpose, *where))
