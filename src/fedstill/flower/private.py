"""Every use of what Flower 1.41 does not promise to keep, with its reason: an upgrade of Flower is checked here.

What is used inside the SuperLink's process is in `superlink`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

# Flower reads these when it is imported; they keep it from calling home.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedstill.core.reports import cleaned
from fedstill.flower.records import MOST_TEXT
from fedstill.flower.superlink import KEYS_PATH, MOST_OBJECTS, OVERHEAD, SECRET_HEADER

_log = logging.getLogger("fedstill.flower")
logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each request
logging.getLogger("flwr").setLevel(logging.ERROR)  # else one for each message, and for each attempt to connect
# A 401 after a restart of the server only means to connect again, and node.py says so, also of a key that is not known.
logging.getLogger("flwr").addFilter(lambda record: "401 Unauthorized" not in record.getMessage())

RESEND = (3, 4, 5, 8)
"""Errors of Flower's after which the same request can still be answered: message or answer lost, node away, crashed."""

_MOST_BACKOFF = 2  # seconds between a site's attempts to reach the server

# ----------------------------------------------------------------------------------------------------- the server's end

_APP = b"""[project]
name = "fedstill"
version = "1.0.0"
description = "A run of fedstill"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41.0"]
[tool.flwr.app]
publisher = "fedstill"
fab-format-version = 1
flwr-version-target = "1.41.0"
[tool.flwr.app.components]
serverapp = "fedstill.flower.link:installed"
clientapp = "fedstill.flower.node:installed"
"""
"""Flower starts no run without an app; this one only has a name, because both its ends run already."""


@dataclass(frozen=True)
class Address:
    """Where the SuperLink of this machine answers, and what it needs to hear."""

    place: str
    tls: ssl.SSLContext | None
    secret: str

    def client(self, kind: type[Any], *interceptors: Any) -> Any:
        """A client of one of Flower's interfaces that the guard lets in, and that never retries by itself."""
        scheme = "http" if self.tls is None else "https"
        return kind(f"{scheme}://{self.place}", interceptors=[self, *interceptors], verify=self.tls or True)

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        context.request.headers[SECRET_HEADER] = self.secret
        return call_next(context)

    def answers(self) -> bool:
        """Whether the SuperLink serves requests."""
        try:
            return self._request("GET", "/health").is_success
        except httpx.TransportError:
            return False

    def admit(self, keys: Mapping[str, bytes]) -> None:
        """Let these sites in, by their public keys, and no others; also while the SuperLink runs."""
        from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest
        from flwr.supercore.control import ControlHttpClient

        # Flower does not take a key again that it has unregistered: the guard alone decides who is let in.
        self._request("POST", KEYS_PATH, json=[header_of(key) for key in keys.values()]).raise_for_status()
        with self.client(ControlHttpClient) as control:
            registered = {node.public_key for node in control.ListNodes(ListNodesRequest()).nodes_info}
            for name, key in keys.items():
                if key not in registered:
                    control.RegisterNode(RegisterNodeRequest(public_key=key, name=name))

    def _request(self, method: str, path: str, **content: Any) -> httpx.Response:
        scheme = "http" if self.tls is None else "https"
        with httpx.Client(verify=self.tls or True, timeout=5, headers={SECRET_HEADER: self.secret}) as client:
            return client.request(method, f"{scheme}://{self.place}{path}", **content)


@dataclass(frozen=True)
class Node:
    """A connected SuperNode; `activated` changes whenever it connects anew."""

    id: int
    activated: str


