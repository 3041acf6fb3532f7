"""What server and clients agree on: the network, the shape of the data, how clients train."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedstill.building.config import Config
from fedstill.building.data import check_tokens, proxy_samples
from fedstill.core import custom
from fedstill.core.errors import DataError, FedstillError, SettingError, unknown
from fedstill.data import augment
from fedstill.data.dataset import Dataset
from fedstill.data.federation import Federation
from fedstill.methods.base import Method
from fedstill.models import as_classifier, build
from fedstill.models.base import Classifier
from fedstill.models.checks import whole
from fedstill.models.heads import Resized
from fedstill.train.evaluate import outputs
from fedstill.train.task import LocalTraining, Task, classifier
from fedstill.train.together import check_together

Network = nn.Module | Callable[[], nn.Module]


def make_task(
    config: Config, federation: Federation, method: Method, model: Network | None = None, proxy: Dataset | None = None
) -> Task:
    """What a server and its clients agree on."""
    if config.augment and len(federation.dataset.shape) != 3:
        raise SettingError(f"augment = {config.augment!r}: only images can be augmented")
    check_tokens(config, federation.dataset)
    if len(federation.dataset.classes) < 2:
        only = " ".join(federation.dataset.classes)
        raise DataError(f"all labels are {only!r}; two classes are the fewest to tell apart")
    task = Task(
        dataset=federation.dataset,
        make_network=network_maker(config, federation.dataset, method, model),
        local=local_training(config, federation),
        augment=augment.parse(config.augment),
        buffers=config.buffers,
        seed=config.seed,
        precision=config.precision,
        model=config.model,
        proxy=proxy_samples(config, federation, proxy),
    )
    _check_fit(task, config)
    if config.together > 1:
        check_together(task)
    return task


def with_network(
    task: Task, config: Config, federation: Federation, method: Method, model: Network | None = None
) -> Task:
    """The same task for clients that have another network."""
    make = network_maker(config, federation.dataset, method, model)
    other = replace(task, make_network=make, model=config.model)
    _check_fit(other, config)
    if config.together > 1:
        check_together(other)
    return other


def local_training(config: Config, federation: Federation) -> LocalTraining:
    """How clients train; `equal_steps` gives all of them the number an average client would need."""
    steps = 0
    if config.local_unit == "equal_steps":
        steps = max(1, int(np.sum(federation.sizes)) // (federation.clients * config.batch_size))
    return LocalTraining(
        epochs=config.epochs,
        batch_size=config.batch_size,
        optimizer=config.optimizer,
        lr=config.lr,
        lr_decay=config.lr_decay,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        decay_norms=config.decay_norms,
        clip=config.clip,
        steps_per_epoch=steps,
        class_weight=class_weights(config, federation),
    )


def class_weights(config: Config, federation: Federation) -> tuple[float, ...]:
    """How much a sample of each class counts; nothing if all count alike, or if no samples are known here."""
    classes = federation.dataset.classes
    if isinstance(config.class_weight, dict):
        if missing := [name for name in classes if name not in config.class_weight]:
            raise SettingError(f"class_weight: a number for {missing[0]!r} is missing; each class needs one")
        if extra := [name for name in config.class_weight if name not in classes]:
            raise unknown("class in class_weight", extra[0], classes)
        return tuple(config.class_weight[name] for name in classes)
    if not config.class_weight:
        return ()
    labels = federation.dataset.train.y.numpy()[federation.train_index]
    return balanced_weights(np.bincount(labels, minlength=len(classes)).tolist())


def balanced_weights(counts: Sequence[float]) -> tuple[float, ...]:
    """Weights with which all classes count alike, and samples 1 on average; 1 for a class without samples.

    >>> balanced_weights([90, 10])
    (0.5555555555555556, 5.0)
    """
    total, classes = sum(counts), sum(count > 0 for count in counts)
    return tuple(total / (classes * count) if count else 1.0 for count in counts) if total else ()


def network_maker(config: Config, dataset: Dataset, method: Method, model: Network | None) -> Callable[[], Classifier]:
    """A function that builds the network the method trains."""
    named: Network | str = config.model if model is None else model
    classes, shape, vocabulary = len(dataset.classes), dataset.input_shape, dataset.vocabulary
    return lambda: method.network(make_network(named, shape, classes, vocabulary, config.model_options))


def make_network(
    model: Network | str, shape: tuple[int, ...], classes: int, vocabulary: int, options: Mapping[str, Any]
) -> Classifier:
    """A network before any method changes it: by name, by `file.py:function`, or as an object, which is copied.

    The option `feature_size`, which all have, gives it penultimate features of that size.
    """
    if "feature_size" in options:
        size = whole("feature_size", options["feature_size"], 1)
        others = {name: value for name, value in options.items() if name != "feature_size"}
        return Resized(make_network(model, shape, classes, vocabulary, others), size, classes)
    if isinstance(model, nn.Module):
        return as_classifier(_complete(_copied(model), shape, vocabulary))
    if not isinstance(model, str):
        return as_classifier(_complete(model(), shape, vocabulary))
    if custom.is_own(model, "models"):
        return as_classifier(_complete(_custom_network(model, shape, classes), shape, vocabulary))
    return build(model, shape, classes, vocabulary=vocabulary, **options)


def _custom_network(reference: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """What a user's function makes of the shape of a sample and the number of classes."""
    network = custom.call(reference, shape, classes, kind="models")
    if not isinstance(network, nn.Module):
        raise SettingError(f"{reference} returns a {type(network).__name__}; it must return a torch.nn.Module")
    return network


