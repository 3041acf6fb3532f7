"""FLTrust: Cao et al., "FLTrust: Byzantine-robust federated learning via trust bootstrapping", 2021."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstill.core import device
from fedstill.methods.base import Server
from fedstill.methods.robust.rule import combined, distances
from fedstill.methods.robust.vectorwise import Vectorwise
from fedstill.train.client import Client


@dataclass(frozen=True)
class FLTrust(Vectorwise):
    """The server trains on its own dataset, and trusts updates as far as they point the same way as its own.

    With the server's update g_0 and a client's g_k, both from w_t: TS_k = max(0, cos(g_k, g_0)), and the new model is
    w_t + sum_k TS_k (||g_0|| / ||g_k||) g_k / sum_k TS_k; w_t if nobody is trusted. The server trains as its clients
    do. Only models are defended: of other parts it has none of its own to compare.
    """

    name: ClassVar[str] = "fltrust"
    paper: ClassVar[str] = "Cao et al. 2021"
    needs_server_labels: ClassVar[bool] = True
    defends: ClassVar[frozenset[str]] = frozenset()

    def begin(self, server: Server) -> None:
        super().begin(server)
        assert server.pool is not None
        reference = Client(server.task, len(server.sizes), server.round, server.pool, self.inner.downlink(server))
        with device.isolated_rng():
            reference.fit(self.inner.prepare(reference))
            server.state[self.name] = self.inner.uplink(reference)["model"]

    def middle(self, server: Server, name: str, start: Tensor, ends: list[Tensor]) -> Tensor:
        g_0 = server.state[self.name][: len(start)].double() - start
        length, lengths = float(torch.linalg.vector_norm(g_0)), distances(ends, start)
        trust = [
            max(0.0, float(torch.dot(x.double() - start, g_0)) / (norm * length)) if norm and length else 0.0
            for x, norm in zip(ends, lengths, strict=True)
        ]
        server.notes["trust"] = [round(value, 4) for value in trust]
        total = math.fsum(trust)
        if not total:
            return start
        factors = [value / total * length / norm if value else 0.0 for value, norm in zip(trust, lengths, strict=True)]
        return start + combined(ends, factors) - math.fsum(factors) * start
