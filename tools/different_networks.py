"""All methods for clients with different networks on Fashion-MNIST, over some seeds: which does what, at what cost?

    python tools/different_networks.py --out runs/networks --data-dir DATA
    python tools/different_networks.py --out runs/networks --table      # the table of what is there
    python tools/different_networks.py --out runs/networks --collect    # keep it in docs/archive, for other machines
    python tools/different_networks.py --out runs/networks --picture networks.png      # the same drawn

Three networks, dealt to 12 clients in turn, with features of one size; data, clients of a round, initial weights and
the server's samples are the same for every method. Every run has its directory: interrupted, the same command goes on
where it stopped. The runs of a seed are carried out before those of the next, and table.md is written after every run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import fedstill
from fedstill.core.files import write_atomic, write_json
from fedstill.metrics.statistics import spread
from fedstill.report.scatter import Point, scatter

COLLECTED = Path(__file__).parents[1] / "docs" / "archive" / "networks.json"
NETWORKS = ["lenet5", "cnn", "resnet8"]
SETTINGS: dict[str, Any] = {
    "data": "fashion-mnist",
    "models": NETWORKS,
    "model_options": {"feature_size": 64},
    "clients": 12,
    "participation": 1.0,
    "partition": "dirichlet",
    "alpha": 0.1,
    "fraction": 0.1,
    "pool": 0.1,
    "proxy": "pool",
    "rounds": 15,
    "epochs": 2,
    "batch_size": 32,
    "optimizer": "adam",
    "lr": 0.001,
    "eval_every": 0,
    "engine": "inline",
}
METHODS: dict[str, dict[str, Any]] = {  # by the method, and a word where it is there twice
    "local": {},
    "feddistill": {},
    "fedmd": {"average_weights": False},
    "fedproto": {},
    "fedtgp": {},
    "fml": {},
    "fedkd": {"T_rounds": 15},
    "lg-fedavg": {},
    "lg-fedavg+fedgen": {},
    "fedavg": {},
    "fedgkd": {},
    "fedgkd across": {"across": True},
    "fedkf": {},
    "fedkf across": {"across": True},
    "feddf": {"server_steps": 50},
    "lkd": {"server_epochs": 5},
    "fedhyb": {"variant": "3"},
    "dafkd": {},
}
KINDS = {  # what clients and groups have in common
    "own models": ("local", "feddistill", "fedmd", "fedproto", "fedtgp"),
    "own models, shared parts": ("fml", "fedkd", "lg-fedavg", "lg-fedavg+fedgen"),
    "a model for each group": ("fedavg", "fedgkd", "fedkf"),
    "groups teach each other": ("fedgkd across", "fedkf across", "feddf", "lkd", "fedhyb", "dafkd"),
}
ROUND = "round_seconds"  # of the fastest but the first: machines that run this for hours do other work as well
COLUMNS = {  # in per cent
    "test set": "final_accuracy",
    "own tests": "final_local_accuracy",
    "AMP": "final_amp",
    "WLP": "final_wlp",
}


def place(out: Path, method: str, seed: int) -> Path:
    return out / f"{method.replace(' ', '-')}-{seed}"


def carry_out(out: Path, method: str, seed: int, data_dir: str) -> None:
    """Run, or go on with, one method on one seed; nothing if it is done."""
    path = place(out, method, seed)
    if summaries(out, method, [seed]):
        return
    if (path / "config.toml").is_file():
        fedstill.resume(path)
        return
    fedstill.run(method.partition(" ")[0], **SETTINGS, seed=seed, data_dir=data_dir, hyper=METHODS[method], out=path)


def summaries(out: Path, method: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Of the runs of a method that have ended, here or, if they were collected, on another machine."""
    collected = json.loads(COLLECTED.read_text()) if COLLECTED.is_file() else {}
    found = []
    for path in (place(out, method, seed) for seed in seeds):
        if (file := path / "summary.json").is_file():
            rounds = [json.loads(line)["seconds"] for line in (path / "metrics.jsonl").read_text().splitlines()]
            found.append(json.loads(file.read_text()) | {ROUND: min(rounds[1:])})
        elif path.name in collected:
            found.append(collected[path.name])
    return found


def collect(out: Path, seeds: Sequence[int]) -> None:
    """Keep what table and picture need of every run that has ended, in a file that belongs into the repository."""
    runs = {}
    for method, seed in product(METHODS, seeds):
        for summary in summaries(out, method, [seed]):
            groups = {name: {"final_accuracy": summary["groups"][name]["final_accuracy"]} for name in NETWORKS}
            numbers = (*COLUMNS.values(), "bytes_down", "bytes_up", ROUND)
            runs[place(out, method, seed).name] = {name: summary[name] for name in numbers if name in summary} | {
                "groups": groups
            }
    write_json(COLLECTED, runs)


def table(out: Path, seeds: Sequence[int]) -> str:
    """A line for each method: mean and standard deviation over the seeds that are there."""
    heads = [*COLUMNS, *(f"test set, {name}" for name in NETWORKS), "MB down", "MB up", "seconds a round", "seeds"]
    lines = [f"| method | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for method in METHODS:
        if not (found := summaries(out, method, seeds)):
            continue
        cells = [_shown([s[name] for s in found], 100) for name in COLUMNS.values()]
        cells += [_shown([s["groups"][name]["final_accuracy"] for s in found], 100) for name in NETWORKS]
        cells += [_shown([s[name] for s in found], 1e-6) for name in ("bytes_down", "bytes_up")]
        cells += [_shown([s[ROUND] for s in found[-1:] if ROUND in s], 1), str(len(found))]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(values: Sequence[float | None], factor: float) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    found = spread(known)
    return f"{factor * found.mean:.1f}" + (f" ± {factor * found.std:.1f}" if found.n > 1 else "")


def picture(out: Path, seeds: Sequence[int], path: Path) -> None:
    """Draw what clients' models know of all classes against how they serve their own clients."""
    points = []
    for kind, methods in KINDS.items():
        for method in methods:
            pairs = [
                tuple(s[COLUMNS[name]] for name in ("test set", "own tests")) for s in summaries(out, method, seeds)
            ]
            if pairs:
                points.append(Point(method, kind, pairs))
    if not points:
        raise SystemExit(f"{out} has no run that has ended")
    labels = ("accuracy on the global test set, mean over clients", "accuracy on clients' own tests, mean over clients")
    scatter(points, labels, path, list(KINDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD", help="only these"
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--collect", action="store_true", help=f"run nothing; write {COLLECTED.name}")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="run nothing; draw the runs that have ended")
    given = parser.parse_args()
    if given.picture:
        picture(given.out, given.seeds, given.picture)
        return
    if given.collect:
        collect(given.out, given.seeds)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    for seed in [] if given.table else given.seeds:
        for method in given.methods:
            carry_out(given.out, method, seed, given.data_dir)
            write_atomic(given.out / "table.md", table(given.out, given.seeds))
    print(table(given.out, given.seeds))


if __name__ == "__main__":
    main()
