"""Noisy votes: Papernot et al., "Scalable private learning with PATE", 2018 (GNMax), for FedDF and for FedMD.

The models of a round's clients label unlabelled samples of the server, each with one vote a sample; Gaussian noise is
added to the counts, and the model learns the classes that then have most. Nothing else is made of what clients send, so
that the model is as private as the noisy counts. Of m samples, a client moves one vote of each: with its votes the
counts are a vector that it moves by the norm sqrt(m) at most, whatever it sends. So a round is a Gaussian mechanism of
noise `noise_multiplier x sqrt(m)`, and accounted like any other (of PATE's two bounds the one that does not look at the
votes: an epsilon that does would itself have to be kept secret).

With FedMD the clients vote themselves, and the classes that lead are all that is sent to them. What others learn of a
client is then as private as the noisy counts; the model that it keeps is its own, and is not covered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor
from torch.nn import functional as F

from fedstill.core.device import to_current_device
from fedstill.core.errors import SettingError
from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.distill.stage import distil, match_probabilities
from fedstill.methods.base import Part, Server, Uplink, Wire
from fedstill.methods.dp import PrivateClients
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedmd import Distance, FedMD, public
from fedstill.methods.kinds import Kind
from fedstill.methods.modifier import Modifier
from fedstill.privacy.noise import gaussian
from fedstill.train.client import Client
from fedstill.train.task import LocalTraining, Samples, Task


@dataclass(frozen=True)
class VotedFedMD(FedMD):
    """FedMD whose clients agree on the classes of public samples, in place of their logits."""

    extra_information: ClassVar[str] = "classes that its model takes public samples for"
    server_keys: ClassVar[tuple[str, ...]] = ("voted",)

    def wire(self, task: Task) -> Wire:
        shape, most = (len(public(task)),), task.classes - 1
        voted = Part(
            shape, "class with most noisy votes of each public sample; -1: not voted on", torch.int64, least=-1
        )
        vote = Part(shape, "class of each public sample", torch.int64, least=0, most=most, kind=Kind.PREDICTIONS)
        return Wire({"voted": voted}, {"vote": vote})

    def start(self, server: Server) -> None:
        server.state["voted"] = torch.full((len(public(server.task)),), -1)

    def downlink(self, server: Server) -> Message:
        return {"voted": server.state["voted"]}

    def consensus(self, client: Client) -> tuple[Samples, Distance]:
        voted = client.down["voted"]
        places = torch.nonzero(voted >= 0).flatten()
        labels = voted[places]
        return public(client.task).take(places), lambda ids, own: F.cross_entropy(own, labels[ids])

    def uplink(self, client: Client) -> Message:
        return {"vote": super().uplink(client)["logits"].argmax(1)}


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

    def __post_init__(self) -> None:
        if type(self.inner) is FedMD:
            settings = {field.name: getattr(self.inner, field.name) for field in fields(FedMD)}
            object.__setattr__(self, "inner", VotedFedMD(**settings))

    @property
    def beyond_sums(self) -> str:
        return "votes asks every client's own model"

    def check_private(self, task: Task) -> None:
        if task.proxy is None:
            raise SettingError("votes needs proxy data on the server: set proxy to a dataset, or proxy=pool")
        if isinstance(self.inner, VotedFedMD):
            if self.inner.average_weights:
                raise SettingError(
                    "votes covers votes alone, and fedmd averages weights too: set average_weights=false"
                )
            return
        inner = "+".join(part.name for part in self.inner.parts())
        plain = type(self.inner).aggregate is FedAvg.aggregate and not isinstance(self.inner, Modifier)
        if not plain or self.inner.wire(task).up.keys() != {"model"} or self.inner.has_final_exchange:
            raise SettingError(
                f"votes makes nothing of what clients send but votes, and {inner} does; take fedavg, fedprox, moon, "
                "fedgkd or fedmd"
            )
        if task.buffers == "average" and task.size > task.trainable:
            raise SettingError(
                "votes averages nothing, BatchNorm's statistics neither; set buffers=local or buffers=drop, or take a "
                "network with GroupNorm"
            )

    def report(self, server: Server) -> dict[str, Any]:
        return super().report(server) | {"of each client": "one vote a sample"}

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        places = self._queries(server, len(public(server.task)))
        if isinstance(self.inner, VotedFedMD):
            counts = counted((up["vote"][places] for up in uplinks), len(places), server.task.classes)
            voted = torch.full((len(public(server.task)),), -1)
            voted[places] = self._winners(server, counts).cpu()
            server.state["voted"] = voted
            return
        asked = public(server.task).take(places)
        winners = self._winners(server, votes(server, uplinks, asked))
        targets = F.one_hot(winners, server.task.classes).to(server.task.dtype)
        training = LocalTraining(
            optimizer="adam", epochs=self.server_epochs, batch_size=self.server_batch, lr=self.server_lr
        )
        order = server.stream("voted labels")
        server.model = distil(server.task, server.model, asked, match_probabilities(targets), training, order)

    def _winners(self, server: Server, counts: Tensor) -> Tensor:
        """The class of each sample that has most votes with their noise. From here on the round is counted."""
        self.count_round(server)
        generator = server.stream("vote noise") if server.simulated else None
        noise = self.noise_multiplier * math.sqrt(len(counts))
        return (counts + noise * to_current_device(gaussian(counts.numel(), generator)).view(counts.shape)).argmax(1)

    def _queries(self, server: Server, there: int) -> Tensor:
        """Which samples are voted on in this round: others in every round, whatever the clients have."""
        return torch.randperm(there, generator=server.stream("voted samples"))[: self.queries]


def votes(server: Server, uplinks: Iterator[Uplink], samples: Samples) -> Tensor:
    """How many of the clients' models take each sample for each class: each client has one vote a sample."""
    outputs = (server.predict_all([up["model"]], samples)[0] for up in uplinks)
    return counted((out.logits.argmax(1) for out in outputs), len(samples), server.task.classes)


def counted(ballots: Iterable[Tensor], samples: int, classes: int) -> Tensor:
    """How often each sample (row) was taken for each class, where a ballot has a class for each sample.

    >>> counted([torch.tensor([0, 1]), torch.tensor([0, 2])], 2, 3).tolist()
    [[2.0, 0.0, 0.0], [0.0, 1.0, 1.0]]
    """
    counts = to_current_device(torch.zeros(samples, classes, dtype=torch.float64))
    for ballot in ballots:
        counts += F.one_hot(ballot, classes)
    return counts
