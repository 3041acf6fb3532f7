"""FedGen: Zhu et al., "Data-free knowledge distillation for heterogeneous federated learning", 2021."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor
from torch.nn import functional as F

from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.distill.auxiliary import Auxiliary
from fedstill.distill.ensemble import diversity, label_weights, load_teachers
from fedstill.distill.generators import FeatureGenerator
from fedstill.methods.base import Part, Server, Uplink, Wire
from fedstill.methods.kinds import Kind
from fedstill.methods.lg_fedavg import with_head
from fedstill.methods.server_side import ServerSide
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs, require_features
from fedstill.train.loop import Batch, Objective
from fedstill.train.losses import kl
from fedstill.train.optimizers import Adam, descend
from fedstill.train.task import Task


@dataclass(frozen=True)
class FedGen(ServerSide):
    """A generator of features, trained on the server with the clients' heads, augments every client's data.

    All it needs of a client is the head: after `lg-fedavg`, which averages heads alone, it works with any networks
    whose features have one size, all of which then share one generator.
    """

    name: ClassVar[str] = "fedgen"
    paper: ClassVar[str] = "Zhu et al. 2021"
    revision: ClassVar[int] = 1  # since features of LeNet-5 are its penultimate layer
    extra_information: ClassVar[str] = "number of samples of each class"
    other_networks: ClassVar[str] = "as lg-fedavg+fedgen features and heads of one size"
    server_keys: ClassVar[tuple[str, ...]] = ("feature_generator", "generator optimizer")
    streams: ClassVar[tuple[str, ...]] = ("generated", "generator")
    works_on: ClassVar[tuple[str, ...]] = ("model", "head")

    alpha: Annotated[
        float, Ge(0), Search("log:1..100"), "weight of the generated features' cross-entropy on clients"
    ] = 10.0
    beta: Annotated[float, Ge(0), Search("log:1..100"), "weight of the generated features' predictions on clients"] = (
        10.0
    )
    decay: Annotated[float, Gt(0), Le(1), "factor on both weights, and on the generator's rate, after each round"] = (
        0.98
    )
    hidden: Annotated[int, Ge(1), "width of the generator"] = 256
    z_dim: Annotated[int, Ge(1), "dimension of the noise"] = 32
    generator_lr: Annotated[float, Gt(0), "learning rate of the generator (Adam)"] = 3e-4
    generator_decay: Annotated[float, Ge(0), "weight decay of the generator"] = 1e-2
    generator_steps: Annotated[int, Ge(0), "steps of the generator a round"] = 50
    generator_batch: Annotated[int, Ge(2), "batch size of the generator, and of what clients generate"] = 32

    def check(self, task: Task) -> None:
        super().check(task)
        require_features(task, "fedgen")

    @property
    def beyond_steps(self) -> str:
        return "fedgen also sends how many samples of each class there are"

    def wire(self, task: Task) -> Wire:
        inner = super().wire(task)
        generator = Part((self.generator(task).net.size,), "generator of features", task.dtype, kind=Kind.GENERATOR)
        counts = Part((task.classes,), "samples of each class", least=0, kind=Kind.CLASS_COUNTS)
        return Wire(inner.down | {"feature_generator": generator}, inner.up | {"counts": counts})

    def start(self, server: Server) -> None:
        super().start(server)
        server.state |= {"feature_generator": self.generator(server.task).initial(), "generator optimizer": {}}

    def downlink(self, server: Server) -> Message:
        return super().downlink(server) | {"feature_generator": server.state["feature_generator"]}

    def objective(self, client: Client) -> Objective:
        inner = super().objective(client)
        if client.round == 1 or self.alpha == self.beta == 0:
            return inner
        task, rng = client.task, client.stream("generated")
        module = self.generator(task).load(client.down["feature_generator"]).module.eval()
        fade = self.decay ** (client.round - 1)

        def make(y: Tensor) -> Tensor:
            with torch.no_grad():
                samples: Tensor = module(torch.rand(len(y), self.z_dim, generator=rng), y)
            return samples

        def term(batch: Batch, out: Outputs) -> Tensor:
            y = torch.randint(0, task.classes, (self.generator_batch,), generator=rng)
            by_label = F.cross_entropy(client.net.head(make(y)), y)
            with torch.no_grad():
                teacher_logits = client.net.head(make(batch.y))
            by_prediction = kl(teacher_logits, out.logits)
            return fade * (self.alpha * by_label + self.beta * by_prediction)

        return inner + Objective(term=term)

    def uplink(self, client: Client) -> Message:
        counts = torch.bincount(client.data.y, minlength=client.task.classes).to(torch.float32)
        return super().uplink(client) | {"counts": counts}

    def improve(self, server: Server, uplinks: list[Uplink]) -> None:
        """Train the generator so that the clients' heads recognise what it makes of a label."""
        task, rng = server.task, server.stream("generator")
        generator = self.generator(task).load(server.state["feature_generator"])
        adam = Adam(
            generator.params,
            self.generator_lr * self.decay ** (server.round - 1),
            weight_decay=self.generator_decay,
        )
        adam.restore(server.state["generator optimizer"])
        teachers = load_teachers(task, [_model(task, up) for up in uplinks])
        weights = label_weights(torch.stack([up["counts"] for up in uplinks]))  # (K, C)
        for _ in range(self.generator_steps):
            y = torch.randint(0, task.classes, (self.generator_batch,), generator=rng)
            z = torch.rand(self.generator_batch, self.z_dim, generator=rng)
            samples = generator.module(z, y)
            loss = diversity(z, samples)
            for teacher, weight in zip(teachers, weights, strict=True):
                each = F.cross_entropy(teacher.head(samples), y, reduction="none")
                loss = loss + (weight[y] * each).mean()
            descend(loss, generator.params, adam)
        server.state |= {"feature_generator": generator.read(), "generator optimizer": adam.state()}

    def generator(self, task: Task) -> Auxiliary:
        role = f"fedgen generator {self.hidden} {self.z_dim}"
        return Auxiliary(
            task,
            role,
            "generator",
            lambda: FeatureGenerator(task.classes, task.feature_dim, self.hidden, self.z_dim),
        )


def _model(task: Task, up: Uplink) -> Tensor:
    """What a client sent, as a whole network; where it is the head alone, only that is the client's."""
    return up["model"] if "model" in up.message else with_head(task.nets.get("student"), task.initial, up["head"])
