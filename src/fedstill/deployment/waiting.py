"""When a round ends without the sites that do not answer, and when one that could not take part is polled again."""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

log = logging.getLogger(__name__)

_FIRST_PAUSE = 20.0  # seconds after which a site that could not take part is polled again; then twice as long each time
_LONGEST_PAUSE = 600.0  # seconds after which it is, at the latest
_FACTOR = 10.0  # times as long as the others take
_SHORTEST = 30.0  # seconds


class ResponseTimes:
    """How long sites take, and so how long the others are waited for.

    Once enough have answered, the rest have `wait_after` seconds from the last answer on. Unless that is given, it is
    ten times the median of what the others took last, at least 30 s: a site's own time gives it no more. There is no
    such limit the first time that a site is asked, until more than half as many others are known. The others are those
    with the same network; all, as long as none of those has answered.
    """

    def __init__(self, wait_after: float | None, network_of: Callable[[str], int] = lambda site: 0) -> None:
        self._wait_after, self.network_of = wait_after, network_of
        self._seconds: dict[tuple[str, str], float] = {}  # by kind of request and site
        self._sorted: defaultdict[tuple[str, int | None], list[float]] = defaultdict(list)  # by network; None: of all
        self._requested = set[tuple[str, str]]()

    def allowance(self, kind: str, site: str, asked: int) -> float:
        """Seconds that a site, one of so many with its network that are asked, has after the others' last answer."""
        if self._wait_after is not None:
            return self._wait_after
        own, alike = self._seconds.get((kind, site)), self._sorted[kind, self.network_of(site)]
        others = len(alike) - (own is not None)
        if (kind, site) not in self._requested and 2 * others <= asked:
            return math.inf
        usual = _median_without(own, alike if others else self._sorted[kind, None])
        return math.inf if usual is None else max(_SHORTEST, _FACTOR * usual)

    def add(self, kind: str, site: str, seconds: float) -> None:
        before = self._seconds.get((kind, site))
        for network in (self.network_of(site), None):
            times = self._sorted[kind, network]
            if before is not None:
                del times[bisect_left(times, before)]
            insort(times, seconds)
        self._seconds[kind, site] = seconds

    def finish(self, kind: str, sites: Iterable[str]) -> None:
        self._requested.update((kind, site) for site in sites)


def _median_without(own: float | None, times: Sequence[float]) -> float | None:
    """The (higher) median of sorted times but one; None if there are no others."""
    middle = (len(times) - (own is not None)) // 2
    middle += own is not None and middle >= bisect_left(times, own)
    return times[middle] if middle < len(times) else None


class RequestDeadline:
    """Until when the answers to one request to several sites are waited for."""

    def __init__(self, times: ResponseTimes, kind: str, sites: Iterable[str], *, least: int) -> None:
        self._times, self._kind, self._least = times, kind, least
        self._sites, self._network = list(sites), times.network_of
        self._asked = Counter(map(self._network, self._sites))
        self._waiting = set(self._sites)
        self._answers = 0
        self._began = self._last = time.monotonic()

    def moment(self) -> float:
        """The moment of the monotonic clock at which it is over."""
        if self._answers < self._least or not self._waiting:
            return math.inf
        allowed = (self._times.allowance(self._kind, site, self._asked[self._network(site)]) for site in self._waiting)
        return self._last + max(allowed)

    def watch(self, answers: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The answers as they come."""
        try:
            for site, answer in answers:
                self._waiting.discard(site)
                if isinstance(answer, dict) and "error" not in answer:
                    self._answers, self._last = self._answers + 1, time.monotonic()
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

    def forget_pauses(self, present: Iterable[str]) -> None:
        """Poll whoever is not there at once when it is back: a site that was started again may have been mended."""
        for name in self._not_before.keys() - set(present):
            del self._not_before[name], self._times[name]

    def due(self, name: str) -> bool:
        return time.monotonic() > self._not_before.get(name, -math.inf)
