"""FedFTG: Zhang et al., "Fine-tuning global model via data-free knowledge distillation …", 2022."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.nn import functional as F

from fedstill.core import seeds
from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.distill.auxiliary import Generator
from fedstill.distill.ensemble import diversity, label_weights, load_teachers
from fedstill.distill.generators import ConditionalGenerator, check_image_shape
from fedstill.distill.stage import train_student
from fedstill.methods.base import Part, Server, Uplink, Wire
from fedstill.methods.kinds import Kind
from fedstill.methods.server_side import ServerSide
from fedstill.train.client import Client
from fedstill.train.evaluate import logits
from fedstill.train.losses import soft_kl
from fedstill.train.optimizers import SGD, Adam, descend
from fedstill.train.task import Task, classifier


@dataclass(frozen=True)
class FedFTG(ServerSide):
    """A generator on the server seeks samples on which the clients and the averaged model differ, and mends those."""

    name: ClassVar[str] = "fedftg"
    paper: ClassVar[str] = "Zhang et al. 2022"
    extra_information: ClassVar[str] = "number of samples of each class"
    server_keys: ClassVar[tuple[str, ...]] = ("image generator",)
    streams: ClassVar[tuple[str, ...]] = ("image generator",)

    iterations: Annotated[int, Ge(0), "turns of generator and student a round"] = 10
    student_steps: Annotated[int, Ge(1), "steps of the student in each"] = 5
    lambda_cls: Annotated[float, Ge(0), "weight of the generator's cross-entropy"] = 1.0
    lambda_dis: Annotated[float, Ge(0), "weight of its diversity"] = 1.0
    z_dim: Annotated[int, Ge(1), "dimension of the noise"] = 100
    generator_width: Annotated[int, Ge(2), "channels of the generator; the paper's presets: 128"] = 32
    generator_lr: Annotated[float, Gt(0), Search("log:1e-3..0.1"), "learning rate of the generator (Adam)"] = 0.01
    server_lr: Annotated[float, Gt(0), Search("log:0.01..0.3"), "learning rate of the student (SGD)"] = 0.1
    server_batch: Annotated[int, Ge(2), "generated samples a step"] = 64

    def check(self, task: Task) -> None:
        check_image_shape(task.dataset.shape)
        super().check(task)

    @property
    def beyond_steps(self) -> str:
        return "fedftg also sends how many samples of each class there are"

    def wire(self, task: Task) -> Wire:
        inner = super().wire(task)
        return Wire(
            inner.down,
            inner.up | {"counts": Part((task.classes,), "samples of each class", least=0, kind=Kind.CLASS_COUNTS)},
        )

    def start(self, server: Server) -> None:
        super().start(server)
        server.state["image generator"] = self.generator(server.task).initial()

    def uplink(self, client: Client) -> Message:
        counts = torch.bincount(client.data.y, minlength=client.task.classes).float()
        return super().uplink(client) | {"counts": counts}

    def improve(self, server: Server, uplinks: list[Uplink]) -> None:
        if self.iterations == 0:
            return
        task, rng = server.task, server.stream("image generator")
        generator = self.generator(task).load(server.state["image generator"])
        flat = task.nets.get("distilled")
        flat.load(server.model)
        student = classifier(flat)
        teachers = load_teachers(task, [up["model"] for up in uplinks])
        counts = torch.stack([up["counts"] for up in uplinks])
        weights, labels = label_weights(counts), counts.sum(0)
        adam = Adam(generator.params, self.generator_lr)
        sgd = SGD(flat.params, self.server_lr)
        for _ in range(self.iterations):
            y = torch.multinomial(labels, self.server_batch, replacement=True, generator=rng)
            z = torch.randn(self.server_batch, self.z_dim, generator=rng)
            student.eval()  # the generator's steps leave its statistics alone
            for weight, teacher in zip(weights, teachers, strict=True):
                samples = generator.module(z, y)
                student_logits, teacher_logits = logits(student, samples), logits(teacher, samples)
                differ = (weight[y].unsqueeze(1) * (student_logits - teacher_logits.detach()).abs()).mean()
                known = (weight[y] * F.cross_entropy(teacher_logits, y, reduction="none")).mean()
                spread = diversity(z, samples) / len(teachers)
                loss = -differ + self.lambda_cls * known + self.lambda_dis * spread
                descend(loss, generator.params, adam)
            with torch.no_grad():
                samples = generator.module(z, y)
                soft = torch.stack([logits(teacher, samples).softmax(1) for teacher in teachers])
                target = (weights[:, y].unsqueeze(2) * soft).sum(0)
            train_student(student, task)
            for _ in range(self.student_steps):
                sgd.clear()
                (soft_kl(target, logits(student, samples)) / task.classes).backward()  # a mean over classes too
                sgd.step()
        server.model = flat.read()
        server.state["image generator"] = generator.read()

    def generator(self, task: Task) -> Generator:
        def make() -> nn.Module:
            return ConditionalGenerator(task.dataset.shape, task.classes, self.z_dim, self.generator_width)

        role = f"fedftg generator {self.z_dim} {self.generator_width}"
        return Generator(task, role, "generator", make, self.z_dim, True)

    def pictures(self, task: Task, state: dict[str, Any], count: int) -> Tensor | None:
        if "image generator" not in state:
            return super().pictures(task, state, count)
        rng, y = seeds.torch_rng(task.seed, "pictures"), torch.arange(max(2, count)) % task.classes
        return self.generator(task).pictures(state["image generator"], count, rng, y)
