"""The command line in this process, and short runs for it: what the tests of the command line share."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from fedstill.cli import commands
from fedstill.cli.main import main
from fedstill.running.callbacks import RunView
from fedstill.running.progress import Progress
from support.runs import SMALL

SHORT: dict[str, Any] = SMALL | {"clients": 4, "fraction": 0.05}
TIMED = ("seconds", "eval_seconds", "client_seconds", "server_seconds")


@dataclass(frozen=True)
class Answer:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


def fedstill(*words: object, columns: int = 200) -> Answer:
    """`fedstill WORDS`, without the price of a new process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["fedstill", *map(str, words)])
        patch.setattr(commands, "console", Console(width=columns))
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    return Answer(code, out.getvalue(), err.getvalue())


def short(**settings: Any) -> list[str]:
    """Words for a run of a fraction of a second; `out`, `force` and the like are flags, settings go by --set."""
    words = []
    for key, value in (SHORT | settings).items():
        if value is True:
            words.append(f"--{key}")
        else:
            words += [f"--{key}", str(value)] if key in ("out", "data") else ["--set", f"{key}={value}"]
    return words


def run(method: object, out: Path, **settings: Any) -> Path:
    """A short run that must succeed; the path of its directory."""
    answer = fedstill("run", method, *short(out=out, **settings))
    assert answer.code == 0, answer.err
    return out


def metrics(path: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMED} for row in rows]


def model(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


def assert_same_run(path: Path, other: Path) -> None:
    """Weights and metrics are the same, bit for bit."""
    ours, theirs = model(path), model(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert metrics(path) == metrics(other)


def change_settings(path: Path, before: str, after: str) -> None:
    """Change a run's config.toml, and say there that this is meant."""
    config = path / "config.toml"
    *lines, seal = config.read_text().splitlines(keepends=True)
    text = "".join(lines)
    assert before in text
    config.write_text(text.replace(before, after) + seal.partition(":")[0] + ": unchecked\n")


@contextmanager
def interrupted_after(round_: int) -> Iterator[None]:
    """Stop what runs here after this round, as Ctrl-C would."""

    def stop(self: Progress, run: RunView, starting: int, clients: int) -> None:
        if starting == round_ + 1:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "on_round_start", stop)
        yield
