"""The server's end of the SuperLink, for which Flower has no public interface: a run whose ServerApp is this process.

What is used of Flower's own here, and what its public interfaces lack:

- `ControlHttpClient`: starts and stops the run, registers sites' keys, lists them. In public there is only the command
  `flwr`, which reads files of its own and has Flower start the ServerApp.
- `RuntimeHttpClient`, its interceptors, the constant of the SuperLink's number: the run's task and its messages. `Grid`
  is public, but given only to a ServerApp that Flower has started; it waits for an upload without limit, and holds all
  of it in memory before its size is known.
- `TaskIdentity`: `Message` takes its run and sender from the process, and has no argument for them.
- `build_fab_from_files`, `Fab`, `fab_to_proto`: Flower starts no run without an app.
- The head and body of an object: the sizes of what it refers to, before Flower puts it together.

What a site uses is in `fleet`, what both use in `messages`, what changes the SuperLink's own process in `superlink`.
Each imports it at its head, and says in `USED` which attributes it needs; `versions` checks both at the start.
"""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node as NodeProto
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    GetNodesRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import _get_object_body, get_object_head_values_from_object_content
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity

from fedstill.flower import messages
from fedstill.flower.records import MOST_TEXT
from fedstill.flower.superlink import ANSWERED_PATH, HOLD, KEYS_PATH, MOST_OBJECTS, OVERHEAD, SECRET_HEADER
from fedstill.flower.versions import TESTED, Used

USED: Used = {
    ControlHttpClient: ("ListNodes", "RegisterNode", "ListRuns", "StopRun", "StartRun"),
    RuntimeHttpClient: (
        "AcquireTask", "PullTaskInput", "GetNodes", "PushMessages", "PushObject", "PullMessages", "PullObject",
        "ConfirmMessageReceived", "SendTaskHeartbeat", "PushTaskOutput",
    ),
    TaskIdentity: ("_task_id", "_run_id", "_node_id"),
}  # fmt: skip

RESEND = (3, 4, 5, 8)
"""Errors of Flower's after which the same request can still be answered: message or answer lost, node away, crashed."""

_APP = f"""[project]
name = "fedstill"
version = "1.0.0"
description = "A run of fedstill"
license = {{ file = "LICENSE" }}
dependencies = ["flwr>={TESTED[0]}.0"]
[tool.flwr.app]
publisher = "fedstill"
fab-format-version = 1
flwr-version-target = "{TESTED[0]}.0"
[tool.flwr.app.components]
serverapp = "fedstill.flower.link:installed"
clientapp = "fedstill.flower.node:installed"
""".encode()
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
        # Flower does not take a key again that it has unregistered: the guard alone decides who is let in.
        self._request("POST", KEYS_PATH, json=[header_of(key) for key in keys.values()]).raise_for_status()
        with self.client(ControlHttpClient) as control:
            registered = {node.public_key for node in control.ListNodes(ListNodesRequest()).nodes_info}
            for name, key in keys.items():
                if key not in registered:
                    control.RegisterNode(RegisterNodeRequest(public_key=key, name=name))

    def answered(self) -> Iterator[list[str]]:
        """The messages that have been answered, as their answers come; often none. Ends with an httpx.HTTPError."""
        after = 0
        with self._http(seconds=HOLD + 10) as client:
            while True:
                response = client.post(ANSWERED_PATH, json=after).raise_for_status()
                found = response.json()
                after = found["after"]
                yield found["answered"]

    def _request(self, method: str, path: str, **content: Any) -> httpx.Response:
        with self._http(seconds=5) as client:
            return client.request(method, path, **content)

    def _http(self, seconds: float) -> httpx.Client:
        scheme = "http" if self.tls is None else "https"
        headers = {SECRET_HEADER: self.secret}
        return httpx.Client(
            base_url=f"{scheme}://{self.place}", verify=self.tls or True, timeout=seconds, headers=headers
        )


@dataclass(frozen=True)
class Node:
    """A connected SuperNode; `activated` changes whenever it connects anew."""

    id: int
    activated: str


class UploadAbandonedError(Exception):
    """The process that announced an answer has gone before all of it had arrived."""


