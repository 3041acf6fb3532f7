"""What a round costs with each method, against FedAvg's in the same run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.engine import fedstill_rounds
from benchmarks.work import Work
from fedstill.data.federation import Federation

# ResNet-8 at 5 local epochs; every client is active, so that each method has all its state from the second round on.
WORK = Work("ResNet-8, 4 clients x 128 samples, batch 64, 5 epochs", "resnet8", (3, 32, 32), 4, 128, 4, 64, 5)

PROXY = {"proxy": "pool"}  # 100 samples
# Method, settings, how often FedAvg's cost it may have.
CASES: tuple[tuple[str, dict[str, Any], float | None], ...] = (
    ("fedprox", {}, 1.10),
    ("scaffold", {}, 1.10),
    ("feddyn", {}, 1.10),
    ("fedgkd", {}, 1.10),
    ("fedgkd-vote", {"buffer": 5}, 1.40),
    ("moon", {}, 1.35),
    ("fednova", {}, None),
    ("qffl", {}, None),
    ("fedmgda-plus", {}, None),
    ("feddistill-plus", {}, None),
    ("fedavg+t1", {}, None),
    ("fedkf", {"width": 32}, None),
)

# Methods whose server does most of the work: a short local round shows it.
SERVER_WORK = replace(WORK, name="ResNet-8, 4 clients x 128 samples, batch 64, 1 epoch", epochs=1)
SERVER_CASES: tuple[tuple[str, dict[str, Any], float | None], ...] = (
    ("feddf", PROXY, None),
    ("dafkd", {}, None),
    ("dafkd", {"private": True}, None),
    ("fedhyb", PROXY, None),
    ("fedgen", {}, None),
    ("fedftg", {}, None),
    ("fedbe", PROXY, None),
    ("fedmd", PROXY, None),
    ("fedhkd", {}, None),
    ("creff", {}, None),
)


def with_pool(work: Work) -> Federation:
    """The federation of the work, with samples for the server beside."""
    extra = Work(work.name, work.model, work.shape, work.clients + 1, work.samples, work.cohort, 1, 1)
    x, y = extra.data()
    whole = extra.federation(x, y)
    clients = work.clients * work.samples
    return Federation(
        whole.dataset,
        np.arange(clients),
        whole.train_offsets[:-1],
        whole.test_index,
        whole.test_offsets[:-1],
        np.arange(clients, clients + 100),
    )


def round_costs(
    cases: Sequence[tuple[str, dict[str, Any], float | None]] = CASES,
    work: Work = WORK,
    *,
    rounds: int = 6,
    repeats: int = 3,
) -> list[tuple[str, float, float | None]]:
    """Each method's seconds a round over FedAvg's: the best median of several, all methods in turn."""
    torch.set_num_threads(1)
    federation = with_pool(work)

    def seconds(method: str, settings: dict[str, Any]) -> float:
        # The first rounds have no teacher yet, and VOTE's buffer fills up.
        return median(fedstill_rounds(work, federation, rounds, method, **settings)[-3:])

    everyone = [("fedavg", {}, None), *cases]
    best = [math.inf] * len(everyone)
    for _ in range(repeats):
        for i, (method, settings, _limit) in enumerate(everyone):
            best[i] = min(best[i], seconds(method, settings))
    return [
        (" ".join([method, *(f"{name}={value}" for name, value in settings.items())]), seconds / best[0], limit)
        for (method, settings, limit), seconds in zip(cases, best[1:], strict=True)
    ]
