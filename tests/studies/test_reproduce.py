"""Presets carried out: which runs, used again or not, and what the table says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstill
from fedstill.analysis import reproducing
from fedstill.cli import presets as command
from fedstill.methods.lkd import LKD
from fedstill.studies import presets
from fedstill.studies.cells import run_cells
from fedstill.studies.presets import Preset
from fedstill.studies.reproduce import MEAN, directory, entries, plans, seconds_needed
from support.runs import SMALL

pytestmark = pytest.mark.slow

TINY: dict[str, Any] = {k: v for k, v in SMALL.items() if k != "engine"}
TINY |= {"model": "mlp", "model_options": {"hidden": [8]}, "rounds": 2}


def given(monkeypatch: pytest.MonkeyPatch, **found: dict[str, Any]) -> None:
    """Presets of the test's own, and numbers for them."""
    made = {f"test/{name}": Preset.model_validate(content) for name, content in found.items()}
    monkeypatch.setattr(presets, "load", made.__getitem__)
    rows = [
        {"method": "FedAvg", "metric": "AMP", "alpha": 0.5, "value": 50.0, "std": 1.0, "unit": "%"},
        {"method": "FedAvg+T1", "metric": "AMP", "alpha": 0.5, "value": 60.0, "std": None, "unit": "%"},
        {"method": "FedAvg", "metric": "FM", "alpha": 0.5, "value": 3.0, "std": 1.0, "unit": "", "scale": 0.01},
    ]
    monkeypatch.setattr(presets, "paper_numbers", lambda: {"test": {"T1": {"rows": rows}}})


WITH_T1: dict[str, Any] = {
    "title": "with and without",
    "numbers": "T1",
    "metrics": ["AMP", "FM", "rounds_to_target", "top1_at_round"],
    "targets": [10, 100],
    "at_rounds": [1, 2],
    "settings": TINY,
    "sweep": {"alpha": [0.5, 5.0]},
    "row": [
        {"name": "FedAvg", "method": "fedavg+t1", "model": "without T1"},
        {"name": "FedAvg+T1", "method": "fedavg+t1"},
        {"name": "FedProx", "method": "fedprox", "settings": {"mu": 0.5}, "when": [
            {"at": {"alpha": 5.0}, "settings": {"mu": 0.0}},
        ]},
    ],
    "cpu": {"reduces": "the rounds", "settings": {"rounds": 1}, "sweep": {"alpha": [0.5]}, "leave_out": ["FedProx"]},
}  # fmt: skip


def test_a_table_holds_the_papers_numbers_against_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, table=WITH_T1)
    (plan,) = plans("test/table", "paper", 2, tmp_path)
    assert len(plan.runs) == 6
    assert len(plan.cells) == 8, "two rows are read from one run"
    assert seconds_needed(plan.cells) > 0
    run_cells(plan.cells)
    assert seconds_needed(plan.cells) == 0
    found = {(e.row, e.metric, json.dumps(e.at)): e for e in entries(plan)}
    runs = [fedstill.run("fedavg+t1", **TINY | {"alpha": 0.5, "seed": seed, "engine": "inline"}) for seed in range(2)]
    with_t1 = found["FedAvg+T1", "AMP", '{"alpha": 0.5}']
    assert with_t1.values == [r.summary["final_amp"] for r in runs]
    assert with_t1.paper == pytest.approx(0.6)
    assert with_t1.difference == pytest.approx(sum(with_t1.values) / 2 - 0.6)  # type: ignore[arg-type]
    plain = found["FedAvg", "AMP", '{"alpha": 0.5}']
    assert plain.values == [r.summary["also"]["without T1"]["final_amp"] for r in runs]
    assert with_t1.wins == sum(a > b for a, b in zip(with_t1.values, plain.values, strict=True))  # type: ignore[operator]
    assert found["FedAvg", "FM", '{"alpha": 0.5}'].paper == pytest.approx(0.03)
    never = found["FedAvg", "rounds_to_target", '{"alpha": 0.5, "target_acc": 100.0}']
    assert (never.ours, never.values) == (None, [None, None])
    second = found["FedAvg+T1", "top1_at_round", '{"alpha": 0.5, "round": 2}']
    assert second.values == [r.records[1]["accuracy"] for r in runs]
    same = found["FedProx", "AMP", '{"alpha": 5.0}'], found["FedAvg", "AMP", '{"alpha": 5.0}']
    assert same[0].values == same[1].values, "at alpha 5 its mu is 0"
    text = reproducing.markdown(plan, list(found.values()), 2)
    assert "| FedAvg+T1 | 60.00 → " in text


def test_another_scale_changes_what_it_says_and_shares_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, table=WITH_T1, both={"title": "both", "parts": ["test/table", "test/table"]})
    (paper,), (cpu,) = (plans("test/table", scale, 1, tmp_path) for scale in ("paper", "cpu"))
    assert {point.row for point, _ in cpu.runs} == {"FedAvg", "FedAvg+T1"}
    assert [cell.config.rounds for cell in cpu.cells] == [1]
    assert not {cell.path for cell in paper.cells} & {cell.path for cell in cpu.cells}
    assert len(plans("test/both", "cpu", 1, tmp_path)) == 2


