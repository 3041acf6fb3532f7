"""FedGKD-VOTE: Yao et al., 2022, Eq. 5."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.methods.base import Part, Server, Wire
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedgkd import REGULARISERS, Regulariser
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs, mean_loss
from fedstill.train.loop import Batch, Objective
from fedstill.train.task import Task


@dataclass(frozen=True)
class FedGKDVote(FedAvg):
    """Each of the last `buffer` global models teaches every client, weighted by its validation loss."""

    name: ClassVar[str] = "fedgkd-vote"
    paper: ClassVar[str] = "Yao et al. 2022"
    needs_server_labels: ClassVar[bool] = True
    server_keys: ClassVar[tuple[str, ...]] = ("history", "losses")

    lambda_: Annotated[float, Ge(0), Search("log:0.01..1"), "total weight of the teachers"] = 0.1
    buffer: Annotated[int, Ge(1), Search("1,3,5"), "M: how many past global models teach"] = 5
    beta: Annotated[float, Ge(0), "temperature of the vote; 0: 1/buffer"] = 0.0
    regulariser: Annotated[Regulariser, "KL of probabilities, or squared error of logits"] = "kl"

    def wire(self, task: Task) -> Wire:
        plain = super().wire(task)
        older = replace(plain.down["model"], optional=True)
        votes = Part((self.buffer,), "weight of each teacher, newest first")
        return Wire(plain.down | {_older(m): older for m in range(1, self.buffer)} | {"votes": votes}, plain.up)

    def start(self, server: Server) -> None:
        server.state |= {"history": [], "losses": []}  # oldest first

    def begin(self, server: Server) -> None:
        if server.round == 1:
            return
        assert server.pool is not None
        # A model's validation loss never changes: it is measured once, when the model joins the buffer.
        loss = mean_loss(server.task, server.model, server.pool)
        server.state["history"] = [*server.state["history"], server.model][-self.buffer :]
        server.state["losses"] = [*server.state["losses"], loss][-self.buffer :]

    def downlink(self, server: Server) -> Message:
        newest_first = server.state["history"][::-1]
        votes = torch.zeros(self.buffer)
        votes[: len(newest_first)] = self.votes(server.state["losses"][::-1])
        return {
            "model": server.model,
            **{_older(m): model for m, model in enumerate(newest_first) if m},
            "votes": votes,
        }

    def votes(self, losses: list[float]) -> Tensor:
        """gamma_m / 2 = lambda softmax_m(-L_m / beta)."""
        beta = self.beta or 1 / self.buffer
        return self.lambda_ * torch.softmax(-torch.tensor(losses, dtype=torch.float64) / beta, 0).float()

    def objective(self, client: Client) -> Objective:
        if client.round == 1 or self.lambda_ == 0:
            return Objective()
        down, distance = client.down, REGULARISERS[self.regulariser]
        models = [down["model"], *(down[_older(m)] for m in range(1, self.buffer) if _older(m) in down)]
        votes = down["votes"].tolist()
        teachers = [(vote, client.teacher(model)) for vote, model in zip(votes, models, strict=False)]

        def term(batch: Batch, out: Outputs) -> Tensor:  # Eq. 5
            return torch.stack([vote * distance(teacher(batch).logits, out.logits) for vote, teacher in teachers]).sum()

        return Objective(term=term)


def _older(m: int) -> str:
    """Name of the global model of m rounds before."""
    return f"model-{m}"
