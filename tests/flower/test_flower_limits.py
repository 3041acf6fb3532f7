"""What a hostile site, or a stranger, can take of the SuperLink."""

from __future__ import annotations

import asyncio
import resource
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("flwr")

from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import FlowerError
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

from fedstill.flower.link import Failure, Strangers
from fedstill.flower.superlink import connections as counted
from fedstill.flower.superlink.uploads import Uploads, only_answers
from fedstill.flower.superlink.waiting import Waiting
from support.link import Trial, ask, everyone, wait

pytestmark = pytest.mark.servers

MB = 1 << 20


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    trial = Trial(tmp_path)
    try:
        yield trial
    finally:
        trial.stop()


def memory(process: Any) -> int:
    return int(psutil.Process(process.pid).memory_info().rss)


@pytest.mark.slow
def test_refused_uploads_leave_nothing_in_the_superlink(trial: Trial) -> None:
    trial.start("berlin")
    with trial.link(most_bytes=MB, database=False) as link:
        everyone(link, 1)

        def refused(times: int) -> None:
            for _ in range(times):
                answer = ask(link, {"berlin": {"big": MB}})["berlin"]  # 4 MB
                assert answer == Failure("its answer is refused: it has more than the 1,048,576 bytes allowed")

        refused(5)
        before = memory(link._process)
        refused(15)
        assert memory(link._process) - before < 30 * MB  # of the 60 MB that were sent
        assert ask(link, {"berlin": {"note": 1}})["berlin"]["note"] == 1


@pytest.mark.slow
def test_idle_connections_make_room_for_a_site(trial: Trial) -> None:
    with trial.link(database=False, strangers=Strangers(connections=20, seconds=600)) as link:
        assert link._process is not None
        resource.prlimit(link._process.pid, resource.RLIMIT_NOFILE, (200, 200))
        idle = [socket.create_connection(("127.0.0.1", trial.port), 10) for _ in range(300)]
        try:
            trial.start("lagos")
            assert ask(link, {"lagos": {"note": 1}})["lagos"]["note"] == 1
            wait(lambda: len(idle) - len(select.select(idle, [], [], 0)[0]) <= 20)  # the others were ended
        finally:
            for connection in idle:
                connection.close()


@pytest.mark.slow
def test_a_connection_that_says_nothing_is_ended(trial: Trial) -> None:
    with (
        trial.link(database=False, strangers=Strangers(seconds=0.5)),
        socket.create_connection(("127.0.0.1", trial.port), 60) as idle,
    ):
        idle.settimeout(60)
        assert idle.recv(1) == b""


class State:
    """As much of Flower's state as counts what is stored."""

    def __init__(self) -> None:
        self.object_store = InMemoryObjectStore(verify=False)
        self.sessions: set[str] = set()
        self.pulled = False  # by the server, upon which Flower takes no answer to the request any more

    def store_message_and_object_tree(self, message: Any, tree: ObjectTree, session: str) -> tuple[bool, list[str]]:
        if self.pulled:
            return False, []
        return True, self.object_store.preregister(1, tree)

    def preregister_object_tree(self, tree: ObjectTree, session: str) -> list[str]:
        return self.object_store.preregister(1, tree)

    def store_object(self, run: int, session: str, name: str, content: bytes) -> bool:
        self.object_store.put(name, content)
        return True

    def get_message_ins(self, node: int, limit: int | None) -> list[Any]:
        return []

    def get_message_res(self, names: set[str], run: int) -> list[Any]:
        return []

    def delete_messages(self, names: set[str]) -> None: ...

    def _on_push_session_expired(self, names: set[str]) -> None: ...

    def _cleanup_push_session(self, session: str, *, cleanup_messages: bool) -> None:
        self.sessions.discard(session)

    def answer(self, number: int, *, parts: int = 1, until: float = 1e12) -> tuple[bool, list[str]]:
        """A site announces an answer to the request of this number."""
        root, session = f"{number:064x}", f"session {number}"
        self.sessions.add(session)
        tree = ObjectTree(
            object_id=root, children=[ObjectTree(object_id=f"{k + 1:032x}{number:032x}") for k in range(parts)]
        )
        metadata = SimpleNamespace(
            reply_to_message_id=f"{number + 1000:064x}", message_id=root, src_node_id=7, created_at=0.0, ttl=until
        )
        return self.store_message_and_object_tree(SimpleNamespace(metadata=metadata), tree, session)

    def size(self) -> int:
        return sum(len(entry.content) for entry in self.object_store.store.values())


