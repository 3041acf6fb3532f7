"""From settings to the objects of a run. Whatever can be wrong is found here, before the first round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from fedstill.attacks.attack import Attack, plan
from fedstill.building.config import Config
from fedstill.building.data import data_notes, divide, encoder_of, load_data, standardise, wanted_size
from fedstill.building.groups import Group, first_network, group_config, make_groups
from fedstill.building.privacy import check_noise, check_one_sum, with_noise
from fedstill.building.task import Network, make_task
from fedstill.building.topology import (
    Hierarchy,
    arrange,
    check_attendance,
    check_labels,
    cohort_size,
    regional_method,
    with_data,
)
from fedstill.core.errors import SettingError
from fedstill.data.dataset import Dataset, sized
from fedstill.data.federation import Federation
from fedstill.data.validation import hold_out
from fedstill.methods import registry
from fedstill.methods.base import Method
from fedstill.methods.summed import check_sums_only, masked_bytes
from fedstill.metrics.records import Majority
from fedstill.metrics.scores import Function, Metric
from fedstill.metrics.scores import find as find_metrics
from fedstill.metrics.shown import always_predicting, is_imbalanced
from fedstill.models.pretrained import has_learnt
from fedstill.train.task import Samples, Task


@dataclass(frozen=True)
class Setup:
    """A run ready to start."""

    config: Config
    task: Task
    federation: Federation
    method: Method
    hierarchy: Hierarchy
    attack: Attack
    metrics: tuple[Metric, ...] = ()  # beyond those that every evaluation has
    warnings: tuple[str, ...] = ()  # what whoever started the run should know
    groups: tuple[Group, ...] = ()  # where clients have different networks

    @cached_property
    def group_of(self) -> list[int]:
        """The number of each client's group; 0 where all have one network."""
        found = np.zeros(self.federation.clients, np.int64)
        for group in self.groups:
            found[group.clients] = group.number
        return [int(number) for number in found]

    @property
    def client_groups(self) -> list[str]:
        """The name of each client's group; nothing where all have one network."""
        return [self.groups[number].name for number in self.group_of] if self.groups else []

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
    models: Sequence[str | Network] = (),
    method: Method | None = None,
    proxy: Dataset | None = None,
    metrics: Sequence[Function] = (),
    elsewhere: bool = False,
    tokenizer: str = "",
) -> Setup:
    """Load, divide and build what the configuration names; what is given as an object is taken as it is.

    Clients that are `elsewhere` may still come: it is no error that a region has nobody with data. A `tokenizer`, as
    JSON, stands in for the one that is named.
    """
    method = registry.make(config.method, config.hyper) if method is None else registry.checked(method)
    notes: list[str] = []
    if data is None and not config.data and not elsewhere:
        raise SettingError("data is empty: name a dataset or a file (--data)")
    found = load_data(config, tokenizer) if data is None else data
    if isinstance(found, Federation):
        config = config.model_copy(update={"clients": found.clients, "partition": "natural"})
        found = replace(found, dataset=sized(found.dataset, wanted_size(config)))
    else:
        found = sized(found, wanted_size(config))
    federation = hold_out(divide(config, found), config.validation, config.seed)
    if not elsewhere:
        federation, notes = standardise(config, federation)
    if models and not isinstance(models[0], str):
        model = models[0]
    task = make_task(first_network(config), federation, method, model, proxy)
    groups = make_groups(config, task, federation, method, models)
    (method if config.flat else method.regional()).check(task)
    check_labels(config.method, method, federation)
    hierarchy = arrange(config, task, federation, method, groups)
    check_attendance(hierarchy, config, federation, elsewhere=elsewhere)
    check_one_sum(config, hierarchy)
    hierarchy = with_noise(hierarchy, config, federation, elsewhere=elsewhere)
    if config.secure_aggregation:
        check_secure(config, [(region.task, region.method) for region in hierarchy.regions])
    attack = attack_of(config, federation, hierarchy)
    notes += [
        *_warnings(config, task, federation, hierarchy),
        *(() if elsewhere else _classes_without_samples(federation)),
    ]
    return Setup(
        config,
        task,
        federation,
        method,
        hierarchy,
        attack,
        find_metrics(config.metrics, metrics, task.classes),
        warnings=tuple(notes),
        groups=groups,
    )


