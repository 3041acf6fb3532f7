"""The documentation site says of every method what the program, the results and the measurements say."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedstill.methods import registry

ROOT = Path(__file__).parents[2]
ABOUT: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "docs/methods.toml").read_text())


def test_every_method_and_modifier_has_a_reference_and_equations() -> None:
    assert set(ABOUT) == {*registry._METHODS, *registry._MODIFIERS}
    assert [name for name, about in ABOUT.items() if not (about["name"] and about["reference"])] == []
    assert [
        name for name, about in ABOUT.items() if not all(map(all, about["equations"])) or not about["equations"]
    ] == []


def test_costs_are_those_of_the_page_of_measurements() -> None:
    page = (ROOT / "docs/performance.md").read_text()
    assert [name for name, about in ABOUT.items() if about.get("cost", "1") not in page] == []


def test_rows_of_results_exist() -> None:
    claims = json.loads((ROOT / "docs/results.json").read_text())["claims"]
    known = {side["row"] for claim in claims for check in claim["checks"] for side in check["check"]["of"]}
    known |= {side["row"] for claim in claims for check in claim["checks"] for side in check["check"]["than"]}
    assert {row for about in ABOUT.values() for row in about.get("rows", ())} <= known


def test_figures_of_the_docs_stay_small() -> None:
    assert sum(path.stat().st_size for path in (ROOT / "docs/images").rglob("*.*")) < 1_000_000


def test_the_page_of_a_method_has_its_settings_wire_and_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("latex2mathml", reason="comes with `make docs`")
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    pages = importlib.import_module("site_pages")
    drawn = [pages.math(latex).partition(">")[2] for about in ABOUT.values() for _, latex in about["equations"]]
    assert [each for each in drawn if "\\" in each] == [], "a command of LaTeX that is not understood"
    page = pages.method_page("fedgkd")
    assert "| `buffer` | `5` | at least 1 | M: how many past global models are averaged |" in page
    assert "| down | `teacher` | weights | weights | 247 kB |" in page  # 61,706 weights of 4 bytes
    assert "this is 2 times as much down and 1 up" in page
    assert page.count("<math ") == len(ABOUT["fedgkd"]["equations"])
    assert "final accuracy above FedAvg's, alpha 0.1" in page
