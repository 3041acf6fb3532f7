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

import pytest
import torch
from torch import nn

from fedstill.core.kernels import block, conv2d, protect
from fedstill.core.weights import FlatNet
from support import narrow_networks

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


@pytest.mark.parametrize(
    ("has", "newest", "expected"),
    [
        ({"avx2", "avx512_f"}, None, 16),
        ({"avx2", "avx512_f"}, "AVX512_CORE", 16),
        ({"avx2", "avx512_f"}, "avx2", 8),
        ({"avx2", "avx512_f"}, "AVX", 0),
        ({"avx2"}, None, 8),
        ({"neon"}, None, 0),
    ],
)
def test_as_many_channels_are_guarded_as_the_kernels_of_the_processor_take_together(
    has: set[str], newest: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: dict.fromkeys(has, True))
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if newest:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", newest)
    assert block() == expected


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


# A 1x1 convolution with a stride is a product with a matrix at every so many pixels: no kernel of a convolution.
_GRADIENTS = """
import sys
from itertools import product
import torch
from torch.nn import functional as F
import fedstill.core.weights
torch.set_num_threads(int(sys.argv[1]))
for dims, transposed, channels, stride, last in product((1, 2), (False, True), (1, 3, 7, 12), (2, 3), (False, True)):
    for needed in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        few, many = (channels, 5) if not transposed else (5, channels)
        sides = (72, 72) if dims == 2 else (1800,)  # more than 512 pixels are used with either stride
        x = torch.randn(3, *sides, few).movedim(-1, 1) if last else torch.randn(3, few, *sides)
        weight = torch.randn((few, many) if transposed else (many, few))
        bias = torch.randn(many)
        single = [t.clone().requires_grad_(on) for t, on in zip((x, weight, bias), needed)]
        double = [t.double().requires_grad_(on) for t, on in zip((x, weight, bias), needed)]
        name = "conv_transpose" if transposed else "conv"
        even = {"output_padding": stride - 1} if transposed else {}
        ours = getattr(F, f"{name}{dims}d")(
            single[0], single[1].reshape(*weight.shape, *[1] * dims), single[2], stride, **even
        )
        counts = (..., *[slice(None, None, stride)] * dims)
        if transposed:
            theirs = torch.zeros(ours.shape, dtype=torch.float64)
            theirs[counts] = torch.einsum("bi...,io->bo...", double[0], double[1])
        else:
            theirs = torch.einsum("bi...,oi->bo...", double[0][counts], double[1])
        theirs = theirs + double[2].reshape(-1, *[1] * dims)
        toward = torch.randn(ours.shape)
        (ours * toward).sum().backward()
        (theirs * toward).sum().backward()
        for a, b, on in zip(single, double, needed):
            assert not on or torch.allclose(a.grad.double(), b.grad, rtol=1e-3, atol=1e-2)
print("sound")
"""


def under_heap_checks(kernel_sweep: ModuleType, isa: str, *words: str | Path) -> None:
    """Run Python on this: damage to memory ends it before it says "sound"."""
    checks = {"LD_PRELOAD": kernel_sweep.CHECKS, "MALLOC_CHECK_": "3", "ONEDNN_MAX_CPU_ISA": isa}
    checks |= {"OMP_WAIT_POLICY": "passive"}  # threads that wait leave their core to other tests
    child = subprocess.run(
        [sys.executable, *words], env=os.environ | checks, capture_output=True, text=True, check=False
    )
    assert child.stdout.endswith("sound\n"), f"exit code {child.returncode} after {child.stdout}: {child.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_narrow_networks_train_without_damage_under_heap_checks(kernel_sweep: ModuleType, isa: str) -> None:
    under_heap_checks(kernel_sweep, isa, "-c", _TRAIN)


@pytest.mark.slow
@pytest.mark.parametrize(("isa", "threads"), [("AVX2", "1"), ("AVX512_CORE", "1"), ("AVX512_CORE", "2")])
def test_every_narrow_convolution_has_the_gradients_of_a_product_of_matrices(
    kernel_sweep: ModuleType, isa: str, threads: str
) -> None:
    under_heap_checks(kernel_sweep, isa, "-c", _GRADIENTS, threads)


@pytest.mark.slow
def test_no_users_network_damages_memory_however_it_is_written(kernel_sweep: ModuleType) -> None:
    under_heap_checks(kernel_sweep, "AVX2", narrow_networks.__file__, *narrow_networks.NETWORKS)


@pytest.mark.slow
def test_the_sweep_sees_damage_where_there_is_some_and_none_where_there_is_none(kernel_sweep: ModuleType) -> None:
    narrow, wide, slow = (
        kernel_sweep.Case(channels, 16, kernel, 2, 1, 32, "channels_last", "float32")
        for channels, kernel in ((4, 1), (8, 1), (4, 3))
    )
    line, cube = (
        kernel_sweep.Case(1, 16, 1, 2, 1, size, "channels_last", "float32", shape=shape)
        for shape, size in (("line", 1020), ("cube", 12))
    )
    assert not kernel_sweep.sweep([wide, slow], "AVX2")
    if _can_avx2():
        assert list(kernel_sweep.sweep([slow, narrow, cube, wide, line], "AVX2")) == [narrow, line]


def _can_avx2() -> bool:
    cpu = Path("/proc/cpuinfo")
    return cpu.is_file() and " avx2 " in cpu.read_text()