class FlowerRun:
    """A run on the SuperLink whose ServerApp is this process.

    Flower would start the ServerApp itself, from an app that it installs. Ours lives in a program of its own: it takes
    the run's task and token as Flower's executor does. Clients are made without Flower's retries, which wait up to
    20 s and on a 401 send this process SIGINT.
    """

    def __init__(self, address: Address) -> None:
        from flwr.common.serde import run_from_proto
        from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient
        from flwr.superlink.grid import HttpGrid

        run = self._start(address)
        with address.client(RuntimeHttpClient, RuntimeVersionHttpInterceptor(component_name="SuperExec")) as executor:
            task = executor.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
            while task.token and task.task.run_id != run:  # of a run that a killed server left behind
                task = executor.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
        if not task.token:
            raise httpx.RemoteProtocolError("the SuperLink gave its own server no token")
        self._grid = HttpGrid(address.place, token=task.token)
        self._client = self._grid._client = address.client(
            RuntimeHttpClient,
            RuntimeVersionHttpInterceptor(component_name="flwr-serverapp"),
            RuntimeTokenHttpInterceptor(task.token),
        )
        given = self._client.PullTaskInput(PullTaskInputRequest())
        self._speaker = given.task_id, run, given.context.node_id
        self._grid.set_run(run_from_proto(given.run))
        self._id = run

    @staticmethod
    def _start(address: Address) -> int:
        from flwr.cli.build import build_fab_from_files
        from flwr.common.serde import fab_to_proto
        from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest, StopRunRequest
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.fab import Fab

        fab, _ = build_fab_from_files({"pyproject.toml": _APP, "LICENSE": b"Apache-2.0\n"})
        with address.client(ControlHttpClient) as control:
            for old in control.ListRuns(ListRunsRequest()).run_dict.values():
                if old.status.status != "finished":  # else sites would be given what nobody waits for
                    control.StopRun(StopRunRequest(run_id=old.run_id))
            app = fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {}))
            return int(control.StartRun(StartRunRequest(fab=app)).run_id)

    def nodes(self) -> dict[bytes, Node]:
        """The SuperNodes connected now, by public key."""
        return {node.public_key: Node(node.node_id, node.last_activated_at) for node in self._grid.get_nodes()}

    def push(self, addressed: list[tuple[Node, RecordDict]], *, seconds: float) -> list[str]:
        """Send records to nodes; the messages' ids, in order. Arrays that several have are uploaded once."""
        with _speaking_as(*self._speaker):
            messages = [Message(records, node.id, "query", ttl=seconds) for node, records in addressed]
        return list(self._grid.push_messages(messages))

    def pull(self, message: str, *, most_bytes: int, seconds: float) -> Message | None:
        """The answer to a message, if there is one. ValueError when it is too large.

        As `Grid.pull_messages`, which however waits without limit for an upload that was announced, and holds
        everything in memory before its size can be known.
        """
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
        from flwr.supercore.inflatable.inflatable_utils import (
            ObjectPullError,
            inflate_object_from_contents,
            pull_objects,
        )

        found = self._client.PullMessages(PullAppMessagesRequest(message_ids=[message]))
        if not found.messages_list:
            return None
        answer = found.messages_list[0].metadata.message_id
        pull = make_pull_object_fn_protobuf(self._client.PullObject, self._grid.node, self._id)
        size = 0

        def counted(name: str) -> bytes:
            nonlocal size
            content = pull(name)
            size += len(content)
            if size > most_bytes + OVERHEAD:
                raise ValueError(f"it has more than the {most_bytes:,} bytes allowed")
            return content

        def confirm() -> None:
            self._client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=self._grid.node, run_id=self._id, message_object_id=answer)
            )

        until = time.monotonic() + seconds
        try:
            objects = [node.object_id for node in iterate_object_tree(found.message_object_trees[0])]
            if len(objects) > MOST_OBJECTS:
                raise ValueError(f"it has {len(objects):,} parts")
            contents = pull_objects(
                objects, counted, max_time=seconds, max_tries_per_object=None, initial_backoff=0.05, backoff_cap=1
            )
        except ValueError:
            confirm()  # else it would stay there
            raise
        except ObjectPullError:
            if time.monotonic() >= until or found.messages_list[0].HasField("error"):
                raise
            # It was refused while it arrived, and there is an error in its place.
            return self.pull(message, most_bytes=most_bytes, seconds=until - time.monotonic())
        confirm()
        _check_sizes(contents, most_bytes)
        message_ = inflate_object_from_contents(answer, contents)
        if not isinstance(message_, Message):
            raise ValueError("it is no message")
        return message_

    def beat(self) -> bool:
        """Tell the SuperLink that this process lives; False when it has given the run up."""
        from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

        try:
            return bool(self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (401, 403):
                return False
            raise

    def end(self) -> None:
        """Finish the run: sites get no further requests."""
        from flwr.proto.runtime_pb2 import PushTaskOutputRequest

        with suppress(httpx.HTTPError):
            self._client.PushTaskOutput(PushTaskOutputRequest(sub_status="completed"))
        self._grid.close()


def _check_sizes(contents: dict[str, bytes], most_bytes: int) -> None:
    """Refuse what would grow when Flower puts it together: the numbers and texts of records, which become objects, and
    arrays, which may name one of their chunks any number of times."""
    from flwr.supercore.inflatable.inflatable_object import _get_object_body, get_object_head_values_from_object_content

    size = text = 0
    for content in contents.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        text += len(content) if kind != "ArrayChunk" else 0
        if text > MOST_TEXT + OVERHEAD:
            raise ValueError(f"it has more than {MOST_TEXT:,} bytes beside its tensors")
        if kind == "Array":
            size += sum(len(contents[children[i]]) for i in json.loads(_get_object_body(content))["arraychunk_ids"])
    if size > most_bytes + OVERHEAD:
        raise ValueError(f"its arrays have {size:,} bytes, more than the {most_bytes:,} allowed")


# --------------------------------------------------------------------------------------------------------- a site's end


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
    """Flower's SuperNode until it loses its place at the SuperLink; Refusal if it finds none.

    `pushed` is called whenever all answers are at the server; it may raise, to end this.

    Flower's SuperNode leaves a message to a ClientApp in another process and polls until that has answered. Here the
    ClientApp is called in its stead, so one process lives as long as the site and no local port is opened.
    """
    import flwr.supercore.interceptors.http.runtime_version as version
    import flwr.supernode.fleet_http_connection as connection
    import flwr.supernode.start_client_internal as node
    from flwr.supercore.exit import ExitCode
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supernode.nodestate import NodeStateFactory

    app = ClientApp()
    idle_since = time.monotonic()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        content = answer(message.content)
        with _speaking_as(0, message.metadata.run_id, message.metadata.dst_node_id):
            return Message(content, reply_to=message)

    def answer_and_push(*, state: Any, object_store: Any, **network: Any) -> None:
        nonlocal idle_since
        for bare in state.get_messages_legacy(is_reply=False):
            state.record_message_processing_start(bare.metadata.message_id)
            message, context = _inflated(bare, object_store), Context(0, 0, {}, RecordDict(), {})
            node._insert_message(app(message, context), state, object_store)
            state.record_message_processing_end(bare.metadata.message_id)
        push(state=state, object_store=object_store, **network)
        pushed()
        idle_since = time.monotonic()

    @contextmanager
    def connect(server: str, insecure: bool, ca: Any, _: Any, *limits: Any) -> Iterator[Any]:
        # With our key also where there is no TLS: start_client_internal refuses that, and would make a new one.
        with activate(server, insecure, ca, (key, key.public_key()), *limits) as callbacks:
            connected(callbacks[0])
            yield callbacks

    def refuse(code: int, reason: str | None = None, **_: Any) -> NoReturn:
        error = sys.exc_info()[1]
        if isinstance(error, Refusal):
            raise error
        status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None
        raise Refusal(cleaned(reason), 426 if code == ExitCode.RUNTIME_VERSION_INCOMPATIBLE else status)

    push, activate = node._push_messages, connection.http_request_response
    if predecessor is not None:
        _sign_off(server, ca, key, predecessor)
    # Flower's own: sleeps of 3 s, and of 1 s where a message's parts come a moment after it; handlers and exits that
    # end the process within 5 s; SIGINT to itself on a 401.
    pull = partial(pull_objects, initial_backoff=0.05, backoff_cap=1)
    harmless = SimpleNamespace(getpid=os.getpid, kill=lambda *_: None)
    brisk = SimpleNamespace(sleep=lambda _: time.sleep(pause(time.monotonic() - idle_since)))
    with (
        patch.multiple(node, _push_messages=answer_and_push, http_request_response=connect, time=brisk),
        patch.object(node, "pull_objects", pull),
        patch.object(node, "register_signal_handlers", lambda **_: None),
        patch.multiple(connection, flwr_exit=refuse, HeartbeatSender=_heartbeat, os=harmless),
        patch.object(connection, "make_simple_http_retry_invoker", _retry_invoker),
        patch.object(version, "flwr_exit", refuse),
    ):
        node.start_client_internal(
            state_factory=NodeStateFactory(objectstore_factory=ObjectStoreFactory()),
            server_address=server,
            root_certificates=ca,
            insecure=ca is None,
            node_config={},
            isolation="process",
        )


_speaking = threading.Lock()


@contextmanager
def _speaking_as(task: int, run: int, node: int) -> Iterator[None]:
    """Message() takes its run and sender from the process; a regional server is two of them in turn."""
    from flwr.supercore.task_identity import TaskIdentity

    with _speaking:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task, run, node
        yield


def pause(waited: float) -> float:
    """Seconds until the next look: short at first, and never more than a twentieth of the wait so far, or a second."""
    return min(1.0, max(0.1, waited / 20))


def _inflated(bare: Message, store: Any) -> Message:
    """A message that the SuperNode has received, with its content; Flower hands that out over HTTP only."""
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    name = bare.metadata.message_id
    contents = {part.object_id: store.get(part.object_id) for part in iterate_object_tree(store.get_object_tree(name))}
    message = inflate_object_from_contents(name, contents)
    assert isinstance(message, Message)
    message.metadata.__dict__["_message_id"] = name  # not part of what is sent, as it is its hash
    store.delete(name)
    return message


def _sign_off(server: str, ca: bytes | None, key: ec.EllipticCurvePrivateKey, node_id: int) -> None:
    """End the session of a killed process: for a minute the SuperLink thinks it alive and would refuse a second."""
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    signed: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperNode")]
    signed += [NodeAuthHttpInterceptor(key, key.public_key())]
    with suppress(httpx.HTTPError), FleetHttpClient.from_server_address(server, ca is None, ca, signed) as client:
        client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))


