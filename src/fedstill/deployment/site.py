"""A site's end: answers a server's requests, from data that stay here.

A server's settings are another's words: no file, folder or address in them is opened, run or fetched, numbers are held
against the site's limits, and what is sent back is what its policy allows. docs/security.md goes through all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedstill.building.config import Config
from fedstill.building.data import dataset_of, divide, load_data, wanted_size
from fedstill.building.groups import as_member, group_config, own_group
from fedstill.building.privacy import check_noise
from fedstill.building.setup import check_secure
from fedstill.building.task import local_training, make_task
from fedstill.building.topology import regional_method
from fedstill.core.device import find, on
from fedstill.core.errors import DataError, SettingError
from fedstill.core.files import home_path
from fedstill.core.reports import Code, Refusal, Step, during
from fedstill.core.store import Store
from fedstill.core.tree import Tree
from fedstill.data import download, sources, tokens
from fedstill.data.dataset import Dataset, sized
from fedstill.data.federation import Federation
from fedstill.data.formats.columns import header
from fedstill.data.held_out import HeldOut
from fedstill.data.statistics import PARTS, column_sums, own_columns, with_table
from fedstill.data.validation import hold_out, is_held_out
from fedstill.deployment import policy as policies
from fedstill.deployment.audit import SENT, STATE, AuditLog, answer_entry, request_kind
from fedstill.deployment.delivery import is_finish, keep_model
from fedstill.deployment.ledger import PrivacyLedger
from fedstill.deployment.local_inputs import LocalInputs, is_a_file
from fedstill.deployment.masked_site import SiteMasks, digest_of, is_masking
from fedstill.deployment.policy import Consent, Policy, Usage
from fedstill.deployment.protocol import (
    BALANCED,
    BY_CLASS,
    CLASS_COUNTS,
    MASKED,
    NO_SCORE,
    SCORES,
    STATISTICS,
    VALIDATION,
    RunInfo,
    run_number,
)
from fedstill.engine.worker import FinalExchange, Request, Score, Source, Train, Worker, request_from
from fedstill.methods import registry
from fedstill.methods.base import NETWORKS, Method, Part, misfit
from fedstill.methods.kinds import Kind
from fedstill.metrics.scores import COUNTED, FUNCTIONS, ClassCounts
from fedstill.models.base import frozen_digest
from fedstill.privacy.signatures import Signer
from fedstill.running.machine import one_thread
from fedstill.running.rollback import ROLLBACKS, seen, unseen
from fedstill.train.task import Task

log = logging.getLogger(__name__)
LEDGER = "privacy.json"  # in a site's folder


class Site:
    """Answers a server's requests, from data that stay here."""

    def __init__(
        self,
        directory: Path,
        inputs: LocalInputs | None = None,
        policy: Policy | None = None,
        ask: Callable[[str], bool] | None = None,
        finished: Callable[[str], None] = log.info,
        signer: Signer | None = None,
    ) -> None:
        """Without `data` of its own, a site has its share of what the run divides, to try things out.

        `ask` puts to the site's owner what the policy leaves open; without it, that is refused. `finished` gets what
        there is to say when a run has ended. With a `signer` other sites can tell this one's keys of a masked sum.
        """
        self._finished = finished
        self._directory, self._inputs, self._policy = directory, inputs or LocalInputs(), policy or Policy()
        self._consent = Consent(self._policy, ask)
        self._device = find(self._inputs.device)
        self._settings: tuple[str, Config] | None = None  # of the run, as text and checked
        self._ready: tuple[dict[str, Any], Worker] | None = None
        self._audit = AuditLog(directory / SENT)
        self._masks = SiteMasks(self._policy, signer)
        self._ledger = PrivacyLedger(directory / LEDGER, self._policy)

    def handle(self, message: Tree) -> Tree:
        with during(Step.REQUEST):
            run, body, down = message["run"], message["request"], message["down"]
            text = policies.check_text(run["config"])
        if self._settings is None or self._settings[0] != text:
            with during(Step.SETTINGS):
                config = self._inputs.config(text)
                policies.check_settings(self._policy, config)
                self._settings = text, config
        config = self._settings[1]
        usage = Usage(self._directory / STATE / run_number(run), self._policy)
        if body == {"kind": STATISTICS}:
            with usage.work(training=False):
                return self._statistics(run, config)
        if is_finish(body):
            with usage.work(training=False):
                return self._finish(self._worker(run, config), config, run, body.get("model"), down)
        if is_masking(body):
            with usage.work(training=False):
                worker = self._worker(run, config)  # whether this site takes part at all
                methods = [method for _, method in worker.regional] or [worker.method]
                with during(Step.MASK):
                    return self._masks.handle(body, run, max(method.fewest_clients for method in methods))
        with during(Step.REQUEST):
            body, masking = _without_masking(body)
            request = None if body is None else _request(body, run, config)
        with usage.work(training=isinstance(request, Train | FinalExchange)):
            worker = self._worker(run, config)
            return self._answer(worker, request, down, run, config, masking)

    def _statistics(self, run: RunInfo, config: Config) -> Tree:
        """Sums over the columns of the site's training rows, from which a server makes the preprocessing of a table."""
        with during(Step.SETTINGS):
            policies.check_run(self._policy, run)
            table = policies.table_of(run)
            if table is None or not self._inputs.data:
                raise SettingError("statistics are of a site's own table: start it with --data and --target")
        with during(Step.CONSENT):
            self._consent.check_statistics(run_number(run), [column.name for column in table.columns])
        with during(Step.LOAD):
            found = dataset_of(load_data(_own_columns(config, run), table=table), "the site's data")
        with during(Step.PREPARE):
            owner = np.zeros(len(found.train), np.int64)
            kept = torch.from_numpy(~is_held_out(owner, 1, config.validation, config.seed))
            return column_sums(own_columns(found, table), found.train.x[kept], self._policy.min_count).message()

    def _finish(self, worker: Worker, config: Config, run: RunInfo, name: Any, down: Tree) -> Tree:
        with during(Step.FINAL), one_thread(), on(self._device):
            config = self._inputs.network(config, own_group(config, run["client"], run["clients"]))
            self._finished(keep_model(self._directory, worker, config, run["client"], name, down))
        return {"received": True}

    def _answer(
        self, worker: Worker, request: Request | None, down: Tree, run: RunInfo, config: Config, masking: Tree
    ) -> Tree:
        private = Kind.METRICS in self._policy.deny or bool(self._policy.max_epsilon)
        if request is None:
            tests = 0 if private else len(worker.federation.test_index)
            counts: dict[str, Any] = {"samples": [len(worker.federation.train_index)], "tests": [tests]}
            if worker.federation.validation is not None:
                counts[VALIDATION] = [0 if private else len(worker.federation.validation.index)]
            if config.class_weight == BALANCED:  # to which the owner has agreed: see `_prepare`
                labels = worker.federation.dataset.train.y.numpy()[worker.federation.train_index]
                counts[CLASS_COUNTS] = np.bincount(labels, minlength=worker.task.classes).tolist()
            return counts
        if isinstance(request, Score):
            if private:
                raise Refusal(Code.NOT_ALLOWED, "how well models do on this site's tests is denied by its policy")
            with during(Step.REQUEST):
                if problem := misfit(down, {"model": Part((worker.task.size,), "a model", worker.task.dtype)}):
                    raise Refusal(Code.BAD_REQUEST, f"the model to test is not of the network here: {problem}")
            with during(Step.SCORE), one_thread(), on(self._device):
                return self._tested(worker, down, config, request.source)
        task, method = _trained_with(worker, request)
        wire = method.wire(task)
        with during(Step.REQUEST):
            if isinstance(request, Train) and (problem := misfit(down, wire.down)):
                raise Refusal(Code.BAD_REQUEST, f"what the server sent does not fit its method: {problem}")
        if config.secure_aggregation:
            with during(Step.MASK):
                self._masks.check(masking, run)
        with during(Step.TRAIN if isinstance(request, Train) else Step.FINAL), one_thread(), on(self._device):
            if isinstance(request, Train):
                _forget_with_the_server(worker.store, run.get(ROLLBACKS, []), request.round)
            _check_state(worker.store, request)
            self._ledger.spend(method, len(worker.federation.train_index), task.local)
            answer: dict[str, Any] = worker.handle(request, down)
        with during(Step.SEND):
            declared = wire.up if isinstance(request, Train) else wire.last
            policies.check_message(answer["message"], declared, self._policy.deny)
        if config.secure_aggregation:
            with during(Step.MASK):
                about = digest_of(run, request.round, getattr(request, "region", 0), down)
                fewest = method.fewest_clients
                answer["message"] = self._masks.masked(masking, answer["message"], declared, run, about, fewest)
        if newest := worker.store.newest(request.client, request.round + 1):
            answer["state"] = newest
        worker.store.prune([run["client"]], needed=run["checkpoint"])
        if private:
            answer["metrics"] = {name: value for name, value in answer["metrics"].items() if name == "seconds"}
        return answer

    def _tested(self, worker: Worker, down: Tree, config: Config, source: Source) -> Tree:
        """How often a model is right on the tests, or validation samples, here; and the metrics that the run names.

        Counts by class only if the policy agrees. What is a function of probabilities is worked out here.
        """
        federation, classes = worker.federation, worker.task.classes
        labels = federation.test_split.y.numpy()[federation.test_index]
        if source == "validation":
            if federation.validation is None:
                raise Refusal(Code.BAD_REQUEST, "the run holds nothing out for validation")
            labels = federation.dataset.train.y.numpy()[federation.validation.index]
        own: Source = "validation" if source == "validation" else "local"
        named = [name for name in config.metrics if name in FUNCTIONS]
        scored = worker.handle(Score(own, 0, len(labels), probabilities=bool(named)), down)
        predicted = scored["predicted"].cpu().numpy()
        answer: dict[str, Any] = {"hits": [int((predicted == labels).sum())]}
        if named:
            likely = scored["probabilities"].double().cpu().numpy()
            values = {name: FUNCTIONS[name](labels, likely) for name in named}
            answer[SCORES] = {name: [value if np.isfinite(value) else NO_SCORE] for name, value in values.items()}
        if COUNTED.keys() & set(config.metrics) and self._consent.allows(Kind.CLASS_COUNTS):
            counts = ClassCounts.of(labels, predicted, classes)
            answer[BY_CLASS] = torch.from_numpy(counts.stacked())[None]
        return answer

    def record(self, message: Tree, answer: Tree) -> None:
        """Write down what is about to be sent, in the site's audit log."""
        kinds: dict[str, str] = {BY_CLASS: Kind.CLASS_COUNTS}
        if request_kind(message) == {"request": STATISTICS}:
            kinds = dict.fromkeys(PARTS, Kind.STATISTICS)
        elif self._ready is not None:
            worker = self._ready[1]
            for task, method in worker.regional or ((worker.task, worker.method),):
                kinds |= policies.kinds_of(method, task)
            kinds[MASKED] = f"masked {', '.join(sorted(set(kinds.values()) - {kinds[BY_CLASS]}))}"
        self._audit.append(**answer_entry(message, answer, kinds))

    def _worker(self, run: RunInfo, config: Config) -> Worker:
        """Made when a run's settings are first seen."""
        key = {name: value for name, value in run.items() if name != "checkpoint"}
        if self._ready is None or self._ready[0] != key:
            with during(Step.SETTINGS):
                policies.check_run(self._policy, run)
            self._ready = (key, self._prepare(run, config))
        return self._ready[1]

    def _prepare(self, run: RunInfo, config: Config) -> Worker:
        if run["tokenizer"]:
            with during(Step.SETTINGS):
                check_tokenizer(run["tokenizer"])
        with during(Step.SETTINGS):
            table = policies.table_of(run)
        config = config.model_copy(update={"tokenizer": run["tokenizer"]})
        config = _own_columns(config, run) if table and self._inputs.data else config
        if self._inputs.data and config.proxy == "pool":  # which the server alone has
            config = config.model_copy(update={"proxy": ""})
        with during(Step.LOAD), self._fetching(own=bool(self._inputs.data)):
            found = dataset_of(load_data(config, table=table), "the site's data")
        with during(Step.PREPARE):
            if table:
                found = with_table(found, table)
            elif found.table:
                raise DataError("these data are a table, and the run is about none")
            federation = self._federation(config, run, found)
            method = registry.make(config.method, config.hyper)
            config, task = self._task(run, config, federation, method)
            regional = self._regional(config, run, task, method, federation)
            # What is asked for: in each region by its method, and after the last round by the run's.
            asked = (
                regional if regional and not method.has_final_exchange else [*regional, (config.method, (task, method))]
            )
            trained = [inside for _, inside in asked]
            if config.secure_aggregation:
                check_secure(config, trained)
            for _, inside_method in trained:
                check_noise(config, inside_method)
            if config.flat:
                steps, weights = run["steps"] or [0], _class_weight(run)
                task = task.trained_as(replace(task.local, steps_per_epoch=steps[0], class_weight=weights))
                asked = [(config.method, (task, method))]
        with during(Step.CONSENT):
            for name, inside in asked:
                self._ledger.check(name, *inside)
            if config.class_weight == BALANCED and self._policy.max_epsilon:
                raise Refusal(Code.NOT_ALLOWED, "this site's policy has max_epsilon: it does not count its classes")
            if config.class_weight == BALANCED:
                self._consent.check_setting(run_number(run), "class_weight = balanced", Kind.CLASS_COUNTS)
            for name, inside in asked:
                self._consent.check(run_number(run), name, inside[1], inside[0])
        store = Store(self._directory / STATE / run_number(run), run=run_number(run), earlier=True)
        return Worker(task, federation, method, store, tuple(inside for _, inside in regional), simulated=False)

    def _task(self, run: RunInfo, config: Config, federation: Federation, method: Method) -> tuple[Config, Task]:
        """What is trained here, and the settings with the network that this is."""
        number = own_group(config, run["client"], run["clients"])
        own = self._inputs.network(config, number)
        policies.check_network(self._policy, own, federation.dataset, method)
        with self._fetching(own=bool(self._inputs.pretrained) and not config.proxy):
            task = make_task(own, federation, method)
        if number is None or method.model_per_group:
            _check_frozen(run, number or 0, task)
        if number is not None and self._inputs.model and not method.model_per_group:
            self._check_in_common(task, group_config(config, config.each_group()[number]), federation, method)
        if number is not None and config.flat and method.model_per_group:
            self._check_other_networks(config, number, method, federation.dataset)
            task = as_member(task, config, number, federation, method)
        return own, task

    def _check_other_networks(self, config: Config, number: int, method: Method, dataset: Dataset) -> None:
        """Refuse other groups' networks that are a server's file, or too large, where clients work with them."""
        if not method.needs_other_networks:
            return
        for other in [table for i, table in enumerate(config.each_group()) if i != number]:
            if is_a_file(other.model):
                raise Refusal(
                    Code.FILE_NAMED,
                    f"{config.method} has every site work with all groups' networks, and {other.model} is a file, or "
                    "pretrained; across=false does without",
                )
            policies.check_network(self._policy, group_config(config, other), dataset, method)

    def _check_in_common(self, task: Task, dealt: Config, federation: Federation, method: Method) -> None:
        """Refuse a network of the site's own if what the method has it send is of another size than the others send."""
        if is_a_file(dealt.model) or method.networks == "any":
            return  # it is not opened here, or whatever it is
        policies.check_network(self._policy, dealt, federation.dataset, method)
        others = make_task(dealt, federation, method)
        if method.wire(task).up != method.wire(others).up:
            raise SettingError(
                f"{dealt.method} needs {NETWORKS[method.networks]}: here they are {task.feature_dim}, elsewhere "
                f"{others.feature_dim}; with model_options.feature_size={others.feature_dim} in the run's settings all "
                "networks have features of one size"
            )

    def _fetching(self, *, own: bool) -> AbstractContextManager[None]:
        """What a server names is not fetched from the network, unless the policy says so."""
        return nullcontext() if own or self._policy.download else download.refused()

    def _regional(
        self, config: Config, run: RunInfo, task: Task, method: Method, federation: Federation
    ) -> list[tuple[str, tuple[Task, Method]]]:
        """How the clients of each region train, and the name of its method; nothing if there are no regions."""
        if config.flat:
            return []
        tables = config.each_region()
        found = []
        for table, count in zip(tables, run["steps"] or [0] * len(tables), strict=True):
            local = local_training(config.model_copy(update=table.overrides()), federation)
            local = replace(local, steps_per_epoch=count, class_weight=_class_weight(run))
            inside = regional_method(table, config, method)
            found.append((table.method or config.method, (task.trained_as(local), inside)))
        return found

    def _federation(self, config: Config, run: RunInfo, found: Dataset) -> Federation:
        """A federation in which this site's client alone has anything: its training and its test samples."""
        source: Literal["train", "test"] = "test"
        held: HeldOut | None = None
        if self._inputs.data:
            found = sized(found, wanted_size(config))
            pool = np.zeros(0, np.int64)
            train, test = np.arange(len(found.train)), np.arange(len(found.test))
        else:
            shared = hold_out(divide(config, found), config.validation, config.seed)
            found, train, test = shared.dataset, shared.train(run["client"]), shared.test(run["client"])
            source, pool, held = shared.test_source, shared.pool_index, shared.validation
        if list(found.shape) != run["shape"]:
            sizes = f"samples here have shape {tuple(found.shape)}, the server's {tuple(run['shape'])}"
            raise DataError(sizes + ("; image_size, set for the run, brings images to one" if found.mean else ""))
        dataset = replace(_labelled_as(found, run["classes"]), mean=tuple(run["mean"]), std=tuple(run["std"]))
        later = np.arange(run["clients"] + 1) > run["client"]
        alone = Federation(dataset, train, later * len(train), test, later * len(test), pool, source)
        if held is None:
            return hold_out(alone, config.validation, config.seed)
        own = held.of(run["client"])
        return replace(alone, validation=HeldOut(own, later * len(own), np.zeros(0, np.int64)))


