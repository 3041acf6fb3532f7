"""The SuperLink's process: Flower's server behind a guard that bounds what a stranger, or a known site, can take of it.

Runs as a program, which should not wait for PyTorch: it imports nothing of fedstill's. Like `private`, it uses what
Flower 1.41 does not promise to keep.
"""

from __future__ import annotations

import asyncio
import datetime
import hmac
import importlib
import ipaddress
import json
import logging
import os
import resource
import socket
import sys
import threading
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

SECRET_HEADER = "x-fedstill"
KEYS_PATH = "/fedstill/keys"  # where the server states the keys that are let in from now on
MOST_OBJECTS = 10_000  # in one answer; each costs a request
OVERHEAD = 1 << 16  # bytes of an answer that are Flower's own
REFUSED = 413
"""The code of the error by which the server learns that an answer was refused while it arrived."""

_MOST_ANSWERS = 2  # of a site: one that the server reads, and one that arrives
_MOST_REFUSALS = 10_000  # that are remembered
_MOST_BODIES = 2  # of a site that are in memory at once; others wait on the wire
_MOST_REQUESTS = 32  # of a site at once
_MOST_CONNECTIONS = 64  # of a site; beyond, the oldest ends
_MOST_STRANGERS = 512  # connections without a key, from all addresses
_SMALL = 1 << 16  # bytes of a body for which the signature of its connection's first request will do
_MOST_METADATA = 2 << 20  # bytes of any body but an object's
_STALL = 30.0  # seconds without a byte of a body
_BURST = 16  # connections accepted before others are served

# ------------------------------------------------------------------------------------------------------- connections


class _Connection(socket.socket):
    """An accepted connection, which is counted until it is closed."""

    owner: str | None = None  # the key it has shown; the server's own has ""
    network = ""
    client = ("", 0)
    connections: Connections | None = None

    def close(self) -> None:
        if self.connections is not None:
            self.connections.leave(self)
        super().close()


class Connections:
    """All connections, from the moment they are accepted: the TLS handshake comes before any HTTP server sees them.

    One that has not made a signed request after `seconds` is closed. An address has at most `most` of these: a
    further one takes the place of the oldest, so that a site gets in beside any number that are idle.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._strangers: dict[str, dict[_Connection, None]] = {}  # by address, oldest first
        self._all: dict[tuple[str, int], _Connection] = {}

    def enter(self, connection: _Connection, address: tuple[Any, ...]) -> None:
        connection.connections = self
        connection.client, connection.network = (address[0], address[1]), _network(address[0])
        while len(self._strangers.get(connection.network, ())) >= self._most:
            self._turn_out(connection.network)
        while sum(map(len, self._strangers.values())) >= _MOST_STRANGERS:
            self._turn_out(max(self._strangers, key=lambda network: len(self._strangers[network])))
        self._strangers.setdefault(connection.network, {})[connection] = None
        self._all[connection.client] = connection
        asyncio.get_running_loop().call_later(self._seconds, self._expire, connection)

    def admit(self, client: tuple[str, int], owner: str) -> None:
        """The connection has shown a key."""
        if (connection := self._all.get(client)) is not None:
            connection.owner = owner
            self._known(connection)
            mine = [other for other in self._all.values() if owner and other.owner == owner and other is not connection]
            for other in mine[: max(0, len(mine) - _MOST_CONNECTIONS + 1)]:  # oldest first
                _shut(other)

    def owner(self, client: tuple[str, int]) -> str | None:
        return connection.owner if (connection := self._all.get(client)) is not None else None

    def close(self, client: tuple[str, int]) -> None:
        if (connection := self._all.get(client)) is not None:
            _shut(connection)

    def close_all_but(self, owners: Collection[str]) -> None:
        """End the connections of keys that are not let in any more."""
        for connection in list(self._all.values()):
            if connection.owner and connection.owner not in owners:
                _shut(connection)

    def leave(self, connection: _Connection) -> None:
        self._known(connection)
        if self._all.get(connection.client) is connection:
            del self._all[connection.client]

    def _known(self, connection: _Connection) -> None:
        strangers = self._strangers.get(connection.network, {})
        strangers.pop(connection, None)
        if not strangers:
            self._strangers.pop(connection.network, None)

    def _turn_out(self, network: str) -> None:
        oldest = next(iter(self._strangers[network]))
        self._known(oldest)
        _shut(oldest)

    def _expire(self, connection: _Connection) -> None:
        if connection in self._strangers.get(connection.network, ()):
            self._known(connection)
            _shut(connection)


def _network(address: str) -> str:
    """Whose connections are counted together: an IPv6 customer has 2^64 addresses."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return address if found.version == 4 else str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))


