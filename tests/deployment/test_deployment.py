"""Server and sites as processes of their own, over Flower with TLS and keys, on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import fedstill
from fedstill.building.config import resolve
from support.preloaded import Process, start_python
from support.runs import SMALL

pytest.importorskip("flwr")
from fedstill.flower.keys import add, make, revoke

pytestmark = [pytest.mark.slow, pytest.mark.servers]

NAMES = ("north", "south", "west")
SETTINGS: dict[str, Any] = {k: v for k, v in SMALL.items() if k not in ("engine", "clients")}
SETTINGS |= {"model": "mlp", "model_options": {"hidden": [8]}, "participation": 1.0, "rounds": 2}
ALLOWED = ("--allow", "scaffold", "--allow", "dafkd")  # what sends more than weights
PATIENCE = 200.0  # seconds, on a machine that does other things too


@dataclass
class Trial:
    """A folder with keys, and the processes that were started in it."""

    folder: Path
    port: int
    running: list[Process] = field(default_factory=list)

    def start(self, *words: str, log: str) -> Process:
        process = start_python("-m", "fedstill", *words, cwd=self.folder, log=self.folder / log)
        self.running.append(process)
        return process

    def join(self, name: str, key: str = "", folder: str = "", *words: str) -> Process:
        place = ["--directory", folder] if folder else []
        key = key or f"keys/sites/{name}"
        return self.start(
            "join", f"127.0.0.1:{self.port}", "--key", key, "--ca", "keys/ca.pem", *place, *ALLOWED, *words,
            log=f"{name}.log",
        )  # fmt: skip

    def serve(self, out: str, method: str, *words: str, **settings: Any) -> Process:
        (self.folder / f"{out}.toml").write_text(toml(SETTINGS | settings | {"method": method}))
        return self.start(
            "serve", f"{out}.toml", "--keys", "keys", "--port", str(self.port), "--out", out, *words, log=f"{out}.log"
        )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def ends_well(self, process: Process, name: str) -> None:
        assert process.wait(PATIENCE) == 0, self.log(name)

    def stop(self) -> None:
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def toml(settings: dict[str, Any]) -> str:
    return resolve(settings | {"clients": len(NAMES)}).toml()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    found = Trial(tmp_path_factory.mktemp("trial"), free_port())
    try:
        words = [word for name in NAMES for word in ("--site", name)]
        assert found.start("keys", "keys", *words, "--host", "127.0.0.1", log="keys.log").wait(PATIENCE) == 0
        for name in NAMES:
            found.join(name)
        yield found
    finally:
        found.stop()


def alone(path: Path, method: str, **settings: Any) -> Any:
    return fedstill.run(method, **SETTINGS | settings | {"clients": 3}, engine="inline", out=path)


def records(path: Path) -> list[dict[str, Any]]:
    lines = (path / "metrics.jsonl").read_text().splitlines() if (path / "metrics.jsonl").exists() else []
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("method", "settings"),
    [("fedkf", {"width": 8, "z_dim": 8}), ("dafkd", {"adv_rounds": 1, "batches": 1})],
)
def test_three_sites_come_to_the_bits_of_a_run_on_one_machine(
    trial: Trial, method: str, settings: dict[str, Any]
) -> None:
    out = f"run-{method}"
    trial.ends_well(trial.serve(out, method, **settings), out)
    alone(trial.folder / f"alone-{method}", method, **settings)
    ours, theirs = (trial.folder / name / "model.safetensors" for name in (out, f"alone-{method}"))
    assert ours.read_bytes() == theirs.read_bytes()
    numbers = ("accuracy", "amp", "fm", "wlp", "train_loss", "bytes_up")
    there, here = records(trial.folder / out), records(trial.folder / f"alone-{method}")
    assert [[r[n] for n in numbers] for r in there] == [[r[n] for n in numbers] for r in here]


def test_three_sites_with_different_networks_come_to_the_bits_of_a_run_on_one_machine(trial: Trial) -> None:
    group: list[dict[str, Any]] = [
        {"name": "small", "model": "mlp", "model_options": {"hidden": [8]}, "clients": ["south"]},
        {"name": "large", "model": "mlp", "model_options": {"hidden": [12]}},
    ]
    settings = {"across": True, "rounds": 3}
    trial.ends_well(trial.serve("run-groups", "fedgkd", group=group, **settings), "run-groups")
    group[0]["clients"] = [1]
    alone(trial.folder / "alone-groups", "fedgkd", group=group, **settings)
    for name in ("model.safetensors", "model-large.safetensors"):
        ours, theirs = (trial.folder / place / name for place in ("run-groups", "alone-groups"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_sites_get_the_final_model_and_one_that_came_for_a_single_run_ends(tmp_path: Path) -> None:
    trial = Trial(tmp_path, free_port())
    try:
        words = [word for name in NAMES for word in ("--site", name)]
        assert trial.start("keys", "keys", *words, "--host", "127.0.0.1", log="keys.log").wait(PATIENCE) == 0
        sites = [trial.join(name, "", "", "--once") for name in NAMES]
        trial.ends_well(trial.serve("run", "fedavg"), "run")
        assert [site.wait(PATIENCE) for site in sites] == [0, 0, 0]
    finally:
        trial.stop()
    alone(trial.folder / "alone", "fedavg")
    assert (tmp_path / "run/model.safetensors").read_bytes() == (tmp_path / "alone/model.safetensors").read_bytes()
    for name in NAMES:
        assert "finished: the model is in" in trial.log(name)
        assert f"{name} has the final model" in (trial.folder / "run/log.txt").read_text()
        ours, theirs = (load_file(trial.folder / f / "model.safetensors") for f in (f"site-{name}", "run"))
        assert all(torch.equal(ours[part], theirs[part]) for part in theirs)


def test_a_killed_server_and_a_killed_site_go_on_where_they_were(trial: Trial) -> None:
    server = trial.serve("killed", "scaffold", rounds=5)
    until(lambda: len(records(trial.folder / "killed")) >= 1)
    server.kill()
    server.wait()
    north = trial.running[1]
    north.kill()
    north.wait()
    trial.running[1] = trial.join("north")
    trial.ends_well(trial.serve("killed", "scaffold", rounds=5), "killed")
    alone(trial.folder / "alone-scaffold", "scaffold", rounds=5)
    assert [r["round"] for r in records(trial.folder / "killed")] == [1, 2, 3, 4, 5]
    assert [r["dropped"] for r in records(trial.folder / "killed")] == [0] * 5
    ours, theirs = (trial.folder / name / "model.safetensors" for name in ("killed", "alone-scaffold"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_site_that_dies_and_a_stranger_hold_up_nobody(trial: Trial) -> None:
    """The round goes on without the dead one, and a key that the server does not know is refused."""
    make(trial.folder / "other", ["stranger"], ["127.0.0.1"])
    server = trial.serve("faults", "fedavg", "--timeout", "4", rounds=300, eval_every=0)
    until(lambda: len(records(trial.folder / "faults")) >= 1)
    stranger, west = trial.join("stranger", key="other/sites/stranger"), trial.running[3]
    west.kill()
    west.wait()
    until(lambda: "does not know the key" in " ".join(trial.log("stranger").split()))
    assert stranger.poll() is None, "and it tries again later"
    add(trial.folder / "keys", "stranger", trial.folder / "other/sites/stranger.pub")
    until(lambda: "connected to" in " ".join(trial.log("stranger").split()))
    revoke(trial.folder / "keys", "stranger")
    until(lambda: any(r["dropped"] for r in records(trial.folder / "faults")[:-1]))
    assert server.poll() is None, "and the others go on"
    os.killpg(server.pid, signal.SIGTERM)
    assert server.wait(PATIENCE) == 143
    stranger.terminate()
    assert stranger.wait(PATIENCE) == 0
    found = records(trial.folder / "faults")
    assert found[0]["dropped"] == 0
    assert {r["clients"] - r["dropped"] for r in found} >= {2, 3}
    assert "client west dropped" in (trial.folder / "faults/log.txt").read_text()
    trial.running[3] = trial.join("west")


def children(process: Process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def alive(process: psutil.Process) -> bool:
    """Not even a zombie: this run adopts what a killed server leaves behind."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_ended_leaves_no_process_and_on_sigterm_no_file(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out = f"ended-{number}"
    server = trial.serve(out, "fedavg", rounds=300, eval_every=0)
    until(lambda: len(records(trial.folder / out)) >= 1)
    started = children(server)
    assert started
    assert list(tmp_path.glob("fedstill-*"))
    server.send_signal(number)
    code = server.wait(PATIENCE)
    until(lambda: not any(map(alive, started)))
    if number == signal.SIGTERM:
        assert code == 143
        assert "continue with: the same command" in trial.log(out)
        assert not list(tmp_path.glob("fedstill-*"))


