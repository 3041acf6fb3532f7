"""FedGKD: Yao et al., "Local-global knowledge distillation in heterogeneous federated learning", 2022."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge
from torch import Tensor
from torch.nn import functional as F

from fedstill.aggregate.mean import weighted_mean
from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.methods import other_teachers
from fedstill.methods.base import Networks, Server, Wire
from fedstill.methods.fedavg import FedAvg
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch, Objective
from fedstill.train.losses import kl
from fedstill.train.task import Task


def mse(teacher: Tensor, student: Tensor) -> Tensor:
    """Mean squared difference of logits (the paper's Table 9)."""
    return F.mse_loss(student, teacher)


Regulariser = Literal["kl", "mse"]
REGULARISERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": kl, "mse": mse}


@dataclass(frozen=True)
class FedGKD(FedAvg):
    """The mean of the last `buffer` global models teaches every client.

    Where clients have different networks, each group has such a teacher. With `across` the other groups' teach too, by
    their logits: the teacher's are then the mean over the groups, which all count alike. A group teaches once it has
    trained; all are sent as they were when the round began.
    """

    name: ClassVar[str] = "fedgkd"
    paper: ClassVar[str] = "Yao et al. 2022"
    other_networks: ClassVar[str] = "with across=true all groups teach all"
    server_keys: ClassVar[tuple[str, ...]] = ("history", other_teachers.TEACHER)

    gamma: Annotated[float, Ge(0), Search("log:0.02..2"), "weight of the teacher; the loss has gamma/2"] = 0.2
    buffer: Annotated[int, Ge(1), Search("1,3,5"), "M: how many past global models are averaged"] = 5
    regulariser: Annotated[Regulariser, "KL of probabilities, or squared error of logits"] = "kl"
    across: Annotated[bool, "where networks differ, the other groups' global models teach too"] = False

    @property
    def networks(self) -> Networks:
        return "teach" if self.across else "group"

    def wire(self, task: Task) -> Wire:
        plain = super().wire(task)
        others = other_teachers.declared(task, plain.down["model"]) if self.across else {}
        if self.buffer == 1:  # the teacher is the model itself
            return Wire(plain.down | others, plain.up)
        return Wire(plain.down | {"teacher": plain.down["model"]} | others, plain.up)

    def start(self, server: Server) -> None:
        server.state["history"] = []  # trained models only: the initial weights have nothing to teach

    def begin(self, server: Server) -> None:
        if server.round > 1:
            server.state["history"] = [*server.state["history"], server.model][-self.buffer :]

    def downlink(self, server: Server) -> Message:
        down = super().downlink(server)
        if self.buffer > 1:
            history = server.state["history"] or [server.model]
            down["teacher"] = weighted_mean((w, 1) for w in history)  # w-bar_t, Sec. 3.2
        return down | other_teachers.sent(server) if self.across else down

    def end(self, server: Server) -> None:
        if self.across and server.peers:
            last = [*server.state["history"], server.model][-self.buffer :]  # as the next `begin` will have them
            server.state[other_teachers.TEACHER] = weighted_mean((w, 1) for w in last)

    def objective(self, client: Client) -> Objective:
        if client.round == 1 or self.gamma == 0:
            return Objective()
        others = other_teachers.received(client.task, client.down) if self.across else []
        teachers = [client.teacher(client.down.get("teacher", client.down["model"]))]
        teachers += [client.teacher(weights, task) for task, weights in others]
        distance = REGULARISERS[self.regulariser]

        def term(batch: Batch, out: Outputs) -> Tensor:  # Eq. 4
            logits = other_teachers.ensemble([teacher(batch).logits for teacher in teachers])
            return self.gamma / 2 * distance(logits, out.logits)

        return Objective(term=term)
