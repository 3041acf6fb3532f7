"""FML: Shen et al., "Federated mutual learning", 2020."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le
from torch import Tensor

from fedstill.aggregate.mean import weighted_mean
from fedstill.methods.base import Server, Uplink
from fedstill.methods.shared_network import SharedNetwork
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs, outputs
from fedstill.train.loop import Batch, Objective, cross_entropy
from fedstill.train.losses import kl
from fedstill.train.task import classifier


@dataclass(frozen=True)
class FML(SharedNetwork):
    """A small network goes round (the paper's meme model); on each client it and the client's own teach each other.

    The own network minimises alpha CE + (1 - alpha) KL(shared || own), the shared one beta CE + (1 - beta)
    KL(own || shared), both in the same steps, with the run's optimiser and rate; what teaches is a constant. The
    shared networks are averaged by sample counts. The clients' own models are the result; the shared one is not
    evaluated.
    """

    name: ClassVar[str] = "fml"
    paper: ClassVar[str] = "Shen et al. 2020"

    alpha: Annotated[float, Ge(0), Le(1), "weight of the labels for a client's own network"] = 0.5
    beta: Annotated[float, Ge(0), Le(1), "weight of the labels for the shared network"] = 0.5

    def objective(self, client: Client) -> Objective:
        shared = classifier(self.network_to_share(client.task).load(client.down["shared"]))

        def base(batch: Batch, own: Outputs) -> Tensor:
            return self.mutual_loss(batch, own, outputs(shared, batch.x))

        return Objective(base=base, modules=(shared,))

    def mutual_loss(self, batch: Batch, own: Outputs, shared: Outputs) -> Tensor:
        """The sum of both networks' losses, of which each depends on one of them."""
        of_own = self.alpha * cross_entropy(batch, own) + (1 - self.alpha) * kl(shared.logits.detach(), own.logits)
        of_shared = self.beta * cross_entropy(batch, shared) + (1 - self.beta) * kl(own.logits.detach(), shared.logits)
        return of_own + of_shared

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        server.state["shared"] = weighted_mean((up["shared"], up.samples) for up in uplinks)
