"""What tests of the core share."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor, nn

few = settings(max_examples=60, deadline=None)


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal, in types and dtypes too, NaN being equal to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def state(module: nn.Module) -> dict[str, Tensor]:
    """The module's own tensors by name."""
    return dict(module.state_dict())
