"""FedNova: Wang et al., "Tackling the objective inconsistency problem …", 2020."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstill.aggregate.mean import RunningMean, relax
from fedstill.core.errors import SettingError
from fedstill.core.tree import Message
from fedstill.methods.base import Part, Server, Uplink, Wire
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.kinds import Kind
from fedstill.train.client import Client
from fedstill.train.task import Task


@dataclass(frozen=True)
class FedNova(FedAvg):
    """Updates are divided by the number of local steps that made them, so that no client counts for its steps."""

    name: ClassVar[str] = "fednova"
    paper: ClassVar[str] = "Wang et al. 2020"
    extra_information: ClassVar[str] = "its number of local steps"

    def check(self, task: Task) -> None:
        if task.local.optimizer != "sgd":
            raise SettingError("fednova knows how to normalise sgd steps only; set optimizer=sgd")

    @property
    def beyond_sums(self) -> str:
        return "fednova divides every update by the client's own number of steps"

    def wire(self, task: Task) -> Wire:
        plain = super().wire(task)
        steps = Part((), "normalised number of steps", torch.float64, defence="none", kind=Kind.STEPS)
        return Wire(plain.down, plain.up | {"a": steps})

    def uplink(self, client: Client) -> Message:
        assert client.trained is not None
        a = normalised_steps(client.trained.steps, client.task.local.momentum)
        return super().uplink(client) | {"a": torch.tensor(a, dtype=torch.float64)}

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        """w_t - (sum_k p_k a_k) sum_k p_k d_k with d_k = (w_t - w_k)/a_k and p_k = n_k/n.

        That is a step of rho from w_t towards the mean of the w_k weighted by n_k/a_k, where rho is the product of
        the means of a_k and of 1/a_k. Only ratios of the a_k matter: taken to the first, equal steps give exactly
        FedAvg.
        """
        mean, n, sum_a, first = RunningMean(), 0, 0.0, None
        for up in uplinks:
            first = first or float(up["a"])
            a = float(up["a"]) / first
            mean.add(up["model"], up.samples / a)
            n += up.samples
            sum_a += up.samples * a
        server.model = relax(server.model, mean.result(), (sum_a / n) * (mean.total / n), server.task.trainable)


def normalised_steps(tau: int, rho: float) -> float:
    """a_k: what tau steps of momentum rho come to; tau itself without momentum.

    >>> normalised_steps(5, 0.0), normalised_steps(1, 0.9)
    (5.0, 1.0)
    """
    return float((tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho))
