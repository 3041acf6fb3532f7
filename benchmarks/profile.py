"""Where the CPU time of a method's rounds goes: PyTorch's kernels, or Python around them."""

from __future__ import annotations

import cProfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import fedstill
from benchmarks.engine import LARGE_CLIENTS
from benchmarks.methods import CASES, SERVER_CASES, Case, with_pool
from benchmarks.work import Work
from fedstill.data.federation import Federation

WORK = replace(LARGE_CLIENTS, cohort=3, epochs=1)  # fewer of the same batches tell as much; Krum needs three
ROUNDS = 2  # the first has no teacher yet


@dataclass(frozen=True)
class Profile:
    """CPU seconds of all rounds, how many of them were outside kernels, and in which function most of these."""

    seconds: float
    outside: float
    most: str


def profiled(case: Case, work: Work, federation: Federation) -> Profile:
    """All work is done in this process. An operator such as `a + b` counts as Python, so that is an upper bound."""
    profiler = cProfile.Profile(time.process_time)
    with profiler:
        fedstill.run(
            case.method, data=federation, model=work.model, rounds=ROUNDS, participation=work.cohort / work.clients,
            batch_size=work.batch_size, epochs=work.epochs, lr=work.lr, engine="inline", eval_every=0, **case.settings,
        )  # fmt: skip
    seconds, outside = 0.0, dict[str, float]()
    for entry in profiler.getstats():
        seconds += entry.inlinetime
        if isinstance(entry.code, str):
            if "torch" not in entry.code and "Tensor" not in entry.code:
                outside[entry.code] = outside.get(entry.code, 0.0) + entry.inlinetime
        else:
            name = f"{entry.code.co_name} in {Path(entry.code.co_filename).name}"
            outside[name] = outside.get(name, 0.0) + entry.inlinetime
    return Profile(seconds, sum(outside.values()), max(outside, key=lambda name: outside[name]))


def profiles() -> Iterator[tuple[Case, Profile]]:
    torch.set_num_threads(1)
    federation = with_pool(WORK)
    for case in (Case("fedavg", {}), *CASES, *SERVER_CASES):
        yield case, profiled(case, WORK, federation)
