"""The papers' claims: each check's numbers come from its runs, and its verdict from its interval."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedstill
from fedstill.building.config import resolve
from fedstill.cli import claims as command
from fedstill.cli.main import app
from fedstill.core.files import read_json
from fedstill.metrics.statistics import Paired, paired
from fedstill.studies import claims, presets
from fedstill.studies.cells import Cell, run_cells
from fedstill.studies.claims import Check, Claim, Evidence, finding, verdict
from fedstill.studies.presets import Preset
from fedstill.studies.reproduce import number, plans
from support.runs import SMALL

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
TINY: dict[str, Any] = {k: v for k, v in SMALL.items() if k != "engine"}
TINY |= {"model": "mlp", "model_options": {"hidden": [8]}, "rounds": 3}
TABLE: dict[str, Any] = {
    "title": "three methods",
    "numbers": "T1",
    "metrics": ["AMP"],
    "settings": TINY,
    "sweep": {"alpha": [0.5, 5.0]},
    "row": [
        {"name": "FedAvg", "method": "fedavg+t1", "model": "without T1"},
        {"name": "FedAvg+T1", "method": "fedavg+t1"},
        {"name": "FedProx", "method": "fedprox", "settings": {"mu": 0.5}},
    ],
    "cpu": {"reduces": "nothing"},
    "near": {"reduces": "rounds", "settings": {"rounds": 2}},
}
NUMBERS = [
    {"method": "FedAvg", "metric": "AMP", "alpha": 0.5, "value": 50.0, "std": 1.0, "unit": "%"},
    {"method": "FedAvg+T1", "metric": "AMP", "alpha": 0.5, "value": 60.0, "std": None, "unit": "%"},
    {"method": "FedAvg", "metric": "AMP", "alpha": 5.0, "value": 70.0, "std": None, "unit": "%"},
    {"method": "FedAvg+T1", "metric": "AMP", "alpha": 5.0, "value": 71.0, "std": None, "unit": "%"},
]


def check(**changes: Any) -> Check:
    told = {
        "says": "T1 helps",
        "preset": "test/table",
        "metric": "AMP",
        "of": [{"row": "FedAvg+T1", "alpha": 0.5}],
        "than": [{"row": "FedAvg", "alpha": 0.5}],
        "expect": "higher",
    }
    return Check.model_validate(told | changes)


@pytest.fixture
def evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evidence:
    made = {"test/table": Preset.model_validate(TABLE)}
    monkeypatch.setattr(presets, "load", made.__getitem__)
    monkeypatch.setattr(presets, "names", lambda: list(made))
    monkeypatch.setattr(presets, "paper_numbers", lambda: {"test": {"T1": {"rows": NUMBERS}}})
    return Evidence(2, tmp_path / "cells")


def amp(method: str, alpha: float, model: str = "", **changes: Any) -> list[float]:
    """Of both seeds, from runs of the test's own."""
    runs = [fedstill.run(method, **TINY | {"alpha": alpha, "seed": s, "engine": "inline"} | changes) for s in range(2)]
    return [(r.summary["also"][model] if model else r.summary)["final_amp"] for r in runs]


def test_a_check_is_a_paired_difference_of_its_runs_and_the_papers_beside(evidence: Evidence) -> None:
    asked = check()
    assert finding(asked, evidence).verdict == "not run"
    assert len(evidence.cells(asked)) == 2, "with and without T1 are one run a seed"
    run_cells(evidence.cells(asked))
    found = finding(asked, evidence)
    with_t1, without = amp("fedavg+t1", 0.5), amp("fedavg+t1", 0.5, "without T1")
    assert (found.of, found.than) == (with_t1, without)
    assert found.difference == paired(with_t1, without, interval="student")
    assert found.paper == pytest.approx(0.1)
    assert found.verdict == "too few seeds"


