"""A federation of sites elsewhere: each holds its own data, and the server knows only how many.

Every request carries the settings of the run, so that a site needs nothing but its data, and one that was away or
started again goes on where the others are.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np

from fedstill.core.device import find
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.files import read_sealed_json, write_sealed_json
from fedstill.core.owner import private_folder
from fedstill.core.reports import cleaned, sentence
from fedstill.core.tree import Message, Tree
from fedstill.data.dataset import Dataset
from fedstill.data.federation import Federation
from fedstill.data.partition import IntArray
from fedstill.engine.base import Engine, Inline
from fedstill.engine.worker import Request, Score, Worker
from fedstill.experiment import api
from fedstill.experiment.audit import RECEIVED, Recorded
from fedstill.experiment.config import Config, anchored, fixed
from fedstill.experiment.episodes import TOTALS, Episodes
from fedstill.experiment.logfile import logging_to
from fedstill.experiment.regions import assign
from fedstill.experiment.rollback import ROLLBACKS
from fedstill.experiment.rundir import SERVED, RunDirectory
from fedstill.experiment.runner import Listener, Run, refuse_changes
from fedstill.experiment.setup import (
    check_kept,
    keep,
    kept_tokenizer,
    load_data,
    prepare,
    undivided,
)
from fedstill.experiment.shares import COUNTS, Counts
from fedstill.experiment.site import Own, Site, run_number  # noqa: F401 (both ends are found here)
from fedstill.experiment.waiting import Poll, Waits
from fedstill.methods import registry
from fedstill.models.base import frozen_digest

log = logging.getLogger(__name__)

_MOST = 10**8  # samples of a site
_GREETING = 30.0  # seconds that a newcomer may take to say how much it holds
_AGAIN = 20.0  # seconds after which one that could not take part is asked again; then twice as long each time
_LATEST = 600.0  # seconds after which it is, at the latest
# What a site may report of itself; anything else is not looked at.
_RANGES = {
    **dict.fromkeys(("local_accuracy", "test_accuracy"), (0.0, 1.0)),
    **dict.fromkeys(("train_loss", "test_loss"), (-1e6, 1e6)),
    "seconds": (0.0, 1e7),
    **dict.fromkeys(TOTALS, (0.0, 1e15)),
}


class Link(Protocol):
    """Carries questions to sites by name, and their answers back."""

    def present(self) -> set[str]:
        """The sites that can be asked now."""

    def ask(
        self,
        requests: Mapping[str, Tree],
        *,
        timeout: float,
        name: str | None = None,
        until: Callable[[], float] | None = None,
    ) -> Iterator[tuple[str, Any]]:
        """Each site's answer as it comes: a tree, or something with a `reason` why there is none.

        A site that is asked under the same name again may repeat its last answer. `until` gives the moment of the
        monotonic clock after which nobody is waited for any more; it may change with each answer.
        """


# --- the server's end -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """How a server deals with its sites."""

    timeout: float = 600.0  # seconds a site may take to answer
    needed: int = 1  # sites without which it does not start
    wait_after: float | None = None  # seconds for the rest, once enough have answered; None: by how long they take
    recount: tuple[str, ...] = ()  # sites that may hold more or less than when they joined


class Sites(Engine):
    """Sends each request to the site whose client it is about; tests the global model itself."""

    def __init__(self, worker: Worker | None, link: Link, roll: Roll, terms: Terms, *, least: int = 1) -> None:
        """Without a `worker` nothing is tested here; `least`: how many answers are enough for a round."""
        self._link, self._roll, self._terms, self._least = link, roll, terms, least
        self._waits = Waits(terms.wait_after)
        self._here = worker and Inline(worker)
        self.patience = terms.timeout  # seconds that a site may take, where that is less

    @property
    def patient(self) -> bool:
        return True

    @property
    def _timeout(self) -> float:
        return max(1.0, min(self.patience, self._terms.timeout))

    def greet(self) -> bool:
        return self._roll.call(self._link, timeout=min(_GREETING, self._timeout))

    def absent(self) -> set[int]:
        there = self._link.present()
        return {int(k) for name, clients in self._roll.clients.items() if name not in there for k in clients}

    def run(self, requests: Sequence[Request], down: Message) -> Iterator[Tree]:
        if any(isinstance(request, Score) for request in requests):
            assert self._here
            yield from self._here.run(requests, down)
        else:
            yield from self._clients(requests, down)

    def _clients(self, requests: Sequence[Any], down: Message) -> Iterator[Tree]:
        asked = {}
        for request in requests:
            body = {"kind": type(request).__name__, **asdict(request)}
            site = self._roll.site_of(request.client)
            asked[site] = self._roll.question(site, body, down, self._timeout)
        first = requests[0]
        name = f"{self._roll.series} {type(first).__name__} {first.round} {getattr(first, 'region', 0)}"
        poll = Poll(self._waits, type(first).__name__, asked, least=self._least)
        waiting = poll.watch(self._link.ask(asked, timeout=self._timeout, name=name, until=poll.deadline))
        come: dict[str, Any] = {}
        for site in asked:
            while site not in come:
                sender, answer = next(waiting)
                come[sender] = answer
            yield _client_answer(come.pop(site), self._roll.samples(site), self._roll.weight(site), site)

    def local_hits(self, down: Message) -> dict[int, int]:
        return self.hits(down)

    def hits(self, down: Message) -> dict[int, int]:
        """How often the model is right on the tests of each client that answered."""
        counts, claimed = self._roll.federation.test_sizes, self._roll.tests
        body = {"kind": "Score", "source": "local", "start": 0, "stop": 0}
        held_by = {name: clients for name, clients in self._roll.clients.items() if counts[clients].any()}
        there = self._link.present()
        if away := sorted(held_by.keys() - there):
            log.warning("left out of this evaluation, because they are not connected: %s", ", ".join(away))
        asked = {name: self._roll.question(name, body, down) for name in held_by if name in there}
        found = {}
        poll = Poll(self._waits, "Score", asked, least=1)
        answers = self._link.ask(asked, timeout=self._timeout, until=poll.deadline) if asked else ()
        for name, answer in poll.watch(answers):
            hits = answer.get("hits") if isinstance(answer, dict) else None
            for client, hit in zip(held_by[name], hits, strict=True) if _numbers(hits, len(held_by[name])) else ():
                if 0 <= hit <= claimed[client] and claimed[client]:
                    found[int(client)] = round(hit * int(counts[client]) / int(claimed[client]))
                elif hit > claimed[client]:
                    log.warning("%s says it is right %d times in %d tests", name, hit, claimed[client])
            if not any(client in found for client in held_by[name]):
                log.warning("%s is left out of this evaluation: %s", name, _reason(answer))
        return found


def _client_answer(answer: Any, claimed: int | None, weight: int, site: str) -> Tree:
    """What a site sent about its clients, or why it does not count. The message itself is checked later."""
    if not isinstance(answer, dict) or "error" in answer:
        return {"failure": _reason(answer)}
    samples, metrics, message = answer.get("samples"), answer.get("metrics"), answer.get("message")
    if claimed is not None and (not isinstance(samples, int) or samples != claimed):
        return {"failure": f"it says that it trained on {samples!r:.40} samples, and it has {claimed}"}
    if not isinstance(metrics, dict) or not all(isinstance(m, float) for m in metrics.values()):
        return {"failure": "its metrics are not numbers"}
    return {"samples": weight, "metrics": _in_range(metrics, site), "message": message}


def _in_range(metrics: Mapping[str, float], site: str) -> dict[str, float]:
    """The metrics that can be true; the others are missing."""
    found = {}
    for name, (least, most) in _RANGES.items():
        if name in metrics and least <= metrics[name] <= most:
            found[name] = metrics[name]
        elif name in metrics:
            log.warning("%s reports a %s of %g, which cannot be; it is left out", site, name, metrics[name])
    return found


def _reason(answer: Any) -> str:
    """Why an answer does not count, in words of our own: of what a site sends only known codes are repeated."""
    if isinstance(answer, dict):
        return sentence(answer["error"]) if "error" in answer else "its answer cannot be understood"
    return cleaned(getattr(answer, "reason", "its answer cannot be understood"), 300)


class Roll:
    """Who takes part, and how much each has: sites, or regions, and the clients that each answers for."""

    def __init__(
        self,
        clients: Mapping[str, IntArray],
        dataset: Dataset,
        pool: Federation,
        told: Callable[[], dict[str, Any]],
        *,
        of: int,
        names: Sequence[str] = (),
        changing: bool = False,
        max_share: float = 0.0,
        kept: Path | None = None,
    ) -> None:
        """`clients` are those of each site, among `of` in the run; `changing`: what a site holds may become more.

        `kept` is the file with what they hold, from when they joined on.
        """
        self.clients, self._told, self._changing = dict(clients), told, changing
        self._site_of = {int(k): name for name, held in clients.items() for k in held}
        zeros = np.zeros(of + 1, np.int64)
        nothing = np.zeros(0, np.int64)
        self.federation = Federation(
            dataset, nothing, zeros, nothing, zeros.copy(), pool.pool_index, names=tuple(names)
        )
        self.counts = Counts(self.clients, of, max_share, kept)
        self.tests = np.zeros(of, np.int64)  # of each client, by its own word
        self._known: dict[str, tuple[list[int], list[int]]] = {}
        self._failures: dict[str, int] = {}
        self._refused: dict[str, str] = {}  # why a site could not take part
        self._not_before: dict[str, float] = {}  # when it is asked again

    def site_of(self, client: int) -> str:
        return self._site_of[client]

    def samples(self, site: str) -> int | None:
        """How many a site says that it trains on; None: a region, where that may change during an episode."""
        return None if self._changing else self.counts.samples(site)

    def weight(self, site: str) -> int:
        """How many of them count."""
        return int(self.federation.sizes[self.clients[site]].sum())

    def question(self, site: str, body: Tree = None, down: Message | None = None, seconds: float = 0.0) -> Tree:
        """What to ask a site; nothing in particular: how much it holds."""
        run = self._told() | {"client": int(self.clients[site][0])}
        return {"run": run, "request": body, "down": down or {}, "seconds": seconds}

    def call(self, link: Link, *, timeout: float) -> bool:
        """Ask sites that are there how much they hold, unless that is known; whether anything changed."""
        there, before, now = link.present(), dict(self._known), time.monotonic()
        asked = {
            name: self.question(name)
            for name in self.clients
            if name in there and (self._changing or name not in self._known) and now > self._not_before.get(name, 0.0)
        }
        for name, answer in link.ask(asked, timeout=timeout) if asked else ():
            samples, tests = (answer.get(n) if isinstance(answer, dict) else None for n in ("samples", "tests"))
            count = len(self.clients[name])
            if not (_numbers(samples, count) and _numbers(tests, count) and min(samples + tests) >= 0):
                self._refuse(name, _reason(answer))
            elif changed := self.counts.settle(name, samples, tests, growing=self._changing):
                self._refuse(name, f"{changed}; --recount {name} of the server accepts that")
            else:
                self._known[name] = samples, tests
        if self._known == before:
            return False
        samples_that_count, _ = self.counts.of_sites(self._known, "samples")
        tests_that_count, self.tests = self.counts.of_sites(self._known, "tests")
        self.federation.train_offsets[1:] = np.cumsum(samples_that_count)
        self.federation.test_offsets[1:] = np.cumsum(tests_that_count)
        for name, (samples, tests) in self._known.items():
            if before.get(name) != (samples, tests):
                log.info("%s has %d samples and %d to test on", name, sum(samples), sum(tests))
        return True

    def _refuse(self, name: str, reason: str) -> None:
        if self._refused.get(name) != reason:
            log.warning("%s cannot take part: %s", name, reason)
        self._refused[name] = reason
        wait = min(_LATEST, _AGAIN * 2.0 ** min(self._failures.get(name, 0), 10))
        self._failures[name] = self._failures.get(name, 0) + 1
        self._not_before[name] = time.monotonic() + wait

    @property
    def known(self) -> int:
        return len(self._known)

    @property
    def missing(self) -> dict[str, str]:
        """Who is not there, and why not if they said so."""
        return {name: self._refused.get(name, "") for name in self.clients if name not in self._known}

    @property
    def series(self) -> str:
        """What tells the rounds of this run from others, also from its own before it went back."""
        run = self._told()
        return f"{run['number']} {len(run.get(ROLLBACKS, []))}"


def _numbers(given: Any, count: int) -> TypeGuard[list[int]]:
    """Whether this is a list of so many whole numbers."""
    return isinstance(given, list) and len(given) == count and all(type(n) is int and n <= _MOST for n in given)


def serve(
    config: Config,
    names: Sequence[str],
    link: Link,
    out: Path,
    *,
    terms: Terms,
    pause: Callable[[dict[str, str]], bool],
    listener: Listener | None = None,
    regional: bool = False,
    revoked: Collection[str] = (),
) -> api.Result:
    """Run a federation of sites, or continue it if it was begun in `out`.

    `regional`: each name is a regional server, with sites of its own. `pause` is told who is missing (and why, if that
    is known), waits a little, and says whether to wait on. `revoked` sites may belong to the run; none is waited for.
    """
    _check(config)
    if regional:
        clients = regions_of(config, names)
    else:
        with_keys, names = names, _order(out, names, revoked)
        config = config.model_copy(update={"clients": len(names)})
    # What a checkpoint does not have would have to be asked of the sites again.
    config = config.model_copy(update={"checkpoint_every": 1})
    dataset = load_data(config, kept_tokenizer(out))
    pool = undivided(config, dataset)
    begun = (out / "config.toml").is_file()
    directory = RunDirectory.open(out) if begun else _created(out, config)
    try:
        directory.check_rounds(config.rounds)
        link = Recorded(link, out / RECEIVED)
        number = _number(directory)
        rollbacks = read_sealed_json(directory.path / SERVED).get(ROLLBACKS, [])
        if not regional:
            write_sealed_json(directory.path / SERVED, read_sealed_json(directory.path / SERVED) | {"sites": names})
            clients = {name: np.array([k]) for k, name in enumerate(names)}
        frozen: list[str] = []  # what tells the frozen part of the network, where there is one
        steps: list[int] = []  # of an epoch in each region, once the sites have said how much they hold

        def told() -> dict[str, Any]:
            return {
                "number": number,
                "config": config.model_copy(update={"data_dir": ""}).toml(),  # the server's folders are its own
                "clients": config.clients,
                "classes": list(dataset.classes),
                "mean": list(dataset.mean),
                "std": list(dataset.std),
                "shape": list(dataset.shape),
                "tokenizer": dataset.tokenizer,  # all must make the same tokens of text
                "steps": steps,
                "frozen": frozen,
                "checkpoint": directory.oldest_checkpoint(),
                ROLLBACKS: rollbacks,
            }

        called = () if regional else names
        roll = Roll(
            clients,
            dataset,
            pool,
            told,
            of=config.clients,
            names=called,
            changing=regional,
            max_share=config.max_share,
            kept=directory.path / COUNTS,
        )
        roll.counts.forget(terms.recount)
        with logging_to(directory.path / "log.txt"):
            wanted = set(names) - set(revoked)
            for name in set(names) - wanted:
                log.warning("%s belongs to this run, and its key was revoked: the run goes on without it", name)
            for name in () if regional else sorted(set(with_keys) - set(names)):
                log.warning("%s is new, and this run has begun without it: it is for the next one", name)
            while True:
                roll.call(link, timeout=terms.timeout)
                missing = {name: why for name, why in roll.missing.items() if name in wanted}
                if not missing or not pause(missing):
                    break
            if roll.known < (needed := min(terms.needed, len(wanted))):
                raise FedstillError(f"only {roll.known} of {len(wanted)} sites are there, {needed} are needed")
            setup = prepare(config, data=roll.federation, elsewhere=True)
        if begun and directory.oldest_checkpoint():
            refuse_changes(fixed(directory.config()), fixed(anchored(config)))
            check_kept(setup, out)
        keep(setup, directory)
        directory.write_config(anchored(config))
    except BaseException:
        directory.release()
        raise
    frozen += filter(None, [frozen_digest(setup.task.build().module)])
    steps += [region.task.local.steps_per_epoch for region in setup.hierarchy.regions]
    kind, least = (Episodes, 1) if regional else (Run, config.min_clients)

    def engine(worker: Worker) -> Engine:
        return Sites(worker, link, roll, terms, least=least)

    return api.execute(setup, directory, listener, engine, kind=kind)


def _created(out: Path, config: Config) -> RunDirectory:
    """For its owner alone, as what each site sent may be in there; the owner may share it later."""
    directory = RunDirectory.create(out, anchored(config))
    private_folder(out)
    return directory


def _check(config: Config) -> None:
    """Refuse what only a run on one machine can do, and a device that this one has not."""
    find(config.device)
    if config.attack:
        raise SettingError("attack: sites that attack can be simulated on one machine, with 'fedstill run'")
    if not config.fixed_regions or config.late_clients or any(r.joins > 1 or r.leaves for r in config.region):
        raise SettingError(
            "fixed_regions, late_clients, joins, leaves: sites stay in their regions, and come and go as they do"
        )


def regions_of(config: Config, names: Sequence[str]) -> dict[str, IntArray]:
    """The clients of each regional server, by its name: a region's own in the settings, or in alphabetical order."""
    if config.flat:
        raise SettingError("there are no regions in the settings: regions, or a [[region]] table for each, is needed")
    tables = config.each_region()
    if len(tables) != len(names):
        raise SettingError(f"the settings have {len(tables)} regions, and there are keys of {len(names)}")
    wanted = [table.name for table in tables]
    if any(wanted) and sorted(wanted) != sorted(names):
        raise SettingError(
            f"the regions are called {', '.join(wanted)} in the settings, and the keys {', '.join(names)}"
        )
    if registry.make(config.method, config.hyper).concludes:
        raise SettingError(f"{config.method} asks every client once more at the end, which regions do not pass on")
    called = wanted if any(wanted) else sorted(names)
    return dict(zip(called, assign(config, config.clients), strict=True))


def _number(directory: RunDirectory) -> str:
    """What tells this run from any other, also after a restart: a site's state belongs to one of them."""
    path = directory.path / SERVED
    if not path.exists():
        write_sealed_json(path, {"number": secrets.token_hex(8), "sites": []})
    return run_number(read_sealed_json(path))


def _order(out: Path, names: Sequence[str], revoked: Collection[str]) -> list[str]:
    """The sites of a run, in the order of their clients: those of a new one by name, and of one that has begun its own.

    A run that has begun keeps the number of its clients: one that was revoked is absent from now on, and one that was
    added since is left out.
    """
    path = out / SERVED
    members: list[str] = read_sealed_json(path)["sites"] if path.exists() else []
    if not members:
        return sorted(names)
    for name in members:
        if name not in names and name not in revoked:
            hint = "its key is needed, or 'fedstill keys revoke', to go on without it"
            raise SettingError(f"site {name} belongs to this run; {hint}")
    return members
