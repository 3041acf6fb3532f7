"""Messages as Flower sends them, by either end: as objects that are named by their hash, large arrays as several.

A large object is a request of its own, small ones go together. One that the SuperLink has is not sent again: neither
after a cut of the line, nor to a second site.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse, PushObjectRequest, PushObjectResponse
from flwr.proto.recorddict_pb2 import BytesList
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
from flwr.supercore.protobuf.client import ProtobufClient

from fedstill.flower.superlink import BUNDLE, MOST_TOGETHER, PULL_PATH, PUSH_PATH
from fedstill.flower.versions import Used

logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each request
logging.getLogger("flwr").setLevel(logging.ERROR)  # else one for each message
# A 401 after a restart of the server only means to connect again, and node.py says so, also of a key that is not known.
logging.getLogger("flwr").addFilter(lambda record: "401 Unauthorized" not in record.getMessage())

USED: Used = {inflatable_utils: ("push_objects", "pull_objects"), ProtobufClient: ("_unary_unary",)}
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0  # seconds: parts may come a moment after their message


_MOST_CONNECTIONS, _OBJECTS_EACH = 4, 8  # of one message
Bundle = Callable[[str, BytesList], BytesList]
"""What sends several requests for objects as one; the answers to the first of them."""


def bundle(client: ProtobufClient) -> Bundle:
    """Bundles through one of Flower's clients."""
    return lambda path, requests: client._unary_unary(
        path=path, rpc_method=path, request=requests, response_type=BytesList
    )


def push(
    messages: Sequence[Message],
    announce: Callable[[list[Any], list[Any]], Any],
    push_object: Callable[[Any], Any],
    push_bundle: Bundle,
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
        session = {"node": node, "run_id": run, "session_id": answer.session_id}
        send = make_push_object_fn_protobuf(push_object, **session)
        upload(objects, set(answer.objects_to_push), send, push_bundle, session)
    return answer


def upload(
    objects: dict[str, Any],
    missing: set[str],
    send: Callable[[str, bytes], None],
    push_bundle: Bundle,
    session: dict[str, Any],
) -> None:
    """Send the objects that are missing there: parts of large arrays by themselves, and first; the others together."""
    large = _large(objects[name] for name in missing)
    small = [name for name in objects if name in missing and not (large and isinstance(objects[name], ArrayChunk))]
    requests = (
        PushObjectRequest(object_id=name, object_content=objects.pop(name).deflate(), **session) for name in small
    )
    missing = missing.difference(small)
    inflatable_utils.push_objects(
        objects, send, object_ids_to_push=missing, max_concurrent_pushes=_connections(len(missing))
    )
    for together in _bundles(requests):
        found = [PushObjectResponse.FromString(each).stored for each in _answers(push_bundle, PUSH_PATH, together)]
        for i, request in enumerate(together):
            if not any(found[i : i + 1]):
                send(request.object_id, request.object_content)


def _large(objects: Iterable[Any]) -> bool:
    """Whether the parts of arrays are sent one by one, so that a line that is cut loses one of them only."""
    return sum(len(part.data) for part in objects if isinstance(part, ArrayChunk)) > BUNDLE // 2


def _bundles(requests: Iterable[Any]) -> Iterator[list[Any]]:
    """Requests in their order, as many together as make one of usual size."""
    together, size = list[Any](), 0
    for request in requests:
        if len(together) == MOST_TOGETHER or (together and size + request.ByteSize() > BUNDLE):
            yield together
            together, size = [], 0
        together.append(request)
        size += request.ByteSize()
    if together:
        yield together


def _answers(send: Bundle, path: str, requests: Sequence[Any]) -> list[bytes]:
    """Answers to the first of some requests; none where there is only one, which is as well made by itself."""
    if len(requests) < 2:
        return []
    return list(send(path, BytesList(vals=[request.SerializeToString() for request in requests])).vals)


def object_names(tree: Any) -> list[str]:
    """The names of the objects that a message consists of."""
    return [part.object_id for part in iterate_object_tree(tree)]


def object_puller(
    names: Sequence[str], pull_object: Callable[[Any], Any], pull_bundle: Bundle, node: Any, run: int
) -> Callable[[str], bytes]:
    """What fetches each of some objects; those that are small, and there already, come at once."""
    names = names[: -MOST_TOGETHER - 1 : -1]  # the parts of arrays, which may be large, come first: they go last
    requests = [PullObjectRequest(node=node, run_id=run, object_id=name) for name in names]
    found = [PullObjectResponse.FromString(each) for each in _answers(pull_bundle, PULL_PATH, requests)]
    there = {name: each.object_content for name, each in zip(names, found, strict=False) if each.object_available}
    by_itself = make_pull_object_fn_protobuf(pull_object, node, run)
    return lambda name: there.pop(name) if name in there else by_itself(name)


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
