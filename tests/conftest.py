"""What every test has: its own cache, one thread, the same examples, and runs short enough to repeat."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

# Before anything loads data: the tests' cache is their own, and nothing is fetched.
os.environ.setdefault("FEDSTILL_OFFLINE", "1")

import fedstill
from fedstill.running.result import Result
from support.commandline import run
from support.float64 import in_float64
from support.guards import (  # noqa: F401 - hooks
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    pytest_unconfigure,
)
from support.runs import SMALL, RunSmall
from support.text import SETTINGS

torch.set_num_threads(1)
# The same examples in every run, however slow the machine is at the moment.
hypothesis.settings.register_profile(
    "tests", derandomize=True, database=None, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")


@pytest.fixture
def run_small(tmp_path: Path) -> RunSmall:
    """A run of seconds on a part of the embedded data; settings can be overridden."""

    def start(method: Any = "fedavg", **settings: Any) -> Result:
        return fedstill.run(method, **(SMALL | settings))

    return start


@pytest.fixture
def float64() -> Iterator[None]:
    """The test computes in float64, and so does the library."""
    with in_float64():
        yield


@pytest.fixture
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of decoded data that no other test has."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FEDSTILL_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def mini() -> fedstill.Dataset:
    """The embedded texts, in few tokens."""
    return fedstill.load_dataset("glosses-mini", text=SETTINGS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three rounds of FedAvg come to when nothing goes wrong."""
    return run("fedavg", tmp_path_factory.mktemp("misuse") / "undisturbed")