def _check_frozen(run: RunInfo, group: int, task: Task) -> None:
    """Refuse another encoder than the server's: the rest of the network would not fit it."""
    if run["frozen"] and run["frozen"][group : group + 1] != [frozen_digest(task.build().module)]:
        raise SettingError("the frozen part of the network is not the server's: another pretrained encoder is meant")


def _class_weight(run: RunInfo) -> tuple[float, ...]:
    """How much each class counts in the run; `check_run` has looked at it."""
    return tuple(map(float, run.get("class_weight", [])))


def _own_columns(config: Config, run: RunInfo) -> Config:
    """The settings for a site's own table: which columns are features is known, and all rows are the site's."""
    path = home_path(config.data)
    own: dict[str, Any] = {
        "classes": run["classes"],
        "client_column": "",
        "drop_columns": [],
        "categorical_columns": [],
    }
    if config.split_column and sources.is_table(config.data, config.target) and path.is_file():
        own["split_column"] = config.split_column if config.split_column in header(path) else ""
    return config.model_copy(update=own)


def _without_masking(body: Any) -> tuple[Any, Any]:
    """A request to train, and what of it is about masks."""
    if not isinstance(body, dict) or "masking" not in body:
        return body, None
    return {name: value for name, value in body.items() if name != "masking"}, body["masking"]


