"""Sub-networks: the same weights, fewer channels.

A sub-network of width w keeps the first floor(w c + 1/2) of the c outputs of every layer but the classifier, and of
every layer's inputs what the layers before it kept. Nothing is copied: its weights are views of the full network's,
so its gradients are the full network's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstill.core.errors import SettingError
from fedstill.core.kernels import conv2d
from fedstill.models.base import Classifier
from fedstill.models.norms import frozen_statistics, norms

Forward = Callable[[Tensor], Tensor]


def active_channels(channels: int, width: float) -> int:
    """How many of the channels a sub-network of this width keeps.

    >>> active_channels(10, 0.8), active_channels(3, 0.1)
    (8, 1)
    """
    return max(1, math.floor(width * channels + 0.5))


@contextmanager
def slimmed(net: Classifier, width: float) -> Iterator[Classifier]:
    """The network as its sub-network of this width, for as long as the context lasts.

    BatchNorm normalises by the batch and leaves its running statistics alone; GroupNorm keeps the size of its groups
    as near as the channels allow.
    """
    classifier = [layer for layer in net.modules() if isinstance(layer, nn.Linear)][-1]
    changed: list[nn.Module] = []
    try:
        for layer in net.modules():
            forward = _sliced(layer, width=1.0 if layer is classifier else width)
            if forward is not None:
                layer.forward = forward
                changed.append(layer)
        yield net
    finally:
        for layer in changed:
            del layer.forward  # the class's own shows again


@torch.no_grad()
def check_sliceable(net: Classifier, x: Tensor, width: float) -> None:
    """Refuse a network of which no sub-networks can be made, trying it on a few samples.

    What cannot be seen is whether layers that are joined by `torch.cat` still fit together; in a network whose layers
    follow each other, or add up, they do.
    """
    for name, layer in net.named_modules():
        own = any(True for _ in layer.parameters(recurse=False))
        if (own and _sliced(layer, 1.0) is None) or _is_special(layer):
            raise SettingError(f"no sub-networks of this network: {name} is {layer}")
    if not any(isinstance(layer, nn.Linear) for layer in net.modules()):
        raise SettingError("no sub-networks of this network: it has no Linear layer to end in")
    net.eval()
    for layer in norms(net):
        layer.train()  # a sub-network normalises by the batch
    with frozen_statistics(net):
        full = net(x)
        try:
            with slimmed(net, width) as narrow:
                fits = narrow(x).shape == full.shape
            with slimmed(net, 1.0) as same:
                fits = fits and torch.allclose(same(x), full, rtol=1e-3, atol=1e-4)
        except RuntimeError as error:
            raise SettingError(f"no sub-networks of this network: {str(error).splitlines()[0]}") from error
    if not fits:
        raise SettingError("no sub-networks of this network: with fewer channels it does something else")


def _is_special(layer: nn.Module) -> bool:
    """A convolution whose groups or padding a sub-layer does not have."""
    if not isinstance(layer, nn.Conv2d):
        return False
    depthwise = layer.groups == layer.in_channels == layer.out_channels
    return layer.padding_mode != "zeros" or not (layer.groups == 1 or depthwise)


def _sliced(layer: nn.Module, width: float) -> Forward | None:
    """What a layer does in a sub-network; None: what it always does."""
    if isinstance(layer, nn.Conv2d):
        return lambda x: _conv(layer, x, active_channels(layer.out_channels, width))
    if isinstance(layer, nn.Linear):
        return lambda x: _linear(layer, x, active_channels(layer.out_features, width))
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return lambda x: _batch_norm(layer, x)
    if isinstance(layer, nn.GroupNorm):
        return lambda x: F.group_norm(x, _groups(layer, x.shape[1]), *_first(layer, x.shape[1]), layer.eps)
    return None


def _batch_norm(layer: nn.modules.batchnorm._BatchNorm, x: Tensor) -> Tensor:
    channels = x.shape[1]
    affine = _first(layer, channels)
    if x.numel() > channels or layer.running_mean is None or layer.running_var is None:
        return F.batch_norm(x, None, None, *affine, training=True, eps=layer.eps)
    # One number a channel has no statistics of its own.
    return F.batch_norm(x, layer.running_mean[:channels], layer.running_var[:channels], *affine, eps=layer.eps)


def _conv(layer: nn.Conv2d, x: Tensor, outputs: int) -> Tensor:
    if layer.groups == 1:
        weight, groups = layer.weight[:outputs, : x.shape[1]], 1
    else:  # depthwise: every channel has its own filter
        weight, groups = layer.weight[: x.shape[1]], x.shape[1]
    bias = None if layer.bias is None else layer.bias[: len(weight)]
    return conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, groups)


def _linear(layer: nn.Linear, x: Tensor, outputs: int) -> Tensor:
    bias = None if layer.bias is None else layer.bias[:outputs]
    return F.linear(x, layer.weight[:outputs, : x.shape[-1]], bias)


def _first(layer: nn.GroupNorm | nn.modules.batchnorm._BatchNorm, channels: int) -> tuple[Tensor | None, Tensor | None]:
    weight, bias = layer.weight, layer.bias
    return None if weight is None else weight[:channels], None if bias is None else bias[:channels]


def _groups(layer: nn.GroupNorm, channels: int) -> int:
    """The number of groups nearest to the full network's group size that divides the channels."""
    size = layer.num_channels // layer.num_groups
    wanted = max(1, channels // size)
    return next(g for g in range(wanted, 0, -1) if channels % g == 0)
