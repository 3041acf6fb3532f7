"""Local training: what each client can do alone, and the base of methods whose clients keep their models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedstill.core.tree import Message
from fedstill.methods.base import Networks, Server, Uplink, Wire
from fedstill.methods.fedavg import FedAvg
from fedstill.train.client import Client
from fedstill.train.task import Task


@dataclass(frozen=True)
class Local(FedAvg):
    """Every client trains alone and sends nothing: the lower bound of what federated learning should give.

    A client goes on in each of its rounds from its own last weights; the first are those of its network that every
    run with the seed starts from.
    """

    name: ClassVar[str] = "local"
    paper: ClassVar[str] = ""
    client_keys: ClassVar[tuple[str, ...]] = ("model",)

    @property
    def global_model(self) -> bool:
        return False

    @property
    def networks(self) -> Networks:
        return "any"

    def wire(self, task: Task) -> Wire:
        return Wire({}, {})

    def downlink(self, server: Server) -> Message:
        return {}

    def receive(self, client: Client) -> None:
        client.flat.load(client.state.get("model", client.task.initial))

    def uplink(self, client: Client) -> Message:
        client.state["model"] = client.flat.read()
        return {}

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        for _ in uplinks:
            pass

    def models(self, server: Server) -> dict[str, Tensor]:
        return {}

    def own_model(self, state: dict[str, Any], kept: dict[str, Any]) -> Tensor | None:
        return state.get("model")
