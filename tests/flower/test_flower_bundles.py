"""Small objects of a message go in one request, large parts of arrays by themselves, and nothing is lost on the way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("flwr")

import httpx
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse, PushObjectRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.recorddict_pb2 import BytesList
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.superlink import main as superlink_app
from starlette.middleware import Middleware

from fedstill.flower import messages, private
from fedstill.flower.fleet import _Session
from fedstill.flower.superlink import BUNDLE, MOST_TOGETHER, PULL_PATH, PUSH_PATH, bundles
from fedstill.flower.superlink.middlewares import PATHS, name_of, only_where_needed

SITE = Node(node_id=7)


class SuperLink:
    """Stores what is sent to it, and counts its requests."""

    def __init__(self, *, bundles: bool = True) -> None:
        self.objects, self.single, self.together = dict[str, bytes](), list[str](), list[list[str]]()
        self._bundles = bundles

    def announce(self, heads: list[Any], trees: list[Any]) -> Any:
        self.names = [part.object_id for tree in trees for part in iterate_object_tree(tree)]
        return SimpleNamespace(session_id="session", objects_to_push=self.names)

    def push(self, request: Any) -> Any:
        self.single.append(request.object_id)
        self.objects[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def pull(self, request: Any) -> Any:
        self.single.append(request.object_id)
        return PullObjectResponse(
            object_found=True, object_available=True, object_content=self.objects[request.object_id]
        )

    def bundle(self, path: str, requests: Any) -> Any:
        if not self._bundles:
            return BytesList()
        kind = PushObjectRequest if path == PUSH_PATH else PullObjectRequest
        made: list[Any] = [kind.FromString(each) for each in requests.vals]
        handle = self.push if path == PUSH_PATH else self.pull
        before = list(self.single)
        answers = [handle(request).SerializeToString() for request in made]
        self.single[:] = before
        self.together.append([request.object_id for request in made])
        return BytesList(vals=answers)


def message(size: int, parts: int = 1) -> Message:
    draw = np.random.default_rng(0)
    arrays = {str(i): Array(draw.random(size, dtype=np.float32)) for i in range(parts)}
    records = RecordDict({"tensors": ArrayRecord(arrays), "tree": ConfigRecord({"json": "{}"})})
    with private._speaking_as(1, 1, 1):
        return Message(records, reply_to=Message(RecordDict(), 7, "query"))


def sent(link: SuperLink, what: Message) -> Message:
    """A message after it was pushed and pulled through a SuperLink."""
    name = what.object_id
    messages.push([what], link.announce, link.push, link.bundle, SITE, 1)
    pull = messages.object_puller(link.names, link.pull, link.bundle, SITE, 1)
    return messages.inflated(name, messages.pull_contents(link.names, pull))


def arrays(of: Message) -> list[Any]:
    return [array.numpy().tolist() for array in of.content.array_records["tensors"].values()]


def test_a_small_message_is_one_request_in_each_direction() -> None:
    link, expected = SuperLink(), arrays(message(1000))
    assert arrays(sent(link, message(1000))) == expected
    assert [len(names) for names in link.together] == [6, 6]
    assert not link.single


def test_parts_of_a_large_array_go_by_themselves() -> None:
    link = SuperLink()
    large = message(BUNDLE // 4 + 1, parts=2)
    expected = arrays(message(BUNDLE // 4 + 1, parts=2))
    messages.push([large], link.announce, link.push, link.bundle, SITE, 1)
    assert len(link.single) == 2, "the two chunks"
    assert [len(names) for names in link.together] == [len(link.names) - 2]
    pull = messages.object_puller(link.names, link.pull, SuperLink(bundles=False).bundle, SITE, 1)
    name = link.names[-1]
    assert arrays(messages.inflated(name, messages.pull_contents(link.names, pull))) == expected


def test_what_is_small_of_a_large_message_comes_at_once() -> None:
    link = SuperLink()
    large = message(BUNDLE)
    messages.push([large], link.announce, link.push, link.bundle, SITE, 1)
    first, requests = link.names[0], list[str]()

    def bundle(path: str, asked: Any) -> Any:
        """As the SuperLink answers: as far as the first that is large."""
        names = [PullObjectRequest.FromString(each).object_id for each in asked.vals]
        requests.extend(names)
        few = asked.vals[: names.index(first)]
        return link.bundle(path, BytesList(vals=few))

    link.single.clear()
    pull = messages.object_puller(link.names, link.pull, bundle, SITE, 1)
    messages.pull_contents(link.names, pull)
    assert requests == link.names[::-1]
    assert link.single == [first]


def test_many_small_objects_go_in_bundles_of_bounded_size() -> None:
    link = SuperLink()
    many = [message(20_000 + i) for i in range(40)]  # 3.2 MB, of which no message is large
    with mock.patch.object(messages, "_large", return_value=False):
        messages.push(many, link.announce, link.push, link.bundle, SITE, 1)
    assert sorted(link.objects) == sorted(set(link.names))
    assert len(link.together) >= 4
    assert max(sum(len(link.objects[name]) for name in names) for names in link.together) <= BUNDLE


def test_what_is_not_answered_together_is_sent_by_itself() -> None:
    link, expected = SuperLink(bundles=False), arrays(message(1000))
    assert arrays(sent(link, message(1000))) == expected
    assert len(link.single) == 12


# ------------------------------------------------------------------------------------------------------- at the server


def handled(path: str, requests: list[Any], node: int | None, handler: Any) -> list[bytes]:
    body = BytesList(vals=[request.SerializeToString() for request in requests]).SerializeToString()
    place = "flwr.superlink.servicer.fleet.fleet_handlers." + ("pull_object" if path == PULL_PATH else "push_object")
    with mock.patch(place, handler):
        return list(BytesList.FromString(bundles.answers(path, body, object(), node)).vals)


def requests_for(*names: str, node: int = 7) -> list[Any]:
    return [PullObjectRequest(node=Node(node_id=node), run_id=1, object_id=name) for name in names]


def test_answers_stop_where_they_would_be_larger_than_a_bundle() -> None:
    def pull(request: Any, state: Any) -> Any:
        return PullObjectResponse(object_found=True, object_available=True, object_content=bytes(BUNDLE // 3))

    found = handled(PULL_PATH, requests_for("a", "b", "c", "d"), 7, pull)
    assert len(found) == 2
    assert all(PullObjectResponse.FromString(each).object_available for each in found)


def test_answers_stop_where_flower_refuses() -> None:
    def pull(request: Any, state: Any) -> Any:
        if request.object_id == "b":
            raise FlowerError(ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, "no")
        return PullObjectResponse(object_found=True)

    assert len(handled(PULL_PATH, requests_for("a", "b", "c"), None, pull)) == 1


def test_a_site_makes_requests_of_its_own_only() -> None:
    never = mock.Mock(side_effect=AssertionError)
    with pytest.raises(ValueError, match="its own"):
        handled(PULL_PATH, [*requests_for("a"), *requests_for("b", node=8)], 7, never)


def test_more_than_some_requests_are_refused_before_they_take_memory() -> None:
    body = BytesList(vals=[b""] * (MOST_TOGETHER + 1)).SerializeToString()
    with pytest.raises(ValueError, match="at once"):
        bundles.answers(PULL_PATH, body, object(), 7)
    assert len(
        handled(PULL_PATH, requests_for(*"a" * MOST_TOGETHER), 7, lambda request, state: PullObjectResponse())
    ) == (MOST_TOGETHER)


def test_a_run_that_is_not_known_ends_the_answers() -> None:
    def push(request: Any, state: Any) -> Any:
        raise KeyError(request.run_id)

    request = PushObjectRequest(node=SITE, run_id=99, object_id="a")
    assert handled(PUSH_PATH, [request, request], 7, push) == []


@pytest.mark.parametrize("body", [b"\xff", BytesList(vals=[b"\xff"]).SerializeToString()])
def test_what_is_no_bundle_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="no requests"):
        bundles.answers(PUSH_PATH, body, object(), 7)


# --------------------------------------------------------------------------------------------------------- at the site


class Fleet:
    """A client whose bundle is cut off after the server has it, and which stores nothing twice."""

    def __init__(self, error: httpx.HTTPError) -> None:
        self._error, self.stored = error, set[str]()

    def _unary_unary(self, *, request: Any, **options: Any) -> Any:
        if not isinstance(self._error, httpx.HTTPStatusError) or self._error.response.status_code == 504:
            self.stored |= {PushObjectRequest.FromString(each).object_id for each in request.vals}
        raise self._error

    def PushMessages(self, request: Any) -> Any:
        names = [part.object_id for tree in request.message_object_trees for part in iterate_object_tree(tree)]
        self.names = names
        return SimpleNamespace(session_id="session", objects_to_push=names)

    def PushObject(self, request: Any) -> Any:
        fresh = request.object_id not in self.stored
        self.stored.add(request.object_id)
        return PushObjectResponse(stored=fresh)


def status(code: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError(str(code), request=mock.Mock(), response=httpx.Response(code))


@pytest.mark.parametrize(
    "error",
    [httpx.ReadError("cut"), status(504), status(404)],
    ids=["the receipt is lost", "it is lost behind a proxy", "it is refused"],
)
def test_a_bundle_that_fails_is_sent_object_by_object(error: httpx.HTTPError) -> None:
    fleet: Any = Fleet(error)
    session = _Session(fleet, 7)
    session.push(message(1000), 0.0)
    assert fleet.stored == set(fleet.names)


# -------------------------------------------------------------------------------------------------- Flower's middleware


class Noted:
    """A middleware that writes its name into the scope."""

    def __init__(self, app: Any, name: str) -> None:
        self._app, self._name = app, name

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["passed"].append(self._name)
        await self._app(scope, receive, send)


class NodeAuthMiddleware(Noted):
    pass


def test_those_of_the_installed_flower_are_known() -> None:
    """All but those that every request needs: what translates, what tells errors, and ours."""
    names = {name_of(each) for each in superlink_app._get_middleware()}
    assert names - PATHS.keys() == {"BaseHTTPMiddleware", "ProtobufTranslationMiddleware"}


@pytest.mark.parametrize(
    ("path", "passed"),
    [("/v1/fleet/pull-messages", ["all", "fleet", "last"]), ("/v1/runtime/pull-messages", ["all", "last"])],
)
def test_a_middleware_of_one_interface_sees_no_requests_of_another(path: str, passed: list[str]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["passed"].append("last")

    around: Any = app
    listed = [Middleware(Noted, name="all"), Middleware(NodeAuthMiddleware, name="fleet")]
    for each in reversed(only_where_needed(lambda: listed)()):
        around = each.cls(around, *each.args, **each.kwargs)
    scope: dict[str, Any] = {"type": "http", "path": path, "passed": []}
    asyncio.run(around(scope, None, None))
    assert scope["passed"] == passed
