"""Sites as real processes on loopback, which say back what they are told, for tests of the link."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

from fedstill.flower import keys
from fedstill.flower.link import Certificates, FlowerLink
from support.preloaded import Process, start_python

SITES = ["berlin", "lagos", "quito"]


PATIENCE = 200.0  # seconds: machines that run tests are slow at times


class Trial:
    """Keys, a port, and the sites' processes."""

    def __init__(self, root: Path) -> None:
        self.root, self.processes = root, dict[str, Process]()
        keys.make(root / "keys", SITES, ["127.0.0.1"])
        keys.make(root / "others", ["stranger"], ["127.0.0.1"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.server = f"127.0.0.1:{self.port}"

    def link(self, **settings: Any) -> FlowerLink:
        folder = self.root / "keys"
        files = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
        public: dict[str, bytes | Path] = {site: folder / f"sites/{site}.pub" for site in SITES}
        given: dict[str, Any] = {"certificates": files, "most_bytes": 2_000_000, **settings}
        return FlowerLink(self.root / "link", public, host="127.0.0.1", port=self.port, **given)

    def start(self, site: str, ca: str | None = None) -> None:
        (self.root / site).mkdir(exist_ok=True)
        script, key = Path(__file__).with_name("echo_site.py"), self.root / f"keys/sites/{site}"
        authority = ca or self.root / "keys/ca.pem"
        words = (script, self.server, key, authority, self.root / site)
        self.processes[site] = start_python(*words, cwd=Path.cwd(), log=self.root / f"{site}.log")

    def kill(self, site: str) -> None:
        self.processes[site].kill()
        self.processes[site].wait()

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def ask(
    link: FlowerLink, requests: dict[str, Any], *, timeout: float = PATIENCE, name: str | None = None
) -> dict[str, Any]:
    answers = list(link.send_requests(requests, timeout=timeout, name=name))
    assert sorted(site for site, _ in answers) == sorted(requests)
    return dict(answers)


def everyone(link: FlowerLink, sites: int = 3) -> None:
    wait(lambda: len(link.present()) == sites)


def wait(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
