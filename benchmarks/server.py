"""Server distillation with teachers that are asked once, against one that runs every teacher in every step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.work import Work
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.core.weights import FlatNet
from fedstill.distill.stage import distil, match_probabilities, mean_probabilities, predict_all
from fedstill.train.task import LocalTraining, Samples, Task

TEACHERS, EPOCHS, BATCH, SAMPLES = 8, 10, 64, 960
# A training step costs about three forward passes.
ARITHMETIC = (TEACHERS + 3) * EPOCHS / (TEACHERS + 3 * EPOCHS)
WORK = Work(f"ResNet-8, {TEACHERS} teachers, {SAMPLES} samples", "resnet8", (3, 32, 32), 1, SAMPLES, 1, BATCH, EPOCHS)


def cached(task: Task, start: Tensor, teachers: list[Tensor], samples: Samples) -> None:
    """The library's own stage."""
    targets = mean_probabilities(predict_all(task, teachers, samples))
    training = LocalTraining(EPOCHS, BATCH, optimizer="adam", lr=1e-3)
    distil(task, start, samples, match_probabilities(targets), training, torch.Generator().manual_seed(0))


def naive(task: Task, start: Tensor, teachers: list[Tensor], samples: Samples) -> None:
    """The same training, written as the equation reads: the ensemble is asked about every batch anew."""
    student, nets = FlatNet(task.make_network()), [FlatNet(task.make_network()) for _ in teachers]
    for net, weights in zip([student, *nets], [start, *teachers], strict=True):
        net.load(weights)
        net.module.eval()
    student.module.train()
    optimizer = torch.optim.Adam(student.params, lr=1e-3, fused=True)
    for _ in range(EPOCHS):
        for ids in torch.randperm(len(samples)).split(BATCH):
            x = samples.x(ids)
            with torch.no_grad():
                target = torch.stack([net.module(x).softmax(1) for net in nets]).mean(0)
            optimizer.zero_grad()
            F.kl_div(student.module(x).log_softmax(1), target, reduction="batchmean").backward()
            optimizer.step()


def stage_seconds(repeats: int = 4) -> tuple[float, float]:
    """Seconds of the naive stage and of the library's, each the best of several, taken in turn."""
    task, teachers, samples = _prepared()

    def seconds(stage: Callable[[Task, Tensor, list[Tensor], Samples], None]) -> float:
        began = time.perf_counter()
        stage(task, task.initial, teachers, samples)
        return time.perf_counter() - began

    taken = [(seconds(naive), seconds(cached)) for _ in range(repeats)]
    return min(n for n, _ in taken), min(c for _, c in taken)


def asking_seconds(repeats: int = 4) -> tuple[float, float]:
    """Seconds until all teachers are asked, on one thread and on two; each the best of several, taken in turn."""
    task, teachers, samples = _prepared()

    def seconds(threads: int) -> float:
        began = time.perf_counter()
        predict_all(task, teachers, samples, threads)
        return time.perf_counter() - began

    taken = [(seconds(1), seconds(2)) for _ in range(repeats)]
    return min(one for one, _ in taken), min(two for _, two in taken)


def _prepared() -> tuple[Task, list[Tensor], Samples]:
    torch.set_num_threads(1)
    federation = WORK.federation(*WORK.data())
    task = prepare(resolve({"model": WORK.model, "partition": "natural"}), data=federation).task
    train = federation.dataset.train
    samples = Samples(train.x, train.y, torch.arange(SAMPLES), federation.dataset.normalise)
    return task, [task.initial + 0.01 * torch.randn(len(task.initial)) for _ in range(TEACHERS)], samples
