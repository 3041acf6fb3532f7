"""Networks beside the classifier, generators and discriminators: built from the seed, loaded with anybody's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedstill.core.weights import FlatNet
from fedstill.distill.generators import to_images, to_inputs
from fedstill.distill.stage import as_samples
from fedstill.models.base import Classifier
from fedstill.train.task import Samples, Task


@dataclass(frozen=True)
class Auxiliary:
    """A network beside the classifier. A process has one for each role and loads into it what it works with."""

    task: Task
    role: str  # names whatever the network's shape depends on
    purpose: str  # of the random draw of its first weights
    make: Callable[[], nn.Module]

    @property
    def net(self) -> FlatNet:
        """The network of this process, as it was last loaded."""
        return self.task.nets.get(self.role, self._fresh)

    def initial(self) -> Tensor:
        """The weights that everybody's starts from."""
        return self._fresh().read()

    def load(self, weights: Tensor) -> FlatNet:
        """The network with these weights, in training mode."""
        self.net.load(weights)
        self.net.module.train()
        return self.net

    def _fresh(self) -> FlatNet:
        return self.task.seeded(self.purpose, lambda: FlatNet(self.make()))


@dataclass(frozen=True)
class Generator(Auxiliary):
    """A generator of images, from noise or from noise and a label."""

    z_dim: int
    conditional: bool = False  # it has a label as a further input, and standardises its images itself

    def inputs(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        """What the network, as it is loaded, makes of noise and labels; as classifiers see the data."""
        if self.conditional:
            made: Tensor = self.net.module(z, y)
            return made
        return to_inputs(self.net.module(z), self.task.dataset.mean, self.task.dataset.std)

    def draw(self, count: int, noise: torch.Generator, y: Tensor | None = None) -> Tensor:
        """So many samples of random noise; where it takes labels, of these or of random ones."""
        z = torch.randn(count, self.z_dim, generator=noise)
        if self.conditional and y is None:
            y = torch.randint(0, self.task.classes, (count,), generator=noise)
        return self.inputs(z, y)

    @torch.no_grad()
    def samples(self, weights: Tensor, batches: int, size: int, noise: torch.Generator) -> Samples:
        """A set of samples of the generator with these weights: the same for whoever has them and the noise."""
        self.load(weights)
        return as_samples(torch.cat([self.draw(size, noise) for _ in range(batches)]))

    @torch.no_grad()
    def pictures(self, weights: Tensor, count: int, noise: torch.Generator, y: Tensor | None = None) -> Tensor:
        """What the generator with these weights makes, as images with values in 0..1; at least two, for BatchNorm."""
        self.load(weights)
        return to_images(self.draw(max(2, count), noise, y)[:count], self.task.dataset.mean, self.task.dataset.std)


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
