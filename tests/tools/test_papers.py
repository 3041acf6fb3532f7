"""tools/papers.py: the list of wanted runs, and carrying it out into the archive."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tomli_w

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


@pytest.mark.slow
def test_students_that_a_factorial_gains_are_taught_by_the_teachers_there_are(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"clients": 6, "regions": 2, "rounds_per_episode": 1, "pool": 0.1, "fraction": 0.2}
    factorial: dict[str, Any] = {
        "title": "t", "hypothesis": "h", "seeds": [100, 101], "settings": TINY | few, "taught": ["server_epochs"],
        "teachers": {"method": "lkd", "save_teachers": True}, "factors": {"server_epochs": [1, 2]},
        "variants": {"LKD": {}},
    }  # fmt: skip
    file = tmp_path / "tools" / "factorials" / "small.toml"
    file.parent.mkdir(parents=True)
    monkeypatch.setattr(tool, "HERE", tmp_path)
    monkeypatch.setattr(tool, "wanted_list", lambda: [tool.Wanted(why="", factorial="small", seeds=1, minutes=1)])
    monkeypatch.setattr(sys, "argv", ["papers.py", "--out", str(tmp_path / "out")])

    def carried_out() -> str:
        file.write_text(tomli_w.dumps(factorial))
        tool.main()
        return capsys.readouterr().out

    assert "factorial small" in carried_out()
    factorial["variants"]["labels"] = {"lambda3": 1.0}
    carried_out()
    (kept,) = map(json.loads, (tmp_path / "archive" / "factorial-small.jsonl").read_text().splitlines())
    assert [len(each["accuracies"]["students"]) for each in kept["students"]] == [2, 4]
    shutil.rmtree(tmp_path / "out")
    assert carried_out() == "", "all is in the archive"
    factorial["variants"]["MTKD"] = {"Tw": 0.0}
    assert "factorial small" in carried_out(), "teachers that are gone are trained again"
