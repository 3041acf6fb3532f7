"""A federation of sites elsewhere: each holds its own data, and the server knows only how many.

Every request carries the settings of the run, so that a site needs nothing but its data, and one that was away or
started again goes on where the others are.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedstill.building.config import Config, anchored, fixed
from fedstill.building.data import dataset_in, declared, is_declared, load_data, undivided
from fedstill.building.members import assign, numbered
from fedstill.building.setup import Setup, prepare
from fedstill.building.task import balanced_weights
from fedstill.core.arrays import IntArray
from fedstill.core.device import find
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.files import write_sealed_json
from fedstill.core.owner import private_folder
from fedstill.core.tree import Message, Tree
from fedstill.data.preprocessing import TablePreprocessing
from fedstill.data.statistics import with_table
from fedstill.deployment.audit import RecordedLink
from fedstill.deployment.delivery import deliver
from fedstill.deployment.episodes import TOTALS, EpisodeLoop
from fedstill.deployment.masked_rounds import MaskedRound
from fedstill.deployment.protocol import (
    BALANCED,
    BY_CLASS,
    RunInfo,
    SiteLink,
    are_counts,
    class_counts_of,
    failure_reason,
    run_number,
    scores_of,
)
from fedstill.deployment.registry import SiteRegistry
from fedstill.deployment.statistics import StatisticsPoll
from fedstill.deployment.waiting import RequestDeadline, ResponseTimes
from fedstill.engine.base import Engine, Inline, LocalTest
from fedstill.engine.worker import Request, Score, Source, Train, Worker, kind_of, request_fields
from fedstill.methods import registry as methods
from fedstill.methods.base import Part
from fedstill.metrics.scores import ClassCounts
from fedstill.models.base import frozen_digest
from fedstill.running import api, files
from fedstill.running.callbacks import Callback
from fedstill.running.directory import RunDirectory
from fedstill.running.inputs import check_inputs, save_inputs, saved_table, saved_tokenizer
from fedstill.running.logfile import logging_to
from fedstill.running.loop import RoundLoop, refuse_changes
from fedstill.running.result import Result
from fedstill.running.rollback import ROLLBACKS
from fedstill.running.uplinks import fewest_answers

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
    ) -> None:
        """Without a `worker` nothing is tested here; `least`: how many answers are enough for a round.

        With `masked`, which gives what the clients of a region send, only the sum of their updates arrives here.
        """
        self._masked = masked
        self._link, self._registry, self._terms, self._least = link, registry, terms, least
        self._times = ResponseTimes(terms.wait_after)
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
            yield from self._clients(requests, lambda client: down)

    def run_all(self, broadcasts: Sequence[tuple[Sequence[Request], Message]]) -> list[Iterator[Tree]]:
        """All at once: sites are not to wait for those of another group or region."""
        if len(broadcasts) == 1 or self._masked is not None:
            return super().run_all(broadcasts)
        requests: list[Any] = [request for some, _ in broadcasts for request in some]
        down = {request.client: down for some, down in broadcasts for request in cast(Sequence[Train], some)}
        answers = self._clients(requests, down.__getitem__)
        return [itertools.islice(answers, len(some)) for some, _ in broadcasts]

    def _clients(self, requests: Sequence[Any], down: Callable[[int], Message]) -> Iterator[Tree]:
        first = requests[0]
        bodies = {request.client: request_fields(request) for request in requests}
        arriving = self._exchange(first, down, bodies, kind_of(first), self._least, trains=True)
        answers: dict[int, Any] = {}
        for client in bodies:
            while client not in answers:
                sender, answer = next(arriving)
                answers[sender] = answer
            yield answers.pop(client)

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


def serve(
    config: Config,
    names: Sequence[str],
    link: SiteLink,
    out: Path,
    *,
    terms: Terms,
    pause: Callable[[dict[str, str]], bool],
    callbacks: Sequence[Callback] = (),
    regional: bool = False,
    revoked: Collection[str] = (),
) -> Result:
    """Run a federation of sites, or continue it if it was begun in `out`.

    `regional`: each name is a regional server, with sites of its own. `pause` gets the missing sites (and why, if
    that is known), waits a little, and returns whether to wait on. `revoked` sites may belong to the run; none is
    waited for.
    """
    _check(config, regional=regional)
    if regional:
        clients = regions_of(config, names)
    else:
        with_keys, names = names, _order(out, names, revoked)
        config = config.model_copy(update={"clients": len(names)})
    # What a checkpoint does not have would have to be requested from the sites again.
    config = config.model_copy(update={"checkpoint_every": 1})
    dataset = dataset_in(load_data(config, saved_tokenizer(out)))
    exists = (out / files.CONFIG).is_file()
    directory = RunDirectory.open(out) if exists else _created(out, config)
    try:
        directory.check_rounds(config.rounds)
        link = RecordedLink(link, out / files.RECEIVED)
        # Every request has the settings, without the server's own folder: with many sites it takes long to write them.
        number, settings = _number(directory), numbered(config, names).model_copy(update={"data_dir": ""}).toml()
        rollbacks = directory.served_run().get(ROLLBACKS, [])
        _check_counts(directory, names, terms)
        if not regional:
            write_sealed_json(directory.path / files.SERVED, directory.served_run() | {"sites": names})
            clients = {name: np.array([k]) for k, name in enumerate(names)}
        frozen: list[str] = []  # the digest of each network's frozen part, where there is one
        steps: list[int] = []  # of an epoch in each region, once the sites have reported their numbers of samples
        weights: list[float] = []  # of each class, likewise

        def run_info() -> RunInfo:
            return {
                "number": number,
                "config": settings,
                "clients": config.clients,
                "classes": list(dataset.classes),
                "mean": list(dataset.mean),
                "std": list(dataset.std),
                "shape": list(dataset.shape),
                "tokenizer": dataset.tokenizer,  # all must make the same tokens of text
                "table": dataset.table.model_dump_json() if dataset.table else "",  # and the same of a row
                "steps": steps,
                "class_weight": weights,
                "frozen": frozen,
                "checkpoint": directory.oldest_checkpoint(),
                ROLLBACKS: rollbacks,
            }

        def new_registry() -> SiteRegistry:
            return SiteRegistry(
                clients,
                dataset,
                undivided(config, dataset),
                run_info,
                total=config.clients,
                names=() if regional else names,
                changing=regional,
                max_share=config.max_share,
                path=directory.path / files.COUNTS,
                by_class=config.class_weight == BALANCED,
                validation=config.validation,
            )

        with logging_to(directory.path / files.LOG):
            wanted = set(names) - set(revoked)
            for name in set(names) - wanted:
                log.warning("%s belongs to this run, and its key was revoked: the run goes on without it", name)
            for name in () if regional else sorted(set(with_keys) - set(names)):
                log.warning("%s is new, and this run has begun without it: it is for the next one", name)
            if dataset.table is not None:
                saved = saved_table(out) if directory.oldest_checkpoint() else None
                poll = StatisticsPoll(new_registry(), dataset.table, config)
                dataset = with_table(dataset, saved or _columns(config, poll, link, wanted, terms, pause))
            registry = new_registry()
            registry.counts.forget(terms.recount)
            _gather(registry, link, wanted, terms, pause)
            setup = prepare(config, data=registry.federation, elsewhere=True)
        if exists and directory.oldest_checkpoint():
            refuse_changes(fixed(directory.config()), fixed(anchored(config)))
            check_inputs(setup, out)
        save_inputs(setup, directory)
        directory.write_config(anchored(config))
    except BaseException:
        directory.release()
        raise
    frozen += _frozen_digests(setup)
    steps += [region.task.local.steps_per_epoch for region in setup.hierarchy.regions]
    weights += _class_weight(directory, setup, registry)
    loop_class, least = (EpisodeLoop, 1) if regional else (RoundLoop, fewest_answers(config, setup.method))

    def engine(worker: Worker) -> Engine:
        # Regional servers see sums alone, and send their models as they are.
        return SiteEngine(worker, link, registry, terms, least=least, masked=None if regional else _declared(setup))

    return api.run_in_directory(
        setup,
        directory,
        callbacks,
        engine,
        loop_class=loop_class,
        at_end=lambda loop: deliver(
            link,
            registry,
            loop.final_models(),
            setup.client_groups if setup.hierarchy.separate else (),
            timeout=terms.timeout,
        ),
    )


def _frozen_digests(setup: Setup) -> list[str]:
    """What tells each network's frozen part from others; nothing where there is none."""
    tasks = [group.task for group in setup.groups] or [setup.task]
    digests = [frozen_digest(task.build().module) for task in tasks]
    return digests if any(digests) else []


