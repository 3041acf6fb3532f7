"""What methods share that work on the server after the average: `fedgkd+feddf` is one of them on top of FedGKD."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt
from torch import Tensor

from fedstill.core.errors import SettingError
from fedstill.core.space import Search
from fedstill.distill.stage import distil
from fedstill.methods.base import Networks, Server, Uplink
from fedstill.methods.modifier import Modifier
from fedstill.train.loop import Loss
from fedstill.train.task import LocalTraining, Samples, Task


@dataclass(frozen=True)
class ServerSide(Modifier):
    """Let the inner method aggregate, then improve `server.model` with all uplinks at hand.

    On its own, the inner method is FedAvg.
    """

    teaches_groups: ClassVar[bool] = False  # where clients have different networks
    works_on: ClassVar[tuple[str, ...]] = ("model",)  # the part of an uplink that it needs; or one of several

    uniform: Annotated[bool, "average the clients' weights uniformly, not by sample counts"] = False

    @property
    def networks(self) -> Networks:
        inner = super().networks
        return "teach" if inner == "group" and self.teaches_groups else inner

    def check(self, task: Task) -> None:
        if self.needs_proxy_data and self.needs().proxy_data and task.proxy is None:
            raise SettingError(f"{self.name} needs proxy data on the server: set proxy to a dataset, or proxy=pool")
        super().check(task)
        if not set(self.works_on) & self.inner.wire(task).up.keys():
            raise SettingError(f"{self.name} needs the clients' models on the server, and here they do not send any")
        if self.inner.averages_all_clients:
            raise SettingError(
                f"{self.name} improves the average of the active clients, and the method before it returns the mean of "
                "all clients' models; put +t1 last, or leave it out"
            )

    @property
    def beyond_sums(self) -> str:
        return f"{self.name} works with every client's own model"

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        ensemble: list[Uplink] = []

        def collect() -> Iterator[Uplink]:
            for up in uplinks:
                ensemble.append(replace(up, task=server.task) if server.grouped else up)
                yield replace(up, samples=1) if self.uniform else up

        server.before = server.model
        super().aggregate(server, collect())
        if server.grouped and self.teaches_groups:
            server.ensembles[self.name] = ensemble
        else:
            self.improve(server, ensemble)

    def across_groups(self, servers: Sequence[Server]) -> None:
        super().across_groups(servers)
        active = [server for server in servers if self.name in server.ensembles]
        if uplinks := [up for server in active for up in server.ensembles.pop(self.name)]:
            self.improve_all(active, uplinks)

    def improve(self, server: Server, uplinks: list[Uplink]) -> None:
        """What the server does after the average."""
        self.improve_all([server], uplinks)

    def improve_all(self, servers: Sequence[Server], uplinks: list[Uplink]) -> None:
        """The same of a method that `teaches_groups`: with all clients as teachers, whatever their networks."""
        raise NotImplementedError

    def proxy(self, server: Server) -> Samples:
        """The unlabelled samples that `check` made sure of."""
        assert server.task.proxy is not None
        return server.task.proxy


@dataclass(frozen=True)
class Distilling(ServerSide):
    """A server side that trains the average further, on samples of the server's.

    How long is a setting of each method: `server_epochs`, or `server_steps`.
    """

    training: ClassVar[LocalTraining] = LocalTraining(optimizer="adam")  # the rest of it is set below
    order_stream: ClassVar[str] = "distillation"  # of the order of the samples

    server_lr: Annotated[float, Gt(0), Search("log:1e-4..1e-2"), "learning rate of the distillation (Adam)"] = 1e-3
    server_batch: Annotated[int, Ge(1), "batch size of the distillation"] = 128

    def distil(
        self,
        server: Server,
        samples: Samples,
        loss: Loss,
        *,
        epochs: int = 1,
        steps: int = 0,
        start: Tensor | None = None,
    ) -> None:
        """Train `server.model`, or the model to start from, with this loss: for epochs of so many steps, or passes."""
        training = replace(
            self.training, epochs=epochs, steps_per_epoch=steps, batch_size=self.server_batch, lr=self.server_lr
        )
        start = server.model if start is None else start
        server.model = distil(server.task, start, samples, loss, training, server.stream(self.own_order_stream))

    @property
    def own_order_stream(self) -> str:
        """A stream that no other part of the composition draws the order of its samples from."""
        others = [part.order_stream for part in self.inner.parts() if isinstance(part, Distilling)]
        return f"{self.name}: {self.order_stream}" if self.order_stream in others else self.order_stream
