"""The mean of every client's latest model, active or not (FedKF's T1), kept up to date incrementally."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core.store import Store

CacheInit = Literal["seen", "w0"]


class _Uplink(Protocol):
    @property
    def client(self) -> int: ...

    def __getitem__(self, part: str) -> Tensor: ...


U = TypeVar("U", bound=_Uplink)


@dataclass
class LatestMean:
    """sum_k n_k w_k / sum_k n_k over the latest model of each client.

    A client's model replaces its older one in a float64 sum, so a round costs as much as it has active clients. The
    models themselves are on disk, one file for each client ever seen. Clients not seen yet do not count (`seen`),
    or count with the initial weights (`w0`, the paper's literal Algorithm 1).
    """

    store: Store
    sum: Tensor  # float64
    weight: float
    initial: Tensor | None  # what an unseen client counts with

    @classmethod
    def start(cls, store: Store, w0: Tensor, sizes: NDArray[np.int64], init: CacheInit) -> LatestMean:
        if init == "seen":
            return cls(store, torch.zeros_like(w0, dtype=torch.float64), 0.0, None)
        weight = float(sizes.sum())
        return cls(store, w0.double() * weight, weight, w0)

    @classmethod
    def restore(cls, store: Store, state: dict[str, Any]) -> LatestMean:
        return cls(store, state["sum"], state["weight"], state["initial"])

    def state(self) -> dict[str, Any]:
        """As data, for `restore`; the models are in the store already."""
        return {"sum": self.sum, "weight": self.weight, "initial": self.initial}

    def replace(self, client: int, round_: int, model: Tensor, samples: int) -> None:
        """This is the client's latest model."""
        old = self.store.read(client, before=round_)
        if old is not None:
            self.sum.add_(old["model"], alpha=-old["samples"])
            self.weight -= old["samples"]
        elif self.initial is not None:
            self.sum.add_(self.initial, alpha=-samples)
            self.weight -= samples
        self.sum.add_(model, alpha=samples)
        self.weight += samples
        self.store.write(client, round_, {"model": model, "samples": samples})

    def updated(self, uplinks: Iterator[U], round_: int, sizes: NDArray[np.int64]) -> Iterator[U]:
        """The uplinks as they come, each client's model noted on the way; `sizes` are those of all clients."""
        if self.initial is not None and (joined := float(sizes.sum()) - self.weight):  # some came since
            self.sum.add_(self.initial, alpha=joined)
            self.weight += joined
        for up in uplinks:
            self.replace(up.client, round_, up["model"], int(sizes[up.client]))
            yield up

    def mean(self, otherwise: Tensor) -> Tensor:
        """The mean, or another model as long as no client counts: nobody of a group may have been drawn yet."""
        return (self.sum / self.weight).to(otherwise.dtype) if self.weight else otherwise
