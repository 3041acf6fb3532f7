"""A regional server: runs its sites' rounds, and answers the global server once an episode."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.attacks.attack import Attack
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.tree import Message, Tree
from fedstill.data.dataset import Dataset, Split
from fedstill.data.federation import Federation
from fedstill.data.partition import IntArray
from fedstill.engine.base import Engine
from fedstill.engine.worker import Score, Train, made
from fedstill.experiment.config import Config, anchored
from fedstill.experiment.episodes import TOTALS
from fedstill.experiment.logfile import logging_to
from fedstill.experiment.machine import one_thread
from fedstill.experiment.regions import Hierarchy, Region, assign
from fedstill.experiment.rundir import Record, RunDirectory, without_nan
from fedstill.experiment.runner import Listener, Run
from fedstill.experiment.setup import Setup, load_data, local_training, make_task, regional_method, undivided
from fedstill.experiment.sites import Link, Own, Roll, Sites, Terms
from fedstill.methods import registry

log = logging.getLogger(__name__)

_PATIENCE = 20.0  # seconds for which a region waits for its sites before it says how much they hold


class Rounds(Run):
    """A regional server's run."""

    def episode(self, engine: Engine, model: Tensor, last: int, *, measure: bool) -> Tree:
        """The rounds up to the `last` of an episode, which begins with the global `model`; or the rest of them."""
        first = last - self.setup.config.rounds_per_episode + 1
        if not first <= self.server.round <= last:  # else it has begun, or was done, before this process was
            if self.server.round > last:
                log.warning("the global server went back from round %d to %d", self.server.round, first)
            self.server.round, self.server.model = first - 1, model
        self._count_samples()
        for round_ in range(self.server.round + 1, last + 1):
            began = time.perf_counter()
            tally, _ = self._train(engine, round_, measure=measure and round_ == last)
            if not torch.isfinite(self.server.model).all():
                raise FedstillError(f"round {round_}: the region's model is no longer finite; a smaller lr may help")
            record: Record = {"round": round_, **{name: getattr(tally, name) for name in TOTALS}}
            record |= {name: tally.mean(name) for name in ("train_loss", "local_accuracy")}
            record["seconds"] = time.perf_counter() - began
            self.records.append(without_nan(record))
            self.directory.append(self.records[-1])
            self._checkpoint()
            log.info(
                "round %d: train_loss %s, %d of %d clients",
                round_,
                record["train_loss"],
                tally.clients - tally.dropped,
                tally.clients,
            )
        rounds = [record for record in self.records if first <= record["round"] <= last]
        metrics = {name: float(sum(record[name] for record in rounds)) for name in TOTALS}
        means = {name: rounds[-1][name] for name in ("train_loss", "local_accuracy") if rounds[-1][name] is not None}
        only = self.setup.hierarchy.regions[0]
        samples = int(self.setup.federation.sizes.sum())
        return {"samples": samples, "metrics": metrics | means, "message": {"model": self.regional_model(only)}}


class RegionalServer:
    """Answers a global server as a site does, for all of its own sites together."""

    def __init__(
        self,
        directory: Path,
        names: Sequence[str],
        link: Callable[[Config], Link],
        *,
        own: Own,
        terms: Terms,
        listener: Listener | None = None,
    ) -> None:
        """`link` connects to the sites called `names`, once a run's settings are known."""
        self._directory, self._names, self._connect = directory, sorted(names), link
        self._own, self._terms, self._listener = own, terms, listener
        self._link: Link | None = None
        self._region: _Attended | None = None

    def handle(self, asked: Tree) -> Tree:
        told, body, down = asked["run"], asked["request"], asked["down"]
        try:
            region = self._attend(told)
            if body is None:
                return region.held()
            request = made(body)
            with one_thread():
                if isinstance(request, Score):
                    return region.scored(down)
                if isinstance(request, Train):
                    return region.trained(down["model"], request)
            raise SettingError(f"a region does not pass {type(request).__name__} on")
        except BaseException:
            self.close()  # a round that was cut short leaves no trace: the run is read again from its directory
            raise

    def close(self) -> None:
        """Let go of the run, which can go on from its directory."""
        if self._region is not None:
            self._region.close()
            self._region = None

    def _attend(self, told: dict[str, Any]) -> _Attended:
        """Turn to the run that a question is about."""
        if self._region is None or self._region.told["number"] != told["number"]:
            self.close()
            config = self._own.config(told["config"])
            if config.flat:
                raise SettingError("the server's run has no regions; sites join it with 'fedstill join'")
            number, members = _region_of(config, told["client"])
            if len(members) != len(self._names):
                raise SettingError(
                    f"the region has {len(members)} clients in the settings, and there are keys of {len(self._names)}"
                )
            if self._link is None:
                self._link = self._connect(config)
            clients = {name: int(k) for name, k in zip(self._names, members, strict=True)}
            place = self._directory / "runs" / told["number"]
            self._region = _Attended(config, told, number, clients, self._link, place, self._terms, self._listener)
        self._region.told = told
        return self._region


