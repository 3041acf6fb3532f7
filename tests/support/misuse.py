"""What tests of misuse share: the one line that the user reads."""

from __future__ import annotations

from pathlib import Path

from support.commandline import (
    Answer,
)

HINT = "what is done is kept; continue with: fedstill resume"


def message(answer: Answer, *, hint: bool = False) -> str:
    """The one line that tells what is wrong, after checking that there is nothing else to read."""
    assert answer.code == 2, answer
    assert "Traceback" not in answer.out + answer.err
    lines = answer.err.splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) == 1 + hint, answer.err
    if hint:
        assert lines[1].startswith(HINT)
    return lines[0].removeprefix("error: ")


def contents(path: Path) -> dict[Path, bytes]:
    """Every file in a folder."""
    return {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
