"""Networks beside the classifier, generators and discriminators: built from the seed, loaded with anybody's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedstill.core.weights import FlatNet
from fedstill.distill.generators import to_images, to_inputs
from fedstill.distill.stage import as_samples
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
