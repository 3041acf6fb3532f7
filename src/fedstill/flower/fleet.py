"""A site's session at the SuperLink, through the interface that Flower's own SuperNode uses.

Flower's SuperNode hands each message to a ClientApp in another process, which it polls, and ends the process when the
server refuses it. Here one process lives as long as the site, opens no port, and waits for a server that comes back.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_from_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedstill.core.reports import cleaned
from fedstill.flower import messages
from fedstill.flower.superlink import KEEP_OPEN
from fedstill.flower.versions import Used

USED: Used = {
    FleetHttpClient: (
        "from_server_address", "ActivateNode", "DeactivateNode", "SendNodeHeartbeat", "PullMessages", "PullObject",
        "ConfirmMessageReceived", "PushMessages", "PushObject",
    ),
    RuntimeVersionMetadata: ("from_local_component", "as_metadata"),
    FlowerError: ("from_json",),
    ApiErrorCode: ("RUNTIME_VERSION_INCOMPATIBLE",),
}  # fmt: skip

_log = logging.getLogger(__name__)
_BEAT = 20.0  # seconds between two heartbeats at most; Flower takes a site for gone after 60 without one
_BEAT_AGAIN = 10.0  # after one that failed: a server that is too busy for it must not get more of them
_MOST_BACKOFF = 2.0  # seconds between two attempts of one request
_TRY_AGAIN = (502, 503, 504)  # statuses of a server that is there again in a moment
_OTHER_SERVER = ("certificate", "wrong_version")  # in errors of TLS; others, such as an early end, are of a cut line
T = TypeVar("T")


class Refusal(Exception):
    """The SuperLink does not let this site in; `status` is HTTP's, 426 for another version of Flower, or None."""

    def __init__(self, reason: str, status: int | None) -> None:
        super().__init__(reason)
        self.status = status


def supernode(
    server: str,
    ca: bytes | None,
    key: ec.EllipticCurvePrivateKey,
    *,
    predecessor: int | None,
    connected: Callable[[int], None],
    answer: Callable[[RecordDict], RecordDict],
    pushed: Callable[[], None] = lambda: None,
) -> None:
    """Answer messages until this site loses its place at the SuperLink; Refusal if it finds none.

    `predecessor` is the number of a process before this one, which may have been killed. `pushed` is called whenever
    all answers are at the server; it may raise, to end this.
    """
    interceptors: list[Any] = [_OwnVersion(), NodeAuthHttpInterceptor(key, key.public_key())]
    with _Fleet.from_server_address(_bracketed(server), ca is None, ca, interceptors) as fleet:
        if predecessor is not None:  # for a minute the SuperLink thinks it alive, and would refuse a second
            _sign_off(fleet, predecessor)
        number = _activate(fleet, key)
        try:
            connected(number)
            with _heartbeats(fleet, number):
                _answer_messages(_Session(fleet, number), answer, pushed)
        finally:
            _sign_off(fleet, number)


def _answer_messages(session: _Session, answer: Callable[[RecordDict], RecordDict], pushed: Callable[[], None]) -> None:
    idle_since = time.monotonic()
    while True:
        asked = time.monotonic()
        try:
            message = session.pull()
        except httpx.HTTPError as error:
            _log.info("no place at the server any more: %s", cleaned(error))
            return
        if message is None:
            # Our server answers when there is something, or after HOLD seconds; a busy proxy between us may not wait.
            now = time.monotonic()
            time.sleep(max(0.0, messages.pause(now - idle_since) - (now - asked)))
            continue
        began = time.monotonic()
        reply = Message(answer(message.content), reply_to=message)
        try:
            session.push(reply, time.monotonic() - began)
        except Exception as error:  # noqa: BLE001 (also Flower's own: nobody waits for it, or it was refused)
            _log.warning("the answer could not be sent: %s", cleaned(error))
        pushed()
        idle_since = time.monotonic()


class _Fleet(FleetHttpClient):
    """Flower's client, with connections that last while a site works: a new one costs the server a handshake."""

    def __init__(self, base_url: str, *, verify: Any = True, **options: Any) -> None:
        super().__init__(base_url, verify=verify, **options)
        before, limits = self._client, httpx.Limits(keepalive_expiry=KEEP_OPEN)
        self._client = httpx.Client(verify=verify, timeout=before.timeout, follow_redirects=True, limits=limits)
        before.close()


