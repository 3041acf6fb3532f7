"""Weighted means of vectors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedstill.core.errors import FedstillError


class RunningMean:
    """A weighted mean that keeps one sum in float64 however many vectors come.

    >>> mean = RunningMean()
    >>> mean.add(torch.tensor([1.0]), 1)
    >>> mean.add(torch.tensor([4.0]), 2)
    >>> mean.result()
    tensor([3.])
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._sum: Tensor | None = None
        self._dtype = torch.float32

    def add(self, vector: Tensor, weight: float) -> None:
        if self._sum is None:
            self._sum, self._dtype = torch.zeros_like(vector, dtype=torch.float64), vector.dtype
        self._sum.add_(vector, alpha=weight)
        self.total += weight

    def result(self) -> Tensor:
        """The mean, in the dtype of what was added."""
        if self._sum is None or self.total <= 0:
            raise FedstillError("nothing to average: no vector with a positive weight")
        return (self._sum / self.total).to(self._dtype)


class ClassMeans:
    """Means over clients of a row for each class, such as its logits or features; a client has those of its classes.

    >>> means = ClassMeans(classes=2)
    >>> means.add(torch.tensor([[1.0], [9.0]]), torch.tensor([1.0, 0.0]))
    >>> means.add(torch.tensor([[3.0], [9.0]]), torch.tensor([1.0, 0.0]))
    >>> [part.tolist() for part in means.after(torch.tensor([[0.0], [5.0]]), torch.tensor([0.0, 1.0]))]
    [[[2.0], [5.0]], [1.0, 1.0]]
    """

    def __init__(self, classes: int) -> None:
        self._sums: Tensor | None = None
        self._counts = torch.zeros(classes, dtype=torch.float64)

    def add(self, rows: Tensor, known: Tensor) -> None:
        """One client's rows, and which of them count."""
        if self._sums is None:
            self._sums = torch.zeros_like(rows, dtype=torch.float64)
            self._counts = self._counts.to(rows.device)
        self._sums.add_(rows * (known > 0).unsqueeze(1))
        self._counts.add_(known)

    def after(self, rows: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of a round, and which are known, after those of the one before.

        A class that nobody had keeps what was known of it.
        """
        if self._sums is None:
            return rows, known
        present = self._counts > 0
        fresh = (self._sums / self._counts.clamp(min=1).unsqueeze(1)).to(rows.dtype)
        return torch.where(present.unsqueeze(1), fresh, rows), torch.maximum(known, present.to(known.dtype))


def relax(start: Tensor, mean: Tensor, rho: float, trainable: int) -> Tensor:
    """start + rho (mean - start) in the trainable weights, the mean in the buffers; exactly the mean at rho = 1.

    Buffers are statistics: to step beyond their mean could make a variance negative.
    """
    if rho == 1:
        return mean
    moved = mean.clone()
    w, target = start[:trainable].double(), mean[:trainable].double()
    moved[:trainable] = (w + rho * (target - w)).to(mean.dtype)
    return moved


def weighted_mean(pairs: Iterable[tuple[Tensor, float]]) -> Tensor:
    """Weighted mean of (vector, weight) pairs, taken one at a time."""
    mean = RunningMean()
    for vector, weight in pairs:
        mean.add(vector, weight)
    return mean.result()
