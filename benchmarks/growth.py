"""What a round and the memory cost as clients become many, while as many as before are active."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

import fedstill
from benchmarks.engine import Stopwatch
from fedstill.data.federation import Federation

CLIENTS = (100, 1_000, 10_000, 100_000, 1_000_000)
METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fedavg", {}),
    ("fedavg+t1", {}),
    ("fedkf", {"width": 8, "z_dim": 16}),
    ("scaffold", {}),
)
ACTIVE, SAMPLES = 50, 10  # clients a round, and samples of each
_DISTINCT = 5_000  # images that there are; clients share them, so that only what grows with clients grows


def federation(clients: int) -> Federation:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(_DISTINCT, 1, 32, 32, generator=g).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (_DISTINCT,), generator=g)
    dataset = fedstill.Dataset("random", fedstill.Split(x, y), fedstill.Split(x[:100], y[:100]), tuple("0123456789"))
    index = np.random.default_rng(0).integers(0, _DISTINCT, clients * SAMPLES, dtype=np.int64)
    offsets = np.arange(clients + 1) * SAMPLES
    none = np.zeros(0, np.int64)
    return Federation(dataset, index, offsets, none, np.zeros_like(offsets), none)


def cell(method: str, settings: dict[str, Any], clients: int, rounds: int, weighed: bool) -> dict[str, float]:
    """Seconds a round, or MB at the peak of all processes: the whole, and without the arrays of the data partition."""
    torch.set_num_threads(1)
    data = federation(clients)
    arrays = sum(a.nbytes for a in (data.train_index, data.train_offsets, data.test_offsets)) / 1e6
    watch, peak = Stopwatch(), Peak()
    with peak if weighed else nullcontext():
        fedstill.run(
            method, data=data, model="lenet5", rounds=rounds + 2, participation=ACTIVE / clients, batch_size=10,
            epochs=1, lr=0.01, workers=2, eval_every=0, callbacks=[watch], **settings,
        )  # fmt: skip
    if weighed:
        return {"megabytes": peak.megabytes - arrays, "whole": peak.megabytes}
    return {"seconds": median(watch.seconds[:-1])}


class Peak:
    """The most memory that this process and its children had at once, counting shared pages once (PSS)."""

    def __enter__(self) -> Peak:
        self.megabytes, self._over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        own = psutil.Process()
        while not self._over.wait(0.1):
            self.megabytes = max(self.megabytes, sum(map(_proportional, [own, *own.children(recursive=True)])))


def _proportional(process: psutil.Process) -> float:
    with suppress(psutil.Error):  # it has ended
        return float(process.memory_full_info().pss) / 1e6
    return 0.0


def grown(method: str, settings: dict[str, Any], clients: int, rounds: int, repeats: int) -> dict[str, float]:
    """Both: the least of several, each in a process of its own, so that nothing is left over from another."""
    least: dict[str, float] = {}
    for weighed in [True] + [False] * repeats:  # apart, since to look at memory takes time
        arguments = json.dumps([method, settings, clients, rounds, weighed])
        command = [sys.executable, "-m", "benchmarks.growth", arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        for key, value in json.loads(done.stdout.splitlines()[-1]).items():
            least[key] = min(value, least.get(key, value))
    return least


if __name__ == "__main__":
    print(json.dumps(cell(*json.loads(sys.argv[1]))))
