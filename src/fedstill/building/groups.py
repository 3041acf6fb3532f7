"""Clients with different networks: a group is the clients that have the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedstill.building.config import Config, GroupSettings, is_object
from fedstill.building.members import clients_of_groups
from fedstill.building.task import Network, with_network
from fedstill.core.arrays import IntArray
from fedstill.core.errors import SettingError
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
    """The settings of a group alone, in which no other group's network is named."""
    own_network = {"model": own.model, "model_options": config.model_options | own.model_options}
    regions = [region.model_copy(update={"model": "", "model_options": {}}) for region in config.region]
    return config.model_copy(update=own_network | {"models": [], "group": [], "region": regions})


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
) -> tuple[Group, ...]:
    """The groups of a run, or none if all clients have one network, which is then the task's.

    Groups that have the same network share it, each under its own name.
    """
    tables, names = config.each_group(), group_names(config)
    if len(set(names)) < len(names):
        raise SettingError(f"group: each needs a name of its own, and they are {', '.join(names)}")
    if models and len(models) != len(config.models):
        raise SettingError(f"models: the run has {', '.join(config.models)}, and {len(models)} are given")
    objects = {name: net for name, net in zip(config.models, models, strict=False) if not isinstance(net, str)}
    groups: list[Group] = []
    members = clients_of_groups(config, federation.client_names)
    for number, (own, clients) in enumerate(zip(tables, members, strict=True)):
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


def group_names(config: Config) -> list[str]:
    """What records and tables call the groups."""
    return [own.name or own.model for own in config.each_group()]


def own_group(config: Config, client: int, clients: int) -> int | None:
    """The number of a client's group, where groups name clients by their numbers; None: all have one network."""
    dealt = clients_of_groups(config, tuple(map(str, range(clients))))
    return next((number for number, members in enumerate(dealt) if client in members), None)


def as_member(task: Task, config: Config, number: int, federation: Federation, method: Method) -> Task:
    """The task of a client with its own network, as that of its group: it knows other groups' if the method asks."""
    tables, names = config.each_group(), group_names(config)
    own = task.named(names[number])
    if method.needs_other_networks:
        others = [i for i in range(len(tables)) if i != number]
        tasks = {i: with_network(task, group_config(config, tables[i]), federation, method) for i in others}
        own.beside(tuple(tasks[i].named(names[i]) for i in others))
    return own


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
    if needed != "one" and not method.model_per_group:
        wires = [method.wire(group.task) for group in groups]
        if any(wire != wires[0] for wire in wires):
            raise SettingError(
                f"{names} says that it needs {NETWORKS[needed]}, and what it sends depends on the network"
            )
