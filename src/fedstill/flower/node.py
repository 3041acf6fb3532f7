"""A site's end of the deployment: one process that answers the server's requests, until it is stopped."""

from __future__ import annotations

import fcntl
import logging
import math
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import RecordDict

from fedstill.core import reports, tree
from fedstill.core.errors import DataError, FedstillError
from fedstill.core.files import write_atomic
from fedstill.core.owner import check_private, owner_only, private_folder
from fedstill.core.reports import Code, cleaned
from fedstill.core.tree import Tree
from fedstill.flower import fleet
from fedstill.flower.keys import check_dates
from fedstill.flower.records import from_records, to_records

_log = logging.getLogger(__name__)
_ANSWER = "answer"  # what the file of the last answer is sealed as
_SESSION_SECONDS = 75.0  # seconds: Flower holds the place of a process that vanished for 60
_MOST_TEXT = 128 << 20  # characters of a request's JSON, in which a tokenizer may have half of them
_LONGEST = 30 * 24 * 3600.0  # seconds that any request may take
_FETCH = 3.0  # seconds for the server to fetch the last answer: Flower drops that of a site that has left
_BACKOFF = 2.0  # most seconds between two attempts to connect
_LONG_BACKOFF = 60.0  # the same where somebody has to do something at the server first
_EXPIRED = {9: "is not valid yet", 10: "has expired"}  # by OpenSSL's number of the error
_CONNECT_TIMEOUT = 10.0  # seconds that a server may take to accept a connection
_PLAIN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")  # what OpenSSL calls an answer without TLS


class _Stopped(BaseException):
    """SIGTERM or SIGINT; no `except Exception` of a handler's may swallow it."""


class _OutOfTime(BaseException):
    """Nobody waits for the answer any more; for the same reason no Exception."""


Record = Callable[[Tree, Tree], None]
"""Called with every answer before it is sent: the request's body, and the answer, with a `body` or an `error`."""


def serve(
    handle: Callable[[Tree], Tree],
    *,
    server: str,
    key: Path,
    ca: Path | None,
    directory: Path,
    ready: Callable[[], None] | None = None,
    record: Record | None = None,
    most_seconds: float = math.inf,
    done: Callable[[], bool] = lambda: False,
) -> None:
    """Answer each request from `server` (host:port) with what `handle` returns, until SIGTERM, SIGINT or `done`.

    The server is waited for, and reconnected to, for ever, also if it does not know the key yet, or its certificate
    has expired; FedstillError when it is not the right one. Without `ca` nothing is encrypted, and the server must have
    been started that way. `directory` keeps the last answer: a request that comes again, also after a kill, is answered
    without calling `handle`. `ready` is called at the first connection, `record` before each answer is sent; no request
    may take more than `most_seconds`. To be called in the main thread, where `handle` runs too. What is written
    meanwhile is for its owner alone.
    """
    private_key = _private_key(key)
    private_folder(directory)
    with owner_only(), _locked(directory), suppress(_Stopped), _stoppable():
        site = _Site(handle, directory, ready, record, most_seconds)

        def end_when_done() -> None:
            if done():
                time.sleep(_FETCH)
                raise _Stopped

        refused_since: float | None = None
        rejected = 0  # times in a row
        while True:
            trusted = _wait_for_server(server, ca)
            try:
                fleet.supernode(
                    server,
                    trusted,
                    private_key,
                    predecessor=site.node_id(),
                    connected=site.connected,
                    answer=site.answer,
                    pushed=end_when_done,
                )
            except fleet.Refusal as error:
                refused_since = refused_since or time.monotonic()
                _check_refusal(error, server, key, time.monotonic() - refused_since)
                rejected = rejected + 1 if error.status == 401 else 0
                if rejected == 1:
                    hint = "have its .pub added there ('fedstill keys add'), or set the clocks of the two machines"
                    _log.warning("%s does not know the key %s; trying until it does: %s", server, key, hint)
                elif not rejected:
                    reason = str(error).split(".")[0][:80]
                    _log.info("%s has no place for this site yet (%s); trying again", server, reason)
            else:
                refused_since, rejected = None, 0
                _log.warning("the connection to %s was lost; connecting again", server)
            time.sleep(min(_LONG_BACKOFF, 2.0 ** min(rejected, 10)) if rejected else 1.0)


def _check_refusal(error: fleet.Refusal, server: str, key: Path, seconds: float) -> None:
    """Raise what the user has to mend; return if waiting may help."""
    status = error.status
    if status == 401:
        return
    if status == 412 and seconds > _SESSION_SECONDS:
        raise FedstillError(f"{server} refuses {key}: another process seems to be connected with it") from error
    if status is not None and status != 412 and status < 500:
        raise FedstillError(f"{server} refuses this site: {error}") from error