def test_a_site_revoked_and_one_added_while_the_server_runs_and_after_it_was_started_again(trial: Trial) -> None:
    """The run goes on without the one whose key was revoked; with a new key it is let in again."""
    out, folder = trial.folder / "revoked", trial.folder / "keys"
    server = trial.serve("revoked", "fedavg", "--timeout", "20", rounds=300, eval_every=0)
    until(lambda: any(r["clients"] == 3 for r in records(out)))
    revoke(folder, "west")
    add(folder, "east")
    until(lambda: "does not know the key" in " ".join(trial.log("west").split()))
    until(lambda: records(out)[-1]["clients"] == 2)
    server.terminate()
    assert server.wait(PATIENCE) == 143
    west = trial.running[3]
    west.terminate()
    assert west.wait(PATIENCE) == 0
    done = len(records(out))
    server = trial.serve("revoked", "fedavg", "--timeout", "20", rounds=300, eval_every=0)
    until(lambda: len(records(out)) > done)
    assert records(out)[-1]["clients"] == 2
    assert "east is new" in (out / "log.txt").read_text()
    assert "west belongs to this run, and its key was revoked" in (out / "log.txt").read_text()
    add(folder, "west")
    revoke(folder, "east")
    trial.running[3] = trial.join("west")
    until(lambda: records(out)[-1]["clients"] == 3)
    server.terminate()
    assert server.wait(PATIENCE) == 143


