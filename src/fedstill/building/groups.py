"""Clients with different networks: a group is the clients that have the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedstill.building.config import Config, GroupSettings, is_object
from fedstill.building.task import Network, with_network
from fedstill.core import seeds
from fedstill.core.arrays import IntArray
from fedstill.core.errors import SettingError, unknown
from fedstill.data.federation import Federation
from fedstill.methods import registry
from fedstill.methods.base import NETWORKS, Method
from fedstill.train.task import Task


@dataclass(frozen=True)
class Group:
    """The clients that have one network."""

    number: int
    name: str
    clients: IntArray
    task: Task  # the run's, with the group's network
    config: Config  # the run's, as if its network were everybody's


def group_config(config: Config, own: GroupSettings) -> Config:
    """The settings of a group alone."""
    options = config.model_options | own.model_options
    return config.model_copy(update={"model": own.model, "model_options": options, "models": [], "group": []})


def first_network(config: Config) -> Config:
    """The settings with the first group's network, which stands for the others where one will do."""
    groups = config.each_group()
    return group_config(config, groups[0]) if groups else config


def make_groups(
    config: Config,
    task: Task,
    federation: Federation,
    method: Method,
    models: Sequence[str | Network] = (),
    dealt: Sequence[IntArray] | None = None,
) -> tuple[Group, ...]:
    """The groups of a run, or none if all clients have one network, which is then the task's.

    `dealt`: the clients of each, where that is known already. Groups that have the same network share it, each under
    its own name.
    """
    tables = config.each_group()
    names = [own.name or own.model for own in tables]
    if len(set(names)) < len(names):
        raise SettingError(f"group: each needs a name of its own, and they are {', '.join(names)}")
    if models and len(models) != len(config.models):
        raise SettingError(f"models: the run has {', '.join(config.models)}, and {len(models)} are given")
    objects = {name: net for name, net in zip(config.models, models, strict=False) if not isinstance(net, str)}
    groups: list[Group] = []
    parts = deal(config, federation.client_names) if dealt is None else dealt
    for number, (own, clients) in enumerate(zip(tables, parts, strict=True)):
        settings = group_config(config, own)
        if is_object(own.model) and own.model not in objects:
            raise SettingError(f"models: {own.model} is a network of your own; give it again")
        same = (
            g.task for g in groups if (g.config.model, g.config.model_options) == (own.model, settings.model_options)
        )
        inside = next(same, None) or (
            with_network(task, settings, federation, method, objects.get(own.model)) if number else task
        )
        groups.append(Group(number, names[number], clients, inside.named(names[number]), settings))
    for group in groups:
        group.task.beside(tuple(other.task for other in groups if other is not group))
    if groups:
        _check(method, groups)
    return tuple(groups)


def own_network(config: Config, client: int, clients: int) -> Config:
    """The settings with the network of one client, where groups name clients by their numbers."""
    tables = config.each_group()
    dealt = deal(config, tuple(map(str, range(clients)))) if tables else []
    return next((group_config(config, own) for own, part in zip(tables, dealt, strict=True) if client in part), config)


def numbered(config: Config, names: Sequence[str]) -> Config:
    """The settings with groups that name clients by their numbers."""
    groups = [
        own.model_copy(update={"clients": _numbers(own.clients, names)}) if isinstance(own.clients, list) else own
        for own in config.group
    ]
    return config.model_copy(update={"group": groups})


def deal(config: Config, names: Sequence[str]) -> list[IntArray]:
    """The clients of each group, by their numbers."""
    if config.same_network:
        return []
    if config.models:
        dealt = np.array([config.models[k % len(config.models)] for k in range(len(names))], dtype=object)
        found = [np.flatnonzero(dealt == model) for model in dict.fromkeys(config.models)]
    else:
        found = _assigned(config, names)
    for own, clients in zip(config.each_group(), found, strict=True):
        if not len(clients):
            raise SettingError(f"group {own.name or own.model!r} has none of the {len(names)} clients")
    return found


def _assigned(config: Config, names: Sequence[str]) -> list[IntArray]:
    """The clients that [[group]] tables name; of the others, as many as each asks for, drawn at random."""
    tables, total = config.group, len(names)
    named = [_numbers(own.clients, names) if isinstance(own.clients, list) else None for own in tables]
    taken = [k for clients in named if clients is not None for k in clients]
    if len(set(taken)) < len(taken):
        raise SettingError(f"group: client {max(taken, key=taken.count)} is named twice")
    left = np.setdiff1d(np.arange(total), taken)
    counts = [own.clients or round(own.share * total) if isinstance(own.clients, int) else 0 for own in tables]
    open_ones = [i for i, own in enumerate(tables) if named[i] is None and not own.clients and not own.share]
    rest = len(left) - sum(counts)
    for place, i in enumerate(open_ones):
        counts[i] = rest // len(open_ones) + (place < rest % len(open_ones))
    if rest < 0 or sum(counts) != len(left):
        raise SettingError(
            f"group: {len(taken)} clients are named and groups ask for {sum(counts)} more, and there are {total} in "
            "all; a group without clients and share takes those that are left"
        )
    drawn = seeds.numpy_rng(config.seed, "groups").permutation(left)
    parts = iter(np.split(drawn, np.cumsum(counts)[:-1]))
    return [np.sort(part) if own is None else np.array(sorted(own)) for own, part in zip(named, parts, strict=True)]


def _numbers(listed: Sequence[int | str], names: Sequence[str]) -> list[int]:
    found = []
    for client in listed:
        if isinstance(client, str) and client not in names:
            raise unknown("client in group", client, names)
        if isinstance(client, int) and not client < len(names):
            raise SettingError(f"group: clients are 0 to {len(names) - 1}, and {client} is named")
        found.append(names.index(client) if isinstance(client, str) else client)
    return found


def _check(method: Method, groups: Sequence[Group]) -> None:
    """Refuse a method that cannot work with these networks."""
    names, needed = "+".join(part.name for part in registry.parts_of(method)), method.networks
    if len(groups) > 1 and needed == "one":
        raise SettingError(
            f"{names} needs one network for all clients, and there are {len(groups)}; with any networks work local, "
            "fedproto, fedtgp, feddistill, fml, fedkd and lg-fedavg, with one for each group fedavg, feddf and dafkd"
        )
    widths = {group.name: group.task.feature_dim for group in groups} if needed in ("features", "head") else {}
    if len(set(widths.values())) > 1:
        raise SettingError(
            f"{names} needs {NETWORKS[needed]}, and there are {', '.join(f'{n} with {d}' for n, d in widths.items())}; "
            f"model_options.feature_size={min(widths.values())} gives all networks features of one size"
        )
    for group in groups:
        method.check(group.task)
    if needed not in ("one", "group", "teach"):
        wires = [method.wire(group.task) for group in groups]
        if any(wire != wires[0] for wire in wires):
            raise SettingError(
                f"{names} says that it needs {NETWORKS[needed]}, and what it sends depends on the network"
            )
