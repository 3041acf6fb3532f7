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
from fedstill.building.data import dataset_in, load_data, undivided
from fedstill.building.members import clients_of_regions
from fedstill.building.privacy import with_noise
from fedstill.building.setup import Setup, largest_answer
from fedstill.building.task import local_training, make_task
from fedstill.building.topology import Hierarchy, Region, regional_method
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.files import write_sealed_json
from fedstill.core.reports import Code, Refusal, Step, during
from fedstill.core.tree import Message, Tree
from fedstill.data import download
from fedstill.data.dataset import Dataset, Split
from fedstill.data.federation import Federation
from fedstill.data.statistics import with_table
from fedstill.deployment import policy as policies
from fedstill.deployment.audit import SENT, AuditLog, RecordedLink, answer_entry
from fedstill.deployment.delivery import deliver, is_finish
from fedstill.deployment.episodes import TOTALS
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.policy import Policy
from fedstill.deployment.protocol import BY_CLASS, NO_SCORE, SCORES, VALIDATION, RunInfo, SiteLink, run_number
from fedstill.deployment.registry import SiteRegistry
from fedstill.deployment.site import check_tokenizer
from fedstill.deployment.site_engine import SiteEngine, Terms
from fedstill.engine.worker import Score, Source, Train, request_from
from fedstill.methods import registry
from fedstill.methods.base import Method, Part
from fedstill.methods.kinds import Kind
from fedstill.metrics.records import RoundRecord, value_of
from fedstill.running import files
from fedstill.running.directory import RunDirectory, without_nan
from fedstill.running.logfile import logging_to
from fedstill.running.loop import RoundLoop
from fedstill.running.machine import one_thread
from fedstill.running.privacy import affordable, ledgers
from fedstill.running.rollback import ROLLBACKS, note_spent, seen, unseen
from fedstill.running.uplinks import TooFewClients, fewest_answers

log = logging.getLogger(__name__)

_NEWCOMERS_TIMEOUT = 20.0  # seconds for which a region waits for its sites before it reports their numbers of samples
_MARGIN = 0.9  # the share of the time for an episode that its rounds may take


class RegionalLoop(RoundLoop):
    """A regional server's run.

    Its rounds come an episode at a time, when the global server asks for one, and nothing is evaluated here: so it has
    a loop of its own, around the same `train_round`.
    """

    def episode(self, sites: SiteEngine, model: Tensor, last: int, *, measure: bool, seconds: float) -> Tree:
        """The rounds up to the `last` of an episode, which begins with the global `model`; or the rest of them.

        Of the `seconds` that there are, no site can take more than its round's share.
        """
        end = time.monotonic() + _MARGIN * seconds
        first = last - self.setup.config.rounds_per_episode + 1
        if self.server.round > last:
            self.go_back(first - 1)
        if self.server.round < first:  # else it has begun, or was done, before this process was
            self.server.round, self.server.model = first - 1, model
        self.count_samples()
        left = last - self.server.round
        if (self.records or self.went_back) and left and not affordable(self.setup.hierarchy, self.regional, left):
            raise FedstillError("the region's privacy budget (target_epsilon) does not reach for another episode")
        for round_ in range(self.server.round + 1, last + 1):
            began = time.perf_counter()
            sites.request_timeout = (end - time.monotonic()) / (last + 1 - round_)
            tally, _ = self.train_round(sites, round_, measure=measure and round_ == last)
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
            if (promise := self.promise(tally)) is not None:
                record |= {"epsilon": promise["epsilon"], "privacy": promise}
            self.records.append(without_nan(record))
            self.directory.append(self.records[-1])
            self.checkpoint()
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
        known = {name: value_of(rounds[-1], name) for name in ("train_loss", "local_accuracy", "epsilon")}
        means = {name: mean for name, mean in known.items() if mean is not None}
        only = self.setup.hierarchy.regions[0]
        samples = int(self.setup.federation.sizes.sum())
        return {"samples": samples, "metrics": metrics | means, "message": {"model": self.regional_model(only)}}

    def go_back(self, round_: int) -> None:
        """Be where the region was after a round, as the global server is."""
        log.warning("the global server went back, and so do we, from round %d to %d", self.server.round, round_)
        note_spent(self.directory, ledgers({"regions": {n: {"state": own} for n, own in self.states().items()}}))
        self.directory.go_back(round_)
        if round_ in self.directory.checkpoint_rounds():
            self.load_state(self.directory.read_checkpoint(round_))
        elif round_ == 0:
            earlier = self.states()
            self.server.state, self.update_norms, self.client_states = {}, {}, {}
            self.setup.hierarchy.regions[0].method.start(self.server)
            self.remember(earlier)
        elif self.server.state:
            raise FedstillError(f"the region no longer knows round {round_}; 'fedstill rollback' to 0 begins anew")
        else:
            self.client_states = {}
        self.server.round, self.records = round_, self.directory.records()


