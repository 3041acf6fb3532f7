"""Where tests lie: beside what they test, apart from each other."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import fedstill

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The first names of the modules that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def test_no_test_imports_from_another() -> None:
    tests = {path.stem for path in FILES if path.parent != TESTS / "support"}
    assert {path.name: found for path in FILES if (found := imported(path) & tests)} == {}


def test_folders_mirror_the_packages() -> None:
    packages = {path.parent.name for path in Path(fedstill.__file__).parent.glob("*/__init__.py")}
    folders = {path.relative_to(TESTS).parts[0] for path in FILES if path.name.startswith("test_")}
    assert folders <= packages | {"docs", "tools"}


def test_files_have_names_of_their_own() -> None:
    """Pytest imports them by name, whatever their folder; so do the processes that tests start."""
    assert max(Counter(path.name for path in FILES).values()) == 1
