"""Noisy votes: Papernot et al., "Scalable private learning with PATE", 2018 (GNMax), as a private kind of FedDF.

The models of a round's clients label unlabelled samples of the server, each with one vote a sample; Gaussian noise is
added to the counts, and the model learns the classes that then have most. Nothing else is made of what clients send, so
that the model is as private as the noisy counts. Of m samples, a client moves one vote of each: with its votes the
counts are a vector that it moves by the norm sqrt(m) at most, whatever it sends. So a round is a Gaussian mechanism of
noise `noise_multiplier x sqrt(m)`, and accounted like any other (of PATE's two bounds the one that does not look at the
votes: an epsilon that does would itself have to be kept secret).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor
from torch.nn import functional as F

from fedstill.core.device import to_current_device
from fedstill.core.errors import SettingError
from fedstill.core.space import Search
from fedstill.distill.stage import distil, match_probabilities
from fedstill.methods.base import Server, Uplink
from fedstill.methods.dp import PrivateClients
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.modifier import Modifier
from fedstill.privacy.noise import gaussian
from fedstill.train.task import LocalTraining, Samples, Task


@dataclass(frozen=True)
class Votes(PrivateClients):
    """Clients' models vote on the labels of proxy data, and the noisy winners teach the model; nothing is averaged."""

    name: ClassVar[str] = "votes"
    paper: ClassVar[str] = "Papernot et al. 2018"
    needs_proxy_data: ClassVar[bool] = True
    server_keys: ClassVar[tuple[str, ...]] = ("votes",)
    streams: ClassVar[tuple[str, ...]] = ("vote noise", "voted samples", "voted labels")

    queries: Annotated[int, Ge(1), "proxy samples that are voted on in a round; fewer have less noise"] = 500
    server_epochs: Annotated[int, Ge(1), "passes over them that the model learns"] = 5
    server_lr: Annotated[float, Gt(0), Search("log:1e-4..1e-2"), "learning rate of it (Adam)"] = 1e-3
    server_batch: Annotated[int, Ge(1), "batch size of it"] = 64

    @property
    def beyond_sums(self) -> str:
        return "votes asks every client's own model"

    def check_private(self, task: Task) -> None:
        if task.proxy is None:
            raise SettingError("votes needs proxy data on the server: set proxy to a dataset, or proxy=pool")
        inner = "+".join(part.name for part in self.inner.parts())
        plain = type(self.inner).aggregate is FedAvg.aggregate and not isinstance(self.inner, Modifier)
        if not plain or self.inner.wire(task).up.keys() != {"model"} or self.inner.has_final_exchange:
            raise SettingError(
                f"votes makes nothing of what clients send but votes, and {inner} does; take fedavg, fedprox, moon or "
                "fedgkd"
            )
        if task.buffers == "average" and task.size > task.trainable:
            raise SettingError(
                "votes averages nothing, BatchNorm's statistics neither; set buffers=local or buffers=drop, or take a "
                "network with GroupNorm"
            )

    def report(self, server: Server) -> dict[str, Any]:
        return super().report(server) | {"of each client": "one vote a sample"}

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        assert server.task.proxy is not None
        asked = server.task.proxy.take(self._queries(server, len(server.task.proxy)))
        counts = votes(server, uplinks, asked)
        self.count_round(server)
        generator = server.stream("vote noise") if server.simulated else None
        noise = self.noise_multiplier * math.sqrt(len(asked))
        noisy = counts + noise * to_current_device(gaussian(counts.numel(), generator)).view(counts.shape)
        targets = F.one_hot(noisy.argmax(1), server.task.classes).to(server.task.dtype)
        training = LocalTraining(
            optimizer="adam", epochs=self.server_epochs, batch_size=self.server_batch, lr=self.server_lr
        )
        order = server.stream("voted labels")
        server.model = distil(server.task, server.model, asked, match_probabilities(targets), training, order)

    def _queries(self, server: Server, there: int) -> Tensor:
        """Which samples are voted on in this round: others in every round, whatever the clients have."""
        return torch.randperm(there, generator=server.stream("voted samples"))[: self.queries]


def votes(server: Server, uplinks: Iterator[Uplink], samples: Samples) -> Tensor:
    """How many of the clients' models take each sample for each class: each client has one vote a sample."""
    counts = to_current_device(torch.zeros(len(samples), server.task.classes, dtype=torch.float64))
    for up in uplinks:
        (outputs,) = server.predict_all([up["model"]], samples)
        counts += F.one_hot(outputs.logits.argmax(1), server.task.classes)
    return counts