def _warnings(config: Config, task: Task, federation: Federation, hierarchy: Hierarchy) -> Iterator[str]:
    yield from data_notes(config, task.dataset)
    if (largest := majority(federation)) is not None and is_imbalanced(largest):
        yield f"the test classes are imbalanced: {always_predicting(largest)}; look at balanced accuracy"
    for region in () if hierarchy.grouped else hierarchy.regions:
        members, able = len(region.clients), len(with_data(federation.sizes, region.clients))
        if able > 1 and cohort_size(able, members, region.participation) == 1:
            where = "" if hierarchy.flat else f" of {region.name}"
            yield (
                f"participation = {region.participation:g}: of the {members} clients{where} one trains in a round, so "
                "that nothing is averaged; a larger participation lets more train"
            )
    if task.proxy is not None and config.proxy != "pool" and len(task.proxy) < config.proxy_size:
        yield f"proxy_size = {config.proxy_size}: the proxy data have {len(task.proxy)} samples, and all are used"
    if (encoder := encoder_of(config)) and not has_learnt(encoder):
        yield f"{encoder} has no weights: the encoder begins with random ones, as if it had learnt nothing"


def majority(federation: Federation) -> Majority | None:
    """The largest class of the test samples that are known here, and its share."""
    dataset = federation.dataset
    whole = len(dataset.test.y) > 0
    labels = dataset.test.y.numpy() if whole else federation.test_split.y.numpy()[federation.test_index]
    if not len(labels):
        return None
    counts = np.bincount(labels, minlength=len(dataset.classes))
    largest = int(counts.argmax())
    tests = "test set" if whole else "clients' tests"
    return {"name": dataset.classes[largest], "share": float(counts[largest] / len(labels)), "tests": tests}


def _classes_without_samples(federation: Federation) -> Iterator[str]:
    """Classes of which no client has a training sample."""
    dataset = federation.dataset
    counts = np.bincount(dataset.train.y.numpy()[federation.train_index], minlength=len(dataset.classes))
    if lacking := [name for name, count in zip(dataset.classes, counts, strict=True) if not count]:
        more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        yield f"no client has training samples of class {', '.join(lacking[:5])}{more}: it cannot be learnt"


def attack_of(config: Config, federation: Federation, hierarchy: Hierarchy) -> Attack:
    """Who is malicious, and how; refused where the attack has nothing to change."""
    attack = plan(
        config.attack,
        config.attackers,
        federation.sizes,
        len(federation.dataset.classes),
        target=config.attack_class,
        scale=config.attack_scale,
        seed=config.seed,
    )
    for region in hierarchy.regions if attack.on_updates else ():
        wire = region.method.wire(region.task)
        if "model" not in wire.up or "model" not in wire.down:
            raise SettingError(f"attack = {config.attack!r} changes clients' models, and this method sends none")
        if attack.kind == "buffers" and region.task.size == region.task.trainable:
            raise SettingError("attack = 'buffers' changes BatchNorm's statistics, and this network has none")
        if attack.kind == "extra" and wire.up.keys() <= {"model"}:
            raise SettingError("attack = 'extra' changes what clients send beside the model, and this is nothing")
    return attack


def check_secure(config: Config, trained: Sequence[tuple[Task, Method]]) -> None:
    """Refuse what cannot work where the server sees sums of updates alone."""
    for task, method in trained:
        check_noise(config, method)
        check_sums_only(method, task)
    if config.flat and config.max_update_ratio not in (0, Config.model_fields["max_update_ratio"].default):
        raise SettingError(
            f"max_update_ratio = {config.max_update_ratio:g}: with secure_aggregation no single update can be "
            "measured; leave it out"
        )


def check_clients(config: Config, federation: Federation, names: Sequence[str]) -> None:
    """Refuse what cannot work with clients of these names, whatever their data: networks, regions, too few of them.

    So a server knows before its sites come.
    """
    method, sample = registry.make(config.method, config.hyper), np.arange(len(names) + 1)
    one_each = replace(federation, train_index=sample[:-1] * 0, train_offsets=sample, test_offsets=sample * 0)
    clients = replace(one_each, names=tuple(names), validation=None)
    task = make_task(first_network(config), clients, method)
    hierarchy = arrange(config, task, clients, method, make_groups(config, task, clients, method))
    check_attendance(hierarchy, config, clients, elsewhere=True)
    check_one_sum(config, hierarchy)


def largest_answer(config: Config, federation: Federation) -> int:
    """Bytes of the tensors that a client sends at most."""
    method = registry.make(config.method, config.hyper)
    networks = [group_config(config, own) for own in config.each_group()] or [config]
    inside = [regional_method(own, config, method) for own in config.each_region()] or [method]
    tasks = [make_task(network, federation, method) for network in networks]
    wires = [each.wire(task) for task in tasks for each in (method, *inside)]
    if config.secure_aggregation:
        return max(masked_bytes(wire.up) for wire in wires)
    return max(sum(part.nbytes for part in parts.values()) for wire in wires for parts in (wire.up, wire.last))
