"""Robust rules against attacks on real data: the table of docs/robustness.md.

    python tools/robustness_table.py --out runs/robustness                # all runs, then the table
    python tools/robustness_table.py --out runs/robustness --table        # the table of what is there
    python tools/robustness_table.py --lies                               # one client of eight that lies

Every run's accuracy is saved as soon as it is known, in a file for each seed: interrupted, the same command goes on,
and other seeds can run beside it (`--seeds 1`).
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn

import fedstill
from fedstill.core.files import read_json, write_json

CLIENTS, ATTACKERS, LAST = 20, 4, 3
COMMON: dict[str, Any] = {
    "model": "mlp",
    "model_options": {"hidden": [32]},
    "image_size": 16,
    "clients": CLIENTS,
    "fraction": 0.5,
    "pool": 100,
    "rounds": 15,
    "epochs": 1,
    "batch_size": 16,
    "lr": 0.1,
    "engine": "inline",
    "checkpoint_every": 1000,
}
ATTACKS: dict[str, dict[str, Any]] = {
    "none": {},
    "sign-flip": {"attack": "sign-flip"},
    "boosted": {"attack": "scale", "attack_scale": -5.0},
    "adaptive": {"attack": "adaptive"},
    "min-max": {"attack": "min-max"},
    "alie": {"attack": "alie", "attack_scale": 1.5},
    "mirror-flip": {"attack": "mirror-flip"},
}
# As many malicious clients as each rule can be told of, up to all there are; with 10 and with 20 clients a round.
RULES: dict[str, dict[float, dict[str, Any]]] = {
    "fedavg": {},
    "fedavg+norm-clip": {},
    "fedavg+centered-clip": {},
    "fedavg+median": {},
    "fedavg+trimmed-mean": {p: {"trim": 0.3} for p in (0.5, 1.0)},
    "fedavg+geomed": {},
    "fedavg+krum": {0.5: {"byzantine": 3}, 1.0: {"byzantine": 4}},
    "fedavg+multi-krum": {0.5: {"byzantine": 3}, 1.0: {"byzantine": 4}},
    "fedavg+bulyan": {0.5: {"byzantine": 1}, 1.0: {"byzantine": 4}},
    "fedavg+fltrust": {},
}


def accuracy(rule: str, attack: str, participation: float, alpha: float, seed: int) -> float | None:
    """The mean test accuracy of the last rounds; None if the model was no longer finite."""
    settings = COMMON | ATTACKS[attack] | RULES[rule].get(participation, {})
    if attack != "none":
        settings["attackers"] = ATTACKERS
    try:
        result = fedstill.run(rule, **settings, participation=participation, alpha=alpha, seed=seed)
    except fedstill.FedstillError as error:
        if "no longer finite" not in str(error) and "usable answer" not in str(error):
            raise
        return None
    return mean(float(record["accuracy"]) for record in result.records[-LAST:])


def table(found: dict[str, float | None], attacks: list[str], participation: float, alpha: float) -> str:
    """Markdown: a line for each rule, a column for each attack, mean ± standard deviation over the seeds."""
    lines = ["| rule | " + " | ".join(attacks) + " |", "|---|" + "---|" * len(attacks)]
    for rule in RULES:
        cells = []
        for attack in attacks:
            prefix = f"{rule} {attack} {participation} {alpha} "
            values = [100 * (0.1 if value is None else value) for key, value in found.items() if key.startswith(prefix)]
            spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{mean(values):.1f}{spread}" if values else "")
        if any(cells):
            lines.append(f"| {rule.partition('+')[2] or 'none'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_statistics() -> nn.Module:
    """A small network with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 10)
    )


LIES: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("fedavg", "mlp", {"attack": "count"}),
    ("fedavg", with_statistics, {"attack": "buffers", "attack_scale": 1e12}),
    ("scaffold", "mlp", {"attack": "extra", "attack_scale": 1e3}),
)


def lies() -> None:
    """Prints what one of eight clients does that lies about its count, its statistics or its control variate."""
    common: dict[str, Any] = {name: COMMON[name] for name in ("image_size", "fraction", "epochs", "batch_size", "lr")}
    common |= {"clients": 8, "participation": 1.0, "alpha": 1.0, "rounds": 10, "engine": "inline", "eval_every": 0}
    for rule in ("", "+norm-clip", "+multi-krum", "+median", "+geomed"):
        cells = []
        for method, model, attack in LIES:
            for how in ({}, attack | {"attackers": 1}):
                result = fedstill.run(method + rule, model=model, **common, **how)
                cells.append(f"{100 * result.summary['final_accuracy']:.1f}")
        pairs = [" → ".join(cells[place : place + 2]) for place in range(0, len(cells), 2)]
        print(f"| {rule[1:] or 'none'} | " + " | ".join(pairs) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/robustness"), help="folder of the results")
    parser.add_argument("--lies", action="store_true", help="the other table: false counts, statistics, parts")
    parser.add_argument("--alpha", type=float, nargs="+", default=[1.0], help="Dirichlet concentrations")
    parser.add_argument("--participation", type=float, nargs="+", default=[0.5, 1.0], choices=[0.5, 1.0])
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="print the table of what is there, run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.lies:
        lies()
        return
    given.out.mkdir(parents=True, exist_ok=True)
    for seed in () if given.table else given.seeds:
        path = given.out / f"seed-{seed}.json"
        found: dict[str, float | None] = read_json(path) if path.is_file() else {}
        for alpha, attack, participation, rule in product(given.alpha, given.attacks, given.participation, RULES):
            key = f"{rule} {attack} {participation} {alpha} {seed}"
            if key not in found:
                found[key] = accuracy(rule, attack, participation, alpha, seed)
                write_json(path, found)
                print(key, found[key], flush=True)
    every: dict[str, float | None] = {}
    for path in sorted(given.out.glob("seed-*.json")):
        every |= read_json(path)
    for alpha, participation in product(given.alpha, given.participation):
        print(f"\nalpha {alpha}, participation {participation}\n\n{table(every, given.attacks, participation, alpha)}")


if __name__ == "__main__":
    main()
