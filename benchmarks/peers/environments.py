"""Peers in environments of their own, made once under `.bench/` from pinned requirements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.job import Job
from benchmarks.work import HOME

_HERE = Path(__file__).parent
_ROOT = _HERE.parent.parent


class Unavailable(Exception):
    """A peer that cannot be timed here, and why."""


@dataclass(frozen=True)
class Timing:
    """Seconds of each round but the first, and of the whole process from its start to its end."""

    rounds: list[float]
    whole: float


@dataclass(frozen=True)
class Peer:
    """Another library, and how its script is started."""

    name: str
    requirements: str  # a file beside this one, and the name of the environment
    command: tuple[str, ...]  # arguments of its Python

    def run(self, job: Job) -> Timing:
        """Do the job in a process of the peer's environment."""
        return timed([self._python(), *self.command], job, self.name)

    def _python(self) -> str:
        """The interpreter of the environment, which is made when it is missing or its requirements are others."""
        folder, file = HOME / self.requirements, _HERE / f"{self.requirements}.txt"
        python, mark = folder / "bin" / "python", folder / "installed"
        wanted = file.read_text() + (_ROOT / "constraints.txt").read_text()
        if not mark.exists() or mark.read_text() != wanted:
            install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], [*install, "-r", str(file)]):
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise Unavailable(f"{self.name}: could not be installed: {_reason(done)}")
            mark.write_text(wanted)
        return str(python)


_TWICE = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "benchmarks.peers.pfl_rounds")
PFL = Peer("pfl 0.6", "pfl", (*_TWICE, "plain"))
PFL_BY_HAND = Peer("pfl 0.6, channels last by hand", "pfl", (*_TWICE, "channels-last"))
FLOWER = Peer("Flower 1.41", "flower", ("-m", "benchmarks.peers.flower_rounds", "message"))
# Not advised any more, but faster: whoever still uses it should know the difference to that.
FLOWER_START = Peer("Flower 1.41, start_simulation", "flower", ("-m", "benchmarks.peers.flower_rounds", "start"))
PEERS = (PFL, PFL_BY_HAND, FLOWER, FLOWER_START)


def timed(command: Sequence[str], job: Job, name: str) -> Timing:
    """Do a job in a process of its own, which says on its last line how long its rounds took."""
    paths = {"PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}", "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    done = subprocess.run(
        [*command, job.to_json()], capture_output=True, text=True, check=False, env=os.environ | paths, cwd=_ROOT
    )
    whole = time.perf_counter() - began
    if done.returncode or not done.stdout.strip():
        raise Unavailable(f"{name}: does not run: {_reason(done)}")
    return Timing(json.loads(done.stdout.splitlines()[-1]), whole)


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """The line that says what went wrong: the last one that names an error, or else the last."""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] or line.startswith("ERROR")]
    return (errors or lines or [f"exit code {done.returncode}"])[-1]