class _Session:
    """Messages from and to the SuperLink, in requests that are repeated until they get through."""

    def __init__(self, fleet: FleetHttpClient, number: int) -> None:
        self._fleet, self._node = fleet, Node(node_id=number)
        self._receipt_lost = False  # of a bundle of the answer that is being sent

    def pull(self) -> Message | None:
        """The next message, if there is one; HTTPStatusError when this site has no place any more."""
        try:
            found = _persistent(self._fleet.PullMessages, PullMessagesRequest(node=self._node))
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.FORBIDDEN:  # of a run that has ended meanwhile
                return None
            raise
        if not found.messages_list:
            return None
        message = message_from_proto(found.messages_list[0])
        name, run = message.metadata.message_id, message.metadata.run_id
        received = ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=name)
        try:
            objects = messages.object_names(found.message_object_trees[0])
            one = partial(_persistent, self._fleet.PullObject)
            pull = messages.object_puller(objects, one, self._bundle, self._node, run)
            contents = messages.pull_contents(objects, pull)
            _persistent(self._fleet.ConfirmMessageReceived, received)
            message.content = messages.inflated(name, contents).content
        except Exception as error:  # noqa: BLE001 (whatever Flower raises: the server sends it again, or gives up)
            _log.warning("a message could not be received: %s", cleaned(error))
            return None
        return message

    def push(self, reply: Message, seconds: float) -> None:
        """Send an answer, which took so long."""

        def announce(heads: list[Any], trees: list[Any]) -> Any:
            request = PushMessagesRequest(
                node=self._node, messages_list=heads, message_object_trees=trees, clientapp_runtime_list=[seconds]
            )
            return _persistent(self._fleet.PushMessages, request)

        self._receipt_lost = False
        messages.push([reply], announce, self._push_object, self._bundle, self._node, reply.metadata.run_id)

    def _bundle(self, path: str, requests: Any) -> Any:
        """Send several requests as one; if that fails, each is made by itself, and tells why."""
        try:
            return messages.bundle(self._fleet)(path, requests)
        except httpx.HTTPError:
            self._receipt_lost = True  # also where a proxy says so
            return type(requests)()

    def _push_object(self, request: Any) -> Any:
        """Send an object. One whose receipt was lost is refused the second time, as it is there."""
        first = not self._receipt_lost

        def push(request: Any) -> Any:
            nonlocal first
            once, first = first, False
            answer = self._fleet.PushObject(request)
            return answer if once else PushObjectResponse(stored=True)

        return _persistent(push, request)


class _OwnVersion:
    """States the version of Flower in the head of a request. Flower's own interceptor ends the process if it is not
    the server's; here that is a refusal."""

    def __init__(self) -> None:
        self._headers = dict(RuntimeVersionMetadata.from_local_component("SuperNode").as_metadata())

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        context.request.headers.update(self._headers)
        return call_next(context)


def _persistent(call: Callable[[Any], T], request: Any) -> T:
    """Repeat a request until the server answers: no cut line, and no server that is started again, ends a session."""
    wait, first = 0.1, True
    while True:
        try:
            return call(request)
        except httpx.HTTPError as error:
            if isinstance(error, httpx.HTTPStatusError):
                if error.response.status_code not in _TRY_AGAIN:
                    raise
            elif any(word in str(error).lower() for word in _OTHER_SERVER):
                raise  # waiting does not help; connecting anew says what is wrong
            if first:
                _log.warning("the server does not answer (%s); trying until it does", cleaned(error))
        first = False
        time.sleep(wait)
        wait = min(_MOST_BACKOFF, 2 * wait)


def _activate(fleet: FleetHttpClient, key: ec.EllipticCurvePrivateKey) -> int:
    """This site's number for the session."""
    name = public_key_to_bytes(key.public_key())
    request = ActivateNodeRequest(public_key=name, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
    try:
        return int(_persistent(fleet.ActivateNode, request).node_id)
    except httpx.HTTPStatusError as error:
        known = FlowerError.from_json(error.response.text)
        reason = f"{known.message} {known.public_details or ''}" if known else str(error)
        other_version = known is not None and known.code == ApiErrorCode.RUNTIME_VERSION_INCOMPATIBLE
        raise Refusal(cleaned(reason), 426 if other_version else error.response.status_code) from error
    except httpx.HTTPError as error:
        raise Refusal(cleaned(error), None) from error


@contextmanager
def _heartbeats(fleet: FleetHttpClient, number: int) -> Iterator[None]:
    """Tell the SuperLink that this process lives. No error ends that: else it would work on, but get no messages."""
    beat = SendNodeHeartbeatRequest(node=Node(node_id=number), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
    stopped = threading.Event()

    def run() -> None:
        wait = _BEAT
        while not stopped.wait(wait * random.uniform(0.5, 1.0)):  # else sites that connect at once all beat at once
            try:
                wait = _BEAT if fleet.SendNodeHeartbeat(beat).success else 1.0
            except Exception:  # noqa: BLE001 (whatever it was, the next may succeed, and pulling messages tells if none does)
                wait = _BEAT_AGAIN

    threading.Thread(target=run, name="heartbeats", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()


def _sign_off(fleet: FleetHttpClient, number: int) -> None:
    with suppress(httpx.HTTPError):
        fleet.DeactivateNode(DeactivateNodeRequest(node_id=number))


def _bracketed(server: str) -> str:
    """host:port as in an address of the web: with an IPv6 host in brackets."""
    host, _, port = server.rpartition(":")
    return f"[{host.strip('[]')}]:{port}" if ":" in host else server
