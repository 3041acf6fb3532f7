"""FedKD: Wu et al., "Communication-efficient federated learning via knowledge distillation", 2022."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn
from torch.nn import functional as F

from fedstill.aggregate.mean import RunningMean
from fedstill.core.tree import Message
from fedstill.core.weights import Entry
from fedstill.distill.auxiliary import Auxiliary
from fedstill.methods.base import Part, Server, Uplink, Wire
from fedstill.methods.kinds import Kind
from fedstill.methods.shared_network import SharedNetwork
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs, outputs, require_features
from fedstill.train.loop import Batch, Objective, cross_entropy
from fedstill.train.losses import kl
from fedstill.train.task import Task, classifier


@dataclass(frozen=True)
class FedKD(SharedNetwork):
    """A client's own network (the mentor) and a shared one (the mentee) teach each other; updates are compressed.

    Each minimises CE + KL / (CE_own + CE_shared) + MSE / (CE_own + CE_shared): distillation counts the more, the better
    both are (Eq. 1 to 3). The divisor is a constant in the gradient, and so is what teaches by KL. The MSE between the
    own features and a linear map of the shared ones, which each client keeps, is one term for both and for the map.

    What a client sends is the change of the shared network, each of its matrices by the fewest singular values that
    hold a share of its energy, sum of their squares: T_start, rising to T_end over T_rounds rounds (Eq. 8). A
    convolution is a matrix with a row for each output; vectors, and matrices that factors would not make smaller, are
    sent as they are. The server sends the shared network itself, since a client that missed a round could make nothing
    of a change; the paper compresses that way too. Changes are averaged by sample counts.
    """

    name: ClassVar[str] = "fedkd"
    paper: ClassVar[str] = "Wu et al. 2022"
    client_keys: ClassVar[tuple[str, ...]] = ("model", "map")

    T_start: Annotated[float, Gt(0), Le(1), "share of the energy that is sent at first"] = 0.95
    T_end: Annotated[float, Gt(0), Le(1), "share of the energy that is sent at the end"] = 0.98
    T_rounds: Annotated[int, Ge(1), "rounds over which one becomes the other"] = 100

    def check(self, task: Task) -> None:
        super().check(task)
        require_features(task, self.name)

    def wire(self, task: Task) -> Wire:
        both, net = super().wire(task), self.network_to_share(task).net
        matrices = len(net.entries)
        return Wire(
            both.down,
            {
                "factors": Part(
                    (net.size,), "change of the shared network", net.vector.dtype, variable=True, kind=Kind.WEIGHTS
                ),
                "ranks": Part((matrices,), "rank of each matrix; 0: as it is", torch.int64, least=0, kind=Kind.WEIGHTS),
            },
        )

    def objective(self, client: Client) -> Objective:
        shared = classifier(self.network_to_share(client.task).load(client.down["shared"]))
        linear = self.linear_map(client.task)
        kept = client.state.get("map")
        to_own = linear.load(linear.initial() if kept is None else kept).module

        def base(batch: Batch, own: Outputs) -> Tensor:
            other = outputs(shared, batch.x)
            return self.mutual_loss(batch, own, other, to_own(other.features))

        return Objective(base=base, modules=(shared, to_own))

    def mutual_loss(self, batch: Batch, own: Outputs, shared: Outputs, mapped: Tensor) -> Tensor:
        """The sum of both networks' losses; `mapped` are the shared features, mapped to the own ones."""
        by_labels = cross_entropy(batch, own) + cross_entropy(batch, shared)
        by_each_other = kl(shared.logits.detach(), own.logits) + kl(own.logits.detach(), shared.logits)
        return by_labels + (by_each_other + F.mse_loss(own.features, mapped)) / by_labels.detach()

    def uplink(self, client: Client) -> Message:
        change = super().uplink(client)["shared"] - client.down["shared"]
        client.state["map"] = self.linear_map(client.task).net.read()
        energy = self.T_start + (self.T_end - self.T_start) * min(1.0, client.round / self.T_rounds)
        factors, ranks = compressed(change, self.network_to_share(client.task).net.entries, energy)
        return {"factors": factors, "ranks": ranks}

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        change, entries, ignored = RunningMean(), self.network_to_share(server.task).net.entries, 0
        for up in uplinks:
            if (restored := decompressed(up["factors"], up["ranks"].tolist(), entries)) is None:
                ignored += 1  # a client's ranks do not fit its factors
            else:
                change.add(restored, up.samples)
        if ignored:
            server.notes["ignored"] = ignored
        if change.total:
            server.state["shared"] = server.state["shared"] + change.result()

    def linear_map(self, task: Task) -> Auxiliary:
        """From the shared network's features to the client's own."""
        width = classifier(self.network_to_share(task).net).feature_dim

        def make() -> nn.Module:
            return nn.Linear(width, task.feature_dim, bias=False)

        return Auxiliary(task, f"map from {self.shared}", "map of features", make)


def compressed(change: Tensor, entries: Sequence[Entry], energy: float) -> tuple[Tensor, Tensor]:
    """The numbers of every tensor, or of its factors if these are fewer; and the rank of each, 0 without factors."""
    parts, ranks = [], []
    for entry in entries:
        tensor, rank = entry.view(change), 0
        if tensor.dim() > 1:
            u, s, v = torch.linalg.svd(tensor.reshape(len(tensor), -1).double(), full_matrices=False)
            rank = rank_for(s, energy)
            if rank * (u.shape[0] + v.shape[1]) < tensor.numel():
                parts += [(u[:, :rank] * s[:rank]).flatten().to(change.dtype), v[:rank].flatten().to(change.dtype)]
            else:
                rank = 0
        if rank == 0:
            parts.append(tensor.flatten())
        ranks.append(rank)
    return torch.cat(parts), torch.tensor(ranks)


def rank_for(singular_values: Tensor, energy: float) -> int:
    """The fewest singular values, the largest first, whose squares are this share of all; at least 1.

    >>> rank_for(torch.tensor([3.0, 1.0]), 0.9), rank_for(torch.tensor([3.0, 1.0]), 0.95)
    (1, 2)
    """
    squares = singular_values.square()
    reached = squares.cumsum(0) >= energy * squares.sum()
    return max(1, len(squares) - int(reached.sum()) + 1)


def decompressed(factors: Tensor, ranks: Sequence[int], entries: Sequence[Entry]) -> Tensor | None:
    """What `compressed` was given, but for what it left out; None if these are not its ranks."""
    parts, start = [], 0
    for entry, rank in zip(entries, ranks, strict=True):
        rows, size = (entry.shape or (1,))[0], entry.stop - entry.start
        columns = size // max(1, rows)
        if rank > min(rows, columns):
            return None
        sizes = [rank * rows, rank * columns] if rank else [size]
        if start + sum(sizes) > len(factors):
            return None
        pieces = factors[start : start + sum(sizes)].split(sizes)
        start += sum(sizes)
        found = pieces[0].view(rows, rank) @ pieces[1].view(rank, columns) if rank else pieces[0]
        whole = torch.empty(size, dtype=factors.dtype)
        entry.shaped(whole).copy_(found.view(entry.shape))
        parts.append(whole)
    return torch.cat(parts) if start == len(factors) else None
