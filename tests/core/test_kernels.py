"""No network meets a convolution whose kernel writes outside its memory."""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstill
from fedstill.core.errors import SettingError
from fedstill.core.kernels import Refusing, conv2d, protect
from fedstill.core.weights import FlatNet
from fedstill.models import build
from fedstill.models.slim import slimmed

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def kernel_sweep(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    module = importlib.import_module("kernel_sweep")
    if not module.heap_checks():
        pytest.skip("this system's C library has no heap checks")
    return module


@pytest.mark.parametrize(("channels", "stride", "size"), list(product((2, 4, 7), (2, 3), (8, 9, 15))))
def test_a_protected_convolution_has_the_values_and_gradients_of_float64(channels: int, stride: int, size: int) -> None:
    torch.manual_seed(channels)
    layer, x = nn.Conv2d(channels, 5, 1, stride, padding=1), torch.randn(3, channels, size, size, requires_grad=True)
    expected, wide = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    protect(layer)
    layer(x).square().sum().backward()
    expected(wide).square().sum().backward()  # in the default layout and float64: another kernel
    assert torch.allclose(layer(x).double(), expected(wide), atol=1e-5)
    for ours, theirs in ((x, wide), (layer.weight, expected.weight), (layer.bias, expected.bias)):
        assert ours is not None
        assert theirs is not None
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)


def test_wide_convolutions_stay_as_they_are() -> None:
    layer = nn.Conv2d(8, 5, 1, 2)
    protect(layer)
    assert "_conv_forward" not in vars(layer)
    x = torch.randn(2, 8, 6, 6)
    assert torch.equal(conv2d(x, layer.weight, layer.bias, (2, 2), (0, 0), (1, 1), 1), layer(x))


def test_a_copy_of_a_protected_layer_uses_its_own_weights() -> None:
    net = FlatNet(nn.Sequential(nn.Conv2d(3, 2, 1, 2)))
    other = copy.deepcopy(net.module)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert not other(torch.ones(1, 3, 4, 4)).any()
    assert net.module(torch.ones(1, 3, 4, 4)).any()


@pytest.mark.parametrize(("width", "share"), [(3, 1.0), (4, 0.6), (16, 0.25)])
def test_no_residual_network_or_sub_network_has_such_a_convolution(width: int, share: float) -> None:
    net = build("resnet8", (3, 16, 16), 10, width=width, norm="batch")
    FlatNet(net)
    with Refusing(), slimmed(net, share):
        net(torch.randn(2, 3, 16, 16))


class Functional(nn.Module):
    """A user's network that convolves without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(4, 3, 1, 1))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(F.conv2d(x, self.filters, stride=2).mean((2, 3)))
        return found


def test_such_a_convolution_that_is_no_layer_is_refused_before_the_first_round() -> None:
    rng = np.random.default_rng(0)
    data = fedstill.from_arrays(rng.random((40, 3, 8, 8), dtype=np.float32), rng.integers(0, 2, 40))
    with pytest.raises(SettingError, match=r"on 3 channels that is no nn\.Conv2d layer"):
        fedstill.run("fedavg", data=data, model=Functional(), clients=2, rounds=1, engine="inline")


def test_a_transposed_one_is_refused() -> None:
    layer = nn.ConvTranspose2d(5, 3, 1, 2)
    with Refusing(), pytest.raises(SettingError, match="1x1 transposed convolution"):
        layer(torch.randn(1, 5, 4, 4))


_TRAIN = """
import torch
from fedstill.core.weights import FlatNet
from fedstill.models import build
from fedstill.models.slim import slimmed
torch.set_num_threads(1)
for width, share in ((2, 1.0), (4, 1.0), (7, 1.0), (8, 0.5), (16, 0.25)):
    net = build("resnet8", (3, 16, 16), 10, width=width, norm="batch").to(memory_format=torch.channels_last)
    FlatNet(net)
    x = torch.randn(4, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    for dtype in (None, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype is not None), slimmed(net, share):
            net(x).float().square().sum().backward()
print("sound")
"""


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_narrow_networks_train_without_damage_under_heap_checks(kernel_sweep: ModuleType, isa: str) -> None:
    checks = {"LD_PRELOAD": kernel_sweep.CHECKS, "MALLOC_CHECK_": "3", "ONEDNN_MAX_CPU_ISA": isa}
    child = subprocess.run(
        [sys.executable, "-c", _TRAIN], env=os.environ | checks, capture_output=True, text=True, check=False
    )
    assert child.stdout == "sound\n", f"exit code {child.returncode}: {child.stderr}"


@pytest.mark.slow
def test_the_sweep_sees_damage_where_there_is_some_and_none_where_there_is_none(kernel_sweep: ModuleType) -> None:
    narrow, wide, slow = (
        kernel_sweep.Case(channels, 16, kernel, 2, 1, 32, "channels_last", "float32")
        for channels, kernel in ((4, 1), (8, 1), (4, 3))
    )
    assert not kernel_sweep.sweep([wide, slow], "AVX2")
    if _can_avx2():
        assert list(kernel_sweep.sweep([slow, narrow, wide], "AVX2")) == [narrow]


def _can_avx2() -> bool:
    cpu = Path("/proc/cpuinfo")
    return cpu.is_file() and " avx2 " in cpu.read_text()
