"""FedBE: Chen and Chao, "Making Bayesian model ensemble applicable to federated learning", 2021."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from fedstill.core.space import Search
from fedstill.distill.stage import match_probabilities, mean_probabilities
from fedstill.methods.base import Server, Uplink
from fedstill.methods.server_side import Distilling
from fedstill.train.task import LocalTraining


@dataclass(frozen=True)
class FedBE(Distilling):
    """Models drawn from a distribution over the clients' weights teach the averaged model on proxy data."""

    name: ClassVar[str] = "fedbe"
    paper: ClassVar[str] = "Chen & Chao 2021"
    needs_proxy_data: ClassVar[bool] = True
    training: ClassVar[LocalTraining] = LocalTraining(optimizer="sgd", momentum=0.9, weight_decay=1e-5)
    streams: ClassVar[tuple[str, ...]] = ("ensemble",)

    samples: Annotated[int, Ge(0), "models drawn; 0 with clients_teach is plain ensemble distillation"] = 10
    distribution: Annotated[Literal["gaussian", "dirichlet"], "of the updates, or of the clients' shares"] = "gaussian"
    spread: Annotated[float, Ge(0), "factor on the Gaussian's standard deviation"] = 0.1
    clients_teach: Annotated[bool, "the clients' own models teach too"] = True
    sharpen: Annotated[float, Gt(0), "temperature of the ensemble's probabilities; below 1 sharpens"] = 0.5
    server_epochs: Annotated[int, Ge(0), "epochs over the proxy data a round"] = 20
    server_lr: Annotated[float, Gt(0), Search("log:1e-4..1e-2"), "learning rate (SGD, momentum 0.9)"] = 1e-3

    def improve(self, server: Server, uplinks: list[Uplink]) -> None:
        if self.server_epochs == 0:
            return
        proxy = self.proxy(server)
        models = torch.stack([up["model"] for up in uplinks])
        teachers = [server.model, *self.draw(server, models)]
        teachers += list(models) if self.clients_teach else []
        mixture = mean_probabilities(server.predict_all(teachers, proxy))
        targets = (mixture.clamp(min=1e-38).log() / self.sharpen).softmax(1)  # p^(1/T), normalised
        self.distil(server, proxy, match_probabilities(targets), epochs=self.server_epochs)

    def draw(self, server: Server, models: Tensor) -> list[Tensor]:
        """Weights drawn from the distribution that the clients' weights (K, size) suggest."""
        rng = server.stream("ensemble")
        if self.distribution == "dirichlet":
            # Dir(1, …, 1) by normalised exponentials
            raw = torch.empty(self.samples, len(models), dtype=torch.float64).exponential_(generator=rng)
            return [(part @ models.double()).to(models.dtype) for part in raw / raw.sum(1, keepdim=True)]
        start, trainable = server.before.double(), server.task.trainable
        layers = [p.numel() for p in server.task.nets.get("student").params]
        updates = (models.double() - start)[:, :trainable].split(layers, dim=1)
        drawn = server.model.double().repeat(self.samples, 1)  # statistics stay those of the average
        noise = torch.randn(self.samples, trainable, generator=rng, dtype=torch.float64)
        parts = zip(
            updates,
            noise.split(layers, 1),
            drawn[:, :trainable].split(layers, 1),
            start.split([*layers, len(start) - trainable])[:-1],
            strict=True,
        )
        for update, random, place, first in parts:
            length = update.norm(dim=1, keepdim=True)
            direction = update / length.clamp(min=1e-12)
            deviation = self.spread * direction.std(0, correction=0)
            place.copy_(first + length.mean() * (direction.mean(0) + deviation * random))
        return list(drawn.to(models.dtype))