def test_growth_is_a_difference_of_differences(evidence: Evidence) -> None:
    elsewhere = {"of": [{"row": "FedAvg+T1", "alpha": 5.0}], "than": [{"row": "FedAvg", "alpha": 5.0}]}
    asked = check(growth=elsewhere)
    run_cells(evidence.cells(asked))
    found = finding(asked, evidence)
    gaps = [np.subtract(amp("fedavg+t1", alpha), amp("fedavg+t1", alpha, "without T1")) for alpha in (0.5, 5.0)]
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(np.mean(gaps[0] - gaps[1]))
    assert found.paper == pytest.approx(0.1 - 0.01)


@pytest.mark.parametrize(("metric", "best"), [("AMP", max), ("FM", min)])
def test_of_several_rows_the_best_on_each_seed_counts(evidence: Evidence, metric: str, best: Any) -> None:
    others = [{"row": "FedAvg", "alpha": 0.5}, {"row": "FedProx", "alpha": 0.5}]
    asked = check(metric=metric, than=others)
    run_cells(evidence.cells(asked))
    rows = [evidence.numbers(asked, term, [0, 1]) for term in others]
    assert rows[0] != rows[1]
    assert finding(asked, evidence).than == [best(pair) for pair in zip(*rows, strict=True)]


def test_only_seeds_with_every_run_count(evidence: Evidence) -> None:
    asked = check(than=[{"row": "FedProx", "alpha": 0.5}])
    cells = evidence.cells(asked)
    run_cells([cell for cell in cells if cell.config.seed == 0 or cell.config.method == "fedprox"])
    found = finding(asked, evidence)
    assert found.seeds == [0]
    assert found.of == amp("fedavg+t1", 0.5)[:1]


def test_how_rough_a_curve_is_and_at_which_meetings_a_student_was_taught(tmp_path: Path) -> None:
    config = resolve(TINY | {"method": "fedavg+t1", "rounds": 9, "eval_every": 2})
    cell = Cell(tmp_path / "flat", config)
    run_cells([cell])
    records = [r for r in cell.records() if r["evaluated"]]
    assert [r["round"] for r in records] == [2, 4, 6, 8, 9]
    records = records[2:]  # the second half
    for model, told in (("", records), ("without T1", [r["also"]["without T1"] for r in records])):
        a, b, c = (r["accuracy"] for r in told)
        assert number(cell, model, "roughness", {}) == pytest.approx(abs((b - a) - (c - b)) / 2**0.5)
    switching = {"method": "f2l", "regions": 2, "rounds_per_episode": 1, "rounds": 2, "pool": 0.2}
    for epsilon, taught in ((0.0, 1.0), (100.0, 0.0)):
        cell = Cell(tmp_path / f"regions{epsilon}", resolve(TINY | switching | {"hyper": {"epsilon": epsilon}}))
        run_cells([cell])
        assert [number(cell, "", "taught", {"episode": e}) for e in (1, 2)] == [taught, taught]
        assert number(cell, "", "taught", {"episode": 3}) is None


@pytest.mark.parametrize(
    ("expect", "low", "high", "margin", "said"),
    [
        ("higher", 0.1, 0.3, 0, "confirmed"),
        ("higher", -0.1, 0.3, 0, "not seen at this scale"),
        ("higher", 0.0, 0.0, 0, "not seen at this scale"),
        ("higher", -0.3, -0.1, 0, "contradicted"),
        ("lower", -0.3, -0.1, 0, "confirmed"),
        ("lower", 0.1, 0.3, 0, "contradicted"),
        ("lower", -0.1, 0.3, 0, "not seen at this scale"),
        ("same", -0.1, 0.1, 0.2, "confirmed"),
        ("same", -0.1, 0.3, 0.2, "not seen at this scale"),
        ("same", 0.3, 0.4, 0.2, "contradicted"),
        ("same", -0.4, -0.3, 0.2, "contradicted"),
        ("not higher", -0.5, 0.1, 0.2, "confirmed"),
        ("not higher", -0.5, 0.3, 0.2, "not seen at this scale"),
        ("not higher", 0.3, 0.5, 0.2, "contradicted"),
        ("open", 0.3, 0.5, 0, "open"),
    ],
)
def test_verdicts(expect: Any, low: float, high: float, margin: float, said: str) -> None:
    assert verdict(expect, Paired((low + high) / 2, low, high, 3, 5), margin) == said
    few = verdict(expect, Paired((low + high) / 2, low, high, 3, 4), margin)
    assert few == ("open" if expect == "open" else "too few seeds")


