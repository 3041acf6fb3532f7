"""Six methods tuned with one budget on a tenth of Fashion-MNIST, then tested on five fresh seeds.

    python tools/tuned.py --out runs/tuned --data-dir DATA

The budget is what about half an hour of one core allows, and was fixed before any result was seen: 18 trials a method (two
groups of nine, halved), one seed a trial, 27 rounds of three local epochs, and 8 channels in FedKF's generator (the
paper's: 128), for FedKF costs five times as much a round as FedAvg. The papers train for more rounds, so that a larger
learning rate is worth more here than there.

For each alpha: the search by validation data, the winners on the test set, and beside them the methods with the
settings of the papers on the same seeds. Then FedProx once more by random search, halved and in full: the same trials,
so that rounds saved and winners can be compared. tables.md in the folder has it all. Interrupted, the same command goes
on where it stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import fedstill
from fedstill.core.files import write_atomic

SETTINGS: dict[str, Any] = {
    "data": "fashion-mnist",
    "fraction": 0.1,
    "pool": 0.1,  # which FedGKD-VOTE needs; the others leave it alone
    "partition": "dir_fedkf",
    "clients": 20,
    "participation": 0.2,
    "model": "lenet5",
    "rounds": 27,  # compared after 3, 9 and 27, which are all evaluated
    "epochs": 3,
    "local_unit": "equal_steps",
    "batch_size": 64,
    "eval_every": 3,
}
WIDTH = 8  # of FedKF's generator
METHODS = ("fedavg", "fedprox", "fedgkd", "fedgkd-vote", "fedkf", "fedavg+t1")
PAPERS: dict[str, dict[str, Any]] = {  # as in the presets of FedKF's tables, FedGKD-VOTE as in FedGKD's
    "fedavg": {},
    "fedprox": {"mu": 0.001},
    "fedgkd": {"gamma": 0.001, "buffer": 5},
    "fedgkd-vote": {"lambda": 0.1, "buffer": 5},
    "fedkf": {"width": WIDTH},
    "fedavg+t1": {},
}
LR = 0.01  # the papers'
ALPHAS = (0.1, 0.01)
BUDGET: dict[str, Any] = {"trials": 18, "seeds": 1}
FRESH = 5


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--out", type=Path, required=True)
    given.add_argument("--data-dir", default="")
    given.add_argument("--jobs", type=int, default=0)
    words = given.parse_args()
    common = SETTINGS | {"data_dir": words.data_dir}
    tables: list[str] = []

    def add(title: str, *found: fedstill.Table) -> None:
        tables.append("\n".join([f"## {title}\n", *map(str, found)]))
        write_atomic(words.out / "tables.md", "\n".join(tables))

    for alpha in ALPHAS:
        settings: dict[str, Any] = common | {"alpha": alpha}
        folder = words.out / f"alpha{alpha:g}"
        tuned = fedstill.tune(
            METHODS,
            **BUDGET,
            width=WIDTH,
            test_seeds=FRESH,
            out=folder / "tuned",
            jobs=words.jobs,
            progress=True,
            **settings,
        )
        tuned.plot()
        add(f"alpha {alpha:g}, tuned", *tuned.tables())
        papers = {name: fedstill.compose(name, **own) for name, own in PAPERS.items()}
        untuned = fedstill.compare(
            papers, seeds=FRESH, seed=BUDGET["seeds"], lr=LR, out=folder / "papers", jobs=words.jobs, progress=True,
            **settings,
        )  # fmt: skip
        add(f"alpha {alpha:g}, the papers' settings", *untuned.tables())
    found = {
        name: fedstill.tune(
            "fedprox", **BUDGET, sampler="random", halving=halving, test_seeds=0, out=words.out / name, jobs=words.jobs,
            progress=True, **common | {"alpha": ALPHAS[0]},
        )
        for name, halving in (("halved", 3), ("full", 0))
    }  # fmt: skip
    for name, tuning in found.items():
        add(f"FedProx by random search, {name}", *tuning.tables())


if __name__ == "__main__":
    main()
