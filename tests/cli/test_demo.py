"""`fedstill demo`: its table says what its runs came to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedstill.cli import demo
from support.commandline import fedstill

SHORT = {"fraction": 0.05, "image_size": 16, "model": "mlp", "partition": "dirichlet", "clients": 4, "epochs": 1}


@pytest.mark.slow
def test_the_demo_ends_in_a_table_a_picture_and_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SETTINGS", demo.SETTINGS | SHORT)
    monkeypatch.setattr(demo, "METHODS", {"fedavg": {}, "fedavg+t1": {}})
    out = tmp_path / "demo"
    answer = fedstill("demo", "--rounds", 6, "--out", out)
    assert answer.code == 0, answer.err
    assert (out / "curves.png").stat().st_size
    assert (out / "report.html").stat().st_size
    numbers = {}
    for method in demo.METHODS:
        summary = json.loads((out / method / "summary.json").read_text())
        rounds = [json.loads(line)["accuracy"] for line in (out / method / "metrics.jsonl").read_text().splitlines()]
        roughness = float(np.std(np.diff(rounds[3:]), ddof=1))
        numbers[method] = [*(summary[f"final_{name}"] for name in ("accuracy", "amp", "fm", "wlp")), roughness]
        accuracy, amp, fm, wlp, _ = numbers[method]
        (row,) = (line for line in answer.out.splitlines() if line.startswith(f"│ {method} "))
        cells = [cell.strip() for cell in row.strip("│").split("│")]
        assert cells[1:] == [
            f"{100 * accuracy:.2f} %",
            f"{100 * amp:.2f} %",
            f"{fm:.4f}",
            f"{100 * wlp:.2f} %",
            f"{roughness:.4f}",
        ]
    larger = [True, True, False, True, False]
    pairs = zip(demo.COLUMNS, numbers["fedavg+t1"], numbers["fedavg"], larger, strict=True)
    worse = [name for name, ours, theirs, up in pairs if ours != theirs and (ours > theirs) != up]
    (verdict,) = (line for line in answer.out.splitlines() if line.startswith("fedavg+t1 against fedavg: "))
    assert verdict.partition("worse in ")[2] == ", ".join(worse), "what is worse is said"
