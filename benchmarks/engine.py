"""FedAvg through the public API against a bare two-process PyTorch loop over the same tensors.

The bare loop is what one would write by hand for one fixed experiment: no library, no progress, no checks of what
clients send, no checkpoint, no metrics. Same initial weights, batches of the same size, optimiser and layout.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstill
from fedstill.data.federation import Federation
from fedstill.experiment.rundir import Record
from fedstill.experiment.runner import Listener
from fedstill.models import build


@dataclass(frozen=True)
class Work:
    """A federation of equal clients with random images."""

    name: str
    model: str
    shape: tuple[int, int, int]
    clients: int
    samples: int  # a client
    cohort: int
    batch_size: int
    epochs: int
    lr: float = 0.01

    @property
    def samples_a_round(self) -> int:
        return self.cohort * self.samples * self.epochs

    def data(self) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(0)
        n = self.clients * self.samples
        x = torch.randn(n, *self.shape, generator=g).contiguous(memory_format=torch.channels_last)
        return x, torch.randint(0, 10, (n,), generator=g)

    def federation(self, x: Tensor, y: Tensor) -> Federation:
        split = fedstill.Split(x, y)
        test = fedstill.Split(x[:100], y[:100])
        dataset = fedstill.Dataset(self.name, split, test, tuple("0123456789"))
        offsets = np.arange(self.clients + 1) * self.samples
        none = np.zeros(0, np.int64)
        return Federation(dataset, np.arange(len(y)), offsets, none, np.zeros_like(offsets), none)


SMALL_CLIENTS = Work("LeNet-5, 50 samples a client, batch 10", "lenet5", (1, 32, 32), 1000, 50, 50, 10, 1)
LARGE_CLIENTS = Work("ResNet-8, 1000 samples a client, batch 64", "resnet8", (3, 32, 32), 20, 1000, 4, 64, 2)


def train_client(net: nn.Module, x: Tensor, y: Tensor, work: Work) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=work.lr, fused=True)
    for _ in range(work.epochs):
        for ids in torch.randperm(len(y)).split(work.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(net(x[ids]), y[ids]).backward()
            optimizer.step()


def serve(
    work: Work, x: Tensor, y: Tensor, pipe: Connection, shared: dict[str, Tensor], sums: dict[str, Tensor]
) -> None:
    """A bare worker: trains its clients one after the other and adds up their weights in shared memory."""
    torch.set_num_threads(1)
    net = build(work.model, work.shape, 10)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    own = net.state_dict()
    while (clients := pipe.recv()) is not None:
        for total in sums.values():
            total.zero_()
        for k in clients:
            with torch.no_grad():
                for name, p in own.items():
                    p.copy_(shared[name])
            part = slice(k * work.samples, (k + 1) * work.samples)
            net.train()
            train_client(net, x[part], y[part], work)
            with torch.no_grad():
                for name, p in own.items():
                    sums[name].add_(p, alpha=work.samples)
        pipe.send(None)


class BareLoop:
    """Two processes, weights and sums in shared memory, a fixed half of the cohort each."""

    def __init__(self, work: Work, x: Tensor, y: Tensor) -> None:
        self.work = work
        context = multiprocessing.get_context("fork")
        self.weights = {n: p.clone().share_memory_() for n, p in build(work.model, work.shape, 10).state_dict().items()}
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


class Stopwatch(Listener):
    """Wall time from the end of one round to the end of the next, checkpoint and all."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def round_done(self, record: Record) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]


def fedstill_rounds(work: Work, federation: Federation, n: int, method: str = "fedavg", **settings: Any) -> list[float]:
    watch = Stopwatch()
    fedstill.run(
        method,
        data=federation,
        model=work.model,
        rounds=n + 2,  # the first starts the workers, the last evaluates
        participation=work.cohort / work.clients,
        batch_size=work.batch_size,
        epochs=work.epochs,
        lr=work.lr,
        workers=2,
        eval_every=0,
        listener=watch,
        **settings,
    )
    return watch.seconds[:-1]


def against_bare_loop(work: Work, *, rounds: int, repeats: int) -> tuple[float, float]:
    """Samples a second of the bare loop and of fedstill, each the best of several medians taken in turn."""
    x, y = work.data()
    federation = work.federation(x, y)
    torch.set_num_threads(1)
    bare = BareLoop(work, x, y)
    bare.rounds(2)
    ours, theirs = [], []
    for _ in range(repeats):
        theirs.append(median(bare.rounds(rounds)))
        ours.append(median(fedstill_rounds(work, federation, rounds)))
    bare.close()
    return work.samples_a_round / min(theirs), work.samples_a_round / min(ours)
