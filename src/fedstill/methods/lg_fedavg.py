"""LG-FedAvg: Liang et al., "Think locally, act globally: federated learning with local and global representations"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstill.aggregate.mean import weighted_mean
from fedstill.core.errors import SettingError
from fedstill.core.tree import Message
from fedstill.core.weights import FlatNet
from fedstill.methods.base import Networks, Part, Server, Uplink, Wire
from fedstill.methods.kinds import Kind
from fedstill.methods.local import Local
from fedstill.train.client import Client
from fedstill.train.task import Task, classifier


@dataclass(frozen=True)
class LGFedAvg(Local):
    """Clients keep what computes the features; only the head that follows is averaged, by sample counts.

    The global part is the network's head (its last layer), the local one all before it. A round begins with the
    averaged head on the client's own features; the first head is that of the first group's network. The paper starts
    from clients that were trained by FedAvg for some rounds, which networks that differ cannot be: here they start
    anew.
    """

    name: ClassVar[str] = "lg-fedavg"
    paper: ClassVar[str] = "Liang et al. 2020"
    extra_information: ClassVar[str] = "the weights of its last layer"
    server_keys: ClassVar[tuple[str, ...]] = ("head",)

    @property
    def networks(self) -> Networks:
        return "head"

    def check(self, task: Task) -> None:
        if not len(head_places(task.nets.get("student"))):
            raise SettingError("lg-fedavg averages the network's head, and this one's has no weights")

    def wire(self, task: Task) -> Wire:
        count = len(head_places(task.nets.get("student")))
        head = Part((count,), "weights of the head", task.dtype, defence="any", kind=Kind.WEIGHTS)
        return Wire({"head": head}, {"head": head})

    def start(self, server: Server) -> None:
        server.state["head"] = server.task.initial[head_places(server.task.nets.get("student"))]

    def downlink(self, server: Server) -> Message:
        return {"head": server.state["head"]}

    def receive(self, client: Client) -> None:
        own = client.state.get("model", client.task.initial)
        client.flat.load(with_head(client.flat, own, client.down["head"]))

    def uplink(self, client: Client) -> Message:
        super().uplink(client)
        return {"head": client.state["model"][head_places(client.flat)]}

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        server.state["head"] = weighted_mean((up["head"], up.samples) for up in uplinks)


def head_places(net: FlatNet) -> Tensor:
    """Where the trainable weights of a network's head lie in its vector."""
    of_head = {id(p) for p in classifier(net).head.parameters()}
    entries = [entry for entry in net.entries if entry.trainable]
    found = [
        torch.arange(entry.start, entry.stop)
        for entry, parameter in zip(entries, net.params, strict=True)
        if id(parameter) in of_head
    ]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.long)


def with_head(net: FlatNet, weights: Tensor, head: Tensor) -> Tensor:
    """The weights of a network with another head."""
    changed = weights.clone()
    changed[head_places(net)] = head
    return changed
