"""The architecture page speaks of what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import fedstill

SOURCE = Path(fedstill.__file__).parent
ROOT = SOURCE.parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()


def test_every_file_and_folder_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGE)) | set(re.findall(r"`((?:\w+/)+\w+\.py)", PAGE))
    assert len(named) > 20
    places = (SOURCE, SOURCE / "running", ROOT)  # the last row of the walk names neighbours
    assert not [name for name in named if not any((place / name).exists() for place in places)]


def test_the_drawing_has_every_package_once() -> None:
    drawing = PAGE.split("```")[1]
    drawn = [word for line in drawing.splitlines() for word in line[:50].split()]
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert sorted(drawn) == sorted(packages)


def test_the_walk_of_a_batch_names_functions_that_are_there() -> None:
    walk = PAGE.split("## The walk of a batch")[1].split("## The walk of a message")[0]
    named = {name.split(".")[-1] for name in re.findall(r"`([\w.]+)`", walk) if not name.endswith(".py")}
    defined: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
    assert named - defined == set()
