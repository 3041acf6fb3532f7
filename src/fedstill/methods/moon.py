"""MOON: Li, He and Song, "Model-contrastive federated learning", 2021."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor
from torch.nn import functional as F

from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.methods.fedavg import FedAvg
from fedstill.models.base import Classifier
from fedstill.models.heads import Projected
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch, Objective


@dataclass(frozen=True)
class MOON(FedAvg):
    """A client's features are drawn to the global model's and away from its own previous ones."""

    name: ClassVar[str] = "moon"
    paper: ClassVar[str] = "Li et al. 2021"
    revision: ClassVar[int] = 1  # since features of LeNet-5 are its penultimate layer
    changes_model: ClassVar[bool] = True
    client_keys: ClassVar[tuple[str, ...]] = ("previous",)

    mu: Annotated[float, Ge(0), Search("log:0.1..10"), "weight of the contrast"] = 5.0
    tau: Annotated[float, Gt(0), Search("0.1..1"), "temperature of the contrast"] = 0.5
    buffer: Annotated[int, Ge(1), "how many of its previous models a client keeps"] = 1

    def network(self, net: Classifier) -> Classifier:
        return Projected(net)

    def objective(self, client: Client) -> Objective:
        previous = client.state.get("previous", [])
        if self.mu == 0 or not previous:  # with the global model in place of a previous one the loss is constant
            return Objective()
        teachers = [client.teacher(w) for w in (client.down["model"], *previous)]

        def term(batch: Batch, out: Outputs) -> Tensor:
            return self.mu * self.contrast(out.features, [teacher(batch).features for teacher in teachers])

        return Objective(term=term)

    def contrast(self, z: Tensor, others: list[Tensor]) -> Tensor:
        """-log of the share of the first of the others, the global model's features, in similarity to z."""
        similarity = torch.stack([F.cosine_similarity(z, other) for other in others], dim=1) / self.tau
        return F.cross_entropy(similarity, torch.zeros(len(z), dtype=torch.long))

    def uplink(self, client: Client) -> Message:
        up = super().uplink(client)
        client.state["previous"] = [up["model"], *client.state.get("previous", [])][: self.buffer]
        return up

    def own_model(self, state: dict[str, Any], kept: dict[str, Any]) -> Tensor | None:
        return next(iter(state.get("previous", [])), None)
