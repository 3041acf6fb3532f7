"""Every KL divergence of the package: from logits, and from probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def kl(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean over the batch of KL(softmax(teacher/T) || softmax(student/T)), from logits.

    Examples:
        >>> kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0]])).item()
        0.0
    """
    target = F.log_softmax(teacher / temperature, dim=1)
    return F.kl_div(F.log_softmax(student / temperature, dim=1), target, reduction="batchmean", log_target=True)


def soft_kl(target: Tensor, logits: Tensor) -> Tensor:
    """Mean over the batch of KL(target || softmax(logits)), from probabilities."""
    return F.kl_div(F.log_softmax(logits, dim=1), target, reduction="batchmean")


def soft_kl_each(target: Tensor, logits: Tensor) -> Tensor:
    """The same of each sample, (N,), for those that weigh samples by themselves."""
    return F.kl_div(F.log_softmax(logits, dim=1), target, reduction="none").sum(1)


@dataclass(frozen=True)
class SoftTargets:
    """Soft targets of several teachers: sum_r w_r KL(p_r || q), ready for any student q.

    The sum is a constant minus the cross-entropy of q against sum_r w_r p_r, so that a step costs the same however
    many teachers there are.
    """

    temperature: float
    mixture: Tensor  # (N, C): sum_r w_r p_r
    constant: Tensor  # (N,): sum_r w_r sum_c p_rc log p_rc

    @classmethod
    def of(cls, logits: Tensor, weights: Tensor, temperature: float) -> SoftTargets:
        """From (R, N, C) logits and (R, N) weights."""
        log_p = (logits / temperature).log_softmax(2)
        own = (log_p.exp() * log_p).sum(2)
        return cls(temperature, torch.einsum("rn,rnc->nc", weights, log_p.exp()), (weights * own).sum(0))

    def loss(self, ids: Tensor, student: Tensor) -> Tensor:
        """T² times the weighted divergence, of each sample."""
        log_q = (student / self.temperature).log_softmax(1)
        return self.temperature**2 * (self.constant[ids] - (self.mixture[ids] * log_q).sum(1))
