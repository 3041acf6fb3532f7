"""A network whose weights are one vector."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedstill.core.errors import SettingError
from fedstill.core.weights import FlatNet
from support.core import state


class Net(nn.Module):
    """Convolution, BatchNorm (with its integer counter), a constant, a scalar, a frozen layer and a tied one."""

    constant: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, (2, 4))
        self.norm = nn.BatchNorm2d(3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.encode = nn.Linear(3, 3, bias=False)
        self.decode = nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight
        self.register_buffer("constant", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.norm(self.conv(x)).mean((2, 3)) * self.scale + self.constant
        logits: Tensor = self.decode(self.encode(self.frozen(pooled)))
        return logits


def small_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net()
    net(torch.randn(4, 2, 5, 6))  # so that the statistics are not the initial ones
    return net


IN_VECTOR = ["scale", "conv.weight", "conv.bias", "norm.weight", "norm.bias", "encode.weight"]

BUFFERS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_the_vector_holds_trainable_parameters_in_order_and_then_buffers() -> None:
    flat = FlatNet(small_net())
    assert [e.name for e in flat.entries] == IN_VECTOR + BUFFERS
    assert [e.name for e in flat.entries if e.trainable] == IN_VECTOR
    trainable = 1 + 3 * 2 * 2 * 4 + 3 + 3 + 3 + 9
    assert flat.trainable == trainable
    assert flat.size == trainable + 3 + 3 + 1


def test_neither_frozen_parameters_nor_constants_are_in_the_vector() -> None:
    module = small_net()
    frozen = module.frozen.weight.clone()
    flat = FlatNet(module)
    flat.load(torch.zeros(flat.size))
    assert torch.equal(module.frozen.weight, frozen)
    assert torch.equal(module.constant, torch.arange(3.0))


def test_unflatten_gives_the_state_dict() -> None:
    module = small_net()
    expected = {k: v.clone() for k, v in module.state_dict().items()}
    flat = FlatNet(module)
    named = flat.unflatten(flat.read())
    assert list(named) == IN_VECTOR + BUFFERS
    for name, tensor in named.items():
        assert tensor.shape == expected[name].shape
        assert tensor.is_contiguous()
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    assert torch.equal(named["encode.weight"], expected["decode.weight"]), "tied weights are kept once"


def test_making_a_network_flat_does_not_change_what_it_computes() -> None:
    x = torch.randn(3, 2, 5, 6)
    expected = small_net().eval()(x)
    torch.testing.assert_close(FlatNet(small_net()).module.eval()(x), expected)


def test_parameters_and_float_buffers_are_views_of_the_vector() -> None:
    module = small_net()
    flat = FlatNet(module)
    flat.vector.fill_(2.0)
    for tensor in (*flat.params, state(module)["norm.running_var"]):
        assert torch.equal(tensor, torch.full_like(tensor, 2.0))
    state(module)["conv.bias"][1] = 7.0
    assert flat.read()[flat.entries[2].start + 1] == 7.0


def test_convolutions_lie_in_channels_last_order() -> None:
    module = small_net()
    expected = module.conv.weight.detach().permute(0, 2, 3, 1).flatten().clone()
    flat = FlatNet(module)
    entry = flat.entries[1]
    assert torch.equal(flat.vector[entry.start : entry.stop], expected)
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_load_and_read_are_inverse_and_read_is_a_copy() -> None:
    flat, other = FlatNet(small_net(0)), FlatNet(small_net(1))
    vector = other.read()
    flat.load(vector)
    assert torch.equal(flat.read(), vector)
    flat.read().zero_()
    assert torch.equal(flat.read(), vector)


def test_integer_buffers_travel_with_the_vector() -> None:
    module = small_net()
    flat = FlatNet(module)
    assert state(module)["norm.num_batches_tracked"].dtype == torch.int64
    assert flat.read()[-1] == 1
    module.train()(torch.randn(4, 2, 5, 6))
    vector = flat.read()
    assert vector[-1] == 2
    vector[-1] = 41
    flat.load(vector)
    assert state(module)["norm.num_batches_tracked"].item() == 41


def test_tied_parameters_stay_tied() -> None:
    module = small_net()
    flat = FlatNet(module)
    assert module.encode.weight is module.decode.weight
    flat.load(torch.arange(flat.size, dtype=torch.float32))
    assert torch.equal(module.encode.weight, module.decode.weight)


def test_training_moves_the_vector() -> None:
    flat = FlatNet(small_net())
    before = flat.read()
    flat.module(torch.randn(4, 2, 5, 6)).sum().backward()
    torch.optim.SGD(flat.params, lr=0.1).step()
    gradient = torch.cat(
        [
            p.grad.permute(0, 2, 3, 1).flatten() if p.ndim == 4 else p.grad.flatten()
            for p in flat.params
            if p.grad is not None
        ]
    )
    torch.testing.assert_close(flat.read()[: flat.trainable], before[: flat.trainable] - 0.1 * gradient)


def test_split_gives_views_shaped_as_the_parameters() -> None:
    flat = FlatNet(small_net())
    vector = torch.randn(flat.trainable)
    parts = flat.split(vector)
    assert [p.shape for p in parts] == [p.shape for p in flat.params]
    parts[0].fill_(5.0)
    assert vector[0] == 5.0


def test_parameters_of_several_dtypes_are_refused() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(SettingError, match="one floating dtype"):
        FlatNet(mixed)


def test_a_network_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(SettingError, match="no trainable parameters"):
        FlatNet(nn.Sequential(nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)))


def test_a_network_of_doubles_has_a_vector_of_doubles() -> None:
    assert FlatNet(nn.Linear(2, 2).double()).vector.dtype == torch.float64
