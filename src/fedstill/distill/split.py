"""The server's labelled samples, divided by what they are used for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedstill.train.task import Samples


@dataclass(frozen=True)
class Split:
    """The server's samples, by what they are used for."""

    samples: Samples  # all that are used
    train: Tensor  # places of those that the student learns from
    check: Tensor  # places of those, labelled, that tell who is reliable
    labelled: Tensor  # for each of `train`, whether its label may be used


def split_by_use(
    samples: Samples, share: float, even: bool, labelled_share: float, held_out: float, rng: torch.Generator
) -> Split:
    """A share of the samples, of which some count as labelled.

    Those check the teachers; with `held_out`, only that share of them does, and the student does not learn from it.
    """
    y = samples.y
    used = torch.nonzero(in_share(y, share, even, rng)).flatten()
    labelled = in_share(y[used], labelled_share, False, rng)
    check = labelled
    train = torch.ones(len(used), dtype=torch.bool)
    if held_out:
        check = torch.zeros_like(labelled)
        check[labelled] = in_share(y[used][labelled], held_out, False, rng)
        train = ~check
    places = torch.arange(len(used))
    return Split(samples.take(used), places[train], places[check], labelled[train])


def in_share(y: Tensor, share: float, even: bool, rng: torch.Generator) -> Tensor:
    """Which samples belong to a share of them, classes in proportion or as even as they allow."""
    counts = torch.bincount(y)
    wanted = (share * counts).round().long().clamp(min=1)
    if even:
        wanted = torch.full_like(counts, max(1, round(share * len(y) / max(1, int((counts > 0).sum())))))
    order = torch.randperm(len(y), generator=rng)
    by_class = order[torch.sort(y[order], stable=True).indices]
    rank = torch.empty_like(y)
    rank[by_class] = torch.arange(len(y)) - (counts.cumsum(0) - counts)[y[by_class]]
    return rank < wanted[y]