def _declared(setup: Setup) -> Callable[[int], Mapping[str, Part]] | None:
    """What clients send, by region, if it is to be masked."""
    if not setup.config.secure_aggregation:
        return None
    return lambda number: setup.hierarchy.regions[number].method.wire(setup.hierarchy.regions[number].task).up


def _class_weight(directory: RunDirectory, setup: Setup, registry: SiteRegistry) -> list[float]:
    """How much each class counts in this run, also after a restart: sites that come later change nothing."""
    if setup.config.class_weight != BALANCED:
        return list(setup.task.local.class_weight)
    path = directory.path / files.SERVED
    saved = directory.served_run()
    if "class_weight" not in saved:
        saved |= {"class_weight": balanced_weights(registry.class_counts())}
        write_sealed_json(path, saved)
    return [float(weight) for weight in saved["class_weight"]]


def _columns(
    config: Config,
    poll: StatisticsPoll,
    link: SiteLink,
    wanted: set[str],
    terms: Terms,
    pause: Callable[[dict[str, str]], bool],
) -> TablePreprocessing:
    """What a table's columns are, and are standardised by: as declared, or else by what the sites report."""
    if is_declared(config):
        return declared(config)
    _gather(poll, link, wanted, terms, pause)
    return poll.settled()


def _gather(
    poll: SiteRegistry | StatisticsPoll,
    link: SiteLink,
    wanted: set[str],
    terms: Terms,
    pause: Callable[[dict[str, str]], bool],
) -> None:
    """Poll sites until all that are wanted have answered, or `pause` ends the waiting and enough have."""
    while True:
        poll.poll(link, timeout=terms.timeout)
        missing = {name: why for name, why in poll.missing.items() if name in wanted}
        if not missing or not pause(missing):
            break
    if poll.reported_sites < (needed := min(terms.needed, len(wanted))):
        raise FedstillError(f"only {poll.reported_sites} of {len(wanted)} sites are there, {needed} are needed")


