"""Requests that wait here for news, so that nobody has to ask again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

_MOST_ANSWERED = 100_000  # requests that are remembered as answered


class Waiting:
    """Sites that wait for a message, and the server that waits for answers.

    What happens is told by threads of Flower's handlers, and waited for in the event loop. Nothing is decided here: who
    is woken looks for himself, and who hears nothing looks after a while all the same.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: dict[int, asyncio.Event] = {}  # of sites, by their numbers
        self._answered: list[str] = []  # requests, in the order in which their answers were there
        self._forgotten = 0  # of these
        self._news, self._over = asyncio.Event(), False

    def message_for(self, node: int) -> None:
        """There is, or may be, a message for this site."""
        self._call(lambda: self._event(node).set())

    def answer_to(self, request: str) -> None:
        """All of an answer to this request is there, or the reason why there is none."""
        self._call(lambda: self._note(request))

    def end(self) -> None:
        """Let nobody wait any more: the server ends."""
        self._over = True
        for event in (self._news, *self._events.values()):
            event.set()

    async def for_message(self, node: int, seconds: float, gone: Callable[[], Awaitable[Any]]) -> bool:
        """Wait until there may be a message for a site, or so long; False if the site is `gone` before that."""
        self._loop = asyncio.get_running_loop()
        event = self._event(node)
        there = await _first(event.wait, gone, seconds)
        if there and not self._over:
            event.clear()  # before one looks: what comes after that sets it again
        return there

    async def for_answers(self, after: int, seconds: float, gone: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
        """The requests that were answered after the first `after`, once there are any, and how many there are then."""
        self._loop = asyncio.get_running_loop()
        if after == self._forgotten + len(self._answered) and not self._over:
            self._news.clear()
            await _first(self._news.wait, gone, seconds)
        first = max(0, after - self._forgotten) if after <= self._forgotten + len(self._answered) else 0
        return {"answered": self._answered[first:], "after": self._forgotten + len(self._answered)}

    def _event(self, node: int) -> asyncio.Event:
        if node not in self._events or self._over:
            self._events[node] = asyncio.Event()
            self._events[node].set()  # what was there before the first look is not known
        return self._events[node]

    def _note(self, request: str) -> None:
        self._answered.append(request)
        if len(self._answered) > _MOST_ANSWERED:
            half = _MOST_ANSWERED // 2
            del self._answered[:half]
            self._forgotten += half
        self._news.set()

    def _call(self, what: Callable[[], None]) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(what)
        else:
            what()  # nobody waits yet


async def _first(news: Callable[[], Awaitable[Any]], gone: Callable[[], Awaitable[Any]], seconds: float) -> bool:
    """Wait for news, or so long; False if they are not wanted any more."""
    tasks = [asyncio.ensure_future(wait()) for wait in (news, gone)]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return not tasks[1].done()
    finally:
        for task in tasks:
            task.cancel()
