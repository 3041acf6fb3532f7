"""What a search for settings is told, and what it comes to: trials, the best of them, the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.space import Range, Space
from fedstill.running.monitors import usual_mode

Sampler = Literal["tpe", "random", "grid"]
FEWEST = 4  # trials from which it can be said what matters
SAMPLERS: tuple[Sampler, ...] = ("tpe", "random", "grid")


@dataclass(frozen=True)
class Terms:
    """How a method's settings are searched. A budget that is 0 is none."""

    objectives: tuple[str, ...] = ("val_accuracy",)
    sampler: Sampler = "tpe"
    trials: int = 20
    seconds: float = 0.0
    rounds: int = 0  # of all runs together
    seeds: int = 1  # of each trial; the mean counts
    halving: int = 3  # of so many trials one goes on; 0: all do

    def __post_init__(self) -> None:
        for name in self.objectives:
            if not name.startswith("val_"):
                raise SettingError(
                    f"objective = {name!r}: settings are chosen by validation data, such as val_accuracy, val_amp or "
                    "val_wlp"
                )
        if not 1 <= len(self.objectives) <= 2 or len(set(self.objectives)) < len(self.objectives):
            raise SettingError(f"objectives = {', '.join(self.objectives)}: one, or two different ones")
        if self.sampler not in SAMPLERS:
            raise SettingError(f"sampler = {self.sampler!r}: {', '.join(SAMPLERS)}")
        if self.halving == 1 or self.halving < 0:
            raise SettingError(f"halving = {self.halving}: of how many trials one goes on, at least 2; 0: all do")
        for name in ("trials", "seconds", "rounds", "seeds"):
            if not getattr(self, name) >= (1 if name == "seeds" else 0):
                raise SettingError(f"{name} = {getattr(self, name)}: at least {1 if name == 'seeds' else 0}")
        if not (self.trials or self.seconds or self.rounds or self.sampler == "grid"):
            raise SettingError("a search needs a budget: trials, seconds or rounds")

    @property
    def halves(self) -> bool:
        """Whether trials are stopped on the way; with two objectives none is the worse by both."""
        return bool(self.halving) and len(self.objectives) == 1


@dataclass
class Trial:
    """One point of the space, over its seeds."""

    number: int
    settings: dict[str, Any]
    path: Path
    values: dict[int, list[list[float]]] = field(default_factory=dict)  # by round: of each objective, of each seed
    failed: str = ""
    seconds: float = 0.0
    rounds_run: int = 0  # of its runs together
    same_as: int | None = None  # an earlier trial with these settings, whose runs they are

    @property
    def rounds(self) -> int:
        """How far it went."""
        return max(self.values, default=0)

    def score(self, round_: int | None = None) -> tuple[float, ...]:
        """The mean of each objective over the seeds."""
        found = self.values[self.rounds if round_ is None else round_]
        return tuple(math.fsum(of_seeds) / len(of_seeds) for of_seeds in found)

    def record(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "settings": self.settings,
            "path": self.path.name,
            "values": {str(round_): values for round_, values in self.values.items()},
            "failed": self.failed,
            "seconds": self.seconds,
            "rounds_run": self.rounds_run,
            "same_as": self.same_as,
        }


@dataclass
class Search:
    """What the search of one method came to."""

    method: str
    space: Space
    terms: Terms
    rounds: int  # of a run that goes to the end
    trials: list[Trial] = field(default_factory=list)

    @property
    def complete(self) -> list[Trial]:
        """The trials that went to the end."""
        return [trial for trial in self.trials if trial.rounds == self.rounds and not trial.failed]

    @property
    def signs(self) -> tuple[int, ...]:
        """1 for an objective of which more is better, else -1."""
        return tuple(1 if usual_mode(name) == "max" else -1 for name in self.terms.objectives)

    def better(self, trial: Trial, round_: int | None = None) -> tuple[float, ...]:
        """The trial's means, so turned that more is better."""
        return tuple(sign * value for sign, value in zip(self.signs, trial.score(round_), strict=True))

    @property
    def best(self) -> Trial:
        """The trial that is best by the (first) objective."""
        if not self.complete:
            reasons = {trial.failed for trial in self.trials if trial.failed}
            raise FedstillError(f"{self.method}: no trial came to an end ({'; '.join(sorted(reasons)) or 'no budget'})")
        return max(self.complete, key=lambda trial: (self.better(trial), -trial.number))

    @property
    def front(self) -> list[Trial]:
        """The trials that no other exceeds in every objective (Pareto), by the first objective."""
        found = [
            trial
            for trial in self.complete
            if not any(_dominates(self.better(other), self.better(trial)) for other in self.complete)
        ]
        return sorted(found, key=lambda trial: (self.better(trial), -trial.number), reverse=True)

    @property
    def rounds_run(self) -> int:
        """Of all runs together."""
        return sum({trial.path: trial.rounds_run for trial in self._by_progress}.values())

    @property
    def rounds_of_full_search(self) -> int:
        """What the same trials would have taken had each gone to the end."""
        return sum(trial.same_as is None for trial in self.trials) * self.rounds * self.terms.seeds

    @property
    def seconds(self) -> float:
        return math.fsum({trial.path: trial.seconds for trial in self._by_progress}.values())

    @property
    def _by_progress(self) -> list[Trial]:
        return sorted(self.trials, key=lambda trial: trial.rounds_run)  # of those with the same runs, the last counts

    @property
    def compared_after(self) -> int:
        """The first round after which trials were compared: of all that did not fail there is a value."""
        return min((round_ for trial in self.trials for round_ in trial.values), default=self.rounds)

    def importances(self) -> dict[str, float]:
        """How much of the objective's spread, after `compared_after` rounds, each setting explains (fANOVA)."""
        optuna, round_ = import_optuna(), self.compared_after
        found = {trial.number: trial for trial in self.trials if round_ in trial.values and trial.same_as is None}
        if len(found) < FEWEST or len({self.better(trial, round_)[0] for trial in found.values()}) < 2:
            return {}
        study = optuna.create_study(direction="maximize")
        for trial in found.values():
            drawn = optuna.trial.create_trial(
                params=trial.settings,
                distributions=distributions(optuna, self.space),
                value=self.better(trial, round_)[0],
            )
            study.add_trial(drawn)
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))

    def record(self) -> dict[str, Any]:
        """What is written down of it."""
        best = self.best.number if self.complete else None
        return {
            "space": {name: vars(axis) for name, axis in self.space.items()},
            "rounds": self.rounds,
            "rounds_run": self.rounds_run,
            "rounds_of_full_search": self.rounds_of_full_search,
            "seconds": self.seconds,
            "best": best,
            "settings": self.best.settings if self.complete else {},
            "front": [trial.number for trial in self.front],
            "trials": [trial.record() for trial in self.trials],
        }


def _dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x >= y for x, y in zip(a, b, strict=True)) and any(x > y for x, y in zip(a, b, strict=True))


def distributions(optuna: Any, space: Space) -> dict[str, Any]:
    kinds = optuna.distributions
    return {
        name: (
            kinds.CategoricalDistribution(axis.values)
            if not isinstance(axis, Range)
            else kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
            if axis.whole
            else kinds.FloatDistribution(axis.low, axis.high, log=axis.log)
        )
        for name, axis in space.items()
    }


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise SettingError("tuning needs a package: pip install 'fedstill[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
