"""FedTGP: Zhang et al., "FedTGP: trainable global prototypes with adaptive-margin-enhanced contrastive …", 2024."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.nn import functional as F

from fedstill.aggregate.mean import ClassMeans
from fedstill.distill.auxiliary import Auxiliary
from fedstill.distill.stage import as_samples
from fedstill.methods.base import Server, Uplink
from fedstill.methods.fedproto import FedProto
from fedstill.models.base import Classifier
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch, Loss, Objective, fit
from fedstill.train.task import LocalTraining, Task


class TrainablePrototypes(Classifier):
    """A prototype for each class, made of an embedding by two layers; a sample's logits are minus its distances."""

    def __init__(self, classes: int, features: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(classes, features))
        self.head = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, features))
        self.feature_dim = features

    def prototypes(self) -> Tensor:
        """Those of all classes, (classes, features)."""
        found: Tensor = self.head(self.embedding)
        return found

    def features(self, x: Tensor) -> Tensor:
        return x

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.cdist(x, self.prototypes(), compute_mode="donot_use_mm_for_euclid_dist"), x


@dataclass(frozen=True)
class FedTGP(FedProto):
    """FedProto whose prototypes the server learns, so that those of different classes lie apart by a margin.

    Every prototype that a client sent is a sample of its class; the server minimises the cross-entropy of minus its
    distances to the global prototypes, the distance to its own class enlarged by the margin. That is the largest, over
    the classes, of the distance from a class's mean prototype to the nearest other one, at most tau, as in the
    authors' code; and so are the prototypes' network (an embedding, a hidden layer of the size of the features) and
    plain SGD. Prototypes of classes that no client has sent yet are not used.
    """

    name: ClassVar[str] = "fedtgp"
    paper: ClassVar[str] = "Zhang et al. 2024"
    server_keys: ClassVar[tuple[str, ...]] = ("prototypes", "known", "tgp")
    streams: ClassVar[tuple[str, ...]] = ("trainable prototypes",)

    tau: Annotated[float, Ge(0), "largest margin"] = 100.0
    server_epochs: Annotated[int, Ge(0), "epochs over the clients' prototypes a round"] = 100
    server_lr: Annotated[float, Gt(0), "learning rate of the prototypes (SGD)"] = 0.01
    server_batch: Annotated[int, Ge(1), "batch size of their training"] = 10

    def start(self, server: Server) -> None:
        super().start(server)
        server.state["tgp"] = self.trainable(server.task).initial()

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        means, rows, labels = ClassMeans(server.task.classes), [], []
        for up in uplinks:
            means.add(up["prototypes"], up["known"])
            (has,) = torch.nonzero(up["known"], as_tuple=True)
            rows.append(up["prototypes"][has])
            labels.append(has)
        blank = torch.zeros_like(server.state["prototypes"]), torch.zeros_like(server.state["known"])
        mean, present = means.after(*blank)
        margin = min(self.tau, largest_gap(mean[present > 0]))
        net = self.trainable(server.task).load(server.state["tgp"])
        if self.server_epochs:
            training = LocalTraining(self.server_epochs, self.server_batch, lr=self.server_lr)
            samples, order = as_samples(torch.cat(rows), torch.cat(labels)), server.stream("trainable prototypes")
            fit(net, samples, Objective(base=margin_loss(margin)), training, lr=self.server_lr, order=order)
        module = net.module
        assert isinstance(module, TrainablePrototypes)
        server.state |= {
            "tgp": net.read(),
            "prototypes": module.prototypes().detach().clone(),
            "known": torch.maximum(server.state["known"], present),
        }
        server.notes["margin"] = margin

    def trainable(self, task: Task) -> Auxiliary:
        def make() -> nn.Module:
            return TrainablePrototypes(task.classes, task.feature_dim).to(task.dtype)

        return Auxiliary(task, "trainable prototypes", "trainable prototypes", make)


def largest_gap(means: Tensor) -> float:
    """The largest distance from a class's mean prototype to the nearest other one; 0 if there is no other.

    >>> largest_gap(torch.tensor([[0.0], [1.0], [4.0]]))
    3.0
    """
    if len(means) < 2:
        return 0.0
    distances = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist")
    return float(distances.fill_diagonal_(torch.inf).min(1).values.max())


def margin_loss(margin: float) -> Loss:
    """Cross-entropy of minus the distances, those to a sample's own class enlarged by the margin."""

    def loss(batch: Batch, out: Outputs) -> Tensor:
        return F.cross_entropy(out.logits - margin * F.one_hot(batch.y, out.logits.shape[1]), batch.y)

    return loss
