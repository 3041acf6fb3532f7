"""What the tests share: a small real federation, and runs short enough to repeat."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import pytest
import torch

# Before anything loads data: the tests' cache is their own, and nothing is fetched.
os.environ.setdefault("FEDSTILL_OFFLINE", "1")

from guards import (  # noqa: F401 - hooks
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    pytest_unconfigure,
)

import fedstill
from fedstill.running.api import Result

torch.set_num_threads(1)
# The same examples in every run, however slow the machine is at the moment.
hypothesis.settings.register_profile(
    "tests", derandomize=True, database=None, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")

SMALL: dict[str, Any] = {
    "clients": 6,
    "participation": 0.5,
    "rounds": 3,
    "rounds_per_episode": 1,
    "epochs": 1,
    "batch_size": 16,
    "fraction": 0.1,
    "alpha": 0.5,
    "model": "cnn",
    "image_size": 16,
    "engine": "inline",
}

slow = partial(pytest.param, marks=pytest.mark.slow)  # a parameter that `make test-fast` leaves out

RunSmall = Callable[..., Result]


@pytest.fixture
def run_small(tmp_path: Path) -> RunSmall:
    """A run of seconds on a part of the embedded data; settings can be overridden."""

    def start(method: Any = "fedavg", **settings: Any) -> Result:
        return fedstill.run(method, **(SMALL | settings))

    return start


def weights(result: Result) -> torch.Tensor:
    """All weights of a result as one vector."""
    return torch.cat([p.detach().flatten() for p in result.model.state_dict().values()])


def numbers(result: Result) -> list[dict[str, Any]]:
    """The records of a run without what depends on the clock."""
    timed = ("seconds", "eval_seconds", "client_seconds", "server_seconds")
    return [{k: v for k, v in r.items() if k not in timed} for r in result.records]


def lines_run(work: Callable[[int], object], size: int) -> int:
    """How many lines of Python `work(size)` runs: what is looped over in Python shows, whatever the machine does."""
    count, before = 0, sys.gettrace()

    def trace(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work(size)
    finally:
        sys.settrace(before)
    return count
