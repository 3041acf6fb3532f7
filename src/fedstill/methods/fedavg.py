"""FedAvg: McMahan et al., 2017."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedstill.aggregate.mean import weighted_mean
from fedstill.core.tree import Message
from fedstill.methods.base import Method, Part, Server, Uplink, Wire
from fedstill.methods.kinds import Kind
from fedstill.train.client import Client
from fedstill.train.loop import Objective
from fedstill.train.task import Task


@dataclass(frozen=True)
class FedAvg(Method):
    """Train on local data, average the weights by sample counts."""

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al. 2017"
    sums_only: ClassVar[bool] = True

    def wire(self, task: Task) -> Wire:
        weights = Part((task.size,), "weights", task.dtype, defence="any", kind=Kind.WEIGHTS)
        return Wire(down={"model": weights}, up={"model": weights})

    def downlink(self, server: Server) -> Message:
        return {"model": server.model}

    def objective(self, client: Client) -> Objective:
        return Objective()

    def uplink(self, client: Client) -> Message:
        return {"model": client.weights}

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        server.model = weighted_mean((up["model"], up.samples) for up in uplinks)
