"""The server's end of the deployment: sends requests over Flower's SuperLink, which it starts and keeps alive."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import queue
import secrets
import socket
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.app import Message

from fedstill.core.errors import DataError, FedstillError, SettingError, unknown
from fedstill.core.reports import cleaned, sentence
from fedstill.core.tree import Tree
from fedstill.flower import messages, private, superlink
from fedstill.flower.keys import check_dates
from fedstill.flower.private import FlowerRun, Node
from fedstill.flower.records import MOST_TEXT, from_records, to_records

_log = logging.getLogger(__name__)
_START = 120.0  # seconds that the SuperLink may take until it answers
_PORT = 2.0  # seconds that the port may still be in use
_STOP = 3.0  # seconds that it may take to end
_BEAT = 5.0  # seconds between heartbeats of the run
_LOOK = 0.5  # seconds for which the list of connected sites is believed
_AGAIN = 1.0  # seconds before a request that was lost is sent again
_TOGETHER = 0.05  # seconds in which answers are heard of together
_ANYWAY = 30.0  # seconds after which an answer is looked for of which nothing was heard
_READERS = 8  # answers that are read at once: each takes connections, and memory
_MOST_EVENTS = 100_000  # also of answers that came too late
_KEYS = 1.0  # seconds between looks at who is to be let in
# By what an answer shows that it is none, or too large; to request it again would bring the same.
_UNREADABLE = (DataError, ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError)

PublicKeys = Mapping[str, bytes | Path]
"""Each site's public key in OpenSSH's format, or the file that has it."""


@dataclass(frozen=True)
class Certificates:
    """Files of the server's TLS: the authority's certificate, its own, and the private key to that."""

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class Failure:
    """Why there is no answer of a site."""

    reason: str


@dataclass(frozen=True)
class Strangers:
    """What connections may take that have not shown a key yet."""

    connections: int = 32  # of an address; a further one takes the place of the oldest
    seconds: float = 20.0  # for the handshake and a signed request


@dataclass(frozen=True)
class _PendingRequest:
    """A request on its way: which message of which run, and to which connection of the site."""

    run: FlowerRun
    node: Node
    message: str


class FlowerLink:
    """A SuperLink with the given sites, for as long as the `with` lasts.

    `sites` gives each site's public key, or is called again and again for them: a site can be revoked or added at any
    time. `certificates=None` encrypts nothing. `directory` keeps Flower's database and log. Answers above `most_bytes`
    are refused while they arrive. Without `database` the SuperLink keeps everything in memory: a round is twice as fast
    and no message is left on the disk; when it dies, sites connect anew.
    """

    def __init__(
        self,
        directory: Path,
        sites: PublicKeys | Callable[[], PublicKeys],
        *,
        host: str,
        port: int,
        certificates: Certificates | None,
        most_bytes: int,
        database: bool = True,
        strangers: Strangers | None = None,
    ) -> None:
        self._directory, self._host, self._port = directory, host, port
        self._log_file = directory / "superlink.log"
        self._certificates, self._most_bytes, self._database = certificates, most_bytes, database
        self._strangers = strangers or Strangers()
        self._find_keys = sites if callable(sites) else None
        self._keys = _public_keys(sites() if callable(sites) else sites)
        self._names = {key: site for site, key in self._keys.items()}
        self._sites = set(self._keys)  # also those whose key was revoked since
        self._complaint = ""
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        place = f"[{local}]:{port}" if ":" in local else f"{local}:{port}"
        self._address = private.Address(place, _only(certificates), secrets.token_hex(32))
        self._process: subprocess.Popen[bytes] | None = None
        self._run: FlowerRun | None = None
        self._seen: tuple[float, FlowerRun | None, dict[str, Node]] = (0.0, None, {})
        self._looking = threading.Lock()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="superlink-watch", daemon=True)
        self._answer_events: dict[str, threading.Event] = {}  # by message: its answer is there
        self._hears = False  # whether the SuperLink says so
        self._readers = threading.BoundedSemaphore(_READERS)

    def __enter__(self) -> Self:
        for path in (self._certificates.certificate, self._certificates.ca) if self._certificates else ():
            check_dates(path)  # else nothing, not even we, could connect
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_port()
        try:
            self._open()
        except httpx.HTTPError as error:
            self._stop_process()
            raise FedstillError(f"Flower's SuperLink gives us no run: {error}; see {self._log_file}") from error
        except BaseException:
            self._stop_process()
            raise
        self._watcher.start()
        threading.Thread(target=self._listen, name="superlink-listen", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._watcher.join(_STOP)
        if self._run is not None:
            ending = threading.Thread(target=self._run.end, daemon=True)
            ending.start()
            ending.join(_STOP)
        self._stop_process()

    def present(self) -> set[str]:
        """The sites that are connected now."""
        with suppress(httpx.HTTPError):
            return set(self._look(0.0)[1])
        return set()

    def send_requests(
        self,
        requests: Mapping[str, Tree],
        *,
        timeout: float,
        name: str | None = None,
        until: Callable[[], float] | None = None,
    ) -> Iterator[tuple[str, Tree | Failure]]:
        """Send sites their requests; each site's answer or Failure as it comes, one per site, within `timeout` s.

        `until` gives the moment of the monotonic clock after which the rest are not waited for.

        A site that is away, or goes away, is waited for. A site keeps its last answer: if a request of the
        same `name` comes again, from a server that was killed for instance, it need not work again.
        """
        for site in requests:
            if site not in self._sites:
                raise unknown("site", site, self._sites)
        end = time.monotonic() + timeout
        batch = _RequestBatch(name or uuid.uuid4().hex, name is not None, timeout, end, threading.Event())
        answers: queue.SimpleQueue[tuple[str, Tree | Failure]] = queue.SimpleQueue()
        sent: dict[str, _PendingRequest] = {}
        with suppress(httpx.HTTPError):
            run, nodes = self._look(0.0)
            sent = self._send(run, {site: nodes[site] for site in requests if site in nodes}, requests, batch)

        def collect(site: str) -> None:
            answers.put((site, self._collect(site, requests[site], batch, sent.get(site))))

        for site in requests:
            threading.Thread(target=collect, args=(site,), name=f"request-{site}", daemon=True).start()
        return _arriving(set(requests), answers, batch, until or (lambda: math.inf))

    def _send(
        self, run: FlowerRun | None, nodes: Mapping[str, Node], requests: Mapping[str, Tree], batch: _RequestBatch
    ) -> dict[str, _PendingRequest]:
        if run is None or not nodes or batch.left() <= 0:
            return {}
        distinct = {id(requests[site]): requests[site] for site in nodes}
        head = {"id": batch.name, "seconds": batch.left(), "keep": batch.keep}
        records = {key: to_records({**head, "body": request}) for key, request in distinct.items()}
        addressed = [(node, records[id(requests[site])]) for site, node in nodes.items()]
        sent = run.push(addressed, seconds=batch.left())
        return {
            site: _PendingRequest(run, nodes[site], message)
            for site, message in zip(nodes, sent, strict=True)
            if message
        }

    def _collect(self, site: str, request: Tree, batch: _RequestBatch, sent: _PendingRequest | None) -> Tree | Failure:
        """Wait for one site's answer, and send again whatever may have been lost."""
        present, looked = sent is not None, time.monotonic()
        while batch.left() > 0 and not batch.closed.is_set() and not self._stopping.is_set():
            wait = messages.pause(batch.timeout - batch.left())
            if site not in self._keys:
                return Failure("its key was revoked")
            try:
                run, nodes = self._look(_LOOK)
                node, present = nodes.get(site), site in nodes
                anew = sent is None or sent.run is not run or sent.node != node
                if node is not None and anew:
                    sent, looked = self._send(run, {site: node}, {site: request}, batch).get(site), time.monotonic()
                overdue = not self._hears or node is None or time.monotonic() - looked > _ANYWAY
                if sent is not None and sent.run is run and (overdue or self._answer_event(sent).is_set()):
                    looked = time.monotonic()
                    answer = self._pull(site, sent, batch)
                    if answer is not None and answer.has_error() and answer.error.code in private.RESEND:
                        _log.info("%s: %s; sending it again", site, cleaned(answer.error.reason))
                        sent, wait = None, _AGAIN
                    elif answer is not None:
                        self._answer_events.pop(sent.message, None)
                        return _read(answer, batch.name, self._most_bytes)
            except httpx.HTTPError as error:  # the watcher brings the SuperLink back
                _log.debug("%s: %s", site, error)
                wait, looked = _AGAIN, -math.inf
            except _UNREADABLE as error:
                return Failure(f"its answer is refused: {cleaned(error)}")
            except private.UploadAbandonedError as error:
                _log.info("%s: %s; sending it again", site, error)
                sent, wait = None, 0.0
            except Exception as error:  # noqa: BLE001 (Flower's own, such as an upload that did not come)
                _log.info("%s: %s; sending it again", site, cleaned(error))
                sent, wait = None, _AGAIN
            heard = self._answer_event(sent) if sent is not None and self._hears else batch.closed
            heard.wait(min(wait, max(0.0, batch.left())))
        return Failure(f"no answer within {batch.timeout:g} s" if present else "not connected")

    def _pull(self, site: str, sent: _PendingRequest, batch: _RequestBatch) -> Message | None:
        """A site's answer, if there is one."""
        complete = self._answer_event(sent).is_set()
        self._answer_event(sent).clear()
        place = list[Callable[[], None]]()  # among those who read; given back once, by whichever thread
        if complete:  # else it may have to be waited for
            self._readers.acquire()
            place.append(self._readers.release)

        def give_back() -> None:
            with suppress(IndexError):
                place.pop()()

        def abandoned() -> bool:
            give_back()  # a part is gone again: who waits for it must not keep others from reading
            return self._abandoned(site, sent)

        try:
            return sent.run.pull(sent.message, most_bytes=self._most_bytes, seconds=batch.left(), abandoned=abandoned)
        finally:
            give_back()

    def _abandoned(self, site: str, sent: _PendingRequest) -> bool:
        """Whether the process that was sent the request has gone.

        A new one continues the upload when it gets the request again: the SuperLink asks it for what is missing. Flower
        however goes on waiting for the old one, and deletes what has arrived after three minutes.
        """
        run, nodes = self._look(_LOOK)
        return run is not sent.run or nodes.get(site) != sent.node

    def _look(self, age: float) -> tuple[FlowerRun | None, dict[str, Node]]:
        """The run, and the sites that are connected, as they were at most `age` seconds ago."""
        with self._looking:
            run = self._run
            seen, of, nodes = self._seen
            if run is not None and (of is not run or time.monotonic() - seen > age):
                found = run.nodes()
                nodes = {self._names[key]: node for key, node in found.items() if key in self._names}
                self._seen = time.monotonic(), run, nodes
            return run, nodes if run is not None else {}

    def _answer_event(self, sent: _PendingRequest) -> threading.Event:
        """What is set once there is an answer."""
        return self._answer_events.setdefault(sent.message, threading.Event())

    def _listen(self) -> None:
        """Hear which messages have been answered, so that nobody need look for each again and again."""
        while not self._stopping.is_set():
            try:
                for answered in self._address.answered():
                    self._hears = True
                    for message in answered:
                        self._answer_events.setdefault(message, threading.Event()).set()
                    if (surplus := len(self._answer_events) - _MOST_EVENTS) > 0:
                        for message in list(self._answer_events)[:surplus]:
                            self._answer_events.pop(message, None)  # others take theirs out meanwhile
                    if self._stopping.wait(_TOGETHER):
                        return
            except Exception as error:  # noqa: BLE001 (if this thread ended, nobody would look any more)
                _log.debug("the SuperLink does not say what was answered: %s", error)
            self._hears = False  # who waits looks for himself
            self._stopping.wait(_AGAIN)

    def _watch(self) -> None:
        """Bring the SuperLink back when it dies, and its run when it is given up."""
        beat = looked = time.monotonic()
        while not self._stopping.wait(0.2):
            try:
                if self._process is not None and self._process.poll() is not None:
                    _log.warning("the SuperLink ended (%s); starting it again", self._process.returncode)
                    self._run = None
                if self._run is None:
                    self._open()
                elif time.monotonic() - beat > _BEAT:
                    beat = time.monotonic()
                    if not self._run.beat():
                        _log.warning("the SuperLink gave the run up; starting another")
                        self._run = None
                if self._run is not None and time.monotonic() - looked > _KEYS:
                    looked = time.monotonic()
                    self._update_keys()
            except Exception as error:  # noqa: BLE001 (nobody else would bring it back)
                _log.warning("the SuperLink: %s", error)
                self._stopping.wait(1)

    def _update_keys(self) -> None:
        """Let in who was added, and nobody whose key was revoked."""
        if self._find_keys is None:
            return
        try:
            keys = _public_keys(self._find_keys())
        except (SettingError, OSError) as error:  # such as a file that is being written
            if str(error) != self._complaint:
                _log.warning("the sites' keys stay as they were: %s", error)
            self._complaint = str(error)
            return
        self._complaint = ""
        if keys == self._keys:
            return
        before, self._keys = self._keys, keys
        self._names = {key: site for site, key in keys.items()}
        self._sites |= keys.keys()
        self._seen = (0.0, None, {})
        try:
            self._address.admit(keys)
        except BaseException:
            self._keys = before  # to be tried again
            raise
        for site in sorted(before.keys() | keys.keys()):
            if before.get(site) != keys.get(site):
                _log.warning("%s: %s", site, "its key is new" if site in keys else "its key was revoked")

    def _open(self) -> None:
        """A SuperLink that answers, with all sites' keys, and a run on it."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start_process()
        end = time.monotonic() + _START
        while not self._address.answers():
            if self._process.poll() is not None or time.monotonic() > end:
                lines = self._log_file.read_text(errors="replace").split("\n") if self._log_file.exists() else []
                last = next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")
                raise FedstillError(f"Flower's SuperLink does not start: {last[:300]}")
            if self._stopping.wait(0.1):
                return
        self._address.admit(self._keys)
        self._run = FlowerRun(self._address)

    def _start_process(self) -> subprocess.Popen[bytes]:
        home = self._directory.resolve()
        command = [sys.executable, "-P", "-m", superlink.__name__, "--host", self._host, "--port", str(self._port)]
        command += ["--isolation", "process", "--disable-runtime-dependency-installation"]
        if self._database:
            command += ["--database", str(home / "superlink.db")]
        if self._certificates is None:
            command += ["--insecure"]
        else:
            files = self._certificates
            command += ["--ssl-ca-certfile", str(files.ca), "--ssl-certfile", str(files.certificate)]
            command += ["--ssl-keyfile", str(files.key), "--enable-supernode-auth"]
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_LOG_LEVEL": "WARNING"}
        with self._log_file.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **quiet, "FLWR_HOME": str(home / "flwr")},
                start_new_session=True,  # Ctrl-C is for us: the SuperLink ends after the run
            )
        keys = [private.header_of(key) for key in self._keys.values()]
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:
            settings = {
                "parent": os.getpid(),
                "secret": self._address.secret,
                "keys": keys,
                "most_bytes": self._most_bytes,
                "strangers": self._strangers.connections,
                "seconds": self._strangers.seconds,
            }
            pipe.write(json.dumps(settings).encode())
        return process

    def _stop_process(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _check_port(self) -> None:
        """Refuse a port in use, unless it is free in a moment: the SuperLink of a killed server takes one to end."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        end = time.monotonic() + _PORT
        while True:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self._host, self._port))
                    return
                except OSError as error:
                    if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                        problem = f"cannot listen at {self._host}, port {self._port}: {error.strerror}"
                        raise FedstillError(problem) from error
            time.sleep(0.1)