def _trained_with(worker: Worker, request: Train | FinalExchange) -> tuple[Task, Method]:
    """What a request is carried out with."""
    if worker.regional and isinstance(request, Train):
        return worker.regional[request.region]
    return worker.task, worker.method


def _request(body: Any, run: Mapping[str, Any], config: Config) -> Request:
    """A server's request, if it is one about this site's client."""
    request = request_from(body)
    if isinstance(request, Score):
        return request
    regions = len(config.each_group()) or 1 if config.flat else len(config.region) or config.regions
    region = getattr(request, "region", 0)
    numbers = all(type(number) is int for number in (request.client, request.round, region, request.state))
    if not numbers or request.client != run["client"] or not 1 <= request.round <= 10**9 or not 0 <= region < regions:
        raise Refusal(Code.BAD_REQUEST, "the request is about another client, or about no round or region")
    return request


def _check_state(store: Store, request: Train | FinalExchange) -> None:
    """Refuse to begin anew, and so to answer with something else, where this client had a state and it is gone."""
    if store.newest(request.client, request.round) < request.state:
        raise Refusal(
            Code.STATE_LOST,
            f"{store.path(request.client, request.state)} is missing, which round {request.state} left here; put it "
            "back from a copy, or have the server started with --recount for this site, to begin anew",
        )


