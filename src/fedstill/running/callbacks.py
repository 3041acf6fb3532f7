"""Callbacks: code that hears how a run goes on, adds numbers to its records, and may stop it.

A callback changes nothing else: what it is given is to be read. Those that come with fedstill are in `monitors`,
`progress` and `tensorboard`.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedstill.building.config import Config
from fedstill.building.setup import Setup
from fedstill.core import tree
from fedstill.core.errors import FedstillError, SettingError, described, unknown
from fedstill.data.federation import Federation
from fedstill.methods.base import Method
from fedstill.metrics.records import EpisodeRecord, RoundRecord, Scores, Summary
from fedstill.running.results import model_file

log = logging.getLogger(__name__)


class CallbackError(FedstillError):
    """A callback failed; the message names it, and the cause is the error it raised."""


class RunView:
    """A run as callbacks see it. What it gives is to be read, not changed.

    Attributes:
        path: The run directory; a temporary one if the run was given no `out`.
        round: The round under way, or the last one done.
        stopped_by: The callback that ended the run before its last round.
    """

    def __init__(
        self,
        setup: Setup,
        path: Path,
        records: Callable[[], list[RoundRecord]],
        weights: Callable[[], Tensor],
        all_weights: Callable[[], Mapping[str, Tensor]],
        network: Callable[[], nn.Module],
    ) -> None:
        self._setup, self._records, self._network = setup, records, network
        self._weights, self._all_weights = weights, all_weights
        self._seen: list[RoundRecord] = []  # the records as callbacks see them
        self.path, self.round, self.stopped_by = path, 0, ""
        self.logged: dict[str, float | None] = {}  # for the record of the round under way
        self.chosen: tuple[int, Mapping[str, Tensor]] | None = None  # what `restore` was given

    @property
    def config(self) -> Config:
        """Every setting."""
        return self._setup.config

    @property
    def rounds(self) -> int:
        """The last round, if nothing stops the run before."""
        return self.config.rounds

    @property
    def records(self) -> Sequence[RoundRecord]:
        """The rounds so far, also those before the run was resumed. In `on_round_end` the last is the round's own."""
        records = self._records()
        self._seen = self._seen[: len(records) - 1]  # the last round's record may have grown since
        self._seen += [read_only(record) for record in records[len(self._seen) :]]
        return tuple(self._seen)

    @property
    def federation(self) -> Federation:
        """The clients and their numbers of samples; in a simulation, their data too."""
        return self._setup.federation

    @property
    def method(self) -> Method:
        """The method that is run."""
        return self._setup.method

    @property
    def parameters(self) -> int:
        """How many weights the model has."""
        return self._setup.task.size

    @property
    def has_one_model(self) -> bool:
        """Whether there is a global model, and not one for each group or client."""
        return self.method.global_model and not self._setup.hierarchy.separate

    @property
    def networks(self) -> str:
        """The network and how many weights it has, in words; of each group, where clients have different ones."""
        found = [(group.name, group.task.size) for group in self._setup.groups] or [
            (self.config.model, self.parameters)
        ]
        return " · ".join(f"{name} with {size:,} weights" for name, size in found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What whoever started the run should know."""
        return self._setup.warnings

    def weights(self) -> Tensor:
        """The model as a flat vector of its own, as it is now."""
        return self._weights().detach().clone()

    def all_weights(self) -> dict[str, Tensor]:
        """The same by name: of each group's model, where there is one for each, else of the one."""
        return {name: weights.detach().clone() for name, weights in self._all_weights().items()}

    def model(self) -> nn.Module:
        """The model as a network of its own, as it is now."""
        return self._network()

    def model_files(self) -> dict[str, bytes]:
        """The same models by name, each as a file that `fedstill.load` reads."""
        weights = self._all_weights()
        return {name: model_file(self._setup, [name], name, weights[name], self.round) for name in weights}

    def log(self, name: str, value: float) -> None:
        """Add a number to the round's record: `record["callbacks"][name]`, also in metrics.jsonl."""
        number = float(value)
        self.logged[name] = number if math.isfinite(number) else None

    def restore(self, round_: int, weights: Tensor | Mapping[str, Tensor]) -> None:
        """Let the run's result be weights of an earlier round, should this round be its last.

        They are as `weights` or, needed where there is a model for each group, `all_weights` gave them after it.
        """
        given = {"": weights} if isinstance(weights, Tensor) else weights
        if self._setup.hierarchy.separate and given.keys() != self._all_weights().keys():
            raise SettingError("restore: there is a model for each group; give the weights of all: all_weights()")
        self.chosen = round_, given


class Callback:
    """Base class: override the events you want to hear.

    With `state_dict` and `load_state_dict` a callback is part of every checkpoint, and a run that was killed goes on
    with it exactly. An error of a callback stops the run at the end of the round, which is kept.

    Examples:
        >>> class Patience(Callback):
        ...     def on_round_end(self, run, record):
        ...         run.log("gap", record["train_loss"] - (record["loss"] or 0))
        ...         return record["accuracy"] is not None and record["accuracy"] > 0.2  # True stops the run
        >>> import fedstill
        >>> small = {"clients": 4, "epochs": 1, "fraction": 0.05, "engine": "inline"}
        >>> result = fedstill.run("fedavg", rounds=30, **small, callbacks=[Patience()])
        >>> result.summary["stopped_by"]
        'Patience'
    """

    def on_run_start(self, run: RunView) -> bool | None:
        """Before the first round, or the first after a run was resumed: `run.round` rounds are done.

        True ends a run that was resumed, as `on_round_end` had ended it before it could write its results.
        """

    def on_round_start(self, run: RunView, round_: int, clients: int) -> None:
        """So many clients are about to train. A served round that failed starts again."""

    def on_client_end(self, run: RunView, client: int, metrics: Mapping[str, float]) -> None:
        """A client's answer came, with what it measured; nothing if it failed. Between servers a client is a region."""

    def on_round_failed(self, run: RunView, reason: str) -> None:
        """A served round came to nothing and is tried again."""

    def on_aggregation_end(self, run: RunView, episode: EpisodeRecord) -> None:
        """The regions' models have become one."""

    def on_evaluation_end(self, run: RunView, scores: Scores) -> None:
        """The model was evaluated."""

    def on_round_end(self, run: RunView, record: RoundRecord) -> bool | None:
        """A round is done. True ends the run after it; with regions, after the next aggregation."""

    def on_run_end(self, run: RunView, summary: Summary) -> None:
        """The results are written."""

    def on_run_failed(self, run: RunView, error: BaseException) -> None:
        """The run was interrupted or failed; it can be resumed."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: tensors, numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave at the checkpoint."""


class Callbacks:
    """The callbacks of one run, in their order."""

    def __init__(self, callbacks: Sequence[Callback], run: RunView) -> None:
        check_callbacks(callbacks)
        self.run = run
        self._named = by_name(callbacks)
        self._failed: dict[str, FedstillError] = {}

    def tell(self, event: str, *what: object) -> str:
        """Call an event of every callback that has not failed; the name of the first that answered True.

        A failure is raised by `check`, once what is done is kept: the others miss nothing of the round.
        """
        stopped_by = ""
        for name, callback in self._named.items():
            if name in self._failed:
                continue
            try:
                if getattr(callback, event)(self.run, *map(read_only, what)):
                    stopped_by = stopped_by or name
            except Exception as error:
                log.exception("callback %s.%s", name, event)
                self._failed[name] = _named(error, f"{name}.{event}")
        return stopped_by

    @property
    def failed(self) -> bool:
        return bool(self._failed)

    def check(self) -> None:
        """Raise the first failure."""
        for error in self._failed.values():
            raise error

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of them, by name."""
        found = {}
        for name, callback in self._named.items():
            try:
                state = callback.state_dict()
                tree.check(state)
            except Exception as error:
                raise _named(error, f"{name}.state_dict") from error
            if state:
                found[name] = state
        return found

    def load_state(self, kept: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; callbacks that were not there then begin anew."""
        for name, callback in self._named.items():
            if name in kept:
                try:
                    callback.load_state_dict(kept[name])
                except Exception as error:
                    raise _named(error, f"{name}.load_state_dict") from error


def by_name(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by what they are called in a summary: their class, and which of several of it."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        name = type(callback).__name__
        alike = sum(type(other).__name__ == name for other in named.values())
        named[f"{name} {alike + 1}" if alike else name] = callback
    return named


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse what is no callback, before a run begins."""
    if not isinstance(callbacks, Sequence):
        raise SettingError(f"callbacks is {callbacks!r:.60}; give a list of them, as callbacks=[…]")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = f"; write {callback.__name__}(…)" if isinstance(callback, type) else ""
            raise SettingError(f"callbacks: {callback!r} is not an object of a fedstill.Callback{hint}")
        _check_events(type(callback))


class ReadOnly(dict[str, Any]):
    """What happened, to be read: a change would be one of the results."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise TypeError("records are to be read, not changed; run.log(name, value) adds a number to the round's")

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy is the caller's own

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse


def read_only(value: Any) -> Any:
    """A copy of what a record holds that cannot be changed; anything else as it is."""
    if isinstance(value, Mapping):
        return ReadOnly({name: read_only(each) for name, each in value.items()})
    return [read_only(each) for each in value] if isinstance(value, list) else value


def _check_events(callback: type[Callback]) -> None:
    """Refuse an event that nobody would ever call, or that could not be called."""
    for name in dir(callback):
        if not name.startswith("on_") or getattr(Callback, name, None) is getattr(callback, name):
            continue
        if not hasattr(Callback, name):
            events = [event for event in dir(Callback) if event.startswith("on_")]
            raise unknown(f"event of callback {callback.__name__}", name, events)
        expected = list(inspect.signature(getattr(Callback, name)).parameters)
        try:
            inspect.signature(getattr(callback, name)).bind(*expected)
        except TypeError as error:
            raise SettingError(
                f"callback {callback.__name__}.{name} takes other arguments than ({', '.join(expected)})"
            ) from error


def _named(error: Exception, where: str) -> FedstillError:
    """An error of a callback with the callback's name; a setting that is wrong speaks for itself."""
    if isinstance(error, SettingError):
        return error
    named = CallbackError(f"callback {where}: {described(error)}")
    named.__cause__ = error
    return named
