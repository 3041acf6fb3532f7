"""The table of attacks in docs/security.md is that of the tool that carries them out."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("flwr")
ROOT = Path(__file__).parents[2]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_rows_of_the_tool_and_all_of_them_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    attacks = tool("security_table").ATTACKS
    page = (ROOT / "docs/security.md").read_text()
    section = page.partition("## Attacks, and what happens")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == [attack.name for attack in attacks]
    assert {row[3] for row in rows} == {"yes"}


def test_every_lie_of_the_fault_injection_is_another_and_the_plan_is_that_of_its_seed() -> None:
    import random

    import torch

    injection = tool("fault_injection")
    answer = {"message": {"model": torch.ones(4), "c_change": torch.ones(3)}, "samples": 5, "metrics": {}}
    lies = [injection.lie(answer, round_) for round_ in range(12)]
    assert len({str(lie) for lie in lies}) == 12
    plans = [injection.plan(100, random.Random(seed)) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert len(plans[0]) == sum(injection.FAULTS.values())
