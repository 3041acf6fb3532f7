"""A modifier changes one answer of any method and leaves the others to it: `fedprox+t1`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from fedstill.core.errors import SettingError
from fedstill.core.tree import Message
from fedstill.methods.base import Guarantee, Method, Needs, Networks, Server, Uplink, Wire
from fedstill.methods.fedavg import FedAvg
from fedstill.models.base import Classifier
from fedstill.train.client import Client
from fedstill.train.loop import Objective
from fedstill.train.task import Samples, Task


@dataclass(frozen=True)
class Modifier(Method):
    """Passes every question on to the method it modifies."""

    sums_only: ClassVar[bool] = True
    rule: ClassVar[bool] = False  # whether it defends the methods inside it against malicious clients
    outermost: ClassVar[bool] = False  # whether nothing may see what clients send before it does

    inner: Method = field(default_factory=FedAvg, kw_only=True)

    def needs(self) -> Needs:
        return self.inner.needs() | super().needs()

    @property
    def global_model(self) -> bool:
        return self.inner.global_model

    @property
    def networks(self) -> Networks:
        return "one" if self.has_final_exchange else self.inner.networks

    @property
    def model_per_group(self) -> bool:
        return not self.has_final_exchange and self.inner.model_per_group

    @property
    def needs_other_networks(self) -> bool:
        return self.inner.needs_other_networks

    @property
    def averages_all_clients(self) -> bool:
        return self.inner.averages_all_clients

    @property
    def fewest_clients(self) -> int:
        return self.inner.fewest_clients

    @property
    def beyond_sums(self) -> str:
        return self.inner.beyond_sums

    @property
    def beyond_steps(self) -> str:
        return self.inner.beyond_steps

    @property
    def guarantee(self) -> Guarantee | None:
        return self.inner.guarantee

    def check(self, task: Task) -> None:
        if any(type(part) is type(self) for part in self.inner.parts()):
            raise SettingError(f"{self.name} can be composed once")
        rules = [part.name for part in self.inner.parts() if isinstance(part, Modifier) and part.rule]
        if hidden := [p.name for p in self.inner.parts() if isinstance(p, Modifier) and p.outermost]:
            instead = "compose one" if self.outermost else f"put {self.name} before it"
            raise SettingError(f"{self.name} after {hidden[-1]} would use what clients send as it comes; {instead}")
        if rules and not (self.rule or self.outermost):
            last = f"leave {self.name} out" if self.has_final_exchange else f"put {rules[-1]} last"
            raise SettingError(f"{self.name} after {rules[-1]} uses what clients send as it comes, undefended; {last}")
        self.inner.check(task)
        refuse_collisions(self, task)

    def parts(self) -> list[Method]:
        return [*self.inner.parts(), self]

    def network(self, net: Classifier) -> Classifier:
        return self.inner.network(net)

    def wire(self, task: Task) -> Wire:
        return self.inner.wire(task)

    def start(self, server: Server) -> None:
        self.inner.start(server)
        if taken := sorted(server.state.keys() & set(self.server_keys)):
            raise SettingError(f"{self.name} keeps {taken[0]!r} in server.state, and so does the method before it")

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

    def across_groups(self, servers: Sequence[Server]) -> None:
        self.inner.across_groups(servers)

    def end(self, server: Server) -> None:
        self.inner.end(server)

    def models(self, server: Server) -> dict[str, Tensor]:
        return self.inner.models(server)

    def own_model(self, state: dict[str, Any], kept: dict[str, Any]) -> Tensor | None:
        return self.inner.own_model(state, kept)

    def regional(self) -> Method:
        return replace(self, inner=self.inner.regional())

    def merge(self, server: Server, models: Sequence[Tensor]) -> None:
        self.inner.merge(server, models)

    def merge_networks(self, servers: Sequence[Server], regions: Sequence[Uplink]) -> None:
        self.inner.merge_networks(servers, regions)

    @property
    def has_final_exchange(self) -> bool:
        return self.inner.has_final_exchange

    def final_uplink(self, client: Client) -> Message:
        return self.inner.final_uplink(client)

    def final_aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        self.inner.final_aggregate(server, uplinks)

    def pictures(self, task: Task, state: dict[str, Any], count: int) -> Tensor | None:
        return self.inner.pictures(task, state, count)

    def realness(self, task: Task, message: Message, samples: Samples) -> Tensor | None:
        return self.inner.realness(task, message, samples)


_FACTS = ("counts",)  # what any method may ask of a client under the same name, if it means the same


def refuse_collisions(method: Modifier, task: Task) -> None:
    """Refuse a composition in which two parts use one name for two things."""
    for part in method.inner.parts():
        for what, own, theirs in (
            ("the key {} of server.state", method.server_keys, part.server_keys),
            ("the key {} of client.state", method.client_keys, part.client_keys),
            ("the random stream {}", method.streams, part.streams),
        ):
            if both := sorted(set(own) & set(theirs)):
                raise SettingError(_refusal(method, part.name, what.format(repr(both[0]))))
    alone, inner, whole = replace(method, inner=FedAvg()).wire(task), method.inner.wire(task), method.wire(task)
    before = "+".join(part.name for part in method.inner.parts())
    for sent, known in ((alone.down, inner.down), (alone.up, inner.up), (alone.last, inner.last)):
        for name in sorted(sent.keys() & known.keys() - {"model"}):
            if name not in _FACTS or sent[name] != known[name]:
                raise SettingError(_refusal(method, before, f"{name!r} in their messages"))
    if lost := sorted(inner.last.keys() - whole.last.keys()):
        raise SettingError(f"{method.name} leaves {lost[0]!r} out of the final exchange, which {before} needs")


def _refusal(method: Method, other: str, what: str) -> str:
    return f"{other} and {method.name} cannot be composed: both use {what}, each for something of its own"
