"""The archive of finished runs: the same numbers as from their directories, and nothing that is damaged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedstill.building.config import resolve
from fedstill.core.errors import DataError
from fedstill.core.files import read_json
from fedstill.studies import presets
from fedstill.studies.archive import Archive, ArchivedRun, Quote, abridged, name_of, settings_of
from fedstill.studies.cells import Cell, run_cells
from fedstill.studies.claims import Check, Evidence, claims, finding
from fedstill.studies.presets import METRICS, Preset
from fedstill.studies.reproduce import number, plans, student_accuracies, variants_of
from fedstill.studies.reteach import accuracies
from support.runs import SMALL

DOCS = Path(__file__).parents[2] / "docs"
TINY: dict[str, Any] = {k: v for k, v in SMALL.items() if k != "engine"}
TINY |= {"model": "mlp", "model_options": {"hidden": [8]}, "rounds": 3}
REGIONS: dict[str, Any] = {"method": "f2l", "regions": 2, "rounds_per_episode": 2, "rounds": 4, "pool": 0.2}


def kept(cell: Cell) -> ArchivedRun:
    return abridged(settings_of(cell.config), cell.summary(), cell.records())


def made_up(**changes: Any) -> ArchivedRun:
    settings = {"method": "fedavg", "seed": 3} | changes
    return ArchivedRun(name_of(settings), settings, {"seed": 3, "final_accuracy": 0.5})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "models"),
    [
        ({"method": "fedavg+t1", "rounds": 9, "eval_every": 2}, ["", "without T1"]),
        (REGIONS, ["", "student", "region 1 before", "region 2 after"]),
    ],
)
def test_every_number_is_the_same_from_the_directory_and_from_the_archive(
    tmp_path: Path, settings: dict[str, Any], models: list[str]
) -> None:
    config = resolve(TINY | settings)
    cell = Cell(tmp_path / name_of(settings_of(config)), config)
    run_cells([cell])
    Archive(tmp_path / "archive").add("paper", [kept(cell)])
    archived = replace(cell, archived=Archive(tmp_path / "archive").run(cell.path.name))
    shutil.move(cell.path, tmp_path / "elsewhere")
    there = Cell(tmp_path / "elsewhere", config)
    assert archived.finished
    known = 0
    for model in models:
        own_summary = model in ("", "without T1")
        for metric in METRICS.keys() - {"server_seconds"} if own_summary else ["top1"]:
            further = [{"round": r, "episode": r, "target_acc": 5.0 * r} for r in range(1, 4)]
            for at in further:
                found = number(archived, model, metric, at)
                assert found == number(there, model, metric, at), (model, metric, at)
                known += found is not None
    assert known > 10
    with pytest.raises(DataError, match="no times"):
        number(archived, "", "server_seconds", {})


@pytest.mark.slow
def test_a_check_reads_archived_runs_and_quotes_and_runs_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {
        "title": "two methods",
        "settings": TINY,
        "row": [{"name": "FedAvg", "method": "fedavg"}, {"name": "FedProx", "method": "fedprox"}],
        "cpu": {"reduces": "nothing"},
    }
    monkeypatch.setattr(presets, "load", {"test/table": Preset.model_validate(table)}.__getitem__)
    check = Check(
        says="", preset="test/table", metric="AMP", of=[{"row": "FedProx"}], than=[{"row": "FedAvg"}], expect="higher"
    )
    evidence = Evidence(2, tmp_path / "cells")
    run_cells(evidence.cells(check))
    whole = finding(check, evidence)
    archive = Archive(tmp_path / "archive")
    for cell in evidence.cells(check):
        run = kept(cell)
        if cell.config.method == "fedavg":  # of which nothing but this number is left
            run = ArchivedRun(
                run.run, run.settings, quotes=[Quote("AMP", cell.summary()["final_amp"])], source="a page"
            )
        if (cell.config.method, cell.config.seed) != ("fedprox", 1):
            archive.add("test", [run])
    shutil.rmtree(tmp_path / "cells")
    again = Evidence(2, tmp_path / "cells", Archive(tmp_path / "archive"))
    assert [(cell.config.method, cell.config.seed) for cell in again.missing(check)] == [("fedprox", 1)]
    found = finding(check, again)
    assert (found.seeds, found.of, found.than) == ([0], whole.of[:1], whole.than[:1])
    other = check.model_copy(update={"metric": "FM"})
    assert {cell.config.method for cell in again.missing(other)} == {"fedavg", "fedprox"}, "FM was not quoted"


@pytest.mark.slow
def test_students_of_saved_teachers_are_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "title": "students",
        "reteach": True,
        "teachers": {"lambda3": 0.5},
        "settings": TINY | {k: v for k, v in REGIONS.items() if k != "method"} | {"save_teachers": True},
        "sweep": {"lambda3": [0.0, 1.0]},
        "row": [{"name": "G-student", "method": "lkd"}],
        "cpu": {"reduces": "nothing"},
    }
    others = table | {"sweep": {"lambda3": [0.25, 1.0]}}
    known = {"test/table": Preset.model_validate(table), "test/others": Preset.model_validate(others)}
    monkeypatch.setattr(presets, "load", known.__getitem__)
    (plan,) = plans("test/table", "cpu", 1, tmp_path)
    run_cells(plan.cells)
    expected = list(student_accuracies(plan, [0]))
    cell, variants = plan.runs[0][1][0], variants_of(plan)
    taught = [(variants, vars(accuracies(cell.path, variants)))]
    run = abridged(settings_of(cell.config), cell.summary(), cell.records(), taught)
    archive = Archive(tmp_path / "archive")
    archive.add("test", [run])
    shutil.rmtree(cell.path)
    check = Check(says="", preset="test/table", metric="top1", of=[{"row": "G-student", "lambda3": 1.0}],
                  than=[{"row": "Teacher 1", "lambda3": 1.0}], expect="open")  # fmt: skip
    evidence = Evidence(1, tmp_path, Archive(tmp_path / "archive"))
    found = finding(check, evidence)
    by_name = {(row, at["lambda3"]): values for row, at, values in expected}
    assert (found.of, found.than) == (by_name["G-student", 1.0], by_name["Teacher 1", 1.0])
    other = check.model_copy(update={"preset": "test/others"})
    assert finding(other, evidence).verdict == "not run", "other students of the same teachers"
    archive.add("test", [replace(run, students=[])])
    assert finding(check, Evidence(1, tmp_path, Archive(tmp_path / "archive"))).verdict == "not run"


@pytest.mark.slow
def test_the_results_in_the_docs_are_what_the_archive_gives(tmp_path: Path) -> None:
    saved = {json.dumps(r["check"]): r for c in read_json(DOCS / "results.json")["claims"] for r in c["checks"]}
    evidence, compared = Evidence(5, tmp_path, Archive(DOCS / "archive")), 0
    for check in [check for claim in claims() for check in claim.check]:
        result = saved[json.dumps(check.model_dump(exclude_none=True))]
        found = finding(check, evidence)
        assert len(found.seeds) <= len(result["seeds"]), f"{check.says}: write the page again (tools/papers.py --page)"
        if found.seeds == result["seeds"] != []:
            assert (found.of, found.than, found.verdict) == (result["of"], result["than"], result["verdict"]), (
                check.says
            )
            compared += 1
    assert compared > 20


def test_runs_are_sorted_lines_and_a_run_takes_the_place_of_what_was_quoted_of_it(tmp_path: Path) -> None:
    runs = [made_up(seed=seed) for seed in range(5)]
    archive = Archive(tmp_path)
    quote = ArchivedRun(runs[0].run, runs[0].settings, quotes=[Quote("AMP", 0.25, "", {"round": 3})], source="a page")
    assert archive.add("a", [quote]) == 1
    assert Archive(tmp_path).run(quote.run) is None
    assert Archive(tmp_path).quoted(quote.run, "AMP", "", {"round": 3}) == 0.25
    assert Archive(tmp_path).quoted(quote.run, "AMP", "", {}) is None
    assert archive.add("a", runs) == 5
    assert archive.add("a", reversed(runs)) == 0, "nothing is new"
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in lines] == sorted(run.run for run in runs)
    assert all(Archive(tmp_path).run(run.run) == run for run in runs)
    assert Archive(tmp_path).quoted(quote.run, "AMP", "", {"round": 3}) is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0.5", "0.6", "digest does not fit"),
        ('"seed": 3}, "summary"', '"seed": 4}, "summary"', "digest does not fit"),
        ('"sha256"', '"sha"', "sha256"),
        ("{", "", "line 1"),
        ("0.5", "0.5, 7: 7", "line 1"),
    ],
)
def test_a_damaged_line_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    Archive(tmp_path).add("a", [made_up()])
    file = tmp_path / "a.jsonl"
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(DataError, match=said):
        Archive(tmp_path)


def test_a_run_whose_name_does_not_fit_its_settings_is_refused(tmp_path: Path) -> None:
    Archive(tmp_path).add("a", [replace(made_up(), run="fedavg-000000000000")])
    with pytest.raises(DataError, match="does not fit its settings"):
        Archive(tmp_path)


def test_a_file_with_code_has_the_same_name_in_every_checkout(tmp_path: Path) -> None:
    names = set()
    for checkout in ("one", "two"):
        (tmp_path / checkout).mkdir()
        (tmp_path / checkout / "data.py").write_text("")
        config = resolve({"method": "fedavg", "data": f"{tmp_path / checkout}/data.py:mine"})
        names.add(name_of(settings_of(config, tmp_path / checkout)))
    assert len(names) == 1
    assert name_of(settings_of(config)) not in names
