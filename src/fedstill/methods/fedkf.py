"""FedKF: Zhou et al., "Handling data heterogeneity in federated learning via knowledge fusion", 2022."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor
from torch.nn import functional as F

from fedstill.aggregate.latest import CacheInit, LatestMean
from fedstill.core.errors import SettingError
from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.distill.auxiliary import Generator
from fedstill.distill.generators import ImageGenerator, check_image_shape
from fedstill.methods.base import Server, Uplink, Wire
from fedstill.methods.other_teachers import TEACHER, AcrossGroups, joint_outputs, loaded
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs, logits, require_features
from fedstill.train.loop import Batch, Objective
from fedstill.train.losses import kl
from fedstill.train.optimizers import Adam, descend
from fedstill.train.task import Task


@dataclass(frozen=True)
class FedKF(AcrossGroups):
    """A data-free generator carries the all-clients model's knowledge into every local model.

    Where clients have different networks, each group has its own: T1 averages its clients, active or not. With `across`
    the other groups' teachers teach too, by their logits: L_IE, L_CE and the student's loss see the mean over the
    groups, which all count alike; L_A, of features, is that of the client's own network.
    """

    name: ClassVar[str] = "fedkf"
    paper: ClassVar[str] = "Zhou et al. 2022"
    revision: ClassVar[int] = 1  # since features of LeNet-5 are its penultimate layer
    server_keys: ClassVar[tuple[str, ...]] = ("cache", "oca", TEACHER)
    client_keys: ClassVar[tuple[str, ...]] = ("generator", "optimizer")
    streams: ClassVar[tuple[str, ...]] = ("noise",)

    gamma: Annotated[float, Ge(0), Search("log:0.1..10"), "weight of the teacher, Eq. 7"] = 1.0
    lambda1: Annotated[float, Ge(0), "weight of the generator's cross-entropy, Eq. 4"] = 0.01
    lambda2: Annotated[float, Ge(0), "weight of the generator's activation loss, Eq. 4"] = 0.1
    beta: Annotated[float, Gt(0), Search("log:1e-4..1e-2"), "learning rate of the generator (Adam)"] = 1e-3
    z_dim: Annotated[int, Ge(1), "dimension of the noise"] = 100
    width: Annotated[int, Ge(2), "channels of the generator; the paper's: 128"] = 16
    t1: Annotated[bool, "teach and return the all-clients average; False is FedKF-"] = True
    cache_init: Annotated[CacheInit, "clients never active: left out (seen), or with the initial weights (w0)"] = "seen"
    gen_first: Annotated[bool, "generator step before the student's, as in Algorithm 1"] = True
    reset_generator: Annotated[bool, "a new generator every round, as in Algorithm 1"] = False
    gen_adversarial: Annotated[
        bool, "the generator also seeks samples on which the student differs from the teacher"
    ] = False
    ie_normalised: Annotated[bool, "information entropy divided by log C and shifted into 0..1"] = True
    activation_mean: Annotated[bool, "mean of the absolute features instead of their sum"] = True

    @property
    def beyond_sums(self) -> str:
        return "fedkf keeps every client's latest model (set t1=false)" if self.t1 else ""

    @property
    def beyond_steps(self) -> str:
        return "fedkf also trains on generated samples"

    @property
    def averages_all_clients(self) -> bool:
        return self.t1

    def check(self, task: Task) -> None:
        check_image_shape(task.dataset.shape)
        require_features(task, "fedkf")
        if task.classes < 2:
            raise SettingError("fedkf needs at least two classes")

    # --- server -------------------------------------------------------------------------------------------------

    def wire(self, task: Task) -> Wire:
        plain = super().wire(task)
        return Wire(plain.down | {"teacher": plain.down["model"]}, plain.up) if self.t1 else plain

    def start(self, server: Server) -> None:
        if self.t1:
            cache = LatestMean.start(server.store, server.model, server.sizes, self.cache_init)
            server.state |= {"cache": cache.state(), "oca": server.model}

    def downlink(self, server: Server) -> Message:
        down = super().downlink(server)  # the ACA model, w^S
        return down | {"teacher": server.state["oca"]} if self.t1 else down  # and the OCA model, w^T

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        if not self.t1:
            return super().aggregate(server, uplinks)
        cache = LatestMean.restore(server.store, server.state["cache"])
        super().aggregate(server, cache.updated(uplinks, server.round, server.sizes))
        server.state |= {"cache": cache.state(), "oca": cache.mean(server.model)}
        return None

    def models(self, server: Server) -> dict[str, Tensor]:
        if not self.t1:
            return {"model": server.model}
        return {"OCA": server.state["oca"], "ACA": server.model}

    def own_model(self, state: dict[str, Any], kept: dict[str, Any]) -> Tensor | None:
        return kept.get("model")

    # --- client -------------------------------------------------------------------------------------------------

    def objective(self, client: Client) -> Objective:
        if client.round == 1 or self.gamma == 0:  # an untrained teacher has nothing to teach
            return Objective()
        teachers, generator = loaded(client.task, client.down), self.generator(client.task)
        state = {} if self.reset_generator else client.state
        net = generator.load(state["generator"] if "generator" in state else generator.initial())
        adam = Adam(net.params, self.beta)
        adam.restore(state.get("optimizer", {}))
        noise = client.stream("noise")
        pictures: Tensor  # of this step, with the graph to the generator
        teacher_out: Outputs  # the outputs of the teacher for them

        def generator_step(pictures: Tensor, teacher_out: Outputs) -> None:
            loss = self.generator_loss(teacher_out)
            if self.gen_adversarial:
                client.net.eval()  # only its own steps may move the student's statistics
                loss = loss - self.gamma * kl(teacher_out.logits.detach(), logits(client.net, pictures))
                client.net.train()
            descend(loss, net.params, adam)

        def inputs(batch: Batch) -> Tensor:
            nonlocal pictures, teacher_out
            z = torch.randn(len(batch.y), self.z_dim, generator=noise)
            pictures = generator.inputs(z)
            teacher_out = joint_outputs(teachers, pictures)
            if self.gen_first:
                generator_step(pictures, teacher_out)
                with torch.no_grad():  # the student sees the same noise through the updated generator
                    pictures = generator.inputs(z)
                    teacher_out = joint_outputs(teachers, pictures)
            return pictures.detach()

        def term(batch: Batch, out: Outputs) -> Tensor:  # Eq. 5, in Eq. 7
            assert out.extra is not None
            return self.gamma * kl(teacher_out.logits.detach(), out.extra.logits)

        def after(batch: Batch) -> None:
            generator_step(pictures, teacher_out)

        def done() -> None:
            client.state["generator"], client.state["optimizer"] = net.read(), adam.state()

        return Objective(term=term, inputs=inputs, after=None if self.gen_first else after, done=done)

    def generator_loss(self, teacher_out: Outputs) -> Tensor:
        """L_IE + lambda1 L_CE + lambda2 L_A, from the outputs of the teacher for generated samples: Eq. 1 to 4."""
        logits, features = teacher_out.logits, teacher_out.features
        mean = logits.softmax(1).mean(0).clamp(min=1e-12)
        l_ie = (mean * mean.log()).sum()
        if self.ie_normalised:
            l_ie = 1 + l_ie / math.log(logits.shape[1])
        l_ce = F.cross_entropy(logits, logits.argmax(1))
        l_a = -features.abs().mean() if self.activation_mean else -features.abs().sum(1).mean()
        return l_ie + self.lambda1 * l_ce + self.lambda2 * l_a

    def generator(self, task: Task) -> Generator:
        shape = task.dataset.shape
        role = f"generator {self.z_dim} {self.width}"
        return Generator(task, role, "generator", lambda: ImageGenerator(shape, self.z_dim, self.width), self.z_dim)

    @torch.no_grad()
    def pictures(self, task: Task, state: dict[str, Any], count: int) -> Tensor | None:
        if "generator" not in state:
            return None
        z = torch.randn(max(2, count), self.z_dim, generator=torch.Generator().manual_seed(task.seed))
        images: Tensor = self.generator(task).load(state["generator"]).module(z)
        return images[:count]
