"""ShuffleNetV2 at its 1.0x width."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedstill.models.base import Classifier, Stacked
from fedstill.models.checks import whole
from fedstill.models.slim import WholeConv2d


def shufflenetv2(shape: Sequence[int], classes: int, *, code: int = 0) -> Classifier:
    """ShuffleNetV2 x1.0, which reduces the image 32-fold at any size.

    With `code` > 0 the usual last layer emits a code of that length, which is the feature, and a further
    linear layer maps it to the classes (FedHKD, FedHyb).
    """
    body: OrderedDict[str, nn.Module] = OrderedDict(stem=_conv_norm(shape[0], 24, kernel=3, stride=2))
    body["pool"] = nn.MaxPool2d(3, stride=2, padding=1)
    channels = 24
    for number, (outputs, units) in enumerate(((116, 4), (232, 8), (464, 4)), start=2):
        body[f"stage{number}"] = nn.Sequential(
            Downsample(channels, outputs), *(Unit(outputs) for _ in range(units - 1))
        )
        channels = outputs
    width = 1024
    body["conv5"] = _conv_norm(channels, width, kernel=1)
    body["average"] = nn.AdaptiveAvgPool2d(1)
    body["flatten"] = nn.Flatten()
    if whole("code", code, 0):
        body["code"] = nn.Linear(width, code)
        width = code
    return Stacked(nn.Sequential(body), nn.Linear(width, classes), feature_dim=width)


class Unit(nn.Module):
    """Half of the channels pass, the other half are transformed, then both are interleaved."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = _transform(channels // 2, channels // 2, stride=1)
        # The built-in shuffle keeps channels-last memory; view-and-transpose would not.
        self.shuffle = nn.ChannelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        shortcut, transformed = x.chunk(2, dim=1)
        out: Tensor = self.shuffle(torch.cat((shortcut, self.branch(transformed)), dim=1))
        return out


class Downsample(nn.Module):
    """Both branches see all channels and halve the resolution; together they give `outputs` channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shortcut = nn.Sequential(*_depthwise_norm(inputs, stride=2), *_shuffled(inputs, outputs // 2))
        self.branch = _transform(inputs, outputs // 2, stride=2)
        self.shuffle = nn.ChannelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shuffle(torch.cat((self.shortcut(x), self.branch(x)), dim=1))
        return out


def _transform(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *_conv_norm(inputs, outputs, kernel=1),
        *_depthwise_norm(outputs, stride),
        *_shuffled(outputs, outputs),
    )


def _shuffled(inputs: int, outputs: int) -> nn.Sequential:
    """The last convolution before channels are shuffled and split again: sub-networks keep all of its outputs."""
    return _conv_norm(inputs, outputs, kernel=1, conv=WholeConv2d)


def _conv_norm(
    inputs: int, outputs: int, kernel: int, stride: int = 1, conv: type[nn.Conv2d] = nn.Conv2d
) -> nn.Sequential:
    return nn.Sequential(
        conv(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def _depthwise_norm(channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=False),
        nn.BatchNorm2d(channels),
    )
