"""FedHyb: Liu et al., "Federated learning with hybrid knowledge distillations on long-tailed …", 2024."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator
from torch import Tensor
from torch.nn import functional as F

from fedstill.core.errors import SettingError
from fedstill.core.space import Search
from fedstill.data.augment import rotate_by
from fedstill.distill.stage import mean_features, mean_probabilities
from fedstill.methods.base import Needs, Server, Uplink
from fedstill.methods.dafkd import DaFKD
from fedstill.methods.server_side import Distilling
from fedstill.models.slim import check_sliceable, slimmed
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs, logits, require_features
from fedstill.train.loop import Batch, Objective
from fedstill.train.losses import kl, soft_kl, soft_kl_each
from fedstill.train.task import Samples, Task, classifier

Variant = Literal["full", "1", "2", "3"]
SCALES = (1.0, 0.875, 0.75)  # 32, 28 and 24 pixels of 32


@dataclass(frozen=True)
class FedHyb(Distilling):
    """Clients teach their own sub-networks; the clients' mean predictions and features teach the averaged model."""

    name: ClassVar[str] = "fedhyb"
    paper: ClassVar[str] = "Liu et al. 2024"
    revision: ClassVar[int] = 1  # since features of LeNet-5 are its penultimate layer
    needs_proxy_data: ClassVar[bool] = True
    teaches_groups: ClassVar[bool] = True
    order_stream: ClassVar[str] = "hybrid distillation"
    streams: ClassVar[tuple[str, ...]] = ("sub-networks",)

    a: Annotated[float, Ge(0), Search("log:0.1..10"), "weight of the self-distillation"] = 1.0
    eta: Annotated[float, Ge(0), "weight of the predictions on the server"] = 1.0
    nu: Annotated[float, Ge(0), "weight of the features on the server"] = 1.0
    M: Annotated[int, Ge(1), "sub-networks a step"] = 2
    min_width: Annotated[float, Gt(0), Le(1), "smallest width of a sub-network; one always has it"] = 0.8
    rotation: Annotated[float, Ge(0), Le(180), "largest rotation of a sub-network's images, in degrees"] = 15.0
    variant: Annotated[
        Variant, BeforeValidator(str), "ablation: 1 (self-distillation, beta=1), 2 (with beta), 3 (server only), full"
    ] = "full"
    beta_per_sample: Annotated[bool, "beta from each sample's loss, not the batch's mean"] = False
    literal: Annotated[bool, "Eq. 3 and 5 as printed, (sum_m beta_m) (sum_m KL_m), not sum_m beta_m KL_m"] = False
    source: Annotated[Literal["proxy", "generated"], "server samples; generated needs dafkd+fedhyb"] = "proxy"
    server_epochs: Annotated[int, Ge(0), "epochs over the server's samples a round"] = 1
    server_batch: Annotated[int, Ge(1), "batch size of the distillation"] = 64

    @property
    def on_clients(self) -> bool:
        return self.variant != "3" and self.a > 0

    @property
    def on_server(self) -> bool:
        return self.variant in ("3", "full") and self.server_epochs > 0 and self.eta + self.nu > 0

    def check(self, task: Task) -> None:
        if self.on_clients:
            if len(task.dataset.shape) != 3:
                raise SettingError("fedhyb turns and scales images for its sub-networks; set variant=3 for other data")
            x = task.dataset.normalise(task.dataset.train.x[:4])
            check_sliceable(classifier(task.nets.get("student")), x, self.min_width)
        if self.on_server and self.nu:
            require_features(task, "fedhyb with nu > 0")
        if self.source == "generated" and self.maker() is None:
            raise SettingError("fedhyb: source=generated needs a generator; write the method as dafkd+fedhyb")
        super().check(task)

    def needs(self) -> Needs:
        own = self.on_server and self.source == "proxy"
        return replace(super().needs(), proxy_data=own or self.inner.needs().proxy_data)

    # --- client -------------------------------------------------------------------------------------------------

    @property
    def beyond_steps(self) -> str:
        return "fedhyb trains several sub-networks in one step"

    def objective(self, client: Client) -> Objective:
        inner = super().objective(client)
        if not self.on_clients:
            return inner
        rng = client.stream("sub-networks")

        def term(batch: Batch, out: Outputs) -> Tensor:
            """a sum_m beta_m KL(softmax(q) || softmax(sub_m(R_m x))); the full network teaches and is not taught."""
            total, betas, divergences = torch.zeros(()), torch.zeros(()), torch.zeros(())
            for m in range(self.M):
                width = self.min_width + (1 - self.min_width) * (float(torch.rand((), generator=rng)) if m else 0.0)
                with slimmed(client.net, width) as sub:
                    student = logits(sub, self.transformed(batch.x, rng))
                beta, divergence = self.weight_and_divergence(out.logits.detach(), student, batch.y)
                total = total + (beta * divergence).mean()
                betas, divergences = betas + beta, divergences + divergence
            return self.a * ((betas * divergences).mean() if self.literal else total)

        return inner + Objective(term=term)

    def weight_and_divergence(self, teacher: Tensor, student: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """beta_m and KL_m with beta_m = sigmoid(-CE), of the batch or of each sample.

        A sub-network that is wrong is not pulled so hard.
        """
        if self.variant == "1":
            return torch.ones(()), kl(teacher, student)
        if self.beta_per_sample:
            beta = torch.sigmoid(-F.cross_entropy(student, y, reduction="none")).detach()
            return beta, soft_kl_each(teacher.softmax(1), student)
        return torch.sigmoid(-F.cross_entropy(student, y)).detach(), kl(teacher, student)

    def transformed(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """R_m: the batch at a random resolution, brought back to its size, each image turned a little."""
        scale = SCALES[int(torch.randint(len(SCALES), (), generator=rng))]
        if scale < 1:
            size = x.shape[-2:]
            smaller = [max(1, round(scale * side)) for side in size]
            small = F.interpolate(x, size=smaller, mode="bilinear", align_corners=False)
            x = F.interpolate(small, size=size, mode="bilinear", align_corners=False)
        degrees = (2 * torch.rand(len(x), generator=rng) - 1) * self.rotation
        return rotate_by(x, degrees).contiguous(memory_format=torch.channels_last)

    # --- server -------------------------------------------------------------------------------------------------

    def improve_all(self, servers: Sequence[Server], uplinks: list[Uplink]) -> None:
        """Where networks differ, all clients' predictions teach all; features are those of the same network."""
        if not self.on_server:
            return
        samples = self.samples(servers[0])  # a generator is the same for all groups
        outputs = servers[0].outputs_of(uplinks, samples)
        for server in servers:
            alike = [out for up, out in zip(uplinks, outputs, strict=True) if up.task is None or up.task is server.task]
            self.teach(server, samples, mean_probabilities(outputs), mean_features(alike))  # Eq. 6 and 7

    def teach(self, server: Server, samples: Samples, probabilities: Tensor, features: Tensor) -> None:
        """Distil the clients' mean predictions and features into `server.model`."""

        def loss(batch: Batch, out: Outputs) -> Tensor:
            by_prediction = soft_kl(probabilities[batch.ids], out.logits)
            by_feature = F.mse_loss(out.features, features[batch.ids])
            return self.eta * by_prediction + self.nu * by_feature

        self.distil(server, samples, loss, epochs=self.server_epochs)

    def samples(self, server: Server) -> Samples:
        maker = self.maker()
        if self.source == "generated" and maker is not None:
            return maker.pseudo(server.task, server.state["generator"], server.round)
        return self.proxy(server)

    def maker(self) -> DaFKD | None:
        """The method inside this one that trains a generator."""
        return next((part for part in self.inner.parts() if isinstance(part, DaFKD)), None)
