"""Several objects of messages in one request.

Flower makes a request of each object, and a message of one tensor has six, most of them shorter than the head of the
request. Here Flower's own handlers answer many of its requests at once; whatever is not answered here, as it is large
or as Flower refuses it, is then requested by itself.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fedstill.flower.superlink import BUNDLE, MOST_TOGETHER, PULL_PATH, PUSH_PATH

PATHS = (PULL_PATH, PUSH_PATH)


def answers(path: str, body: bytes, state: Any, node: int | None) -> bytes:
    """Answers to the first of the requests in a body, as many as fit; ValueError if they are not this site's.

    `node` is the number of the site that makes them; None: they are the server's own.
    """
    from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest
    from flwr.proto.recorddict_pb2 import BytesList
    from flwr.supercore.error import FlowerError
    from flwr.superlink.servicer.fleet import fleet_handlers
    from google.protobuf.message import DecodeError

    handlers: dict[str, tuple[Any, Any]] = {
        PULL_PATH: (PullObjectRequest, fleet_handlers.pull_object),
        PUSH_PATH: (PushObjectRequest, fleet_handlers.push_object),
    }
    kind, handle = handlers[path]
    try:
        contents = BytesList.FromString(body).vals
        if len(contents) > MOST_TOGETHER:
            raise ValueError(f"more than {MOST_TOGETHER} at once")
        requests = [kind.FromString(content) for content in contents]
    except DecodeError as error:
        raise ValueError("these are no requests") from error
    if node is not None and any(request.node.node_id != node for request in requests):
        raise ValueError("a site makes requests of its own")
    found, size = list[bytes](), 0
    with suppress(FlowerError, LookupError):  # such as of a run that it does not know
        for request in requests:
            answer = handle(request=request, state=state)
            size += answer.ByteSize()
            if size > BUNDLE:
                break
            found.append(answer.SerializeToString())
    return bytes(BytesList(vals=found).SerializeToString())