def test_regions_come_to_the_bits_of_one_machine_also_when_one_is_killed(trial: Trial) -> None:
    """The three sites are one region; a fourth is another."""
    settings = {**SETTINGS, "clients": 4, "rounds": 4, "rounds_per_episode": 2, "pool": 0.2, "method": "scaffold+f2l"}
    settings["region"] = [{"name": "east", "clients": [0, 1, 3]}, {"name": "far", "clients": [2]}]
    (trial.folder / "regions.toml").write_text(resolve(settings).toml())
    make(trial.folder / "world", ["east", "far"], ["127.0.0.1"])
    make(trial.folder / "far", ["solo"], ["127.0.0.1"])
    top, far = free_port(), free_port()

    def region(name: str, keys: str, port: int) -> Process:
        return trial.start(
            "region", f"127.0.0.1:{top}", "--key", f"world/sites/{name}", "--ca", "world/ca.pem", "--keys", keys,
            "--port", str(port), log=f"region-{name}.log",
        )  # fmt: skip

    server = trial.start(
        "serve", "regions.toml", "--regional", "--keys", "world", "--port", str(top), "--out", "regions",
        log="regions.log",
    )  # fmt: skip
    east, _ = region("east", "keys", trial.port), region("far", "far", far)
    trial.start("join", f"127.0.0.1:{far}", "--key", "far/sites/solo", "--ca", "far/ca.pem", *ALLOWED, log="solo.log")

    def rounds_of_east() -> int:
        return max((len(records(path)) for path in (trial.folder / "region-east/runs").glob("*")), default=0)

    until(lambda: rounds_of_east() >= 3)
    os.killpg(east.pid, signal.SIGKILL)  # in its second episode
    east.wait()
    region("east", "keys", trial.port)
    trial.ends_well(server, "regions")
    fedstill.run(**settings, engine="inline", out=trial.folder / "alone-regions")
    ours, theirs = (trial.folder / name / "model.safetensors" for name in ("regions", "alone-regions"))
    assert [r["round"] for r in records(trial.folder / "regions")] == [2, 4]
    assert ours.read_bytes() == theirs.read_bytes()


def test_what_a_site_says_at_home_is_not_heard_at_the_server(tmp_path: Path) -> None:
    """A site with unreadable data, one whose owner did not agree, and one that takes part."""
    marker = "zqxmarker"
    trial = Trial(tmp_path, free_port())
    make(tmp_path / "keys", list(NAMES), ["127.0.0.1"])
    (tmp_path / f"{marker}.csv").write_text(f"{marker}, 1961-04-02, positive, 1\n{marker}\x1b[2J,a,b,c\n")
    settings = {"data": "glosses-mini", "model": "bag", "model_options": {}, "image_size": 0, "rounds": 1}
    place = ("--ca", "keys/ca.pem", "--key")
    try:
        server = trial.serve("run", "qffl", "--needed", "1", "--wait", "20", **settings)
        where = f"127.0.0.1:{trial.port}"
        trial.start("join", where, *place, "keys/sites/north", "--data", f"{marker}.csv", log="north.log")
        trial.start("join", where, *place, "keys/sites/south", log="south.log")
        trial.start("join", where, *place, "keys/sites/west", "--allow", "qffl", log="west.log")
        trial.ends_well(server, "run")
    finally:
        trial.stop()
    everything = [path for path in (tmp_path / "run").rglob("*") if path.is_file()] + [tmp_path / "run.log"]
    assert not any(marker.encode() in path.read_bytes() for path in everything)
    said = " ".join((tmp_path / "run/log.txt").read_text().split())
    assert "north cannot take part: its data could not be read (code data-unreadable, step load, number " in said
    assert "south cannot take part: its policy does not allow this method" in said
    assert marker in trial.log("north")
    assert "--allow qffl" in trial.log("south")
    sent = [json.loads(line) for line in (tmp_path / "site-west/audit.jsonl").read_text().splitlines()]
    received = [json.loads(line) for line in (tmp_path / "run/received.jsonl").read_text().splitlines()]
    assert {line["sha256"] for line in sent} == {line["sha256"] for line in received if line["site"] == "west"}
    kept = [tmp_path / "site-west", *(tmp_path / "site-west").rglob("*")]
    assert {"answer.safetensors", "audit.jsonl"} <= {path.name for path in kept}
    assert not any(path.stat().st_mode & 0o077 for path in kept), "and what it keeps is its owner's alone"
