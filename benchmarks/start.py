"""How long one waits: for help, for data to be dealt out, for the first round, for a large run to go on."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedstill
from benchmarks.engine import Stopwatch
from fedstill.data.federation import Federation
from fedstill.data.partition import partition
from fedstill.running.callbacks import RunView
from fedstill.running.directory import RunDirectory

STATES = 10_000
PARTITIONS = ("iid", "dirichlet", "quantity", "dir_fedkf", "dir_client_prior")


def help_seconds(repeats: int = 7) -> float:
    """`fedstill --help`, the whole process."""
    return min(_seconds("--help") for _ in range(repeats))


def partition_seconds(name: str, clients: int = 1_000_000) -> float:
    """To deal one sample to each of so many clients."""
    labels, rng = np.arange(clients) % 10, np.random.default_rng(0)
    began = time.perf_counter()
    partition(name, labels, clients, rng)
    return time.perf_counter() - began


def federate_seconds(local_test: str, clients: int = 1_000_000) -> float:
    """To give so many clients data for training and testing."""
    x, y = torch.zeros(2 * clients, 1), torch.arange(2 * clients) % 10
    data = fedstill.Dataset("numbers", fedstill.Split(x, y), fedstill.Split(x, y), tuple("0123456789"))
    began = time.perf_counter()
    fedstill.federate(data, clients=clients, partition="iid", test_fraction=0.5, local_test=local_test)
    return time.perf_counter() - began


def refusal_seconds() -> float:
    """Until a partition that no draw fits is refused."""
    labels, rng = np.repeat(np.arange(10), 5_000), np.random.default_rng(0)
    began = time.perf_counter()
    with suppress(fedstill.DataError):
        partition("dir_balanced", labels, 20, rng, alpha=1e-6)
    return time.perf_counter() - began


def first_round_seconds(repeats: int = 3) -> float:
    """From the command to the end of the demo's first round, with the data decoded before."""
    settings = ["fedavg", "--clients", "20", "--alpha", "0.1", "--rounds", "1"]
    with tempfile.TemporaryDirectory() as folder:
        taken = [_seconds("run", *settings, "--out", f"{folder}/{i}") for i in range(repeats + 1)]
    return min(taken[1:])


def resume_seconds(states: int = STATES, repeats: int = 3) -> tuple[float, float]:
    """To go on with a SCAFFOLD run of which so many clients have state: the wait before its next round, and that round.

    Measured with a small network; restoring reads no client's state but only finds it.
    """
    torch.set_num_threads(1)
    data = _federation(states)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "model": "mlp",
            "model_options": {"hidden": [8]},
            "epochs": 1,
            "workers": 2,
            "eval_every": 0,
        }
        path = Path(folder) / "run"
        fedstill.run("scaffold", data=data, participation=1.0, rounds=1, out=path, **settings)
        found = sum(1 for _ in RunDirectory.open(path, lock=False).client_store.root.rglob("*.safetensors"))
        assert found == states, f"{found} clients have state, not {states}"
        waits = []
        for again in range(repeats):
            began, watch = time.perf_counter(), _Started()
            fedstill.resume(path, data=data, rounds=2 + again, callbacks=[watch])
            waits.append((watch.began - began, watch.ends[0] - watch.began))
    return min(wait for wait, _ in waits), min(round_ for _, round_ in waits)


class _Started(Stopwatch):
    began = 0.0

    def on_round_start(self, run: RunView, round_: int, clients: int) -> None:
        self.began = self.began or time.perf_counter()


def _federation(clients: int) -> Federation:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(clients, 16, generator=g), torch.randint(0, 2, (clients,), generator=g)
    dataset = fedstill.Dataset("random", fedstill.Split(x, y), fedstill.Split(x[:10], y[:10]), ("no", "yes"))
    none, offsets = np.zeros(0, np.int64), np.arange(clients + 1)
    return Federation(dataset, np.arange(clients), offsets, none, np.zeros_like(offsets), none)


def _seconds(*words: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "fedstill", *words], check=True, capture_output=True)
    return time.perf_counter() - began
