"""The training loop, on clients and on the server.

A method never writes its own: it says what is added to the cross-entropy (`Objective`), and the loop does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstill.core.device import to_current_device
from fedstill.core.errors import SettingError
from fedstill.core.weights import FlatNet
from fedstill.data.augment import Augmentation
from fedstill.models.norms import norm_parameters, norms
from fedstill.train.evaluate import Outputs, outputs
from fedstill.train.optimizers import SGD, Adam, Optimizer
from fedstill.train.private import PrivateSteps
from fedstill.train.task import LocalTraining, Samples, classifier


@dataclass
class Batch:
    """Samples of one step; `ids` are their places in the client's data."""

    x: Tensor
    y: Tensor
    ids: Tensor
    weight: Tensor | None = None  # how much each counts in the cross-entropy; None: alike


P = ParamSpec("P")
S = TypeVar("S")
Loss = Callable[[Batch, Outputs], Tensor]


def cross_entropy(batch: Batch, out: Outputs) -> Tensor:
    """The loss every method starts from.

    Divided by the number of samples, not by the sum of their weights: the clients' losses then add up to the weighted
    loss of all data, however the classes are spread over clients.
    """
    if batch.weight is None:
        return F.cross_entropy(out.logits, batch.y)
    return (batch.weight * F.cross_entropy(out.logits, batch.y, reduction="none")).mean()


@dataclass(frozen=True)
class Objective:
    """What a client minimises: `base` + `term`, with `gradient` added to the gradient of the weights.

    `term(batch, out)` is a differentiable loss; `gradient(w)` is the gradient of a term that depends on the
    trainable weights alone, given and returned as a flat vector; `modules` are trained along with the network.
    `inputs(batch)` gives further samples that go through the network in the same pass; the outputs for them are
    `out.extra`. `after(batch)` runs after each step, `done()` after the last. `private` steps clip each sample's
    gradient of `base` + `term`, which is then a mean over the samples, and add noise.
    """

    term: Loss | None = None
    gradient: Callable[[Tensor], Tensor] | None = None
    inputs: Callable[[Batch], Tensor] | None = None
    after: Callable[[Batch], None] | None = None
    done: Callable[[], None] | None = None
    modules: tuple[nn.Module, ...] = ()
    base: Loss = cross_entropy
    private: PrivateSteps | None = None

    def seen(self, batch: Batch) -> Tensor:
        """What goes through the network in a step."""
        return torch.cat([batch.x, self.inputs(batch)]) if self.inputs else batch.x

    def loss(self, batch: Batch, out: Outputs) -> Tensor:
        """The loss of a step, from the outputs for what it has seen."""
        if self.inputs:
            out = out.split(len(batch.y))
        loss = self.base(batch, out)
        return loss + self.term(batch, out) if self.term else loss

    def __add__(self, other: Objective) -> Objective:
        """Both at once: the objectives of a client side and a server side."""
        if cross_entropy not in (self.base, other.base):
            raise SettingError("both methods replace the cross-entropy; they cannot be combined")
        term, inputs = _composed_terms(self, other)
        return Objective(
            term=term,
            gradient=_summed(self.gradient, other.gradient),
            inputs=inputs,
            after=_chained(self.after, other.after),
            done=_chained(self.done, other.done),
            modules=(*self.modules, *other.modules),
            base=other.base if self.base is cross_entropy else self.base,
            private=self.private or other.private,
        )


def _composed_terms(a: Objective, b: Objective) -> tuple[Loss | None, Callable[[Batch], Tensor] | None]:
    """Terms and further inputs of two objectives; each term sees the outputs for its own inputs."""
    if not (a.inputs and b.inputs):
        return _summed(a.term, b.term), a.inputs or b.inputs
    own = 0  # how many of the further inputs of this step are a's
    a_inputs, b_inputs = a.inputs, b.inputs

    def inputs(batch: Batch) -> Tensor:
        nonlocal own
        first, second = a_inputs(batch), b_inputs(batch)
        own = len(first)
        return torch.cat([first, second])

    def term(batch: Batch, out: Outputs) -> Tensor:
        assert out.extra is not None
        parts = out.extra.split(own)
        total = torch.zeros(())
        if a.term:
            total = total + a.term(batch, replace(out, extra=replace(parts, extra=None)))
        if b.term:
            total = total + b.term(batch, replace(out, extra=parts.extra))
        return total

    return term, inputs