@dataclass(frozen=True)
class _RequestBatch:
    """What requests that are sent to several sites at once share."""

    name: str
    keep: bool  # whether sites are to keep their answers
    timeout: float
    until: float
    closed: threading.Event

    def left(self) -> float:
        return self.until - time.monotonic()


def _arriving(
    waiting: set[str],
    answers: queue.SimpleQueue[tuple[str, Tree | Failure]],
    batch: _RequestBatch,
    until: Callable[[], float],
) -> Iterator[tuple[str, Tree | Failure]]:
    reason = f"no answer within {batch.timeout:g} s: the SuperLink does not respond"
    try:
        while waiting:
            end = until() - time.monotonic()
            try:
                site, answer = answers.get(timeout=max(0.0, min(end, max(0.0, batch.left()) + 1)))
            except queue.Empty:  # a thread still waits for the SuperLink itself, or it is over
                if end < batch.left():
                    reason = "no answer, and the others have answered long since (--wait-after)"
                break
            waiting.discard(site)
            yield site, answer
        for site in sorted(waiting):
            yield site, Failure(reason)
    finally:
        batch.closed.set()


def _read(answer: Message, name: str, most_bytes: int) -> Tree | Failure:
    """The body of a site's answer."""
    if answer.has_error() and answer.error.code == superlink.REFUSED:
        return Failure(f"its answer is refused: {answer.error.reason}")
    if answer.has_error():
        return Failure(f"Flower's error {answer.error.code}: {cleaned(answer.error.reason)}")
    reply = from_records(answer.content, most_bytes=most_bytes, most_text=MOST_TEXT)
    if not isinstance(reply, dict) or reply.get("id") != name or len(reply) != 2:
        raise DataError("it does not belong to the request")
    if "body" in reply:
        return reply["body"]
    return Failure(sentence(reply.get("error")))


def _public_keys(sites: PublicKeys) -> dict[str, bytes]:
    keys = {site: _public_key(site, key) for site, key in sites.items()}
    if len(set(keys.values())) != len(keys):
        raise SettingError("two sites have the same public key")
    return keys


def _public_key(site: str, key: bytes | Path) -> bytes:
    """A key as Flower compares it."""
    try:
        loaded = load_ssh_public_key(key if isinstance(key, bytes) else key.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise SettingError(f"site {site}: its public key cannot be read: {error}") from error
    if not isinstance(loaded, ec.EllipticCurvePublicKey):
        raise SettingError(
            f"site {site}: its key is not an elliptic-curve key, as made by `ssh-keygen -t ecdsa -b 256`"
        )
    return loaded.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _only(certificates: Certificates | None) -> ssl.SSLContext | None:
    """Trust in the server's own certificate alone, under whatever name: we reach it as this machine."""
    if certificates is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(certificates.certificate)
    except (OSError, ValueError) as error:
        raise SettingError(f"the certificate {certificates.certificate} cannot be read: {error}") from error
    return context
