"""FedDyn: Acar et al., "Federated learning based on dynamic regularization", 2021."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from fedstill.aggregate.mean import weighted_mean
from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.methods.base import Server, Uplink
from fedstill.methods.fedavg import FedAvg
from fedstill.train.client import Client
from fedstill.train.loop import Objective


@dataclass(frozen=True)
class FedDyn(FedAvg):
    """Each client's objective is bent so that its optimum becomes the common one."""

    name: ClassVar[str] = "feddyn"
    paper: ClassVar[str] = "Acar et al. 2021"
    sums_only: ClassVar[bool] = True
    server_keys: ClassVar[tuple[str, ...]] = ("h", "mean")
    client_keys: ClassVar[tuple[str, ...]] = ("h",)

    alpha: Annotated[float, Gt(0), Search("log:1e-3..0.1"), "strength of the dynamic regulariser"] = 0.01

    def start(self, server: Server) -> None:
        server.state["h"] = torch.zeros(server.task.trainable, dtype=torch.float64)  # (1/K) sum of all clients' h_k

    def objective(self, client: Client) -> Objective:
        w_t = client.down["model"][: client.flat.trainable]
        pull = client.state.get("h", torch.zeros_like(w_t)) - w_t
        # the gradient of alpha <h_k, w> + (alpha/2) ||w - w_t||^2
        return Objective(gradient=lambda w: self.alpha * (w + pull))

    def uplink(self, client: Client) -> Message:
        up = super().uplink(client)
        moved = (up["model"] - client.down["model"])[: client.flat.trainable]
        client.state["h"] = client.state.get("h", torch.zeros_like(moved)) + moved
        return up

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        h, trainable = server.state["h"], server.task.trainable
        w_t = server.model[:trainable]

        def moved() -> Iterator[tuple[Tensor, float]]:
            for up in uplinks:
                h.add_(up["model"][:trainable].double() - w_t, alpha=1 / server.clients)
                yield up["model"], 1

        mean = weighted_mean(moved())
        server.state["mean"] = mean
        server.model = mean.clone()
        server.model[:trainable] = (mean[:trainable].double() + h).to(mean.dtype)

    def models(self, server: Server) -> dict[str, Tensor]:
        return {"model": server.model, "mean of the active clients": server.state.get("mean", server.model)}