def _copied(module: nn.Module) -> nn.Module:
    """A copy whose parameters are leaves too; those of a TorchScript module are so in a copy without gradients only."""
    try:
        with torch.no_grad():
            copied = copy.deepcopy(module)
    except (RuntimeError, ValueError) as error:  # tensors inside a graph; lazy buffers
        raise SettingError(
            "PyTorch cannot copy this model: give a function that makes it; and if it is made with "
            "torch.nn.utils.weight_norm, use torch.nn.utils.parametrizations.weight_norm instead"
        ) from error
    for parameter, original in zip(copied.parameters(), module.parameters(), strict=True):
        if parameter.requires_grad != original.requires_grad:
            parameter.requires_grad_(original.requires_grad)
    return copied


def _complete(module: nn.Module, shape: tuple[int, ...], vocabulary: int) -> nn.Module:
    """The network with the parameters of its lazy layers, whose shapes and numbers come with the first sample."""
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        training = module.training
        module.eval()  # a pass that leaves running statistics alone
        try:
            with torch.no_grad():
                module(torch.zeros(1, *shape, dtype=torch.int32 if vocabulary else torch.float32))
        except Exception as error:
            size = "x".join(map(str, shape))
            raise SettingError(
                f"the model's lazy layers do not take a sample of {size}: {custom.summary(error)}"
            ) from error
        module.train(training)
    return module


def _check_fit(task: Task, config: Config) -> None:
    """Try the network on two samples: it must take them and give one logit a class."""
    net = task.nets.get("student")
    net.module.eval()
    x = task.dataset.normalise(task.dataset.train.x[:2])
    try:
        with torch.no_grad():
            logits = outputs(classifier(net), x).logits
    except FedstillError:
        raise
    except Exception as error:
        shape = "x".join(map(str, task.dataset.input_shape))
        reason = custom.summary(error)
        raise SettingError(f"model {config.model!r} does not take samples of {shape}: {reason}") from error
    if logits.shape != (len(x), task.classes):
        raise SettingError(
            f"model {config.model!r} gives outputs of shape {tuple(logits.shape)} for {len(x)} samples; "
            f"the data have {task.classes} classes, so it must give {(len(x), task.classes)}"
        )
