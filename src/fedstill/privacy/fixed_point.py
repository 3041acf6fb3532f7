"""Numbers as whole multiples of 2^-30, whose sums are exact in any order, and modulo 2^64 under masks.

A number beyond 2^17 counts as 2^17; sums of up to 65,535 vectors cannot overflow. Rounding moves a number by 2^-31 at
most, less than float32 itself does to numbers above 2^-8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.core.errors import SettingError

_UNIT = 2**30
_LARGEST = 2**17
MOST = 2**16 - 1  # vectors in a sum


def to_integers(vector: Tensor) -> Tensor:
    """The numbers in units of 2^-30.

    >>> to_integers(torch.tensor([0.5, -1.0])).tolist()
    [536870912, -1073741824]
    """
    return (vector.double().clamp(-_LARGEST, _LARGEST) * _UNIT).round().long()


def mean_of(total: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The mean of so many vectors, given the sum of their integers.

    >>> mean_of(to_integers(torch.tensor([0.25])) + to_integers(torch.tensor([0.5])), 2, torch.float32)
    tensor([0.3750])
    """
    return (total.double() / (count * _UNIT)).to(dtype)


def check_count(count: int) -> None:
    """Refuse more vectors than a sum has room for."""
    if count > MOST:
        raise SettingError(f"secure_aggregation adds up {MOST:,} clients at most, and a round has {count:,}")


def can_be_sum(total: Tensor, count: int) -> bool:
    """Whether so many vectors can add up to this: what is left of a mask hardly ever does."""
    return int(total.max()) <= count * _LARGEST * _UNIT and int(total.min()) >= -count * _LARGEST * _UNIT
