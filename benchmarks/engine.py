"""FedAvg through the public API against a bare two-process PyTorch loop over the same tensors, and against peers.

The bare loop is what one would write by hand for one fixed experiment: no library, no progress, no checks of what
clients send, no checkpoint, no metrics. Same initial weights, batches of the same size, optimiser and layout.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

import fedstill
from benchmarks.peers.environments import PEERS, Peer, Unavailable, timed
from benchmarks.peers.job import Job
from benchmarks.work import Work
from fedstill.data.federation import Federation
from fedstill.metrics.records import RoundRecord
from fedstill.running.callbacks import Callback, RunView

T = TypeVar("T")
SMALL_CLIENTS = Work("small CNN, 50 samples a client, batch 10", "cnn", (3, 32, 32), 1000, 50, 50, 10, 1)
LARGE_CLIENTS = Work("ResNet-8, 1000 samples a client, batch 64", "resnet8", (3, 32, 32), 20, 1000, 4, 64, 2)


def serve(
    work: Work, x: Tensor, y: Tensor, pipe: Connection, shared: dict[str, Tensor], sums: dict[str, Tensor]
) -> None:
    """A bare worker: trains its clients one after the other and adds up their weights in shared memory."""
    torch.set_num_threads(1)
    net = work.network()
    own = net.state_dict()
    while (clients := pipe.recv()) is not None:
        for total in sums.values():
            total.zero_()
        for k in clients:
            with torch.no_grad():
                for name, p in own.items():
                    p.copy_(shared[name])
            net.train()
            work.train_client(net, x[work.samples_of(k)], y[work.samples_of(k)])
            with torch.no_grad():
                for name, p in own.items():
                    sums[name].add_(p, alpha=work.samples)
        pipe.send(None)


class BareLoop:
    """Two processes, weights and sums in shared memory, a fixed half of the cohort each."""

    def __init__(self, work: Work, x: Tensor, y: Tensor) -> None:
        self.work = work
        context = multiprocessing.get_context("fork")
        self.weights = {n: p.clone().share_memory_() for n, p in work.network().state_dict().items()}
        self.sums: list[dict[str, Tensor]] = []
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for _ in range(2):
            sums = {n: torch.zeros_like(p).share_memory_() for n, p in self.weights.items()}
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(work, x, y, theirs, self.weights, sums), daemon=True)
            process.start()
            self.sums.append(sums)
            self.pipes.append(ours)
            self.processes.append(process)

    def round(self, rng: np.random.Generator) -> None:
        cohort = rng.choice(self.work.clients, self.work.cohort, replace=False).tolist()
        for i, pipe in enumerate(self.pipes):
            pipe.send(cohort[i::2])
        for pipe in self.pipes:
            pipe.recv()
        for name, p in self.weights.items():
            p.copy_((self.sums[0][name] + self.sums[1][name]) / (self.work.cohort * self.work.samples))

    def rounds(self, n: int) -> list[float]:
        rng, seconds = np.random.default_rng(0), []
        for _ in range(n):
            began = time.perf_counter()
            self.round(rng)
            seconds.append(time.perf_counter() - began)
        return seconds

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()


class Stopwatch(Callback):
    """Wall time from the end of one round to the end of the next, checkpoint and all."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]


def fedstill_rounds(work: Work, federation: Federation, n: int, method: str = "fedavg", **settings: Any) -> list[float]:
    watch = Stopwatch()
    # The first round starts the workers, the last evaluates.
    run(work, federation, n + 2, method, callbacks=[watch], **settings)
    return watch.seconds[:-1]


def run(
    work: Work, federation: Federation, rounds: int, method: str = "fedavg", *, model: Any = None, **settings: Any
) -> fedstill.Result:
    return fedstill.run(
        method,
        data=federation,
        model=model or work.model,
        rounds=rounds,
        participation=work.cohort / work.clients,
        batch_size=work.batch_size,
        epochs=work.epochs,
        lr=work.lr,
        eval_every=0,
        **{"workers": 2, **settings},
    )


