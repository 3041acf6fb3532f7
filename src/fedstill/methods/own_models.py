"""For methods whose clients keep models of their own, and the server has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedstill.methods.base import Networks, Server
from fedstill.methods.fedavg import FedAvg
from fedstill.train.client import Client


@dataclass(frozen=True)
class OwnModels(FedAvg):
    """A client goes on from the weights that it keeps in its state; its first are those that the seed gives.

    What crosses, and that an uplink keeps the weights, is the method's to say.
    """

    client_keys: ClassVar[tuple[str, ...]] = ("model",)

    @property
    def global_model(self) -> bool:
        return False

    @property
    def networks(self) -> Networks:
        return "any"

    def receive(self, client: Client) -> None:
        client.flat.load(client.state.get("model", client.task.initial))

    def models(self, server: Server) -> dict[str, Tensor]:
        return {}

    def own_model(self, state: dict[str, Any], kept: dict[str, Any]) -> Tensor | None:
        return state.get("model")
