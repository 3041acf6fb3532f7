"""The search for a method's settings, judged by validation data alone.

Trials come in groups. With halving, each trial runs for a few rounds, goes on from there if it is among the best third
so far, and then once more: a run that is resumed has the same bits, so nothing is run twice. The sampler (Optuna's)
hears of a group when it is done, and its draws depend on the seed and on what it heard. A search that was killed is
therefore just asked again: it draws the same trials, and finds their runs in their directories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedstill.building.config import Config
from fedstill.core import seeds as streams
from fedstill.core.errors import SettingError
from fedstill.core.files import read_json, write_json
from fedstill.core.space import Space, combinations, rounded
from fedstill.metrics.records import RoundRecord, value_of
from fedstill.running import files
from fedstill.running.callbacks import by_name
from fedstill.running.directory import RunDirectory
from fedstill.running.places import stopped_by
from fedstill.running.records import FINAL_EVALUATIONS
from fedstill.studies.cells import Cell, Failure, Watcher, other_settings, raise_first, try_cells
from fedstill.studies.trials import Search, Terms, Trial, distributions, import_optuna

RUNGS = 3  # stages of halving, the last of which has all rounds
LEARNS_AFTER = (
    8  # trials drawn at random before TPE learns from them: its usual 10 would be two groups of a halved search
)
TOGETHER = 4  # trials of a group without halving: whatever the number of cores, for the draws depend on it
Configure = Callable[[Mapping[str, Any], int], tuple[Config, dict[str, Any]]]  # a trial's settings, which seed
Watch = Callable[[Sequence[Cell]], Any]  # a context manager that gives a Watcher


class TrialRun(Cell):
    """A run that may go on to more rounds later, and may have done so already."""

    def rounds_done(self) -> int | None:
        if not (self.path / files.CONFIG).is_file():
            return None
        there = RunDirectory.open(self.path, lock=False)
        theirs = there.config(replaced=self.own).model_copy(update={"rounds": self.config.rounds})
        if difference := other_settings(theirs, self.config):
            raise SettingError(
                f"{self.path} is a trial with other settings ({difference}); choose another --out, or go on with the "
                "command, and the version of Optuna, that it was begun with"
            )
        return min(max((record["round"] for record in there.records()), default=0), self.config.rounds)

    @property
    def finished(self) -> bool:
        done = self.rounds_done()
        if done is None or done == self.config.rounds:
            return done is not None
        return stopped_by(self.path) in by_name(self._hearing) and (self.path / files.SUMMARY).exists()

    def rounds_so_far(self) -> list[RoundRecord]:
        """Its records up to the round that is wanted."""
        records = RunDirectory.open(self.path, lock=False).records()
        return [record for record in records if record["round"] <= self.config.rounds]


def rungs_of(config: Config, terms: Terms) -> list[int]:
    """After how many rounds trials are compared; the last are all rounds.

    They are rounds that are evaluated anyway: one more would count in the mean of the last ones, and for patience.

    >>> rungs_of(Config(rounds=30), Terms()), rungs_of(Config(rounds=30), Terms(halving=0))
    ([4, 10, 30], [30])
    >>> rungs_of(Config(rounds=30, eval_every=4), Terms())
    [4, 12, 30]
    """
    if not terms.halves:
        return [config.rounds]
    # Within an episode there is no model of all regions.
    evaluated = config.eval_every or 1  # 0: only after the last round, which each of them then is
    step = evaluated if config.flat else math.lcm(evaluated, config.rounds_per_episode)
    found = {step * math.ceil(config.rounds / terms.halving**left / step) for left in range(RUNGS)}
    return sorted({min(rounds, config.rounds) for rounds in found})


def search(
    method: str,
    space: Space,
    configure: Configure,
    folder: Path,
    terms: Terms,
    *,
    callbacks: Sequence[Any] = (),
    jobs: int = 0,
    watch: Watch | None = None,
    progress: Callable[[Search], None] = lambda _: None,
) -> Search:
    """Search a method's settings in a folder, or go on with a search that was begun there."""
    if not space:
        raise SettingError(f"{method}: there is nothing to search; name a setting, such as --space lr=log:1e-3..1e-1")
    config, _ = configure(_first_point(space), 0)
    found = Search(method, space, terms, config.rounds)
    rungs, study = rungs_of(config, terms), _Study(found, config.seed)
    by_settings: dict[str, Trial] = {}
    while size := _next_group(found, len(rungs), study.left):
        group: list[Trial] = []
        for settings in study.ask(size):
            number = len(found.trials) + len(group)
            trial = Trial(number, settings, folder / f"trial-{number:03d}")
            first = by_settings.setdefault(repr(sorted(settings.items())), trial)
            if first is not trial:
                trial = replace(trial, path=first.path, same_as=first.number)
            group.append(trial)
        _run_group(found, group, rungs, configure, callbacks, jobs, watch)
        found.trials += group
        study.tell(group)
        progress(found)
    return found