def against_peers(
    work: Work,
    *,
    rounds: int,
    repeats: int,
    peers: Sequence[Peer] = PEERS,
    unavailable: Callable[[str], None] = print,
) -> dict[str, list[float]]:
    """Seconds of a round of the bare loop, of fedstill and of each peer: a median in each of several turns.

    The first round of each counts for nobody: it is the one that starts processes.
    """
    x, y = work.stored()
    x.sum()  # reads it all, so that nobody waits for the disk
    federation = work.federation(x, y)
    torch.set_num_threads(1)
    bare = BareLoop(work, x, y)
    bare.rounds(2)
    runners: dict[str, Callable[[], list[float]]] = {
        "bare loop": lambda: bare.rounds(rounds),
        "fedstill": lambda: fedstill_rounds(work, federation, rounds),
    }
    for peer in peers:
        runners[peer.name] = lambda peer=peer: peer.run(Job(work, rounds + 1)).rounds  # type: ignore[misc]
    taken = in_turn(runners, repeats, median, unavailable)
    bare.close()
    return taken


def with_start_up(
    work: Work,
    *,
    rounds: int = 20,
    repeats: int,
    peers: Sequence[Peer],
    unavailable: Callable[[str], None] = print,
) -> dict[str, list[float]]:
    """Seconds of whole runs, each in a new process, from its start to its end, in each of several turns."""
    x, _ = work.stored()
    x.sum()
    job = Job(work, rounds)
    runners: dict[str, Callable[[], float]] = {
        "fedstill": lambda: timed([sys.executable, "-m", "benchmarks.engine"], job, "fedstill").whole
    }
    for peer in peers:
        runners[peer.name] = lambda peer=peer: peer.run(job).whole  # type: ignore[misc]
    return in_turn(runners, repeats, float, unavailable)


def in_turn(
    runners: dict[str, Callable[[], T]], repeats: int, seconds: Callable[[T], float], unavailable: Callable[[str], None]
) -> dict[str, list[float]]:
    """The seconds of each runner in several turns, infinite where it failed; one that fails at once is left out."""
    taken: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, run_ in list(runners.items()):
            try:
                spent = seconds(run_())
                taken.setdefault(name, []).append(spent)
            except Unavailable as reason:
                unavailable(str(reason))
                if name in taken:
                    taken[name].append(math.inf)
                else:
                    del runners[name]
    return taken


def without_order(work: Work) -> list[Work]:
    """Small variants in which the order of clients and samples does not matter, so that all who do the same work come
    to the same weights but for rounding: one batch, and several batches of samples that are alike.
    """
    small = replace(work, clients=4, cohort=4, samples=32, batch_size=32, epochs=2)
    return [small, replace(small, samples=10, batch_size=4, alike=True)]


def differences(
    work: Work, *, peers: Sequence[Peer] = PEERS, unavailable: Callable[[str], None] = print
) -> tuple[float, dict[str, float]]:
    """How far two rounds move a weight at most, and how far others then are from fedstill's weights at most."""
    rounds = 2
    x, y = work.stored()
    first = work.network()
    torch.set_num_threads(1)
    ours = run(work, work.federation(x, y), rounds, model=first).model.state_dict()
    bare = BareLoop(work, x, y)
    bare.rounds(rounds)
    bare.close()
    found = {"bare loop": bare.weights}
    with tempfile.TemporaryDirectory() as folder:
        for peer in peers:
            path = Path(folder) / f"{len(found)}.pt"
            try:
                peer.run(Job(work, rounds, str(path)))
                found[peer.name] = torch.load(path, weights_only=True)
            except Unavailable as reason:
                unavailable(str(reason))
    return _apart(ours, first.state_dict()), {name: _apart(ours, weights) for name, weights in found.items()}


def _apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    if a.keys() != b.keys():
        raise ValueError(f"not the same weights: {sorted(a.keys() ^ b.keys())}")
    return float(torch.stack([(a[name] - b[name]).abs().max() for name in a]).max())  # NaN, if there is one


def main() -> None:
    """A job as peers get it, done by fedstill."""
    job, watch = Job.from_json(sys.argv[1]), Stopwatch()
    result = run(job.work, job.work.federation(*job.work.stored()), job.rounds, callbacks=[watch])
    job.answer(watch.ends, result.model.state_dict())


if __name__ == "__main__":
    main()
