"""What sites have sent and the SuperLink stores, within bounds."""

from __future__ import annotations

import threading
import time
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedstill.flower.superlink import MOST_OBJECTS, OVERHEAD, REFUSED

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


class Uploads:
    """What sites have sent and the server has not taken yet, in bounds.

    Flower keeps every object until somebody confirms it: answers that are refused, too late or never read would stay.
    Here an answer above `limit` bytes is deleted while it arrives, and the server gets an error in its place; a
    site has at most two, a further one takes the place of the oldest; and each ends with the time of its request.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.state: Any = None
        self._uploads: dict[str, _Upload] = {}  # by session, oldest first
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
            if not stored and self._under_way(message.metadata):
                # Announced again, as our answer was lost; Flower has forgotten the request when the server pulls.
                stored, missing = True, state.preregister_object_tree(object_tree, session_id)
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

    def _begin(self, metadata: Any, session: str) -> None:
        root, until = metadata.message_id, metadata.created_at + metadata.ttl
        upload = _Upload(metadata.src_node_id, root, metadata.reply_to_message_id, session, until)
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

    def _fits(self, session: str, size: int) -> bool:
        """Count an object; False if its answer is too large now. Without a session Flower would look for one."""
        with self._lock:
            upload = self._uploads.get(session)
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
        self._uploads.pop(upload.session, None)
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
