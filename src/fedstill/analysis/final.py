"""The model that a run ended with, looked at more closely."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.building.config import Config, is_object
from fedstill.core import seeds
from fedstill.core.arrays import IntArray
from fedstill.core.errors import SettingError
from fedstill.core.tree import read_tensors
from fedstill.core.weights import FlatNet
from fedstill.metrics.confusion import confusion_matrix
from fedstill.models.base import Wrapped
from fedstill.running import files
from fedstill.running.directory import RunDirectory
from fedstill.running.inputs import prepare_again
from fedstill.running.machine import one_thread
from fedstill.running.places import check_result
from fedstill.train.evaluate import mean_loss, predict, require_features
from fedstill.train.task import Samples, Task

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm


class FinalModel:
    """What model.safetensors holds, with the data it was tested on; objects of your own must be given again."""

    def __init__(self, path: Path, **own: Any) -> None:
        directory = RunDirectory.open(path, lock=False)
        config = directory.config(replaced=own)
        refuse_objects(path, config, own)
        if not (path / files.MODEL).is_file():
            raise SettingError(f"{path} has no model: the run has not ended, or its method has no global model")
        setup = prepare_again(directory, config, **own)
        self.task: Task = setup.task
        self.classes = setup.federation.dataset.classes
        self._test = setup.federation.dataset.test
        if not len(self._test.y):
            raise SettingError(f"{path}: its data have no test set")
        self.weights = read_weights(path, self.task)

    def samples(self, count: int = 0) -> Samples:
        """All test samples, or so many of them: the same for every run on these data."""
        index = torch.arange(len(self._test.y))
        if count and count < len(index):
            index = torch.randperm(len(index), generator=seeds.torch_rng(0, "samples of a figure"))[:count]
        return Samples(self._test.x, self._test.y, index, self.task.dataset.normalise)

    def confusion(self) -> IntArray:
        """True classes by predicted ones, on the test set."""
        samples = self.samples()
        with one_thread():
            predicted = predict(self.task, self.weights, samples).logits.argmax(1)
        return confusion_matrix(samples.y.numpy(), predicted.numpy(), self.task.classes)

    def features(self, samples: Samples) -> Tensor:
        """Penultimate features, (samples, width)."""
        require_features(self.task, "this figure")
        with one_thread():
            return predict(self.task, self.weights, samples).features

    def losses_around(self, samples: Samples, steps: Sequence[float], dimensions: int) -> Iterator[float]:
        """The loss at every combination of steps along random filter-normalised directions, the last one fastest."""
        net = self.task.nets.get("student")
        directions = [
            filter_normalised(net, self.weights, seeds.torch_rng(0, "direction", i)) for i in range(dimensions)
        ]
        with one_thread():
            for place in product(steps, repeat=dimensions):
                moved = sum((step * d for step, d in zip(place, directions, strict=True)), self.weights)
                yield mean_loss(self.task, moved, samples)


def refuse_objects(path: Path, config: Config, own: dict[str, Any]) -> None:
    """Refuse a run with objects that its directory only names, unless they are given."""
    for name in ("method", "data", "model"):
        if is_object(getattr(config, name)) and own.get(name) is None:
            raise SettingError(
                f"{path} was run from Python with a {name} of your own, {getattr(config, name)}, which is not in the "
                "directory; only figures of what is in it can be drawn"
            )


def read_weights(path: Path, task: Task) -> Tensor:
    """model.safetensors as the vector that the task's networks load."""
    net = task.build()
    module = net.module.module if isinstance(net.module, Wrapped) else net.module
    check_result(path, files.MODEL)
    tensors = read_tensors(path / files.MODEL)
    try:
        missing, _ = module.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise SettingError(f"{path}/model.safetensors is not a model of its config.toml: {error}") from error
    if lacking := [name for name in missing if task.buffers == "average" or not name.endswith(_STATISTICS)]:
        raise SettingError(f"{path}/model.safetensors is not a model of its config.toml: it lacks {lacking[0]}")
    return net.read()


def filter_normalised(net: FlatNet, weights: Tensor, rng: torch.Generator) -> Tensor:
    """A random direction, each filter of which is as long as the model's (Li et al. 2018, Sec. 4).

    Biases and normalisation layers stay as they are.
    """
    direction = torch.zeros_like(weights)
    for entry in net.entries:
        if not entry.trainable or len(entry.shape) < 2:
            continue
        filters = entry.view(weights).flatten(1)
        noise = torch.randn(filters.shape, generator=rng, dtype=weights.dtype)
        noise *= filters.norm(dim=1, keepdim=True) / noise.norm(dim=1, keepdim=True)
        entry.view(direction).copy_(noise.view(entry.shape))
    return direction


def distances(path: Path) -> dict[int, float]:
    """The squared distance of the global model of each round that was kept to the final one; BatchNorm's statistics
    do not count."""
    directory = RunDirectory.open(path, lock=False)
    saved, final = directory.saved_models(), path / files.MODEL
    if not saved:
        raise SettingError(f"{path} has no models of past rounds; run it with --set save_models=1")
    if not final.is_file():
        raise SettingError(f"{path} has no final model yet; continue it with 'fedstill resume {path}'")
    check_result(path, final.name)
    end = read_tensors(final)
    found = {}
    for round_, file in saved.items():
        state = read_tensors(file)
        names = [name for name in end if not name.endswith(_STATISTICS)]
        found[round_] = sum(float((state[n].double() - end[n].double()).square().sum()) for n in names)
    return found