def test_the_directory_depends_on_what_changes_a_number_and_on_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, table=WITH_T1)
    config = plans("test/table", "paper", 1, tmp_path)[0].runs[0][0].config
    for free in ({"workers": 5}, {"data_dir": str(tmp_path)}, {"target_accuracy": 0.4}, {"engine": "inline"}):
        assert directory(config.model_copy(update=free)) == directory(config)
    for other in ({"seed": 9}, {"lr": 0.2}, {"rounds": 9}, {"hyper": {"cache_init": "w0"}}, {"eval_every": 2}):
        assert directory(config.model_copy(update=other)) != directory(config)


def test_a_sweep_over_saved_teachers_takes_one_run_a_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TINY | {"regions": 2, "rounds_per_episode": 2, "pool": 0.2, "save_teachers": True}
    swept = {
        "title": "labels", "metrics": ["top1"], "reteach": True, "teachers": {"lambda3": 0.0}, "settings": settings,
        "sweep": {"lambda3": [0.0, 1.0]},
        "row": [{"name": "G-student", "method": "lkd", "settings": {"update": False, "server_epochs": 2}}],
    }  # fmt: skip
    given(monkeypatch, sweep=swept)
    (plan,) = plans("test/sweep", "paper", 2, tmp_path)
    assert len(plan.cells) == 2
    run_cells(plan.cells)
    found = {(e.row, e.at["lambda3"]): e for e in entries(plan)}
    assert set(found) == {(row, x) for row in ("Teacher 1", "Teacher 2", MEAN, "G-student") for x in (0.0, 1.0)}
    assert found["Teacher 1", 0.0].values == found["Teacher 1", 1.0].values
    own = [cell.summary()["best_accuracy"] for cell in plan.cells]
    assert found["G-student", 0.0].values == own, "the run itself was made at that point"
    assert found["G-student", 0.0].values != found["G-student", 1.0].values

    taught, teach = list[float](), LKD.teach

    def counted(self: LKD, *args: Any) -> None:
        taught.append(self.lambda3)
        teach(self, *args)

    monkeypatch.setattr(LKD, "teach", counted)
    assert entries(plan) == list(found.values())
    assert not taught, "each student was taught before"
    kept, _ = sorted((tmp_path / "students").iterdir())
    kept.write_text(kept.read_text().replace('"mean": 0.', '"mean": 0.9'))
    assert entries(plan) == list(found.values())
    assert taught == [0.0, 1.0], "one file was changed, and its students are taught again"
    (saved,) = (plan.cells[0].path / "teachers").glob("*.safetensors")
    saved.write_bytes((plan.cells[1].path / "teachers" / saved.name).read_bytes())
    values = {(e.row, e.at["lambda3"]): e.values for e in entries(plan)}
    assert taught == [0.0, 1.0] * 2, "one run has other teachers"
    assert values["Teacher 1", 0.0] != found["Teacher 1", 0.0].values


def test_a_number_that_the_paper_only_bounds_is_shown_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, table=WITH_T1 | {"metrics": ["rounds_to_target"], "targets": [10], "at_rounds": []})
    bounded = {"method": "FedAvg", "metric": "rounds_to_target", "value": 60, "std": None, "unit": "", "censored": True}
    exact = bounded | {"method": "FedAvg+T1", "value": 30, "std": 2.0, "censored": False}
    monkeypatch.setattr(presets, "paper_numbers", lambda: {"test": {"T1": {"rows": [bounded, exact]}}})
    (plan,) = plans("test/table", "cpu", 1, tmp_path)
    run_cells(plan.cells)
    found = {e.row: e for e in entries(plan)}
    assert found["FedAvg"].difference is None
    assert reproducing.cell(found["FedAvg"]).startswith("> 60.0 → ")
    assert reproducing.cell(found["FedAvg+T1"]).startswith("30.0 ± 2.0 → ")


def test_what_a_preset_lacks_is_said_before_its_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*WITH_T1["row"], {"name": "FedDF", "method": "feddf", "settings": {"proxy": "emnist-letters"}}]
    given(monkeypatch, table=WITH_T1 | {"row": rows})
    with pytest.raises(fedstill.FedstillError, match="emnist-letters"):
        command.reproduce(
            "test/table", "paper", seeds=1, data_dir=str(tmp_path), device=None, jobs=0, out=tmp_path, dry_run=True
        )


def test_a_preset_runs_on_the_device_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, table=WITH_T1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    seen: list[str] = []
    monkeypatch.setattr(command, "check", lambda cells: seen.extend(cell.config.device for cell in cells))
    for device in (None, "cuda:0"):
        command.reproduce(
            "test/table", "cpu", seeds=1, data_dir=None, device=device, jobs=0, out=tmp_path, dry_run=True
        )
    assert seen == ["cpu"] * (len(seen) // 2) + ["cuda:0"] * (len(seen) // 2) != []
    with pytest.raises(fedstill.SettingError, match="tpu"):
        command.reproduce("test/table", "cpu", seeds=1, data_dir=None, device="tpu", jobs=0, out=tmp_path, dry_run=True)