class _Site:
    """What a site remembers: its handler, its number at the server, and its last answer."""

    def __init__(
        self,
        handle: Callable[[Tree], Tree],
        directory: Path,
        ready: Callable[[], None] | None,
        record: Record | None = None,
        most_seconds: float = math.inf,
    ) -> None:
        self._handle, self._ready = handle, ready
        self._record, self._most_seconds = record, min(most_seconds, _LONGEST)
        self._answer, self._node = directory / "answer.safetensors", directory / "node"
        self.connections = 0
        self._complaint: tuple[str, str] | None = None  # the last error here, and its number
        previous = self._previous_answer()
        self._last = previous and previous["id"]  # the request that the file answers

    def node_id(self) -> int | None:
        """The number under which this site, or the process before it, was connected."""
        with suppress(OSError, ValueError):
            return int(self._node.read_text())
        return None

    def connected(self, node_id: int) -> None:
        self.connections += 1
        write_atomic(self._node, str(node_id))
        _log.info("connected as node %s", node_id)
        if self._ready is not None and self.connections == 1:
            self._ready()

    def answer(self, records: RecordDict) -> RecordDict:
        """The answer to a request, new or kept; an error is an answer too, by its code alone."""
        name, body = None, None
        try:
            with reports.during(reports.Step.REQUEST):
                request = from_records(records, most_text=_MOST_TEXT)
                name, seconds, body = request["id"], request["seconds"], request["body"]
            if name is not None and name == self._last and (previous := self._previous_answer()) is not None:
                return self._recorded_answer(body, previous)
            with _limited(min(float(seconds), self._most_seconds)):
                answer = {"id": name, "body": self._handle(body)}
                if request["keep"]:
                    write_atomic(self._answer, tree.seal(answer, _ANSWER))
            reply = self._recorded_answer(body, answer)
            if request["keep"]:
                self._last = name
            return reply
        except (Exception, SystemExit, _OutOfTime) as error:  # noqa: BLE001 (whatever the handler raises)
            answer = {"id": name if isinstance(name, str) else None, "error": self._report(error)}
            try:
                return self._recorded_answer(body, answer)
            except Exception as problem:  # noqa: BLE001 (what cannot be recorded is not sent, but that it failed is)
                _log.error("the answer could not be recorded: %s\n%s", cleaned(problem, 2000), reports.frames(problem))
                return to_records({**answer, "error": reports.report(Code.DISK, None, answer["error"]["number"])})

    def _previous_answer(self) -> Tree:
        """The last answer; None: there is none, or it is damaged, and so made anew when it is asked for."""
        with suppress(OSError, DataError):
            answer, digest = tree.unseal(self._answer.read_bytes(), _ANSWER)
            return answer if digest else None
        return None

    def _recorded_answer(self, body: Tree, answer: Tree) -> RecordDict:
        """An answer as it is sent, once it has been recorded."""
        records = to_records(answer)
        if self._record is not None:
            self._record(body, answer)
        return records

    def _report(self, error: BaseException) -> dict[str, str]:
        """The report of an error to the server. Its text, which may hold anybody's data, is for the log here."""
        code = Code.OUT_OF_TIME if isinstance(error, _OutOfTime) else reports.code_of(error)
        step = reports.step_of(error)
        expected = isinstance(error, FedstillError | _OutOfTime)
        text = f"{type(error).__name__}: {cleaned(error, 2000)}"
        if self._complaint is None or self._complaint[0] != text:
            self._complaint = text, reports.new_number()
            _log.warning(
                "number %s: %s; the server gets only the code %s (step %s)%s",
                self._complaint[1], text, code, step or "request", "" if expected else f"\n{reports.frames(error)}",
            )  # fmt: skip
        return reports.report(code, step, self._complaint[1])


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise FedstillError(f"the key {path} cannot be read: {error.strerror}") from error
    except TypeError as error:
        raise FedstillError(f"the key {path} has a passphrase; a site needs one without") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise FedstillError(f"{path} is not a private key in OpenSSH's format: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedstillError(f"{path} is not an elliptic-curve key; make one with `ssh-keygen -t ecdsa -b 256`")
    check_private(path)
    return key


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Two processes that are the same site would take each other's place at the server in turn."""
    with (directory / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FedstillError(f"{directory} is in use: another process is this site") from error
        yield


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGINT end what is inside; a second one does so without signing off."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        # Signing off takes one request; a server that does not respond has 2 s for it.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 2)
        raise _Stopped

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Give up what takes longer than the server waits: a site that hangs would miss every later request too."""

    def late(number: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, float(seconds)))
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) is late:  # else a stop has set its own
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _wait_for_server(server: str, ca: Path | None) -> bytes | None:
    """Wait until something listens at `server`, and return what `ca` holds; FedstillError if it does not vouch for it.

    Flower's client takes a wrong certificate for a bad connection, and a server that wants TLS likewise.
    """
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal():
        raise FedstillError(f"server {server!r} is not host:port")
    context, trusted = _trust(ca)
    wait = first = 0.25
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT) as plain:
                plain.settimeout(3 if ca is None else _CONNECT_TIMEOUT)
                with context.wrap_socket(plain, server_hostname=host.strip("[]")):
                    if ca is None:
                        raise FedstillError(f"{server} wants an encrypted connection; give its CA certificate")
                    return trusted
        except ssl.SSLCertVerificationError as error:
            if problem := _EXPIRED.get(error.verify_code):
                if wait == first:
                    hint = "renew it there, or set the clock of this machine"
                    _log.warning("the certificate of %s %s; trying until it is valid: %s", server, problem, hint)
                time.sleep(wait)
                wait = min(_LONG_BACKOFF, 2 * wait)
                continue
            raise FedstillError(f"{server} is not the server that {ca} vouches for: {error.verify_message}") from error
        except (OSError, ValueError) as error:
            spoke_plainly = isinstance(error, ssl.SSLError) and error.reason in _PLAIN
            if ca is None and (spoke_plainly or isinstance(error, TimeoutError | ssl.SSLEOFError)):
                return None
            if spoke_plainly:
                raise FedstillError(f"{server} does not encrypt; it is not the server meant, or has no TLS") from error
            if wait == first:
                _log.warning("%s does not answer (%s); trying until it does", server, error)
        time.sleep(wait)
        wait = min(_BACKOFF, 2 * wait)


def _trust(ca: Path | None) -> tuple[ssl.SSLContext, bytes | None]:
    """What vouches for a server: a context, and what the file holds."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context, None
    try:
        trusted = ca.read_bytes()
        context.load_verify_locations(cadata=trusted.decode("ascii"))
    except (OSError, ValueError) as error:
        raise FedstillError(f"the CA certificate {ca} cannot be read: {error}") from error
    check_dates(ca)
    return context, trusted
