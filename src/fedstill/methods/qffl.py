"""q-FFL, solved by q-FedAvg: Li et al., "Fair resource allocation in federated learning", 2020."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge

from fedstill.aggregate.mean import RunningMean, relax
from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.methods.base import Part, Server, Uplink, Wire
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.kinds import Kind
from fedstill.train.client import Client
from fedstill.train.evaluate import mean_loss
from fedstill.train.loop import Objective
from fedstill.train.task import Task


@dataclass(frozen=True)
class QFFL(FedAvg):
    """Clients with a larger loss count more, by the power q."""

    name: ClassVar[str] = "qffl"
    paper: ClassVar[str] = "Li et al. 2020"
    extra_information: ClassVar[str] = "its loss (one number)"

    q: Annotated[float, Ge(0), Search("log:1e-5..1"), "how much a larger loss counts; 0: uniform average"] = 1e-4

    @property
    def beyond_sums(self) -> str:
        return "qffl weighs every update by the client's own loss"

    @property
    def beyond_steps(self) -> str:
        return "qffl also sends the loss of the samples"

    def wire(self, task: Task) -> Wire:
        plain = super().wire(task)
        loss = Part((), "loss before training", torch.float64, defence="none", kind=Kind.LOSS)
        return Wire(plain.down, plain.up | {"loss": loss})

    def objective(self, client: Client) -> Objective:
        # F_k(w_t) over all local training data, before the first step
        client.notes["loss"] = mean_loss(client.task, client.down["model"], client.data)
        return Objective()

    def uplink(self, client: Client) -> Message:
        return super().uplink(client) | {"loss": torch.tensor(client.notes["loss"], dtype=torch.float64)}

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        """w_t - sum_k u_k / sum_k h_k, with L = 1/lr.

        D_k = (w_t - w_k)/lr, u_k = F_k^q D_k, h_k = q F_k^(q-1) ||D_k||^2 + F_k^q/lr. Multiplied through by lr this
        is a step of rho from w_t towards the mean of the w_k weighted by F_k^q, and at q = 0 the plain mean itself.
        """
        lr, trainable = server.task.local.lr_at(server.round), server.task.trainable
        w_t = server.model[:trainable].double()
        mean, h = RunningMean(), 0.0
        for up in uplinks:
            loss = float(up["loss"]) + 1e-10
            distance = float((w_t - up["model"][:trainable]).square().sum())  # lr^2 ||D_k||^2
            mean.add(up["model"], loss**self.q)
            h += self.q * loss ** (self.q - 1) * distance / lr + loss**self.q
        server.model = relax(server.model, mean.result(), mean.total / h, trainable)
