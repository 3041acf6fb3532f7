"""FedKF's generator: its loss (Eq. 1 to 4), its layers, its size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedstill.distill.generators import ImageGenerator
from fedstill.methods.fedkf import FedKF
from fedstill.train.evaluate import Outputs
from support.fedkf import generated
from support.wiretap import (
    Floats,
    softmax,
)


def generator_loss(logits: Floats, features: Floats, method: FedKF) -> float:
    p = softmax(logits)
    n, classes = p.shape
    l_ce = -sum(math.log(p[i, p[i].argmax()]) for i in range(n)) / n  # Eq. 1
    mean = p.mean(0)
    l_ie = sum(mean[c] * math.log(mean[c]) for c in range(classes))  # Eq. 2
    if method.ie_normalised:
        l_ie = 1 + l_ie / math.log(classes)
    l_a = -sum(np.abs(features[i]).sum() for i in range(n)) / n  # Eq. 3
    if method.activation_mean:
        l_a /= features.shape[1]
    return float(l_ie + method.lambda1 * l_ce + method.lambda2 * l_a)  # Eq. 4


def differences(f: Callable[[Floats], float], at: Floats, step: float = 1e-6) -> Floats:
    """Gradient by central differences."""
    found = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        move = np.zeros_like(at)
        move[place] = step
        found[place] = (f(at + move) - f(at - move)) / (2 * step)
    return found


@pytest.mark.parametrize("ie_normalised", [True, False])
@pytest.mark.parametrize("activation_mean", [True, False])
@pytest.mark.parametrize(("lambda1", "lambda2"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.7), (0.3, 0.7)])
def test_the_generators_loss_and_gradient_are_those_of_the_paper(
    ie_normalised: bool, activation_mean: bool, lambda1: float, lambda2: float
) -> None:
    method = FedKF(lambda1=lambda1, lambda2=lambda2, ie_normalised=ie_normalised, activation_mean=activation_mean)
    rng = np.random.default_rng(0)
    l64, f64 = rng.normal(size=(5, 4)), rng.normal(size=(5, 3))
    logits, features = (torch.tensor(v, requires_grad=True) for v in (l64, f64))
    loss = method.generator_loss(Outputs(logits, features))
    assert loss.item() == pytest.approx(generator_loss(l64, f64, method), rel=1e-12)
    by_logits, by_features = torch.autograd.grad(loss, [logits, features])
    np.testing.assert_allclose(
        by_logits.numpy(), differences(lambda v: generator_loss(v, f64, method), l64), rtol=1e-5, atol=1e-8
    )
    np.testing.assert_allclose(
        by_features.numpy(), differences(lambda v: generator_loss(l64, v, method), f64), rtol=1e-5, atol=1e-8
    )


def test_the_normalised_entropy_is_0_for_classes_in_balance_and_1_for_a_single_class() -> None:
    method, features = FedKF(lambda1=0, lambda2=0), torch.zeros(4, 3)
    assert method.generator_loss(Outputs(100 * torch.eye(4), features)).item() == pytest.approx(0, abs=1e-6)
    single = torch.tensor([[100.0, 0, 0, 0]]).repeat(4, 1)
    assert method.generator_loss(Outputs(single, features)).item() == pytest.approx(1, abs=1e-6)


def test_the_generator_is_the_one_of_the_specification() -> None:
    torch.manual_seed(0)
    net = ImageGenerator((3, 32, 32), z_dim=5, width=6).double().train()
    for p in net.parameters():
        nn.init.normal_(p)
    z = torch.randn(4, 5, dtype=torch.float64)
    named = dict(net.named_parameters())
    torch.testing.assert_close(net(z), generated(named, z, side=32, width=6))
    assert net(z).shape == (4, 3, 32, 32)


@pytest.mark.parametrize(
    ("shape", "z_dim", "parameters", "mmac"),
    [((1, 32, 32), 100, 1.05e6, 115), ((3, 32, 32), 1000, 8.42e6, 123)],
)
def test_the_generators_size_and_cost(shape: tuple[int, int, int], z_dim: int, parameters: float, mmac: float) -> None:
    net, macs = ImageGenerator(shape, z_dim), 0

    def count(layer: nn.Module, _: Any, out: Tensor) -> None:
        nonlocal macs
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        macs += layer.weight.numel() * (out.shape[2] * out.shape[3] if out.dim() == 4 else 1)

    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    assert net(torch.randn(2, z_dim)).shape == (2, *shape)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(parameters, rel=0.005)
    assert macs / 1e6 == pytest.approx(mmac, rel=0.005)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 30, 17), (2, 5, 6)])
def test_the_generator_makes_images_of_any_size(shape: tuple[int, int, int]) -> None:
    made = ImageGenerator(shape, 4, 4)(torch.randn(3, 4)).detach()
    assert made.shape == (3, *shape)
    assert float(made.min()) > 0
    assert float(made.max()) < 1
