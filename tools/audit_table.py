"""What each wire gives away, with and without differential privacy: the table of docs/audit.md.

    python tools/audit_table.py --out runs/audit --data-dir DIR      # runs, and attacks them; again: goes on
    python tools/audit_table.py --out runs/audit --table             # the table of what is there

200 clients with 48 training samples each, which is few enough to be learnt by heart. FedDistill and FedProto are not in
it: their servers send no model, and nothing here attacks logits or prototypes without one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import fedstill
from fedstill.core.files import read_json, write_json

COMMON: dict[str, Any] = {
    "data": "fashion-mnist",
    "fraction": 0.2,
    "clients": 200,
    "partition": "dirichlet",
    "alpha": 0.5,
    "participation": 0.25,
    "model": "mlp",
    "model_options": {"hidden": [32]},
    "image_size": 16,
    "rounds": 30,
    "epochs": 5,
    "batch_size": 16,
    "lr": 0.1,
    "eval_every": 10,
    "engine": "inline",
    "checkpoint_every": 10,
}
PRIVATE = {"target_epsilon": 8.0, "clip": 0.7}
RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg+dp": {"hyper": PRIVATE},
    # Private from the server too. That clients are drawn by chance no longer helps, so that it takes more noise.
    "fedavg+dp, noise of clients": {
        "secure_aggregation": True,
        "hyper": {"noise_multiplier": 3.3, "noise_shares": 40, "clip": 0.7},
    },
    "fedavg+dp-sgd": {"hyper": {"noise_multiplier": 1.0, "clip": 1.0, "delta": 1e-3}},
    "feddistill-plus": {},
    "feddistill-plus+dp": {"hyper": PRIVATE | {"scales": "logits=10 known=3"}},
    "fedhkd": {},
    "dafkd": {"participation": 0.05},  # its clients train a generator each, which takes long
}


def run(name: str, out: Path, data_dir: str, shadows: int, seed: int) -> None:
    path = out / name.replace(",", "").replace(" ", "-") / str(seed)
    if (path / "table.json").exists():
        return
    settings = COMMON | RUNS[name] | {"seed": seed, "data_dir": data_dir}
    place = path / "run"
    if (place / "config.toml").exists():
        result = fedstill.resume(place)
    else:
        result = fedstill.run(name.partition(",")[0], out=place, **settings)
    found = fedstill.audit(
        place, shadows=shadows if result.summary.get("final_accuracy") else 0, clients=200, inversion_steps=0
    )
    write_json(
        path / "table.json",
        {
            "accuracy": result.summary.get("final_accuracy"),
            "epsilon": result.summary.get("epsilon"),
            "leaks": [leak.row() for leak in found.leaks],
            "notes": list(found.notes),
        },
    )
    print(name, seed, found, flush=True)


def table(out: Path) -> None:
    print("| method | accuracy, % | accounted | seen | attack | AUC | TPR at 1 % FPR, % | epsilon at least |")
    print("|---|---|---|---|---|---|---|---|")
    for name in RUNS:
        for path in sorted((out / name.replace(",", "").replace(" ", "-")).glob("*/table.json")):
            found = read_json(path)
            accuracy = f"{100 * found['accuracy']:.1f}" if found["accuracy"] else "own models"
            spent = f"{found['epsilon']:.1f}" if found["epsilon"] else "none"
            for leak in found["leaks"]:
                auc = f"{leak['auc']:.3f} ({leak['low']:.3f} to {leak['high']:.3f})"
                cells = leak["seen"], leak["attack"], auc, f"{100 * leak['tpr']:.1f}", f"{leak['epsilon']:.2f}"
                print(f"| `{name}` | {accuracy} | {spent} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-dir", default="", help="where the dataset's files are")
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=RUNS, metavar="RUN")
    parser.add_argument("--shadows", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--table", action="store_true", help="show what is there")
    given = parser.parse_args()
    for seed in () if given.table else given.seeds:
        for name in given.only:
            run(name, given.out, given.data_dir, given.shadows, seed)
    table(given.out)


if __name__ == "__main__":
    main()
