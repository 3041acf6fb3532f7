"""Networks that make samples from noise."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

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
        raise SettingError(f"a generator of images needs data of shape (channels, height, width), got {tuple(shape)}")
    channels, height, width = shape
    return channels, height, width
