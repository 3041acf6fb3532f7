"""A served run of eight sites in which things go wrong at random, and what became of it.

    python tools/fault_injection.py --out runs/faults --rounds 100 --seed 1

Seven sites are honest; the eighth lies in every round. Meanwhile sites are killed, frozen and cut off, the SuperLink
and the server are killed, and what they have on disk is damaged before they start again. SCAFFOLD is trained, where
sites and server keep states. `min_clients` is the number of honest sites: no round is complete without all of them, so
that the model must have the bits of a run without faults and without the liar, which is made here as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from fedstill.building.config import resolve
from fedstill.core import tree
from fedstill.core.processes import die_with_parent
from fedstill.core.reports import Code
from fedstill.core.tree import Tree
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.policy import Policy
from fedstill.deployment.server import serve
from fedstill.deployment.site import Site
from fedstill.deployment.site_engine import Terms
from fedstill.flower import node
from fedstill.flower.keys import make

HONEST = ["ann", "bob", "cid", "dee", "eve", "fay", "gus"]
LIAR = "zoe"
MOST = 10**8  # samples that it claims, the most that a server takes for one
METHOD = "scaffold"
SETTINGS: dict[str, Any] = {
    "method": METHOD,
    "clients": len(HONEST) + 1,
    "participation": 1.0,
    "min_clients": len(HONEST),
    "round_retries": 1000,
    "model": "mlp",
    "model_options": {"hidden": [8]},
    "image_size": 16,
    "fraction": 0.1,
    "epochs": 1,
    "batch_size": 16,
    "alpha": 0.5,
    "eval_every": 10,
}
# How often each is drawn. The server is killed in the first half only: its memory is watched in the second.
FAULTS = {"kill a site": 8, "freeze a site": 8, "cut a site off": 8, "kill the SuperLink": 2, "kill the server": 4}


# --- the liar ---------------------------------------------------------------------------------------------------------


def lie(answer: Tree, round_: int) -> Tree:
    """An answer that no server should believe; each round another kind."""
    message = answer["message"]

    def every(change: Any) -> Tree:
        return answer | {"message": {name: change(part) for name, part in message.items()}}

    lies: list[Any] = [
        lambda: every(lambda part: part * 1e20),
        lambda: every(lambda part: part * torch.nan),
        lambda: every(lambda part: part[:-1]),
        lambda: every(lambda part: part.double()),
        lambda: answer | {"message": {}},
        lambda: answer | {"message": message | {"more": torch.zeros(9)}},
        lambda: answer | {"message": "forged\n2026-01-01 INFO all is well\x1b[2J"},
        lambda: answer | {"message": {name: torch.zeros(10**7) for name in message}},  # more than an answer can have
        lambda: answer | {"samples": 50},
        lambda: answer | {"samples": "many", "metrics": {"train_loss": "x" * 10**5}},
        lambda: {"error": {"code": Code.FAILED, "step": "\x1b[2J" * 1000, "number": "\n" * 10**5}},
        lambda: [],
    ]
    return lies[round_ % len(lies)]()


def live_as_liar(server: str, folder: Path) -> None:
    site = Site(folder / f"site-{LIAR}", LocalInputs(), Policy(allow=(METHOD,)))

    def handle(request: Tree) -> Tree:
        answer, body = site.handle(request), request["request"]
        if body is None:
            return {"samples": [MOST], "tests": [MOST]}
        return lie(answer | {"samples": MOST}, body["round"]) if body["kind"] == "Train" else {"hits": [MOST]}

    key = folder / f"keys/sites/{LIAR}"
    node.serve(handle, server=server, key=key, ca=folder / "keys/ca.pem", directory=folder / f"site-{LIAR}")
    os._exit(0)


# --- connections that can be cut --------------------------------------------------------------------------------------


class Wires:
    """A port for each site, from which connections go on to the server's, until they are cut."""

    def __init__(self, names: list[str], to: int) -> None:
        self._to, self._open = to, {name: set[asyncio.StreamWriter]() for name in names}
        self.ports: dict[str, int] = {}
        self._loop, started = asyncio.new_event_loop(), threading.Event()

        async def listen() -> None:
            for name in names:

                async def connected(
                    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str = name
                ) -> None:
                    await self._connected(name, reader, writer)

                server = await asyncio.start_server(connected, "127.0.0.1", 0)
                self.ports[name] = server.sockets[0].getsockname()[1]
            started.set()

        def run() -> None:
            self._loop.create_task(listen())
            self._loop.run_forever()

        threading.Thread(target=run, daemon=True).start()
        started.wait()

    async def _connected(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        self._open[name] |= {writer, forth}
        await asyncio.gather(_pump(reader, forth), _pump(back, writer))
        self._open[name] -= {writer, forth}

    def cut(self, name: str) -> None:
        def abort() -> None:
            for writer in list(self._open[name]):
                writer.transport.abort()

        self._loop.call_soon_threadsafe(abort)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()


# --- the processes ----------------------------------------------------------------------------------------------------


class Trial:
    """The processes of a served run, and what can be done to them."""

    def __init__(self, folder: Path, rounds: int, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.run = folder / "run"
        folder.mkdir(parents=True)
        names = [*HONEST, LIAR]
        make(folder / "keys", names, ["127.0.0.1"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        (folder / "run.toml").write_text(resolve(SETTINGS | {"rounds": rounds}).toml())
        self.wires = Wires(names, self.port)
        self.server = self.start_server()
        self.sites = {name: self.start_site(name) for name in names}

    def _start(self, log: str, *words: str | Path) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        with (self.folder / f"{log}.log").open("ab") as file:
            return subprocess.Popen(
                [sys.executable, *words], cwd=self.folder, stdout=file, stderr=file,
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509
            )  # fmt: skip

    def start_server(self) -> subprocess.Popen[bytes]:
        words = ["serve", "run.toml", "--keys", "keys", "--port", str(self.port), "--out", "run"]
        words += ["--timeout", "20", "--wait-after", "10", "--wait", "120", "--needed", str(len(HONEST))]
        return self._start("server", "-m", "fedstill", *words)

    def start_site(self, name: str) -> subprocess.Popen[bytes]:
        server = f"127.0.0.1:{self.wires.ports[name]}"
        if name == LIAR:
            return self._start(name, Path(__file__).resolve(), "--liar", server)
        words = ["--key", f"keys/sites/{name}", "--ca", "keys/ca.pem", "--allow", METHOD]
        return self._start(name, "-m", "fedstill", "join", server, *words)

    def fault(self, kind: str) -> str:
        """Let something go wrong; what it was."""
        name = self.rng.choice([*HONEST, LIAR])
        seconds = self.rng.uniform(0.5, 8)
        if kind == "kill a site":
            _kill(self.sites[name])
            damaged = name != LIAR and self.rng.random() < 0.5
            if damaged:
                _flip(self.folder / f"site-{name}/answer.safetensors", self.rng)
            self.sites[name] = self.start_site(name)
            return f"{name} killed{', its last answer damaged' * damaged}"
        if kind == "freeze a site":
            self.sites[name].send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            self.sites[name].send_signal(signal.SIGCONT)
            return f"{name} frozen for {seconds:.1f} s"
        if kind == "cut a site off":
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self.wires.cut(name)
                time.sleep(0.1)
            return f"{name} cut off for {seconds:.1f} s"
        if kind == "kill the SuperLink":
            for child in psutil.Process(self.server.pid).children():
                child.kill()
            return "the SuperLink killed"
        _kill(self.server)
        newest = max((self.run / "checkpoints").glob("round-*"), default=None)
        damage = self.rng.choice(["flipped", "cut", "deleted"])
        if newest and damage == "flipped":
            _flip(newest, self.rng)
        elif newest and damage == "cut":
            newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
        elif newest:
            newest.unlink()
        self.server = self.start_server()
        return f"the server killed, {newest.name if newest else 'nothing'} {damage}"

    def records(self) -> list[dict[str, Any]]:
        """The records so far; the last line may be half written."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def resources(self) -> dict[str, float]:
        """Of the server and its SuperLink."""
        found = dict.fromkeys(("MB", "descriptors", "threads"), 0.0)
        main = psutil.Process(self.server.pid)
        for process in [main, *main.children(recursive=True)]:
            with process.oneshot():
                found["MB"] += process.memory_info().rss / (1 << 20)
                found["descriptors"] += process.num_fds()
                found["threads"] += process.num_threads()
        return found

    def stop(self) -> None:
        for process in (self.server, *self.sites.values()):
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _flip(path: Path, rng: random.Random) -> None:
    if path.exists():
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


def plan(rounds: int, rng: random.Random) -> list[tuple[int, str]]:
    """After which round what goes wrong; the server when it has two checkpoints, of which one is damaged then."""
    faults = []
    for kind, times in FAULTS.items():
        first, last = (3, rounds // 2) if kind == "kill the server" else (1, rounds)
        faults += [(rng.randrange(first, last), kind) for _ in range(max(1, times * rounds // 100))]
    return sorted(faults)


def disturbed(folder: Path, rounds: int, seed: int, seconds: float) -> dict[str, Any]:
    """The run in which things go wrong."""
    rng = random.Random(seed)
    trial, faults = Trial(folder, rounds, rng), plan(rounds, rng)
    happened, resources, end = list[str](), dict[int, Any](), time.monotonic() + seconds
    try:
        while trial.server.poll() is None and time.monotonic() < end:
            done = len(trial.records())
            if done and done not in resources:
                try:
                    resources[done] = trial.resources()
                except psutil.Error:
                    continue
            if faults and faults[0][0] <= done:
                kind = faults.pop(0)[1]
                happened.append(f"after round {done}: {trial.fault(kind)}")
                print(happened[-1], flush=True)
            time.sleep(0.1)
        code = trial.server.poll()
        records = trial.records()
    finally:
        trial.stop()
    log = (trial.run / "log.txt").read_text()
    return {
        "completed": code == 0,
        "rounds": len(records),
        "in_order": [r["round"] for r in records] == list(range(1, len(records) + 1)),
        "faults": Counter(kind for kind in FAULTS for line in happened if _is(kind, line)),
        "happened": happened,
        "left_out": Counter(name for r in records for name in r.get("left_out", [])),
        "dropped": sum(r["dropped"] for r in records),
        "tried_again": log.count(" is tried again: "),
        "checkpoints_refused": log.count("the checkpoint before"),
        "resources": resources,
    }


def _is(kind: str, line: str) -> bool:
    """Whether a line tells of a fault of this kind."""
    words = {"freeze a site": " frozen", "cut a site off": " cut off", "kill the SuperLink": "SuperLink killed"}
    if kind in words:
        return words[kind] in line
    return " killed" in line and "SuperLink" not in line and ("the server" in line) == (kind == "kill the server")


# --- the run without faults -------------------------------------------------------------------------------------------


class Present:
    """The honest sites in this process; the liar never comes."""

    def __init__(self, folder: Path) -> None:
        self.sites = {name: Site(folder / name, LocalInputs(), Policy(allow=(METHOD,))) for name in HONEST}

    def present(self) -> set[str]:
        return set(self.sites)

    def send_requests(self, requests: Mapping[str, Tree], **how: Any) -> Iterator[tuple[str, Any]]:
        for name, request in requests.items():
            yield name, tree.decode(tree.encode(self.sites[name].handle(tree.decode(tree.encode(request)))))


def undisturbed(folder: Path, rounds: int) -> Path:
    config = resolve(SETTINGS | {"rounds": rounds})
    terms = Terms(timeout=60, needed=len(HONEST))
    serve(config, [*HONEST, LIAR], Present(folder), folder / "run", terms=terms, pause=lambda missing: False)
    return folder / "run"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600, help="after which it is given up")
    parser.add_argument("--liar", metavar="SERVER", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.liar:
        torch.set_num_threads(1)
        live_as_liar(given.liar, Path.cwd())
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    folder = given.out.resolve()
    found = disturbed(folder / "disturbed", given.rounds, given.seed, given.seconds)
    plain = undisturbed(folder / "undisturbed", given.rounds)
    models = [path / "model.safetensors" for path in (folder / "disturbed/run", plain)]
    found["same_bits"] = found["completed"] and models[0].read_bytes() == models[1].read_bytes()
    (folder / "found.json").write_text(json.dumps(found, indent=1))
    for name in ("completed", "rounds", "in_order", "same_bits", "dropped", "tried_again", "checkpoints_refused"):
        print(f"{name.replace('_', ' ')}: {found[name]}")
    print(f"faults: {dict(found['faults'])}; left out: {dict(found['left_out'])}")
    for round_ in (r for r in (10, 25, 50, 75, 100) if r in found["resources"]):
        print(f"round {round_}: {', '.join(f'{v:.0f} {k}' for k, v in found['resources'][round_].items())}")
    return 0 if found["completed"] and found["same_bits"] else 1


if __name__ == "__main__":
    sys.exit(main())
