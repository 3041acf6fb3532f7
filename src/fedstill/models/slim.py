"""Sub-networks: the same weights, fewer channels.

A sub-network of width w keeps the first floor(w c + 1/2) of the c outputs of every layer but the classifier, and of
every layer's inputs what the layers before it kept. Nothing is copied: its weights are views of the full network's,
so its gradients are the full network's. Channels that a network splits or shuffles stay whole (`WholeConv2d`): with
fewer of them, each would meet the weights of another.
"""

from __future__ import annotations

import copy
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


class WholeConv2d(nn.Conv2d):
    """A convolution of which a sub-network keeps all outputs, whatever it keeps of the inputs."""


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
    whole = _classifier(net)
    with _replaced(net, lambda layer: _sliced(layer, 1.0 if layer is whole else width)):
        yield net


@contextmanager
def _replaced(net: nn.Module, forward_of: Callable[[nn.Module], Forward | None]) -> Iterator[None]:
    """Layers that do something else for as long as the context lasts."""
    changed: list[nn.Module] = []
    try:
        for layer in net.modules():
            forward = forward_of(layer)
            if forward is not None:
                layer.forward = forward
                changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward  # the class's own shows again


def _classifier(net: nn.Module) -> nn.Linear:
    return [layer for layer in net.modules() if isinstance(layer, nn.Linear)][-1]


@torch.no_grad()
def check_sliceable(net: Classifier, x: Tensor, width: float) -> None:
    """Refuse a network of which no sub-networks can be made, trying it on a few samples.

    A sub-network must be what the full network is with the other channels at zero. Where channels are split, shuffled
    or joined by `torch.cat`, it may not be: its channels then meet weights that belong to others.
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
            with slimmed(net, 1.0) as same:
                fits = torch.allclose(same(x), full, rtol=1e-3, atol=1e-4)
            fits = fits and _keeps_channels_apart(*_precise(net, x), width)
        except RuntimeError as error:
            raise SettingError(f"no sub-networks of this network: {str(error).splitlines()[0]}") from error
    if not fits:
        raise SettingError(
            "no sub-networks of this network: with fewer channels it does something else; make the convolutions whose "
            "outputs it splits, shuffles or joins fedstill.models.slim.WholeConv2d"
        )


def _precise(net: Classifier, x: Tensor) -> tuple[Classifier, Tensor]:
    """Both in float64, where rounding stays far below what is compared: norms of few numbers amplify it."""
    try:
        twin, samples = copy.deepcopy(net).double(), x.double()
        twin(samples)
    except RuntimeError:  # it insists on a format of its own
        return net, x
    return twin, samples


def _keeps_channels_apart(net: Classifier, x: Tensor, width: float) -> bool:
    """Whether a sub-network's outputs are those of the full network with all channels that are cut at zero.

    In both, norms divide each channel by its own size, and a channel at zero stays there.
    """
    whole = _classifier(net)

    def output(narrow: bool) -> Tensor:
        def forward_of(layer: nn.Module) -> Forward | None:
            if isinstance(layer, nn.GroupNorm | nn.modules.batchnorm._BatchNorm):
                return lambda x: x / (_by_channel(torch.mean, x.square()).sqrt() + 1e-5)
            if not isinstance(layer, nn.Conv2d | nn.Linear):
                return None
            own = _sliced(layer, 1.0 if layer is whole or not narrow else width)
            assert own is not None
            if isinstance(layer, nn.Conv2d) and layer.groups > 1:
                return lambda x: own(x) * _by_channel(torch.amax, x.abs()).sign()
            kept = _kept(layer, 1.0 if layer is whole else width)
            return lambda x: _cut(own(x), kept, channel=1 if isinstance(layer, nn.Conv2d) else -1)

        with _replaced(net, forward_of):
            found: Tensor = net(x)
        return found

    expected, found = output(narrow=False), output(narrow=True)
    return expected.shape == found.shape and bool((found - expected).norm() <= 1e-3 * expected.norm() + 1e-6)


def _by_channel(reduce: Callable[..., Tensor], x: Tensor) -> Tensor:
    return reduce(x, dim=[d for d in range(x.dim()) if d != 1], keepdim=True)


def _cut(y: Tensor, kept: int, channel: int) -> Tensor:
    """The first channels, and zeros for the others."""
    y = y.clone()
    y.narrow(channel, kept, y.shape[channel] - kept).zero_()
    return y


def _kept(layer: nn.Conv2d | nn.Linear, width: float) -> int:
    """How many of its outputs a layer has in a sub-network."""
    if isinstance(layer, nn.Conv2d):
        return active_channels(layer.out_channels, 1.0 if isinstance(layer, WholeConv2d) else width)
    return active_channels(layer.out_features, width)


def _is_special(layer: nn.Module) -> bool:
    """A convolution whose groups or padding a sub-layer does not have."""
    if not isinstance(layer, nn.Conv2d):
        return False
    depthwise = layer.groups == layer.in_channels == layer.out_channels
    return layer.padding_mode != "zeros" or not (layer.groups == 1 or depthwise)


def _sliced(layer: nn.Module, width: float) -> Forward | None:
    """What a layer does in a sub-network; None: what it always does."""
    if isinstance(layer, nn.Conv2d):
        return lambda x: _conv(layer, x, _kept(layer, width))
    if isinstance(layer, nn.Linear):
        return lambda x: _linear(layer, x, _kept(layer, width))
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
