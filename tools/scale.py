"""How many sites one server bears, and what regions give.

    python tools/scale.py loopback --sites 50 200 500     # a real server, TLS, light sites on this machine; 9 minutes
    python tools/scale.py tree --regions 100 --sites 100  # the same protocol, sites and lines modelled
    python tools/scale.py tree --regions 1 --sites 10000  # all of them at one server

A light site answers at once, with the model it got and a small change of its own, without training. docs/scale.md says
what is measured, and what the model of the network is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from fedstill.building.config import Config, resolve
from fedstill.core.tree import Tree, nbytes
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.region import RegionalServer
from fedstill.deployment.server import serve
from fedstill.deployment.site_engine import Terms
from fedstill.metrics.records import RoundRecord
from fedstill.running.callbacks import Callback, RunView

PER_PROCESS = 50  # light sites
SAMPLES = 100  # that each says it has
MB = 1e6
IDLE = 10.0  # seconds
MOST_SECONDS = 480.0  # of one number of sites
COLUMNS = {
    "sites": "{sites}",
    "seconds a round": "{seconds a round}",
    "rounds an hour": "{rounds an hour}",
    "MB a round": "{MB a round}",
    "MB/s": "{MB/s}",
    "CPU s a round: server, SuperLink": "{CPU s a round, server}, {CPU s a round, SuperLink}",
    "CPU s a second while all wait": "{CPU s a second without requests, SuperLink}",
    "memory MB: server, SuperLink": "{memory MB, server}, {memory MB, SuperLink}",
}


def light_answer(number: int, body: Tree) -> Tree:
    """What a light site answers."""
    request = body["request"]
    if request is None:
        return {"samples": [SAMPLES], "tests": [0]}
    if request["kind"] == "Finish":
        return {"received": True}
    change = torch.full_like(body["down"]["model"], 1e-6 * (number + 1))  # so that no two answers are the same bytes
    message = {"model": body["down"]["model"] + change}
    return {"samples": SAMPLES, "message": message, "metrics": {"train_loss": 0.0, "seconds": 0.0}}


# ------------------------------------------------------------------------------------------------ light sites, for real


def be_light_sites(server: str, keys: Path, first: int, last: int) -> None:
    """The sites of these numbers, a thread each, until the process that started this one ends."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    from fedstill.flower import fleet
    from fedstill.flower.records import from_records, to_records

    torch.set_num_threads(1)
    authority = (keys / "ca.pem").read_bytes()

    def site(number: int) -> None:
        key: Any = load_ssh_private_key((keys / f"sites/site{number:05d}").read_bytes(), None)

        def answer(records: Any) -> Any:
            request = from_records(records)
            return to_records({"id": request["id"], "body": light_answer(number, request["body"])})

        while True:
            with contextlib.suppress(fleet.Refusal):
                fleet.supernode(server, authority, key, predecessor=None, connected=lambda node: None, answer=answer)
            time.sleep(1)

    for number in range(first, last):
        threading.Thread(target=site, args=(number,), daemon=True).start()
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)


