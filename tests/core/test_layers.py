"""Imports go only downwards."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedstill

LAYERS = (  # from top to bottom; packages of one layer do not import each other
    {"cli"},
    {"board"},
    {"analysis", "deployment"},
    {"studies"},
    {"running"},
    {"inference"},
    {"report", "building"},
    {"flower", "presets"},
    {"engine"},
    {"methods"},
    {"distill", "aggregate"},
    {"train"},
    {"models", "attacks"},
    {"data", "metrics", "privacy"},
    {"core"},
)


SOURCE = Path(fedstill.__file__).parent

MODULES = sorted(p for p in SOURCE.rglob("*.py") if p.parent != SOURCE)


def allowed(layer: str) -> set[str]:
    """The packages a layer may import from: its own and those below, not those beside it."""
    level = next(i for i, names in enumerate(LAYERS) if layer in names)
    return {layer}.union(*LAYERS[level + 1 :])


def imported(path: Path) -> set[str]:
    """The packages of fedstill that a file imports from, wherever in it; `.` for the root."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] if "." in name else "." for name in names if name.split(".")[0] == "fedstill"}
    return found


def test_every_package_has_its_place_in_the_layers() -> None:
    packages = {p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists()}
    assert packages == set().union(*LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_only_downwards(path: Path) -> None:
    layer = path.relative_to(SOURCE).parts[0]
    assert imported(path) <= allowed(layer)


def test_the_check_of_the_layers_sees_an_import_that_goes_upwards(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "def f():\n    from fedstill.cli import main\n    import fedstill.engine.base\n    import fedstill\n"
    )
    assert imported(file) == {"cli", "engine", "."}
    assert not imported(file) & allowed("core")


@pytest.mark.slow
def test_the_superlinks_process_does_not_wait_for_pytorch() -> None:
    code = "import sys, fedstill.flower.superlink.__main__; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
