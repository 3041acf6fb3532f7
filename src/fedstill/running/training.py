"""What the servers of a run know, and the training of a round, which changes it.

The way of a round: `train_round` (with retries) → `train_regions` → `_open` for every region, or group → `_close` for
each, where the method's `aggregate` pulls the clients' updates from the engine one at a time. `loop.py` calls it,
evaluates, records and keeps.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from torch import Tensor

from fedstill.building.setup import Setup
from fedstill.building.topology import Region
from fedstill.core import device, seeds, tree
from fedstill.core.errors import FedstillError
from fedstill.core.tree import Message, Tree, first_not_finite, nbytes
from fedstill.engine.base import Engine
from fedstill.engine.worker import FinalExchange, Train
from fedstill.methods.base import Uplink, misfit
from fedstill.methods.summed import averaged
from fedstill.metrics.records import EpisodeModel, EpisodeRecord
from fedstill.running.cohorts import Cohorts
from fedstill.running.colluding import colluding
from fedstill.running.directory import RunDirectory
from fedstill.running.evaluation import tested
from fedstill.running.judging import History, Judge
from fedstill.running.privacy import protects_clients
from fedstill.running.records import Tally
from fedstill.running.retries import Retries
from fedstill.running.servers import make_servers
from fedstill.running.uplinks import Checked, RoundFailed, TooFewClients, fewest_answers

log = logging.getLogger(__name__)

_LOGGED = ("stage", "disagreement")


@dataclass(frozen=True)
class _OpenRound:
    """A region's, or group's, round whose clients are asked."""

    region: Region
    requests: Sequence[Train]
    down: Message
    before: bytes  # of a group: what its server knew, as bytes
    seconds: float  # that the server took for it


@dataclass(frozen=True)
class _ClosedRound:
    """The same once the clients have answered."""

    region: Region
    uplinks: Checked
    trained: bool  # or too few of a group answered, and it keeps its model


class FederatedTraining(ABC):
    """The servers of a run: the global one, and those of its regions or groups."""

    def __init__(self, setup: Setup, directory: RunDirectory) -> None:
        self.setup, self.directory = setup, directory
        self.server, self.regional = make_servers(setup, directory)
        self._cohorts = Cohorts(setup.hierarchy, setup.federation.sizes, setup.config.seed)
        self.active_since_checkpoint: set[int] = set()
        self.update_norms: dict[str, History] = {}  # of what clients elsewhere sent, by region
        self.client_states: dict[str, int] = {}  # the round whose state each of them has; to notice that it is lost

    # --- whoever wants to know what happens -----------------------------------------------------------------------

    @abstractmethod
    def start_round(self, clients: int) -> None: ...

    @abstractmethod
    def client_done(self, client: int, metrics: Mapping[str, float]) -> None: ...

    @abstractmethod
    def round_failed(self, reason: str) -> None: ...

    # --- a round --------------------------------------------------------------------------------------------------

    def count_samples(self) -> None:
        """Somebody came who was not there before."""
        sizes = self.server.sizes[:] = self.setup.federation.sizes
        self._cohorts.count(sizes)
        for region in self.setup.hierarchy.regions:
            self.regional[region.number].sizes[region.clients] = sizes[region.clients]

    def train_round(self, engine: Engine, round_: int, *, measure: bool) -> tuple[Tally, list[Region]]:
        """A round of every region, and which they were; `measure`: clients also test the models they trained."""
        if not engine.remote:
            return self.train_regions(engine, round_, measure=measure)
        self.directory.settle()  # a client elsewhere must not have seen a round that this server, if killed, forgets
        before = tree.encode(self.state())
        retries = Retries(round_, self.setup.config.round_retries, self.directory.path, self.round_failed)
        while True:
            connected = self._connected(engine)
            try:
                return self.train_regions(engine, round_, measure=measure)
            except RoundFailed as error:
                self.load_state(tree.decode(before))
                self.directory.undo_server(round_ - 1)
                names = dict(enumerate(self.setup.federation.names))
                arrived = partial(self._more_than, engine, connected)
                retries.after(error, names, connected=connected >= self.fewest_connected, arrived=arrived)

    @property
    def fewest_connected(self) -> int:
        """How many clients must be able to take part for a round to be worth trying."""
        if self.setup.hierarchy.grouped:
            return self.setup.config.min_clients
        return max(fewest_answers(self.setup.config, region.method) for region in self.setup.hierarchy.regions)

    def _connected(self, engine: Engine) -> int:
        """How many clients can take part: of a group of which too few are there, none."""
        absent, regions = engine.absent(), self.setup.hierarchy.regions
        present = [sum(k not in absent for k in region.clients.tolist()) for region in regions]
        least = [self._fewest(engine, region) if self.setup.hierarchy.grouped else 0 for region in regions]
        return sum(there for there, needed in zip(present, least, strict=True) if there >= needed)

    def _more_than(self, engine: Engine, before: int) -> bool:
        return self._connected(engine) > before

    def train_regions(self, engine: Engine, round_: int, *, measure: bool) -> tuple[Tally, list[Region]]:
        self.server.round = round_
        if engine.poll_newcomers():
            self.count_samples()
        cohorts = self._cohorts.draw(round_, engine.absent(), secret=engine.remote)
        self.start_round(sum(len(cohort) for _, cohort in cohorts))
        tally = Tally()
        opened = [self._open(engine, region, cohort, measure=measure) for region, cohort in cohorts]
        answers = engine.run_all([(each.requests, each.down) for each in opened])
        closed = [self._close(engine, each, own, tally) for each, own in zip(opened, answers, strict=True)]
        if self.setup.hierarchy.grouped:
            self._check_enough(closed)
            self._across_groups(tally)
        for each in closed:
            if each.trained:
                each.region.method.end(self.regional[each.region.number])
        self.active_since_checkpoint.update(k for _, cohort in cohorts for k in cohort)
        if engine.remote:
            self._check_finite(round_)
        return tally, [each.region for each in closed if each.trained]

    def _check_finite(self, round_: int) -> None:
        """Refuse what the servers have become, if finite answers added up to something else."""
        for server in (self.server, *self.regional.values()):
            known = {"the model": server.model, **tree.tensors(server.state, "its state")}
            if (bad := first_not_finite(known)) is not None:
                raise RoundFailed(f"round {round_}: {bad} is no longer finite on the server; a smaller lr may help")

    def judge(self, engine: Engine, sent: Message, where: str) -> Judge | None:
        """Who compares the answers, where clients are not known."""
        if not engine.remote:
            return None
        return Judge(self.setup.config.max_update_ratio, sent, self.update_norms.setdefault(where, {}))

    def _open(self, engine: Engine, region: Region, cohort: list[int], *, measure: bool) -> _OpenRound:
        """Begin a round of a federation: of all clients, or of a region's or group's."""
        method, server, round_ = region.method, self.regional[region.number], self.server.round
        began = time.perf_counter()
        before = tree.encode({"model": server.model, "state": server.state}) if self.setup.hierarchy.grouped else b""
        server.round, server.notes = round_, {}
        server.drawn, server.simulated = self._cohorts.drawn[region.number], not engine.remote
        server.cohort, server.ensembles = cohort, {}  # whose updates of a round that failed are not to teach
        method.begin(server)
        down = method.downlink(server)
        if problem := misfit(down, method.wire(region.task).down):
            raise FedstillError(f"what the server is about to send is not what {method.name} declares: {problem}")
        requests = [Train(k, round_, measure, self._trained_as(region, k), self._state_of(k)) for k in cohort]
        return _OpenRound(region, requests, down, before, time.perf_counter() - began)

    def _close(self, engine: Engine, opened: _OpenRound, answers: Iterator[Tree], tally: Tally) -> _ClosedRound:
        """Aggregate what its clients answer. A group of which too few do is as it was before the round."""
        config, region, down = self.setup.config, opened.region, opened.down
        method, server, wire = region.method, self.regional[region.number], region.method.wire(region.task)
        round_ = self.server.round
        began, private = time.perf_counter(), protects_clients(method)
        uplinks = Checked(
            server.cohort,
            answers,
            wire.up,
            least=self._fewest(engine, region),
            tick=self.client_done,
            names=self.setup.federation.names,
            # Whoever is left out because of others could tell of them: private updates are clipped instead. Masked ones
            # cannot be looked at.
            judge=None if private or config.secure_aggregation else self.judge(engine, down, str(region.number)),
            masked=config.secure_aggregation,
        )
        with self._stream("server layers", region.number):
            # Nothing has run yet: the clients train while `aggregate` pulls their updates out of the engine's iterator.
            received, attack = iter(uplinks), self.setup.attack
            received = colluding(attack, method, server, received) if attack.colludes else received
            if config.secure_aggregation and not engine.remote:  # of clients elsewhere nothing but the mean arrives
                received = averaged(received, wire.up)
            trained = True
            try:
                method.aggregate(server, received)
            except TooFewClients as error:
                if not opened.before:
                    raise
                trained = False
                log.warning("%s keeps its model: %s", region.name, error)
                known, earlier = tree.decode(opened.before), server.state
                server.model, server.state = known["model"], known["state"]
                if method.guarantee and earlier:
                    method.guarantee.remember(server, earlier)
                self.directory.settle()
                server.store.rollback(round_ - 1)
        self.client_states |= {str(k): uplinks.states[k] for k in uplinks.good if k in uplinks.states}
        tally.add(uplinks, nbytes(down) * len(server.cohort))
        tally.left_out += self.client_names(uplinks.dropped) if engine.remote else []
        tally.server_seconds += opened.seconds + time.perf_counter() - began - uplinks.waited
        return _ClosedRound(region, uplinks, trained)

    def _fewest(self, engine: Engine, region: Region) -> int:
        """How many usable answers a region's round needs, or a group's, of whose clients one may have been drawn."""
        config, method = self.setup.config, region.method
        if self.setup.hierarchy.grouped:
            return max(part.fewest_clients for part in method.parts()) if engine.remote else 1
        least = fewest_answers(config, method) if engine.remote else config.min_clients
        by_chance = protects_clients(method) and method.guarantee and method.guarantee.sampling == "poisson"
        return min(least, len(self.regional[region.number].cohort)) if by_chance else least  # nobody may be drawn

    def _check_enough(self, closed: Sequence[_ClosedRound]) -> None:
        """Of all groups together, of which some may have been left out."""
        good = sum(len(each.uplinks.good) for each in closed if each.trained)
        if good < (least := self.setup.config.min_clients):
            dropped = {client: why for each in closed for client, why in each.uplinks.dropped.items()}
            raise TooFewClients(
                good, sum(len(self.regional[each.region.number].cohort) for each in closed), least, dropped
            )

    def _trained_as(self, region: Region, client: int) -> int:
        """Which of the worker's pairs of task and method a client trains with: its group's, or its region's."""
        return self.setup.group_of[client] if self.setup.groups else region.number

    def _across_groups(self, tally: Tally) -> None:
        began = time.perf_counter()
        with self._stream("across groups"):
            self.setup.method.across_groups(list(self.regional.values()))
        tally.server_seconds += time.perf_counter() - began

    def _state_of(self, client: int) -> int:
        return self.client_states.get(str(client), 0)

    def aggregate_regions(self, engine: Engine, present: list[Region], *, compare: bool) -> EpisodeRecord:
        """The end of an episode: one model of all regions' models, for all of them."""
        models = {region.name: self.regional_model(region) for region in present}
        teachers: dict[str, EpisodeModel] = {}
        for name, model in models.items() if compare else ():
            accuracy, confusion = tested(engine, self.setup.federation, model, self._network_of[name])
            teachers[name] = {"accuracy": accuracy, "confusion": confusion.tolist()}
        number = self.server.round // self.setup.hierarchy.rounds_per_episode
        if self.setup.config.save_teachers:
            episode_models = {"round": self.server.round, "old": self.server.model, "teachers": models}
            self.directory.save_episode(number, episode_models)
        self.server.notes = {}
        began = time.perf_counter()
        with self._stream("global server layers"):
            if self.setup.hierarchy.separate:
                self._merge_networks(present, models)
            else:
                self.setup.method.merge(self.server, list(models.values()))
        seconds = time.perf_counter() - began
        for server in () if self.setup.hierarchy.separate else self.regional.values():
            server.model = self.server.model
        moved = 2 * sum(nbytes({"model": model}) for model in models.values())
        log.info("episode %d: %s", number, ", ".join(f"{k} {v}" for k, v in self.server.notes.items() if k in _LOGGED))
        episode = {"number": number, "regions": list(models), "bytes": moved, **self.server.notes}
        episode |= {"server_seconds": seconds} | ({"teachers": teachers} if teachers else {})
        return cast(EpisodeRecord, episode)  # with what the method notes, which is its own

    def _merge_networks(self, present: list[Region], models: Mapping[str, Tensor]) -> None:
        """The same where regions have networks of their own: each gets a model; the first's stands for all."""
        servers = list(self.regional.values())
        for server in servers:
            server.round, server.notes = self.server.round, {}
        regions = [Uplink(region.number, 1, {"model": models[region.name]}, region.task) for region in present]
        self.setup.method.merge_networks(servers, regions)
        self.server.model, self.server.notes = servers[0].model, servers[0].notes

    @property
    def _network_of(self) -> dict[str, int]:
        """Which of the worker's networks a region has."""
        separate = self.setup.hierarchy.separate
        return {region.name: region.number if separate else 0 for region in self.setup.hierarchy.regions}

    def regional_model(self, region: Region) -> Tensor:
        """The model of a region: what it would give its own clients."""
        return next(iter(region.method.models(self.regional[region.number]).values()))

    def final_exchange(self, engine: Engine, model: Tensor) -> dict[str, int]:
        """Ask every client that has data once more; what crossed."""
        method, config = self.setup.method, self.setup.config
        clients = np.flatnonzero(self.setup.federation.sizes).tolist()
        down = {"model": model}
        answers = engine.run([FinalExchange(k, config.rounds + 1, self._state_of(k)) for k in clients], down)
        declared, judge = method.wire(self.setup.task).last, self.judge(engine, down, "last")
        uplinks = Checked(clients, answers, declared, least=config.min_clients, tick=lambda *_: None, judge=judge)
        with self._stream("last layers"):
            method.final_aggregate(self.server, iter(uplinks))
        return {
            "bytes_down": nbytes(down) * len(clients),
            "bytes_up": uplinks.bytes_up,
            "dropped": len(uplinks.dropped),
        }

    @contextmanager
    def _stream(self, purpose: str, *where: int) -> Iterator[None]:
        """PyTorch's global stream for layers, such as Dropout, that draw without asking for one of their own."""
        with device.isolated_rng():
            device.seed_layers(seeds.key(self.setup.config.seed, purpose, self.server.round, *where))
            yield

    def client_names(self, clients: Iterable[int]) -> list[str]:
        names = self.setup.federation.client_names
        return [names[k] for k in clients]

    def state(self) -> dict[str, Any]:
        """What the servers know."""
        state: dict[str, Any] = {"model": self.server.model, "state": self.server.state}
        if len(self.regional) > 1 or not self.setup.hierarchy.flat:
            state["regions"] = {str(n): {"model": s.model, "state": s.state} for n, s in self.regional.items()}
        if self.update_norms:
            state["norms"] = self.update_norms
        if self.client_states:
            state["client states"] = self.client_states
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        earlier = self.states()
        self.server.model, self.server.state = state["model"], state["state"]
        self.update_norms, self.client_states = state.get("norms", {}), state.get("client states", {})
        for number, own in state.get("regions", {}).items():
            self.regional[int(number)].model, self.regional[int(number)].state = own["model"], own["state"]
        self.remember(earlier)

    def states(self) -> dict[str, dict[str, Any]]:
        """The state of every region's server, by its number."""
        return {str(number): server.state for number, server in self.regional.items()}

    def remember(self, earlier: Mapping[str, dict[str, Any]]) -> None:
        """Count what was spent in rounds that the servers have gone back behind: clients have answered them."""
        for region in self.setup.hierarchy.regions:
            if region.method.guarantee and (server := self.regional[region.number]).state:
                region.method.guarantee.remember(server, earlier.get(str(region.number), {}))
