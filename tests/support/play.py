"""A run with a tap on the wire, and pieces of the equations, for loops that work out what should have crossed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstill.building.setup import Setup
from fedstill.core import seeds
from fedstill.core.weights import FlatNet
from fedstill.distill.stage import match_probabilities
from fedstill.models import Classifier
from fedstill.running.result import Result
from fedstill.train.loop import Loss
from support.recorder import Round
from support.wiretap import (
    BATCH,
    Extra,
    descend,
    exact,
    network,
    normalised,
    setup_of,
    softmax,
    taped,
)

POOL: dict[str, Any] = {"pool": 0.2, "proxy": "pool"}
CLASSES, WIDTH, SHAPE = 10, 84, (1, 16, 16)  # of the small run's data and of its network's features


def stream(purpose: str, *where: int) -> torch.Generator:
    return seeds.torch_rng(0, purpose, *where)


def at_server(purpose: str, round_: int) -> torch.Generator:
    return stream(f"server: {purpose}", round_)


@dataclass(frozen=True)
class Play:
    """A real run, and what its clients and its server hold."""

    setup: Setup
    result: Result
    rounds: list[Round]
    targets: list[Tensor] = field(default_factory=list)

    @property
    def lr(self) -> float:
        return self.setup.task.local.lr

    def held_by(self, k: int) -> tuple[Tensor, Tensor]:
        index, train = torch.from_numpy(self.setup.federation.train(k)), self.setup.federation.dataset.train
        return normalised(train.x[index]), train.y[index]

    def proxy(self) -> Tensor:
        return normalised(self.setup.federation.dataset.train.x[torch.from_numpy(self.setup.federation.pool_index)])

    def counts(self, k: int) -> list[int]:
        y = self.held_by(k)[1].tolist()
        return [y.count(c) for c in range(CLASSES)]

    def model_after(self, round_: int) -> Tensor:
        """The global model that a round ends with."""
        if round_ < len(self.rounds):
            return self.rounds[round_].down["model"]
        return FlatNet(copy.deepcopy(self.result.model)).read()


def play(method: str, *, rounds: int, **settings: Any) -> Play:
    result, tape = taped(method, rounds=rounds, **settings)
    return Play(setup_of(method, **settings), result, tape)


def noted_targets(patch: pytest.MonkeyPatch, method: str) -> list[Tensor]:
    """From now on, the soft targets that a method's server is about to match."""
    seen: list[Tensor] = []

    def noting(targets: Tensor, *more: Any) -> Loss:
        seen.append(targets)
        return match_probabilities(targets, *more)

    patch.setattr(f"fedstill.methods.{method}.match_probabilities", noting)
    return seen


def batches_of(k: int, round_: int, n: int) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = torch.randperm(n, generator=stream("batches", round_, k)).split(BATCH)
    return parts


def locally(run: Play, k: int, crossed: Round, extra: Extra) -> Classifier:
    """A client's round on its cross-entropy and something more."""
    net, (x, y) = network(crossed.down["model"]), run.held_by(k)
    for ids in batches_of(k, crossed.number, len(y)):
        descend(net, F.cross_entropy(net(x[ids]), y[ids]) + extra(net, x[ids], y[ids]), run.lr)
    return net


def nothing(_net: Classifier, _x: Tensor, _y: Tensor) -> Tensor:
    return torch.zeros(())


def averaged(crossed: Round, part: str = "model", *, uniform: bool = False) -> Tensor:
    """The mean of what the clients of a round sent, by their sample counts or not."""
    shares = [1 if uniform else crossed.samples[k] for k in crossed.up]
    parts = [crossed.up[k][part].double().numpy() for k in crossed.up]
    total = np.zeros_like(parts[0])
    for share, vector in zip(shares, parts, strict=True):
        total += share * vector
    return torch.from_numpy(total / sum(shares)).float()


def kl(p: Tensor, logits: Tensor) -> Tensor:
    """KL(p || softmax(logits)), mean over the batch."""
    return (p * (p.clamp(min=1e-30).log() - logits.log_softmax(1))).sum(1).mean()


def probabilities(net: Classifier, x: Tensor) -> Tensor:
    return torch.from_numpy(softmax(exact(net, x)[0])).float()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def assert_moved_alike(actual: nn.Module, expected: nn.Module, start: nn.Module, within: float = 0.03) -> None:
    """Two networks have come from the start to the same place.

    Adam makes a whole step of a vanishing gradient's rounding, so single weights may differ, but not all together.
    """
    assert_near(flat(actual), flat(expected), flat(start), within)


def assert_near(actual: Tensor, expected: Tensor, start: Tensor, within: float = 0.03) -> None:
    """What is found is near what is expected, as seen from the start."""
    assert (actual - expected).norm() <= within * (expected - start).norm()


StudentLoss = Callable[[Classifier, Tensor], Tensor]
"""A loss of the student and the places of a batch's samples."""


def distilled(
    start: Tensor,
    loss: StudentLoss,
    batches: Iterable[Tensor],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> Classifier:
    """A student after these batches."""
    net = network(start)
    stepper = optimizer(net.parameters())
    for ids in batches:
        stepper.zero_grad()
        loss(net, ids).backward()
        stepper.step()
    return net


def epochs_of(n: int, size: int, epochs: int, order: torch.Generator) -> list[Tensor]:
    return [ids for _ in range(epochs) for ids in torch.randperm(n, generator=order).split(size)]


def pairwise_diversity(z: Tensor, made: Tensor) -> Tensor:
    """exp(-mean_ij mean|z_i - z_j|^2 mean|G_i - G_j|), by a double loop."""
    n, total = len(z), torch.zeros(())
    for i in range(n):
        for j in range(n):
            total = total + ((z[i] - z[j]) ** 2).mean() * (made[i] - made[j]).abs().mean()
    return torch.exp(-total / n**2)


def label_shares(run: Play, clients: Iterable[int]) -> Tensor:
    """n_k^y / sum_k n_k^y (K, C); equal shares of a class that none has."""
    counts = np.array([run.counts(k) for k in clients], float)
    shares = np.full_like(counts, 1 / len(counts))
    for c in range(CLASSES):
        if counts[:, c].sum():
            shares[:, c] = counts[:, c] / counts[:, c].sum()
    return torch.from_numpy(shares).float()


def loaded(module: nn.Module, vector: Tensor) -> Any:
    """A network of the library with these weights, in training mode."""
    module.load_state_dict(FlatNet(copy.deepcopy(module)).unflatten(vector))
    return module.train()
