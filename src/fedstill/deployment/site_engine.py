"""Client work at sites: each request goes to the site whose client it is about, and answers are checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from fedstill.core.arrays import IntArray
from fedstill.core.tree import Message, Tree
from fedstill.deployment.episodes import TOTALS
from fedstill.deployment.masked_rounds import MaskedRound
from fedstill.deployment.protocol import BY_CLASS, SiteLink, are_counts, class_counts_of, failure_reason, scores_of
from fedstill.deployment.registry import SiteRegistry
from fedstill.deployment.waiting import RequestDeadline, ResponseTimes
from fedstill.engine.base import Engine, Inline, LocalTest
from fedstill.engine.worker import Request, Score, Source, Train, Worker, kind_of, request_fields
from fedstill.methods.base import Part
from fedstill.metrics.scores import ClassCounts

log = logging.getLogger(__name__)

_MOST_ROUNDS = 10**9
_NEWCOMER_TIMEOUT = 30.0  # seconds that a newcomer may take to report its number of samples
# What a site may report of itself; anything else is not looked at.
_RANGES = {
    "epsilon": (0.0, 1e9),  # of a region
    **dict.fromkeys(("local_accuracy", "test_accuracy", "val_accuracy"), (0.0, 1.0)),
    **dict.fromkeys(("train_loss", "test_loss"), (-1e6, 1e6)),
    "seconds": (0.0, 1e7),
    **dict.fromkeys(TOTALS, (0.0, 1e15)),
}


@dataclass(frozen=True)
class Terms:
    """How a server deals with its sites."""

    timeout: float = 600.0  # seconds a site may take to answer
    needed: int = 1  # sites without which it does not start
    wait_after: float | None = None  # seconds for the rest, once enough have answered; None: by how long they take
    recount: tuple[str, ...] = ()  # sites that may have other numbers of samples than when they joined, and no state


class SiteEngine(Engine):
    """Sends each request to the site whose client it is about; tests the global model itself."""

    def __init__(
        self,
        worker: Worker | None,
        link: SiteLink,
        registry: SiteRegistry,
        terms: Terms,
        *,
        least: int = 1,
        masked: Callable[[int], Mapping[str, Part]] | None = None,
        networks: Sequence[int] = (),
    ) -> None:
        """Without a `worker` nothing is tested here; `least`: how many answers are enough for a round.

        With `masked`, which gives what the clients of a region send, only the sum of their updates arrives here.
        `networks`: the number of each client's; none: all have one.
        """
        self._masked = masked
        self._link, self._registry, self._terms, self._least = link, registry, terms, least
        self._times = ResponseTimes(
            terms.wait_after, lambda site: networks[registry.clients[site][0]] if len(networks) else 0
        )
        self._anew = set(terms.recount)  # sites that may have lost their state
        self._local = worker and Inline(worker)
        self.request_timeout = terms.timeout  # seconds that a site may take, where that is less

    @property
    def remote(self) -> bool:
        return True

    @property
    def _timeout(self) -> float:
        return max(1.0, min(self.request_timeout, self._terms.timeout))

    def poll_newcomers(self) -> bool:
        return self._registry.poll(self._link, timeout=min(_NEWCOMER_TIMEOUT, self._timeout))

    def absent(self) -> set[int]:
        connected = self._link.present()
        return {int(k) for name, ks in self._registry.clients.items() if name not in connected for k in ks}

    def run(self, requests: Sequence[Request], down: Message) -> Iterator[Tree]:
        if any(isinstance(request, Score) for request in requests):
            assert self._local
            yield from self._local.run(requests, down)
        elif requests and self._masked is not None:
            first = requests[0]
            assert isinstance(first, Train)  # methods with more requests are refused under masks
            exchange = partial(self._exchange, first, lambda client: down)
            yield from MaskedRound(exchange, self._masked(first.region), self._least).run(
                [request for request in requests if isinstance(request, Train)]
            )
        elif requests:  # a server without data has no test samples to score
            (answers,) = self._clients([(requests, down)])
            yield from answers

    def run_all(self, broadcasts: Sequence[tuple[Sequence[Request], Message]]) -> list[Iterator[Tree]]:
        """All at once: sites are not to wait for those of another group or region."""
        if len(broadcasts) == 1 or self._masked is not None:
            return super().run_all(broadcasts)
        return self._clients(cast(Sequence[tuple[Sequence[Any], Message]], broadcasts))

    def _clients(self, broadcasts: Sequence[tuple[Sequence[Any], Message]]) -> list[Iterator[Tree]]:
        """The answers to each broadcast, in the order of its requests."""
        every = [request for requests, _ in broadcasts for request in requests]
        if not every:
            return [iter(()) for _ in broadcasts]
        down = {request.client: message for requests, message in broadcasts for request in requests}
        bodies = {request.client: request_fields(request) for request in every}
        kind = kind_of(every[0])
        arriving = self._exchange(every[0], down.__getitem__, bodies, kind, self._least, trains=True)
        early: dict[int, Tree] = {}  # those that arrived before it was their turn

        def in_order(requests: Sequence[Any]) -> Iterator[Tree]:
            for request in requests:
                while request.client not in early:
                    sender, answer = next(arriving)
                    early[sender] = answer
                yield early.pop(request.client)

        return [in_order(requests) for requests, _ in broadcasts]

    def _exchange(
        self,
        first: Any,
        down: Callable[[int], Message],
        bodies: Mapping[int, Tree],
        kind: str,
        least: int,
        trains: bool,
    ) -> Iterator[tuple[int, Any]]:
        """Each client's answer to its request as it comes, in the round of this `first` request to train.

        Answers of clients that train are checked, and kept by sites in case the server is killed.
        """
        clients, by_site = {}, {}
        for client, body in bodies.items():
            site = self._registry.site_of(client)
            clients[site] = client
            fields = body | ({"state": 0} if trains and site in self._anew else {})
            by_site[site] = self._registry.request(site, fields, down(client) if trains else {}, self._timeout)
        name = f"{self._registry.series} {kind} {first.round}" if trains else None
        deadline = RequestDeadline(self._times, kind.split(maxsplit=1)[0], by_site, least=least)
        arriving = self._link.send_requests(by_site, timeout=self._timeout, name=name, until=deadline.moment)
        for site, answer in deadline.watch(arriving):
            if trains:
                claimed, weight = self._registry.samples(site), self._registry.weight(site)
                answer = _client_answer(answer, claimed, weight, site)  # noqa: PLW2901
                if "failure" not in answer:
                    self._anew.discard(site)
            yield clients[site], answer

    def local_tests(
        self, broadcasts: Sequence[tuple[IntArray | None, Message]], source: Source = "local"
    ) -> dict[int, LocalTest]:
        counts, claimed = self._registry.federation.test_sizes, self._registry.tests
        if source == "validation":
            held = self._registry.federation.validation
            counts, claimed = held.sizes if held else counts * 0, self._registry.held_out
        body = {"kind": "Score", "source": source, "start": 0, "stop": 0}
        clients_of = {name: clients for name, clients in self._registry.clients.items() if counts[clients].any()}
        connected = self._link.present()
        if away := sorted(clients_of.keys() - connected):
            log.warning("left out of this evaluation, because they are not connected: %s", ", ".join(away))
        requests = {
            name: self._registry.request(name, body, down)
            for members, down in broadcasts
            for name, clients in clients_of.items()
            if name in connected and (members is None or clients[0] in members)
        }
        found: dict[int, LocalTest] = {}
        deadline = RequestDeadline(self._times, "Score", requests, least=1)
        answers = self._link.send_requests(requests, timeout=self._timeout, until=deadline.moment) if requests else ()
        for name, answer in deadline.watch(answers):
            hits = answer.get("hits") if isinstance(answer, dict) else None
            if are_counts(hits, len(clients_of[name])):
                by_class = self._by_class(name, answer, claimed[clients_of[name]].tolist(), hits)
                scores = scores_of(answer, len(hits))
                for client, hit, counted, own in zip(clients_of[name].tolist(), hits, by_class, scores, strict=True):
                    if 0 <= hit <= claimed[client] and claimed[client]:
                        share = int(counts[client]) / int(claimed[client])
                        found[client] = LocalTest(round(hit * share), counted and counted.times(share), own)
                    elif hit > claimed[client]:
                        log.warning("%s says it is right %d times in %d tests", name, hit, claimed[client])
            if not any(client in found for client in clients_of[name]):
                log.warning("%s is left out of this evaluation: %s", name, failure_reason(answer))
        return found

    def _by_class(
        self, site: str, answer: Mapping[str, Any], tests: Sequence[int], hits: Sequence[int]
    ) -> Sequence[ClassCounts | None]:
        """What a site sent beside its hits, if that can be true."""
        if BY_CLASS not in answer:
            return [None] * len(hits)
        found = class_counts_of(answer, tests, hits, len(self._registry.federation.dataset.classes))
        if found is None:
            log.warning("%s sends counts by class that cannot be; they are left out", site)
        return found or [None] * len(hits)


def _client_answer(answer: Any, claimed: int | None, weight: int, site: str) -> Tree:
    """What a site sent about its clients, or why it does not count. The message itself is checked later."""
    if not isinstance(answer, dict) or "error" in answer:
        return {"failure": failure_reason(answer)}
    samples, metrics, message = answer.get("samples"), answer.get("metrics"), answer.get("message")
    if claimed is not None and (not isinstance(samples, int) or samples != claimed):
        number = f"{samples!r:.40}" if type(samples) is int else "no number of"  # nothing of its own words
        return {"failure": f"it says that it trained on {number} samples, and it has {claimed}"}
    if not isinstance(metrics, dict) or not all(isinstance(m, float) for m in metrics.values()):
        return {"failure": "its metrics are not numbers"}
    state = answer.get("state")
    known = {"state": state} if type(state) is int and 0 <= state <= _MOST_ROUNDS else {}
    return {"samples": weight, "metrics": _in_range(metrics, site), "message": message, **known}


def _in_range(metrics: Mapping[str, float], site: str) -> dict[str, float]:
    """The metrics that can be true; the others are missing."""
    found = {}
    for name, (least, most) in _RANGES.items():
        if name in metrics and least <= metrics[name] <= most:
            found[name] = metrics[name]
        elif name in metrics:
            log.warning("%s reports a %s of %g, which cannot be; it is left out", site, name, metrics[name])
    return found
