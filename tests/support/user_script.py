"""A script as users write them: public names alone, checked by `mypy --strict`, and run."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge

import fedstill


@dataclass(frozen=True)
class Anchored(fedstill.FedAvg):
    """Stay near the global model."""

    name: ClassVar[str] = "anchored"
    pull: Annotated[float, Ge(0), "how strongly"] = 0.1

    def objective(self, client: fedstill.Client) -> fedstill.Objective:
        start = client.down["model"][: client.flat.trainable]
        return fedstill.Objective(gradient=lambda w: self.pull * (w - start))


class Gap(fedstill.Callback):
    """Logs how much better the best class is known than the worst."""

    def on_round_end(self, run: fedstill.RunView, record: fedstill.RoundRecord) -> bool | None:
        run.log("gap", max(record["per_class"]) - min(record["per_class"]))
        return run.round > 100


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(300) % 3
    x = (rng.normal(size=(300, 6)) + y[:, None]).astype("float32")
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    data = fedstill.from_arrays(x, y)
    stop = fedstill.EarlyStopping("train_loss", patience=2, min_delta=10.0, restore_best=True)
    config = fedstill.Config(clients=4, rounds=20, epochs=1, participation=1.0, alpha=1.0, engine="inline")
    callbacks = [Gap(), stop, fedstill.CSVLog(folder / "rounds.csv")]
    result = fedstill.run(config, data=data, model=net, callbacks=callbacks, out=folder / "run")
    found = fedstill.compare(
        ["fedavg", Anchored(pull=0.5)], data=data, model=net, seeds=2, clients=4, rounds=2, epochs=1, alpha=1.0
    )
    (folder / "table.tex").write_text(found.to_latex())
    print(json.dumps(result.summary))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
