"""FedDF: Lin et al., "Ensemble distillation for robust model fusion in federated learning", 2020."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt

from fedstill.core.space import Search
from fedstill.distill.stage import match_probabilities, mean_logits
from fedstill.methods.base import Server, Uplink
from fedstill.methods.server_side import Distilling
from fedstill.train.task import LocalTraining


@dataclass(frozen=True)
class FedDF(Distilling):
    """The clients' mean logits on unlabelled proxy data teach the averaged model."""

    name: ClassVar[str] = "feddf"
    paper: ClassVar[str] = "Lin et al. 2020"
    needs_proxy_data: ClassVar[bool] = True
    teaches_groups: ClassVar[bool] = True
    training: ClassVar[LocalTraining] = LocalTraining(optimizer="adam", cosine=True)

    server_steps: Annotated[int, Ge(0), "distillation steps a round"] = 200
    server_lr: Annotated[float, Gt(0), Search("log:1e-4..1e-2"), "learning rate (Adam, falling along a cosine)"] = 1e-3

    def improve_all(self, servers: Sequence[Server], uplinks: list[Uplink]) -> None:
        """One student for each network; all clients teach it (Algorithm 3 of the paper)."""
        if self.server_steps == 0:
            return
        proxy = self.proxy(servers[0])
        targets = mean_logits(servers[0].outputs_of(uplinks, proxy)).softmax(1)
        for server in servers:
            self.distil(server, proxy, match_probabilities(targets), steps=self.server_steps)
