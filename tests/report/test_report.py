"""The report: one page, whole in itself, with the numbers of its runs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedstill as library
from fedstill.metrics.statistics import spread
from fedstill.report.charts import FEWEST, Chart, curve_data, metric_names
from fedstill.report.page import page
from fedstill.report.runs import Group, RunData
from support.commandline import SHORT, fedstill, interrupted_after, short

pytestmark = pytest.mark.slow

VOID = {"meta", "img", "br", "hr", "link", "input"}
HOSTILE = '<script>alert("x")</script>&'


class Page(HTMLParser):
    """Checks that tags are balanced and ids are unique, and collects tables, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.words = ""
        self.bold: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        ids = [value for _, name, value in self.attributes if name == "id"]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag == "script":
            self.scripts.append("")
        if tag == "style":
            self.styles.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag]
        self.open.pop()

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside in ("script", "style"):
            (self.scripts if inside == "script" else self.styles)[-1] += data
            return
        self.words += data
        if "strong" in self.open:
            self.bold.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data

    def row(self, name: str) -> list[str]:
        """The first row of any table whose first cell is this, or begins with it and a comma."""
        return next(row for table in self.tables for row in table if row[0] == name or row[0].startswith(f"{name},"))

    def charts(self, kind: str) -> list[Any]:
        """The data of all charts of a kind."""
        kinds = [value for tag, name, value in self.attributes if (tag, name) == ("figure", "data-chart")]
        blocks = self.scripts[:-1]  # the last is the code that draws them
        return [json.loads(data) for each, data in zip(kinds, blocks, strict=True) if each == kind]