class FlowerRun:
    """A run on the SuperLink whose ServerApp is this process.

    Flower would start the ServerApp itself, from an app that it installs. Ours lives in a program of its own: it takes
    the run's task and token as Flower's executor does. Clients are made without Flower's retries, which wait up to
    20 s and on a 401 send this process SIGINT.
    """

    def __init__(self, address: Address) -> None:
        run = self._start(address)
        with address.client(RuntimeHttpClient, RuntimeVersionHttpInterceptor(component_name="SuperExec")) as executor:
            task = executor.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
            while task.token and task.task.run_id != run:  # of a run that a killed server left behind
                task = executor.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
        if not task.token:
            raise httpx.RemoteProtocolError("the SuperLink gave its own server no token")
        self._client = address.client(
            RuntimeHttpClient,
            RuntimeVersionHttpInterceptor(component_name="flwr-serverapp"),
            RuntimeTokenHttpInterceptor(task.token),
        )
        given = self._client.PullTaskInput(PullTaskInputRequest())
        self._speaker = given.task_id, run, given.context.node_id
        self._id, self._node = run, NodeProto(node_id=SUPERLINK_NODE_ID)
        self._begun: dict[str, Any] = {}  # answers that are being read, which the SuperLink names only once

    @staticmethod
    def _start(address: Address) -> int:
        fab, _ = build_fab_from_files({"pyproject.toml": _APP, "LICENSE": b"Apache-2.0\n"})
        with address.client(ControlHttpClient) as control:
            for old in control.ListRuns(ListRunsRequest()).run_dict.values():
                if old.status.status != "finished":  # else sites would be given what nobody waits for
                    control.StopRun(StopRunRequest(run_id=old.run_id))
            app = fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {}))
            return int(control.StartRun(StartRunRequest(fab=app)).run_id)

    def nodes(self) -> dict[bytes, Node]:
        """The SuperNodes connected now, by public key."""
        found = self._client.GetNodes(GetNodesRequest()).nodes
        return {node.public_key: Node(node.node_id, node.last_activated_at) for node in found}

    def push(self, addressed: list[tuple[Node, RecordDict]], *, seconds: float) -> list[str]:
        """Send records to nodes; the messages' ids, in order. Arrays that several have are uploaded once."""
        with _speaking_as(*self._speaker):
            requests = [Message(records, node.id, "query", ttl=seconds) for node, records in addressed]

        def announce(heads: list[Any], trees: list[Any]) -> Any:
            return self._client.PushMessages(PushAppMessagesRequest(messages_list=heads, message_object_trees=trees))

        push, bundle = self._client.PushObject, messages.bundle(self._client)
        return list(messages.push(requests, announce, push, bundle, self._node, self._id).message_ids)

    def pull(
        self, message: str, *, most_bytes: int, seconds: float, abandoned: Callable[[], bool] = lambda: False
    ) -> Message | None:
        """The answer to a message, if there is one. ValueError when it is too large.

        `abandoned` says whether nobody uploads the rest: then UploadAbandonedError, and what has arrived stays there.
        As `Grid.pull_messages`, which however waits without limit for an upload that was announced, and holds
        everything in memory before its size can be known.
        """
        found = self._begun.pop(message, None) or self._client.PullMessages(
            PullAppMessagesRequest(message_ids=[message])
        )
        if not found.messages_list:
            return None
        answer = found.messages_list[0].metadata.message_id
        size = 0

        def counted(name: str) -> bytes:
            nonlocal size
            try:
                content = pull(name)
            except ObjectUnavailableError:
                if abandoned():
                    raise UploadAbandonedError("the rest of its answer does not come") from None
                raise
            size += len(content)
            if size > most_bytes + OVERHEAD:
                raise ValueError(f"it has more than the {most_bytes:,} bytes allowed")
            return content

        def confirm() -> None:
            self._client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=self._node, run_id=self._id, message_object_id=answer)
            )

        until = time.monotonic() + seconds
        try:
            objects = messages.object_names(found.message_object_trees[0])
            if len(objects) > MOST_OBJECTS:
                raise ValueError(f"it has {len(objects):,} parts")
            bundle = messages.bundle(self._client)
            pull = messages.object_puller(objects, self._client.PullObject, bundle, self._node, self._id)
            contents = messages.pull_contents(objects, counted, max_time=seconds, max_tries_per_object=None)
        except ValueError:
            confirm()  # else it would stay there
            raise
        except httpx.HTTPError:
            self._begun[message] = found
            raise
        except ObjectPullError:
            if time.monotonic() >= until or found.messages_list[0].HasField("error"):
                raise
            # It was refused while it arrived, and there is an error in its place.
            left = until - time.monotonic()
            return self.pull(message, most_bytes=most_bytes, seconds=left, abandoned=abandoned)
        with suppress(httpx.HTTPError):  # all of it is here
            confirm()
        _check_sizes(contents, most_bytes)
        return messages.inflated(answer, contents)

    def beat(self) -> bool:
        """Tell the SuperLink that this process lives; False when it has given the run up."""
        try:
            return bool(self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (401, 403):
                return False
            raise

    def end(self) -> None:
        """Finish the run: sites get no further requests."""
        with suppress(httpx.HTTPError):
            self._client.PushTaskOutput(PushTaskOutputRequest(sub_status="completed"))
        self._client.close()


def _check_sizes(contents: dict[str, bytes], most_bytes: int) -> None:
    """Refuse what would grow when Flower puts it together: the numbers and texts of records, which become objects, and
    arrays, which may name one of their chunks any number of times."""

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


_speaking = threading.Lock()


@contextmanager
def _speaking_as(task: int, run: int, node: int) -> Iterator[None]:
    """Message() takes its run and sender from the process; a regional server is two of them in turn."""

    with _speaking:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task, run, node
        yield


def header_of(public_key: bytes) -> str:
    """How a SuperNode states its public key (PEM) in the head of its requests."""
    return base64.b64encode(public_key).decode("ascii")
