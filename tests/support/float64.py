"""The library in float64, where two ways to compute the same differ by next to nothing on every processor.

In float32 Adam makes a whole step of a gradient that is all rounding, and each instruction set rounds differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import fedstill


@contextmanager
def in_float64() -> Iterator[None]:
    """Networks, samples and random draws that are made meanwhile are in float64, and nothing is rounded to float32."""

    def normalise(dataset: fedstill.Dataset, x: Tensor) -> Tensor:
        mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (dataset.mean, dataset.std))
        return (x.double() / 255 - mean) / std

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedstill.Dataset, "normalise", normalise)
        patch.setattr(Tensor, "float", Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
