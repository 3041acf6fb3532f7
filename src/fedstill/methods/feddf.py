"""FedDF: Lin et al., "Ensemble distillation for robust model fusion in federated learning", 2020."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt

from fedstill.distill.stage import distil, match_probabilities, mean_logits
from fedstill.methods.base import Server, Uplink
from fedstill.methods.server_side import ServerSide
from fedstill.train.task import LocalTraining


@dataclass(frozen=True)
class FedDF(ServerSide):
    """The clients' mean logits on unlabelled proxy data teach the averaged model."""

    name: ClassVar[str] = "feddf"
    paper: ClassVar[str] = "Lin et al. 2020"
    needs_proxy_data: ClassVar[bool] = True

    steps: Annotated[int, Ge(0), "distillation steps a round"] = 200
    server_lr: Annotated[float, Gt(0), "learning rate (Adam, falling along a cosine)"] = 1e-3
    server_batch: Annotated[int, Ge(1), "batch size of the distillation"] = 128

    def improve(self, server: Server, uplinks: list[Uplink]) -> None:
        if self.steps == 0:
            return
        proxy = self.proxy(server)
        answers = server.ask([up["model"] for up in uplinks], proxy)
        targets = mean_logits(answers).softmax(1)
        training = LocalTraining(
            epochs=1,
            steps_per_epoch=self.steps,
            batch_size=self.server_batch,
            optimizer="adam",
            lr=self.server_lr,
            cosine=True,
        )
        loss, order = match_probabilities(targets), server.rng("distillation")
        server.model = distil(server.task, server.model, proxy, loss, training, order)
