"""Steps of training that are differentially private for every sample: DP-SGD (Abadi et al., 2016).

Opacus gives the gradient of each sample; here each is shortened to a norm and noise is added to their sum. A step's
samples are drawn by chance, each on its own, and the sum is divided by the number that is expected.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedstill.core.device import to_current_device
from fedstill.core.errors import SettingError
from fedstill.privacy.noise import gaussian, uniform

if TYPE_CHECKING:
    from fedstill.train.task import LocalTraining


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class PrivateSteps:
    """How the steps of one client are made private; without generators, by the system's secure randomness."""

    noise: float  # standard deviation on the sum, in clips
    clip: float  # largest norm of a sample's gradient
    choice: torch.Generator | None  # of samples
    randomness: torch.Generator | None  # of noise

    def choices(self, n: int, local: LocalTraining) -> Iterator[Tensor]:
        """The samples of every step, by their places among n."""
        for _ in range(step_count(n, local)):
            yield torch.nonzero(uniform(n, self.choice) < sampled(n, local)).flatten()

    @contextmanager
    def watched(self, module: nn.Module) -> Iterator[None]:
        """Let every parameter get the gradient of each sample."""
        grad_sample = opacus("grad_sample")
        in_place = [layer for layer in module.modules() if getattr(layer, "inplace", False)]
        for layer in in_place:  # what they overwrite is looked at afterwards
            layer.inplace = False  # type: ignore[assignment]
        # Opacus reads the inputs of convolutions as if they lay in the ordinary order.
        convolutions = [layer for layer in module.modules() if isinstance(layer, _CONVOLUTIONS)]
        ordered = [layer.register_forward_pre_hook(_in_order) for layer in convolutions]
        watching = grad_sample.GradSampleModule(module, loss_reduction="mean", strict=False)
        try:
            with warnings.catch_warnings():  # samples need no gradients
                warnings.filterwarnings("ignore", "Full backward hook is firing")
                yield
        finally:
            watching.to_standard_module()
            for hook in ordered:
                hook.remove()
            for layer in in_place:
                layer.inplace = True  # type: ignore[assignment]

    @torch.no_grad()
    def privatise(self, params: Sequence[nn.Parameter], expected: int) -> None:
        """Put the noisy mean of the clipped gradients in place of the mean that was computed."""
        each = [getattr(p, "grad_sample", None) for p in params]
        known = [g.flatten(1) for g in each if g is not None]
        factors = torch.ones(0)
        if known:  # else the step has no sample
            norms = torch.stack([g.norm(dim=1) for g in known]).norm(dim=0)
            factors = (self.clip / norms.clamp(min=1e-12)).clamp(max=1)
        for p, g in zip(params, each, strict=True):
            noise = to_current_device(gaussian(p.numel(), self.randomness)).view(p.shape).to(p.dtype)
            total = self.noise * self.clip * noise
            if g is not None:
                total += torch.einsum("n,n...->...", factors, g)
                p.grad_sample = None  # type: ignore[attr-defined]
            p.grad = torch.empty_like(p).copy_(total.div_(expected))  # laid out as the weights are


def _in_order(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in inputs)


def sampled(n: int, local: LocalTraining) -> float:
    """How likely each of n samples is in a step."""
    return min(1.0, local.batch_size / n)


def step_count(n: int, local: LocalTraining) -> int:
    """How many steps a round has, whatever is drawn."""
    return local.epochs * (local.steps_per_epoch or -(-n // local.batch_size))


@cache
def opacus(module: str) -> ModuleType:
    """A module of Opacus; or what to install."""
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        return importlib.import_module(f"opacus.{module}")
    except ImportError as error:
        raise SettingError("dp-sgd needs a package: pip install 'fedstill[privacy]'") from error
    finally:  # it sets up logging for the whole program
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
