"""The sites of a run, or its regions: which clients each answers for, and how many samples it has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.arrays import IntArray
from fedstill.core.tree import Message, Tree
from fedstill.data.dataset import Dataset
from fedstill.data.federation import Federation
from fedstill.data.held_out import HeldOut
from fedstill.data.partition_draws import share_of
from fedstill.deployment.protocol import CLASS_COUNTS, VALIDATION, RunInfo, SiteLink, are_counts, failure_reason
from fedstill.deployment.shares import Counts, capped
from fedstill.deployment.waiting import Refusals
from fedstill.running.rollback import ROLLBACKS

log = logging.getLogger(__name__)


class SiteRegistry:
    """The sites, or regions, of a run, the clients that each answers for, and their numbers of samples."""

    def __init__(
        self,
        clients: Mapping[str, IntArray],
        dataset: Dataset,
        server_data: Federation,
        run_info: Callable[[], RunInfo],
        *,
        total: int,
        names: Sequence[str] = (),
        changing: bool = False,
        max_share: float = 0.0,
        path: Path | None = None,
        by_class: bool = False,
        validation: float = 0.0,
    ) -> None:
        """`clients` are those of each site, among the `total` of the run; `changing`: a site may get more samples.

        `by_class`: sites also say how many samples they have of each class. `validation` is the share that they hold
        out.
        `path` is the file with the numbers of samples that they reported when they joined.
        """
        self.clients, self._run_info, self._changing = dict(clients), run_info, changing
        self._site_of = {int(k): name for name, members in clients.items() for k in members}
        zeros = np.zeros(total + 1, np.int64)
        nothing = np.zeros(0, np.int64)
        held = HeldOut(nothing, zeros.copy(), server_data.validation.pool_index) if server_data.validation else None
        self.federation = Federation(
            dataset, nothing, zeros, nothing, zeros.copy(), server_data.pool_index, names=tuple(names), validation=held
        )
        self._validation, self._max_share = validation, max_share
        self.held_out = np.zeros(total, np.int64)  # validation samples of each client, by its own word
        self.counts = Counts(self.clients, total, max_share, path)
        self.tests = np.zeros(total, np.int64)  # of each client, by its own word
        self._reported: dict[str, tuple[list[int], list[int]]] = {}  # samples and tests, by site
        self._by_class: dict[str, list[int]] | None = {} if by_class else None
        self._refusals = Refusals()

    def site_of(self, client: int) -> str:
        return self._site_of[client]

    def samples(self, site: str) -> int | None:
        """How many samples a site claims to train on; None: a region, where that may change during an episode."""
        return None if self._changing else self.counts.samples(site)

    def weight(self, site: str) -> int:
        """How many of them count."""
        return int(self.federation.sizes[self.clients[site]].sum())

    def request(self, site: str, body: Tree = None, down: Message | None = None, seconds: float = 0.0) -> Tree:
        """A request to a site; without a body: for its numbers of samples."""
        run = self._run_info() | {"client": int(self.clients[site][0])}
        return {"run": run, "request": body, "down": down or {}, "seconds": seconds}

    def poll(self, link: SiteLink, *, timeout: float) -> bool:
        """Get the numbers of samples of connected sites, unless they are known; whether anything changed."""
        connected, before = link.present(), dict(self._reported)
        self._refusals.forget_pauses(connected)
        requests = {
            name: self.request(name)
            for name in self.clients
            if name in connected and (self._changing or name not in self._reported) and self._refusals.due(name)
        }
        for name, answer in link.send_requests(requests, timeout=timeout) if requests else ():
            samples, tests = (answer.get(n) if isinstance(answer, dict) else None for n in ("samples", "tests"))
            count = len(self.clients[name])
            if not (are_counts(samples, count) and are_counts(tests, count) and min(samples + tests) >= 0):
                self._refusals.add(name, failure_reason(answer))
            elif not self._holds_out(held := answer.get(VALIDATION, [0] * count), samples):
                self._refusals.add(name, "the samples that it holds out for validation are not the run's share")
            elif self._by_class is not None and not self._classes_add_up(answer, sum(samples)):
                self._refusals.add(name, "the samples of each class that it reports are not all of its samples")
            elif changed := self.counts.settle(name, samples, tests, growing=self._changing):
                self._refusals.add(name, f"{changed}; --recount {name} of the server accepts that")
            else:
                self._reported[name] = samples, tests
                self.held_out[self.clients[name]] = held
                if self._by_class is not None:
                    self._by_class[name] = answer[CLASS_COUNTS]
        self.counts.save()
        if self._reported == before:
            return False
        samples_that_count, _ = self.counts.of_sites(self._reported, "samples")
        tests_that_count, self.tests = self.counts.of_sites(self._reported, "tests")
        self.federation.train_offsets[1:] = np.cumsum(samples_that_count)
        self.federation.test_offsets[1:] = np.cumsum(tests_that_count)
        if self.federation.validation is not None:
            self.federation.validation.offsets[1:] = np.cumsum(capped(self.held_out, self._max_share))
        for name, (samples, tests) in self._reported.items():
            if before.get(name) != (samples, tests):
                log.info("%s has %d samples and %d to test on", name, sum(samples), sum(tests))
        return True

    def _holds_out(self, held: Any, samples: list[int]) -> bool:
        """Whether so many validation samples can be, or none where a site keeps its results for itself."""
        if not are_counts(held, len(samples)) or min(held, default=0) < 0:
            return False
        whole = np.array(samples) + np.array(held)
        share = share_of(whole, self._validation)
        # A region counts its sites, whose samples may count for less than they have.
        return self._changing or bool(((np.array(held) == share) | (np.array(held) == 0)).all())

    def _classes_add_up(self, answer: Mapping[str, Any], samples: int) -> bool:
        counts = answer.get(CLASS_COUNTS)
        classes = len(self.federation.dataset.classes)
        return are_counts(counts, classes) and min(counts) >= 0 and sum(counts) == samples

    def class_counts(self) -> list[float]:
        """Samples of each class that the sites have together, each site's as far as its samples count."""
        total = np.zeros(len(self.federation.dataset.classes))
        for name, counts in (self._by_class or {}).items():
            total += np.array(counts) * (self.weight(name) / max(1, sum(counts)))
        return [float(count) for count in total]

    @property
    def reported_sites(self) -> int:
        """How many sites have reported their numbers of samples."""
        return len(self._reported)

    @property
    def missing(self) -> dict[str, str]:
        """Sites that have not reported yet, and why not if they gave a reason."""
        return {name: self._refusals.reasons.get(name, "") for name in self.clients if name not in self._reported}

    @property
    def series(self) -> str:
        """Identifies the rounds of this run, also from its own before a rollback."""
        run = self._run_info()
        return f"{run['number']} {len(run.get(ROLLBACKS, []))}"
