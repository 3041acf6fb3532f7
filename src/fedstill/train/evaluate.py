"""Outputs, losses and predictions of a network, in one loop over samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedstill.core.device import to_current_device
from fedstill.core.errors import SettingError
from fedstill.core.weights import FlatNet
from fedstill.models.base import Classifier
from fedstill.train.task import Samples, Task, classifier

EVAL_BATCH = 64  # larger ones leave the cache: ResNet-8 runs a third slower at 250
_SCORED_AT_ONCE = 1000


@dataclass(frozen=True)
class Outputs:
    """Outputs of a network for a batch, and for the further samples that an objective sent along with it."""

    logits: Tensor
    features: Tensor
    extra: Outputs | None = None

    def split(self, size: int) -> Outputs:
        """The first `size` rows, with the others as `extra`."""
        extra = Outputs(self.logits[size:], self.features[size:])
        return Outputs(self.logits[:size], self.features[:size], extra)


def outputs(module: Classifier, x: Tensor) -> Outputs:
    """Logits and penultimate features in one pass."""
    found, features = _pass(module, module.both, x)
    return Outputs(found, features)


def logits(module: Classifier, x: Tensor) -> Tensor:
    """Logits alone."""
    (found,) = _pass(module, lambda x: (module(x),), x)
    return found


def _pass(module: Classifier, through: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    """A pass at the network's precision; losses are computed in float32 whatever that is."""
    if module.precision is None:
        return through(x)
    with torch.autocast(x.device.type, module.precision):
        found = through(x)
    return tuple(part.float() if part.dtype == module.precision else part for part in found)


@torch.no_grad()
def require_features(task: Task, who: str) -> None:
    """Refuse a network that does not show its penultimate features, for a method that works on them."""
    net = classifier(task.nets.get("student")).eval()
    if outputs(net, task.dataset.normalise(to_current_device(task.dataset.train.x[:2]))).features.shape[1] == 0:
        raise SettingError(
            f"{who} works on the network's penultimate features, and this one shows none: it must end in a Linear "
            "layer, or derive from fedstill.Classifier"
        )


def split_for_evaluation(x: Tensor) -> Iterator[Tensor]:
    """Samples in the batches in which a run evaluates them, which matters to BatchNorm by the batch."""
    for start, stop in evaluation_bounds(len(x)):
        part = x[start:stop]
        yield from part.tensor_split(_batches(len(part)))


def evaluation_bounds(n: int) -> list[tuple[int, int]]:
    """Nearly equal parts of n samples, each of which is evaluated by one worker."""
    bounds = np.linspace(0, n, -(-n // _SCORED_AT_ONCE) + 1).astype(int).tolist()
    return list(pairwise(bounds))


def _batches(n: int) -> int:
    return max(1, -(-n // EVAL_BATCH))  # of nearly equal size: BatchNorm by the batch cannot do with one sample


def load_for_evaluation(task: Task, vector: Tensor, role: str = "teacher") -> FlatNet:
    """A network with these weights, in evaluation mode."""
    net = task.nets.get(role)
    net.load(vector)
    net.module.eval()
    task.use_batch_statistics(net.module)
    return net


@torch.no_grad()
def predict(task: Task, vector: Tensor, samples: Samples, role: str = "teacher") -> Outputs:
    """Outputs of the network with these weights for all samples."""
    module = classifier(load_for_evaluation(task, vector, role))
    parts = [outputs(module, x) for x in samples.parts(EVAL_BATCH)]
    return Outputs(torch.cat([p.logits for p in parts]), torch.cat([p.features for p in parts]))


def mean_loss(task: Task, vector: Tensor, samples: Samples) -> float:
    """Mean cross-entropy of the network with these weights on all samples."""
    return float(F.cross_entropy(predict(task, vector, samples).logits.double(), samples.y))


@torch.no_grad()
def score(task: Task, vector: Tensor, x: Tensor, y: Tensor, *, probabilities: bool = False) -> dict[str, Tensor]:
    """Loss and predicted class of each stored sample under the network with these weights; probabilities if asked."""
    net = load_for_evaluation(task, vector)
    losses, predicted, likely = [], [], []
    parts = _batches(len(y))
    for xs, ys in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
        found = logits(classifier(net), task.dataset.normalise(to_current_device(xs)))
        losses.append(F.cross_entropy(found, to_current_device(ys), reduction="none"))
        predicted.append(found.argmax(1))
        likely += [found.softmax(1)] if probabilities else []
    scores = {"loss": torch.cat(losses), "predicted": torch.cat(predicted)}
    return scores | {"probabilities": torch.cat(likely)} if probabilities else scores
