"""FedHKD: Chen et al., "The best of both worlds: accurate global and personalized models …", 2023."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor
from torch.nn import functional as F

from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.methods.base import Part, Server, Uplink, Wire
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.kinds import Kind
from fedstill.train.client import Client
from fedstill.train.evaluate import EVAL_BATCH, Outputs, outputs, require_features
from fedstill.train.loop import Batch, Objective
from fedstill.train.losses import soft_kl
from fedstill.train.task import Task


@dataclass(frozen=True)
class FedHKD(FedAvg):
    """Clients share each class's mean feature and mean soft prediction, and learn from everyone's."""

    name: ClassVar[str] = "fedhkd"
    paper: ClassVar[str] = "Chen et al. 2023"
    revision: ClassVar[int] = 1  # since features of LeNet-5 are its penultimate layer
    extra_information: ClassVar[str] = "mean feature, mean soft prediction and number of samples of each class"
    server_keys: ClassVar[tuple[str, ...]] = ("class_features", "class_predictions", "counts")
    streams: ClassVar[tuple[str, ...]] = ("feature noise",)

    lambda_: Annotated[float, Ge(0), Search("log:0.01..1"), "weight of the soft predictions"] = 0.05
    gamma: Annotated[float, Ge(0), Search("log:0.01..1"), "weight of the features"] = 0.05
    T: Annotated[float, Gt(0), "temperature of the soft predictions"] = 0.5
    noise: Annotated[float, Ge(0), "standard deviation of the noise that clients add to mean features"] = 0.0

    def check(self, task: Task) -> None:
        require_features(task, "fedhkd")

    @property
    def beyond_sums(self) -> str:
        return "fedhkd weighs every client's class means by its own counts"

    @property
    def beyond_steps(self) -> str:
        return "fedhkd also sends means over the samples of each class"

    def wire(self, task: Task) -> Wire:
        plain, classes = super().wire(task), task.classes
        knowledge = {
            "class_features": Part((classes, task.feature_dim), "mean feature of each class", kind=Kind.STATISTICS),
            "class_predictions": Part((classes, classes), "mean soft prediction of each class", kind=Kind.PREDICTIONS),
            "counts": Part((classes,), "samples of each class", least=0, kind=Kind.CLASS_COUNTS),
        }
        return Wire(plain.down | knowledge, plain.up | knowledge)

    def start(self, server: Server) -> None:
        classes, d = server.task.classes, server.task.feature_dim
        server.state |= {
            "class_features": torch.zeros(classes, d),
            "class_predictions": torch.zeros(classes, classes),
            "counts": torch.zeros(classes),
        }

    def downlink(self, server: Server) -> Message:
        knowledge = {name: server.state[name] for name in ("class_features", "class_predictions", "counts")}
        return super().downlink(server) | knowledge

    def objective(self, client: Client) -> Objective:
        known = client.down["counts"] > 0
        if not known.any() or self.lambda_ == self.gamma == 0:
            return Objective()
        features, predictions = client.down["class_features"], client.down["class_predictions"]

        def term(batch: Batch, out: Outputs) -> Tensor:
            logits = client.net.head(features[known]) / self.T
            by_prediction = soft_kl(predictions[known], logits)
            each = F.mse_loss(out.features, features[batch.y], reduction="none").mean(1)
            by_feature = (each * known[batch.y]).mean()
            return self.lambda_ * by_prediction + self.gamma * by_feature

        return Objective(term=term)

    @torch.no_grad()
    def uplink(self, client: Client) -> Message:
        """The trained model, and what it makes of each class on the client's data."""
        client.net.eval()
        batches = [outputs(client.net, x) for x in client.data.parts(EVAL_BATCH)]
        features = torch.cat([o.features for o in batches])
        predictions = (torch.cat([o.logits for o in batches]) / self.T).softmax(1)
        counts = torch.bincount(client.data.y, minlength=client.task.classes).float()
        means = [class_means(values, client.data.y, client.task.classes) for values in (features, predictions)]
        if self.noise:
            means[0] += self.noise * torch.randn(means[0].shape, generator=client.stream("feature noise"))
        return super().uplink(client) | {"class_features": means[0], "class_predictions": means[1], "counts": counts}

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        names = ("class_features", "class_predictions")
        sums = {name: torch.zeros_like(server.state[name], dtype=torch.float64) for name in names}
        counts = torch.zeros_like(server.state["counts"], dtype=torch.float64)

        def collected() -> Iterator[Uplink]:
            for up in uplinks:
                for name in names:
                    sums[name].add_(up["counts"].unsqueeze(1) * up[name])
                counts.add_(up["counts"])
                yield up

        super().aggregate(server, collected())
        present = counts > 0  # a class that nobody had in this round keeps what was known of it
        for name in names:
            fresh = (sums[name] / counts.clamp(min=1).unsqueeze(1)).float()
            server.state[name] = torch.where(present.unsqueeze(1), fresh, server.state[name])
        server.state["counts"] = torch.where(present, counts.float(), server.state["counts"])


def class_means(values: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean of the rows of each class; zero for a class without rows.

    >>> class_means(torch.tensor([[1.0], [3.0]]), torch.tensor([1, 1]), 2)
    tensor([[0.],
            [2.]])
    """
    sums = torch.zeros(classes, values.shape[1]).index_add_(0, labels, values)
    return sums / torch.bincount(labels, minlength=classes).clamp(min=1).unsqueeze(1)
