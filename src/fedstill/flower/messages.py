"""Messages as Flower sends them, by either end: as objects that are named by their hash, large arrays as several.

Each object is a request of its own, and one that the SuperLink has is not sent again: neither after a cut of the line,
nor to a second site.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedstill.flower.versions import Used

logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each request
logging.getLogger("flwr").setLevel(logging.ERROR)  # else one for each message
# A 401 after a restart of the server only means to connect again, and node.py says so, also of a key that is not known.
logging.getLogger("flwr").addFilter(lambda record: "401 Unauthorized" not in record.getMessage())

USED: Used = {inflatable_utils: ("push_objects", "pull_objects")}
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0  # seconds: parts may come a moment after their message


_MOST_CONNECTIONS, _OBJECTS_EACH = 4, 8  # of one message


def push(
    messages: Sequence[Message],
    announce: Callable[[list[Any], list[Any]], Any],
    push_object: Callable[[Any], Any],
    node: Any,
    run: int,
) -> Any:
    """Announce messages, and send those of their objects that are missing there; what was answered to `announce`."""
    with no_object_id_recompute():
        objects: dict[str, Any] = {}
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id  # which Message() leaves empty
            objects |= get_all_nested_objects(message)
        heads = [message_to_proto(remove_content_from_message(message)) for message in messages]
        answer = announce(heads, [get_object_tree(message) for message in messages])
        send = make_push_object_fn_protobuf(push_object, node, run, answer.session_id)
        missing = set(answer.objects_to_push)
        inflatable_utils.push_objects(
            objects, send, object_ids_to_push=missing, max_concurrent_pushes=_connections(len(missing))
        )
    return answer


def object_names(tree: Any) -> list[str]:
    """The names of the objects that a message consists of."""
    return [part.object_id for part in iterate_object_tree(tree)]


def object_puller(pull_object: Callable[[Any], Any], node: Any, run: int) -> Callable[[str], bytes]:
    """What fetches an object by its name."""
    return make_pull_object_fn_protobuf(pull_object, node, run)


def pull_contents(names: list[str], pull: Callable[[str], bytes], **limits: Any) -> dict[str, bytes]:
    """The objects' contents, by name; Flower waits a second and more where parts come a moment later."""
    return inflatable_utils.pull_objects(
        names, pull, max_concurrent_pulls=_connections(len(names)), initial_backoff=_FIRST_WAIT,
        backoff_cap=_LONGEST_WAIT, **limits
    )  # fmt: skip


def _connections(objects: int) -> int:
    """How many requests for so many objects are made at once: each costs a connection, a handshake and a signature.

    >>> _connections(6), _connections(20), _connections(1000)
    (1, 3, 4)
    """
    return max(1, min(_MOST_CONNECTIONS, -(-objects // _OBJECTS_EACH)))


def inflated(name: str, contents: dict[str, bytes]) -> Message:
    """The message that these objects make."""
    message = inflate_object_from_contents(name, contents)
    if not isinstance(message, Message):
        raise ValueError("it is no message")
    return message


def pause(waited: float) -> float:
    """Seconds until the next look: short at first, and never more than a twentieth of the wait so far, or a second."""
    return min(1.0, max(0.1, waited / 20))