def test_every_check_names_rows_that_its_preset_has(tmp_path: Path) -> None:
    evidence = Evidence(5, tmp_path)
    for claim in claims.claims():
        for asked in claim.check:
            assert asked.metric in presets.METRICS
            assert len(evidence.cells(asked)) >= 5, asked.says
            assert finding(asked, evidence).verdict == "not run"


def test_the_command_runs_and_writes_a_page_that_it_can_write_again(
    evidence: Evidence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Claim(title="T1 is better", paper="Table 1", check=[check(), check(says="or not", expect="open")])
    for module in (claims, command):
        monkeypatch.setattr(module, "claims", lambda: [claim])
    words = ["claims", "--seeds", "2", "--out", str(tmp_path)]
    nothing = CliRunner().invoke(app, [*words, "--finished"])
    assert "no run" in str(nothing.exception)
    assert not list(tmp_path.glob("cells/*"))
    assert CliRunner().invoke(app, words).exit_code == 0
    page = (tmp_path / "claims.md").read_text()
    d = finding(claim.check[0], evidence).difference
    assert d is not None
    assert f"{100 * d.mean:+.2f} [{100 * d.low:+.2f}, {100 * d.high:+.2f}]" in page
    assert "| +10.00 | too few seeds |" in page
    assert page.count("| open |") == 1
    again = tmp_path / "again.md"
    written = CliRunner().invoke(app, ["claims", "--saved", str(tmp_path / "claims.json"), "--page", str(again)])
    assert written.exit_code == 0
    assert again.read_text() == page


def test_results_of_runs_elsewhere_are_kept_where_they_have_more_seeds(
    evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Claim(title="T1 is better", paper="Table 1", check=[check()])
    monkeypatch.setattr(claims, "claims", lambda: [claim])
    run_cells([cell for cell in evidence.cells(claim.check[0]) if cell.config.seed == 0])
    elsewhere = claims.saved(evidence) | {"versions": ["elsewhere"], "factorials": {"t1": {"title": "", "tables": ""}}}
    (theirs,) = elsewhere["claims"][0]["checks"]
    theirs |= {"verdict": "elsewhere", "check": theirs["check"] | {"says": "the same in other words"}}
    for seeds, scale, verdict_ in (
        ([0, 1], "nothing", "elsewhere"),
        ([0], "nothing", "too few seeds"),
        ([0, 1], "another scale", "too few seeds"),
    ):
        theirs["seeds"], elsewhere["presets"]["test/table"]["reduces"] = seeds, scale
        found = claims.saved(evidence, elsewhere)
        (result,) = found["claims"][0]["checks"]
        assert (result["verdict"], result["check"]["says"]) == (verdict_, "T1 helps")
        assert found["factorials"] == elsewhere["factorials"]
        assert "elsewhere" in found["versions"]


def test_runs_near_the_papers_stand_beside_their_numbers_without_a_verdict(
    evidence: Evidence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evidence.near() == {}
    (plan,) = plans("test/table", "near", 2, tmp_path / "cells")
    (cell,) = (cells[0] for point, cells in plan.runs if (point.row, point.at) == ("FedAvg+T1", {"alpha": 0.5}))
    run_cells([cell])
    monkeypatch.setattr(claims, "claims", list)
    found = claims.saved(evidence)
    table = found["near"]["test/table"]
    assert [(row["row"], row["at"], row["paper"]) for row in table["rows"]] == [
        ("FedAvg", {"alpha": 0.5}, 0.5),
        ("FedAvg+T1", {"alpha": 0.5}, 0.6),
    ], "both are read from one run"
    ours = amp("fedavg+t1", 0.5, rounds=2)[0]
    assert table["rows"][1]["values"] == [ours]
    page = command.markdown(found)
    assert f"| `test/table` | FedAvg+T1, alpha 0.5 | AMP | 1 | {100 * ours:.2f} | 60.00 |" in page
    assert "`test/table` still reduces: rounds." in page
    assert claims.saved(Evidence(2, tmp_path / "empty"), found)["near"] == found["near"], (
        "kept, as its runs are elsewhere"
    )


def test_a_claim_that_is_not_confirmed_says_what_may_decide_it() -> None:
    claim = {
        "title": "t", "paper": "p", "note": "", "checks": [], "hypotheses": ["too few rounds", "too few seeds"],
        "decides": "", "factorials": ["rounds"], "still_open": "which",
    }  # fmt: skip
    found: dict[str, Any] = {"claims": [claim], "presets": {}, "versions": [], "factorials": {}}
    page = command.markdown(found)
    assert "**What decides it?** Not known yet. Hypotheses:\n\n1. too few rounds\n2. too few seeds\n" in page
    assert "`tools/factorials/rounds.toml`, on held-out images and seeds from 100 on: not run yet." in page
    assert "**Still open:** which" in page
    found["factorials"] = {"rounds": {"title": "rounds and seeds", "tables": "| rounds |\n|---|\n| 5 |\n"}}
    assert "**Factorial** `tools/factorials/rounds.toml`: rounds and seeds\n\n| rounds |\n" in command.markdown(found)
    assert "\n## Tuned\n\nEach alike.\n\n## The runs\n" in command.markdown(found | {"tuned": "Each alike.\n"})


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        (["confirmed", "confirmed", "open"], "confirmed; 1 open"),
        (["not run"], "not run"),
        (["open"], "open"),
        (["not run", "contradicted", "confirmed", "confirmed"], "2 of 4 confirmed, 1 contradicted, 1 not run"),
    ],
)
def test_a_claims_verdicts_in_words(verdicts: list[str], said: str) -> None:
    assert command.tally({"checks": [{"verdict": verdict} for verdict in verdicts]}) == said


def test_saved_results_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "missing.json"):
        result = CliRunner().invoke(app, ["claims", "--saved", str(tmp_path / name)])
        assert name in str(result.exception)


