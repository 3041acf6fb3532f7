"""For methods whose clients learn from a global model: teachers of the other groups, where networks differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedstill.core.tree import Message
from fedstill.methods.base import Part, Server
from fedstill.train.task import Task

TEACHER = "group teacher"  # in server.state: what a group teaches the others, as the last of its rounds left it


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


def _name(task: Task) -> str:
    return f"teacher-{task.group}"
