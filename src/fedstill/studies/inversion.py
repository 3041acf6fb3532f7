"""Gradient inversion: whether a client's samples can be rebuilt from one update on a small batch.

The attacker knows the model that was sent, reads the labels off the last layer's bias, and looks for inputs whose
gradient points where the update does (Zhu et al. 2019; Geiping et al. 2020: cosine distance and total variation).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

from fedstill.core import seeds
from fedstill.core.tree import Message
from fedstill.methods.base import Method
from fedstill.train.client import Client
from fedstill.train.evaluate import logits
from fedstill.train.task import Samples, Task, classifier

_SMOOTH = 1e-3  # weight of the total variation of images
_RATE = 0.1


@dataclass(frozen=True)
class Inversion:
    """What was rebuilt from an update on one batch."""

    batch: int  # samples in it
    labels: float  # share of their labels that was read off
    recovered: float  # share of the samples' variance: 1 is the very samples, 0 no better than a mean sample


def reason_against(task: Task, method: Method, down: Message) -> str:
    """Why there is nothing to invert; empty: there is."""
    if "model" not in down or "model" not in method.wire(task).up:
        return "no weights are sent"
    if task.local.optimizer != "sgd" or task.local.momentum:
        return "an update of Adam, or with momentum, is no gradient"
    if not task.dataset.normalise(task.dataset.train.x[:1]).is_floating_point():
        return "inputs are tokens, not numbers"
    return ""


def invert(
    task: Task,
    method: Method,
    down: Message,
    samples: Samples,
    prior: Tensor,
    *,
    round_: int,
    state: dict[str, Any],
    client: int = 0,
    steps: int = 300,
) -> Inversion:
    """Let a client train for one step on all of these samples, and rebuild them from its update.

    `prior`: other samples, prepared, of which the attacker knows the mean.
    """
    size = len(samples)
    one_step = replace(task.local, epochs=1, batch_size=size, steps_per_epoch=0, weight_decay=0.0, clip=0.0)
    victim = Client(
        replace(task.trained_as(one_step), augment=None), client, round_, samples, down, lambda: dict(state)
    )
    victim.fit(method.prepare(victim))
    up = method.uplink(victim)
    trainable = task.trainable
    gradient = (down["model"][:trainable] - up["model"][:trainable]) / victim.lr
    labels = _labels(task, gradient, size)
    truth = samples.x(torch.arange(size))
    found = _matched(task, down["model"], gradient, labels, truth.shape, prior, steps)
    distances = ((truth[:, None] - found[None]) ** 2).flatten(2).mean(2)
    rows, columns = linear_sum_assignment(distances.numpy())
    missed, guess = float(distances[rows, columns].mean()), float(((truth - prior.mean(0)) ** 2).mean())
    right = sum((labels == c).sum().minimum((samples.y == c).sum()).item() for c in range(task.classes))
    return Inversion(size, right / size, 1 - missed / guess)


def _labels(task: Task, gradient: Tensor, size: int) -> Tensor:
    """A sample of class c moves the last bias of c by about -1/size, and the others up."""
    net = task.nets.get("attacker")
    pieces = net.split(gradient)
    bias = next((piece.clone() for piece in reversed(pieces) if piece.shape == (task.classes,)), None)
    if bias is None:
        return torch.zeros(size, dtype=torch.int64)
    found = []
    for _ in range(size):
        found.append(int(bias.argmin()))
        bias[found[-1]] += 1 / size
    return torch.tensor(sorted(found))


def _matched(
    task: Task, sent: Tensor, gradient: Tensor, labels: Tensor, shape: torch.Size, prior: Tensor, steps: int
) -> Tensor:
    """Inputs whose gradient has the direction of the one that was seen."""
    net = task.nets.get("attacker")
    net.load(sent)
    net.module.train()
    target = net.split(gradient)
    length = gradient.norm().clamp(min=1e-12)
    rng = seeds.torch_rng(task.seed, "audit: inversion")
    x = (prior.mean(0) + 0.1 * torch.randn(shape, generator=rng)).requires_grad_()
    low, high = float(prior.min()), float(prior.max())
    adam = torch.optim.Adam([x], lr=_RATE)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for _ in range(steps):
        loss = F.cross_entropy(logits(classifier(net), x), labels)
        own = torch.autograd.grad(loss, net.params, create_graph=True)
        dot = torch.stack([(a * b).sum() for a, b in zip(own, target, strict=True)]).sum()
        norm = torch.stack([(a * a).sum() for a in own]).sum().clamp(min=1e-24).sqrt()
        (x.grad,) = torch.autograd.grad(1 - dot / (norm * length) + _SMOOTH * _variation(x), [x])
        adam.step()
        falling.step()
        with torch.no_grad():
            x.clamp_(low, high)
    return x.detach()


def _variation(x: Tensor) -> Tensor:
    """Total variation of images; of other inputs nothing."""
    if x.dim() != 4:
        return x.new_zeros(())
    return (x.diff(dim=2).abs().mean() + x.diff(dim=3).abs().mean()) if min(x.shape[2:]) > 1 else x.new_zeros(())


def chosen(size: int, labels: Tensor, seed: int) -> Tensor:
    """Places of samples for a batch, of as many classes as there can be: what an attacker finds easiest."""
    order = torch.from_numpy(seeds.numpy_rng(seed, "audit: batch").permutation(len(labels)))
    seen: dict[int, int] = {}
    rank = []
    for place in order.tolist():
        seen[int(labels[place])] = seen.get(int(labels[place]), 0) + 1
        rank.append(seen[int(labels[place])])
    return order[torch.tensor(rank).argsort(stable=True)][:size]