def check_tokenizer(tokenizer: str) -> None:
    """Refuse a tokenizer that is only named: nothing is opened or fetched for a server."""
    try:
        tokens.check_json(tokenizer)
    except DataError as error:
        raise Refusal(Code.TOKENIZER_REFUSED, f"the server's tokenizer is refused: {error}") from error


def _forget_with_the_server(store: Store, rollbacks: Sequence[int], round_: int) -> None:
    """Forget rounds that the server has forgotten: those it went back over, and those it asks for again."""
    store.rollback(round_ - 1)
    path = store.root / "rollbacks.json"
    if (back := unseen(rollbacks, path)) is not None:
        store.rollback(back)
        store.root.mkdir(parents=True, exist_ok=True)
        seen(rollbacks, path)


def _labelled_as(found: Dataset, classes: Sequence[str]) -> Dataset:
    """The data with the server's classes: the same names get its numbers; classes that are only numbers keep theirs."""
    unknown = [name for name in found.classes if name not in classes]
    if not unknown:
        return _renumbered(found, [classes.index(name) for name in found.classes], classes)
    if found.table or not all(name.isdecimal() for name in found.classes):
        raise DataError(f"the class {unknown[0]!r} here is none of the server's: {', '.join(classes)}")
    numbers = [int(name) for name in found.classes]
    if max(numbers) >= len(classes):
        raise DataError(
            f"label {max(numbers)} here is none of the server's {len(classes)} classes, {', '.join(classes)}; label "
            "by these names, or from 0"
        )
    return _renumbered(found, numbers, classes)


def _renumbered(found: Dataset, numbers: Sequence[int], classes: Sequence[str]) -> Dataset:
    """The data with other classes, in which each class of theirs has this number."""
    number = torch.tensor(numbers)
    train, test = (replace(split, y=number[split.y]) for split in (found.train, found.test))
    return replace(found, train=train, test=test, classes=tuple(classes))
