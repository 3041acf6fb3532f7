"""What the pages tell people to type works: every command is known, and every block runs, or says why it does not."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

import fedstill
from fedstill.analysis import comparing
from fedstill.building.schema import Config
from fedstill.cli.main import app
from fedstill.methods import registry
from fedstill.running.api import run_config
from fedstill.studies.cells import Cell
from support.commandline import fedstill as type_in

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>\S.*?) -->\n)?```console\n(?P<text>.*?)```", re.S)
# What makes the commands short; nothing else about them is changed.
SHORT = {"epochs": 1, "fraction": 0.1, "engine": "inline", "batch_size": 64}
SETTINGS = re.compile(r"```toml\n# ([\w-]+\.toml)\b.*?\n(.*?)```", re.S)  # a file whose name the page gives
FIRST = ("index", "getting-started")  # whose Python runs too
FEWER = {"rounds": 2, "seeds": 1, "samples": 20, "points": 3}


def commands(text: str) -> list[list[str]]:
    """The words of each command of fedstill in a block."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("fedstill ")]


def blocks(page: Path) -> list[tuple[str | None, list[list[str]]]]:
    return [(found["reason"], commands(found["text"])) for found in BLOCK.finditer(page.read_text())]


def runnable(page: Path) -> list[list[str]]:
    return [words for reason, several in blocks(page) if reason is None for words in several]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_flag_and_setting_that_a_page_names_exists(page: Path) -> None:
    known = get_command(app).commands  # type: ignore[attr-defined]
    for words in (words for _, several in blocks(page) for words in several):
        assert words[0] in known, words
        command = known[words[0]]
        several = [command, *getattr(command, "commands", {}).values()]
        flags = {flag for each in several for p in each.params for flag in (*p.opts, *p.secondary_opts)}
        assert not [word for word in words if re.fullmatch(r"--[a-z-]+", word) and word not in flags], words
        assigned = {b.partition("=")[0] for a, b in itertools.pairwise(words) if a == "--set"}
        assert {name.rpartition(".")[2] for name in assigned if "model_options" not in name} <= settings(), words


@cache
def settings() -> set[str]:
    methods = [*registry.names(), *registry.modifiers()]
    return set(Config.model_fields) | {name for method in methods for name in registry.own_names(method)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name == "docs" and (runnable(page) or page.stem in FIRST)],
    ids=lambda page: page.stem,
)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparing, "run_cells", run_here)
    for name, text in SETTINGS.findall(page.read_text()):
        (tmp_path / name).write_text(text)
    for words in runnable(page):
        short = shortened(words)
        answer = type_in(*short)
        assert answer.code == 0, f"fedstill {shlex.join(short)}: {answer.err}"
    if page.stem in FIRST:
        original = fedstill.run
        monkeypatch.setattr(fedstill, "run", lambda *a, **b: original(*a, **b | SHORT | {"rounds": 1}), raising=False)
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S):
            exec(compile(code, page.name, "exec"), {})  # noqa: S102 - the page under test


def run_here(cells: Sequence[Cell], **_: object) -> None:
    """The runs of a comparison in this process, without the price of one for each."""
    for cell in cells:
        run_config(cell.config, cell.path)


def shortened(words: list[str]) -> list[str]:
    short = list(words)
    for i, word in enumerate(words[:-1]):
        if word.startswith("--") and word[2:] in FEWER:
            short[i + 1] = str(FEWER[word[2:]])
    if words[0] in ("run", "compare"):
        short += [word for key, value in SHORT.items() for word in ("--set", f"{key}={value}")]
    return short