class RegionalServer:
    """Answers a global server as a site does, for all of its own sites together."""

    def __init__(
        self,
        directory: Path,
        names: Sequence[str],
        connect: Callable[[int], AbstractContextManager[SiteLink]],
        *,
        inputs: LocalInputs,
        terms: Terms,
        revoked: Sequence[str] = (),
        policy: Policy | None = None,
    ) -> None:
        """`connect` lets the sites called `names` in, and no answer with more bytes than it is given.

        `revoked` ones may belong to a run that goes on without them.
        """
        self.directory, self._names, self._revoked = directory, sorted(names), sorted(revoked)
        self.inputs, self.terms = inputs, terms
        self.policy = policy or Policy()
        self._connect = connect
        self._audit = AuditLog(directory / SENT)
        self._link: tuple[int, SiteLink] | None = None
        self._linked = ExitStack()
        self._current: _RegionRun | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._forget()
        self._linked.close()

    def handle(self, message: Tree) -> Tree:
        body, down = message["request"], message["down"]
        try:
            run = self._open_run(message["run"])
            if body is None:
                return run.sample_counts()
            if is_finish(body):
                run.finish(str(body.get("model")), down)
                return {"received": True}
            request = request_from(body)
            with one_thread():
                if isinstance(request, Score):
                    return run.evaluate(down, request.source)
                if isinstance(request, Train):
                    return run.train(down["model"], request, message["seconds"])
            raise SettingError(f"a region does not pass {type(request).__name__} on")
        except BaseException as error:
            if self._current is not None:
                self._current.rounds = None  # one that was cut short leaves no trace: it is read from its directory
            if isinstance(error, TooFewClients):
                raise Refusal(Code.TOO_FEW_SITES, str(error)) from error
            raise

    def record(self, message: Tree, answer: Tree) -> None:
        """Write down what is about to be sent, in the region's audit log."""
        self._audit.append(**answer_entry(message, answer, {"model": Kind.WEIGHTS, BY_CLASS: Kind.CLASS_COUNTS}))

    def _open_run(self, run_info: RunInfo) -> _RegionRun:
        """The run that a request is about."""
        if self._current is None or self._current.run_info["number"] != run_info["number"]:
            self._forget()
            self._current = _RegionRun(self, run_info)
        self._current.run_info = run_info
        return self._current

    def names(self, count: int) -> list[str]:
        """The `count` sites of a run, in the order of their clients."""
        everyone = sorted({*self._names, *self._revoked})
        return everyone if len(everyone) == count else self._names

    def _forget(self) -> None:
        """Let go of the run, which can go on from its directory."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def link(self, most_bytes: int) -> SiteLink:
        """The connection to the sites; a new one if answers may be larger than before."""
        if self._link is None or self._link[0] < most_bytes:
            self._linked.close()
            self._link = most_bytes, self._linked.enter_context(self._connect(most_bytes))
        return self._link[1]


class _RegionRun:
    """A region's part in one run: its sites, and its rounds once the first episode is requested."""

    def __init__(self, server: RegionalServer, run_info: RunInfo) -> None:
        self.run_info, self._server = run_info, server
        with during(Step.SETTINGS):
            config = server.inputs.config(policies.check_text(run_info["config"]))
            policies.check_settings(server.policy, config)
            policies.check_run(server.policy, run_info)
            if run_info["tokenizer"]:
                check_tokenizer(run_info["tokenizer"])
        if config.flat:
            raise SettingError("the server's run has no regions; sites join it with 'fedstill join'")
        everywhere = clients_of_regions(config, config.clients)
        self._number = next(n for n, members in enumerate(everywhere) if run_info["client"] in members)
        config = server.inputs.network(config, self._number if config.regional_networks else None)
        self._members = np.sort(everywhere[self._number])
        names = server.names(len(self._members))
        if len(self._members) != len(names):
            raise Refusal(
                Code.SITES_MISCOUNTED,
                f"the region has {len(self._members)} clients in the settings, and keys of {len(names)} here",
            )
        self._table = config.each_region()[self._number]
        self._whole = registry.make(config.method, config.hyper)
        self._method = regional_method(self._table, config, self._whole)
        with during(Step.LOAD), self._fetching(own=bool(server.inputs.data)):
            self._config, federation = _server_data(config, self._method, run_info)
        policies.check_network(server.policy, self._config, federation.dataset, self._whole)
        place = server.directory / "runs" / run_number(run_info)
        with self._fetching(own=bool(server.inputs.pretrained)):
            most_bytes = largest_answer(self._config, federation)
        self._link: SiteLink = RecordedLink(server.link(most_bytes), place / files.RECEIVED)
        clients = {name: np.array([k]) for name, k in zip(names, self._members, strict=True)}
        self._registry = SiteRegistry(
            clients,
            federation.dataset,
            federation,
            self._info_for_sites,
            total=config.clients,
            max_share=config.max_share,
            path=place / files.COUNTS,
            validation=config.validation,
        )
        self._registry.counts.forget(server.terms.recount)
        least = fewest_answers(config, self._method)
        masked = self._declared if config.secure_aggregation else None
        self._sites = SiteEngine(None, self._link, self._registry, server.terms, least=least, masked=masked)
        self.rounds: RegionalLoop | None = None
        with ExitStack() as opened:
            exists = (place / files.CONFIG).is_file()
            self._directory = RunDirectory.open(place) if exists else RunDirectory.create(place, anchored(self._config))
            opened.callback(self._directory.release)
            opened.enter_context(logging_to(place / files.LOG))
            if not (place / files.SERVED).exists() and not self._directory.checkpoint_rounds():
                write_sealed_json(place / files.SERVED, {"number": run_number(run_info), ROLLBACKS: 0})
            self._opened = opened.pop_all()
        self._directory.pinned = self._is_global

    def close(self) -> None:
        self._opened.close()

    def _fetching(self, *, own: bool) -> AbstractContextManager[None]:
        """What a server names is not fetched from the network, unless the policy says so."""
        return nullcontext() if own or self._server.policy.download else download.refused()

    def sample_counts(self) -> Tree:
        """The numbers of samples of the sites; 0 of those that are not there yet."""
        # A run that has begun goes on with whoever is there; the others are let in before the next round. But when this
        # process is new, sites have yet to come back.
        needed = 1 if self._directory.oldest_checkpoint() else self._server.terms.needed
        enough, count = self._registry.reported_sites >= needed, len(self._members)
        until = time.monotonic() + _NEWCOMERS_TIMEOUT
        while True:
            self._registry.poll(self._link, timeout=min(_NEWCOMERS_TIMEOUT, self._server.terms.timeout))
            if enough or self._registry.reported_sites == count or time.monotonic() > until:
                break
            time.sleep(0.2)
        if self._registry.reported_sites < needed:
            raise Refusal(
                Code.TOO_FEW_SITES,
                f"only {self._registry.reported_sites} of {count} sites are there, {needed} are needed",
            )
        federation = self._registry.federation
        sizes, tests = federation.sizes[self._members], federation.test_sizes[self._members]
        found = {"samples": sizes.tolist(), "tests": tests.tolist()}
        if federation.validation is not None:
            found[VALIDATION] = federation.validation.sizes[self._members].tolist()
        return found

    def evaluate(self, down: Message, source: Source) -> Tree:
        """How often a model is right on each site's own tests, and by class what the sites let be known of it."""
        if not self._registry.reported_sites:
            self.sample_counts()
        own: Source = "validation" if source == "validation" else "local"
        tests = self._sites.local_tests([(None, down)], own)
        claimed, counted = self._registry.tests, self._registry.federation.test_sizes
        if own == "validation" and (held := self._registry.federation.validation):
            claimed, counted = self._registry.held_out, held.sizes
        members, classes = self._members.tolist(), len(self._registry.federation.dataset.classes)
        answer: dict[str, Any] = {"hits": [tests[k].hits if k in tests else -1 for k in members]}
        counts = torch.zeros(len(members), 3, classes, dtype=torch.int64)
        for row, client in zip(counts, members, strict=True):
            # Of a site that counts for less than it has, whole numbers would not add up to its tests.
            test = tests.get(client)
            if test and test.by_class and claimed[client] == counted[client]:
                row.copy_(torch.from_numpy(test.by_class.stacked()))
        names = {name for test in tests.values() for name in test.scores}
        scores = {n: [tests[k].scores.get(n, NO_SCORE) if k in tests else NO_SCORE for k in members] for n in names}
        return answer | ({BY_CLASS: counts} if counts.any() else {}) | ({SCORES: scores} if scores else {})

    def train(self, model: Tensor, request: Train, seconds: float) -> Tree:
        """An episode of the region."""
        if self.rounds is None:
            self.sample_counts()
            self.rounds = RegionalLoop(self._setup(), self._directory)
        rollbacks, path = self.run_info.get(ROLLBACKS, []), self._directory.path / files.SERVED
        if (back := unseen(rollbacks, path)) is not None:
            if self.rounds.server.round > back:
                self.rounds.go_back(back)
            seen(rollbacks, path)
        return self.rounds.episode(self._sites, model, request.round, measure=request.measure, seconds=seconds)

    def finish(self, name: str, down: Message) -> None:
        """Pass the final model on to the sites, which check it."""
        models = {name: down["model"]} if "model" in down else {}
        deliver(self._link, self._registry, models, timeout=self._server.terms.timeout)

    def _is_global(self, round_: int) -> bool:
        """Whether the global server may come back to the end of this round."""
        return round_ % self._config.rounds_per_episode == 0 and round_ >= int(self.run_info["checkpoint"])

    def _info_for_sites(self) -> RunInfo:
        """The run info for the sites: that of the global server, except that checkpoints are made here."""
        return {**self.run_info, "checkpoint": self._directory.oldest_checkpoint()}

    def _declared(self, _region: int) -> dict[str, Part]:
        """What the sites of the region send, once its rounds have begun."""
        assert self.rounds is not None
        only = self.rounds.setup.hierarchy.regions[0]
        return only.method.wire(only.task).up

    def _setup(self) -> Setup:
        config, federation = self._config, self._registry.federation
        settings = config.model_copy(update=self._table.overrides())
        local = replace(local_training(settings, federation), steps_per_epoch=self.run_info["steps"][self._number])
        with self._fetching(own=bool(self._server.inputs.pretrained)):
            task = make_task(config, federation, self._whole).trained_as(local)
        name = self._table.name or f"region {self._number + 1}"
        region = Region(self._number, name, self._members, self._method, task, settings.participation)
        hierarchy = with_noise(Hierarchy((region,)), config, federation, elsewhere=True)
        return Setup(config, task, federation, hierarchy.regions[0].method, hierarchy, Attack())


def _server_data(config: Config, method: Method, run_info: RunInfo) -> tuple[Config, Federation]:
    """The dataset of a regional server itself, if its method needs one; otherwise samples in name only."""
    needs = method.needs()
    if needs.server_labels or needs.proxy_data:
        dataset = dataset_in(load_data(config))
        if table := policies.table_of(run_info):
            dataset = with_table(dataset, table)
    else:
        config = config.model_copy(update={"proxy": "", "pool": 0.0})
        table = policies.table_of(run_info)
        kind = torch.int32 if run_info["tokenizer"] else torch.float64 if table else torch.float32
        nothing = Split(torch.zeros(2, *run_info["shape"], dtype=kind), torch.zeros(2, dtype=torch.int64))
        description = (tuple(run_info[name]) for name in ("classes", "mean", "std"))
        dataset = Dataset("", nothing, nothing, *description, tokenizer=run_info["tokenizer"], table=table)
    return config, undivided(config, dataset)
