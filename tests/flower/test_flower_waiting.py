"""Who waits at the SuperLink is woken when there is something to get, and not before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("flwr")

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

from fedstill.flower import link as link_of
from fedstill.flower import private
from fedstill.flower.link import FlowerLink
from fedstill.flower.superlink.uploads import Uploads
from fedstill.flower.superlink.waiting import Waiting

LONG = 3600.0
PATIENCE = 200.0
SITE, OTHER = 7, 8


async def stays() -> None:
    await asyncio.Event().wait()


async def leaves() -> None:
    return None


async def blocked(task: asyncio.Task[Any]) -> bool:
    """Whether a task still waits when everything else has been done."""
    for _ in range(20):
        await asyncio.sleep(0)
    return not task.done()


def from_a_thread(call: Any, *arguments: Any) -> None:
    thread = threading.Thread(target=call, args=arguments)
    thread.start()
    thread.join()


async def looked(waiting: Waiting, *nodes: int) -> None:
    """The first look of a site waits for nothing: what was there before is not known."""
    for node in nodes:
        assert await waiting.for_message(node, LONG, stays)


def test_a_site_waits_for_its_own_message() -> None:
    async def run() -> None:
        waiting = Waiting()
        await looked(waiting, SITE, OTHER)
        site = asyncio.create_task(waiting.for_message(SITE, LONG, stays))
        other = asyncio.create_task(waiting.for_message(OTHER, LONG, stays))
        assert await blocked(site)
        from_a_thread(waiting.message_for, SITE)
        assert await site
        assert await blocked(other)
        other.cancel()
        from_a_thread(waiting.message_for, SITE)  # while it works: its next look does not wait
        assert await waiting.for_message(SITE, LONG, stays)

    asyncio.run(run())


def test_a_site_hears_of_nothing_after_a_while_and_is_told_nothing_once_it_is_gone() -> None:
    async def run() -> None:
        waiting = Waiting()
        await looked(waiting, SITE)
        assert await waiting.for_message(SITE, 0.001, stays)
        assert not await waiting.for_message(SITE, LONG, leaves)

    asyncio.run(run())


def test_the_server_hears_of_each_answer_once_and_of_all_after_a_restart() -> None:
    async def run() -> None:
        waiting = Waiting()
        task = asyncio.create_task(waiting.for_answers(0, LONG, stays))
        assert await blocked(task)
        from_a_thread(waiting.answer_to, "a")
        assert await task == {"answered": ["a"], "after": 1}
        for name in "bc":
            from_a_thread(waiting.answer_to, name)
        await asyncio.sleep(0)
        assert await waiting.for_answers(1, LONG, stays) == {"answered": ["b", "c"], "after": 3}
        assert await waiting.for_answers(3, 0.001, stays) == {"answered": [], "after": 3}
        assert await waiting.for_answers(99, LONG, stays) == {"answered": ["a", "b", "c"], "after": 3}

    asyncio.run(run())


def test_nobody_waits_when_the_server_ends() -> None:
    async def run() -> None:
        waiting = Waiting()
        await looked(waiting, SITE)
        tasks = [
            asyncio.create_task(waiting.for_message(SITE, LONG, stays)),
            asyncio.create_task(waiting.for_answers(0, LONG, stays)),
        ]
        assert await blocked(tasks[0])
        waiting.end()
        await asyncio.gather(*tasks)
        await looked(waiting, SITE, SITE, OTHER, OTHER)
        await waiting.for_answers(0, LONG, stays)

    asyncio.run(run())


class Notified:
    """Counts who is woken."""

    def __init__(self) -> None:
        self.messages, self.answers = list[int](), list[str]()

    def message_for(self, node: int) -> None:
        self.messages.append(node)

    def answer_to(self, request: str) -> None:
        self.answers.append(request)


class State:
    """As much of Flower's state as has messages."""

    def __init__(self) -> None:
        self.object_store = InMemoryObjectStore(verify=False)
        self.undelivered: list[Any] = []

    def store_message_and_object_tree(self, message: Any, tree: ObjectTree, session: str) -> tuple[bool, list[str]]:
        if not message.metadata.reply_to_message_id:
            self.undelivered.append(message)
        return True, self.object_store.preregister(1, tree)

    def store_object(self, run: int, session: str, name: str, content: bytes) -> bool:
        self.object_store.put(name, content)
        return True

    def get_message_ins(self, node: int, limit: int | None) -> list[Any]:
        return [self.undelivered.pop(0)] if self.undelivered else []

    def get_message_res(self, names: set[str], run: int) -> list[Any]:
        return []

    def delete_messages(self, names: set[str]) -> None: ...

    def get_node_id_by_public_key(self, key: bytes) -> int:
        return SITE


NAMES = [f"{number:064x}" for number in range(6)]


def message(name: str, parts: list[str], answers: str = "", ttl: float = 1e12) -> tuple[Any, ObjectTree]:
    metadata = SimpleNamespace(
        message_id=name, reply_to_message_id=answers, src_node_id=SITE, dst_node_id=SITE, created_at=0.0, ttl=ttl
    )
    tree = ObjectTree(object_id=name, children=[ObjectTree(object_id=part) for part in parts])
    return SimpleNamespace(metadata=metadata), tree


@pytest.fixture
def bounded() -> tuple[Any, Uploads, Notified]:
    kind, notified = type("Bounded", (State,), dict(State.__dict__)), Notified()
    uploads = Uploads(100_000, notified)  # type: ignore[arg-type]
    uploads.bound(kind)
    return kind(), uploads, notified