def train(method: str, out: Path, **settings: Any) -> Path:
    """A short run without the command line and its picture."""
    library.run(method, out=out, **(SHORT | settings))
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds each, and one with regions."""
    folder = tmp_path_factory.mktemp("report")
    for seed in (0, 1):
        train("fedavg", folder / f"fedavg-{seed}", seed=seed, workers=seed)
        train("fedprox", folder / f"fedprox-{seed}", seed=seed, mu=0.3)
    train("lkd", folder / "lkd", clients=6, regions=2, pool=0.2, server_epochs=1, fraction=0.1)
    return folder


@pytest.fixture(scope="module")
def text(runs: Path) -> str:
    out = runs / "report.html"
    answer = fedstill("report", runs, "--out", out, "--title", "What came out")
    assert answer.code == 0, answer.err
    assert f"page: {out}" in answer.out
    return out.read_text(encoding="utf-8")


def summary(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "summary.json").read_text())
    return found


def test_the_page_is_well_formed_and_fits_phones_and_both_schemes(text: str) -> None:
    found = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert ("html", "lang", "en") in found.attributes
    assert ("meta", "charset", "utf-8") in found.attributes
    assert ("meta", "content", "width=device-width, initial-scale=1") in found.attributes
    assert "@media (prefers-color-scheme: dark)" in text
    assert found.tags.count("title") == found.tags.count("main") == found.tags.count("h1") == 1
    assert len(text.encode()) < 2_000_000


def test_every_cell_belongs_to_a_row_and_a_column_with_a_name(text: str) -> None:
    found = Page(text)
    scopes = [value for tag, name, value in found.attributes if (tag, name) == ("th", "scope")]
    assert len(scopes) == found.tags.count("th")
    assert set(scopes) == {"row", "col"}
    labels = {value for tag, name, value in found.attributes if (tag, name) == ("td", "data-label")}
    assert {"accuracy final", "FM", "WLP"} <= labels, "which a narrow screen shows before each cell"
    captioned = re.findall(r"<table[^>]*cards[^>]*>(<caption>.+?</caption>)?", text)
    assert captioned
    assert all(captioned), "columns are explained"


def test_the_page_needs_nothing_from_elsewhere_and_its_policy_allows_its_own_script_alone(text: str) -> None:
    found = Page(text)
    assert not {"link", "iframe", "object", "base", "a", "img"} & set(found.tags)
    assert not [value for _, name, value in found.attributes if name in ("src", "href", "srcset")]
    assert not re.search(r"url\(|@import|https?://", text.replace("http://www.w3.org/2000/svg", ""))
    policy = next(value for tag, name, value in found.attributes if tag == "meta" and value.startswith("default-src"))
    digest = {
        kind: base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        for kind, content in (("script", found.scripts[-1]), ("style", found.styles[0]))
    }
    for kind, value in digest.items():
        assert f"{kind}-src 'sha256-{value}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_the_results_are_means_and_deviations_of_the_summaries(text: str, runs: Path) -> None:
    found = Page(text)
    head = next(table[0] for table in found.tables if "accuracy best" in table[0])
    row = dict(zip(head, found.row("fedprox"), strict=True))
    summaries = [summary(runs / f"fedprox-{seed}") for seed in (0, 1)]
    columns = {
        "accuracy best": "best_accuracy",
        "accuracy final": "final_accuracy",
        "AMP": "final_amp",
        "WLP": "final_wlp",
    }
    for column, name in columns.items():
        s = spread([100 * each[name] for each in summaries])
        assert row[column] == f"{s.mean:.2f} ± {s.std:.2f} %"
    fm = spread([each["final_fm"] for each in summaries])
    assert row["FM"] == f"{fm.mean:.4f} ± {fm.std:.4f}"
    moved = spread([(each["bytes_down"] + each["bytes_up"]) / 1e6 for each in summaries])
    assert row["MB moved"] == f"{moved.mean:.1f} ± {moved.std:.1f}"
    assert row["seeds"] == "2"


def test_a_single_seed_has_no_deviation(text: str, runs: Path) -> None:
    row = next(r for table in Page(text).tables for r in table if r[0].startswith("lkd") and r[1] == "1")
    assert f"{100 * summary(runs / 'lkd')['final_accuracy']:.2f} %" in row


def test_the_page_tells_what_was_run_and_what_differs(text: str, runs: Path) -> None:
    found = Page(text)
    assert found.row("methods")[1] == "fedavg, fedprox, lkd"
    assert found.row("data")[1] == "fashion-mini"
    assert found.row("seeds")[1] == "0, 1"
    assert found.row("batch_size")[1] == "16", "what all share"
    differ = next(table for table in found.tables if table[0][0] == "setting")
    methods = [name.partition(",")[0] for name in differ[0]]
    by_name = {row[0]: dict(zip(methods, row, strict=True)) for row in differ[1:]}
    assert by_name["mu"]["fedprox"] == "0.3"
    assert by_name["mu"]["fedavg"] == "–"
    assert by_name["workers"]["fedavg"] == "0, 1"
    versions = summary(runs / "lkd")["versions"]
    assert found.row("torch")[1] == versions["torch"]


def test_every_run_has_its_whole_config(text: str, runs: Path) -> None:
    found = Page(text)
    assert found.tags.count("pre") == 5
    for config in runs.glob("*/config.toml"):
        assert config.read_text() in found.words


def test_the_charts_are_curves_fairness_confusion_and_partition(text: str, runs: Path) -> None:
    found = Page(text)
    (curves,) = found.charts("curves")
    by_name = {group["name"].partition(",")[0]: group["lines"] for group in curves["groups"]}
    rows = [[json.loads(x) for x in (runs / f"fedprox-{s}/metrics.jsonl").read_text().splitlines()] for s in (0, 1)]
    assert by_name["fedprox"]["fm"]["x"] == [1, 2, 3]
    means = [np.mean([records[i]["fm"] for records in rows]) for i in range(3)]
    assert by_name["fedprox"]["fm"]["y"] == pytest.approx(means, rel=1e-4)
    assert min(by_name["fedprox"]["fm"]["low"]) >= 0
    assert "low" not in by_name["lkd"]["fm"], "one seed has no band"
    (clients,) = found.charts("clients")
    assert all(group["y"] == sorted(group["y"]) for group in clients["groups"])
    (confusion,) = found.charts("confusion")
    assert [matrix["name"].partition(":")[0] for matrix in confusion["matrices"]] == [
        "region 1", "region 2", "global model",
    ]  # fmt: skip
    assert confusion["classes"][9] == "Ankle boot"
    partitions = found.charts("bubbles")
    assert [len(each["clients"]) for each in partitions] == [4, 6]
    assert partitions[0]["classes"] == confusion["classes"]


def test_methods_are_paired_with_the_first_that_has_their_settings(text: str) -> None:
    table = next(table for table in Page(text).tables if "compared with" in table[0])
    assert [(row[0].partition(",")[0], row[1].partition(",")[0]) for row in table[1:]] == [("fedprox", "fedavg")]


def test_differences_are_means_over_common_seeds_and_positive_where_better() -> None:
    def group(name: str, accuracies: list[float], fm: float) -> Group:
        numbers: list[Any] = [{"final_accuracy": a, "final_fm": fm} for a in accuracies]
        settings = [{"method": name, "seed": i} for i in range(len(numbers))]
        return Group(name, tuple(RunData(Path(name), s, [], n) for s, n in zip(settings, numbers, strict=True)))

    few, base = group("few", [0.6, 0.4], 0.1), group("base", [0.5, 0.5, 0.5, 0.5, 0.5], 0.3)
    many = group("many", [0.7] * 5, 0.4)
    table = next(t for t in Page(page([base], [], pairs=[(few, base), (many, base)])).tables if "compared with" in t[0])
    assert table[1] == ["few", "base", "2", "+0.00 (1/2)", "–", "+0.2000 (2/2)", "–"]
    assert table[2][3] == "+20.00 [+20.00, +20.00] (5/5)", "a bootstrap of equal differences has no width"
    assert table[2][5].startswith("-0.1000")


def test_the_best_of_what_is_compared_is_bold_and_by_class_the_best_of_each() -> None:
    def group(name: str, accuracy: float, fm: float, per_class: list[float]) -> Group:
        numbers: Any = {"final_accuracy": accuracy, "final_fm": fm, "final_per_class": per_class}
        return Group(name, (RunData(Path(name), {"method": name, "seed": 0}, [], numbers),))

    three = [group("a", 0.51, 0.2, [0.1, 0.9]), group("b", 0.52, 0.1, [0.3, 0.7]), group("c", 0.99, 0.0, [1.0, 1.0])]
    names = {each.name: ("cat", "dog") for each in three[:2]}
    found = Page(page(three, [], pairs=[(three[1], three[0])], classes=names))
    assert found.bold == ["52.00 %", "0.1000", "30.0 %", "90.0 %"], "c is compared with nothing, and alone in its table"
    assert ["cat", "10.0 %", "30.0 %"] in [row for table in found.tables for row in table]


def test_runs_of_a_comparison_are_in_its_order_and_a_baseline_can_be_chosen(runs: Path, tmp_path: Path) -> None:
    listed = [{"runs": [f"moved/fedprox-{seed}" for seed in (0, 1)]}, {"runs": ["fedavg-0", "fedavg-1"]}]
    (runs / "comparison.json").write_text(json.dumps(listed))
    try:
        for words, first in (((), "fedprox"), (("--baseline", "fedavg"), "fedavg")):
            assert fedstill("report", runs, "--out", tmp_path / "r.html", *words).code == 0
            assert Page((tmp_path / "r.html").read_text()).row("methods")[1].startswith(f"{first}, ")
        answer = fedstill("report", runs, "--out", tmp_path / "r.html", "--baseline", "fedkf")
        assert (answer.code, "there are fedprox, fedavg, lkd" in answer.err) == (2, True)
    finally:
        (runs / "comparison.json").unlink()


def test_clients_that_are_served_worst_are_named(text: str, runs: Path) -> None:
    rows = [line.split(",") for line in (runs / "lkd/clients.csv").read_text().splitlines()[1:]]
    worst = min(float(accuracy) for *_, accuracy in rows if accuracy)
    named = next(r for t in Page(text).tables if "worst served" in t[0] for r in t if r[0].startswith("lkd"))
    client, shown = named[1].split(": ")
    assert shown.startswith(f"{100 * worst:.1f} %")
    assert [client, worst] in [[name, float(accuracy)] for name, _, _, accuracy in rows if accuracy]


def test_long_curves_are_thinned_out_and_keep_their_ends() -> None:
    records: Any = [{"round": r, "loss": 1 / r} for r in range(1, 1001)]
    many = [Group(f"g{i}", (RunData(Path("x"), {"method": "m", "seed": 0}, records),)) for i in range(300)]
    made = curve_data(many)
    lines = [group["lines"]["loss"] for group in made["groups"]]
    assert all(len(line["x"]) == len(line["y"]) >= FEWEST for line in lines)
    assert {(line["x"][0], line["x"][-1], line["y"][-1]) for line in lines} == {(1, 1000, 0.001)}
    assert len(json.dumps(made)) < 1_500_000


def test_numbers_of_further_models_are_metrics_too_and_what_is_no_number_is_none() -> None:
    record = {"round": 1, "loss": 0.5, "accuracy": "<b>", "also": {"without T1": {"accuracy": 0.2, "per_class": []}}}
    assert metric_names([[record]]) == ["loss", "also.without T1.accuracy"]


def test_names_of_the_users_own_are_escaped() -> None:
    settings = {"method": HOSTILE, "seed": 0, "data": HOSTILE, "model": HOSTILE, "rounds": 1, HOSTILE: HOSTILE}
    numbers: Any = {
        "final_accuracy": 0.5,
        "final_per_class": [0.5],
        "versions": {HOSTILE: HOSTILE},
        "also": {HOSTILE: {"final_accuracy": 0.25}},
    }
    one = RunData(Path(f"/{HOSTILE}"), settings, [], numbers, [(1, 0.5)], HOSTILE, [HOSTILE])
    two = RunData(Path("/b"), settings | {HOSTILE: 2}, [], numbers, config=HOSTILE)
    groups = [Group(HOSTILE, (one,)), Group("b", (two,))]
    made = page(
        groups,
        [Chart("curves", f'{HOSTILE}" onload="x', {"name": HOSTILE})],
        title=HOSTILE,
        notes=[HOSTILE],
        pairs=[(groups[1], groups[0])],
        classes={HOSTILE: [HOSTILE]},
    )
    found = Page(made)
    assert found.tags.count("script") == 2, "the data of the chart, and what draws it"
    assert found.charts("curves") == [{"name": HOSTILE}]
    assert not [name for _, name, _ in found.attributes if name.startswith("on")]
    assert found.words.count(HOSTILE) > 15


def test_a_hostile_folder_reaches_the_page_as_text(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a <b>&amp; $title"
    train("fedavg", folder, rounds=1)
    assert fedstill("report", folder, "--out", tmp_path / "r.html").code == 0
    found = Page((tmp_path / "r.html").read_text())
    assert "b" not in found.tags
    assert str(folder) in found.words


def test_variants_of_a_run_have_rows_of_their_own(tmp_path: Path) -> None:
    path = train("fedprox+t1", tmp_path / "t1")
    assert fedstill("report", path, "--out", tmp_path / "r.html").code == 0
    found = Page((tmp_path / "r.html").read_text())
    for name, numbers in summary(path)["also"].items():
        assert f"{100 * numbers['final_accuracy']:.2f} %" in found.row(f"fedprox+t1: {name}")


def test_unfinished_runs_are_named_and_left_out(runs: Path, tmp_path: Path) -> None:
    with interrupted_after(1):
        assert fedstill("run", "fedavg", *short(out=tmp_path / "part")).code == 130
    answer = fedstill("report", tmp_path / "part", "--out", tmp_path / "r.html")
    assert (answer.code, "no run is finished" in answer.err) == (2, True)
    assert fedstill("report", tmp_path / "part", runs / "lkd", "--out", tmp_path / "r.html").code == 0
    found = Page((tmp_path / "r.html").read_text())
    assert f"Not finished, and left out: {tmp_path / 'part'}" in found.words
    assert found.tags.count("pre") == 1


def test_a_run_on_data_of_ones_own_has_a_page_without_its_partition(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = library.from_arrays(rng.normal(size=(90, 4)).astype("float32"), np.arange(90) % 3)
    library.run("fedavg", data=data, model="mlp", clients=3, rounds=1, engine="inline", out=tmp_path / "own")
    assert fedstill("report", tmp_path / "own", "--out", tmp_path / "r.html").code == 0
    found = Page((tmp_path / "r.html").read_text())
    assert "data of your own" in found.words


def test_a_page_must_be_html_in_a_folder_that_exists(runs: Path, tmp_path: Path) -> None:
    assert "ends in .html" in fedstill("report", runs, "--out", tmp_path / "r.pdf").err
    assert "there is no folder" in fedstill("report", runs, "--out", tmp_path / "no" / "r.html").err
