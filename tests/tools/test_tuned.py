"""tools/tuned.py: the tables of tuned methods beside the papers' settings, and their place among the results."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedstill.core.space import parse_axis
from fedstill.studies.trials import Search, Terms, Trial
from support.in_process import in_process

pytest.importorskip("optuna")
TINY: dict[str, Any] = {
    "data": "fashion-mini", "fraction": 0.05, "pool": 0.1, "clients": 4, "participation": 0.5, "model": "mlp",
    "model_options": {"hidden": [8]}, "rounds": 1, "epochs": 1, "engine": "inline",
}  # fmt: skip


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tuned", Path(__file__).parents[2] / "tools/tuned.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_method_is_there_tuned_and_not_and_the_tables_are_kept(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "SETTINGS", TINY)
    monkeypatch.setattr(tool, "METHODS", ("fedavg", "fedkf"))
    monkeypatch.setattr(tool, "PAPERS", {name: tool.PAPERS[name] for name in ("fedavg", "fedkf")})
    monkeypatch.setattr(tool, "ALPHAS", (0.5,))
    monkeypatch.setattr(tool, "BUDGET", {"trials": 2, "seeds": 1})
    monkeypatch.setattr(tool, "FRESH", 2)
    results = tmp_path / "results.json"
    results.write_text('{"claims": []}')
    monkeypatch.setattr("sys.argv", ["tuned.py", "--out", str(tmp_path / "runs"), "--results", str(results)])
    with in_process():
        tool.main()
    found = json.loads(results.read_text())
    assert found["claims"] == []
    rows = re.findall(r"^\| (`\S+`)? \| (papers'|tuned) \|.*$", found["tuned"], re.MULTILINE)
    assert rows == [("`fedavg`", "papers'"), ("", "tuned"), ("`fedkf`", "papers'"), ("", "tuned")]
    assert "| `fedkf` | lr 0.01, gamma 1.0, beta 0.001 |" in found["tuned"]
    assert "finds the same winner" in found["tuned"]  # with one round nothing can be stopped on the way


def test_what_halving_saves_and_loses(tool: ModuleType) -> None:
    space = {"lr": parse_axis("lr", "log:1e-3..1")}
    full = Search("fedprox", space, Terms(halving=0), rounds=9)
    full.trials = [
        Trial(i, {"lr": 0.1 * (i + 1)}, Path(str(i)), {9: [[score]]}, rounds_run=9)
        for i, score in enumerate((0.5, 0.7, 0.6))
    ]
    short = Search("fedprox", space, Terms(), rounds=9)
    short.trials = [Trial(i, {"lr": 0.1 * (i + 1)}, Path(str(i)), {1: [[0.1]]}, rounds_run=1) for i in range(2)] + [
        Trial(2, {"lr": 0.1 * 3}, Path("2"), {1: [[0.2]], 9: [[0.6]]}, rounds_run=9)
    ]
    text = tool.halved({"halved": short, "in full": full})
    assert "| halved | 11 | trial 2: lr 0.3 | 60.0 |" in text
    assert "| in full | 27 | trial 1: lr 0.2 | 70.0 |" in text
    assert "saves 59 % of the rounds, and finds another winner, which the full search has in place 2 of 3" in text
