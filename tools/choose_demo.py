"""How the settings of `fedstill demo` were chosen: on training images that are held out, with other seeds.

    python tools/choose_demo.py

The test images are not looked at. One line for each candidate: means over the seeds of what the demo shows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

import fedstill
from fedstill.cli.demo import SETTINGS
from fedstill.data.dataset import Dataset, Split

SEEDS, ALPHA = (100, 101), 0.1  # at 0.03 the same was then looked at of fedavg+t1 alone
CANDIDATES = [
    *(("fedavg+t1", {"lr": lr}) for lr in (0.02, 0.05, 0.1)),
    *(("fedgkd", {"gamma": gamma}) for gamma in (0.2, 2.0, 10.0)),
    *(("fedkf", {"gamma": gamma}) for gamma in (0.2, 1.0)),
]


def held_out() -> Dataset:
    """The embedded images without their test set: 100 training images of each class stand in for it."""
    data = fedstill.load_dataset("fashion-mini")
    rng, labels = np.random.default_rng(100), data.train.y.numpy()
    test = np.zeros(len(labels), bool)
    for label in range(len(data.classes)):
        test[rng.permutation(np.flatnonzero(labels == label))[:100]] = True
    splits = [
        Split(data.train.x[part], data.train.y[part]) for part in (torch.from_numpy(~test), torch.from_numpy(test))
    ]
    return replace(data, name="held out", train=splits[0], test=splits[1])


def main() -> None:
    data = held_out()
    given = {name: value for name, value in SETTINGS.items() if name not in ("data", "seed")} | {"alpha": ALPHA}
    for method, settings in CANDIDATES:
        found: dict[str, list[list[float]]] = {}
        for seed in SEEDS:
            result = fedstill.run(method, data=data, seed=seed, **given | settings)
            for model in ["", *result.summary.get("also", {})]:
                summary = result.summary["also"][model] if model else result.summary
                rounds = [(record["also"][model] if model else record)["accuracy"] for record in result.records]
                roughness = float(np.std(np.diff(rounds[len(rounds) // 2 :]), ddof=1))
                numbers = [summary[f"final_{name}"] for name in ("accuracy", "amp", "fm", "wlp")]
                found.setdefault(model, []).append([*numbers, roughness])
        for model, values in found.items():
            accuracy, amp, fm, wlp, roughness = np.mean(values, axis=0)
            print(f"{method} {model} {settings}: accuracy {accuracy:.3f} AMP {amp:.3f} FM {fm:.4f} WLP {wlp:.3f} "
                  f"roughness {roughness:.4f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
