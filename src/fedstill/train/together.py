"""Clients of one size trained at once, for devices that a single small network leaves idle.

Their weights are the rows of one matrix, and one pass takes all of them through the network (`torch.func.vmap`). Each
client keeps its own batches, objective, random streams and networks, so that a method notices nothing; the numbers are
those of one client after the other, but for rounding and for layers that draw for themselves (dropout).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedstill.core import custom, device, seeds
from fedstill.core.errors import SettingError
from fedstill.core.weights import FlatNet
from fedstill.models.base import Classifier
from fedstill.models.norms import norms
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs, outputs
from fedstill.train.loop import (
    Batch,
    Fit,
    Objective,
    batches,
    exempt_from_decay,
    make_optimizer,
    steps_of,
    take_steps,
    use_statistics,
)
from fedstill.train.task import Task, classifier

Step = tuple[Batch, ...]  # one of each client


def can_be_joint(objectives: Sequence[Objective]) -> bool:
    """Whether clients with these objectives can be trained at once: networks that learn along are one client's."""
    return not any(objective.modules or objective.private for objective in objectives)


class _Both(nn.Module):
    """Logits and features as what a module returns, which is what `functional_call` can ask for."""

    def __init__(self, net: Classifier) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = outputs(self.net, x)
        return out.logits, out.features


class Rows:
    """Networks of one shape whose weights are the rows of a matrix."""

    def __init__(self, rows: Tensor, nets: Sequence[FlatNet]) -> None:
        self._nets, first = nets, nets[0]
        self._pass = _Both(classifier(first))
        self._trainable = [entry for entry in first.entries if entry.trainable]
        # The same memory: `data` lets statistics change during a pass without a word to autograd.
        self.weights = rows.data[:, : first.trainable].requires_grad_()
        self._rows = {e.name: e.shaped(rows.data[:, e.start : e.stop]) for e in first.entries if not e.trainable}
        self._counts = {
            entry.name: torch.stack([dict(_named(net))[entry.name] for net in nets]) for entry, _ in first.counters
        }
        # In one piece, else `vmap` would move statistics in a copy of its own.
        statistics = {name: row.clone(memory_format=torch.contiguous_format) for name, row in self._rows.items()}
        self._buffers = statistics | self._counts

    def __call__(self, x: Tensor) -> list[Outputs]:
        """Outputs of each network for its own inputs, (networks, batch, …)."""
        parts = self.weights.split([e.stop - e.start for e in self._trainable], dim=1)
        weights = {f"net.{e.name}": e.shaped(part) for e, part in zip(self._trainable, parts, strict=True)}
        buffers = {f"net.{name}": buffer for name, buffer in self._buffers.items()}

        def through(weights: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = functional_call(self._pass, (weights, buffers), (x,))
            return found

        logits, features = vmap(through, randomness="different")(weights, buffers, x)
        return [Outputs(*each) for each in zip(logits, features, strict=True)]

    def keep_buffers(self) -> None:
        """Write the networks' statistics where they belong."""
        for name, row in self._rows.items():
            row.copy_(self._buffers[name])
        for k, net in enumerate(self._nets):
            for entry, buffer in net.counters:
                buffer.copy_(self._counts[entry.name][k])


def _named(net: FlatNet) -> list[tuple[str, Tensor]]:
    return [(entry.name, buffer) for entry, buffer in net.counters]


def fit_together(rows: Tensor, clients: Sequence[Client], objectives: Sequence[Objective]) -> None:
    """Train the clients' networks, whose weights are the rows, in place: `fit` for all of them."""
    first, nets = clients[0], [client.flat for client in clients]
    task, local, lr = first.task, first.task.local, first.lr
    device.seed_layers(seeds.key(task.seed, "layers", first.round, first.id))
    networks = Rows(rows, nets)
    normed = [layer for client in clients for layer in norms(client.net)]
    exempt = exempt_from_decay(local, first.net)
    decayed = torch.cat([torch.full((p.numel(),), float(p not in exempt)) for p in nets[0].params])
    for client in clients:
        client.net.train()
        client.net.zero_grad()
    orders = [batches(client.data, local, client.stream("batches"), no_single=bool(normed)) for client in clients]
    changes = [client.stream("augment") for client in clients]

    def losses(step: Step) -> Tensor:
        use_statistics(normed, of_batch=len(step[0].y) > 1)
        if task.augment:
            for batch, own in zip(step, changes, strict=True):
                batch.x = task.augment(batch.x, own)
        seen = torch.stack([objective.seen(batch) for objective, batch in zip(objectives, step, strict=True)])
        found = zip(objectives, step, networks(seen), strict=True)
        return torch.stack([objective.loss(batch, out) for objective, batch, out in found])

    def complete() -> None:
        assert networks.weights.grad is not None
        _complete(networks.weights.grad, nets, objectives)
        if local.clip:
            _clip(networks.weights.grad, local.clip)
        if exempt:
            networks.weights.grad.add_(networks.weights.detach() * decayed, alpha=local.weight_decay)

    def after(step: Step) -> None:
        networks.keep_buffers()
        for objective, batch in zip(objectives, step, strict=True):
            if objective.after:
                objective.after(batch)

    steps, total = take_steps(
        zip(*orders, strict=True),
        # Not fused: those kernels take the memory of a tensor for one piece, and behind each row are its buffers.
        make_optimizer([networks.weights], replace(local, weight_decay=0.0) if exempt else local, lr, fused=False),
        loss=losses,
        complete=complete,
        after=after,
        cosine_over=steps_of(len(first.data), local) if local.cosine else 0,
    )
    for client, objective, loss in zip(clients, objectives, total.expand(len(clients)).tolist(), strict=True):
        if objective.done:
            objective.done()
        client.trained_by(Fit(steps, loss / max(1, steps)))


@torch.no_grad()
def _complete(grad: Tensor, nets: Sequence[FlatNet], objectives: Sequence[Objective]) -> None:
    """Add what does not come through the common pass: through a client's own network, and of the weights alone."""
    for row, net, objective in zip(grad, nets, objectives, strict=True):
        for part, p in zip(net.split(row), net.params, strict=True):
            if p.grad is not None:
                part.add_(p.grad)
                p.grad = None
        if objective.gradient:
            row.add_(objective.gradient(net.vector[: net.trainable]))


def _clip(grad: Tensor, largest: float) -> None:
    """`clip_grad_norm_` for each row."""
    norm = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
    grad.mul_((largest / (norm + 1e-6)).clamp(max=1.0))


def check_together(task: Task) -> None:
    """Refuse a network that cannot be trained for several clients at once, trying it on a few samples."""
    rows, tasks = task.replicas(2)
    nets = [own.nets.get("student") for own in tasks]
    for net in nets:
        net.module.train()
    x = task.dataset.normalise(device.to_current_device(task.dataset.train.x[:4]))
    try:
        with torch.random.fork_rng(devices=[]):
            found = Rows(rows, nets)(torch.stack([x, x]))
        sum(out.logits.sum() for out in found).backward()  # type: ignore[union-attr]
    except Exception as error:
        reason = custom.summary(error)
        raise SettingError(f"together: this network cannot be trained for several clients at once: {reason}") from error
