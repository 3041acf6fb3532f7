"""Teachers that stay loaded side by side, and how much each counts for a class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedstill.models.base import Classifier
from fedstill.train.evaluate import load_for_evaluation
from fedstill.train.task import Task, classifier


def load_teachers(task: Task, models: Sequence[Tensor]) -> list[Classifier]:
    """A network for each model, in evaluation mode, for samples that change at every step."""
    return [classifier(load_for_evaluation(task, model, f"teacher {k}")) for k, model in enumerate(models)]


def label_weights(counts: Tensor) -> Tensor:
    """How much each of K teachers counts for each class, (K, C): its share of the samples; uniform if none has any.

    >>> label_weights(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    tensor([[0.2500, 0.5000],
            [0.7500, 0.5000]])
    """
    total = counts.sum(0)
    shares = counts / total.clamp(min=1)
    return torch.where(total > 0, shares, torch.full_like(shares, 1 / len(counts)))


def normalised(alpha: Tensor) -> Tensor:
    """Each teacher's share of each sample's sum over the teachers, (K, N) to (K, N); uniform where all are zero."""
    lifted = alpha.double() + 1e-8
    return (lifted / lifted.sum(0)).float()


def diversity(noise: Tensor, samples: Tensor) -> Tensor:
    """exp(-mean_ij d_z(i, j) d_G(i, j)): small when different noise gives different samples.

    d_z is the mean squared, d_G the mean absolute difference of two rows.
    """
    flat = samples.flatten(1)
    by_noise = (noise.unsqueeze(1) - noise.unsqueeze(0)).square().mean(2)
    by_sample = torch.cdist(flat, flat, p=1) / flat.shape[1]
    return torch.exp(-(by_noise * by_sample).mean())
