"""What is trained in a benchmark. It needs PyTorch alone, so that peers in environments of their own have it too."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstill.models import build

if TYPE_CHECKING:
    from fedstill.data.federation import Federation

HOME = Path(__file__).parent.parent / ".bench"  # environments of peers, and data


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
    alike: bool = False  # a client's samples are all the same one, so that their order does not matter

    @property
    def batches(self) -> int:
        """Of an epoch."""
        return -(-self.samples // self.batch_size)

    @property
    def samples_a_round(self) -> int:
        return self.cohort * self.samples * self.epochs

    def data(self) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(0)
        distinct, times = (self.clients, self.samples) if self.alike else (self.clients * self.samples, 1)
        x = torch.randn(distinct, *self.shape, generator=g).repeat_interleave(times, 0)
        y = torch.randint(0, 10, (distinct,), generator=g).repeat_interleave(times, 0)
        return x.contiguous(memory_format=torch.channels_last), y

    def stored(self) -> tuple[Tensor, Tensor]:
        """The same, written once and mapped: all processes of all peers read one copy, and none waits for its own."""
        size = "x".join(map(str, (self.clients * self.samples, *self.shape)))
        path = HOME / "data" / f"{size}{'-alike' if self.alike else ''}.pt"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            with unfinished.open("wb") as file:
                torch.save(self.data(), file)
                os.fsync(file.fileno())  # so that nothing is left to write while something is timed
            unfinished.replace(path)
        x, y = torch.load(path, mmap=True, weights_only=True)
        return x, y

    def samples_of(self, client: int) -> slice:
        """Which samples a client has."""
        return slice(client * self.samples, (client + 1) * self.samples)

    def network(self, memory_format: torch.memory_format = torch.channels_last) -> nn.Module:
        """The network with the same first weights for everyone, in the layout that the fast CPU kernels want."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net: nn.Module = build(self.model, self.shape, 10)
        return net.to(memory_format=memory_format)  # type: ignore[call-overload,no-any-return]

    def train_client(self, net: nn.Module, x: Tensor, y: Tensor) -> None:
        """What one would write by hand."""
        optimizer = torch.optim.SGD(net.parameters(), lr=self.lr, fused=True)
        for _ in range(self.epochs):
            for ids in torch.randperm(len(y)).split(self.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(net(x[ids]), y[ids]).backward()
                optimizer.step()

    def federation(self, x: Tensor, y: Tensor) -> Federation:
        import numpy as np

        import fedstill
        from fedstill.data.federation import Federation

        split = fedstill.Split(x, y)
        test = fedstill.Split(x[:100], y[:100])
        dataset = fedstill.Dataset(self.name, split, test, tuple("0123456789"))
        offsets = np.arange(self.clients + 1) * self.samples
        none = np.zeros(0, np.int64)
        return Federation(dataset, np.arange(len(y)), offsets, none, np.zeros_like(offsets), none)