def _created(out: Path, config: Config) -> RunDirectory:
    """For its owner alone, as what each site sent may be in there; the owner may share it later."""
    directory = RunDirectory.create(out, anchored(config))
    private_folder(out)
    return directory


def _check(config: Config, *, regional: bool) -> None:
    """Refuse what only a run on one machine can do, and a device that this one has not."""
    find(config.device)
    if regional and (config.target or config.columns) and not is_declared(config):
        raise SettingError("columns: of tables in regions, all must be declared, as 'fedstill columns' does")
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
    if config.class_weight == BALANCED:
        raise SettingError("class_weight = 'balanced': regions do not pass class counts on; give numbers instead")
    if methods.make(config.method, config.hyper).has_final_exchange:
        raise SettingError(f"{config.method} asks every client once more at the end, which regions do not pass on")
    called = wanted if any(wanted) else sorted(names)
    return dict(zip(called, assign(config, config.clients), strict=True))


def _number(directory: RunDirectory) -> str:
    """The number that identifies this run, also after a restart: a site's state belongs to one run."""
    path = directory.path / files.SERVED
    if not path.exists():
        if directory.checkpoint_rounds() or directory.records():
            raise FedstillError(
                f"{path} is missing, though rounds are done: sites would take this for another run, and begin anew; "
                f"put it back from a copy, or begin again: 'fedstill rollback {directory.path} --to 0'"
            )
        write_sealed_json(path, {"number": secrets.token_hex(8), "sites": []})
    return run_number(directory.served_run())


def _check_counts(directory: RunDirectory, names: Sequence[str], terms: Terms) -> None:
    """Refuse to believe anew what sites say that they have, unless that is asked for."""
    path, known = directory.path / files.COUNTS, set(names) <= set(terms.recount)
    # Directories of earlier versions, which have no index, had no such file.
    if directory.checkpoint_rounds() and directory.client_store.run and not path.exists() and not known:
        raise FedstillError(
            f"{path} is missing, though rounds are done; put it back from a copy, or have all sites report their "
            "numbers of samples anew: --recount NAME, for each of them"
        )


def _order(out: Path, names: Sequence[str], revoked: Collection[str]) -> list[str]:
    """The sites of a run, in the order of their clients: those of a new one by name, and of one that has begun its own.

    A run that has begun keeps the number of its clients: one that was revoked is absent from now on, and one that was
    added since is left out.
    """
    begun = RunDirectory.open(out, lock=False).served_run() if (out / files.SERVED).exists() else {}
    members: list[str] = begun.get("sites", [])
    if not members:
        return sorted(names)
    for name in members:
        if name not in names and name not in revoked:
            hint = "its key is needed, or 'fedstill keys revoke', to go on without it"
            raise SettingError(f"site {name} belongs to this run; {hint}")
    return members
