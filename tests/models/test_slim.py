"""Sub-networks share the full network's weights and are what a narrow network would be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedstill.core.errors import SettingError
from fedstill.models import Stacked, as_classifier, build, names
from fedstill.models.slim import WholeConv2d, active_channels, check_sliceable, slimmed


def lenet_of(channels: tuple[int, int, int, int]) -> Stacked:
    """LeNet-5 with other widths, built explicitly."""
    c1, c2, c3, c4 = channels
    body = nn.Sequential(
        nn.Conv2d(1, c1, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(c1, c2, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(c2, c3, 5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(c3, c4),
        nn.ReLU(),
    )
    return Stacked(body, nn.Linear(c4, 10), feature_dim=c4)


def resnet_of(width: float, norm: str | int) -> nn.Module:
    """ResNet-8 whose 16, 32 and 64 channels are those that a width keeps; only some widths are multiples of it."""
    assert active_channels(32, width) == 2 * active_channels(16, width)
    assert active_channels(64, width) == 4 * active_channels(16, width)
    return build("resnet8", (3, 32, 32), 10, width=active_channels(16, width), norm=norm)


def copy_first(narrow: nn.Module, full: nn.Module) -> None:
    """The narrow network's weights: the first ones of the full network's, in every axis."""
    with torch.no_grad():
        for p, q in zip(narrow.parameters(), full.parameters(), strict=True):
            p.copy_(q[tuple(slice(n) for n in p.shape)])


@pytest.mark.parametrize("width", [0.8, 0.83, 0.5, 1.0])
def test_a_sub_network_of_lenet_equals_the_narrow_network_with_the_same_weights(width: float) -> None:
    full = build("lenet5", (1, 32, 32), 10)
    narrow = lenet_of(
        (active_channels(6, width), active_channels(16, width), active_channels(120, width), active_channels(84, width))
    )
    copy_first(narrow, full)
    x = torch.randn(5, 1, 32, 32)
    with slimmed(full, width) as sub:
        torch.testing.assert_close(sub(x), narrow(x))
        torch.testing.assert_close(sub.features(x), narrow.features(x))


@pytest.mark.parametrize("norm", ["batch", 4])
def test_a_sub_network_of_resnet_equals_the_narrow_network_with_the_same_weights(norm: str | int) -> None:
    full, narrow = build("resnet8", (3, 32, 32), 10, norm=norm), resnet_of(0.75, norm)
    copy_first(narrow, full)
    x = torch.randn(6, 3, 32, 32)
    with slimmed(full, 0.75) as sub:
        torch.testing.assert_close(sub(x), narrow.train()(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in names() if n not in ("bag", "distilbert", "lstm", "transformer")])
def test_every_network_has_sub_networks_and_is_itself_again_afterwards(name: str) -> None:
    net = build(name, (3, 32, 32), 10).eval()
    x = torch.randn(3, 3, 32, 32)
    check_sliceable(net, x, 0.8)
    net.eval()
    before = net(x)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    with slimmed(net, 0.83) as sub:
        assert sub(x).shape == (3, 10)
    assert torch.equal(net(x), before)
    assert all(torch.equal(state[key], value) for key, value in net.state_dict().items()), "statistics untouched"


@pytest.mark.slow
def test_no_rounding_of_whatever_kernels_makes_a_network_unfit_for_sub_networks() -> None:
    """In float32 what two equal ShuffleNets make of the same samples may differ by two in a thousand."""
    for seed in range(6):
        torch.manual_seed(seed)
        check_sliceable(build("shufflenetv2", (3, 32, 32), 10), torch.randn(3, 3, 32, 32), 0.8)


class InFloat32(nn.Module):
    """A network that computes in one format, whatever its samples have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x.float())
        return found


def test_a_network_that_computes_in_float32_alone_can_have_sub_networks() -> None:
    check_sliceable(as_classifier(InFloat32()), torch.randn(3, 4), 0.8)


