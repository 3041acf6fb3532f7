"""T1, FedKF's active-inactive model aggregation, for any method: Zhou et al., 2022, Sec. 4.1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor

from fedstill.aggregate.latest import CacheInit, LatestMean
from fedstill.core.errors import SettingError
from fedstill.methods.base import Server, Uplink
from fedstill.methods.modifier import Modifier
from fedstill.train.task import Task

_STATE = "t1"


@dataclass(frozen=True)
class T1(Modifier):
    """Evaluate and return the mean of every client's latest model; training is the method's own, unchanged."""

    name: ClassVar[str] = "t1"
    paper: ClassVar[str] = "Zhou et al. 2022"
    server_keys: ClassVar[tuple[str, ...]] = ("t1",)

    cache_init: Annotated[CacheInit, "clients never active: left out (seen), or with the initial weights (w0)"] = "seen"

    def check(self, task: Task) -> None:
        super().check(task)
        if self.inner.averages_all_clients:
            raise SettingError("t1 is in this method already")
        if "model" not in self.inner.wire(task).up:
            raise SettingError("t1 averages the clients' models, and with this method they do not send any")

    @property
    def beyond_sums(self) -> str:
        return "t1 keeps every client's latest model, to take it out of the mean again"

    @property
    def averages_all_clients(self) -> bool:
        return True

    def start(self, server: Server) -> None:
        super().start(server)
        server.state[_STATE] = LatestMean.start(server.store, server.model, server.sizes, self.cache_init).state()

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        latest = LatestMean.restore(server.store, server.state[_STATE])
        super().aggregate(server, latest.updated(uplinks, server.round, server.sizes))
        server.state[_STATE] = latest.state()

    def own_model(self, state: dict[str, Any], kept: dict[str, Any]) -> Tensor | None:
        return kept.get("model")

    def models(self, server: Server) -> dict[str, Tensor]:
        if _STATE not in server.state:  # between regions: each has a mean of its own
            return super().models(server)
        latest = LatestMean.restore(server.store, server.state[_STATE])
        (_, model), *others = super().models(server).items()
        return {"with T1": latest.mean(model), "without T1": model, **dict(others)}
