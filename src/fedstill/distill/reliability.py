"""How far a teacher can be trusted on each class."""

from __future__ import annotations

import torch
from scipy.stats import rankdata
from torch import Tensor

from fedstill.core.device import to_current_device


def class_auc(logits: Tensor, y: Tensor) -> Tensor:
    """Area under the ROC curve of each class's probability against all other classes, (C,).

    It is the chance that a sample of the class gets a higher probability than one of another; ties count half. A
    class of which there are no samples, or no others, gets 1/2.

    >>> class_auc(torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1, 1]))
    tensor([1., 1.], dtype=torch.float64)
    """
    scores = logits.double().softmax(1)
    is_class = torch.nn.functional.one_hot(y, logits.shape[1]).double()
    ranks = to_current_device(torch.from_numpy(rankdata(scores.cpu().numpy(), axis=0)))
    own, others = is_class.sum(0), (1 - is_class).sum(0)
    wins = (ranks * is_class).sum(0) - own * (own + 1) / 2
    return torch.where((own > 0) & (others > 0), wins / (own * others).clamp(min=1), 0.5)


def among_teachers(auc: Tensor, sharpness: float) -> Tensor:
    """beta_r^c: each class's softmax over the teachers of their AUC, (R, C) to (R, C)."""
    return (sharpness * auc).softmax(0)
