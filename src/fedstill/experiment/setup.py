"""From settings to the objects of a run. Whatever can be wrong is found here, before the first round."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstill.core import custom
from fedstill.core.errors import FedstillError, SettingError
from fedstill.data import augment
from fedstill.data import load as load_dataset
from fedstill.data.dataset import Dataset, sized
from fedstill.data.federation import Federation, federate
from fedstill.data.proxy import balanced, check_stands_in, match_channels
from fedstill.experiment.config import Config, is_object
from fedstill.methods import registry
from fedstill.methods.base import Method
from fedstill.models import as_classifier, build, image_size
from fedstill.models.base import Classifier
from fedstill.train.evaluate import outputs
from fedstill.train.task import LocalTraining, Samples, Task, classifier

Network = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Setup:
    """A run ready to start."""

    config: Config
    task: Task
    federation: Federation
    method: Method

    def pool(self) -> Samples | None:
        """The samples that the server itself holds."""
        index = torch.from_numpy(self.federation.pool_index)
        dataset = self.federation.dataset
        return Samples(dataset.train.x, dataset.train.y, index, dataset.normalise) if len(index) else None


def prepare(
    config: Config,
    *,
    data: Dataset | Federation | None = None,
    model: Network | None = None,
    method: Method | None = None,
) -> Setup:
    """Load, divide and build what the configuration names; what is given as an object is taken as it is."""
    method = method or registry.make(config.method, config.hyper)
    if isinstance(data, Federation):
        federation = data
    else:
        federation = divide(config, load_data(config) if data is None else sized(data, wanted_size(config)))
    if config.augment and len(federation.dataset.shape) != 3:
        raise SettingError(f"augment = {config.augment!r}: only images can be augmented")
    task = Task(
        dataset=federation.dataset,
        make_network=network_maker(config, federation.dataset, method, model),
        local=local_training(config, federation),
        augment=augment.parse(config.augment),
        buffers=config.buffers,
        seed=config.seed,
        proxy=proxy_samples(config, federation),
    )
    _check_fit(task, config)
    method.check(task)
    if method.needs().server_labels and not len(federation.pool_index):
        raise SettingError(f"{config.method} needs labelled samples on the server: set pool, for example pool=0.1")
    return Setup(config, task, federation, method)


def load_data(config: Config) -> Dataset:
    """The dataset that the configuration names, images at the size that the model needs."""
    if custom.is_reference(config.data):
        made = custom.call(config.data)
        if not isinstance(made, Dataset):
            raise SettingError(
                f"{config.data} returns a {type(made).__name__}; it must return a fedstill.Dataset "
                "(fedstill.from_arrays makes one)"
            )
        return made
    return load_dataset(config.data, config.data_dir or None, wanted_size(config))


def wanted_size(config: Config) -> int:
    """The side that images should have: what is set, else what the model needs; 0: as they are."""
    own = custom.is_reference(config.model) or is_object(config.model)
    return config.image_size or (0 if own else image_size(config.model) or 0)


def divide(config: Config, dataset: Dataset) -> Federation:
    """The dataset divided among the clients."""
    # A partition ignores what only others use.
    settings: dict[str, Any] = {
        name: getattr(config, name) for name in ("shards_per_client", "size_sigma", "min_share", "ratio")
    }
    if config.min_size >= 0:
        settings["min_size"] = config.min_size
    return federate(
        dataset,
        clients=config.clients,
        partition=config.partition,
        seed=config.seed,
        alpha=config.alpha,
        test_fraction=config.test_fraction,
        pool=config.pool,
        imbalance_factor=config.imbalance_factor,
        fraction=config.fraction,
        samples_per_client=config.samples_per_client,
        local_test=config.local_test,
        **settings,
    )


def proxy_samples(config: Config, federation: Federation) -> Samples | None:
    """The unlabelled samples that the configuration names: of the server's pool, or of another dataset."""
    dataset = federation.dataset
    if not config.proxy:
        return None
    if config.proxy == "pool":
        if not len(federation.pool_index):
            raise SettingError("proxy = 'pool': the server has no pool; set pool, for example pool=0.1")
        index = torch.from_numpy(federation.pool_index)
        return Samples(dataset.train.x, torch.zeros_like(dataset.train.y), index, dataset.normalise)
    size = dataset.shape[-1] if len(dataset.shape) == 3 else 0
    other = load_dataset(config.proxy, config.data_dir or None, size)
    check_stands_in(other, dataset)
    index = balanced(other.train.y, config.proxy_size, config.seed)

    def prepare(x: Tensor) -> Tensor:
        return dataset.normalise(match_channels(x, dataset.shape[0]) if x.dim() == 4 else x)

    return Samples(other.train.x, torch.zeros_like(other.train.y), index, prepare)


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
    classes, shape = len(dataset.classes), tuple(dataset.shape)
    if isinstance(model, nn.Module):
        given = model
        return lambda: method.network(as_classifier(copy.deepcopy(given)))
    if model is not None:
        made = model
        return lambda: method.network(as_classifier(made()))
    if custom.is_reference(config.model):
        return lambda: method.network(as_classifier(_own_network(config.model, shape, classes)))
    return lambda: method.network(build(config.model, shape, classes, **config.model_options))


def _own_network(reference: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """What a user's function makes of the shape of a sample and the number of classes."""
    made = custom.call(reference, shape, classes)
    if not isinstance(made, nn.Module):
        raise SettingError(f"{reference} returns a {type(made).__name__}; it must return a torch.nn.Module")
    return made


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
        shape = "x".join(map(str, task.dataset.shape))
        reason = custom.summary(error)
        raise SettingError(f"model {config.model!r} does not take samples of {shape}: {reason}") from error
    if logits.shape != (len(x), task.classes):
        raise SettingError(
            f"model {config.model!r} gives outputs of shape {tuple(logits.shape)} for {len(x)} samples; "
            f"the data have {task.classes} classes, so it must give {(len(x), task.classes)}"
        )
