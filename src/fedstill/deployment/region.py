"""A regional server: runs its sites' rounds, and answers the global server once an episode."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fedstill.attacks.attack import Attack
from fedstill.building.config import Config, anchored
from fedstill.building.data import load_data, undivided
from fedstill.building.setup import Setup, largest_answer
from fedstill.building.task import local_training, make_task
from fedstill.building.topology import Hierarchy, Region, assign, regional_method
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.reports import Code, Refusal, Step, during
from fedstill.core.tree import Message, Tree
from fedstill.data import download
from fedstill.data.dataset import Dataset, Split
from fedstill.data.federation import Federation
from fedstill.deployment import policy as policies
from fedstill.deployment.audit import SENT, AuditLog, Recorded, sent
from fedstill.deployment.episodes import TOTALS
from fedstill.deployment.policy import Policy
from fedstill.deployment.server import Link, Roll, Sites, Terms
from fedstill.deployment.site import Own, check_tokenizer, run_number
from fedstill.engine.worker import Score, Train, made
from fedstill.methods import registry
from fedstill.methods.base import Method
from fedstill.methods.kinds import Kind
from fedstill.metrics.records import RoundRecord, value_of
from fedstill.running import files
from fedstill.running.directory import RunDirectory, without_nan
from fedstill.running.logfile import logging_to
from fedstill.running.loop import Listener, Run
from fedstill.running.machine import one_thread
from fedstill.running.rollback import ROLLBACKS, seen, unseen
from fedstill.running.uplinks import TooFewClients

log = logging.getLogger(__name__)

_PATIENCE = 20.0  # seconds for which a region waits for its sites before it says how much they hold
_MARGIN = 0.9  # the share of the time for an episode that its rounds may take


class Rounds(Run):
    """A regional server's run."""

    def episode(self, sites: Sites, model: Tensor, last: int, *, measure: bool, seconds: float) -> Tree:
        """The rounds up to the `last` of an episode, which begins with the global `model`; or the rest of them.

        Of the `seconds` that there are, no site can take more than its round's share.
        """
        end = time.monotonic() + _MARGIN * seconds
        first = last - self.setup.config.rounds_per_episode + 1
        if self.server.round > last:
            self.go_back(first - 1)
        if self.server.round < first:  # else it has begun, or was done, before this process was
            self.server.round, self.server.model = first - 1, model
        self._count_samples()
        for round_ in range(self.server.round + 1, last + 1):
            began = time.perf_counter()
            sites.patience = (end - time.monotonic()) / (last + 1 - round_)
            tally, _ = self._train(sites, round_, measure=measure and round_ == last)
            if not torch.isfinite(self.server.model).all():
                raise FedstillError(f"round {round_}: the region's model is no longer finite; a smaller lr may help")
            record: RoundRecord = {
                "round": round_,
                "clients": tally.clients,
                "bytes_down": tally.bytes_down,
                "bytes_up": tally.bytes_up,
                "dropped": tally.dropped,
                "train_loss": tally.mean("train_loss"),
                "local_accuracy": tally.mean("local_accuracy"),
                "seconds": time.perf_counter() - began,
            }
            if tally.left_out:
                record["left_out"] = tally.left_out
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
        self.directory.settle()  # what is answered has happened
        rounds = [record for record in self.records if first <= record["round"] <= last]
        metrics = {name: float(sum(value_of(record, name) or 0 for record in rounds)) for name in TOTALS}
        known = {name: value_of(rounds[-1], name) for name in ("train_loss", "local_accuracy")}
        means = {name: mean for name, mean in known.items() if mean is not None}
        only = self.setup.hierarchy.regions[0]
        samples = int(self.setup.federation.sizes.sum())
        return {"samples": samples, "metrics": metrics | means, "message": {"model": self.regional_model(only)}}

    def go_back(self, round_: int) -> None:
        """Be where the region was after a round, as the global server is."""
        log.warning("the global server went back, and so do we, from round %d to %d", self.server.round, round_)
        self.directory.go_back(round_)
        if round_ in self.directory.checkpoint_rounds():
            self._take(self.directory.read_checkpoint(round_))
        elif round_ == 0:
            self.server.state, self._norms = {}, {}
            self.setup.hierarchy.regions[0].method.start(self.server)
        elif self.server.state:
            raise FedstillError(f"the region no longer knows round {round_}; 'fedstill rollback' to 0 begins anew")
        self.server.round, self.records = round_, self.directory.records()


