"""How a user's network is taken in: copied, with parameters for its lazy layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import fedstill
from fedstill.core.errors import SettingError


def trained(model: nn.Module | Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    data = fedstill.from_arrays(rng.random((40, 3, 8, 8), dtype=np.float32), rng.integers(0, 2, 40))
    result = fedstill.run("fedavg", data=data, model=model, clients=2, rounds=1, engine="inline")
    return dict(result.model.state_dict())


def plain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))


def test_a_network_with_lazy_layers_trains_as_one_whose_shapes_are_written_out() -> None:
    expected = trained(plain)  # both draw their weights in the order of the layers, from the same stream
    for model in (lazy, lazy()):
        found = trained(model)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_scripted_network_trains_as_its_source_does() -> None:
    net = plain()
    expected, found = trained(net), trained(torch.jit.script(net))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_lazy_layers_that_do_not_fit_the_samples_are_refused_in_one_line() -> None:
    wrong = nn.Sequential(nn.LazyConv2d(4, 3), nn.Linear(7, 2))
    with pytest.raises(SettingError, match=r"lazy layers do not take a sample of 3x8x8: .*shapes cannot be multiplied"):
        trained(wrong)


def test_a_network_that_pytorch_cannot_copy_is_refused_with_what_to_do() -> None:
    net = plain()
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(net[0])  # type: ignore[index]
    with pytest.raises(SettingError, match=r"cannot copy this model.*parametrizations\.weight_norm"):
        trained(net)
