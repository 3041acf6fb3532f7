"""A modifier changes one answer of any method and leaves the others to it: `fedprox+t1`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from fedstill.core.errors import SettingError
from fedstill.core.tree import Message
from fedstill.methods.base import Method, Needs, Server, Uplink, Wire
from fedstill.methods.fedavg import FedAvg
from fedstill.models.base import Classifier
from fedstill.train.client import Client
from fedstill.train.loop import Objective
from fedstill.train.task import Task


@dataclass(frozen=True)
class Modifier(Method):
    """Passes every question on to the method it modifies."""

    rule: ClassVar[bool] = False  # whether it defends the methods inside it against malicious clients

    inner: Method = field(default_factory=FedAvg, kw_only=True)

    def needs(self) -> Needs:
        return self.inner.needs() | super().needs()

    @property
    def global_model(self) -> bool:
        return self.inner.global_model

    @property
    def averages_all_clients(self) -> bool:
        return self.inner.averages_all_clients

    def check(self, task: Task) -> None:
        if any(type(part) is type(self) for part in self.inner.parts()):
            raise SettingError(f"{self.name} can be joined once")
        rules = [part.name for part in self.inner.parts() if isinstance(part, Modifier) and part.rule]
        if rules and not self.rule:
            last = f"leave {self.name} out" if self.concludes else f"put {rules[-1]} last"
            raise SettingError(f"{self.name} after {rules[-1]} uses what clients send as it comes, undefended; {last}")
        self.inner.check(task)

    def parts(self) -> list[Method]:
        return [*self.inner.parts(), self]

    def network(self, net: Classifier) -> Classifier:
        return self.inner.network(net)

    def wire(self, task: Task) -> Wire:
        return self.inner.wire(task)

    def start(self, server: Server) -> None:
        self.inner.start(server)

    def begin(self, server: Server) -> None:
        self.inner.begin(server)

    def downlink(self, server: Server) -> Message:
        return self.inner.downlink(server)

    def objective(self, client: Client) -> Objective:
        return self.inner.objective(client)

    def uplink(self, client: Client) -> Message:
        return self.inner.uplink(client)

    def receive(self, client: Client) -> None:
        self.inner.receive(client)

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        self.inner.aggregate(server, uplinks)

    def models(self, server: Server) -> dict[str, Tensor]:
        return self.inner.models(server)

    def regional(self) -> Method:
        return replace(self, inner=self.inner.regional())

    def merge(self, server: Server, models: Sequence[Tensor]) -> None:
        self.inner.merge(server, models)

    @property
    def concludes(self) -> bool:
        return self.inner.concludes

    def last_words(self, client: Client) -> Message:
        return self.inner.last_words(client)

    def conclude(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        self.inner.conclude(server, uplinks)

    def pictures(self, task: Task, state: dict[str, Any], count: int) -> Tensor | None:
        return self.inner.pictures(task, state, count)
