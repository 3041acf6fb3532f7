"""The report: one page, whole in itself, with the numbers of its runs."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import fedstill as library
from fedstill.metrics.statistics import spread
from fedstill.report.page import Picture, page
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

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag]
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data

    def row(self, name: str) -> list[str]:
        """The first row of any table whose first cell is this, or begins with it and a comma."""
        return next(row for table in self.tables for row in table if row[0] == name or row[0].startswith(f"{name},"))

    def pictures(self) -> list[str]:
        found = []
        for _, name, value in self.attributes:
            if name == "src":
                head, _, data = value.partition(",")
                assert head == "data:image/svg+xml;base64"
                found.append(base64.b64decode(data).decode())
                ElementTree.fromstring(found[-1])
        return found


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
    assert all(value for tag, name, value in found.attributes if (tag, name) == ("img", "alt"))
    assert text.count("<img") == sum(1 for tag, name, _ in found.attributes if (tag, name) == ("img", "alt"))


def test_the_page_needs_nothing_from_elsewhere(text: str) -> None:
    found = Page(text)
    assert not {"script", "link", "iframe", "object", "base", "a"} & set(found.tags)
    assert all(value.startswith("data:") for _, name, value in found.attributes if name in ("src", "href", "srcset"))
    assert not re.search(r"url\(|@import|https?://", re.sub(r"base64,[^\"]*", "", text))


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
    differ = next(table for table in found.tables if "mu" in table[0])
    by_name = {row[0].partition(",")[0]: dict(zip(differ[0], row, strict=True)) for row in differ[1:]}
    assert by_name["fedprox"]["mu"] == "0.3"
    assert by_name["fedavg"]["mu"] == "–"
    assert by_name["fedavg"]["workers"] == "0, 1"
    versions = summary(runs / "lkd")["versions"]
    assert found.row("torch")[1] == versions["torch"]


def test_every_run_has_its_whole_config(text: str, runs: Path) -> None:
    found = Page(text)
    assert found.tags.count("pre") == 5
    for config in runs.glob("*/config.toml"):
        assert config.read_text() in found.words


def test_the_figures_are_curves_fairness_confusion_and_partition(text: str) -> None:
    drawn = Page(text).pictures()
    for sign in ("global test accuracy", "from the worst served to the best", "region 1", "samples"):
        assert any(sign in svg for svg in drawn), sign
    assert sum("predicted class" in svg for svg in drawn) == 1, "of the run with regions"


def test_names_of_the_users_own_are_escaped() -> None:
    settings = {"method": HOSTILE, "seed": 0, "data": HOSTILE, "model": HOSTILE, "rounds": 1, HOSTILE: HOSTILE}
    numbers: Any = {"final_accuracy": 0.5, "versions": {HOSTILE: HOSTILE}, "also": {HOSTILE: {"final_accuracy": 0.25}}}
    one = RunData(Path(f"/{HOSTILE}"), settings, [], numbers, config=HOSTILE)
    two = RunData(Path("/b"), settings | {HOSTILE: 2}, [], numbers, config=HOSTILE)
    made = page(
        [Group(HOSTILE, (one,)), Group("b", (two,))],
        [Picture(f'{HOSTILE}" onload="x', b"<svg/>")],
        title=HOSTILE,
        notes=[HOSTILE],
    )
    found = Page(made)
    assert "script" not in found.tags
    assert not [name for _, name, _ in found.attributes if name.startswith("on")]
    assert found.words.count(HOSTILE) > 10


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
        assert f"{100 * numbers['final_accuracy']:.2f} %" in found.row(name)


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
