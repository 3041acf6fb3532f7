"""What privacy costs: the numbers and the picture of docs/privacy.md.

    python tools/privacy_figures.py --out runs/privacy --data-dir DIR       # accuracy against epsilon, 1,000 clients
    python tools/privacy_figures.py --out runs/privacy --data-dir DIR --samples   # Opacus' MNIST example, one client
    python tools/privacy_figures.py --out runs/privacy --table              # table and picture of what is there

Every run's result is saved as soon as it is known: interrupted, the same command goes on.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from torch import nn

import fedstill
from fedstill.core.files import read_json, write_json

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedgkd": {"gamma": 0.2},
    "fedkf": {"t1": False, "width": 4},  # FedKF-: the mean of every client's latest model cannot be private
    "fedavg+t1": {},  # refused with dp, for that reason
}
NOT_PRIVATE = ("fedavg+t1",)
LABELS = {"fedavg": "FedAvg", "fedgkd": "FedGKD", "fedkf": "FedKF-", "fedavg+t1": "FedAvg + T1 (not private)"}
EPSILONS = (1.0, 2.0, 4.0, 8.0, 0.0)  # 0: not private
CLIENTS, LAST = 1000, 3
COMMON: dict[str, Any] = {
    "clients": CLIENTS,
    "partition": "dirichlet",
    "alpha": 0.5,
    "participation": 0.1,
    "model": "mlp",
    "model_options": {"hidden": [32]},
    "image_size": 16,
    "rounds": 100,
    "epochs": 2,
    "batch_size": 16,
    "lr": 0.1,
    "eval_every": 5,
    "engine": "inline",
    "checkpoint_every": 1000,
}
CLIP = 0.7


class OpacusExample(nn.Sequential):
    """The network of Opacus' MNIST example."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 8, 2, padding=3),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, 2),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )


def accuracy(result: Any) -> dict[str, Any]:
    """The mean of the last evaluations, and what was spent."""
    known = [record["accuracy"] for record in result.records if record["evaluated"]]
    spent = result.summary.get("epsilon")
    noise = result.summary.get("privacy", {}).get("noise_multiplier")
    return {"accuracy": mean(known[-LAST:]), "epsilon": spent, "noise": noise, "seconds": result.summary["seconds"]}


def against_epsilon(out: Path, data: str, data_dir: str, seeds: list[int], methods: list[str]) -> None:
    for seed, method, epsilon in product(seeds, methods, EPSILONS):
        hyper = METHODS[method]
        path = out / f"{data}-{method}-{epsilon:g}-{seed}.json"
        if path.exists() or (epsilon and method in NOT_PRIVATE):
            continue
        settings = dict(hyper) | ({"clip": CLIP, "target_epsilon": epsilon} if epsilon else {})
        where = {"data": data, "data_dir": data_dir, "seed": seed}
        result = fedstill.run(f"{method}+dp" if epsilon else method, hyper=settings, **COMMON | where)
        write_json(path, accuracy(result))
        print(path.stem, read_json(path), flush=True)


def opacus_example(out: Path, data_dir: str, epochs: int, seeds: list[int]) -> None:
    """sigma 1.3, clip 1.5, learning rate 0.25, batches of 240: (1.19, 1e-5), 94.63 ± 0.34 % after 15 epochs."""
    for seed in seeds:
        path = out / f"opacus-{epochs}-{seed}.json"
        if path.exists():
            continue
        result = fedstill.run(
            "fedavg+dp-sgd",
            model=OpacusExample(),
            data="mnist",
            data_dir=data_dir,
            clients=1,
            partition="iid",
            test_fraction=0.0,
            participation=1.0,
            rounds=epochs,
            epochs=1,
            batch_size=240,
            lr=0.25,
            seed=seed,
            engine="inline",
            hyper={"noise_multiplier": 1.3, "clip": 1.5, "delta": 1e-5},
        )
        write_json(path, accuracy(result) | {"accuracy": result.records[-1]["accuracy"]})
        print(path.stem, read_json(path), flush=True)


def table(out: Path, data: str) -> None:
    """As Markdown, and as a picture."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    names = [method for method in METHODS if any(out.glob(f"{data}-{method}-*.json"))]
    print("| epsilon | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    shown: dict[str, list[tuple[float, float, float]]] = {}
    for epsilon in EPSILONS:
        cells = []
        for method in names:
            found = [read_json(p)["accuracy"] * 100 for p in sorted(out.glob(f"{data}-{method}-{epsilon:g}-*.json"))]
            spread = stdev(found) if len(found) > 1 else 0.0
            cells.append(f"{mean(found):.1f} ± {spread:.1f} ({len(found)})" if found else "")
            if found:
                shown.setdefault(method, []).append((epsilon or np.inf, mean(found), spread))
        print(f"| {f'{epsilon:g}' if epsilon else 'not private'} | " + " | ".join(cells) + " |")
    for method, points in shown.items():
        private = [point for point in points if np.isfinite(point[0])]
        label, color = LABELS.get(method, method), f"C{list(shown).index(method)}"
        if private:
            places, heights, spreads = zip(*private, strict=True)
            lines = "-" if len(private) == len(EPSILONS) - 1 else ""  # none over what was not measured
            axes.errorbar(places, heights, spreads, label=label, color=color, marker="o", ms=4, ls=lines, capsize=2)
        for _, height, _ in (point for point in points if not np.isfinite(point[0])):
            axes.axhline(height, color=color, lw=0.9, ls=":", label=None if private else label)
    axes.set(xscale="log", xlabel=f"epsilon of a client (delta {0.1 / CLIENTS:g})", ylabel="test accuracy, %")
    axes.set_xticks(EPSILONS[:-1], [f"{e:g}" for e in EPSILONS[:-1]])
    axes.minorticks_off()
    axes.set_title(f"{CLIENTS:,} clients, {data}; dotted: not private", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(out / "privacy.png", dpi=150)
    print(out / "privacy.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", default="fashion-mnist", help="mnist or fashion-mnist")
    parser.add_argument("--data-dir", default="", help="where the dataset's files are")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--samples", action="store_true", help="Opacus' MNIST example")
    parser.add_argument("--epochs", type=int, default=15, help="of Opacus' example")
    parser.add_argument("--table", action="store_true", help="show what is there")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.samples:
        opacus_example(chosen.out, chosen.data_dir, chosen.epochs, chosen.seeds)
    elif not chosen.table:
        against_epsilon(chosen.out, chosen.data, chosen.data_dir, chosen.seeds, chosen.methods)
    if not chosen.samples:
        table(chosen.out, chosen.data)


if __name__ == "__main__":
    main()
