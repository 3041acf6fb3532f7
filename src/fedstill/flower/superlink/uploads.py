"""What sites have sent and the SuperLink stores, within bounds."""

from __future__ import annotations

import threading
import time
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedstill.flower.superlink import MOST_OBJECTS, OVERHEAD, REFUSED
from fedstill.flower.superlink.waiting import Waiting

_MOST_ANSWERS = 2  # of a site: one that the server reads, and one that arrives
_MOST_REFUSALS = 10_000  # that are remembered


@dataclass
class _Upload:
    """An answer of a site that is stored here, whole or in part."""

    node: int
    root: str  # its message, and the object that holds all others
    request: str  # the message that it answers
    session: str
    until: float  # when nobody waits for it any more
    size: int = 0
    missing: set[str] = field(default_factory=set)  # objects that have not arrived


class Uploads:
    """What sites have sent and the server has not taken yet, in bounds.

    Flower keeps every object until somebody confirms it: answers that are refused, too late or never read would stay.
    Here an answer above `limit` bytes is deleted while it arrives, and the server gets an error in its place; a
    site has at most two, a further one takes the place of the oldest; and each ends with the time of its request.
    """

    def __init__(self, limit: int, waiting: Waiting) -> None:
        self.limit, self._waiting = limit, waiting
        self.state: Any = None
        self._uploads: dict[str, _Upload] = {}  # by session, oldest first
        self._refused: dict[str, str] = {}  # why, by the message that was answered
        self._delivered: dict[int, Any] = {}  # the last message that each site was given
        self._announced: dict[str, int] = {}  # the server's messages that are not there yet, and for whom
        self._pending: dict[int, set[str]] = {}  # those that are, and were not looked for yet
        self._lock = threading.RLock()

    def bound(self, kind: Any) -> None:
        """Have Flower's state, of this class, count what it stores."""
        store, put, delete = kind.store_message_and_object_tree, kind.store_object, kind.delete_messages
        requests, answers = kind.get_message_ins, kind.get_message_res

        def store_message(state: Any, message: Any, object_tree: Any, session_id: str) -> tuple[bool, list[str]]:
            self.state = state
            if not message.metadata.reply_to_message_id:
                found: tuple[bool, list[str]] = store(state, message, object_tree, session_id)
                self._announce(message.metadata, found[1])
                return found
            stored, missing = False, list[str]()
            if self._acceptable(message.metadata, object_tree):
                stored, missing = store(state, message, object_tree, session_id)
            if not stored and self._under_way(message.metadata):
                # Announced again, as our answer was lost; Flower has forgotten the request when the server pulls.
                stored, missing = True, state.preregister_object_tree(object_tree, session_id)
            if stored:
                self._begin(message.metadata, session_id, missing)
            else:  # else Flower would remember the session for ever
                state._cleanup_push_session(session_id, cleanup_messages=False)
            return stored, missing

        def store_object(state: Any, run_id: int, session_id: str, object_id: str, content: bytes) -> bool:
            fits = self._fits(session_id, object_id, len(content))
            stored = fits and put(state, run_id, session_id, object_id, content)
            if stored or state.object_store.get(object_id):  # of a site that sends the same
                self._arrived(session_id, object_id)
            return bool(stored)

        def get_requests(state: Any, node_id: int, limit: int | None, **options: Any) -> list[Any]:
            with self._lock:
                before = set(self._pending.get(node_id, ()))
            self.state, found = state, requests(state, node_id, limit, **options)
            if limit is None:  # the server's own
                return found  # type: ignore[no-any-return]
            if found:
                self._delivered[node_id] = found[-1]
                self._deliver(node_id, found[-1].metadata.message_id)
            elif (lost := self._unconfirmed(node_id)) is not None:
                return [lost]
            else:
                self._forget(node_id, before)  # what had been there has ended; what came meanwhile has not
            return found  # type: ignore[no-any-return]

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
        kind.get_message_ins, kind.get_message_res, kind.delete_messages = get_requests, get_answers, delete_messages

    def waits(self, key: str) -> int | None:
        """The number of the site with this key, if it has nothing to get as far as is known."""
        node = self._node_of(key)
        return None if node is None or self._unconfirmed(node) is not None else node

    def _node_of(self, key: str) -> int | None:
        return self.state.get_node_id_by_public_key(b64decode(key)) if self.state is not None else None

    def _unconfirmed(self, node: int) -> Any:
        """The last message of a site that it has not confirmed: when it looks for another, the line was cut."""
        if (message := self._delivered.get(node)) is None or time.time() > _end(message.metadata):
            return None
        return message if message.metadata.message_id in self.state.object_store else None

    def _announce(self, metadata: Any, missing: list[str]) -> None:
        if metadata.message_id in missing:  # its own object comes last
            self._announced[metadata.message_id] = metadata.dst_node_id
        else:
            self._notify(metadata.dst_node_id, metadata.message_id)

    def _notify(self, node: int, message: str) -> None:
        with self._lock:
            self._pending.setdefault(node, set()).add(message)
        self._waiting.message_for(node)

    def _deliver(self, node: int, message: str) -> None:
        with self._lock:
            more = self._pending.get(node, set())
            more.discard(message)
        if more:
            self._waiting.message_for(node)

    def _forget(self, node: int, messages: set[str]) -> None:
        with self._lock:
            self._pending.get(node, set()).difference_update(messages)

    def refuse_newest(self, key: str) -> None:
        """A part of the answer that a site is sending is too large by itself."""
        with self._lock:
            node = self._node_of(key)
            mine = [upload for upload in self._uploads.values() if upload.node == node]
            if mine:
                self._refuse(mine[-1].request, self._too_large())
                self._drop(mine[-1])

    def sweep(self, now: float) -> None:
        """Delete what nobody waits for, and forget what the server has taken."""
        with self._lock:
            for upload in list(self._uploads.values()):
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

    def _under_way(self, metadata: Any) -> bool:
        with self._lock:
            known = {(upload.root, upload.node) for upload in self._uploads.values()}
            root = metadata.message_id
            return (root, metadata.src_node_id) in known and root in self.state.object_store

    def _begin(self, metadata: Any, session: str, missing: list[str]) -> None:
        root, request = metadata.message_id, metadata.reply_to_message_id
        upload = _Upload(metadata.src_node_id, root, request, session, _end(metadata), missing=set(missing))
        with self._lock:
            self.sweep(time.time())
            mine = [other for other in self._uploads.values() if other.node == upload.node]
            for other in [other for other in mine if other.root == root]:
                upload.size = other.size  # sent again, because our answer was lost: its objects stay
                self._uploads.pop(other.session)
                mine.remove(other)
            for other in mine[: max(0, len(mine) - _MOST_ANSWERS + 1)]:
                self._drop(other)
            self._uploads[session] = upload
        if not missing:
            self._waiting.answer_to(request)

    def _arrived(self, session: str, name: str) -> None:
        if (node := self._announced.pop(name, None)) is not None:
            self._notify(node, name)
        with self._lock:
            upload = self._uploads.get(session)
            if upload is not None and name in upload.missing:
                upload.missing.discard(name)
                if not upload.missing:
                    self._waiting.answer_to(upload.request)

    def _fits(self, session: str, name: str, size: int) -> bool:
        """Count an object; False if its answer is too large now. Without a session Flower would look for one.

        One that is not missing is not counted, and Flower does not store it: it came before, and its receipt was lost.
        """
        with self._lock:
            upload = self._uploads.get(session)
            if upload is None:  # the server's own
                return bool(session)
            if name not in upload.missing:
                return True
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
            self._waiting.answer_to(request)
            while len(self._refused) > _MOST_REFUSALS:
                del self._refused[next(iter(self._refused))]

    def _drop(self, upload: _Upload) -> None:
        self.state.object_store.delete(upload.root)
        self.state._on_push_session_expired({upload.root})
        self._end(upload)

    def _end(self, upload: _Upload) -> None:
        self._uploads.pop(upload.session, None)
        self.state._cleanup_push_session(upload.session, cleanup_messages=False)


def _end(metadata: Any) -> float:
    """The moment after which nobody waits for an answer."""
    return float(metadata.created_at + metadata.ttl)


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
