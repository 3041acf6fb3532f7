"""SCAFFOLD: Karimireddy et al., "Stochastic controlled averaging for federated learning", 2020."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt

from fedstill.aggregate.mean import RunningMean, relax
from fedstill.core.errors import SettingError
from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.methods.base import Part, Server, Uplink, Wire
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.kinds import Kind
from fedstill.train.client import Client
from fedstill.train.loop import Batch, Objective
from fedstill.train.task import Task


@dataclass(frozen=True)
class SCAFFOLD(FedAvg):
    """Control variates c and c_k correct each client's drift away from the others."""

    name: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "Karimireddy et al. 2020"
    sums_only: ClassVar[bool] = True
    extra_information: ClassVar[str] = "its control variate (a mean gradient)"
    server_keys: ClassVar[tuple[str, ...]] = ("c",)
    client_keys: ClassVar[tuple[str, ...]] = ("c",)

    server_lr: Annotated[float, Gt(0), Search("0.3..1"), "how far the server goes towards the clients' mean"] = 1.0

    def check(self, task: Task) -> None:
        if task.local.optimizer != "sgd" or task.local.momentum:
            raise SettingError("scaffold corrects plain sgd steps; set optimizer=sgd and momentum=0")

    def wire(self, task: Task) -> Wire:
        plain = super().wire(task)
        length = 1 / (task.local.lr * task.local.epochs)  # of a gradient, if an update of one step an epoch has 1
        control = Part(
            (task.trainable,), "control variate", task.dtype, defence="any", kind=Kind.GRADIENTS, scale=length
        )
        return Wire(plain.down | {"c": control}, plain.up | {"c_change": control})

    def start(self, server: Server) -> None:
        server.state["c"] = torch.zeros(server.task.trainable, dtype=server.task.dtype)

    def downlink(self, server: Server) -> Message:
        return super().downlink(server) | {"c": server.state["c"]}

    def objective(self, client: Client) -> Objective:
        c = client.down["c"]
        correction = client.lr * (c - client.state.get("c", torch.zeros_like(c)))
        w = client.flat.vector[: len(c)]

        def after(batch: Batch) -> None:  # a step of its own, so that clipping does not touch it
            w.sub_(correction)

        return Objective(after=after)

    def uplink(self, client: Client) -> Message:
        up, c = super().uplink(client), client.down["c"]
        assert client.trained is not None
        drift = (client.down["model"] - up["model"])[: len(c)]
        old = client.state.get("c", torch.zeros_like(c))
        client.state["c"] = old - c + drift / (client.trained.steps * client.lr)
        return up | {"c_change": client.state["c"] - old}

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        models, change = RunningMean(), torch.zeros_like(server.state["c"], dtype=torch.float64)
        for up in uplinks:
            models.add(up["model"], 1)
            change += up["c_change"]
        server.model = relax(server.model, models.result(), self.server_lr, server.task.trainable)
        server.state["c"] = (server.state["c"] + change / server.clients).to(server.state["c"].dtype)
