"""FedDistill: federated distillation of class-wise logits (Jeong et al. 2018, Seo et al. 2020), and with weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from fedstill.aggregate.mean import ClassMeans
from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.methods.base import Part, Server, Uplink, Wire
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.kinds import Kind
from fedstill.methods.own_models import OwnModels
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch, Objective
from fedstill.train.losses import soft_kl_each
from fedstill.train.task import Task


@dataclass(frozen=True)
class FedDistillPlus(FedAvg):
    """FedAvg whose clients also learn from the mean logits of each class, collected from all."""

    name: ClassVar[str] = "feddistill-plus"
    paper: ClassVar[str] = "Seo et al. 2020"
    extra_information: ClassVar[str] = "mean logits of each class, and which classes it has"
    server_keys: ClassVar[tuple[str, ...]] = ("logits", "known")

    c: Annotated[float, Ge(0), Search("log:0.1..10"), "weight of the class logits"] = 1.0

    @property
    def beyond_steps(self) -> str:
        return f"{self.name} also sends mean logits of the samples of each class"

    def wire(self, task: Task) -> Wire:
        plain = super().wire(task)
        logits = {
            "logits": Part((task.classes, task.classes), "mean logits of each class", kind=Kind.LOGITS),
            "known": Part((task.classes,), "which classes have any", kind=Kind.CLASS_COUNTS),
        }
        return Wire(plain.down | logits, plain.up | logits)

    def start(self, server: Server) -> None:
        classes = server.task.classes
        server.state |= {"logits": torch.zeros(classes, classes), "known": torch.zeros(classes)}

    def downlink(self, server: Server) -> Message:
        return super().downlink(server) | {"logits": server.state["logits"], "known": server.state["known"]}

    def objective(self, client: Client) -> Objective:
        classes = client.task.classes
        sums, counts = torch.zeros(classes, classes), torch.zeros(classes)
        client.notes |= {"sums": sums, "counts": counts}
        targets, known = client.down["logits"].softmax(1), client.down["known"]
        teaching = self.c > 0 and bool(known.any())

        def term(batch: Batch, out: Outputs) -> Tensor:
            sums.index_add_(0, batch.y, out.logits.detach())
            counts.index_add_(0, batch.y, torch.ones(len(batch.y)))
            if not teaching:
                return torch.zeros(())
            each = soft_kl_each(targets[batch.y], out.logits)
            return self.c * (each * known[batch.y]).mean()  # of classes that somebody has sent logits of

        return Objective(term=term)

    def uplink(self, client: Client) -> Message:
        return super().uplink(client) | self.class_logits(client)

    def class_logits(self, client: Client) -> Message:
        """The mean logits of each class over all local steps."""
        sums, counts = client.notes["sums"], client.notes["counts"]
        return {"logits": sums / counts.clamp(min=1).unsqueeze(1), "known": (counts > 0).float()}

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        means = ClassMeans(server.task.classes)

        def collected() -> Iterator[Uplink]:
            for up in uplinks:
                means.add(up["logits"], up["known"])
                yield up

        self.average(server, collected())
        logits, known = means.after(server.state["logits"], server.state["known"])
        server.state |= {"logits": logits, "known": known}

    def average(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        """What becomes of the weights."""
        FedAvg.aggregate(self, server, uplinks)


@dataclass(frozen=True)
class FedDistill(OwnModels, FedDistillPlus):
    """Clients keep their models and share only the mean logits of each class."""

    name: ClassVar[str] = "feddistill"
    paper: ClassVar[str] = "Jeong et al. 2018"

    def wire(self, task: Task) -> Wire:
        both = super().wire(task)
        return Wire(_without_model(both.down), _without_model(both.up))

    def downlink(self, server: Server) -> Message:
        return _without_model(super().downlink(server))

    def uplink(self, client: Client) -> Message:
        client.state["model"] = client.flat.read()
        return self.class_logits(client)

    def average(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        for _ in uplinks:
            pass


def _without_model(parts: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in parts.items() if name != "model"}