def _region_of(config: Config, client: int) -> tuple[int, IntArray]:
    """The number of a client's region, and its clients in order."""
    everywhere = assign(config, config.clients)
    number = next(n for n, members in enumerate(everywhere) if client in members)
    return number, np.sort(everywhere[number])


class _Attended:
    """A region's part in one run: its sites, and its rounds once the first episode is asked for."""

    def __init__(
        self,
        config: Config,
        told: dict[str, Any],
        number: int,
        clients: dict[str, int],
        link: Link,
        place: Path,
        terms: Terms,
        listener: Listener | None,
    ) -> None:
        self.told, self._config, self._number, self._clients = told, config, number, clients
        self._link, self._terms, self._listener = link, terms, listener
        self._own = config.each_region()[number]
        self._whole = registry.make(config.method, config.hyper)
        self._method = regional_method(self._own, config, self._whole)
        with ExitStack() as opened:
            begun = (place / "config.toml").is_file()
            self._directory = RunDirectory.open(place) if begun else RunDirectory.create(place, anchored(config))
            opened.callback(self._directory.release)
            opened.enter_context(logging_to(place / "log.txt"))
            dataset, pool = self._data()
            self._roll = Roll(
                {name: np.array([k]) for name, k in clients.items()}, dataset, pool, self._tell, of=config.clients
            )
            self._opened = opened.pop_all()
        self._sites = Sites(None, link, self._roll, terms)
        self._rounds: Rounds | None = None

    def close(self) -> None:
        self._opened.close()

    def held(self) -> Tree:
        """How much the sites hold; those that are not there yet: nothing."""
        until = time.monotonic() + _PATIENCE
        while True:
            self._roll.call(self._link, timeout=self._terms.timeout)
            if self._roll.known == len(self._clients) or time.monotonic() > until:
                break
            time.sleep(0.2)
        if self._roll.known < self._terms.needed:
            raise FedstillError(
                f"only {self._roll.known} of {len(self._clients)} sites are there, {self._terms.needed} are needed"
            )
        members, federation = list(self._clients.values()), self._roll.federation
        return {"samples": federation.sizes[members].tolist(), "tests": federation.test_sizes[members].tolist()}

    def scored(self, down: Message) -> Tree:
        """How often a model is right on each site's own tests."""
        hits = self._sites.hits(down)
        return {"hits": [hits.get(client, -1) for client in self._clients.values()]}

    def trained(self, model: Tensor, request: Train) -> Tree:
        """An episode of the region."""
        if self._rounds is None:
            self._rounds = Rounds(self._setup(), self._directory, self._listener)
        return self._rounds.episode(self._sites, model, request.round, measure=request.measure)

    def _tell(self) -> dict[str, Any]:
        """What the sites are told about the run: what the global server tells, but that checkpoints are made here."""
        return {**self.told, "checkpoint": self._directory.oldest_checkpoint()}

    def _data(self) -> tuple[Dataset, Federation]:
        """What this server itself holds: what its method needs; otherwise samples in name only."""
        needs = self._method.needs()
        if needs.server_labels or needs.proxy_data:
            dataset = load_data(self._config)
        else:
            self._config = self._config.model_copy(update={"proxy": "", "pool": 0.0})
            told = self.told
            nothing = Split(torch.zeros(2, *told["shape"]), torch.zeros(2, dtype=torch.int64))
            dataset = Dataset("", nothing, nothing, *(tuple(told[name]) for name in ("classes", "mean", "std")))
        return dataset, undivided(self._config, dataset)

    def _setup(self) -> Setup:
        config, federation = self._config, self._roll.federation
        settings = config.model_copy(update=self._own.of_its_own())
        local = replace(local_training(settings, federation), steps_per_epoch=self.told["steps"][self._number])
        task = make_task(config, federation, self._whole).trained_as(local)
        name = self._own.name or f"region {self._number + 1}"
        members = np.array(list(self._clients.values()))
        region = Region(self._number, name, members, self._method, task, settings.participation)
        return Setup(config, task, federation, self._method, Hierarchy((region,)), Attack())