@pytest.fixture
def state() -> tuple[State, Uploads]:
    kind = type("Bounded", (State,), dict(State.__dict__))
    uploads = Uploads(100_000, Waiting())
    uploads.bound(kind)
    return kind(), uploads


def test_answers_that_nobody_reads_make_room_for_the_next(state: tuple[State, Uploads]) -> None:
    flower, _ = state
    for number in range(50):
        assert flower.answer(number)[0]
        assert flower.store_object(1, f"session {number}", f"{1:032x}{number:032x}", bytes(90_000))
    assert flower.size() <= 180_000
    assert len(flower.sessions) <= 2


def test_an_answer_that_is_announced_again_goes_on_where_it_was(state: tuple[State, Uploads]) -> None:
    flower, _ = state
    _, wanted = flower.answer(1, parts=3)
    flower.store_object(1, "session 1", wanted[0], bytes(10))
    flower.pulled = True
    assert flower.answer(1, parts=3) == (True, wanted[1:])
    assert flower.answer(2, parts=3) == (False, [])


def test_an_object_that_is_sent_again_counts_once(state: tuple[State, Uploads]) -> None:
    flower, _ = state
    _, names = flower.answer(1, parts=2)
    for name in [names[0], names[0], names[0]]:  # as its receipt was lost
        flower.store_object(1, "session 1", name, bytes(60_000))
    assert flower.store_object(1, "session 1", names[1], bytes(60_000)), "120,000 of 165,536"


def test_an_answer_ends_with_the_time_of_its_request(state: tuple[State, Uploads]) -> None:
    flower, uploads = state
    now = time.time()
    flower.answer(1, until=now + 100)
    uploads.sweep(now + 99)
    assert len(flower.object_store) == 2
    uploads.sweep(now + 101)
    assert len(flower.object_store) == 0


def test_an_object_without_a_session_and_an_answer_in_too_many_parts_are_not_stored(
    state: tuple[State, Uploads],
) -> None:
    flower, _ = state
    flower.answer(1)
    assert not flower.store_object(1, "", f"{1:032x}{1:032x}", bytes(10))
    assert flower.answer(2, parts=10_001) == (False, [])
    assert len(flower.object_store) == 2
    assert flower.sessions == {"session 1"}


def test_a_request_that_is_over_leaves_no_objects(state: tuple[State, Uploads]) -> None:
    flower, _ = state
    flower.object_store.preregister(1, ObjectTree(object_id="a" * 64))
    flower.delete_messages({"a" * 64})
    assert len(flower.object_store) == 0


@pytest.mark.parametrize(("source", "answers"), [(7, ""), (8, "a request"), (1, "")])
def test_a_site_sends_answers_of_its_own_only(source: int, answers: str) -> None:
    passed = list[Any]()
    push = only_answers(lambda request, state: passed.append(request))

    def request(source: int, answers: str) -> PushMessagesRequest:
        metadata = Metadata(src_node_id=source, reply_to_message_id=answers)
        return PushMessagesRequest(node=Node(node_id=7), messages_list=[Message(metadata=metadata)])

    with pytest.raises(FlowerError):
        push(request=request(source, answers), state=None)
    push(request=request(7, "a request"), state=None)
    assert len(passed) == 1


@pytest.mark.parametrize(("owner", "ended"), [("a site's key", 3), ("", 0)])
def test_beyond_its_connections_a_sites_oldest_end(owner: str, ended: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shut = list[Any]()
    monkeypatch.setattr(counted, "_shut", shut.append)
    connections = counted.Connections(1000, 600.0)
    made = [counted._Connection() for _ in range(counted._MOST_CONNECTIONS + 3)]

    async def enter() -> None:
        for port, connection in enumerate(made):
            connections.enter(connection, ("127.0.0.1", port))
            connections.admit(connection.client, owner)
            for gone in shut:
                gone.close()

    asyncio.run(enter())
    for connection in made:
        connection.close()
    assert shut == made[:ended]
