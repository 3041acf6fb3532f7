"""Damage, full disks, two processes at once and Ctrl-C: one clear line, and nothing is lost."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedstill.building.config import resolve
from fedstill.cli.failure import Halted
from fedstill.core.files import naming
from fedstill.running.directory import RunDirectory
from support.commandline import (
    assert_same_run,
    fedstill,
    interrupted_after,
    metrics,
    run,
    short,
)
from support.guards import start
from support.misuse import HINT, contents, message

REMEMBERING = """
from dataclasses import dataclass
import torch
import fedstill

@dataclass(frozen=True)
class Remembering(fedstill.FedAvg):
    "State on both sides, so that a wrong step back shows."

    def uplink(self, client):
        client.state["seen"] = client.state.get("seen", 0) + 1
        message = super().uplink(client)
        return {"model": message["model"] * (1 + 0.01 * client.state["seen"])}

    def aggregate(self, server, uplinks):
        super().aggregate(server, uplinks)
        server.state["rounds"] = server.state.get("rounds", 0) + 1
        server.model = server.model * (1 - 0.001 * server.state["rounds"])
"""


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_after_a_truncated_checkpoint_the_older_one_reaches_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REMEMBERING)
    whole = run(f"{tmp_path}/mine.py:Remembering", tmp_path / "whole", participation=1.0)
    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    truncate(broken / "checkpoints" / "round-000003.safetensors")
    answer = fedstill("resume", broken)
    assert answer.code == 0, answer.err
    assert_same_run(broken, whole)
    log = (broken / "log.txt").read_text()
    assert "round-000003.safetensors is damaged" in log
    assert "rounds 3 to 3" in log


def test_if_every_checkpoint_is_truncated_the_results_are_left_alone(undisturbed: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(undisturbed, broken)
    for file in (broken / "checkpoints").glob("round-*"):
        truncate(file)
    assert message(fedstill("resume", broken, "--rounds", 5)).startswith("no checkpoint can be read: ")
    assert_same_run(broken, undisturbed)


def test_a_run_whose_checkpoints_were_deleted_keeps_its_results(undisturbed: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(undisturbed, path, ignore=shutil.ignore_patterns("checkpoints"))
    assert "holds no checkpoint of the 3 rounds done" in message(fedstill("resume", path))
    assert_same_run(path, undisturbed)


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond this, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_when_a_checkpoint_does_not_fit_the_earlier_one_is_kept(undisturbed: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with interrupted_after(1):
        fedstill("run", "fedavg", *short(out=path))
    first = path / "checkpoints" / "round-000001.safetensors"
    before = first.read_bytes()
    with files_at_most(len(before) // 2):
        line = message(fedstill("resume", path), hint=True)
    assert line == f"{first.with_name('round-000002.safetensors')}: File too large"
    assert first.read_bytes() == before
    assert [p.name for p in (path / "checkpoints").glob("*round*")] == [first.name], "nothing half written is left"
    assert fedstill("resume", path).code == 0
    assert_same_run(path, undisturbed)


FULL_AT = [  # the file, how many times it was written before, whether rounds had begun
    ("config.toml", 0, False),
    ("metrics.jsonl", 0, False),
    ("metrics.jsonl", 1, True),
    ("metrics.jsonl", 3, True),
    ("round-000001", 0, True),
    ("round-000003", 0, True),
    ("clients.csv", 0, True),
    ("model.safetensors", 0, True),
    ("summary.json", 0, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "times", "began"), FULL_AT)
def test_a_disk_that_is_full_at_any_write_costs_nothing(
    name: str, times: int, began: bool, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written, sync = tmp_path / "run", 0, os.fsync

    def full(descriptor: int) -> None:
        nonlocal written
        if name in Path(os.readlink(f"/proc/self/fd/{descriptor}")).name:
            written += 1
            if written > times:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        answer = fedstill("run", "fedavg", *short(out=path))
    line = message(answer, hint=began)
    assert line.endswith(": No space left on device")
    assert line.startswith(f"{path}/")
    assert name in Path(line.split(": ")[0]).name, "it names the file, and not the temporary one"
    assert not Path(line.split(": ")[0]).name.startswith(".")
    there = (path / "config.toml").exists()
    assert there == (name != "config.toml")
    answer = fedstill("resume", path) if there else fedstill("run", "fedavg", *short(out=path))
    assert answer.code == 0, answer.err
    assert_same_run(path, undisturbed)
    assert not list(path.rglob("*.tmp"))


@pytest.mark.parametrize("engine", ["inline", "process"])
def test_a_full_disk_is_named_wherever_it_is_written(engine: str, tmp_path: Path) -> None:
    """A client's state, by the process that trains it; a line of metrics.jsonl; a picture."""
    path = tmp_path / "run"
    with files_at_most(20_000):
        line = message(fedstill("run", "scaffold", *short(out=path, engine=engine, workers=1)), hint=True)
    assert re.fullmatch(rf"{re.escape(str(path))}/checkpoints/clients/0/\d\.1\.safetensors: File too large", line)

    directory = RunDirectory.create(tmp_path / "other", resolve({}))
    with files_at_most(10), pytest.raises(OSError, match=r"File too large: '.*/other/metrics\.jsonl'"):
        directory.append({"round": 1, "accuracy": 0.5})
    directory.release()
    with files_at_most(1000):
        line = message(fedstill("partition", *short(data="fashion-mini")[:2], "--out", tmp_path / "who.png"))
    assert line == f"{tmp_path / 'who.png'}: File too large"
    assert not (tmp_path / "who.png").exists()


def test_an_error_of_the_system_that_names_nothing_gets_a_name(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left on device: 'here'"), naming("here"):
        raise full
    with pytest.raises(FileNotFoundError, match="'there'"), naming("here"):
        open("there")  # noqa: SIM115 - it fails
    with pytest.raises(OSError, match="5 requested and 3 written: 'here'"), naming("here"):
        raise OSError("5 requested and 3 written")
    assert str(Halted(OSError(errno.ENOSPC, "No space left on device"), tmp_path)) == (
        f"{tmp_path}: No space left on device"
    )


def test_a_second_process_is_turned_away_and_nothing_happens(undisturbed: Path) -> None:
    held = RunDirectory.open(undisturbed)
    before = contents(undisturbed)
    for words in (("resume", undisturbed), ("run", "fedavg", *short(out=undisturbed, force=True))):
        assert message(fedstill(*words)) == f"{undisturbed} is in use by another process"
    assert fedstill("show", undisturbed).code == 0, "looking is always allowed"
    held.release()
    assert contents(undisturbed) == before


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    words = short(out=path, rounds=500, engine="process", workers=2)
    command = [sys.executable, "-m", "fedstill", "run", "fedavg", *words]
    process = start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (path / "metrics.jsonl").exists() or not metrics(path):
        assert process.poll() is None
        time.sleep(0.05)
    second = fedstill("resume", path)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, err = process.communicate()
    assert message(second) == f"{path} is in use by another process"
    assert process.returncode == 130
    assert err.splitlines() == ["error: stopped", f"{HINT} {path}"]

    done = len(metrics(path))
    assert 0 < done < 500
    assert fedstill("resume", path, "--rounds", done + 1).code == 0
    assert_same_run(path, run("fedavg", tmp_path / "whole", rounds=done + 1))


def test_a_comparison_that_is_interrupted_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedstill.analysis.comparing.run_cells", interrupt)
    answer = fedstill("compare", "fedavg", *short(out=tmp_path / "c"))
    assert answer.code == 130
    assert answer.err.splitlines() == ["error: stopped", "what is done is kept; continue with: the same command"]
