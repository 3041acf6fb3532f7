"""The residual networks: ResNet-8, 20 and 32 for small images, ResNet-11, ResNet-18 and ResNet-50."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from fedstill.core.errors import SettingError, unknown
from fedstill.models.base import Classifier, Stacked
from fedstill.models.checks import whole, wholes

NormLayer = Callable[[int], nn.Module]

LARGEST_WITH_SMALL_STEM = 64


def resnet8(shape: Sequence[int], classes: int, *, width: int = 16, norm: str | int = "group") -> Classifier:
    """ResNet-8 of FedDF and FedGKD: one basic block at each of `width`, 2 `width`, 4 `width` channels.

    `norm` is "batch", "group" (16 channels per group) or a number of channels per group.
    """
    return _three_stages(shape, classes, whole("width", width, 1), 1, _norm_layer(norm, group=16))


def resnet20(shape: Sequence[int], classes: int, *, width: int = 16, norm: str | int = "batch") -> Classifier:
    """ResNet-20 for small images (He et al. 2016): three basic blocks a stage; see `resnet8` for `norm`."""
    return _three_stages(shape, classes, whole("width", width, 1), 3, _norm_layer(norm, group=16))


def resnet32(shape: Sequence[int], classes: int, *, width: int = 16, norm: str | int = "batch") -> Classifier:
    """ResNet-32 for small images: the same with five."""
    return _three_stages(shape, classes, whole("width", width, 1), 5, _norm_layer(norm, group=16))


def resnet8_w64(shape: Sequence[int], classes: int, *, norm: str | int = "group") -> Classifier:
    """ResNet-8 of FedKF: 64, 128, 256 channels, where `norm="group"` has one channel per group."""
    return _three_stages(shape, classes, 64, 1, _norm_layer(norm, group=1))


def resnet11(
    shape: Sequence[int], classes: int, *, blocks: Sequence[int] = (1, 1, 1), norm: str | int = "batch"
) -> Classifier:
    """ResNet-11 of DaFKD: bottlenecks of three 3x3 convolutions; the authors' code has `blocks=(2, 2, 2)`."""
    normal = _norm_layer(norm, group=16)
    stages = [
        _Stage(channels=(planes, planes, 4 * planes), kernels=(3, 3, 3), strides=(1, stride, 1), blocks=count)
        for planes, stride, count in zip((16, 32, 64), (1, 2, 2), wholes("blocks", blocks, 3), strict=True)
    ]
    return _residual_network(_stem(shape[0], 16, normal, kernel=3, stride=1), 16, stages, classes, normal)


def resnet18(
    shape: Sequence[int], classes: int, *, norm: str | int = "batch", stem: str = "auto", code: int = 0
) -> Classifier:
    """ResNet-18; see `resnet50` for `norm` and `stem`.

    With `code` > 0 the usual last layer emits a code of that length, which is the feature, and a further
    linear layer maps it to the classes (FedHKD, FedHyb).
    """
    normal = _norm_layer(norm, group=16)
    stages = [
        _Stage(channels=(planes, planes), kernels=(3, 3), strides=(stride, 1), blocks=2)
        for planes, stride in zip((64, 128, 256, 512), (1, 2, 2, 2), strict=True)
    ]
    return _residual_network(_stem_for(shape, stem, normal), 64, stages, classes, normal, code=code)


