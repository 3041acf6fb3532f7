"""Time rounds in two checkouts in turn, so that a busy machine slows both: is a change slower?

    python tools/compare_speed.py OLD NEW [--turns 5] [--only fedavg fedkf]

Prints, for each case, the fastest round of each checkout and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {"clients": 20, "participation": 0.5, "rounds": 3, "epochs": 2, "eval_every": 0, "alpha": 1.0}
POOL = {"pool": 0.1, "proxy": "pool"}
CASES: dict[str, dict[str, Any]] = {
    "fedavg": {"rounds": 6, "model": "cnn", "image_size": 32},
    "fedavg, ResNet-8": {"model": "resnet8", "fraction": 0.3},
    "fedprox": {},
    "fedgkd": {},
    "moon": {},
    "scaffold": {},
    "fedavg+t1": {},
    "feddistill-plus": {},
    "fedkf": {"fraction": 0.2, "width": 16, "z_dim": 16},
    "fedgen": {"fraction": 0.2},
    "dafkd": {"fraction": 0.2, "batches": 5},
    "fedhyb": {"fraction": 0.2, **POOL},
    "feddf": {"fraction": 0.2, "server_steps": 50, **POOL},
    "f2l": {"fraction": 0.3, "regions": 2, "rounds_per_episode": 1, "pool": 0.1},
}


def measure(cases: list[str]) -> None:
    """Run each case once and print the seconds of its fastest round."""
    import fedstill  # of the checkout whose turn it is

    found = {}
    for case in cases:
        settings = COMMON | CASES[case]
        if case == "feddf" and "experiment" in os.listdir(Path(fedstill.__file__).parent):
            settings["steps"] = settings.pop("server_steps")  # its name in 0.1.0
        result = fedstill.run(case.split(",")[0], **settings)
        found[case] = min(record["seconds"] for record in result.records)
    print(json.dumps(found))


def main() -> None:
    """Compare two checkouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    given = parser.parse_args()
    best: list[dict[str, float]] = [{}, {}]
    for _ in range(given.turns):
        for fastest, checkout in zip(best, given.checkouts, strict=True):
            environment = os.environ | {"PYTHONPATH": str(checkout.resolve() / "src")}
            command = [sys.executable, __file__, "--measure", *given.only]
            lines = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            for case, seconds in json.loads(lines.splitlines()[-1]).items():
                fastest[case] = min(seconds, fastest.get(case, seconds))
    print("| case | old, ms a round | new | new / old |\n|---|---|---|---|")
    for case in given.only:
        old, new = (1000 * fastest[case] for fastest in best)
        print(f"| {case} | {old:.0f} | {new:.0f} | {new / old:.2f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2:])
    else:
        main()
