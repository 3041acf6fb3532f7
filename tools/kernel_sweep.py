"""Look for convolutions whose PyTorch kernels write outside their memory, on this processor and older ones.

    python tools/kernel_sweep.py                    # every instruction set that this processor can pretend
    python tools/kernel_sweep.py --isa AVX2 --channels 8

Each convolution goes forward and backward in a process of its own under glibc's heap checks, which end it where memory
was damaged. The table counts, for each instruction set, what was tried and what died.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

ISAS = ("SSE41", "AVX", "AVX2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16")
CHECKS = "libc_malloc_debug.so.0"  # glibc's, since 2.34
_TRIES = 12  # of each case
_TOGETHER = 30  # cases in one process, as long as none dies


@dataclass(frozen=True)
class Case:
    """One convolution; `groups` 0 stands for depthwise."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    groups: int
    size: int
    layout: str  # channels_last or contiguous
    dtype: str  # float32 or bfloat16
    transposed: bool = False
    shape: str = "square"  # or row and column (1 pixel wide), line (1-D) and cube (3-D)

    @property
    def dims(self) -> int:
        return {"line": 1, "cube": 3}.get(self.shape, 2)

    def sides(self, across: int, along: int) -> tuple[int, ...]:
        """One number for each side: `across` for those of a row or column that are 1 pixel wide."""
        return {"row": (across, along), "column": (along, across)}.get(self.shape, (along,) * self.dims)

    def __str__(self) -> str:
        kind = "transposed " if self.transposed else ""
        groups = {0: ", depthwise", 1: ""}.get(self.groups, f", {self.groups} groups")
        return (
            f"{kind}{self.kernel}x{self.kernel}, stride {self.stride}, {self.inputs} to {self.outputs} channels{groups}"
            f", {self.shape} of {self.size}, {self.layout}, {self.dtype}"
        )


def cases(channels: int) -> Iterator[Case]:
    """All convolutions to try, with 1 to so many input channels."""
    sizes, layouts, dtypes = (8, 15, 32), ("channels_last", "contiguous"), ("float32", "bfloat16")
    for inputs, kernel, stride in product(range(1, channels + 1), (1, 2, 3, 5), (1, 2, 3)):
        for size, layout, dtype in product(sizes, layouts, dtypes):
            geometry = {"kernel": kernel, "stride": stride, "size": size, "layout": layout, "dtype": dtype}
            for outputs in (1, 7, 16):
                yield Case(inputs, outputs, groups=1, **geometry)
            yield Case(inputs, inputs, groups=0, **geometry)
            if inputs % 2 == 0:
                yield Case(inputs, 2 * inputs, groups=2, **geometry)
            if size < 32:
                yield Case(inputs, 7, groups=1, transposed=True, **geometry)
    shapes = {"square": (64, 224), "row": (512, 1020), "column": (512, 1020), "line": (64, 512, 1020), "cube": (12,)}
    for few, (shape, some), layout, stride in product(range(1, min(channels, 17) + 1), shapes.items(), layouts, (2, 3)):
        for size in some:
            long = {"kernel": 1, "stride": stride, "groups": 1, "size": size, "layout": layout, "shape": shape}
            yield Case(few, 16, dtype="float32", **long)
            yield Case(16, few, dtype="float32", transposed=True, **long)


def convolve(case: Case) -> None:
    """Forward and backward, as a network trains."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    kind = getattr(nn, f"Conv{'Transpose' * case.transposed}{case.dims}d")
    stride = case.sides(1, case.stride)
    even = {"output_padding": tuple(step - 1 for step in stride)} if case.transposed else {}
    groups = case.groups or case.inputs
    layer = kind(case.inputs, case.outputs, case.kernel, stride, case.kernel // 2, groups=groups, **even)
    sides = case.sides(1, case.size)
    if case.layout == "channels_last":  # of a single channel, `contiguous` would leave the strides as they are
        x = torch.randn(3, *sides, case.inputs).movedim(-1, 1)
        if case.dims == 2:
            layer.to(memory_format=torch.channels_last)
    else:
        x = torch.randn(3, case.inputs, *sides)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "bfloat16"):
        y = layer(x)
    y.float().square().sum().backward()


def _child(todo: Sequence[Case], threads: int) -> None:
    """Try the cases in forks of this process: many in one, and each in its own where that one died."""
    import torch

    torch.set_num_threads(threads)
    for start in range(0, len(todo), _TOGETHER):
        some = todo[start : start + _TOGETHER]
        results = [_fork(some)] * len(some)
        if results[0] != "0":
            results = [_fork([case]) for case in some]
        print(*results, flush=True)


def _fork(some: Sequence[Case]) -> str:
    fork = os.fork()
    if not fork:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what glibc says of the damage
        for case in some:
            between: list[bytearray] = []
            for attempt in range(_TRIES):  # whether damage is seen depends on what lies behind, so that is varied
                convolve(case)
                between.extend(bytearray(size) for size in range(64 * attempt, 4096, 512))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    return signal.Signals(-code).name if code < 0 else str(code)


def sweep(todo: Sequence[Case], isa: str, threads: int = 1) -> dict[Case, str]:
    """The cases that died under this instruction set, and by which signal."""
    # With fewer or more kernels kept, other things lie behind, and damage is not seen.
    bare = {name: value for name, value in os.environ.items() if name != "ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
    child = subprocess.run(
        [sys.executable, __file__, "--child", "--threads", str(threads)],
        input=json.dumps([asdict(case) for case in todo]),
        env=bare | {"LD_PRELOAD": CHECKS, "MALLOC_CHECK_": "3", "ONEDNN_MAX_CPU_ISA": isa},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {case: how for case, how in zip(todo, child.stdout.split(), strict=True) if how != "0"}


def heap_checks() -> bool:
    """Whether this system has glibc's heap checks, without which damage goes unseen."""
    try:
        ctypes.CDLL(CHECKS)
    except OSError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", nargs="*", default=ISAS, help="instruction sets, as oneDNN calls them")
    parser.add_argument("--channels", type=int, default=33, help="most input channels")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of a kernel, which may share an image (3 images)"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        _child([Case(**fields) for fields in json.load(sys.stdin)], given.threads)
        return
    if not heap_checks():
        raise SystemExit(f"{CHECKS} is not on this system: damage to memory would go unseen")
    todo = list(cases(given.channels))
    for isa in given.isa:
        died = sweep(todo, isa, given.threads)
        print(f"{isa}: {len(died)} of {len(todo)} convolutions wrote outside their memory", flush=True)
        for case, how in died.items():
            print(f"    {case}: {how}")
        print(*(f"    {count:4} of {kind}" for kind, count in Counter(map(_kind, died)).items()), sep="\n", flush=True)


def _kind(case: Case) -> str:
    return str(Case(**(asdict(case) | {"inputs": 0, "outputs": 0, "size": 0})))


if __name__ == "__main__":
    main()
