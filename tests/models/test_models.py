"""The networks: sizes as published, one contract for all, and clear words for what does not fit."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstill import models
from fedstill.core.errors import SettingError
from fedstill.models import Classifier, as_classifier

OF_IMAGES = [name for name in models.names() if name not in ("bag", "distilbert", "lstm", "transformer")]
RGB, GREY = (3, 32, 32), (1, 32, 32)
CODED = [("resnet18", 512), ("shufflenetv2", 1024)]


@pytest.fixture(autouse=True)
def _fixed_and_small() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def macs(network: Classifier, shape: tuple[int, ...]) -> int:
    """Multiply-accumulates of convolutions and linear layers for one sample, counted as they run."""
    total = 0

    def count(layer: nn.Module, _: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal total
        if isinstance(layer, nn.Conv2d):
            total += out.numel() * math.prod(layer.kernel_size) * layer.in_channels // layer.groups
        elif isinstance(layer, nn.Linear):
            total += out.numel() * layer.in_features

    handles = [module.register_forward_hook(count) for module in network.modules()]
    network.eval()(torch.zeros(1, *shape))
    for handle in handles:
        handle.remove()
    return total


# Sizes


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "expected"),
    [
        ("lenet5", GREY, 10, {}, 61_706),
        ("lenet5", GREY, 26, {}, 63_066),
        ("lenet5", GREY, 47, {}, 64_851),
        ("resnet8", RGB, 10, {}, 78_042),
        ("resnet8", RGB, 10, {"norm": "batch"}, 78_042),
        ("resnet8", RGB, 10, {"width": 64, "norm": 1}, 1_227_594),
        ("resnet8-w64", RGB, 10, {}, 1_227_594),
        ("resnet11", RGB, 10, {}, 383_642),
        # The paper's 0.27 and 0.46 million, whose shortcuts have no weights; those with 1x1 convolutions have 2,752.
        ("resnet20", RGB, 10, {}, 269_722 + 2_752),
        ("resnet32", RGB, 10, {}, 464_154 + 2_752),
        ("resnet11", RGB, 10, {"blocks": [2, 2, 2]}, 820_442),
        ("mlp", (1, 28, 28), 10, {}, 199_210),  # the figure in the FedAvg paper
    ],
)
def test_network_has_the_published_number_of_parameters(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], expected: int
) -> None:
    assert parameters(models.build(name, shape, classes, **options)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"), [("resnet18", 11_689_512), ("resnet50", 25_557_032), ("shufflenetv2", 2_278_604)]
)
def test_imagenet_network_has_as_many_parameters_as_torchvisions(name: str, expected: int) -> None:
    with torch.device("meta"):
        assert parameters(models.build(name, (3, 224, 224), 1000)) == expected


@pytest.mark.parametrize(("name", "gmacs"), [("resnet18", 1.814), ("resnet50", 4.089), ("shufflenetv2", 0.145)])
def test_imagenet_network_costs_what_torchvision_states(name: str, gmacs: float) -> None:
    with torch.device("meta"):
        network = models.build(name, (3, 224, 224), 1000)
        assert macs(network, (3, 224, 224)) / 1e9 == pytest.approx(gmacs, abs=0.002)


@pytest.mark.parametrize(
    ("name", "shape", "mega"),
    [("resnet8", RGB, 12.5), ("resnet8-w64", RGB, 195), ("resnet11", RGB, 81), ("lenet5", GREY, 0.42)],
)
def test_network_costs_the_published_macs(name: str, shape: tuple[int, ...], mega: float) -> None:
    assert macs(models.build(name, shape, 10), shape) / 1e6 == pytest.approx(mega, rel=0.01)


def test_small_stem_keeps_the_size_up_to_64_pixels_and_the_large_one_takes_a_quarter() -> None:
    def size_after_stem(side: int, **options: Any) -> int:
        network = models.build("resnet18", (3, side, side), 2, **options)
        assert isinstance(network, models.Stacked)
        out: Tensor = network.body.get_submodule("stem")(torch.zeros(1, 3, side, side))
        return out.shape[-1]

    assert [size_after_stem(32), size_after_stem(64), size_after_stem(96)] == [32, 64, 24]
    assert [size_after_stem(32, stem="7x7"), size_after_stem(96, stem="3x3")] == [8, 96]


# The contract


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OF_IMAGES)
def test_logits_are_the_head_of_the_features(name: str, channels: int) -> None:
    network = models.build(name, (channels, 32, 32), 7).eval()
    x = torch.randn(2, channels, 32, 32)
    features = network.features(x)
    assert features.shape == (2, network.feature_dim)
    assert network(x).shape == (2, 7)
    torch.testing.assert_close(network.head(features), network(x))


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("cnn", 84),
        ("lenet5", 84),
        ("mlp", 200),
        ("resnet8", 64),
        ("resnet8-w64", 256),
        ("resnet11", 256),
        ("resnet20", 64),
        ("resnet32", 64),
        ("resnet18", 512),
        ("resnet50", 2048),
        ("shufflenetv2", 1024),
    ],
)
def test_feature_dim_is_that_of_the_architecture(name: str, dim: int) -> None:
    with torch.device("meta"):
        assert models.build(name, RGB, 10).feature_dim == dim


@pytest.mark.parametrize(("name", "width"), CODED)
def test_code_is_the_feature_and_adds_one_linear_layer(name: str, width: int) -> None:
    plain, coded = models.build(name, RGB, 10), models.build(name, RGB, 10, code=32).eval()
    assert coded.features(torch.randn(2, *RGB)).shape == (2, 32)
    assert coded.feature_dim == 32
    added = (width + 1) * 32 + (32 + 1) * 10 - (width + 1) * 10
    assert parameters(coded) - parameters(plain) == added


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_IMAGES)
def test_gradients_reach_every_parameter_also_through_a_gradient(name: str) -> None:
    network = models.build(name, RGB, 10)
    x = torch.randn(4, *RGB, requires_grad=True)
    loss = F.cross_entropy(network(x), torch.tensor([0, 1, 2, 3]))
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    gradients = {key: p.grad for key, p in network.named_parameters()}
    assert [key for key, grad in gradients.items() if grad is None or not grad.any()] == []
    assert [key for key, grad in gradients.items() if grad is None or not grad.isfinite().all()] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_IMAGES)
def test_logits_do_not_depend_on_the_memory_layout(name: str) -> None:
    # Away from square images, and in double precision, so that a wrong order cannot hide behind rounding.
    shape = RGB if models.image_size(name) else (3, 24, 32)
    network = models.build(name, shape, 10).double().eval()
    x = torch.randn(2, *shape, dtype=torch.float64)
    expected = network(x)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.testing.assert_close(network(x.to(memory_format=torch.channels_last)), expected)


def test_shufflenet_stays_in_channels_last_memory() -> None:
    network = models.build("shufflenetv2", RGB, 10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert isinstance(network, models.Stacked)
    kept: list[bool] = []
    for stage in ("stage2", "stage3"):
        network.body.get_submodule(stage).register_forward_hook(
            lambda _, __, out: kept.append(out.is_contiguous(memory_format=torch.channels_last))
        )
    network(torch.randn(2, *RGB).to(memory_format=torch.channels_last))
    assert kept == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in OF_IMAGES if not models.image_size(n)])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 16, 16), (2, 40, 21)])
def test_network_takes_any_image_size_it_does_not_forbid(name: str, shape: tuple[int, ...]) -> None:
    assert models.build(name, shape, 5).eval()(torch.randn(2, *shape)).shape == (2, 5)


def test_mlp_takes_plain_vectors_and_without_hidden_layers_is_softmax_regression() -> None:
    network = models.build("mlp", (20,), 3, hidden=[])
    x = torch.randn(4, 20)
    torch.testing.assert_close(network.features(x), x)
    assert [tuple(p.shape) for p in network.parameters()] == [(3, 20), (3,)]


def test_same_seed_gives_the_same_network_and_evaluation_leaves_no_trace() -> None:
    def fresh() -> Classifier:
        torch.manual_seed(3)
        return models.build("resnet18", GREY, 10).eval()

    first, second = fresh(), fresh()
    state_of_generator = torch.get_rng_state()
    first.features(torch.randn(2, *GREY, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state_of_generator)
    assert all(torch.equal(a, second.state_dict()[key]) for key, a in first.state_dict().items())


def test_resnet8_convolutions_start_normal_with_variance_two_over_kernel_times_outputs() -> None:
    for layer in models.build("resnet8-w64", RGB, 10).modules():
        if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 30_000:
            std = math.sqrt(2 / (math.prod(layer.kernel_size) * layer.out_channels))
            assert layer.weight.std().item() == pytest.approx(std, rel=0.02)
            assert layer.bias is None


@pytest.mark.parametrize(
    ("name", "norm", "groups"),
    [
        ("resnet8", "group", {16: 1, 32: 2, 64: 4}),
        ("resnet8", 8, {16: 2, 32: 4, 64: 8}),
        ("resnet8-w64", "group", {64: 64, 128: 128, 256: 256}),
        ("resnet18", "group", {64: 4, 128: 8, 256: 16, 512: 32}),
        ("resnet8", "batch", {}),
    ],
)
def test_norm_sets_the_channels_per_group(name: str, norm: str | int, groups: dict[int, int]) -> None:
    layers = list(models.build(name, RGB, 10, norm=norm).modules())
    assert {m.num_channels: m.num_groups for m in layers if isinstance(m, nn.GroupNorm)} == groups
    assert any(isinstance(m, nn.BatchNorm2d) for m in layers) == (norm == "batch")


def test_layer_with_fewer_channels_than_a_group_is_one_group() -> None:
    layers = models.build("resnet8", RGB, 10, width=8).modules()
    groups = {m.num_channels: m.num_groups for m in layers if isinstance(m, nn.GroupNorm)}
    assert groups == {8: 1, 16: 1, 32: 2}


# What does not fit


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("lenet5", (1, 28, 28), {}, "model 'lenet5' needs images of 32x32, got 1x28x28; set image_size=32"),
        ("cnn", (3, 8, 8), {}, "model 'cnn' needs images of at least 16x16, got 3x8x8"),
        (
            "resnet8",
            (20,),
            {},
            "model 'resnet8' needs images of channels x height x width, got samples of 20",
        ),
        ("mlp", (), {}, "model 'mlp' needs samples of at least one dimension"),
        ("mlp", (0,), {}, "each number of the input shape must be a whole number of at least 1, got 0"),
        ("resnet9", RGB, {}, "unknown model 'resnet9'; did you mean 'resnet8'"),
        ("resnet8", RGB, {"widht": 8}, "unknown option of model 'resnet8': 'widht'; did you mean 'width'"),
        ("resnet8", RGB, {"colour": 8}, "unknown option of model 'resnet8': 'colour'; known: norm, width"),
        ("lenet5", RGB, {"width": 8}, "model 'lenet5' has no options, got 'width'"),
        ("resnet8", RGB, {"width": 0}, "model 'resnet8': width must be a whole number of at least 1, got 0"),
        ("resnet8", RGB, {"norm": "grup"}, "model 'resnet8': unknown norm 'grup'; did you mean 'group'"),
        ("resnet8", RGB, {"norm": True}, "norm must be a whole number of at least 1, got True"),
        ("resnet8", RGB, {"width": 24}, "norm: 24 channels cannot be put into groups of 16"),
        ("resnet11", RGB, {"blocks": [2, 2]}, "blocks must be a list of 3 numbers, got [2, 2]"),
        ("resnet18", RGB, {"code": -1}, "code must be a whole number of at least 0, got -1"),
        ("resnet50", RGB, {"stem": "5x5"}, "model 'resnet50': unknown stem '5x5'"),
        ("mlp", RGB, {"hidden": "200"}, "hidden must be a list of whole numbers, got '200'"),
    ],
)
def test_misfit_is_one_clear_line(name: str, shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        models.build(name, shape, 10, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_lenet5_insists_on_an_image_size() -> None:
    assert {name: models.image_size(name) for name in models.names() if models.image_size(name)} == {"lenet5": 32}
    with pytest.raises(SettingError, match="unknown model 'lenet'"):
        models.image_size("lenet")


# A user's own module


class Nested(nn.Module):
    """A user's network whose last layer sits in a container, and which uses one activation twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.act = nn.Tanh()
        self.classify = nn.Sequential(nn.Dropout(0.0), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classify(self.act(self.act(self.first(x.flatten(1)))))
        return out


def shared_activation() -> nn.Sequential:
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(6, 5), act, nn.Linear(5, 4), act, nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("module", "dim"),
    [
        (shared_activation(), 4),
        (Nested(), 5),
        (nn.Linear(6, 3), 6),
        (nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 3))), 5),
    ],
)
def test_plain_module_becomes_a_classifier_with_the_same_logits(module: nn.Module, dim: int) -> None:
    network = as_classifier(module)
    x = torch.randn(4, 6)
    assert torch.equal(network(x), module(x))
    assert network.feature_dim == dim
    assert network.features(x).shape == (4, dim)
    torch.testing.assert_close(network.head(network.features(x)), module(x))