def _run_group(
    search: Search,
    group: Sequence[Trial],
    rungs: Sequence[int],
    configure: Configure,
    callbacks: Sequence[Any],
    jobs: int,
    watch: Watch | None,
) -> None:
    """Run a group to its first rung, the better ones of it to the next, and so on."""
    alive = list(group)
    for rounds in rungs:
        cells = {trial.number: _cells(trial, rounds, configure, search.terms.seeds, callbacks) for trial in alive}
        todo = {cell.path: cell for of_trial in cells.values() for cell in of_trial}
        known = {trial.number: _known_failure(trial) for trial in alive}
        lost = {cell.path for number, why in known.items() if why for cell in cells[number]}
        failed = _try([cell for path, cell in todo.items() if path not in lost], jobs, watch)
        raise_first({path: failure for path, failure in failed.items() if not failure.diverged})
        for trial in alive:
            reasons = [failed[cell.path].reason for cell in cells[trial.number] if cell.path in failed]
            trial.failed = known[trial.number] or (reasons[0] if reasons else "")
            if reasons:
                write_json(trial.path / FAILED, {"reason": trial.failed})
            _measure(search, trial, rounds, cells[trial.number])
        alive = _promoted(search, [trial for trial in alive if not trial.failed], rounds)


def _promoted(search: Search, group: Sequence[Trial], rounds: int) -> list[Trial]:
    """Those of a group that are in the best third of all trials, of earlier groups too, that went so far."""
    everyone = [trial for trial in search.trials if rounds in trial.values] + list(group)
    best = sorted(everyone, key=lambda trial: (search.better(trial, rounds), -trial.number), reverse=True)
    kept = {trial.number for trial in best[: math.ceil(len(best) / max(1, search.terms.halving))]}
    return [trial for trial in group if trial.number in kept]


FAILED = "failed.json"  # in a trial's folder: why its settings cannot be trained with


def _known_failure(trial: Trial) -> str:
    path = trial.path / FAILED
    return str(read_json(path).get("reason", "")) if path.is_file() else ""


def _try(cells: Sequence[Cell], jobs: int, watch: Watch | None) -> dict[Path, Failure]:
    todo = [cell for cell in cells if not cell.finished]
    if watch is None or not todo:
        return try_cells(todo, jobs=jobs, watcher=Watcher())
    with watch(todo) as watcher:
        return try_cells(todo, jobs=jobs, watcher=watcher)


def _cells(trial: Trial, rounds: int, configure: Configure, seeds: int, callbacks: Sequence[Any]) -> list[TrialRun]:
    found = []
    for s in range(seeds):
        config, own = configure(trial.settings, s)
        config = config.model_copy(update={"rounds": rounds})
        found.append(TrialRun(trial.path / f"s{config.seed}", config, own, callbacks))
    return found


