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
from fedstill.methods.base import Server, Wire
from fedstill.methods.other_teachers import TEACHER, AcrossGroups, ensemble, received
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
class FedGKD(AcrossGroups):
    """The mean of the last `buffer` global models teaches every client.

    Where clients have different networks, each group has such a teacher. With `across` the other groups' teach too, by
    their logits: the teacher's are then the mean over the groups, which all count alike. A group teaches once it has
    trained; all are sent as they were when the round began.
    """

    name: ClassVar[str] = "fedgkd"
    paper: ClassVar[str] = "Yao et al. 2022"
    server_keys: ClassVar[tuple[str, ...]] = ("history", TEACHER)

    gamma: Annotated[float, Ge(0), Search("log:0.02..2"), "weight of the teacher; the loss has gamma/2"] = 0.2
    buffer: Annotated[int, Ge(1), Search("1,3,5"), "M: how many past global models are averaged"] = 5
    regulariser: Annotated[Regulariser, "KL of probabilities, or squared error of logits"] = "kl"

    def wire(self, task: Task) -> Wire:
        plain = super().wire(task)
        if self.buffer == 1:  # the teacher is the model itself
            return plain
        return Wire(plain.down | {"teacher": plain.down["model"]}, plain.up)

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
        return down

    def group_teacher(self, server: Server) -> Tensor:
        last = [*server.state["history"], server.model][-self.buffer :]  # as the next `begin` will have them
        return weighted_mean((w, 1) for w in last)

    def objective(self, client: Client) -> Objective:
        if client.round == 1 or self.gamma == 0:
            return Objective()
        teachers = [client.teacher(client.down.get("teacher", client.down["model"]))]
        teachers += [client.teacher(weights, task) for task, weights in received(client.task, client.down)]
        distance = REGULARISERS[self.regulariser]

        def term(batch: Batch, out: Outputs) -> Tensor:  # Eq. 4
            logits = ensemble([teacher(batch).logits for teacher in teachers])
            return self.gamma / 2 * distance(logits, out.logits)

        return Objective(term=term)