def test_classifier_is_left_as_it_is() -> None:
    network = models.build("mlp", (4,), 2)
    assert as_classifier(network) is network


def test_wrapper_keeps_the_users_keys_behind_one_prefix_and_no_parameter_twice() -> None:
    module = Nested()
    network = as_classifier(module)
    network.features(torch.randn(2, 6))
    assert list(network.state_dict()) == [f"module.{key}" for key in module.state_dict()]
    assert [id(p) for p in network.parameters()] == [id(p) for p in module.parameters()]


@pytest.mark.parametrize("module", [shared_activation(), Nested()])
def test_copy_of_a_wrapped_module_looks_at_its_own_weights(module: nn.Module) -> None:
    network = as_classifier(module)
    x = torch.randn(4, 6)
    before, features_before = network(x), network.features(x)
    twin = copy.deepcopy(network)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    assert torch.equal(network.features(x), features_before)
    assert torch.equal(network(x), before)
    assert not torch.allclose(twin.features(x), features_before)
    torch.testing.assert_close(twin.head(twin.features(x)), twin(x))
    twin.features(x).sum().backward()
    assert all(p.grad is None for p in network.parameters())


def test_gradients_flow_through_tapped_features() -> None:
    module = Nested()
    as_classifier(module).features(torch.randn(4, 6)).square().sum().backward()
    assert module.first.weight.grad is not None
    assert module.first.weight.grad.any()


def test_module_without_linear_gives_logits_but_no_features() -> None:
    module = nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())
    network, x = as_classifier(module), torch.randn(2, 1, 4, 4)
    assert torch.equal(network(x), module(x))
    for ask in (lambda: network.features(x), lambda: network.head, lambda: network.feature_dim):
        with pytest.raises(SettingError, match="no features for Sequential: it has no Linear layer"):
            ask()


def test_module_that_goes_on_after_its_last_linear_gives_logits_but_no_features() -> None:
    module = nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(dim=1))
    network, x = as_classifier(module), torch.randn(2, 6)
    assert torch.equal(network(x), module(x))
    with pytest.raises(SettingError, match="its output is not that of its last Linear layer, '0'"):
        network.features(x)
