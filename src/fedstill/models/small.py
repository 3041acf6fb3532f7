"""The small networks: LeNet-5, MOON's CNN, and a multilayer perceptron.

They rectify after pooling: the same numbers and gradients as before it, from a quarter of the work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from fedstill.models.base import Classifier, Stacked
from fedstill.models.checks import wholes


def lenet5(shape: Sequence[int], classes: int) -> Classifier:
    """LeNet-5 as in FedKF: the third convolution ends on a 1x1 map of 120 channels; 84 features follow."""
    body = nn.Sequential(
        nn.Conv2d(shape[0], 6, 5),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 120, 5),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(120, 84),
        nn.ReLU(inplace=True),
    )
    return Stacked(body, nn.Linear(84, classes), feature_dim=84)


def cnn(
    shape: Sequence[int], classes: int, *, channels: Sequence[int] = (6, 16), hidden: Sequence[int] = (120, 84)
) -> Classifier:
    """Two 5x5 convolutions, each max-pooled, then hidden layers; by default the CNN of MOON."""
    inputs, height, width = shape
    convolved = wholes("channels", channels, 2)
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    layers: list[nn.Module] = []
    for before, after in pairwise((inputs, *convolved)):
        layers += [nn.Conv2d(before, after, 5), nn.MaxPool2d(2), nn.ReLU(inplace=True)]
    widths = (convolved[-1] * rows * columns, *wholes("hidden", hidden))
    layers.append(nn.Flatten())
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU(inplace=True)]
    return Stacked(nn.Sequential(*layers), nn.Linear(widths[-1], classes), feature_dim=widths[-1])


def mlp(shape: Sequence[int], classes: int, *, hidden: Sequence[int] = (200, 200)) -> Classifier:
    """A multilayer perceptron on the flattened sample; by default the "2NN" of the FedAvg paper.

    An empty `hidden` gives softmax regression.
    """
    widths = (math.prod(shape), *wholes("hidden", hidden))
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True)]
    return Stacked(nn.Sequential(*layers), nn.Linear(widths[-1], classes), feature_dim=widths[-1])
