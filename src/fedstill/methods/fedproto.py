"""FedProto: Tan et al., "FedProto: federated prototype learning across heterogeneous clients", 2022."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from fedstill.aggregate.mean import ClassMeans
from fedstill.core.tree import Message
from fedstill.methods.base import Networks, Part, Server, Uplink, Wire
from fedstill.methods.kinds import Kind
from fedstill.methods.local import Local
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs, predict, require_features
from fedstill.train.loop import Batch, Objective
from fedstill.train.task import Task


@dataclass(frozen=True)
class FedProto(Local):
    """Clients keep their models and share the mean features of each class, which pull everybody's features.

    A client minimises CE + lambda d(f(x), C[y]) (Eq. 7), where C[y] is the prototype that the server sent for the
    sample's class and d the mean squared difference over the features, as in the authors' code; a sample of a class
    without a prototype has no such term. Its own prototypes (Eq. 3) are the mean features of all its training samples
    under the model it has just trained, in evaluation mode. The server's are the plain mean over the clients that have
    the class, as in the authors' code, so that no counts are sent; a class that no client of a round has keeps its
    prototype. Clients predict with their heads, not by the nearest prototype.
    """

    name: ClassVar[str] = "fedproto"
    paper: ClassVar[str] = "Tan et al. 2022"
    extra_information: ClassVar[str] = "mean features of each class, and which classes it has"
    server_keys: ClassVar[tuple[str, ...]] = ("prototypes", "known")

    lambda_: Annotated[float, Ge(0), "weight of the distance to the prototypes"] = 1.0

    @property
    def networks(self) -> Networks:
        return "features"

    @property
    def beyond_steps(self) -> str:
        return f"{self.name} also sends mean features of the samples of each class"

    def check(self, task: Task) -> None:
        require_features(task, self.name)

    def wire(self, task: Task) -> Wire:
        shape = (task.classes, task.feature_dim)
        parts = {
            "prototypes": Part(shape, "mean features of each class", task.dtype, kind=Kind.STATISTICS),
            "known": Part((task.classes,), "which classes have any", kind=Kind.CLASS_COUNTS),
        }
        return Wire(parts, dict(parts))

    def start(self, server: Server) -> None:
        task = server.task
        server.state["prototypes"] = torch.zeros(task.classes, task.feature_dim, dtype=task.dtype)
        server.state["known"] = torch.zeros(task.classes)

    def downlink(self, server: Server) -> Message:
        return {name: server.state[name] for name in ("prototypes", "known")}

    def objective(self, client: Client) -> Objective:
        prototypes, known = client.down["prototypes"], client.down["known"]
        if self.lambda_ == 0 or not known.any():
            return Objective()

        def term(batch: Batch, out: Outputs) -> Tensor:
            distance = (out.features - prototypes[batch.y]).square().mean(1)
            return self.lambda_ * (distance * known[batch.y]).mean()

        return Objective(term=term)

    def uplink(self, client: Client) -> Message:
        super().uplink(client)
        features, y = predict(client.task, client.state["model"], client.data).features, client.data.y
        classes = client.task.classes
        sums = torch.zeros(classes, features.shape[1], dtype=torch.float64, device=features.device)
        sums.index_add_(0, y, features.double())
        counts = torch.bincount(y, minlength=classes)
        means = sums / counts.clamp(min=1).unsqueeze(1)
        return {"prototypes": means.to(features.dtype), "known": (counts > 0).float()}

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        means = ClassMeans(server.task.classes)
        for up in uplinks:
            means.add(up["prototypes"], up["known"])
        prototypes, known = means.after(server.state["prototypes"], server.state["known"])
        server.state |= {"prototypes": prototypes, "known": known}
