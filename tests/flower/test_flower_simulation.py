"""Runs in Flower's simulation engine: the same bits as in ours, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedstill
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.tree import Message
from fedstill.flower import simulation
from support.engines import Remembering, Suicidal, all_client_states, command, environment, lines, rounds_written
from support.guards import start
from support.quick import QUICK
from support.runs import RunSmall, numbers, weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fleet() -> Iterator[None]:
    """All runs of this process on one fleet of two workers: starting one takes seconds."""
    fleet = simulation.Fleet(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "Fleet", lambda workers: fleet)
        patch.setattr(fleet, "close", lambda: None)
        yield
    fleet.close()


KINDS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {},  # clients with state
    "fedkf": QUICK["fedkf"],  # a generator at every client
    "feddf": {"pool": 60, "proxy": "pool"},  # a server that distils
    "dafkd": QUICK["dafkd"],  # three kinds of networks, sent both ways
    "fedavg+ccvr": {},  # a last exchange
    "fedavg+f2l": {"regions": 2, "participation": 1.0, "pool": 60},
}


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize("method", KINDS)
def test_same_bits_as_in_one_process(run_small: RunSmall, method: str) -> None:
    settings = {"rounds": 2} | KINDS[method]
    ours, flowers = run_small(method, **settings), run_small(method, **settings, engine="flower")
    assert torch.equal(weights(ours), weights(flowers))
    for row in (*ours.records, *flowers.records):
        row.get("episode", {}).pop("server_seconds", None)
    assert numbers(ours) == numbers(flowers)


@pytest.mark.usefixtures("fleet")
def test_resumed_in_flower_after_every_round_gives_the_same_bits(run_small: RunSmall, tmp_path: Path) -> None:
    whole = run_small(Remembering(), rounds=3, out=tmp_path / "whole")
    run_small(Remembering(), rounds=1, out=tmp_path / "parts", engine="flower")
    for rounds in (2, 3):
        last = fedstill.resume(tmp_path / "parts", method=Remembering(), rounds=rounds)
    assert torch.equal(weights(last), weights(whole))
    assert numbers(last) == numbers(whole)
    states, expected = all_client_states(tmp_path / "parts"), all_client_states(tmp_path / "whole")
    assert states.keys() == expected.keys()
    assert all(torch.equal(states[k]["past"], expected[k]["past"]) for k in expected)


@pytest.mark.usefixtures("fleet")
def test_more_clients_than_may_be_under_way_answer_in_their_order(run_small: RunSmall) -> None:
    settings = {"clients": 40, "participation": 1.0, "rounds": 1, "fraction": 0.2}
    assert torch.equal(weights(run_small(**settings)), weights(run_small(**settings, engine="flower")))


@pytest.mark.usefixtures("fleet")
def test_what_cannot_be_imported_works(run_small: RunSmall, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Typed(fedstill.FedAvg):
        """As typed into a notebook; it reads a file by a relative path."""

        def uplink(self, client: fedstill.Client) -> Message:
            return {"model": client.weights * float(Path("factor.txt").read_text())}

    monkeypatch.chdir(tmp_path)
    Path("factor.txt").write_text("0.5")
    settings = {"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 10)), "out": Path("relative")}
    ours = run_small(Typed(), **settings)
    flowers = run_small(Typed(), **settings, force=True, engine="flower")
    assert torch.equal(weights(ours), weights(flowers))


@dataclass(frozen=True)
class Failing(fedstill.FedAvg):
    """Client work that fails in the second round."""

    told: bool = False

    def uplink(self, client: fedstill.Client) -> Message:
        if client.round == 2:
            raise FedstillError("the scanner is switched off") if self.told else ValueError("boom")
        return super().uplink(client)


@pytest.mark.usefixtures("fleet")
def test_errors_of_client_work_arrive(run_small: RunSmall) -> None:
    with pytest.raises(FedstillError, match=r"(?s)client work failed:\nTraceback.*in uplink.*ValueError: boom"):
        run_small(Failing(), engine="flower")
    with pytest.raises(FedstillError, match=r"^the scanner is switched off$"):
        run_small(Failing(told=True), engine="flower")


@pytest.mark.usefixtures("fleet")
def test_a_run_that_cannot_be_pickled_says_so(run_small: RunSmall) -> None:
    lock = threading.Lock()

    def make() -> nn.Module:
        with lock:
            return nn.Sequential(nn.Flatten(), nn.Linear(256, 10))

    with pytest.raises(FedstillError, match="engine = 'flower' cannot give this run to its workers"):
        run_small(model=make, engine="flower")


@pytest.mark.usefixtures("fleet")
def test_a_killed_worker_is_replaced_and_the_bits_stay_the_same(run_small: RunSmall, tmp_path: Path) -> None:
    flag = tmp_path / "died"
    survived = run_small(Suicidal(flag=str(flag)), participation=1.0, engine="flower")
    assert flag.exists()
    assert torch.equal(weights(survived), weights(run_small(participation=1.0)))


def test_without_flower_the_engine_is_refused(run_small: RunSmall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.delitem(sys.modules, "flwr.app", raising=False)
    monkeypatch.delitem(sys.modules, "fedstill.flower.simulation")
    with pytest.raises(SettingError, match=r"^engine = 'flower' needs: pip install 'fedstill\[flower\]'$"):
        run_small(engine="flower")


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for temporary files, of a short name: Ray has sockets in it."""
    with tempfile.TemporaryDirectory(prefix="fs-") as folder:
        yield Path(folder)


def started_with(scratch: Path) -> list[str]:
    """What still runs of all that was started with this folder for temporary files."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={scratch}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:  # it has ended
            continue
    return found


@pytest.fixture(scope="module")
def in_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ours, in worker processes."""
    folder = tmp_path_factory.mktemp("ours")
    words = command(folder, folder / "run", rounds=3)
    subprocess.run(words, env=environment(), capture_output=True, check=True)
    return folder / "run"


def same_run(one: Path, other: Path) -> bool:
    ours, theirs = (load_file(path / "model.safetensors") for path in (one, other))
    return lines(one) == lines(other) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.usefixtures("fleet")
def test_the_command_line_gives_the_same_bits_also_after_ctrl_c_and_leaves_nothing(
    in_processes: Path, tmp_path: Path, scratch: Path
) -> None:
    words = command(tmp_path, tmp_path / "run", engine="flower", workers=1, rounds=3)
    variables = environment() | {"TMPDIR": str(scratch)}
    process = start(*words, env=variables, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and rounds_written(tmp_path / "run") < 1:
        time.sleep(0.01)
    assert started_with(scratch)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, told = process.communicate()
    assert process.returncode == 130, told
    assert "ray" not in told
    assert not started_with(scratch)
    assert not list(scratch.glob("fedstill-*"))
    words = [sys.executable, "-m", "fedstill", "resume", str(tmp_path / "run")]
    ended = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    assert not any(word in ended.stdout + ended.stderr for word in ("ray", "Ray", "flwr", "WARNING", "Error"))
    assert same_run(tmp_path / "run", in_processes)
    assert not started_with(scratch)
    assert not list(scratch.glob("fedstill-*"))
