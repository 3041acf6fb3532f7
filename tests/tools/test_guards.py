"""The test run itself: tests that kill their process or hang are reported, the rest is run, nothing is left behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from support.guards import start

ROOT = Path(__file__).parents[2]
HOOKS = "pytest_configure, pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown, pytest_unconfigure"
DEADLY = """
import os, signal, subprocess, sys, time
from pathlib import Path
import pytest

@pytest.mark.parametrize("i", range(4))
def test_before(i): ...

def test_killed():
    # In a session of its own, as a daemon: neither the end of its parent nor that of its process group reaches it.
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(__file__).with_name("child").write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)

def test_aborted(): os.abort()

def test_endless(): time.sleep(1000)

@pytest.mark.parametrize("i", range(4))
def test_after(i): ...
"""
LATE = """
import os, pytest

@pytest.fixture(scope="session", autouse=True)
def deadly():
    yield
    os._exit(0)

def test_fine(): ...
"""


def parallel() -> list[str]:
    """How `make test` spreads tests over processes."""
    found = re.search(r"^PARALLEL := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert found
    return shlex.split(found[1])


@dataclass(frozen=True)
class Ended:
    code: int
    out: str


def run(folder: Path, tests: str) -> Ended:
    """These tests with the project's own options and hooks, but less patience."""
    (folder / "conftest.py").write_text(f"from support.guards import {HOOKS}\n")
    (folder / "test_them.py").write_text(tests)
    words: list[str | Path] = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        ROOT / "pyproject.toml",
        "--rootdir",
        folder,
        *parallel(),
    ]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    ended = subprocess.run(
        [*words, "-p", "no:cacheprovider", "-o", "faulthandler_timeout=3", "."], check=False, cwd=folder,
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    return Ended(ended.returncode, ended.stdout + ended.stderr)


@pytest.mark.slow
@pytest.mark.servers
def test_tests_that_kill_their_process_or_hang_are_named_and_the_others_run(tmp_path: Path) -> None:
    ended = run(tmp_path, DEADLY)
    assert ended.code == pytest.ExitCode.TESTS_FAILED
    assert "3 failed, 8 passed" in ended.out
    for name in ("killed", "aborted", "endless"):
        assert re.search(rf"worker 'gw\d+' crashed while running '.*test_{name}'", ended.out), ended.out
    assert "Timeout (0:00:03)!" in ended.out, "and where the last one hung"
    assert re.search(r"line \d+ in test_endless", ended.out)
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))


@pytest.mark.slow
@pytest.mark.servers
def test_a_worker_that_dies_after_its_last_test_fails_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, LATE).code == pytest.ExitCode.TESTS_FAILED


@pytest.mark.slow
@pytest.mark.servers
def test_workers_that_die_before_any_test_end_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path, "import os\nos.abort()\n")
    assert ended.code != pytest.ExitCode.OK
    assert "worker processes that died" in ended.out


def test_a_child_can_be_interrupted_whatever_its_parent_ignores() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = start("sleep", "1000")
    finally:
        signal.signal(signal.SIGINT, before)
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == -signal.SIGINT


def test_a_child_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import time; from support.guards import start; print(start('sleep', '999').pid, flush=True); time.sleep(999)"
    )
    with start(sys.executable, "-c", code, stdout=subprocess.PIPE, cwd=ROOT / "tests") as parent:
        child = psutil.Process(int(parent.stdout.readline()))  # type: ignore[union-attr]
        parent.kill()
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