def _measure(search: Search, trial: Trial, rounds: int, cells: Sequence[TrialRun]) -> None:
    """Note what a trial cost, and its objectives after so many rounds: as a summary has them, of each seed."""
    records = [cell.rounds_so_far() for cell in cells]
    trial.seconds = math.fsum(r["seconds"] + r["eval_seconds"] for each in records for r in each)
    trial.rounds_run = max(1, sum(map(len, records)))  # also of one that failed in its first
    if trial.failed:
        return
    trial.values[rounds] = []
    for name in search.terms.objectives:
        values = [value for each in records if (value := _final(each, name)) is not None]
        if len(values) < len(cells):
            raise SettingError(f"objective = {name!r}: {cells[0].path}/metrics.jsonl does not have it in every run")
        trial.values[rounds].append(values)


def _final(records: Sequence[RoundRecord], name: str) -> float | None:
    scored = [record for record in records if record["evaluated"]][-FINAL_EVALUATIONS:]
    values = [value for record in scored if (value := value_of(record, name)) is not None]
    return sum(values) / len(values) if values else None


def _next_group(search: Search, rungs: int, left: float) -> int:
    """How many trials come next; none once the budget is spent. Budgets of time are looked at between groups."""
    terms, done = search.terms, len(search.trials)
    if (terms.seconds and search.seconds >= terms.seconds) or (terms.rounds and search.rounds_run >= terms.rounds):
        return 0
    group = terms.halving ** (rungs - 1) if terms.halves else TOGETHER
    if terms.sampler != "tpe" and not (terms.seconds or terms.rounds):
        group = 10**9  # nothing is learnt from the first ones: all are halved together
    most = terms.trials - done if terms.trials else math.inf
    return int(min(group, most, left))


def _first_point(space: Space) -> dict[str, Any]:
    return {name: axis.ends[0] for name, axis in space.items()}


def corners(space: Space) -> Iterator[dict[str, Any]]:
    """Points with every end of every axis, so that a value that is not allowed is found before the first run."""
    first = _first_point(space)
    for name, axis in space.items():
        for value in axis.ends:
            yield first | {name: value}


class _Study:
    """Optuna's part: it draws trials, and hears what they came to."""

    def __init__(self, search: Search, seed: int) -> None:
        optuna = self._optuna = import_optuna()
        self._search, self._asked = search, {}  # type: ignore[var-annotated]
        draw = streams.key(seed, "tune") % 2**32
        if search.terms.sampler == "tpe":
            # constant_liar: the trials of a group, drawn before any of them has a value, keep away from each other
            sampler = optuna.samplers.TPESampler(seed=draw, n_startup_trials=LEARNS_AFTER, constant_liar=True)
        else:
            sampler = optuna.samplers.RandomSampler(seed=draw)
        self._study = optuna.create_study(directions=["maximize"] * len(search.terms.objectives), sampler=sampler)
        self._grid = combinations(search.space) if search.terms.sampler == "grid" else None

    @property
    def left(self) -> float:
        """How many trials there still are."""
        return math.inf if self._grid is None else len(self._grid) - len(self._asked)

    def ask(self, count: int) -> list[dict[str, Any]]:
        found = []
        for _ in range(count):
            if self._grid is not None:
                self._study.enqueue_trial(self._grid[len(self._asked)])
            trial = self._study.ask(distributions(self._optuna, self._search.space))
            self._asked[len(self._asked)] = trial
            found.append({name: rounded(value) for name, value in trial.params.items()})
        return found

    def tell(self, group: Sequence[Trial]) -> None:
        state = self._optuna.trial.TrialState
        for trial in group:
            asked = self._asked[trial.number]
            if trial.failed:
                self._study.tell(asked, state=state.FAIL)
                continue
            if self._search.terms.halves:
                for rounds in trial.values:
                    asked.report(self._search.better(trial, rounds)[0], rounds)
            if trial.rounds == self._search.rounds:
                self._study.tell(asked, list(self._search.better(trial)))
            else:
                self._study.tell(asked, state=state.PRUNED)
