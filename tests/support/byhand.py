"""What the tests of server rules and drift corrections share: a problem whose optimum is known, and a server
without a run.

Client k minimises F_k(w) = 1/2 (w - b_k)' A_k (w - b_k). Its samples are all the same, (A_k, b_k) written out as
numbers, so every batch has the gradient A_k (w - b_k), and a batch size of one makes its number of samples its number
of steps in an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fedstill
from fedstill.core.store import Store
from fedstill.data.federation import from_clients
from fedstill.methods.base import Method, Server, Uplink
from fedstill.models import as_classifier
from fedstill.running.result import Result
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch, Objective
from fedstill.train.task import LocalTraining, Task

Array = NDArray[np.float64]


# --- the quadratic problem ------------------------------------------------------------------------------------------


class Point(nn.Module):
    """A network that is its own weights: whatever it is shown, it answers w."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(d, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), -1)


def quadratic_loss(batch: Batch, out: Outputs) -> Tensor:
    d = out.logits.shape[1]
    a, b = batch.x[:, : d * d].double().view(-1, d, d), batch.x[:, d * d :].double()
    away = out.logits - b
    return 0.5 * torch.einsum("ni,nij,nj->n", away, a, away).mean()


class OnQuadratic(fedstill.FedAvg):
    """Put before a method's class: its clients minimise F_k instead of the cross-entropy."""

    def objective(self, client: Client) -> Objective:
        return replace(super().objective(client), base=quadratic_loss)


@dataclass(frozen=True)
class Problem:
    """Clients with a quadratic each."""

    a: Array  # (clients, d, d)
    b: Array  # (clients, d)
    sizes: tuple[int, ...]

    @classmethod
    def random(cls, sizes: Sequence[int], d: int = 3, seed: int = 0) -> Problem:
        """Curvatures between 0.2 and 2 in directions of each client's own."""
        rng = np.random.default_rng(seed)
        a, b = [], []
        for _ in sizes:
            axes, _ = np.linalg.qr(rng.normal(size=(d, d)))
            a.append(axes @ np.diag(rng.uniform(0.2, 2, d)) @ axes.T)
            b.append(rng.normal(size=d))
        stored = np.array(a).astype(np.float32), np.array(b).astype(np.float32)  # as the clients hold them
        return cls(stored[0].astype(np.float64), stored[1].astype(np.float64), tuple(sizes))

    def gradient(self, k: int, w: Array) -> Array:
        moved: Array = self.a[k] @ (w - self.b[k])
        return moved

    def losses(self, w: Array) -> Array:
        away = w - self.b
        values: Array = 0.5 * np.einsum("ki,kij,kj->k", away, self.a, away)
        return values

    def optimum(self, weights: Sequence[float] | None = None) -> Array:
        """argmin of sum_k p_k F_k: where sum_k p_k A_k (w - b_k) is zero."""
        p = np.ones(len(self.sizes)) if weights is None else np.asarray(weights, float)
        best: Array = np.linalg.solve(np.einsum("k,kij->ij", p, self.a), np.einsum("k,kij,kj->i", p, self.a, self.b))
        return best

    def sgd(self, k: int, w: Array, lr: float, steps: int, momentum: float = 0.0) -> Array:
        """Where a client's plain local steps lead."""
        velocity = np.zeros_like(w)
        for _ in range(steps):
            velocity = momentum * velocity + self.gradient(k, w)
            w = w - lr * velocity
        return w

    def run(self, method: Method, **settings: Any) -> Array:
        """Where a whole run ends."""
        result = self.result(method, **settings)
        assert isinstance(result.model, Point)
        trained: Array = result.model.w.detach().numpy()
        return trained

    def result(self, method: Method, **settings: Any) -> Result:
        d = self.b.shape[1]
        clients = [
            (np.tile(np.append(self.a[k], self.b[k]).astype(np.float32), (n, 1)), np.arange(n) % d)
            for k, n in enumerate(self.sizes)
        ]
        plain: dict[str, Any] = {"batch_size": 1, "epochs": 1, "participation": 1.0, "engine": "inline"}
        seldom = {"eval_every": 0, "checkpoint_every": 10**6}
        federation = from_clients(clients, classes=[str(i) for i in range(d)], test_fraction=0)
        return fedstill.run(method, data=federation, model=Point(d), **(plain | seldom | settings))


# --- a server without a run -----------------------------------------------------------------------------------------


def normed_net() -> nn.Module:
    """23 weights and, behind them, BatchNorm's 7 statistics."""
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()


def tiny_server(folder: Path, sizes: Sequence[int], *, net: nn.Module | None = None, lr: float = 0.1) -> Server:
    """A server in its first round, with random weights in float64; by default of a linear map with 8 of them."""
    x, y = torch.zeros(4, 3 if net is None else 2), torch.tensor([0, 1, 0, 1])
    module = net or nn.Linear(3, 2).double()
    task = Task(
        dataset=fedstill.from_arrays(x.numpy(), y.numpy(), x.numpy(), y.numpy()),
        make_network=lambda: as_classifier(module),
        local=LocalTraining(lr=lr),
    )
    server = Server(task, np.array(sizes), Store(folder / "store"))
    server.model = torch.randn(task.size, dtype=task.dtype, generator=torch.Generator().manual_seed(1))
    server.round = 1
    return server


@dataclass
class Uplinks:
    """Answers of clients around the server's model, as the server gets them and as arrays."""

    server: Server
    clients: Sequence[int]
    spread: float = 1.0
    seed: int = 0
    parts: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.w_t: Array = self.server.model.double().numpy().copy()
        self.w: Array = self.w_t + self.spread * rng.normal(size=(len(self.clients), len(self.w_t)))
        self.n: Array = self.server.sizes[list(self.clients)].astype(np.float64)

    def __iter__(self) -> Iterator[Uplink]:
        for place, k in enumerate(self.clients):
            more = {name: torch.as_tensor(values[place]).double() for name, values in self.parts.items()}
            message = {"model": torch.from_numpy(self.w[place]).to(self.server.model.dtype)} | more
            yield Uplink(k, int(self.server.sizes[k]), message)