def _summed(f: Callable[P, Tensor] | None, g: Callable[P, Tensor] | None) -> Callable[P, Tensor] | None:
    if f is None or g is None:
        return f or g
    first, second = f, g

    def both(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        return first(*args, **kwargs) + second(*args, **kwargs)

    return both


def _chained(f: Callable[P, None] | None, g: Callable[P, None] | None) -> Callable[P, None] | None:
    if f is None or g is None:
        return f or g
    first, second = f, g

    def both(*args: P.args, **kwargs: P.kwargs) -> None:
        first(*args, **kwargs)
        second(*args, **kwargs)

    return both


@dataclass(frozen=True)
class Fit:
    """What local training came to."""

    steps: int
    loss: float  # mean over the steps


def fit(
    net: FlatNet,
    data: Samples,
    objective: Objective,
    local: LocalTraining,
    *,
    lr: float,
    order: torch.Generator,
    augment: Augmentation | None = None,
    changes: torch.Generator | None = None,
    statistics: bool = True,
) -> Fit:
    """Train the network in place on a client's data; without `statistics`, BatchNorm uses those it has."""
    module = classifier(net)
    module.train()
    params = [*net.params, *(p for m in objective.modules for p in m.parameters())]
    weights = net.vector[: net.trainable]
    addend = torch.empty_like(weights) if objective.gradient else None
    addend_parts = net.split(addend) if addend is not None else []
    normed = [layer for m in (module, *objective.modules) for layer in norms(m)]
    exempt = exempt_from_decay(local, module, *objective.modules)
    decayed = [p for p in params if p not in exempt] if exempt else []
    private = objective.private

    def loss(batch: Batch) -> Tensor:
        if not len(batch.y):  # a private step that drew nobody
            return torch.stack([0 * p.sum() for p in params]).sum()
        use_statistics(normed, of_batch=statistics and len(batch.y) > 1)
        if augment and changes:
            batch.x = augment(batch.x, changes)
        return objective.loss(batch, outputs(module, objective.seen(batch)))

    def complete() -> None:
        if private:
            private.privatise(net.params, local.batch_size)
        if objective.gradient and addend is not None:
            with torch.no_grad():
                addend.copy_(objective.gradient(weights))
                for p, part in zip(net.params, addend_parts, strict=True):
                    p.grad = part if p.grad is None else p.grad.add_(part)
        if local.clip:
            nn.utils.clip_grad_norm_(params, local.clip)
        for p in decayed:
            if p.grad is not None:
                p.grad.add_(p.detach(), alpha=local.weight_decay)

    drawn: Iterator[Batch]
    if private:
        drawn = (gathered(data, local, ids) for ids in private.choices(len(data), local))
    else:
        drawn = batches(data, local, order, no_single=bool(normed))
    with private.watched(module) if private else nullcontext():
        steps, total = take_steps(
            drawn,
            make_optimizer(params, replace(local, weight_decay=0.0) if exempt else local, lr),
            loss=loss,
            complete=complete,
            after=objective.after,
            cosine_over=steps_of(len(data), local) if local.cosine else 0,
        )
    if objective.done:
        objective.done()
    return Fit(steps, float(total) / max(1, steps))


def take_steps(
    steps: Iterable[S],
    optimizer: Optimizer,
    *,
    loss: Callable[[S], Tensor],
    complete: Callable[[], None],
    after: Callable[[S], None] | None,
    cosine_over: int = 0,
) -> tuple[int, Tensor]:
    """Descend the loss of each step: how many there were, and the sum of their losses.

    A step may be one client's batch or those of several, whose losses are then a vector. `complete` gives gradients
    what does not come from the loss; `cosine_over`: so many steps let the rate fall to 0 along a cosine.
    """
    count, total, lr = 0, torch.zeros(()), optimizer.lr
    for step in steps:
        losses = loss(step)
        if cosine_over:
            optimizer.lr = lr * (1 + math.cos(math.pi * count / cosine_over)) / 2
        optimizer.clear()
        (losses.sum() if losses.dim() else losses).backward()
        complete()
        optimizer.step()
        if after:
            after(step)
        total = total + losses.detach()
        count += 1
    return count, total


def use_statistics(layers: Iterable[nn.Module], *, of_batch: bool) -> None:
    """BatchNorm by the batch, or by what it has: the statistics of a client's only sample are no statistics."""
    for layer in layers:
        layer.train(of_batch)


def make_optimizer(params: Sequence[Tensor], local: LocalTraining, lr: float, *, fused: bool = True) -> Optimizer:
    """A fresh optimiser. Its fused kernels save a Python loop over the parameters in every step."""
    if local.optimizer == "adam":
        return Adam(params, lr, weight_decay=local.weight_decay, fused=fused)
    return SGD(params, lr, momentum=local.momentum, weight_decay=local.weight_decay, fused=fused)


def exempt_from_decay(local: LocalTraining, *modules: nn.Module) -> set[nn.Parameter]:
    """What weight decay leaves out; if there is any, decay is added to the gradients of the others before a step."""
    if local.decay_norms or not local.weight_decay:
        return set()
    return set().union(*map(norm_parameters, modules))


def steps_of(n: int, local: LocalTraining) -> int:
    """How many steps local training on n samples takes, about: a lone last sample may join the batch before."""
    return local.epochs * (local.steps_per_epoch or -(-n // local.batch_size))


def batches(data: Samples, local: LocalTraining, order: torch.Generator, *, no_single: bool = False) -> Iterator[Batch]:
    """Shuffled batches of all local epochs.

    An epoch is one pass, its last batch smaller where need be. With `steps_per_epoch` every client makes the same
    number of steps instead: it goes round its data, in full batches unless it has not even one. `no_single` joins
    a last batch of one sample to the one before, since BatchNorm cannot train on one.
    """
    n, size = len(data), local.batch_size
    equal = local.steps_per_epoch > 0
    usable = n - n % size if equal and n >= size else n
    sizes = [size] * (usable // size) + [usable % size] * (usable % size > 0)
    if no_single and len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [size + 1]
    steps_left = local.epochs * (local.steps_per_epoch or len(sizes))
    while steps_left > 0 and n:
        for ids in torch.split(torch.randperm(n, generator=order)[:usable], sizes):
            yield gathered(data, local, ids)
            steps_left -= 1
            if not steps_left:
                return


def gathered(data: Samples, local: LocalTraining, ids: Tensor) -> Batch:
    """The batch of these samples."""
    y = data.y[ids]
    weight = to_current_device(torch.tensor(local.class_weight))[y] if local.class_weight else None
    return Batch(data.x(ids), y, ids, weight)
