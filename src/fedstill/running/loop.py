"""The round loop.

The way of a round: `run` → `_run_rounds` → `_run_round` → `train_round`, which is in `training.py`; then the model is
evaluated, callbacks hear of it, and the round is recorded and kept.
"""

from __future__ import annotations

import ast
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedstill.building.config import anchored, fixed, is_object
from fedstill.building.groups import Group
from fedstill.building.setup import Setup, majority
from fedstill.building.topology import Region
from fedstill.core.errors import Diverged, FedstillError, SettingError
from fedstill.engine.base import Engine
from fedstill.engine.worker import Worker
from fedstill.inference.predictor import Predictor
from fedstill.methods import registry
from fedstill.metrics.records import BestAndFinal, RoundRecord, Scores, Summary
from fedstill.running import files
from fedstill.running.callbacks import Callback, Callbacks, RunView
from fedstill.running.directory import RunDirectory, without_nan
from fedstill.running.evaluation import Evaluation, evaluate, tested
from fedstill.running.group_evaluation import evaluate_groups
from fedstill.running.machine import make_engine, one_thread
from fedstill.running.privacy import SPENT, affordable, promised
from fedstill.running.records import NOT_EVALUATED, Tally, of_groups, of_own_models, summarise, versions
from fedstill.running.results import model_file, network, predictor, write_results
from fedstill.running.training import FederatedTraining

log = logging.getLogger(__name__)


