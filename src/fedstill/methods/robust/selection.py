"""Rules that choose among clients: Krum (Blanchard et al. 2017) and Bulyan (El Mhamdi et al. 2018)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.methods.base import Server, Uplink
from fedstill.methods.robust.rule import Robust, columns, median, replaced, squared_distances, statistics, updates

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selecting(Robust):
    """What Krum and Bulyan share: how many malicious clients there may be, and how far clients are apart."""

    byzantine: Annotated[int, Ge(0), "f, how many clients of a round may be malicious"] = 1

    times: ClassVar[int] = 2  # a round needs times * f + 3 clients

    @property
    def fewest_clients(self) -> int:
        return self.times * self.byzantine + 3

    def withstood(self, server: Server, n: int) -> int:
        """f, or as much of it as n clients allow: some may have been dropped."""
        f = min(self.byzantine, (n - 3) // self.times)
        if f < 0:
            raise FedstillError(
                f"round {server.round}: {self.name} compares at least three clients, and {n} gave a usable answer; "
                "raise participation"
            )
        if f < self.byzantine:
            log.warning(
                "round %d: %s withstands %d malicious among %d clients, not byzantine = %d; raise participation",
                *(server.round, self.name, f, n, self.byzantine),
            )
        return f


@dataclass(frozen=True)
class Krum(Selecting):
    """Only the client counts whose model is nearest to its n - f - 2 nearest others.

    With a_ij = ||w_i - w_j||^2 over the trained weights, s_i is the sum of the n - f - 2 smallest a_ij, j != i, and
    argmin s_i is chosen. Where clients send other parts too, each part has such a score, in units of its smallest, and
    the scores are added: no part hides behind the size of another. That asks for n >= 2f + 3.
    """

    name: ClassVar[str] = "krum"
    paper: ClassVar[str] = "Blanchard et al. 2017"
    defends: ClassVar[frozenset[str]] = frozenset({"any", "selection"})

    def apply_rule(self, server: Server, uplinks: list[Uplink]) -> list[Uplink]:
        n, f = len(uplinks), self.withstood(server, len(uplinks))
        order = krum_scores(apart(server, uplinks), f).argsort(stable=True)
        chosen = sorted(order[: self.count(n, f)].tolist())
        server.notes["chosen"] = [uplinks[place].client for place in chosen]
        # A client is not chosen for its statistics: all of them have the median.
        trained, selection = server.task.trainable, [uplinks[place] for place in chosen]
        tail = statistics(server, "model", [up["model"] for up in uplinks]).to(server.model.dtype)
        models = [torch.cat([up["model"][:trained], tail]) if len(tail) else up["model"] for up in selection]
        return [replace(up, message=up.message | {"model": model}) for up, model in zip(selection, models, strict=True)]

    def count(self, n: int, f: int) -> int:
        """How many clients count."""
        return 1


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The `keep` clients that Krum would take first, all alike."""

    name: ClassVar[str] = "multi-krum"

    keep: Annotated[int, Ge(0), "how many clients count, if there are so many; 0: all but `byzantine`"] = 0

    def count(self, n: int, f: int) -> int:
        return self.keep or n - f


@dataclass(frozen=True)
class Bulyan(Selecting):
    """Krum chooses theta = n - 2f clients, one after another; then the numbers nearest to their median are averaged.

    Of each number (BatchNorm's statistics included) the theta - 2f values nearest to the median of the theta chosen
    count. That asks for n >= 4f + 3. El Mhamdi et al., "The hidden vulnerability of distributed learning in Byzantium",
    2018.
    """

    name: ClassVar[str] = "bulyan"
    paper: ClassVar[str] = "El Mhamdi et al. 2018"
    times: ClassVar[int] = 4

    def apply_rule(self, server: Server, uplinks: list[Uplink]) -> list[Uplink]:
        f, matrices = self.withstood(server, len(uplinks)), apart(server, uplinks)
        left, chosen = list(range(len(uplinks))), list[int]()
        while len(chosen) < len(uplinks) - 2 * f:
            scores = krum_scores([matrix[left][:, left] for matrix in matrices], f)
            chosen.append(left.pop(int(scores.argmin())))
        chosen.sort()
        server.notes["chosen"] = [uplinks[place].client for place in chosen]

        def middle(values: Tensor) -> Tensor:
            nearest = (values - median(values)).abs().argsort(dim=0, stable=True)[: len(values) - 2 * f]
            return values.gather(0, nearest).mean(0)

        return replaced([uplinks[place] for place in chosen], lambda name, sent: columns(sent, middle))


def apart(server: Server, uplinks: Sequence[Uplink]) -> list[Tensor]:
    """For each part, the squared distances between the clients, (clients, clients)."""
    return [
        squared_distances(updates(server, name, [up[name].flatten() for up in uplinks])[1])
        for name in uplinks[0].message
    ]


def krum_scores(matrices: Sequence[Tensor], f: int) -> Tensor:
    """Of each client, over all parts; smaller is nearer to the others."""
    n = len(matrices[0])
    near = slice(1, max(2, n - f - 1))  # the first is each client's distance from itself
    scores = [matrix.sort(1).values[:, near].sum(1) for matrix in matrices]
    if len(scores) == 1:
        return scores[0]
    return torch.stack([score / (float(score.min()) or 1.0) for score in scores]).sum(0)
