"""FedProx: Li et al., 2020."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge

from fedstill.core.space import Search
from fedstill.methods.fedavg import FedAvg
from fedstill.train.client import Client
from fedstill.train.loop import Objective


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose clients stay near the global model: cross-entropy + (mu/2) ||w - w_t||^2."""

    name: ClassVar[str] = "fedprox"
    paper: ClassVar[str] = "Li et al. 2020"

    mu: Annotated[float, Ge(0), Search("log:1e-3..1"), "weight of the proximal term"] = 0.01

    def objective(self, client: Client) -> Objective:
        w_t = client.down["model"][: client.flat.trainable]
        return Objective(gradient=lambda w: self.mu * (w - w_t))
