"""Who may ask the SuperLink for what, and how much at once."""

from __future__ import annotations

import asyncio
import datetime
import hmac
import json
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedstill.flower.superlink import (
    ANSWERED_PATH,
    BUNDLE,
    HOLD,
    KEYS_PATH,
    OVERHEAD,
    PUSH_PATH,
    SECRET_HEADER,
    bundles,
)
from fedstill.flower.superlink.connections import Connections
from fedstill.flower.superlink.uploads import Uploads
from fedstill.flower.superlink.waiting import Waiting

_MOST_BODIES = 2  # of a site that are in memory at once; others wait on the wire
_MOST_REQUESTS = 32  # of a site at once
_SMALL = 1 << 16  # bytes of a body for which the signature of its connection's first request will do
_MOST_METADATA = 2 << 20  # bytes of any body but an object's
_STALL = 30.0  # seconds without a byte of a body


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
    waiting: Waiting
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
            if scope["path"] == ANSWERED_PATH:
                after = int(json.loads(await _body(receive) or b"0"))
                found = await self.waiting.for_answers(after, HOLD, receive)
                await _respond_with(send, json.dumps(found).encode(), b"application/json")
            elif scope["path"] == KEYS_PATH:
                if (body := await _body(receive)) is None:
                    return
                self.keys = frozenset(json.loads(body))
                self.connections.close_all_but(self.keys)
                await _respond(send, 204)
            elif scope["path"] in bundles.PATHS:
                await self._bundle(None, scope, receive, send)
            else:
                await self.app(scope, receive, send)
            return
        key, status = await self._refusal(scope["path"], headers, client)
        if status:
            await _respond(send, status)
            return
        self._running[key] += 1
        try:
            bounded = self._unstalled(receive, client)
            if scope["path"] in bundles.PATHS:
                await self._bundle(key, scope, bounded, send)
            elif scope["path"].endswith("/pull-messages"):
                await self._hold(key, scope, bounded, send)
            else:
                await self._pass_on(key, scope, bounded, send)
        finally:
            self._running[key] -= 1

    async def _refusal(self, path: str, headers: Mapping[str, str], client: tuple[str, int]) -> tuple[str, int]:
        """The key that a request is signed with, and a status if it is not let in."""
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

        key, length = headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER.lower(), ""), headers.get("content-length", "")
        bundle = path in bundles.PATHS
        if (not path.startswith("/v1/fleet/") and not bundle) or path.endswith("/register-node"):
            return key, 404
        if key not in self.keys:
            return key, 401
        if not length.isdecimal() or "transfer-encoding" in headers:
            return key, 411
        if self.connections.owner(client) != key or int(length) > _SMALL or bundle:  # which Flower does not check
            if not await asyncio.to_thread(_signed, headers):
                return key, 401
            self.connections.admit(client, key)
        if int(length) > self._most(path):
            if path not in bundles.PATHS or path == PUSH_PATH:
                await asyncio.to_thread(self.uploads.refuse_newest, key)
            return key, 413
        return key, 503 if self._running[key] >= _MOST_REQUESTS else 0

    def _most(self, path: str) -> int:
        """Bytes of a body."""
        if path == PUSH_PATH:
            return max(BUNDLE + OVERHEAD, min(self.largest, 2 * BUNDLE))
        if path in bundles.PATHS:
            return _SMALL
        return self.largest if path.endswith("/push-object") else _MOST_METADATA

    async def _hold(self, key: str, scope: Any, receive: Any, send: Any) -> None:
        """A site's look for messages waits until there is one, so that it need not look again and again.

        If the site is gone before that, nothing is looked up for it: Flower would take the message for delivered.
        """
        if (body := await _body(receive)) is None:
            return
        node = await asyncio.to_thread(self.uploads.waits, key)
        if node is not None and not await self.waiting.for_message(node, HOLD, receive):
            return
        if key not in self.keys:  # revoked meanwhile
            await _respond(send, 401)
            return
        await self.app(scope, _again(body, receive), send)

    async def _bundle(self, key: str | None, scope: Any, receive: Any, send: Any) -> None:
        """Several objects at once, for a site or, without a key, for the server."""
        async with self._bodies.setdefault(key or "", asyncio.Semaphore(_MOST_BODIES)):
            if (body := await _body(receive)) is None:
                return
            if key is not None and key not in self.keys:  # revoked meanwhile
                await _respond(send, 401)
                return
            state = scope["app"].state.linkstate_factory.state()
            try:
                found = await asyncio.to_thread(self._bundled, scope["path"], body, state, key)
            except ValueError:
                await _respond(send, 400)
                return
        await _respond_with(send, found, b"application/protobuf")

    def _bundled(self, path: str, body: bytes, state: Any, key: str | None) -> bytes:
        node = None if key is None else state.get_node_id_by_public_key(b64decode(key))
        if key is not None and node is None:
            raise ValueError("no site has this key")
        return bundles.answers(path, body, state, node)

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


async def _body(receive: Any) -> bytes | None:
    """All of a body; None if the client has gone before that."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


def _again(body: bytes, receive: Any) -> Any:
    """What gives a body that was read already, and then what follows it."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Any:
        return parts.pop() if parts else await receive()

    return received


async def _respond_with(send: Any, body: bytes, kind: bytes) -> None:
    head = [(b"content-length", str(len(body)).encode()), (b"content-type", kind)]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


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
