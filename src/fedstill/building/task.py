"""What server and clients agree on: the network, the shape of the data, how clients train."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedstill.building.config import Config
from fedstill.building.data import check_tokens, proxy_samples
from fedstill.core import custom
from fedstill.core.errors import FedstillError, SettingError
from fedstill.data import augment
from fedstill.data.dataset import Dataset
from fedstill.data.federation import Federation
from fedstill.methods.base import Method
from fedstill.models import as_classifier, build
from fedstill.models.base import Classifier
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
        clip=config.clip,
        steps_per_epoch=steps,
    )


def network_maker(config: Config, dataset: Dataset, method: Method, model: Network | None) -> Callable[[], Classifier]:
    """A function that builds the network the method trains."""
    classes, shape = len(dataset.classes), dataset.input_shape
    if isinstance(model, nn.Module):
        module = model
        return lambda: method.network(as_classifier(_complete(_copied(module), dataset)))
    if model is not None:
        make = model
        return lambda: method.network(as_classifier(_complete(make(), dataset)))
    if custom.is_reference(config.model):
        reference = config.model
        return lambda: method.network(as_classifier(_complete(_custom_network(reference, shape, classes), dataset)))
    vocabulary = dataset.vocabulary
    return lambda: method.network(build(config.model, shape, classes, vocabulary=vocabulary, **config.model_options))


def _custom_network(reference: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """What a user's function makes of the shape of a sample and the number of classes."""
    network = custom.call(reference, shape, classes)
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


def _complete(module: nn.Module, dataset: Dataset) -> nn.Module:
    """The network with the parameters of its lazy layers, whose shapes and numbers come with the first sample."""
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        training = module.training
        module.eval()  # a pass that leaves running statistics alone
        try:
            with torch.no_grad():
                module(dataset.normalise(dataset.train.x[:1]))
        except Exception as error:
            size = "x".join(map(str, dataset.input_shape))
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
