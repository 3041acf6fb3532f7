"""Adversarial training: a discriminator tells a client's samples from generated ones, a generator learns to pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstill.distill.auxiliary import Generator
from fedstill.models.base import Classifier
from fedstill.models.norms import frozen_statistics
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch, Objective
from fedstill.train.optimizers import Adam, descend


class Discriminator(nn.Module):
    """The logit of a sample being real rather than generated.

    It reads the classifier's features (a shared trunk), or those of a trunk of its own.
    """

    def __init__(self, feature_dim: int, trunk: Classifier | None) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(feature_dim, 1)

    def forward(self, x: Tensor, features: Tensor | None = None) -> Tensor:
        """The logit of each sample; the classifier's features are needed where it has no trunk."""
        logit: Tensor = self.head(features if self.trunk is None else self.trunk.features(x))
        return logit.squeeze(1)


def gradient_penalty(judge: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, noise: torch.Generator) -> Tensor:
    """The mean of (|grad D(x_i)| - 1)^2 at places between real and generated samples; the norm is a sample's own.

    >>> x = torch.ones(2, 2)
    >>> gradient_penalty(lambda x: 3 * x[:, 0] + 4 * x[:, 1], x, x, torch.Generator()).item()
    16.0
    """
    share = torch.rand(len(real), *[1] * (real.dim() - 1), generator=noise)
    between = (share * real + (1 - share) * fake).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
    norms: Tensor = gradient.flatten(1).square().sum(1).sqrt()
    return (norms - 1).square().mean()


@dataclass
class AdversarialTraining:
    """What local training gains: in each step the discriminator learns first, then the generator.

    The discriminator learns with the classifier, in one step; where it has no trunk of its own it judges the
    classifier's features, which learn of it too.
    """

    generator: Generator  # as it is loaded
    discriminator: Discriminator
    classifier: Classifier
    adam: Adam  # of the generator
    noise: torch.Generator
    penalty: float = 0.0  # weight of the gradient penalty
    steps: int | None = None  # only the first steps; None: all

    def objective(self) -> Objective:
        inputs = None if self.discriminator.trunk else self._generated
        return Objective(self._tell_apart, inputs=inputs, after=self._pass, modules=(self.discriminator,))

    def _generated(self, batch: Batch) -> Tensor:
        """As many samples as the batch has, which the classifier reads beside it; none once the steps are over."""
        if self.steps == 0:
            return batch.x[:0]
        with torch.no_grad():
            return self.generator.draw(len(batch.y), self.noise)

    def _tell_apart(self, batch: Batch, out: Outputs) -> Tensor:
        """L_adv: the cross-entropy of real against generated, over both."""
        if self.steps == 0:
            return torch.zeros(())
        if out.extra is None:  # a trunk of the discriminator's own
            logit = torch.cat([self.discriminator(batch.x), self.discriminator(self._generated(batch))])
        else:
            logit = self.discriminator.head(torch.cat([out.features, out.extra.features])).squeeze(1)
        real = (torch.arange(len(logit)) < len(batch.y)).float()
        loss = F.binary_cross_entropy_with_logits(logit, real)
        if not self.penalty:
            return loss
        with torch.no_grad():
            fake = self._draw(batch)[: len(batch.y)]
        return loss + self.penalty * gradient_penalty(lambda x: self._judge(x).sigmoid(), batch.x, fake, self.noise)

    def _pass(self, batch: Batch) -> None:
        """The generator's step, on the non-saturating form of its loss."""
        if self.steps == 0:
            return
        descend(-F.logsigmoid(self._judge(self._draw(batch))).mean(), self.generator.net.params, self.adam)
        if self.steps is not None:
            self.steps -= 1

    def _draw(self, batch: Batch) -> Tensor:
        return self.generator.draw(max(2, len(batch.y)), self.noise)  # at least two, for BatchNorm

    def _judge(self, samples: Tensor) -> Tensor:
        """The logits of samples that leave no trace in any statistics."""
        trunk = self.discriminator.trunk
        with frozen_statistics(trunk or self.classifier):
            logit: Tensor = self.discriminator(samples, None if trunk else self.classifier.features(samples))
            return logit
