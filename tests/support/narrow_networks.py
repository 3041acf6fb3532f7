"""Users' networks with 1x1 convolutions that a kernel for AVX2 computes outside its memory, each written another way.

python tests/support/narrow_networks.py NAME …    # names each and trains it, and says "sound" where all have ended
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstill


class Functional(nn.Module):
    """It convolves without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.filters = nn.Parameter(torch.randn(16, 4, 1, 1))
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.convolve(self.stem(x)).mean((2, 3)))
        return logits

    def convolve(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.filters, stride=2)


class InTrainingOnly(Functional):
    def convolve(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.filters, stride=2 if self.training else 1)


class OnLargeBatches(Functional):
    def convolve(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.filters, stride=2 if len(x) > 2 else 1)


class Convolution(Functional):
    def convolve(self, x: Tensor) -> Tensor:
        return torch.convolution(x, self.filters, None, (2, 2), (0, 0), (1, 1), False, (0, 0), 1)


class Operator(Functional):
    def convolve(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.conv2d(x, self.filters, None, (2, 2))
        return found


class Transposed(Functional):
    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(4, 5, 1, 1))
        self.head = nn.Linear(5, 2)

    def convolve(self, x: Tensor) -> Tensor:
        return F.conv_transpose2d(x, self.filters, stride=2, output_padding=1)


class Layers(nn.Module):
    """An ordinary network."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.narrow = nn.Conv2d(4, 16, 1, 2)
        self.head = nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.narrow(self.stem(x)).mean((2, 3)))
        return logits


class Signal(nn.Module):
    """1-D, on a transposed view, as sequences come."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)
        self.narrow = nn.Conv1d(1, 8, 1, 2)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        samples = self.scale(x[:, 0].flatten(1).unsqueeze(-1))  # (B, pixels, 1)
        logits: Tensor = self.head(self.narrow(samples.transpose(1, 2)).mean(2))
        return logits


@dataclass(frozen=True)
class WithCritic(fedstill.FedAvg):
    """A method that trains a narrow network beside the model."""

    def objective(self, client: fedstill.Client) -> fedstill.Objective:
        critic = Layers(outputs=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return fedstill.Objective(term=lambda batch, _: critic(batch.x).square().mean(), modules=(critic,))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "functional": Functional,
    "in training only": InTrainingOnly,
    "on large batches": OnLargeBatches,
    "torch.convolution": Convolution,
    "an operator": Operator,
    "transposed": Transposed,
    "layers": Layers,
    "scripted": lambda: torch.jit.script(Layers()),
    "compiled": lambda: torch.compile(Functional(), backend="eager"),  # type: ignore[dict-item, return-value]
    "signal": Signal,
    "module of a method": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2)),
}


def train(name: str) -> None:
    rng = np.random.default_rng(0)
    data = fedstill.from_arrays(rng.random((64, 3, 32, 32), dtype=np.float32), rng.integers(0, 2, 64))
    method = WithCritic() if name == "module of a method" else "fedavg"
    fedstill.run(
        method, data=data, model=NETWORKS[name](), clients=2, rounds=1, engine="inline", epochs=2, batch_size=16
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in sys.argv[1:]:
        print(each, flush=True)
        train(each)
    print("sound")
