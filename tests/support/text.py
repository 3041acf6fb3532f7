"""What tests of text share: few tokens, a tiny network, tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedstill.data import TextSettings

LENGTH, VOCABULARY = 32, 400

SETTINGS = TextSettings(vocabulary=VOCABULARY, max_length=LENGTH)


TINY: dict[str, Any] = {
    "model": "transformer",
    "model_options": {"dim": 8, "layers": 1, "heads": 2},
    "clients": 4,
    "participation": 0.5,
    "partition": "iid",
    "rounds": 2,
    "rounds_per_episode": 1,
    "epochs": 1,
    "fraction": 0.25,
    "engine": "inline",
}


def table(path: Path, rows: str) -> Path:
    path.write_text(rows, encoding="utf-8")
    return path
