"""CReFF: Shang et al., "Federated learning on heterogeneous and long-tailed data via classifier re-training", 2022."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.methods.base import Part, Server, Uplink, Wire
from fedstill.methods.kinds import Kind
from fedstill.methods.server_side import ServerSide
from fedstill.train.client import Client
from fedstill.train.evaluate import load_for_evaluation, predict, require_features
from fedstill.train.optimizers import SGD
from fedstill.train.task import Task, classifier


@dataclass(frozen=True)
class CReFF(ServerSide):
    """The classifier is trained again on features that give the clients' gradients, class by class."""

    name: ClassVar[str] = "creff"
    paper: ClassVar[str] = "Shang et al. 2022"
    revision: ClassVar[int] = 1  # since features of LeNet-5 are its penultimate layer
    extra_information: ClassVar[str] = "gradient of the classifier for each class, and which classes it has"
    server_keys: ClassVar[tuple[str, ...]] = ("synthetic", "head")
    streams: ClassVar[tuple[str, ...]] = ("synthetic features", "gradient draws", "re-training")

    features: Annotated[int, Ge(1), "synthetic features of each class"] = 100
    match_steps: Annotated[int, Ge(0), "steps of matching gradients a round"] = 100
    match_lr: Annotated[float, Gt(0), Search("log:0.01..1"), "learning rate of the features (SGD)"] = 0.1
    retrain_epochs: Annotated[int, Ge(1), "epochs of training a new classifier on them"] = 300
    retrain_batch: Annotated[int, Ge(1), "its batch size"] = 32
    retrain_lr: Annotated[float, Gt(0), Search("log:1e-3..0.1"), "its learning rate (SGD)"] = 0.01
    draws: Annotated[int, Ge(1), "batches that a class's gradient is the mean of"] = 10
    draw_size: Annotated[int, Ge(1), "samples in each"] = 32

    def check(self, task: Task) -> None:
        super().check(task)
        require_features(task, "creff")

    @property
    def beyond_steps(self) -> str:
        return "creff also sends gradients of each class"

    def wire(self, task: Task) -> Wire:
        inner, head = super().wire(task), classifier(task.nets.get("re-trained")).head
        size = sum(p.numel() for p in head.parameters())
        gradients = {
            "gradients": Part(
                (task.classes, size), "gradient of the classifier for each class", task.dtype, kind=Kind.GRADIENTS
            ),
            "known": Part((task.classes,), "which classes it has", kind=Kind.CLASS_COUNTS),
        }
        return Wire(
            inner.down | {"head": Part((size,), "re-trained classifier", task.dtype, kind=Kind.WEIGHTS)},
            inner.up | gradients,
        )

    def start(self, server: Server) -> None:
        super().start(server)
        task, rng = server.task, server.stream("synthetic features")
        server.state["synthetic"] = torch.randn(task.classes, self.features, task.feature_dim, generator=rng)
        server.state["head"] = read_head(task, server.model)

    def downlink(self, server: Server) -> Message:
        return super().downlink(server) | {"head": server.state["head"]}

    def uplink(self, client: Client) -> Message:
        """The trained model, and gradients of the re-trained classifier on the features of the model that was sent."""
        up, task = super().uplink(client), client.task
        features = predict(task, client.down["model"], client.data).features
        head = loaded_head(task, client.down["model"], client.down["head"])
        gradients, known = torch.zeros(task.classes, len(client.down["head"])), torch.zeros(task.classes)
        rng = client.stream("gradient draws")
        for c in client.data.y.unique().tolist():
            own = features[client.data.y == c]
            known[c] = 1
            for _ in range(self.draws):
                batch = own[torch.randint(len(own), (self.draw_size,), generator=rng)]
                loss = F.cross_entropy(head(batch), torch.full((self.draw_size,), c))
                gradients[c] += flat(torch.autograd.grad(loss, list(head.parameters()))) / self.draws
        return up | {"gradients": gradients, "known": known}

    def improve(self, server: Server, uplinks: list[Uplink]) -> None:
        task = server.task
        known = torch.stack([up["known"] for up in uplinks]).sum(0)  # clients that have each class
        sums = torch.stack([up["gradients"] * up["known"].unsqueeze(1) for up in uplinks]).sum(0)
        real = sums / known.clamp(min=1).unsqueeze(1)
        head = loaded_head(task, server.model, server.state["head"])
        present = torch.nonzero(known).flatten().tolist()
        server.state["synthetic"] = self.match(head, server.state["synthetic"], real, present)
        fresh = task.build("fresh classifier")
        server.state["head"] = self.retrain(
            classifier(fresh).head, server.state["synthetic"], server.stream("re-training")
        )

    def match(self, head: nn.Module, start: Tensor, real: Tensor, present: list[int]) -> Tensor:
        """Features whose gradients point where the clients' do, for each class that was present."""
        params = {name: p.detach() for name, p in head.named_parameters()}
        wanted = [unflat(real[c], list(params.values())) for c in present]
        stacked = [torch.stack(same) for same in zip(*wanted, strict=True)]  # (classes present, ...) each

        def loss(params: dict[str, Tensor], features: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(head, params, (features,)), label.expand(len(features)))

        gradients = vmap(grad(loss), in_dims=(None, 0, 0))  # of all classes at once
        moved, labels = start[present].clone().requires_grad_(), torch.tensor(present)
        sgd = SGD([moved], self.match_lr)
        for _ in range(self.match_steps):
            found = gradients(params, moved, labels)
            (moved.grad,) = torch.autograd.grad(gradient_distance(list(found.values()), stacked), [moved])
            sgd.step()
        synthetic = start.clone()
        synthetic[present] = moved.detach()
        return synthetic

    def retrain(self, head: nn.Module, synthetic: Tensor, order: torch.Generator) -> Tensor:
        """A fresh classifier, trained on the synthetic features of all classes."""
        x, y = synthetic.flatten(0, 1), torch.arange(len(synthetic)).repeat_interleave(self.features)
        sgd = SGD(head.parameters(), self.retrain_lr)
        for _ in range(self.retrain_epochs):
            for ids in torch.randperm(len(y), generator=order).split(self.retrain_batch):
                sgd.clear()
                F.cross_entropy(head(x[ids]), y[ids]).backward()
                sgd.step()
        return flat([p.detach() for p in head.parameters()])

    def models(self, server: Server) -> dict[str, Tensor]:
        plain = super().models(server)
        (_, model), *others = plain.items()
        net = load_for_evaluation(server.task, model, "re-trained")
        write_head(classifier(net).head, server.state["head"])
        return {"re-trained": net.read(), "before re-training": model, **dict(others)}


def gradient_distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """Sum over classes, the first dimension, and the outputs of every layer of 1 - cos of the gradients of its weights.

    The biases of a layer count as one output.
    """
    total = torch.zeros(())
    for a, b in zip(found, wanted, strict=True):
        rows = (a, b) if a.dim() == 2 else (a.flatten(2), b.flatten(2))
        total = total + (1 - F.cosine_similarity(*rows, dim=-1)).sum()
    return total


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def unflat(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(vector, [p.numel() for p in like])
    return [part.view(p.shape) for part, p in zip(parts, like, strict=True)]


def write_head(head: nn.Module, weights: Tensor) -> None:
    params = list(head.parameters())
    with torch.no_grad():
        for p, part in zip(params, unflat(weights, params), strict=True):
            p.copy_(part)


def read_head(task: Task, model: Tensor) -> Tensor:
    """The classifier's weights in a model."""
    net = load_for_evaluation(task, model, "re-trained")
    return flat([p.detach() for p in classifier(net).head.parameters()])


def loaded_head(task: Task, model: Tensor, weights: Tensor) -> nn.Module:
    """A classifier with these weights."""
    head = classifier(load_for_evaluation(task, model, "re-trained")).head
    write_head(head, weights)
    return head