class RoundLoop(FederatedTraining):
    """The rounds of a run in its directory, new or continued."""

    @property
    def rounds_per_step(self) -> int:
        """How many rounds are one step."""
        return 1

    def __init__(
        self,
        setup: Setup,
        directory: RunDirectory,
        callbacks: Sequence[Callback] = (),
        engine: Callable[[Worker], Engine] | None = None,
    ) -> None:
        super().__init__(setup, directory)
        refuse_one_file(setup)
        directory.keep = setup.config.keep_checkpoints
        self._make_engine = engine or partial(make_engine, setup.config)
        view = RunView(setup, directory.path, lambda: self.records, self.model, self._main_models, self._network)
        self.callbacks = Callbacks(callbacks, view)
        self.records: list[RoundRecord] = []
        self._settings = fixed(anchored(setup.config))  # for every checkpoint
        self.client_columns: dict[str, NDArray[Any]] = {}  # as in clients.csv, once the run has ended
        self._last: dict[str, int] = {}  # what crossed after the last round
        self._stop = ""  # the callback that wants the run to end
        self._chosen: Mapping[str, Tensor] = {}  # the result, if a callback chose another than the last model
        self._restore()

    def _restore(self) -> None:
        """Go on from the newest checkpoint, or begin."""
        restored = self.directory.restore()
        if restored is None:
            for region in self.setup.hierarchy.regions:
                region.method.start(self.regional[region.number])
        else:
            self.server.round, state = restored
            refuse_changes(state.get("settings", {}), self._settings)
            self.load_state(state)
            self.callbacks.load_state(state.get("callbacks", {}))
            self.records = self.directory.records()
        for earlier in self.directory.served_run().get(SPENT, []):
            self.remember(earlier)

    def run(self) -> Summary:
        """Run the rounds that are left and write the results."""
        try:
            return self._run_rounds()
        except BaseException as error:
            self.callbacks.tell("on_run_failed", error)
            raise

    def _run_rounds(self) -> Summary:
        config, run = self.setup.config, self.callbacks.run
        setup, regions = self.setup, self.setup.hierarchy.regions
        by_group = tuple((group.task, setup.method) for group in setup.groups)
        regional = by_group if setup.hierarchy.flat else tuple((region.task, region.method) for region in regions)
        store = self.directory.client_store
        worker = Worker(
            setup.task, setup.federation, setup.method, store, regional, setup.attack, together=config.together
        )
        with one_thread(), self._make_engine(worker) as engine:
            log.info("rounds %d to %d of %s", self.server.round + 1, config.rounds, config.method)
            if setup.attack.kind:
                log.info("%s by clients %s", setup.attack.kind, ", ".join(map(str, sorted(setup.attack.clients))))
            run.round = self.server.round
            stop = self.callbacks.tell("on_run_start")
            self.callbacks.check()
            self._check_budget()
            evaluation = None
            end = self._last_round(stop)
            for round_ in range(self.server.round + self.rounds_per_step, end + 1, self.rounds_per_step):
                record, evaluation = self._run_round(engine, round_)
                self.records.append(record)
                evaluation = self._end_round(engine, record) or evaluation
                if run.stopped_by:
                    log.info("stopped by %s after round %d", run.stopped_by, round_)
                    break
            self.directory.settle()
            if self.setup.method.has_final_exchange:
                self._last = self.final_exchange(engine, self.model())
                evaluation = None
            if run.chosen:
                self._chosen, evaluation = run.chosen[1], None
            if evaluation is None and self.setup.method.global_model:
                evaluation, _ = self._evaluate_model(engine)
        summary = summarise(config, self.records, self._last)
        summary |= {"parameters": setup.task.size, "versions": versions()}
        if (largest := majority(setup.federation)) is not None:
            summary["majority"] = largest
        if self.setup.method.has_final_exchange and evaluation is not None:
            last = {f"final_{name}": value for name, value in without_nan(evaluation.record()).items()}
            summary["also"] = {"after the last exchange": cast(BestAndFinal, last), **summary.get("also", {})}
        if self.records and "privacy" in self.records[-1]:
            summary |= {"epsilon": self.records[-1]["epsilon"], "privacy": self.records[-1]["privacy"]}
        if run.stopped_by:
            summary["stopped_by"] = run.stopped_by
        if run.chosen:
            summary["restored_round"] = run.chosen[0]
        self.client_columns = write_results(setup, self.directory, self.final_models(), summary, evaluation)
        log.info("finished")
        self.callbacks.tell("on_run_end", summary)
        self.callbacks.check()
        return summary

    def _last_round(self, stop: str) -> int:
        """The round to end with: the one that is done, if this ended the run, but it was killed before its results."""
        done, rounds = self.server.round, self.setup.config.rounds
        if not self.records or done >= rounds:
            return rounds
        self._stop = stop or self.spent(done)
        self.callbacks.run.stopped_by = self._stop if self._meets(done) else ""
        if not self.callbacks.run.stopped_by:
            return rounds
        log.info("nothing is left to do: stopped by %s after round %d", self._stop, done)
        return done

    def _end_round(self, engine: Engine, record: RoundRecord) -> Evaluation | None:
        """Tell the callbacks, and keep the round: all of it, if one of them ends the run or fails."""
        run, round_, evaluation = self.callbacks.run, record["round"], None
        record["callbacks"], run.chosen = run.logged, None
        self._stop = self.callbacks.tell("on_round_end", record) or self._stop or self.spent(round_)
        if self._stop and round_ < self.setup.config.rounds and self._meets(round_):
            run.stopped_by = self._stop
            if not record["evaluated"]:
                evaluation = self._evaluate_last(engine, record)
        last = round_ == self.setup.config.rounds
        self._keep_round(record, last=last or bool(run.stopped_by) or self.callbacks.failed)
        self.callbacks.check()
        return evaluation

    def promise(self, _tally: Tally) -> dict[str, Any] | None:
        """What is promised to clients so far, if anything is."""
        return promised(self.setup.hierarchy, self.regional)

    def _check_budget(self) -> None:
        """Refuse to begin anew where no round can be paid for."""
        if not self.records and self.went_back and self.spent(0):
            raise FedstillError(
                "the privacy budget (target_epsilon) is spent: rounds that the run went back behind have taken it"
            )

    @property
    def went_back(self) -> bool:
        """Whether there is something in the ledgers of which there are no records."""
        return SPENT in self.directory.served_run()

    def spent(self, round_: int) -> str:
        """What ends the run if the rounds up to the next model of all clients would spend more than its budget."""
        rounds = 1 if self.setup.hierarchy.flat else self.setup.hierarchy.rounds_per_episode
        due = self._meets(round_) and not affordable(self.setup.hierarchy, self.regional, rounds)
        return "privacy budget" if due else ""

    def _keep_round(self, record: RoundRecord, *, last: bool) -> None:
        config, round_ = self.setup.config, record["round"]
        self.callbacks.run.logged = {}
        if not record["callbacks"]:
            del record["callbacks"]
        self.directory.append(record)
        if config.save_models and round_ % config.save_models == 0 and self.setup.method.global_model:
            # Before the checkpoint: a run that is resumed from it has no gap here.
            name, model = next(iter(self.models().items()))
            self.directory.save_model(round_, model_file(self.setup, [name], name, model))
        if last or round_ % config.checkpoint_every == 0:
            self.checkpoint()

    def _evaluate_last(self, engine: Engine, record: RoundRecord) -> Evaluation | None:
        """Evaluate a round that became the last when it was done."""
        if not self.setup.method.global_model:
            return None
        evaluation, by_group = self._evaluate_model(engine)
        record |= cast(RoundRecord, without_nan(evaluation.record()) | {"evaluated": True})
        if by_group:
            record["groups"] = of_groups(Tally(), self.setup.groups, by_group)  # nobody has measured a local model
        self._tell_evaluation(record)
        return evaluation

    def _meets(self, round_: int) -> bool:
        """Whether a round ends in one model of all clients."""
        return self.setup.hierarchy.flat or self.setup.hierarchy.ends_episode(round_)

    def _run_round(self, engine: Engine, round_: int) -> tuple[RoundRecord, Evaluation | None]:
        config, hierarchy = self.setup.config, self.setup.hierarchy
        began = time.perf_counter()
        last = round_ == config.rounds
        due = self._meets(round_) and (last or self._evaluates(round_))
        tally, present = self.train_round(engine, round_, measure=due)
        after = self._teachers_after(engine, present) if self._follows_aggregation(round_) else {}
        episode = self.aggregate_regions(engine, present, compare=due) if hierarchy.ends_episode(round_) else None
        for server in (self.server, *self.regional.values()):  # before it can become a checkpoint
            if not torch.isfinite(server.model).all():
                which = "the global model" if server is self.server else f"the model of region {server.region + 1}"
                raise Diverged(f"round {round_}: {which} is no longer finite; a smaller lr may help")
        if episode:
            self.callbacks.tell("on_aggregation_end", episode)
        trained = time.perf_counter()
        evaluations, by_group = self._evaluations(engine) if due else ({}, {})
        main = next(iter(evaluations.values()), None)
        record: RoundRecord = {"round": round_, "evaluated": due}
        record |= cast(RoundRecord, NOT_EVALUATED)
        if due:
            record["local_accuracy"] = tally.mean("local_accuracy")
            record |= cast(RoundRecord, main.record() if main else of_own_models(tally, config.metrics))
            if self.setup.groups:
                record["groups"] = of_groups(tally, self.setup.groups, by_group)
            self._tell_evaluation(record)
        record |= {
            "train_loss": tally.mean("train_loss"),
            "bytes_down": tally.bytes_down,
            "bytes_up": tally.bytes_up,
            "clients": tally.clients,
            "dropped": tally.dropped,
            "seconds": trained - began,
            "client_seconds": tally.client_seconds,
            "server_seconds": tally.server_seconds + (episode["server_seconds"] if episode else 0.0),
            "eval_seconds": time.perf_counter() - trained,
        }
        if main and episode:
            episode["student"] = {"accuracy": main.accuracy, "confusion": main.confusion.tolist()}
        if (promise := self.promise(tally)) is not None:
            record |= {"epsilon": promise["epsilon"], "privacy": promise}
        at_times = {
            "also": {name: evaluation.record() for name, evaluation in list(evaluations.items())[1:]},
            "episode": episode,
            "server": self._notes(present) if hierarchy.flat else {},
            "teachers_after": after,
            "left_out": tally.left_out,
            "untested": self.client_names(main.untested) if main else [],
        }
        record |= cast(RoundRecord, {name: value for name, value in at_times.items() if value})
        return without_nan(record), main

    def _tell_evaluation(self, record: RoundRecord) -> None:
        scores = {name: value for name, value in without_nan(record).items() if name in Scores.__annotations__}
        self.callbacks.tell("on_evaluation_end", scores)

    def _evaluate(self, engine: Engine, model: Tensor) -> Evaluation:
        ask = not (engine.remote and self.setup.hierarchy.regions[0].method.guarantee)
        return evaluate(engine, self.setup.federation, model, self.setup.metrics, self.setup.config.metrics, ask=ask)

    def _evaluate_model(self, engine: Engine) -> tuple[Evaluation, dict[str, Evaluation]]:
        """Of the model, or of every group's: over all groups, and each."""
        if self.setup.hierarchy.separate:
            evaluations, by_group = self._evaluate_groups(engine)
            return next(iter(evaluations.values())), by_group
        return self._evaluate(engine, self.model()), {}

    def _notes(self, present: Sequence[Region]) -> dict[str, Any]:
        """What the method notes about a round; of groups, by their names."""
        if not self.setup.hierarchy.grouped:
            return self.server.notes
        return {region.name: notes for region in present if (notes := self.regional[region.number].notes)}

    def _evaluations(self, engine: Engine) -> tuple[dict[str, Evaluation], dict[str, Evaluation]]:
        """Of every model that there is; and of the first, each group's."""
        if self.setup.hierarchy.separate:
            return self._evaluate_groups(engine)
        return {name: self._evaluate(engine, model) for name, model in self.models().items()}, {}

    def _evaluate_groups(self, engine: Engine) -> tuple[dict[str, Evaluation], dict[str, Evaluation]]:
        """The evaluation of each model that every group has, over all groups; and each group's of the first."""
        by_name: dict[str, list[tuple[Group, Tensor]]] = {}
        for group in self.setup.groups:
            for name, model in self._finite(self._models_of(group.number)).items():
                by_name.setdefault(name, []).append((group, model))
        found = {
            name: evaluate_groups(engine, self.setup.federation, models, self.setup.metrics, self.setup.config.metrics)
            for name, models in by_name.items()
        }
        return {name: whole for name, (whole, _) in found.items()}, next(iter(found.values()))[1]

    def _models_of(self, number: int) -> dict[str, Tensor]:
        """Those of a group; or of a region with a network of its own, the one that its episode ended with."""
        server = self.regional[number]
        models = self.setup.method.models(server) if self.setup.hierarchy.flat else {"model": server.model}
        chosen = self._chosen.get(self.setup.hierarchy.regions[number].name)
        return models if chosen is None else {next(iter(models)): chosen}

    def round_failed(self, reason: str) -> None:
        self.callbacks.tell("on_round_failed", reason)

    def start_round(self, clients: int) -> None:
        run = self.callbacks.run
        run.round, run.logged = self.server.round, {}
        self.callbacks.tell("on_round_start", self.server.round, clients)

    def client_done(self, client: int, metrics: Mapping[str, float]) -> None:
        self.callbacks.tell("on_client_end", client, metrics)

    def _evaluates(self, round_: int) -> bool:
        """Whether an evaluation is due; with regions, at the first aggregation of regions after it would be."""
        every = self.setup.config.eval_every
        gap = 1 if self.setup.hierarchy.flat else self.setup.hierarchy.rounds_per_episode
        return every > 0 and round_ // every > (round_ - gap) // every

    def _follows_aggregation(self, round_: int) -> bool:
        """Whether the regions have just trained for one round from an aggregation that was evaluated."""
        before = self.records[-1] if self.records else None
        return before is not None and before["round"] == round_ - 1 and "student" in before.get("episode", {})

    def _teachers_after(self, engine: Engine, present: Sequence[Region]) -> dict[str, float | None]:
        """How the regions' models do, one round after they met."""
        return {
            region.name: tested(
                engine, self.setup.federation, self.regional_model(region), self._network_of[region.name]
            )[0]
            for region in present
        }

    def models(self) -> dict[str, Tensor]:
        """The models to evaluate, by name; the first is what the run is for."""
        chosen = next(iter(self._chosen.values()), None)
        if not (self.setup.hierarchy.flat or self.setup.method.has_final_exchange):
            return {"model": self.server.model if chosen is None else chosen}
        models = self._finite(self.setup.method.models(self.server))
        return models if chosen is None else {next(iter(models)): chosen}

    def _finite(self, models: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, model in models.items():
            if not torch.isfinite(model).all():
                raise Diverged(f"round {self.server.round}: {name} is no longer finite; a smaller rate may help")
        return models

    def final_models(self) -> dict[str, Tensor]:
        """The models that the run ends with: the first is what it is for, or each is that of a group."""
        if self.setup.hierarchy.separate:  # by the names of the groups, each the first of its own
            return {r.name: next(iter(self._models_of(r.number).values())) for r in self.setup.hierarchy.regions}
        return self.models() if self.setup.method.global_model else {}

    def _main_models(self) -> dict[str, Tensor]:
        """What the run is for: the first of its models, or the first of each group."""
        models = self.final_models()
        return models if self.setup.hierarchy.separate else dict(list(models.items())[:1])

    def predictor(self) -> Predictor | None:
        """The model with all that it needs to predict; None if the method has no global one."""
        return predictor(self.setup, self.final_models())

    def model(self) -> Tensor:
        """The weights of the model: what the run is for."""
        return next(iter(self.models().values()))

    def checkpoint(self) -> None:
        state = self.state() | {"settings": self._settings, "callbacks": self.callbacks.state()}
        self.directory.checkpoint(self.server.round, state, sorted(self.active_since_checkpoint))
        self.active_since_checkpoint.clear()

    def _network(self) -> nn.Module:
        """The network as it is now; untrained if the method has no global model."""
        return network(self.setup.task, self.model() if self.setup.method.global_model else None)


def refuse_one_file(setup: Setup) -> None:
    """Each group's model needs a file of its own."""
    named: dict[str, str] = {}
    for region in setup.hierarchy.regions if setup.hierarchy.separate else ():
        other = named.setdefault(files.further_model(region.name), region.name)
        if other != region.name:
            raise SettingError(
                f"group: the models of {other!r} and {region.name!r} would be one file, "
                f"{files.further_model(region.name)}; give them names that differ in letters or digits"
            )


def refuse_changes(before: dict[str, str], now: dict[str, str]) -> None:
    """A run goes on with the settings it began with."""
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name] and not _only_added(name, before[name], now):
            raise SettingError(
                f"{name} was {before[name]} when the run began and is {now[name]} in its config.toml; put it back, "
                "or start another run"
            )


def _only_added(name: str, before: str, now: dict[str, str]) -> bool:
    """Whether the run began before there were some of the settings, and these have the values that it had."""
    try:
        old, new, method = (ast.literal_eval(text) for text in (before, now[name], now["method"]))
    except (KeyError, SyntaxError, ValueError):  # an object of the user's own
        return False
    if name == "hyper" and not is_object(method):
        return bool(registry.added_settings(method) | old == new)
    if name == "region":
        return bool([{"model": "", "model_options": {}} | table for table in old] == new)
    return False
