"""Networks that make samples from noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstill.core.errors import SettingError


class ImageGenerator(nn.Module):
    """FedKF's generator: noise to images with values in (0, 1), by upsampling and convolution.

    `width` is the number of channels of its first two stages, half of it that of the last. Its BatchNorm layers
    always use the statistics of the batch, so it stays in training mode.
    """

    def __init__(self, shape: Sequence[int], z_dim: int = 100, width: int = 128) -> None:
        super().__init__()
        channels, height, self.image_width = check_image_shape(shape)
        self.height = height
        self.z_dim, self.width = z_dim, width
        self.start = (-(-height // 4), -(-self.image_width // 4))
        self.fc = nn.Linear(z_dim, width * self.start[0] * self.start[1])
        self.stages = nn.Sequential(
            nn.BatchNorm2d(width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width, eps=0.8),
            nn.LeakyReLU(0.2),
            nn.Upsample(size=(height, self.image_width)),
            nn.Conv2d(width, width // 2, 3, padding=1),
            nn.BatchNorm2d(width // 2, eps=0.8),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width // 2, channels, 3, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, z: Tensor) -> Tensor:
        grown = self.fc(z).view(len(z), *self.start, self.width)  # channels last, as the convolutions want it
        images: Tensor = self.stages(grown.permute(0, 3, 1, 2))
        return images


def check_image_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """The shape as (channels, height, width), or the reason why there are no pixels to make."""
    if len(shape) != 3 or min(shape) < 1:
        raise SettingError(
            "this method's generator makes images, not text or plain numbers: it needs data of shape "
            f"(channels, height, width), got {tuple(shape)}"
        )
    channels, height, width = shape
    return channels, height, width


class TransposedGenerator(nn.Module):
    """DaFKD's generator for images whose sides are multiples of 16: transposed convolutions, values in (0, 1).

    `width` is the number of channels of its first stage; each of the two that follow has half of those before it.
    """

    def __init__(self, shape: Sequence[int], z_dim: int = 100, width: int = 256) -> None:
        super().__init__()
        channels, height, image_width = check_image_shape(shape)
        self.z_dim = z_dim

        def grow(inputs: int, outputs: int, kernel: tuple[int, int] = (4, 4), stride: int = 2) -> list[nn.Module]:
            padding = 1 if stride == 2 else 0
            conv = nn.ConvTranspose2d(inputs, outputs, kernel, stride, padding, bias=False)
            return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]

        self.stages = nn.Sequential(
            *grow(z_dim, width, (height // 8, image_width // 8), stride=1),
            *grow(width, width // 2),
            *grow(width // 2, width // 4),
            nn.ConvTranspose2d(width // 4, channels, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        images: Tensor = (self.stages(z.view(len(z), -1, 1, 1)) + 1) / 2
        return images


class ShrinkingGenerator(nn.Module):
    """DaFKD's generator for other sizes, such as 28x28: an image of twice the size, convolved and halved.

    `width` is the number of channels of its first convolution, half of it that of the second.
    """

    def __init__(self, shape: Sequence[int], z_dim: int = 100, width: int = 50) -> None:
        super().__init__()
        channels, height, image_width = check_image_shape(shape)
        self.z_dim = z_dim
        self.start = (2 * height, 2 * image_width)
        self.fc = nn.Linear(z_dim, self.start[0] * self.start[1])
        self.stages = nn.Sequential(
            nn.BatchNorm2d(1),
            nn.ReLU(),
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width // 2, 3, padding=1),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.Conv2d(width // 2, channels, 2, stride=2),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        images: Tensor = (self.stages(self.fc(z).view(len(z), 1, *self.start)) + 1) / 2
        return images


class ConditionalGenerator(nn.Module):
    """Noise and a label to an image, as in FedFTG, standardised like the data.

    Half of its `width` channels begin as noise, half as the label.
    """

    def __init__(self, shape: Sequence[int], classes: int, z_dim: int = 100, width: int = 128) -> None:
        super().__init__()
        channels, height, image_width = check_image_shape(shape)
        self.z_dim, self.classes = z_dim, classes
        self.start = (-(-height // 4), -(-image_width // 4))
        self.part = width // 2
        cells = self.start[0] * self.start[1]
        self.from_noise = nn.Linear(z_dim, self.part * cells)
        self.from_label = nn.Linear(classes, self.part * cells)
        self.stages = nn.Sequential(
            nn.BatchNorm2d(2 * self.part),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * self.part, 2 * self.part, 3, padding=1),
            nn.BatchNorm2d(2 * self.part),
            nn.LeakyReLU(0.2),
            nn.Upsample(size=(height, image_width)),
            nn.Conv2d(2 * self.part, self.part, 3, padding=1),
            nn.BatchNorm2d(self.part),
            nn.LeakyReLU(0.2),
            nn.Conv2d(self.part, channels, 3, padding=1),
            nn.Tanh(),
            nn.BatchNorm2d(channels, affine=False),
        )

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images as networks see the data: mean 0 and deviation 1 over the batch."""
        parts = [self.from_noise(z), self.from_label(F.one_hot(y, self.classes).to(z.dtype))]
        grown = torch.cat([part.view(len(z), self.part, *self.start) for part in parts], dim=1)
        images: Tensor = self.stages(grown)
        return images


@torch.no_grad()
def dcgan_init(layer: nn.Module) -> None:
    """First weights as in DCGAN: around 0, those of BatchNorm around 1, with a deviation of 0.02; no biases."""
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if isinstance(weight, Tensor):
        weight.normal_(1.0 if isinstance(layer, nn.modules.batchnorm._BatchNorm) else 0.0, 0.02)
    if isinstance(bias, Tensor):
        bias.zero_()


def dafkd_generator(shape: Sequence[int], z_dim: int, classes: int = 0, width: int = 0) -> nn.Module:
    """DaFKD's generator for this shape: of noise, or of noise and one of `classes`; with `width` 0, its usual width."""
    _, height, image_width = check_image_shape(shape)
    if 0 < width < 4:
        raise SettingError(f"generator_width: got {width}, give 0 (the usual width) or 4 and more")
    channels = {"width": width} if width else {}
    if classes:
        return ConditionalGenerator(shape, classes, z_dim, **channels)
    return (ShrinkingGenerator if height % 16 or image_width % 16 else TransposedGenerator)(shape, z_dim, **channels)


class FeatureGenerator(nn.Module):
    """FedGen's generator: noise and a label to penultimate features."""

    def __init__(self, classes: int, feature_dim: int, hidden: int = 256, z_dim: int = 32) -> None:
        super().__init__()
        self.classes, self.z_dim = classes, z_dim
        self.stages = nn.Sequential(
            nn.Linear(z_dim + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, feature_dim)
        )

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        features: Tensor = self.stages(torch.cat([z, F.one_hot(y, self.classes).to(z.dtype)], dim=1))
        return features


def to_inputs(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Images in 0..1 as networks see the data: minus mean, over deviation; as they are if the data are."""
    if not mean:
        return images
    centre, scale = (torch.tensor(v).view(-1, 1, 1) for v in (mean, std))
    return (images - centre) / scale


def to_images(inputs: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """What `to_inputs` was given, cut to 0..1."""
    if not mean:
        return inputs.clamp(0, 1)
    centre, scale = (torch.tensor(v).view(-1, 1, 1) for v in (mean, std))
    return (inputs * scale + centre).clamp(0, 1)
