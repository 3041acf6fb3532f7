"""SGD and Adam on PyTorch's own kernels.

The classes of `torch.optim` load PyTorch's compiler when the first of them is made, which costs every worker process
more than a second before it begins, and then check in each step what never changes here. The numbers are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedstill.core.tree import Tree


class Optimizer(ABC):
    """Moves parameters against their gradients; those without one stay."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float, fused: bool) -> None:
        self.params, self.lr, self.weight_decay, self.fused = list(params), lr, weight_decay, fused

    def clear(self) -> None:
        """Forget the gradients."""
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        places, params, gradients = [], [], []
        for i, p in enumerate(self.params):
            if p.grad is not None:
                places.append(i)
                params.append(p)
                gradients.append(p.grad)
        if places:
            self._move(places, params, gradients)

    @abstractmethod
    def _move(self, places: list[int], params: list[Tensor], gradients: list[Tensor]) -> None: ...


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum where it is set."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        fused: bool = True,
    ) -> None:
        super().__init__(params, lr, weight_decay, fused)
        self._momentum = momentum
        self._velocity: list[Tensor | None] = [None] * len(self.params)

    def _move(self, places: list[int], params: list[Tensor], gradients: list[Tensor]) -> None:
        if not self._momentum and not self.weight_decay:  # the same bits, in half the time
            torch._foreach_add_(params, gradients, alpha=-self.lr)
            return
        velocity = [self._velocity[i] for i in places]
        if self._momentum and any(v is not None for v in velocity):  # a parameter may get its first gradient late
            velocity = [torch.zeros_like(p) if v is None else v for p, v in zip(params, velocity, strict=True)]
        sgd(
            params, _laid_out(gradients, params), velocity, fused=self.fused, lr=self.lr, momentum=self._momentum,
            weight_decay=self.weight_decay, dampening=0.0, nesterov=False, maximize=False,
        )  # fmt: skip
        for i, v in zip(places, velocity, strict=True):
            self._velocity[i] = v


class Adam(Optimizer):
    """Adam, which can be kept and restored."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fused: bool = True,
    ) -> None:
        super().__init__(params, lr, weight_decay, fused)
        self._betas = betas
        self._memory: dict[int, dict[str, Tensor]] = {}  # of each parameter that has been moved

    def _move(self, places: list[int], params: list[Tensor], gradients: list[Tensor]) -> None:
        for i, p in zip(places, params, strict=True):
            if i not in self._memory:
                empty = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self._memory[i] = {"step": torch.zeros((), device=p.device), **empty}
        steps, means, squares = ([self._memory[i][name] for i in places] for name in ("step", "exp_avg", "exp_avg_sq"))
        adam(
            params, _laid_out(gradients, params), means, squares, [], steps, fused=self.fused, amsgrad=False,
            beta1=self._betas[0], beta2=self._betas[1], lr=self.lr, weight_decay=self.weight_decay, eps=1e-8,
            maximize=False,
        )  # fmt: skip

    def state(self) -> Tree:
        """What it remembers, as data to keep."""
        return {str(place): dict(memory) for place, memory in self._memory.items()}

    def restore(self, state: Tree) -> None:
        """Take back what `state` gave."""
        self._memory = {
            int(place): {name: _as_laid_out(value.clone(), self.params[int(place)]) for name, value in memory.items()}
            for place, memory in state.items()
        }


def descend(loss: Tensor, params: Sequence[Tensor], optimizer: Optimizer) -> None:
    """One step on these parameters; whatever else the loss depends on gets no gradient."""
    for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = grad
    optimizer.step()


def _laid_out(gradients: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """Gradients in the memory layout of their parameters, which fused kernels rely on without looking."""
    return [_as_laid_out(gradient, p) for gradient, p in zip(gradients, params, strict=True)]


def _as_laid_out(value: Tensor, like: Tensor) -> Tensor:
    if value.shape != like.shape or value.stride() == like.stride():
        return value
    return torch.empty_like(like).copy_(value)