def test_the_page_in_the_docs_is_what_the_command_writes() -> None:
    saved = read_json(DOCS / "results.json")
    assert (DOCS / "results.md").read_text() == command.markdown(saved)
    for kept, claim in zip(saved["claims"], claims.claims(), strict=True):
        assert {k: v for k, v in kept.items() if k != "checks"} == claim.model_dump(exclude={"check"})
        if command.tally(kept).partition(";")[0] != "confirmed":
            assert claim.hypotheses, f"{claim.title}: what decides it?"
            assert claim.still_open
        assert [told["check"] for told in kept["checks"]] == [c.model_dump(exclude_none=True) for c in claim.check]
    nowhere = claims.Evidence(1, Path("nowhere"))
    for name, kept in saved["presets"].items():
        assert kept == claims.described(nowhere.plan(name)), "the page is of another scale than the preset's"
    told = [told for claim in saved["claims"] for told in claim["checks"]]
    for one in told:
        if one["seeds"]:
            again = paired(one["of"], one["than"], interval="student")
            assert one["difference"]["mean"] == pytest.approx(again.mean)
            assert one["verdict"] == verdict(one["check"]["expect"], again, one["check"]["margin"])
    assert not re.search(r"/(home|tmp|root|work)/", (DOCS / "results.json").read_text())
