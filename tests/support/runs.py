"""Runs short enough to repeat, and what is compared of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

from fedstill.running.result import Result

SMALL: dict[str, Any] = {
    "clients": 6,
    "participation": 0.5,
    "rounds": 3,
    "rounds_per_episode": 1,
    "epochs": 1,
    "batch_size": 16,
    "fraction": 0.05,
    "alpha": 0.5,
    "model": "cnn",
    "image_size": 16,
    "engine": "inline",
}


slow = partial(pytest.param, marks=pytest.mark.slow)  # a parameter that `make test-fast` leaves out


RunSmall = Callable[..., Result]


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