def _heartbeat(beat: Callable[[], bool]) -> Any:
    """Flower's heartbeats, which no error ends: else a site would work on, but get no requests any more."""
    from flwr.supercore.heartbeat import HeartbeatSender

    def steady() -> bool:
        try:
            return beat()
        except Exception:  # noqa: BLE001 (whatever it was, the next one may succeed, and pulling messages tells if none does)
            return False

    return HeartbeatSender(steady)


def _retry_invoker() -> Any:
    """Flower's retries of single requests, with shorter waits; a 401 is left to us instead of a SIGINT."""
    from flwr.supercore.retry import exponential, make_simple_http_retry_invoker

    invoker = make_simple_http_retry_invoker()
    giveup, backoff = invoker.should_giveup, invoker.on_backoff
    invoker.wait_gen_factory = lambda: exponential(max_delay=_MOST_BACKOFF)

    def ours(error: Exception) -> bool:
        unknown = isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.UNAUTHORIZED
        return unknown or (giveup is not None and giveup(error))

    def warn_once(state: Any) -> None:
        if state.tries == 1:
            _log.warning("the server does not answer (%s); trying until it does", state.exception)
        if backoff is not None:
            backoff(state)

    invoker.should_giveup, invoker.on_backoff = ours, warn_once
    return invoker


def header_of(public_key: bytes) -> str:
    """How a SuperNode states its public key (PEM) in the head of its requests."""
    return base64.b64encode(public_key).decode("ascii")
