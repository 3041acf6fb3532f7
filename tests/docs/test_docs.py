"""What the documentation shows works as shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fedstill
from support.runs import SMALL, RunSmall, weights

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.S)


@pytest.fixture
def slow_teacher(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(blocks("docs/your-own-method.md", "python")[0])
    return f"{file}:SlowTeacher"


def test_the_method_of_the_page_has_fewer_than_40_lines_of_class() -> None:
    code = blocks("docs/your-own-method.md", "python")[0]
    body = code[code.index("@dataclass") :]
    assert len([line for line in body.splitlines() if line.strip()]) < 40


@pytest.mark.slow
def test_the_method_of_the_page_runs_the_same_on_both_engines(run_small: RunSmall, slow_teacher: str) -> None:
    inline = run_small(slow_teacher, gamma=0.5)
    processes = run_small(slow_teacher, gamma=0.5, engine="process", workers=2)
    assert torch.equal(weights(inline), weights(processes))
    declared = 2 * 4 * inline.summary["parameters"]
    assert inline.records[0]["bytes_down"] == 3 * declared, "two models go down to three clients"


def test_the_method_of_the_page_with_everything_off_is_fedavg(run_small: RunSmall, slow_teacher: str) -> None:
    plain = run_small("fedavg")
    off = run_small(slow_teacher, gamma=0.0, mu=0.0, step=1.0)
    torch.testing.assert_close(weights(off), weights(plain), rtol=1e-4, atol=1e-6)


def test_the_readmes_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    original = fedstill.run

    def short(*args: object, **kwargs: object) -> object:
        small = {k: v for k, v in SMALL.items() if k not in ("model", "image_size", "fraction")}
        return original(*args, **(kwargs | small))  # type: ignore[arg-type]

    monkeypatch.setattr(fedstill, "run", short, raising=False)
    examples = blocks("README.md", "python")
    assert examples
    for code in examples:
        exec(compile(code, "README.md", "exec"), {})  # noqa: S102 - the page under test


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
