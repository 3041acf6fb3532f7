"""FedDF: Lin et al., "Ensemble distillation for robust model fusion in federated learning", 2020."""

from __future__ import annotations

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
    training: ClassVar[LocalTraining] = LocalTraining(optimizer="adam", cosine=True)

    server_steps: Annotated[int, Ge(0), "distillation steps a round"] = 200
    server_lr: Annotated[float, Gt(0), Search("log:1e-4..1e-2"), "learning rate (Adam, falling along a cosine)"] = 1e-3

    def improve(self, server: Server, uplinks: list[Uplink]) -> None:
        if self.server_steps == 0:
            return
        proxy = self.proxy(server)
        targets = mean_logits(server.predict_all([up["model"] for up in uplinks], proxy)).softmax(1)
        self.distil(server, proxy, match_probabilities(targets), steps=self.server_steps)
