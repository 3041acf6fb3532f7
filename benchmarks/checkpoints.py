"""What a checkpoint after every round costs a run of a large network."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

import fedstill
from benchmarks.engine import Stopwatch
from benchmarks.work import Work

# ResNet-18 has 11 million weights: 45 MB a checkpoint, and 45 MB a client where the method keeps state.
WORK = Work("ResNet-18, 4 clients x 64 samples, batch 32, 1 epoch", "resnet18", (3, 32, 32), 4, 64, 4, 32, 1)
METHODS = ("fedavg", "fedavg+t1", "scaffold")
NEVER = 1_000_000  # rounds between checkpoints


def share(method: str, *, rounds: int = 4, repeats: int = 2) -> tuple[float, float]:
    """Median seconds of a round with a checkpoint after each, and with none but the last; the best of several."""
    torch.set_num_threads(1)
    federation = WORK.federation(*WORK.data())

    def seconds(**settings: Any) -> float:
        watch = Stopwatch()
        fedstill.run(
            method, data=federation, model=WORK.model, rounds=rounds + 2, participation=1.0, workers=2, eval_every=0,
            batch_size=WORK.batch_size, epochs=WORK.epochs, lr=WORK.lr, callbacks=[watch], **settings,
        )  # fmt: skip
        return median(watch.seconds[:-1])

    taken = [(seconds(checkpoint_every=1), seconds(checkpoint_every=NEVER)) for _ in range(repeats)]
    return min(w for w, _ in taken), min(n for _, n in taken)
