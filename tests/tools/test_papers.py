"""tools/papers.py: the list of wanted runs, and carrying it out into the archive."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedstill.studies import presets
from fedstill.studies.archive import Archive
from fedstill.studies.presets import Preset

TOOLS = Path(__file__).parents[2] / "tools"
TINY: dict[str, Any] = {"fraction": 0.05, "model": "mlp", "model_options": {"hidden": [8]}, "clients": 4}
TINY |= {"data": "fashion-mini", "participation": 1.0, "rounds": 1, "epochs": 1}


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    module = importlib.import_module("papers")
    monkeypatch.setattr(module, "ARCHIVE", tmp_path / "archive")
    monkeypatch.chdir(tmp_path)
    return module


def test_every_entry_of_the_list_has_runs(tool: ModuleType, tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    for wanted in tool.wanted_list():
        found = tool.runs(wanted, tmp_path, "", archive)
        assert len(found) % wanted.seeds == 0, wanted.name
        assert wanted.minutes > 0


@pytest.mark.slow
def test_wanted_runs_are_carried_out_once_and_kept_in_the_archive(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"name": "FedAvg", "method": "fedavg"}, {"name": "FedProx", "method": "fedprox"}]
    table = {"title": "t", "settings": TINY, "row": rows, "cpu": {"reduces": "nothing"}}
    monkeypatch.setattr(presets, "load", {"test/table": Preset.model_validate(table)}.__getitem__)
    wanted = tool.Wanted(why="a test", preset="test/table", rows=["FedProx"], seeds=2, minutes=1)
    monkeypatch.setattr(tool, "wanted_list", lambda: [wanted])
    out = tmp_path / "out"

    def tell(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["papers.py", "--out", str(out), *words])
        tool.main()
        return capsys.readouterr().out

    assert "2 of   2 runs" in tell("--list")
    tell("--collect")
    assert not (tmp_path / "archive").exists(), "nothing is finished"
    tell("--part", "1/2")
    assert "1 of   2 runs" in tell("--list")
    tell()
    assert "0 of   2 runs" in tell("--list")
    assert len((tmp_path / "archive" / "test.jsonl").read_text().splitlines()) == 2
    assert tell() == "", "no run begins"
