"""Local training: what each client can do alone, and the base of methods whose clients keep their models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedstill.core.tree import Message
from fedstill.methods.base import Server, Uplink, Wire
from fedstill.methods.own_models import OwnModels
from fedstill.train.client import Client
from fedstill.train.task import Task


@dataclass(frozen=True)
class Local(OwnModels):
    """Every client trains alone and sends nothing: the lower bound of what federated learning should give.

    A client goes on in each of its rounds from its own last weights; the first are those of its network that every
    run with the seed starts from.
    """

    name: ClassVar[str] = "local"
    paper: ClassVar[str] = ""

    def wire(self, task: Task) -> Wire:
        return Wire({}, {})

    def downlink(self, server: Server) -> Message:
        return {}

    def uplink(self, client: Client) -> Message:
        client.state["model"] = client.flat.read()
        return {}

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        for _ in uplinks:
            pass
