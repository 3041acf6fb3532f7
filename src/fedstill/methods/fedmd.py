"""FedMD: Li and Wang, "Heterogenous federated learning via model distillation", 2019."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import functional as F

from fedstill.aggregate.mean import RunningMean
from fedstill.core.errors import SettingError
from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.methods.base import Networks, Part, Server, Uplink, Wire
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.kinds import Kind
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs, predict
from fedstill.train.loop import Batch, Objective, fit
from fedstill.train.losses import kl
from fedstill.train.task import LocalTraining, Samples, Task

Distance = Callable[[Tensor, Tensor], Tensor]
"""How far logits are from the consensus, given which public samples they are of."""


@dataclass(frozen=True)
class FedMD(FedAvg):
    """Clients agree on the logits of public samples."""

    name: ClassVar[str] = "fedmd"
    paper: ClassVar[str] = "Li & Wang 2019"
    sums_only: ClassVar[bool] = True
    other_networks: ClassVar[str] = "with average_weights=false any"
    needs_proxy_data: ClassVar[bool] = True
    extra_information: ClassVar[str] = "logits of public samples"
    server_keys: ClassVar[tuple[str, ...]] = ("logits",)
    client_keys: ClassVar[tuple[str, ...]] = ("model",)
    streams: ClassVar[tuple[str, ...]] = ("digest", "public samples")

    weight: Annotated[float, Ge(0), Search("log:0.01..1"), "of the consensus, with digest=joint"] = 0.1
    digest: Annotated[Literal["joint", "first"], "learn the consensus beside the private data, or before them"] = (
        "joint"
    )
    average_weights: Annotated[bool, "also average the weights, so that there is a global model"] = True

    @property
    def global_model(self) -> bool:
        return self.average_weights

    @property
    def networks(self) -> Networks:
        return "group" if self.average_weights else "any"

    def check(self, task: Task) -> None:
        if task.proxy is None:
            raise SettingError("fedmd needs public samples: set proxy to a dataset, or proxy=pool")

    @property
    def beyond_steps(self) -> str:
        return "fedmd also trains on public samples"

    def wire(self, task: Task) -> Wire:
        plain = super().wire(task)
        assert task.proxy is not None
        shape = (len(task.proxy), task.classes)
        logits = {"logits": Part(shape, "logits of the public samples", defence="any", kind=Kind.LOGITS)}
        weights = plain if self.average_weights else Wire({}, {})
        return Wire(weights.down | logits, weights.up | logits)

    def start(self, server: Server) -> None:
        server.state["logits"] = torch.zeros(len(public(server.task)), server.task.classes)

    def downlink(self, server: Server) -> Message:
        model = super().downlink(server) if self.average_weights else {}
        return model | {"logits": server.state["logits"]}

    def receive(self, client: Client) -> None:
        if self.average_weights:
            client.receive()
        else:
            client.flat.load(client.state.get("model", client.task.initial))
        if self.digest == "first" and client.round > 1:
            samples, distance = self.consensus(client)
            training = LocalTraining(epochs=1, batch_size=256, optimizer=client.task.local.optimizer)
            objective = Objective(base=lambda batch, out: distance(batch.ids, out.logits))
            fit(client.flat, samples, objective, training, lr=client.lr, order=client.stream("digest"))

    def objective(self, client: Client) -> Objective:
        if client.round == 1 or self.weight == 0 or self.digest == "first":
            return Objective()
        (samples, distance), rng = self.consensus(client), client.stream("public samples")
        ids = torch.empty(0, dtype=torch.long)

        def inputs(batch: Batch) -> Tensor:
            nonlocal ids
            ids = torch.randint(0, len(samples), (len(batch.y),), generator=rng)
            return samples.x(ids)

        def term(batch: Batch, out: Outputs) -> Tensor:
            assert out.extra is not None
            return self.weight * distance(ids, out.extra.logits)

        return Objective(term=term, inputs=inputs)

    def consensus(self, client: Client) -> tuple[Samples, Distance]:
        """The public samples that clients agree on, and what a client minimises to agree."""
        logits = client.down["logits"]
        if self.digest == "first":
            return public(client.task), lambda ids, own: F.l1_loss(own, logits[ids])
        return public(client.task), lambda ids, own: kl(logits[ids], own)

    def uplink(self, client: Client) -> Message:
        weights = client.flat.read()
        up = {}
        if self.average_weights:
            up = super().uplink(client)
        else:
            client.state["model"] = weights
        return up | {"logits": predict(client.task, weights, public(client.task)).logits}

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        consensus = RunningMean()

        def collected() -> Iterator[Uplink]:
            for up in uplinks:
                consensus.add(up["logits"], 1)
                yield up

        if self.average_weights:
            super().aggregate(server, collected())
        else:
            for _ in collected():
                pass
        server.state["logits"] = consensus.result()

    def models(self, server: Server) -> dict[str, Tensor]:
        return super().models(server) if self.average_weights else {}

    def own_model(self, state: dict[str, Any], kept: dict[str, Any]) -> Tensor | None:
        return state.get("model")


def public(task: Task) -> Samples:
    """The public samples that `check` made sure of."""
    assert task.proxy is not None
    return task.proxy