def _shut(connection: _Connection) -> None:
    """The event loop, which owns the socket, finds it at its end and closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Door(socket.socket):
    """A listening socket whose connections are counted."""

    def __init__(self, family: int, address: Any, connections: Connections) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._connections, self._burst = connections, 0
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            self.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self.bind(address)

    def accept(self) -> tuple[socket.socket, Any]:
        self._burst += 1
        if self._burst > _BURST:  # asyncio would accept thousands before it closed those that had to go
            self._burst = 0
            raise BlockingIOError
        try:
            found, address = super().accept()
        except OSError:
            self._burst = 0
            raise
        connection = _Connection(found.family, found.type, found.proto, fileno=found.detach())
        self._connections.enter(connection, address)
        return connection, address


# ---------------------------------------------------------------------------------------------------------- requests


@dataclass
class Guard:
    """Flower serves all its interfaces on one port, and the one that starts runs and adds keys asks for nothing.

    Here sites reach the Fleet interface only, with a key that is known and bodies of bounded size (Flower reads a
    body before it looks at the signature); everything else wants the secret that this process was given.
    """

    app: Callable[..., Any]
    secret: str
    keys: frozenset[str]
    uploads: Uploads
    connections: Connections
    largest: int  # bytes of a body with an object

    def __post_init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._bodies: dict[str, asyncio.Semaphore] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await (self.app(scope, receive, send) if scope["type"] == "lifespan" else send({"type": "websocket.close"}))
            return
        headers = {name.decode("latin1"): value.decode("latin1") for name, value in scope["headers"]}
        client = tuple(scope["client"] or ("", 0))
        if hmac.compare_digest(headers.get(SECRET_HEADER, "").encode(), self.secret.encode()):
            self.connections.admit(client, "")
            if scope["path"] != KEYS_PATH:
                await self.app(scope, receive, send)
                return
            self.keys = frozenset(json.loads(await _body(receive)))
            self.connections.close_all_but(self.keys)
            await _respond(send, 204)
            return
        key, status = await self._refusal(scope["path"], headers, client)
        if status:
            await _respond(send, status)
            return
        self._running[key] += 1
        try:
            await self._pass_on(key, scope, self._unstalled(receive, client), send)
        finally:
            self._running[key] -= 1

    async def _refusal(self, path: str, headers: Mapping[str, str], client: tuple[str, int]) -> tuple[str, int]:
        """The key that a request is signed with, and a status if it is not let in."""
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

        key, length = headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER.lower(), ""), headers.get("content-length", "")
        if not path.startswith("/v1/fleet/") or path.endswith("/register-node"):
            return key, 404
        if key not in self.keys:
            return key, 401
        if not length.isdecimal() or "transfer-encoding" in headers:
            return key, 411
        if self.connections.owner(client) != key or int(length) > _SMALL:
            if not await asyncio.to_thread(_signed, headers):
                return key, 401
            self.connections.admit(client, key)
        if int(length) > (self.largest if path.endswith("/push-object") else _MOST_METADATA):
            await asyncio.to_thread(self.uploads.refuse_newest, key)
            return key, 413
        return key, 503 if self._running[key] >= _MOST_REQUESTS else 0

    async def _pass_on(self, key: str, scope: Any, receive: Any, send: Any) -> None:
        if "/push-" not in scope["path"]:
            await self.app(scope, receive, send)
            return
        async with self._bodies.setdefault(key, asyncio.Semaphore(_MOST_BODIES)):
            await self.app(scope, receive, send)

    def _unstalled(self, receive: Any, client: tuple[str, int]) -> Any:
        """A body of which nothing comes for a while ends the connection."""
        more = True

        async def received() -> Any:
            nonlocal more
            if not more:
                return await receive()
            try:
                async with asyncio.timeout(_STALL):
                    message = await receive()
            except TimeoutError:
                self.connections.close(client)
                return {"type": "http.disconnect"}
            more = message.get("more_body", False)
            return message

        return received


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def _respond(send: Any, status: int) -> None:
    end = [(b"connection", b"close")] if status == 204 else [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": end})
    await send({"type": "http.response.body", "body": b""})


def _signed(headers: Mapping[str, str]) -> bool:
    """Whether the head of a request is signed by its key, and just now; Flower checks only what has arrived whole."""
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    try:
        key, signature = (
            b64decode(headers[name.lower()], validate=True)
            for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
        )
        stamp = headers[TIMESTAMP_HEADER.lower()]
        age = (now() - datetime.datetime.fromisoformat(stamp)).total_seconds()
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            return False
        return bool(verify_signature(bytes_to_public_key(key), stamp.encode("ascii"), signature))
    except (KeyError, ValueError, TypeError):
        return False


# ----------------------------------------------------------------------------------------------------------- storage


@dataclass
class _Upload:
    """An answer of a site that is stored here, whole or in part."""

    node: int
    root: str  # its message, and the object that holds all others
    request: str  # the message that it answers
    session: str
    until: float  # when nobody waits for it any more
    size: int = 0


class Uploads:
    """What sites have sent and the server has not taken yet, in bounds.

    Flower keeps every object until somebody confirms it: answers that are refused, too late or never read would stay.
    Here an answer above `limit` bytes is deleted while it arrives, and the server gets an error in its place; a
    site has at most two, a further one takes the place of the oldest; and each ends with the time of its request.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.state: Any = None
        self._held: dict[str, _Upload] = {}  # by session, oldest first
        self._refused: dict[str, str] = {}  # why, by the message that was answered
        self._lock = threading.RLock()

    def bound(self, kind: Any) -> None:
        """Have Flower's state, of this class, count what it stores."""
        store, put, answers, delete = (
            kind.store_message_and_object_tree, kind.store_object, kind.get_message_res, kind.delete_messages
        )  # fmt: skip

        def store_message(state: Any, message: Any, object_tree: Any, session_id: str) -> tuple[bool, list[str]]:
            self.state = state
            if not message.metadata.reply_to_message_id:
                return store(state, message, object_tree, session_id)  # type: ignore[no-any-return]
            stored, missing = False, list[str]()
            if self._acceptable(message.metadata, object_tree):
                stored, missing = store(state, message, object_tree, session_id)
            if stored:
                self._begin(message.metadata, session_id)
            else:  # else Flower would remember the session for ever
                state._cleanup_push_session(session_id, cleanup_messages=False)
            return stored, missing

        def store_object(state: Any, run_id: int, session_id: str, object_id: str, content: bytes) -> bool:
            return self._fits(session_id, len(content)) and put(state, run_id, session_id, object_id, content)

        def get_answers(state: Any, message_ids: set[str], run_id: int) -> list[Any]:
            refused = {name: self._refused[name] for name in message_ids if name in self._refused}
            rest = message_ids - refused.keys()
            return [_refusal(state, run_id, *item) for item in refused.items()] + (
                answers(state, rest, run_id) if rest else []
            )

        def delete_messages(state: Any, message_ins_ids: set[str]) -> None:
            delete(state, message_ins_ids)
            for name in message_ins_ids or ():  # requests that a site never fetched
                state.object_store.delete(name)

        kind.store_message_and_object_tree, kind.store_object = store_message, store_object
        kind.get_message_res, kind.delete_messages = get_answers, delete_messages

    def refuse_newest(self, key: str) -> None:
        """A part of the answer that a site is sending is too large by itself."""
        with self._lock:
            node = self.state and self.state.get_node_id_by_public_key(b64decode(key))
            mine = [upload for upload in self._held.values() if upload.node == node]
            if mine:
                self._refuse(mine[-1].request, self._too_large())
                self._drop(mine[-1])

    def sweep(self, now: float) -> None:
        """Delete what nobody waits for, and forget what the server has taken."""
        with self._lock:
            for upload in list(self._held.values()):
                if upload.root not in self.state.object_store:
                    self._end(upload)
                elif now > upload.until:
                    self._drop(upload)

    def _acceptable(self, metadata: Any, tree: Any) -> bool:
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        parts = sum(1 for _ in iterate_object_tree(tree))
        if parts > MOST_OBJECTS:
            self._refuse(metadata.reply_to_message_id, f"it has {parts:,} parts")
        return parts <= MOST_OBJECTS and tree.object_id == metadata.message_id

    def _begin(self, metadata: Any, session: str) -> None:
        root, until = metadata.message_id, metadata.created_at + metadata.ttl
        upload = _Upload(metadata.src_node_id, root, metadata.reply_to_message_id, session, until)
        with self._lock:
            self.sweep(time.time())
            mine = [other for other in self._held.values() if other.node == upload.node]
            for other in [other for other in mine if other.root == root]:
                upload.size = other.size  # sent again, because our answer was lost: its objects stay
                self._held.pop(other.session)
                mine.remove(other)
            for other in mine[: max(0, len(mine) - _MOST_ANSWERS + 1)]:
                self._drop(other)
            self._held[session] = upload

    def _fits(self, session: str, size: int) -> bool:
        """Count an object; False if its answer is too large now. Without a session Flower would look for one."""
        with self._lock:
            upload = self._held.get(session)
            if upload is None:  # the server's own
                return bool(session)
            upload.size += size
            if upload.size <= self.limit + OVERHEAD:
                return True
            self._refuse(upload.request, self._too_large())
            self._drop(upload)
            return False

    def _too_large(self) -> str:
        return f"it has more than the {self.limit:,} bytes allowed"

    def _refuse(self, request: str, reason: str) -> None:
        if len(request) == 64:  # a hash: nobody can name a request that was not sent to them
            self._refused[request] = reason
            while len(self._refused) > _MOST_REFUSALS:
                del self._refused[next(iter(self._refused))]

    def _drop(self, upload: _Upload) -> None:
        self.state.object_store.delete(upload.root)
        self.state._on_push_session_expired({upload.root})
        self._end(upload)

    def _end(self, upload: _Upload) -> None:
        self._held.pop(upload.session, None)
        self.state._cleanup_push_session(upload.session, cleanup_messages=False)