def test_a_site_is_woken_when_its_message_is_there_and_again_while_there_are_more(
    bounded: tuple[Any, Uploads, Notified],
) -> None:
    flower, _, notified = bounded
    for name in NAMES[:2]:
        flower.store_message_and_object_tree(*message(name, [NAMES[5]]), "server")
    assert not notified.messages
    flower.store_object(1, "server", NAMES[5], b"weights")
    assert not notified.messages
    for name in NAMES[:2]:
        flower.store_object(1, "server", name, b"head")
    assert notified.messages == [SITE, SITE]
    flower.get_message_ins(SITE, 1)
    assert notified.messages == [SITE] * 3
    flower.get_message_ins(SITE, 1)
    assert notified.messages == [SITE] * 3


def test_what_comes_while_a_site_looks_in_vain_is_not_forgotten(
    bounded: tuple[Any, Uploads, Notified], monkeypatch: pytest.MonkeyPatch
) -> None:
    flower, uploads, notified = bounded

    def come() -> None:
        for name in NAMES[:2]:
            flower.store_message_and_object_tree(*message(name, []), "server")
            flower.store_object(1, "server", name, b"head")

    monkeypatch.setattr(uploads, "_unconfirmed", lambda node: come())  # asked after the look, when there was nothing
    assert flower.get_message_ins(SITE, 1) == []
    assert notified.messages == [SITE, SITE]
    flower.get_message_ins(SITE, 1)
    assert notified.messages == [SITE] * 3


def test_a_message_that_a_site_has_not_confirmed_when_it_looks_again_is_given_again(
    bounded: tuple[Any, Uploads, Notified],
) -> None:
    flower, uploads, _ = bounded
    sent, tree = message(NAMES[0], [])
    flower.store_message_and_object_tree(sent, tree, "server")
    flower.store_object(1, "server", NAMES[0], b"head")
    assert uploads.waits("") == SITE  # as far as is known: whether there is one is Flower's to say
    assert flower.get_message_ins(SITE, 1) == [sent]
    assert uploads.waits("") is None
    assert flower.get_message_ins(SITE, 1) == [sent]
    flower.object_store.delete(NAMES[0])  # which is what Flower does when it is confirmed
    assert flower.get_message_ins(SITE, 1) == []
    assert uploads.waits("") == SITE


def test_a_message_that_nobody_waits_for_any_more_is_not_given_again(bounded: tuple[Any, Uploads, Notified]) -> None:
    flower, _, _ = bounded
    sent, tree = message(NAMES[0], [], ttl=1.0)
    flower.store_message_and_object_tree(sent, tree, "server")
    assert flower.get_message_ins(SITE, 1) == [sent]
    assert flower.get_message_ins(SITE, 1) == []


def test_the_server_hears_of_an_answer_when_all_of_it_is_there(bounded: tuple[Any, Uploads, Notified]) -> None:
    flower, _, notified = bounded
    request, root, *parts = NAMES[:4]
    flower.store_message_and_object_tree(*message(root, parts, answers=request), "site")
    for name in parts:
        flower.store_object(1, "site", name, b"part")
        assert not notified.answers
    flower.store_object(1, "site", root, b"head")
    assert notified.answers == [request]


def test_the_server_hears_of_an_answer_that_is_refused(bounded: tuple[Any, Uploads, Notified]) -> None:
    flower, _, notified = bounded
    request, root, part = NAMES[:3]
    flower._on_push_session_expired = flower._cleanup_push_session = lambda *_, **__: None
    flower.store_message_and_object_tree(*message(root, [part], answers=request), "site")
    assert not flower.store_object(1, "site", part, bytes(300_000))
    assert notified.answers == [request]


def unconnected(tmp_path: Path) -> FlowerLink:
    """A link whose SuperLink was never started."""
    return FlowerLink(tmp_path, {}, host="127.0.0.1", port=1, certificates=None, most_bytes=1)


def test_sites_whose_answers_lose_a_part_again_keep_nobody_from_reading(tmp_path: Path) -> None:
    link, reading, over = unconnected(tmp_path), threading.Semaphore(0), threading.Event()

    def read(message: str, *, abandoned: Callable[[], bool], **_: Any) -> None:
        if message != "good":
            abandoned()  # a part is missing
            abandoned()
            reading.release()
            over.wait(PATIENCE)

    run = mock.Mock(pull=read)
    batch = mock.Mock(**{"left.return_value": PATIENCE})

    def pull(message: str) -> None:
        sent = link_of._PendingRequest(run, private.Node(1, ""), message)
        link._answer_event(sent).set()
        link._pull("quito", sent, batch)

    waiting = [threading.Thread(target=pull, args=(f"bad {i}",), daemon=True) for i in range(3 * link_of._READERS)]
    for thread in waiting:
        thread.start()
    try:
        for _ in waiting:
            assert reading.acquire(timeout=PATIENCE)
        pull("good")
    finally:
        over.set()
    for thread in waiting:
        thread.join(PATIENCE)
    for _ in range(link_of._READERS):  # each place was given back once
        assert link._readers.acquire(blocking=False)
    assert not link._readers.acquire(blocking=False)


def test_whatever_goes_wrong_in_listening_it_goes_on_and_who_waits_looks_meanwhile(tmp_path: Path) -> None:
    link, heard = unconnected(tmp_path), list[bool]()

    def answered() -> Iterator[list[str]]:
        heard.append(link._hears)
        if len(heard) == 3:
            link._stopping.set()
        yield ["a"]
        raise ValueError("no JSON")

    link._address = mock.Mock(answered=answered)
    with mock.patch.object(link_of, "_AGAIN", 0.0), mock.patch.object(link_of, "_MOST_EVENTS", 0):
        link._listen()
    assert heard == [False] * 3
    assert not link._answer_events
