"""The one KL of the package."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def kl(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean over the batch of KL(softmax(teacher/T) || softmax(student/T)), from logits.

    >>> import torch
    >>> kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0]])).item()
    0.0
    """
    target = F.log_softmax(teacher / temperature, dim=1)
    return F.kl_div(F.log_softmax(student / temperature, dim=1), target, reduction="batchmean", log_target=True)


def soft_kl(target: Tensor, logits: Tensor) -> Tensor:
    """Mean over the batch of KL(target || softmax(logits)), from probabilities."""
    return F.kl_div(F.log_softmax(logits, dim=1), target, reduction="batchmean")
