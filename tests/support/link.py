"""Sites as real processes on loopback, which say back what they are told, for tests of the link."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
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

    def start(self, site: str, ca: str | None = None, server: str = "") -> None:
        (self.root / site).mkdir(exist_ok=True)
        script, key = Path(__file__).with_name("echo_site.py"), self.root / f"keys/sites/{site}"
        authority = ca or self.root / "keys/ca.pem"
        words = (script, server or self.server, key, authority, self.root / site)
        self.processes[site] = start_python(*words, cwd=Path.cwd(), log=self.root / f"{site}.log")

    def kill(self, site: str) -> None:
        self.processes[site].kill()
        self.processes[site].wait()

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


class CutLine:
    """A line to the server that is cut once, after so many bytes of a site's; it counts all of them."""

    def __init__(self, port: int, after: int, cut: Callable[[], None] | None = None) -> None:
        """`cut` is done instead of closing the connections."""
        self._port, self._after, self._cut = port, after, cut or self._close
        self.sent, self.was_cut = 0, threading.Event()
        self._whole = True
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            site, _ = self._door.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self._port))
            except OSError:  # the server has gone
                site.close()
                continue
            self._open += [site, server]
            threading.Thread(target=self._carry, args=(site, server, True), daemon=True).start()
            threading.Thread(target=self._carry, args=(server, site, False), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    self.sent += len(data) if up else 0
                    now = self.sent > self._after and self._whole
                    self._whole &= not now
                if now:
                    self._cut()
                    self.was_cut.set()  # not before: a site is started again once the old process is dead
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _close(self) -> None:
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


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
