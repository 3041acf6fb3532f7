"""For methods whose clients learn from a global model: where networks differ, other groups' models can teach too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedstill.core.tree import Message
from fedstill.methods.base import Networks, Part, Server, Wire
from fedstill.methods.fedavg import FedAvg
from fedstill.models.base import Classifier
from fedstill.train.evaluate import Outputs, load_for_evaluation, logits, outputs
from fedstill.train.task import Task, classifier

TEACHER = "group teacher"  # in server.state: what a group teaches the others, as the last of its rounds left it


@dataclass(frozen=True)
class AcrossGroups(FedAvg):
    """A method with a teacher in each group, which with `across` is sent to the clients of the other groups as well."""

    other_networks: ClassVar[str] = "with across=true all groups teach all"

    across: Annotated[bool, "where networks differ, the other groups' teachers teach too"] = field(
        default=False, kw_only=True
    )

    @property
    def networks(self) -> Networks:
        return "teach" if self.across else "group"

    @property
    def needs_other_networks(self) -> bool:
        return self.across

    def group_teacher(self, server: Server) -> Tensor:
        """What a group teaches the others after a round; the model that the run is for, unless a method says else."""
        return next(iter(self.models(server).values()))

    def wire(self, task: Task) -> Wire:
        plain = super().wire(task)
        return Wire(plain.down | declared(task, plain.down["model"]), plain.up) if self.across else plain

    def downlink(self, server: Server) -> Message:
        return super().downlink(server) | (sent(server) if self.across else {})

    def end(self, server: Server) -> None:
        if self.across and server.peers:
            server.state[TEACHER] = self.group_teacher(server)


def declared(task: Task, model: Part) -> dict[str, Part]:
    """What a client is sent of every other group: its teacher, once it has been trained."""
    return {
        _name(other): replace(model, shape=(other.size,), what=f"teacher of {other.group}", optional=True)
        for other in task.others
    }


def sent(server: Server) -> Message:
    """The teachers of the other groups, as they were when the round began; those of groups that have trained."""
    return {_name(peer.task): peer.state[TEACHER] for peer in server.peers if TEACHER in peer.state}


def received(task: Task, down: Message) -> list[tuple[Task, Tensor]]:
    """The teachers that came, each with the task whose network it is."""
    return [(other, down[_name(other)]) for other in task.others if _name(other) in down]


def ensemble(logits: Sequence[Tensor]) -> Tensor:
    """The mean of the teachers' logits, (N, C): all groups count alike.

    >>> ensemble([torch.tensor([[1.0, 3.0]]), torch.tensor([[3.0, -1.0]])])
    tensor([[2., 1.]])
    """
    return logits[0] if len(logits) == 1 else torch.stack(list(logits)).mean(0)


def loaded(task: Task, down: Message) -> list[Classifier]:
    """The networks of all teachers that came, that of the client's own group first."""
    own = load_for_evaluation(task, down.get("teacher", down["model"]), "teacher")
    others = [  # groups may share a network: each has a role of its own
        load_for_evaluation(other, weights, f"teacher of {other.group}") for other, weights in received(task, down)
    ]
    return [classifier(net) for net in (own, *others)]


def joint_outputs(teachers: Sequence[Classifier], x: Tensor) -> Outputs:
    """The mean logits of all teachers, and the features of the first."""
    found = outputs(teachers[0], x)
    return Outputs(ensemble([found.logits, *(logits(other, x) for other in teachers[1:])]), found.features)


def _name(task: Task) -> str:
    return f"teacher-{task.group}"
