"""Processes of Python that have PyTorch and Flower already: tests start a hundred, and importing takes a second each.

They are forks of one process that has imported and done nothing else, so each begins as a new interpreter would.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path

from fedstill.core.processes import die_with_parent

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["fedstill.cli.network", "fedstill.flower.link", "fedstill.flower.node", "fedstill.inference.predictor"]
)


class Process:
    """A process as subprocess.Popen would give it."""

    def __init__(self, words: tuple[str, ...], cwd: Path, log: Path) -> None:
        self._process = _CONTEXT.Process(target=_run, args=(words, cwd, log, dict(os.environ)))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, f"still running after {timeout} s"
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)


def start_python(*words: str | Path, cwd: Path, log: Path) -> Process:
    """`python …` (a script, or -m and a module, and arguments) in a process group of its own; its words go to a file.

    As with `guards.start`, it dies with the tests and can be interrupted.
    """
    log.touch()
    return Process(tuple(map(str, words)), cwd, log)


def _run(words: tuple[str, ...], cwd: Path, log: Path, environment: dict[str, str]) -> None:
    die_with_parent(os.getppid())
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it may be another now
    os.chdir(cwd)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
