"""Augmentation of whole batches against one image at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fedstill.core.errors import SettingError
from fedstill.data import augment


@pytest.fixture
def x() -> Tensor:
    batch = torch.rand(16, 3, 9, 7, generator=Generator().manual_seed(0))
    return batch.contiguous(memory_format=torch.channels_last)


def seeded(seed: int = 1) -> Generator:
    return Generator().manual_seed(seed)


def test_crop_is_slicing_of_the_padded_image(x: Tensor) -> None:
    top = torch.randint(0, 9, (16,), generator=seeded(2))
    left = torch.randint(0, 9, (16,), generator=seeded(3))
    cut = augment.crop_at(x, top, left, padding=4)
    for i in range(16):
        padded = F.pad(x[i], (4, 4, 4, 4))
        t, s = int(top[i]), int(left[i])
        assert torch.equal(cut[i], padded[:, t : t + 9, s : s + 7])


def test_random_crop_reaches_every_corner_and_only_those() -> None:
    x = torch.zeros(2000, 1, 5, 5)
    x[:, 0, 2, 2] = 1
    cut = augment.random_crop(x, seeded(), padding=2)
    seen = {tuple(at) for at in cut[:, 0].nonzero()[:, 1:].tolist()}
    assert seen == {(i, j) for i in range(5) for j in range(5)}
    assert cut.sum() == 2000


def test_flip_mirrors_the_marked_images_and_twice_is_nothing(x: Tensor) -> None:
    marked = torch.arange(16) % 3 == 0
    once = augment.flip_where(x, marked)
    for i in range(16):
        assert torch.equal(once[i], x[i].flip(2) if marked[i] else x[i])
    assert torch.equal(augment.flip_where(once, marked), x)


def test_flip_takes_about_half() -> None:
    x = torch.tensor([[[[0.0, 1.0]]]]).expand(4000, 1, 1, 2)
    flipped = augment.random_flip(x, seeded())[:, 0, 0, 0].mean()
    assert abs(float(flipped) - 0.5) < 5 * 0.5 / 4000**0.5


@pytest.mark.parametrize("quarter", [-1, 0, 1, 2])
def test_rotation_by_quarters_is_rot90(quarter: int) -> None:
    x = torch.rand(4, 3, 8, 8, generator=seeded())
    turned = augment.rotate_by(x, torch.full((4,), 90.0 * quarter))
    assert torch.allclose(turned, torch.rot90(x, quarter, (2, 3)), atol=1e-5)


def test_half_a_turn_of_an_image_that_is_not_square(x: Tensor) -> None:
    assert torch.allclose(augment.rotate_by(x, torch.full((16,), 180.0)), x.flip(2, 3), atol=1e-5)


def test_rotation_keeps_distances_in_an_image_that_is_not_square() -> None:
    x = torch.zeros(1, 1, 21, 41)
    x[0, 0, 10, 28] = 1  # 8 pixels right of the centre
    turned = augment.rotate_by(x, torch.tensor([90.0]))
    assert divmod(int(turned.argmax()), 41) == (2, 20)  # 8 pixels above it


def slow_scale(image: Tensor, factor: float) -> Tensor:
    """Bilinear look-up written out, pixel by pixel."""
    channels, height, width = image.shape
    out = torch.empty_like(image)
    for i in range(height):
        for j in range(width):
            row = min(max((i - (height - 1) / 2) / factor + (height - 1) / 2, 0.0), height - 1)
            column = min(max((j - (width - 1) / 2) / factor + (width - 1) / 2, 0.0), width - 1)
            r, c = min(int(row), height - 2), min(int(column), width - 2)
            a, b = row - r, column - c
            for k in range(channels):
                upper = image[k, r, c] * (1 - b) + image[k, r, c + 1] * b
                lower = image[k, r + 1, c] * (1 - b) + image[k, r + 1, c + 1] * b
                out[k, i, j] = upper * (1 - a) + lower * a
    return out


def test_scaling_is_a_bilinear_look_up_with_its_own_factor_per_image(x: Tensor) -> None:
    factors = torch.tensor([0.5, 0.8, 1.0, 1.3])
    scaled = augment.scale_by(x[:4], factors)
    for i in range(4):
        assert torch.allclose(scaled[i], slow_scale(x[i], float(factors[i])), atol=1e-5)


def test_random_angles_and_factors_stay_in_their_range(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    drawn: dict[str, Tensor] = {}

    def keep(name: str) -> None:
        def record(batch: Tensor, values: Tensor) -> Tensor:
            drawn[name] = values
            return batch

        monkeypatch.setattr(augment, name, record)

    keep("rotate_by")
    keep("scale_by")
    many = x[:1].expand(2000, -1, -1, -1)
    augment.random_rotation(many, seeded(), degrees=15)
    augment.random_scale(many, seeded(), low=0.8, high=1.0)
    assert -15 <= drawn["rotate_by"].min() < -14
    assert 14 < drawn["rotate_by"].max() <= 15
    assert 0.8 <= drawn["scale_by"].min() < 0.81
    assert 0.99 < drawn["scale_by"].max() <= 1.0


@pytest.mark.parametrize(
    "spec", ["crop", "crop:2", "flip", "rotate:15", "scale:0.8-1.0", "flip, rotate:15,scale:0.8-1.2"]
)
def test_same_generator_seed_gives_the_same_images(x: Tensor, spec: str) -> None:
    step = augment.parse(spec)
    assert step is not None
    before = x.clone()
    one, two, other = step(x, seeded(5)), step(x, seeded(5)), step(x, seeded(6))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(x, before)
    assert one.shape == x.shape
    assert one.is_contiguous(memory_format=torch.channels_last)


def test_steps_are_applied_in_order(x: Tensor) -> None:
    step = augment.parse("crop,flip")
    assert step is not None
    generator = seeded()
    expected = augment.random_flip(augment.random_crop(x, generator, 4), generator)
    assert torch.equal(step(x, seeded()), expected)


@pytest.mark.parametrize("spec", ["", " ", "none"])
def test_nothing_to_do(spec: str) -> None:
    assert augment.parse(spec) is None


@pytest.mark.parametrize(
    "spec",
    [
        *("flp", "crop,", "crop:x", "crop:0", "crop:", "flip:1", "rotate", "rotate:", "rotate:-5", "rotate:200"),
        *("scale", "scale:1", "scale:0-1", "scale:1.2-0.8", "scale:a-b", "none,flip", "rotate:nan", "scale:1-inf"),
    ],
)
def test_a_misspelt_step_is_a_setting_error(spec: str) -> None:
    with pytest.raises(SettingError, match="augmentation"):
        augment.parse(spec)