class RegionalServer:
    """Answers a global server as a site does, for all of its own sites together."""

    def __init__(
        self,
        directory: Path,
        names: Sequence[str],
        connect: Callable[[int], AbstractContextManager[Link]],
        *,
        own: Own,
        terms: Terms,
        listener: Listener | None = None,
        revoked: Sequence[str] = (),
        policy: Policy | None = None,
    ) -> None:
        """`connect` lets the sites called `names` in, and no answer with more bytes than it is given.

        `revoked` ones may belong to a run that goes on without them.
        """
        self.directory, self._names, self._revoked = directory, sorted(names), sorted(revoked)
        self.own, self.terms, self.listener = own, terms, listener
        self.policy = policy or Policy()
        self._connect = connect
        self._audit = AuditLog(directory / SENT)
        self._link: tuple[int, Link] | None = None
        self._linked = ExitStack()
        self._attended: _Attended | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._forget()
        self._linked.close()

    def handle(self, asked: Tree) -> Tree:
        body, down = asked["request"], asked["down"]
        try:
            run = self._attend(asked["run"])
            if body is None:
                return run.held()
            request = made(body)
            with one_thread():
                if isinstance(request, Score):
                    return run.scored(down)
                if isinstance(request, Train):
                    return run.trained(down["model"], request, asked["seconds"])
            raise SettingError(f"a region does not pass {type(request).__name__} on")
        except BaseException as error:
            if self._attended is not None:
                self._attended.rounds = None  # one that was cut short leaves no trace: it is read from its directory
            if isinstance(error, TooFewClients):
                raise Refusal(Code.TOO_FEW_SITES, str(error)) from error
            raise

    def record(self, asked: Tree, answer: Tree) -> None:
        """Write down what is about to be sent, in the region's audit log."""
        self._audit.append(**sent(asked, answer, {"model": Kind.WEIGHTS}))

    def _attend(self, told: dict[str, Any]) -> _Attended:
        """Turn to the run that a question is about."""
        if self._attended is None or self._attended.told["number"] != told["number"]:
            self._forget()
            self._attended = _Attended(self, told)
        self._attended.told = told
        return self._attended

    def names(self, count: int) -> list[str]:
        """The `count` sites of a run, in the order of their clients."""
        everyone = sorted({*self._names, *self._revoked})
        return everyone if len(everyone) == count else self._names

    def _forget(self) -> None:
        """Let go of the run, which can go on from its directory."""
        if self._attended is not None:
            self._attended.close()
            self._attended = None

    def link(self, most_bytes: int) -> Link:
        """The connection to the sites; a new one if answers may be larger than before."""
        if self._link is None or self._link[0] < most_bytes:
            self._linked.close()
            self._link = most_bytes, self._linked.enter_context(self._connect(most_bytes))
        return self._link[1]


