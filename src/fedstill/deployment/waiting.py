"""When a round ends without the sites that do not answer, and when one that could not take part is polled again."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

log = logging.getLogger(__name__)

_FIRST_PAUSE = 20.0  # seconds after which a site that could not take part is polled again; then twice as long each time
_LONGEST_PAUSE = 600.0  # seconds after which it is, at the latest
_FACTOR = 10.0  # times as long as usual
_SHORTEST = 30.0  # seconds


class ResponseTimes:
    """How long sites take, and so how long the others are waited for.

    Once enough have answered, the rest have `wait_after` seconds from the last answer on. Unless that is given, it is
    ten times as long as they or most others took before, at least 30 s; the first time there is no such limit.
    """

    def __init__(self, wait_after: float | None) -> None:
        self._wait_after = wait_after
        self._seconds: dict[tuple[str, str], float] = {}  # by kind of request and site
        self._requested = set[tuple[str, str]]()

    def allowance(self, kind: str, site: str) -> float:
        """Seconds that a site has after the others' last answer."""
        if self._wait_after is not None:
            return self._wait_after
        if (kind, site) not in self._requested:
            return math.inf
        times = [seconds for (what, _), seconds in self._seconds.items() if what == kind]
        usual = median(times) if times else 0.0
        return max(_SHORTEST, _FACTOR * max(usual, self._seconds.get((kind, site), 0.0)))

    def add(self, kind: str, site: str, seconds: float) -> None:
        self._seconds[kind, site] = seconds

    def finish(self, kind: str, sites: Iterable[str]) -> None:
        self._requested.update((kind, site) for site in sites)


class RequestDeadline:
    """Until when the answers to one request to several sites are waited for."""

    def __init__(self, times: ResponseTimes, kind: str, sites: Iterable[str], *, least: int) -> None:
        self._times, self._kind, self._least = times, kind, least
        self._sites = list(sites)
        self._waiting = set(self._sites)
        self._answered = 0
        self._began = self._last = time.monotonic()

    def moment(self) -> float:
        """The moment of the monotonic clock at which it is over."""
        if self._answered < self._least or not self._waiting:
            return math.inf
        return self._last + max(self._times.allowance(self._kind, site) for site in self._waiting)

    def watch(self, answers: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The answers as they come."""
        try:
            for site, answer in answers:
                self._waiting.discard(site)
                if isinstance(answer, dict) and "error" not in answer:
                    self._answered, self._last = self._answered + 1, time.monotonic()
                    self._times.add(self._kind, site, self._last - self._began)
                yield site, answer
        finally:
            self._times.finish(self._kind, self._sites)


class Refusals:
    """Sites that could not take part: why, and when each is polled again."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._times: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    def add(self, name: str, reason: str) -> None:
        if self.reasons.get(name) != reason:
            log.warning("%s cannot take part: %s", name, reason)
        self.reasons[name] = reason
        wait = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(self._times.get(name, 0), 10))
        self._times[name] = self._times.get(name, 0) + 1
        self._not_before[name] = time.monotonic() + wait

    def due(self, name: str) -> bool:
        return time.monotonic() > self._not_before.get(name, -math.inf)