def test_a_sub_network_shares_storage_and_its_gradient_is_the_full_networks() -> None:
    net = build("lenet5", (1, 32, 32), 10)
    first = next(m for m in net.modules() if isinstance(m, nn.Conv2d))
    with slimmed(net, 0.5) as sub:
        loss = sub(torch.randn(4, 1, 32, 32)).square().sum()
        loss.backward()
        before = sub(torch.ones(1, 1, 32, 32))
        with torch.no_grad():
            first.weight[0] += 1  # a channel that the sub-network keeps
        assert not torch.equal(sub(torch.ones(1, 1, 32, 32)), before)
        between = sub(torch.ones(1, 1, 32, 32))
        with torch.no_grad():
            first.weight[5] += 1  # one that it does not
        assert torch.equal(sub(torch.ones(1, 1, 32, 32)), between)
    assert first.weight.grad is not None
    assert first.weight.grad[:3].abs().sum() > 0
    assert first.weight.grad[3:].abs().sum() == 0


def test_a_network_with_unknown_layers_is_refused_by_name() -> None:
    odd = Stacked(nn.Sequential(nn.Flatten(), nn.Bilinear(4, 4, 2)), nn.Linear(2, 2), feature_dim=2)
    with pytest.raises(SettingError, match=r"body\.1 is Bilinear"):
        check_sliceable(odd, torch.randn(2, 4), 0.8)


class Halved(nn.Module):
    """One half of the channels passes, the other half is transformed."""

    def __init__(self, conv: type[nn.Conv2d]) -> None:
        super().__init__()
        self.stem, self.branch, self.fc = conv(1, 10, 3), conv(5, 5, 1), nn.Linear(10 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed, transformed = self.stem(x).chunk(2, dim=1)
        logits: torch.Tensor = self.fc(torch.cat((passed, self.branch(transformed)), dim=1).flatten(1))
        return logits


def test_a_network_whose_channels_would_meet_the_weights_of_others_is_refused() -> None:
    x = torch.randn(3, 1, 4, 4)
    with pytest.raises(SettingError, match=r"WholeConv2d"):
        check_sliceable(as_classifier(Halved(nn.Conv2d)), x, 0.8)
    check_sliceable(as_classifier(Halved(WholeConv2d)), x, 0.8)


def test_a_sub_network_of_shufflenet_is_the_full_network_without_the_other_channels() -> None:
    full = build("shufflenetv2", (3, 32, 32), 10)
    x, cut = torch.randn(8, 3, 32, 32), slice(0)
    with torch.no_grad():
        for layer in full.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.bias.uniform_(-1, 1)
        with slimmed(full, 0.8) as sub:
            found = sub(x)
        for layer in full.modules():
            if isinstance(layer, nn.Conv2d) and layer.groups == 1:
                whole = isinstance(layer, WholeConv2d)
                cut = slice(0) if whole else slice(active_channels(layer.out_channels, 0.8), None)
                layer.weight[cut] = 0
            elif isinstance(layer, nn.BatchNorm2d):
                layer.weight[cut] = layer.bias[cut] = 0
        torch.testing.assert_close(found, full.train()(x), rtol=1e-3, atol=1e-3)


class Reshaped(nn.Module):
    """A network as many are written: it knows how many features a sample has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        said: torch.Tensor = self.fc(self.conv(x).reshape(-1, 8 * 16))
        return said


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (Reshaped(), "no sub-networks"),
        (nn.Sequential(nn.Conv2d(1, 10, 4), nn.Flatten()), "no Linear layer"),
        (nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(64, 10)), "groups=2"),
        (
            nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(64, 10)),
            "reflect",
        ),
    ],
    ids=["reshaped", "no linear", "groups", "padding"],
)
def test_a_network_that_cannot_be_narrowed_is_refused(net: nn.Module, reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        check_sliceable(as_classifier(net), torch.randn(3, 1, 4, 4), 0.8)


@pytest.mark.filterwarnings("error")
def test_one_sample_has_no_statistics_of_its_own_in_a_sub_network_either() -> None:
    net = as_classifier(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    with slimmed(net, 0.5) as sub:
        assert torch.isfinite(sub(torch.randn(1, 4))).all()


def test_an_error_inside_leaves_the_network_whole() -> None:
    net = build("lenet5", (1, 32, 32), 10)
    x = torch.randn(2, 1, 32, 32)
    before = net(x)
    with pytest.raises(RuntimeError), slimmed(net, 0.5) as sub:
        sub(torch.randn(2, 1, 5, 5))
    assert torch.equal(net(x), before)