class _Attended:
    """A region's part in one run: its sites, and its rounds once the first episode is asked for."""

    def __init__(self, server: RegionalServer, told: dict[str, Any]) -> None:
        self.told, self._server = told, server
        with during(Step.SETTINGS):
            config = server.own.config(policies.check_text(told["config"]))
            policies.check_settings(server.policy, config)
            policies.check_run(server.policy, told)
            if told["tokenizer"]:
                check_tokenizer(told["tokenizer"])
        if config.flat:
            raise SettingError("the server's run has no regions; sites join it with 'fedstill join'")
        everywhere = assign(config, config.clients)
        self._number = next(n for n, members in enumerate(everywhere) if told["client"] in members)
        self._members = np.sort(everywhere[self._number])
        names = server.names(len(self._members))
        if len(self._members) != len(names):
            raise Refusal(
                Code.SITES_MISCOUNTED,
                f"the region has {len(self._members)} clients in the settings, and keys of {len(names)} here",
            )
        self._own = config.each_region()[self._number]
        self._whole = registry.make(config.method, config.hyper)
        self._method = regional_method(self._own, config, self._whole)
        own = bool(server.own.data) or server.policy.download
        with during(Step.LOAD), nullcontext() if own else download.refused():
            self._config, holds = _held_here(config, self._method, told)
        policies.check_network(server.policy, self._config, holds.dataset, self._whole)
        place = server.directory / "runs" / run_number(told)
        self._link: Link = Recorded(server.link(largest_answer(self._config, holds)), place / files.RECEIVED)
        clients = {name: np.array([k]) for name, k in zip(names, self._members, strict=True)}
        self._roll = Roll(
            clients,
            holds.dataset,
            holds,
            self._tell,
            of=config.clients,
            max_share=config.max_share,
            kept=place / files.COUNTS,
        )
        self._roll.counts.forget(server.terms.recount)
        self._sites = Sites(None, self._link, self._roll, server.terms, least=config.min_clients)
        self.rounds: Rounds | None = None
        with ExitStack() as opened:
            begun = (place / files.CONFIG).is_file()
            self._directory = RunDirectory.open(place) if begun else RunDirectory.create(place, anchored(self._config))
            opened.callback(self._directory.release)
            opened.enter_context(logging_to(place / files.LOG))
            self._opened = opened.pop_all()
        self._directory.pinned = self._is_global

    def close(self) -> None:
        self._opened.close()

    def held(self) -> Tree:
        """How much the sites hold; those that are not there yet: nothing."""
        # A run that has begun goes on with whoever is there; the others are let in before the next round. But when this
        # process is new, sites have yet to come back.
        needed = 1 if self._directory.oldest_checkpoint() else self._server.terms.needed
        met, count = self._roll.known >= needed, len(self._members)
        until = time.monotonic() + _PATIENCE
        while True:
            self._roll.call(self._link, timeout=min(_PATIENCE, self._server.terms.timeout))
            if met or self._roll.known == count or time.monotonic() > until:
                break
            time.sleep(0.2)
        if self._roll.known < needed:
            raise Refusal(
                Code.TOO_FEW_SITES, f"only {self._roll.known} of {count} sites are there, {needed} are needed"
            )
        federation = self._roll.federation
        sizes, tests = federation.sizes[self._members], federation.test_sizes[self._members]
        return {"samples": sizes.tolist(), "tests": tests.tolist()}

    def scored(self, down: Message) -> Tree:
        """How often a model is right on each site's own tests."""
        if not self._roll.known:
            self.held()
        hits = self._sites.hits(down)
        return {"hits": [hits.get(client, -1) for client in self._members.tolist()]}

    def trained(self, model: Tensor, request: Train, seconds: float) -> Tree:
        """An episode of the region."""
        if self.rounds is None:
            self.held()
            self.rounds = Rounds(self._setup(), self._directory, self._server.listener)
        rollbacks, path = self.told.get(ROLLBACKS, []), self._directory.path / files.SERVED
        if (back := unseen(rollbacks, path)) is not None:
            if self.rounds.server.round > back:
                self.rounds.go_back(back)
            seen(rollbacks, path)
        return self.rounds.episode(self._sites, model, request.round, measure=request.measure, seconds=seconds)

    def _is_global(self, round_: int) -> bool:
        """Whether the global server may come back to the end of this round."""
        return round_ % self._config.rounds_per_episode == 0 and round_ >= int(self.told["checkpoint"])

    def _tell(self) -> dict[str, Any]:
        """What the sites are told about the run: what the global server tells, but that checkpoints are made here."""
        return {**self.told, "checkpoint": self._directory.oldest_checkpoint()}

    def _setup(self) -> Setup:
        config, federation = self._config, self._roll.federation
        settings = config.model_copy(update=self._own.of_its_own())
        local = replace(local_training(settings, federation), steps_per_epoch=self.told["steps"][self._number])
        task = make_task(config, federation, self._whole).trained_as(local)
        name = self._own.name or f"region {self._number + 1}"
        region = Region(self._number, name, self._members, self._method, task, settings.participation)
        return Setup(config, task, federation, self._method, Hierarchy((region,)), Attack())


def _held_here(config: Config, method: Method, told: dict[str, Any]) -> tuple[Config, Federation]:
    """What a regional server itself holds: what its method needs; otherwise samples in name only."""
    needs = method.needs()
    if needs.server_labels or needs.proxy_data:
        dataset = load_data(config)
    else:
        config = config.model_copy(update={"proxy": "", "pool": 0.0})
        kind = torch.int32 if told["tokenizer"] else torch.float32
        nothing = Split(torch.zeros(2, *told["shape"], dtype=kind), torch.zeros(2, dtype=torch.int64))
        known = (tuple(told[name]) for name in ("classes", "mean", "std"))
        dataset = Dataset("", nothing, nothing, *known, tokenizer=told["tokenizer"])
    return config, undivided(config, dataset)
