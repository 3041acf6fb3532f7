"""How the settings of `fedstill demo` were chosen: on training images that are held out, with other seeds.

    python tools/choose_demo.py alpha                           # where one seed shows the difference most reliably
    python tools/choose_demo.py lr --alpha 0.3                  # the rate that is best for fedavg
    python tools/choose_demo.py gamma --alpha 0.3 --lr 0.05     # of FedGKD and FedKF, at that rate

The test images are not looked at. `alpha`: of each candidate, on how many of ten seeds fedavg+t1 is better than fedavg
in all that the demo shows. The others: for each candidate, means over three seeds of what the demo shows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

import fedstill
from fedstill.cli.demo import SETTINGS
from fedstill.data.dataset import Dataset, Split

NUMBERS = {"accuracy": 1, "amp": 1, "fm": -1, "wlp": 1, "roughness": -1}  # 1: larger is better
ALPHAS, ALPHA_SEEDS = (0.3, 0.1, 0.03, 0.01), range(100, 110)
SETTING_SEEDS = (100, 101, 102)
LRS = [("fedavg+t1", {"lr": lr}) for lr in (0.02, 0.05, 0.1)]
GAMMAS = [
    *(("fedgkd", {"gamma": gamma}) for gamma in (0.05, 0.2, 2.0, 10.0)),
    *(("fedkf", {"gamma": gamma}) for gamma in (0.2, 1.0)),
]


@cache
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


def measured(method: str, settings: dict[str, Any], seed: int) -> Iterator[tuple[str, list[float]]]:
    """What the demo shows of a run, for each of its models: T1 has the plain average beside its own."""
    given = {name: value for name, value in SETTINGS.items() if name not in ("data", "seed")}
    result = fedstill.run(method, data=held_out(), seed=seed, **given | settings)
    for model in ["", *result.summary.get("also", {})]:
        summary = result.summary["also"][model] if model else result.summary
        rounds = [(record["also"][model] if model else record)["accuracy"] for record in result.records]
        roughness = float(np.std(np.diff(rounds[len(rounds) // 2 :]), ddof=1))
        yield model, [*(summary[f"final_{name}"] for name in list(NUMBERS)[:-1]), roughness]


def choose_alpha() -> None:
    signs = np.array(list(NUMBERS.values()))
    for alpha in ALPHAS:
        found = [dict(measured("fedavg+t1", {"alpha": alpha}, seed)) for seed in ALPHA_SEEDS]
        t1, fedavg = (np.array([list(run.values())[i] for run in found]) for i in (0, 1))
        better = (t1 - fedavg) * signs > 0
        each = ", ".join(f"{name} {count}" for name, count in zip(NUMBERS, better.sum(0), strict=True))
        print(f"alpha {alpha}: better in all on {better.all(1).sum()} of {len(found)} seeds ({each}); "
              f"fedavg {shown(fedavg)}; fedavg+t1 {shown(t1)}", flush=True)  # fmt: skip


def choose_settings(candidates: list[tuple[str, dict[str, float]]], given: dict[str, float]) -> None:
    for method, settings in candidates:
        found: dict[str, list[list[float]]] = {}
        for seed in SETTING_SEEDS:
            for model, numbers in measured(method, given | settings, seed):
                found.setdefault(model, []).append(numbers)
        for model, values in found.items():
            print(f"{method} {model} {settings}: {shown(np.array(values))}", flush=True)


def shown(runs: np.ndarray[Any, Any]) -> str:
    return " ".join(f"{name} {value:.4f}" for name, value in zip(NUMBERS, runs.mean(0), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("alpha", "lr", "gamma"))
    parser.add_argument("--alpha", type=float, default=SETTINGS["alpha"])
    parser.add_argument("--lr", type=float, default=SETTINGS["lr"])
    arguments = parser.parse_args()
    if arguments.what == "alpha":
        choose_alpha()
    else:
        candidates = LRS if arguments.what == "lr" else GAMMAS
        choose_settings(candidates, {"alpha": arguments.alpha, "lr": arguments.lr})


if __name__ == "__main__":
    main()
