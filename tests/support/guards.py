"""A test run that ends whatever happens: tests that kill their process are reported, and no child outlives it."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedstill.core.processes import die_with_parent

GRACE = 5.0  # seconds that helper processes have to end by themselves when the tests are over
_crashed: list[str] = []


def start(*words: str | Path, **options: Any) -> subprocess.Popen[Any]:
    """A child in a process group of its own that dies with this process and can be interrupted.

    A child of a process that ignores SIGINT, as under nohup, would ignore it too.
    """
    return subprocess.Popen(words, start_new_session=True, preexec_fn=partial(_prepare, os.getpid()), **options)  # noqa: PLW1509


def _prepare(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(parent)


# --- hooks of pytest, for conftest.py ---


def pytest_configure(config: pytest.Config) -> None:
    """Workers die with the run; what they leave behind becomes a child of the run, which can then find it."""
    if hasattr(config, "workerinput"):
        die_with_parent(os.getppid())
    elif sys.platform == "linux":
        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    if error:
        _crashed.append(node.gateway.id)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A worker that died between two tests, or after the last, fails the run too."""
    if _crashed and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _crashed:
        terminalreporter.section("worker processes that died")
        terminalreporter.line(f"{', '.join(_crashed)}; the tests they ran, if any, are among the failures")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=GRACE)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=GRACE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait for servers come first in each part that pytest-xdist hands to a worker, then slow ones.

    So the others compute meanwhile, no worker ends with what takes long, and no file's servers are started by several.
    """
    parts: list[list[pytest.Item]] = [[] for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))]
    slow = [item for item in items if item.get_closest_marker("slow")]
    quick = [item for item in items if not item.get_closest_marker("slow")]
    files = [list(together) for _, together in groupby(slow, key=lambda item: item.path)]
    files.sort(key=lambda file: not any(item.get_closest_marker("servers") for item in file))
    for number, file in enumerate(files):
        parts[number % len(parts)].extend(file)
    size = -(-len(items) // len(parts))
    for part in parts:
        room = max(0, size - len(part))
        part.extend(quick[:room])
        del quick[:room]
    items[:] = [item for part in (*parts, quick) for item in part]


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not look through it, nor copy it in every fork."""
    gc.collect()
    gc.freeze()
