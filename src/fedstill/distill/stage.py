"""Distillation on the server: outputs of the teachers, computed once, and training on them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch
from torch import Tensor, nn

from fedstill.core.device import CPU, current
from fedstill.models.norms import norms
from fedstill.train.evaluate import Outputs, predict
from fedstill.train.loop import Batch, Loss, Objective, fit
from fedstill.train.losses import soft_kl
from fedstill.train.task import LocalTraining, Samples, Task


def predict_all(task: Task, teachers: Sequence[Tensor], samples: Samples, threads: int = 1) -> list[Outputs]:
    """Outputs of each teacher for each sample: one pass over the samples for each, however many epochs follow.

    Up to `threads` teachers predict at once, each in one thread: how many they are changes no bit. Networks that draw
    random numbers as they predict, from the stream that threads share, do so one after the other.
    """
    at_once = min(threads, len(teachers)) if current() == CPU else 1
    stream = torch.default_generator.get_state()
    if at_once > 1:
        outputs = _predict_at_once(task, teachers, samples, at_once)
        if torch.equal(stream, torch.default_generator.get_state()):
            return outputs
        torch.default_generator.set_state(stream)
    return [predict(task, teacher, samples) for teacher in teachers]


def _predict_at_once(task: Task, teachers: Sequence[Tensor], samples: Samples, at_once: int) -> list[Outputs]:
    free: SimpleQueue[str] = SimpleQueue()
    for role in ["teacher", *(f"teacher {i}" for i in range(1, at_once))]:
        task.nets.get(role)  # made now: the first weights of a network come from a stream that threads share
        free.put(role)

    def one(teacher: Tensor) -> Outputs:
        role = free.get()
        try:
            return predict(task, teacher, samples, role)
        finally:
            free.put(role)

    kernels = torch.get_num_threads()
    with ThreadPoolExecutor(at_once, initializer=torch.set_num_threads, initargs=(kernels,)) as pool:
        return list(pool.map(one, teachers))


def mean_probabilities(outputs: Sequence[Outputs], weights: Tensor | None = None) -> Tensor:
    """The ensemble's soft prediction (N, C): each teacher's softmax, by weights (K,) or (K, N); uniform if None."""
    return _mean(torch.stack([a.logits.softmax(1) for a in outputs]), weights)


def mean_logits(outputs: Sequence[Outputs], weights: Tensor | None = None) -> Tensor:
    """The same mean, of the teachers' logits."""
    return _mean(torch.stack([a.logits for a in outputs]), weights)


def _mean(outputs: Tensor, weights: Tensor | None) -> Tensor:
    """(K, N, C) over the teachers."""
    if weights is None:
        return outputs.mean(0)
    weights = weights if weights.dim() == 2 else weights.unsqueeze(1).expand(-1, outputs.shape[1])
    return torch.einsum("kn,knc->nc", weights, outputs)


def mean_features(outputs: Sequence[Outputs]) -> Tensor:
    """The teachers' mean penultimate features (N, d)."""
    return torch.stack([a.features for a in outputs]).mean(0)


def match_probabilities(targets: Tensor, temperature: float = 1.0) -> Loss:
    """T² KL(target || student at temperature T); targets are (N, C) probabilities."""

    def loss(batch: Batch, out: Outputs) -> Tensor:
        return temperature**2 * soft_kl(targets[batch.ids], out.logits / temperature)

    return loss


def distil(
    task: Task, start: Tensor, samples: Samples, loss: Loss, training: LocalTraining, order: torch.Generator
) -> Tensor:
    """The weights after training from `start` on the samples with this loss."""
    if training.epochs == 0:
        return start
    net = task.nets.get("distilled")
    net.load(start)
    statistics = task.buffers != "average"  # averaged ones stay the clients', whatever samples the server has
    fit(net, samples, Objective(base=loss), training, lr=training.lr, order=order, statistics=statistics)
    return net.read()


def train_student(module: nn.Module, task: Task) -> None:
    """Training mode as in `distil`, for a loop of one's own."""
    module.train()
    if task.buffers == "average":
        for layer in norms(module):
            layer.eval()


def as_samples(x: Tensor, y: Tensor | None = None) -> Samples:
    """Prepared inputs as samples; without labels they count as class 0."""
    labels = torch.zeros(len(x), dtype=torch.long) if y is None else y
    return Samples(x, labels, torch.arange(len(x)), lambda ready: ready)
