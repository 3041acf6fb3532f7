"""Run directories that are written, not run: what a reader of runs makes of them takes no training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w


def write_run(
    path: Path,
    accuracies: Sequence[float | None],
    *,
    served: dict[str, tuple[int, float]] | None = None,
    summary: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """A run with these accuracies by round, finished if it is to have no more rounds.

    `served` are the test samples and the accuracy of each client.
    """
    chosen = {"method": "fedavg", "seed": 0, "rounds": len(accuracies), "clients": 3} | settings
    path.mkdir(parents=True)
    (path / "config.toml").write_text(tomli_w.dumps(chosen))
    (path / "log.txt").write_text("2026-01-01 INFO begun\n")
    (path / "metrics.jsonl").write_text("".join(round_line(i, a) for i, a in enumerate(accuracies, 1)))
    if chosen["rounds"] == len(accuracies):
        last = accuracies[-1]
        numbers = {"method": chosen["method"], "seed": chosen["seed"], "rounds": len(accuracies)}
        numbers |= {"final_accuracy": last, "best_accuracy": last, "final_fm": 0.01} | (summary or {})
        (path / "summary.json").write_text(json.dumps(numbers))
        rows = served or {str(k): (10, 0.5) for k in range(3)}
        lines = [f'"{name}",40,{n},{accuracy}\n' for name, (n, accuracy) in rows.items()]
        (path / "clients.csv").write_text("client,train_samples,test_samples,accuracy\n" + "".join(lines))
    return path


def round_line(number: int, accuracy: float | None) -> str:
    """A line of metrics.jsonl."""
    record = {"round": number, "evaluated": accuracy is not None, "accuracy": accuracy, "fm": 0.02, "wlp": 0.1}
    return json.dumps(record | {"bytes_down": 1000, "bytes_up": 500, "seconds": 1.0, "eval_seconds": 0.5}) + "\n"
