"""Heads that some methods put on a network."""

from __future__ import annotations

from torch import Tensor, nn

from fedstill.models.base import Classifier


class Projected(Classifier):
    """A network with MOON's projection head: d - d - ReLU - 256, then the classifier; the features are the 256.

    >>> from fedstill.models import build
    >>> Projected(build("lenet5", (1, 32, 32), 10)).head
    Linear(in_features=256, out_features=10, bias=True)
    """

    def __init__(self, net: Classifier, width: int = 256) -> None:
        super().__init__()
        classes = [layer for layer in net.head.modules() if isinstance(layer, nn.Linear)][-1].out_features
        d = net.feature_dim
        self.net = net
        self.projection = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, width))
        self.head = nn.Linear(width, classes)
        self.feature_dim = width
        if "head" in net._modules:  # the classifier that this one replaces
            del net.head

    def features(self, x: Tensor) -> Tensor:
        projected: Tensor = self.projection(self.net.features(x))
        return projected


class Resized(Classifier):
    """A network whose features a layer d - size - ReLU brings to another size, with a head of its own.

    Networks that differ then have features and heads of one size.

    >>> from fedstill.models import build
    >>> Resized(build("lenet5", (1, 32, 32), 10), 32, 10).head
    Linear(in_features=32, out_features=10, bias=True)
    """

    def __init__(self, net: Classifier, size: int, classes: int) -> None:
        super().__init__()
        self.net = net
        self.resize = nn.Sequential(nn.Linear(net.feature_dim, size), nn.ReLU(inplace=True))
        self.head = nn.Linear(size, classes)
        self.feature_dim = size
        if "head" in net._modules:  # the classifier that this one replaces
            del net.head

    def features(self, x: Tensor) -> Tensor:
        resized: Tensor = self.resize(self.net.features(x))
        return resized
