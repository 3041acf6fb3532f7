"""Methods that show what an engine does, and runs of them in processes of their own."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fedstill
from fedstill.core.tree import Message
from fedstill.methods.base import Server
from fedstill.running.directory import RunDirectory
from fedstill.train.loop import Objective
from support.runs import SMALL

TIMED = ("seconds", "eval_seconds", "client_seconds", "server_seconds")


@dataclass(frozen=True)
class Remembering(fedstill.FedAvg):
    """A method with state on both sides: clients are pulled to the mean of their own past weights."""

    def objective(self, client: fedstill.Client) -> Objective:
        past = client.state.get("past", client.down["model"])[: client.flat.trainable]
        return Objective(gradient=lambda w: 0.1 * (w - past))

    def uplink(self, client: fedstill.Client) -> Message:
        client.state["past"] = client.weights
        client.state["rounds"] = [*client.state.get("rounds", []), client.round]
        return super().uplink(client)

    def aggregate(self, server: Server, uplinks: Iterator[fedstill.Uplink]) -> None:
        before = server.model
        super().aggregate(server, uplinks)
        server.state["drift"] = server.state.get("drift", torch.zeros_like(before)) + server.model - before


@dataclass(frozen=True)
class Suicidal(fedstill.FedAvg):
    """A client whose first attempt in round 2 ends its worker, as a kernel or the system may."""

    flag: str = ""
    always: bool = False
    by: int = signal.SIGKILL

    def uplink(self, client: fedstill.Client) -> Message:
        if client.round == 2 and client.id == 3 and (self.always or not Path(self.flag).exists()):
            Path(self.flag).touch()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            faulthandler.disable()  # pytest's own
            os.kill(os.getpid(), self.by)
        return super().uplink(client)


METHOD_FILE = (
    "from __future__ import annotations\n"
    "from support.engines import Remembering as _Remembering\n"
    "class Remembering(_Remembering): pass\n"
)


def command(tmp: Path, out: Path, **settings: Any) -> list[str]:
    """A `fedstill run` of a method with state on both sides, in two processes."""
    (tmp / "mine.py").write_text(METHOD_FILE)
    merged = SMALL | {"engine": "process", "workers": 2, "rounds": 9, "fraction": 0.5} | settings
    assignments = [word for key, value in merged.items() for word in ("--set", f"{key}={value}")]
    run = [sys.executable, "-m", "fedstill", "run", f"{tmp}/mine.py:Remembering", "--out", str(out)]
    return [*run, *assignments]


def environment() -> dict[str, str]:
    """With these tests to import from, beside what this process has."""
    path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def lines(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMED} for row in rows]


def rounds_written(path: Path) -> int:
    metrics = path / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def all_client_states(path: Path) -> dict[int, dict[str, Any]]:
    store = RunDirectory(path).client_store
    states = {k: store.read(k, before=10**9) for k in range(SMALL["clients"])}
    return {k: state for k, state in states.items() if state}