def only_answers(push: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's handler of what sites send, for their own answers only.

    Flower checks who makes the request, not whose messages are in it: one that seems the server's would not be counted.
    """
    from flwr.supercore.error import ApiErrorCode, FlowerError

    def push_messages(request: Any, state: Any) -> Any:
        for metadata in (message.metadata for message in request.messages_list):
            if not metadata.reply_to_message_id or metadata.src_node_id != request.node.node_id:
                raise FlowerError(ApiErrorCode.NO_PERMISSIONS, "a site may send answers of its own only")
        return push(request=request, state=state)

    return push_messages


def _refusal(state: Any, run: int, request: str, reason: str) -> Any:
    """The answer that the server finds in place of one that was refused."""
    from flwr.app import Error
    from flwr.app.message import make_message
    from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_ins_message

    metadata = create_message_error_unavailable_ins_message(request, run).metadata
    message = make_message(metadata=metadata, error=Error(REFUSED, reason))
    message.metadata.__dict__["_message_id"] = message.object_id
    state._store_generated_message(message)
    return message


# ----------------------------------------------------------------------------------------------------------- process


def main() -> None:
    """Flower's SuperLink behind the guard; ends when the process that started it does."""
    settings = json.load(sys.stdin)
    uploads = Uploads(settings["most_bytes"])
    connections = Connections(settings["strangers"], settings["seconds"])

    def watch() -> None:
        while os.getppid() == settings["parent"]:
            time.sleep(0.5)
            with suppress(Exception):  # whatever it was, the next may succeed
                uploads.sweep(time.time())
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    import uvicorn
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
    from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from flwr.superlink import extensions
    from flwr.superlink.servicer.fleet import fleet_handlers
    from starlette.middleware import Middleware

    def serve(*, host: str, port: int, **given: Any) -> None:
        # uvloop accepts connections where none can be counted; a header must not say who a client is.
        config = uvicorn.Config(host=host, port=port, loop="asyncio", proxy_headers=False, **given)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        places = {(family, address) for family, _, _, _, address in found}
        uvicorn.Server(config).run(sockets=[Door(family, address, connections) for family, address in places])

    guard = Middleware(
        Guard,
        secret=settings["secret"],
        keys=frozenset(settings["keys"]),
        uploads=uploads,
        connections=connections,
        # Larger arrays come in chunks; twice that leaves room for long JSON.
        largest=min(2 * FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, uploads.limit + OVERHEAD),
    )
    for kind in (InMemoryLinkState, SqlLinkState):
        uploads.bound(kind)
    fleet_handlers.push_messages = only_answers(fleet_handlers.push_messages)
    extensions.get_middleware = lambda: (guard,)  # the hook where Flower's paid extension adds its own
    # uvicorn's line per request cannot be switched off: ten a second and site would fill the disk.
    logging.getLogger("uvicorn.access").addFilter(lambda record: False)
    flower = importlib.import_module("flwr.superlink.cli.flower_superlink")  # the name is a function's too
    flower.__dict__["uvicorn"] = SimpleNamespace(run=serve)
    flower.flower_superlink()


if __name__ == "__main__":
    main()
