"""BatchNorm layers and their running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def norms(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The BatchNorm layers of a network."""
    return [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def norm_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The weights and biases of all normalisation layers of a network."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)
    layers = [layer for layer in module.modules() if isinstance(layer, kinds)]
    return {p for layer in layers for p in layer.parameters(recurse=False)}


def drop_statistics(module: nn.Module) -> None:
    """Let the BatchNorm layers of a network normalise by the batch for good."""
    for layer in norms(module):
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Let a network in training see samples without a trace in the running statistics of its BatchNorm layers."""
    layers = [layer for layer in norms(module) if layer.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