def resnet50(shape: Sequence[int], classes: int, *, norm: str | int = "batch", stem: str = "auto") -> Classifier:
    """ResNet-50, the stride in each bottleneck's 3x3 convolution.

    `stem="7x7"` halves the image twice before the first block, as for ImageNet; `"3x3"` keeps its size;
    `"auto"` takes 3x3 up to 64 pixels. `norm="group"` has 16 channels per group.
    """
    normal = _norm_layer(norm, group=16)
    stages = [
        _Stage(channels=(planes, planes, 4 * planes), kernels=(1, 3, 1), strides=(1, stride, 1), blocks=count)
        for planes, stride, count in zip((64, 128, 256, 512), (1, 2, 2, 2), (3, 4, 6, 3), strict=True)
    ]
    return _residual_network(_stem_for(shape, stem, normal), 64, stages, classes, normal)


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x)).

    The branch is a chain of convolutions of `channels[i]` to `channels[i + 1]`, each normalised, with ReLU
    between them; the shortcut is a 1x1 convolution wherever the shape changes.
    """

    def __init__(
        self, channels: Sequence[int], kernels: Sequence[int], strides: Sequence[int], normal: NormLayer
    ) -> None:
        super().__init__()
        branch: OrderedDict[str, nn.Module] = OrderedDict()
        steps = zip(pairwise(channels), kernels, strides, strict=True)
        for number, ((inputs, outputs), kernel, stride) in enumerate(steps, start=1):
            if number > 1:
                branch[f"relu{number - 1}"] = nn.ReLU(inplace=True)
            branch[f"conv{number}"] = _conv(inputs, outputs, kernel, stride)
            branch[f"norm{number}"] = normal(outputs)
        self.branch = nn.Sequential(branch)
        self.shortcut: nn.Module = nn.Identity()
        if channels[0] != channels[-1] or max(strides) > 1:
            conv = _conv(channels[0], channels[-1], kernel=1, stride=max(strides))
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, norm=normal(channels[-1])))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return out


@dataclass(frozen=True)
class _Stage:
    """Blocks at one resolution; only the first of them strides."""

    channels: tuple[int, ...]  # output channels of each convolution of a block
    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    blocks: int

    def build(self, inputs: int, normal: NormLayer) -> nn.Sequential:
        unit = (1,) * len(self.strides)
        return nn.Sequential(
            Residual((inputs, *self.channels), self.kernels, self.strides, normal),
            *(
                Residual((self.channels[-1], *self.channels), self.kernels, unit, normal)
                for _ in range(self.blocks - 1)
            ),
        )


def _three_stages(shape: Sequence[int], classes: int, width: int, blocks: int, normal: NormLayer) -> Classifier:
    stages = [
        _Stage(channels=(planes, planes), kernels=(3, 3), strides=(stride, 1), blocks=blocks)
        for planes, stride in zip((width, 2 * width, 4 * width), (1, 2, 2), strict=True)
    ]
    return _residual_network(_stem(shape[0], width, normal, kernel=3, stride=1), width, stages, classes, normal)


def _residual_network(
    stem: nn.Sequential,
    width: int,
    stages: Sequence[_Stage],
    classes: int,
    normal: NormLayer,
    *,
    code: int = 0,
) -> Classifier:
    body: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    for number, stage in enumerate(stages, start=1):
        body[f"stage{number}"] = stage.build(width, normal)
        width = stage.channels[-1]
    body["pool"] = nn.AdaptiveAvgPool2d(1)
    body["flatten"] = nn.Flatten()
    if whole("code", code, 0):
        body["code"] = nn.Linear(width, code)
        width = code
    network = Stacked(nn.Sequential(body), nn.Linear(width, classes), feature_dim=width)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            # Normal with variance 2/(k*k*out): what FedDF's ResNet-8 and torchvision's ResNets both use.
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


def _stem_for(shape: Sequence[int], stem: str, normal: NormLayer) -> nn.Sequential:
    """The stem of ResNet-18 and ResNet-50, by its name."""
    if stem not in ("auto", "3x3", "7x7"):
        raise unknown("stem", str(stem), ("auto", "3x3", "7x7"))
    if stem == "3x3" or (stem == "auto" and max(shape[1:]) <= LARGEST_WITH_SMALL_STEM):
        return _stem(shape[0], 64, normal, kernel=3, stride=1)
    layers = _stem(shape[0], 64, normal, kernel=7, stride=2)
    layers.add_module("pool", nn.MaxPool2d(3, stride=2, padding=1))
    return layers


def _stem(inputs: int, outputs: int, normal: NormLayer, kernel: int, stride: int) -> nn.Sequential:
    conv = _conv(inputs, outputs, kernel, stride)
    return nn.Sequential(OrderedDict(conv=conv, norm=normal(outputs), relu=nn.ReLU(inplace=True)))


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _norm_layer(norm: str | int, group: int) -> NormLayer:
    """What makes the normalisation of so many channels; "group" means `group` channels per group."""
    if norm == "batch":
        return nn.BatchNorm2d
    if isinstance(norm, str) and norm != "group":
        raise unknown("norm", norm, ("batch", "group", "a number of channels per group"))
    size = group if norm == "group" else whole("norm", norm, 1)

    def group_norm(channels: int) -> nn.Module:
        if channels > size and channels % size:
            raise SettingError(f"norm: {channels} channels cannot be put into groups of {size}")
        return nn.GroupNorm(max(1, channels // size), channels)

    return group_norm