@dataclass
class Watch:
    """Memory and CPU of the server's two processes, looked at twice a second."""

    processes: dict[str, psutil.Process]

    def __post_init__(self) -> None:
        self.peak = dict.fromkeys(self.processes, 0)
        self._before = self.cpu()
        threading.Thread(target=self._look, daemon=True).start()

    def cpu(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self.processes.items()}
        return {name: spent.user + spent.system for name, spent in times.items()}

    def spent(self) -> dict[str, float]:
        return {name: now - self._before[name] for name, now in self.cpu().items()}

    def _look(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while True:
                for name, process in self.processes.items():
                    self.peak[name] = max(self.peak[name], process.memory_info().rss)
                time.sleep(0.5)


class Rounds(Callback):
    """The rounds that are done, and the CPU time of each."""

    def __init__(self, cpu: Callable[[], dict[str, float]]) -> None:
        self._cpu, self._before, self._spent = cpu, cpu(), list[dict[str, float]]()
        self._records = list[RoundRecord]()

    def on_round_start(self, run: RunView, round_: int, clients: int) -> None:
        self._before = self._cpu()

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        self._spent.append({name: now - self._before[name] for name, now in self._cpu().items()})
        self._records.append(record)

    def measured(self) -> dict[str, Any]:
        """A median round without the first, unless there is no other."""
        if not self._records:
            return {}
        seconds = statistics.median([record["seconds"] for record in self._records[1:] or self._records])
        moved = self._records[-1]["bytes_down"] + self._records[-1]["bytes_up"]
        cpu = {
            name: statistics.median([spent[name] for spent in self._spent[1:] or self._spent]) for name in self._cpu()
        }
        return {
            "rounds": len(self._records),
            "seconds a round": round(seconds, 2),
            "rounds an hour": round(3600 / seconds),
            "MB a round": round(moved / MB, 1),
            "MB/s": round(moved / MB / seconds, 1),
            **{f"CPU s a round, {name}": round(spent, 2) for name, spent in cpu.items()},
        }


class OutOfTime(BaseException):
    """No Exception, which the server might take for one of its own."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """A server that has more sites than it bears must not keep us for ever."""

    def late(number: int, frame: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def usual_rounds(sites: int) -> int:
    """Rounds that are enough, and do not take too long."""
    return 5 if sites <= 100 else 3 if sites <= 250 else 2


def row(found: dict[str, Any]) -> str:
    """A row of Markdown."""
    cells = [text.format_map(defaultdict(str, found)) for text in COLUMNS.values()]
    return f"| {' | '.join([*cells, found.get('unfinished', '')])} |"


def loopback(sites: int, model: str, method: str, rounds: int) -> dict[str, Any]:
    """Rounds of a real server with so many light sites on this machine."""
    from fedstill.flower import keys
    from fedstill.flower.link import Certificates, FlowerLink, Strangers

    names = [f"site{number:05d}" for number in range(sites)]
    found: dict[str, Any] = {"sites": sites}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as opened:
        root = Path(scratch)
        keys.make(root / "keys", names, ["127.0.0.1"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        files = Certificates(*(root / "keys" / name for name in ("ca.pem", "server.pem", "server.key")))
        public: dict[str, bytes | Path] = {name: root / f"keys/sites/{name}.pub" for name in names}
        link = opened.enter_context(
            FlowerLink(
                root / "link", public, host="127.0.0.1", port=port, certificates=files, most_bytes=1 << 30,
                database=False, strangers=Strangers(connections=512, seconds=60),
            )
        )  # fmt: skip
        opening = time.perf_counter()
        for first in range(0, sites, PER_PROCESS):
            words = [f"127.0.0.1:{port}", str(root / "keys"), str(first), str(min(sites, first + PER_PROCESS))]
            process = subprocess.Popen([sys.executable, __file__, "light", *words])
            opened.callback(process.kill)
        end = opening + MOST_SECONDS
        while (there := len(link.present())) < sites:
            time.sleep(0.5)
            if time.perf_counter() > end:
                return found | {"unfinished": f"{there} had joined after {MOST_SECONDS:g} s"}
        found["seconds to join"] = round(time.perf_counter() - opening, 1)
        assert link._process is not None
        watched = {"server": psutil.Process(), "SuperLink": psutil.Process(link._process.pid)}
        idle, began = Watch(watched), time.perf_counter()
        time.sleep(IDLE)  # sites that ask for work, and get none
        idling = idle.spent()["SuperLink"] / (time.perf_counter() - began)
        watch, rounds_done = Watch(watched), Rounds(idle.cpu)
        began = time.perf_counter()
        try:
            with limited(max(1.0, end - began)):
                serve(
                    _config(method, model, rounds, clients=sites), names, link, root / "run",
                    terms=Terms(needed=sites, wait_after=600), pause=lambda missing: True, callbacks=[rounds_done],
                )  # fmt: skip
        except OutOfTime:
            found["unfinished"] = f"given up after {MOST_SECONDS:g} s"
        return {
            **found,
            **rounds_done.measured(),
            "CPU s a second without requests, SuperLink": round(idling, 2),
            **{f"memory MB, {name}": round(peak / MB) for name, peak in watch.peak.items()},
            "seconds in all": round(time.perf_counter() - opening, 1),
        }


def _config(method: str, model: str, rounds: int, **settings: Any) -> Config:
    return resolve(
        {"method": method, "model": model, "rounds": rounds, "participation": 1.0, "eval_every": 0} | settings
    )


# -------------------------------------------------------------------------------------- a tree, with a clock of its own


@dataclass(frozen=True)
class Line:
    """A modelled network: a server's line, which all its sites share, and each site's own."""

    server_bytes: float = 125e6  # a second, in each direction: 1 Gbit/s
    site_bytes: float = 1.25e6  # 10 Mbit/s
    latency: float = 0.05  # seconds, one way
    work: float = 60.0  # seconds that a site trains

    def seconds(self, down: list[int], up: list[int], work: list[float]) -> float:
        """From the first byte to the last of requests of these sizes, whose answers take so long to work out.

        The server sends one request after the other; a site's own line takes its time too, and whichever is slower
        counts. Answers arrive in the order in which they are ready, and share the server's line one after the other.
        """
        sent, begun = 0.0, list[tuple[float, int]]()
        for size, answer, spent in zip(down, up, work, strict=True):
            sent += size / self.server_bytes
            got = max(sent, size / self.site_bytes) + self.latency
            begun.append((got + spent + self.latency, answer))  # when its first byte is at the server
        end = 0.0
        for moment, answer in sorted(begun):
            end = max(moment + answer / self.site_bytes, max(moment, end) + answer / self.server_bytes)
        return end


class ModelledLink:
    """A link whose sites answer in this process, while a clock of its own counts what the lines would take."""

    def __init__(self, answers: Mapping[str, Callable[[Tree], tuple[Tree, float]]], line: Line) -> None:
        """Each site's answer to a request, and the seconds that it takes there."""
        self._answers, self._line, self.clock, self.moved = answers, line, 0.0, 0

    def present(self) -> set[str]:
        return set(self._answers)

    def send_requests(
        self, requests: Mapping[str, Tree], *, timeout: float, name: str | None = None, until: Any = None
    ) -> Iterator[tuple[str, Any]]:
        down, up, work = list[int](), list[int](), list[float]()
        for site, request in requests.items():
            answer, seconds = self._answers[site](request)
            down.append(nbytes(request["down"]) + len(json.dumps(request["run"], default=str)))
            up.append(nbytes(answer))
            work.append(seconds)
            if len(down) == len(requests):  # before the last is handed out: nobody asks for one more
                self.clock += self._line.seconds(down, up, work)
                self.moved += sum(down) + sum(up)
            yield site, answer


def light_link(numbers: range, line: Line) -> ModelledLink:
    """A modelled link to light sites."""

    def answerer(number: int) -> Callable[[Tree], tuple[Tree, float]]:
        def answer(body: Tree) -> tuple[Tree, float]:
            trains = body["request"] is not None and body["request"]["kind"] == "Train"
            return light_answer(number, body), line.work if trains else 0.0

        return answer

    return ModelledLink({f"site{number:05d}": answerer(number) for number in numbers}, line)


def tree(
    regions: int, sites: int, model: str, method: str, episodes: int, per_episode: int, line: Line
) -> dict[str, Any]:
    """Rounds of `regions` regional servers with `sites` light sites each; one region: all at one server."""
    total, rounds = regions * sites, episodes * per_episode
    began, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as opened:
        root = Path(scratch)
        if regions == 1:
            top = light_link(range(total), line)
            config = _config(method, model, rounds, clients=total)
        else:
            top = ModelledLink(dict(_regions(regions, sites, line, root, opened)), replace(line, site_bytes=math.inf))
            config = _config(method, model, rounds, clients=total, regions=regions, rounds_per_episode=per_episode)
        names = list(top._answers)
        result = serve(
            config, names, top, root / "run", terms=Terms(needed=len(names)), pause=lambda missing: True,
            regional=regions > 1,
        )  # fmt: skip
    return {
        "sites": total,
        "regions": regions,
        "parameters": result.summary["parameters"],
        "modelled seconds a round": round(top.clock / rounds, 1),
        "modelled rounds an hour": round(3600 * rounds / top.clock, 1),
        "MB a round at the top": round(top.moved / rounds / MB, 1),
        "real seconds": round(time.perf_counter() - began, 1),
        "CPU ms a site and round": round(1000 * (time.process_time() - cpu) / rounds / total, 2),
        "memory MB": round(psutil.Process().memory_info().rss / MB),
    }


def _regions(
    regions: int, sites: int, line: Line, root: Path, opened: contextlib.ExitStack
) -> Iterator[tuple[str, Callable[[Tree], tuple[Tree, float]]]]:
    """Regional servers, as the product has them, whose own sites are light."""
    for number in range(regions):
        link = light_link(range(number * sites, (number + 1) * sites), line)

        @contextmanager
        def connect(most_bytes: int, link: ModelledLink = link) -> Iterator[ModelledLink]:
            yield link

        name = f"region{number:03d}"
        server = opened.enter_context(
            RegionalServer(root / name, list(link._answers), connect, inputs=LocalInputs(), terms=Terms(needed=sites))
        )

        def answer(body: Tree, server: RegionalServer = server, link: ModelledLink = link) -> tuple[Tree, float]:
            before = link.clock
            return server.handle(body), link.clock - before

        yield name, answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    light = commands.add_parser("light", help="(used by loopback) light sites")
    for name in ("server", "keys", "first", "last"):
        light.add_argument(name)
    for name, words in (("loopback", "a real server on this machine"), ("tree", "a modelled network")):
        command = commands.add_parser(name, help=words)
        command.add_argument("--model", default="lenet5")
        command.add_argument("--method", default="fedavg")
        if name == "loopback":
            command.add_argument("--sites", type=int, nargs="+", default=[50, 200, 500])
            command.add_argument("--rounds", type=int, default=0, help="0: 5, of many sites fewer")
        else:
            command.add_argument("--regions", type=int, default=100)
            command.add_argument("--sites", type=int, default=100, help="of each region")
            command.add_argument("--episodes", type=int, default=2)
            command.add_argument("--rounds-per-episode", type=int, default=5)
            for field, about in (
                ("server_bytes", "bytes/s"),
                ("site_bytes", "bytes/s"),
                ("latency", "s"),
                ("work", "s"),
            ):
                flag = f"--{field.replace('_', '-')}"
                command.add_argument(flag, type=float, default=getattr(Line(), field), help=about)
    given = parser.parse_args()
    logging.disable(logging.INFO)
    if given.command == "light":
        be_light_sites(given.server, Path(given.keys), int(given.first), int(given.last))
    elif given.command == "loopback":
        print(" | ".join(["", *COLUMNS, "", ""]).strip(), "|---" * (len(COLUMNS) + 1) + "|", sep="\n")
        for sites in given.sites:
            rounds = given.rounds or usual_rounds(sites)
            found = loopback(sites, given.model, given.method, rounds)
            print(row(found), flush=True)
            print(json.dumps(found), file=sys.stderr)
    else:
        line = Line(given.server_bytes, given.site_bytes, given.latency, given.work)
        how = (given.regions, given.sites, given.model, given.method, given.episodes, given.rounds_per_episode)
        print(json.dumps(tree(*how, line)))


if __name__ == "__main__":
    main()
