"""What is used, or replaced, of Flower's own in the SuperLink's process; `versions` checks that it is there."""

from __future__ import annotations

import importlib
from typing import Any

from flwr.app import message as messages
from flwr.common import constant as common
from flwr.proto import message_pb2, recorddict_pb2
from flwr.server.superlink.linkstate import utils
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore import constant, date
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable import inflatable_object
from flwr.supercore.primitives import asymmetric
from flwr.superlink import extensions
from flwr.superlink import main as superlink_app
from flwr.superlink.servicer.fleet import fleet_handlers

from fedstill.flower.versions import Used

flower_superlink: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")  # the name is a function's too

_STATE = (
    "store_message_and_object_tree", "store_object", "get_message_ins", "get_message_res", "delete_messages",
    "object_store",
    "preregister_object_tree", "get_node_id_by_public_key", "_cleanup_push_session", "_on_push_session_expired",
    "_store_generated_message",
)  # fmt: skip

USED: Used = {
    superlink_app: ("_get_middleware",),
    InMemoryLinkState: _STATE,
    SqlLinkState: _STATE,
    extensions: ("get_middleware",),
    fleet_handlers: ("push_messages", "push_object", "pull_object"),
    message_pb2: ("PullObjectRequest", "PushObjectRequest"),
    recorddict_pb2: ("BytesList",),
    flower_superlink: ("flower_superlink", "uvicorn"),
    ApiErrorCode: ("NO_PERMISSIONS",),
    FlowerError: ("from_json",),
    messages: ("make_message",),
    utils: ("create_message_error_unavailable_ins_message",),
    inflatable_object: ("iterate_object_tree",),
    common: ("FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", "SYSTEM_TIME_TOLERANCE", "TIMESTAMP_HEADER", "TIMESTAMP_TOLERANCE"),
    constant: ("FLEET_HTTP_PUBLIC_KEY_HEADER", "FLEET_HTTP_SIGNATURE_HEADER"),
    date: ("now",),
    asymmetric: ("bytes_to_public_key", "verify_signature"),
}
