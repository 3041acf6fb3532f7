"""The end of an episode once more, with other settings: teachers that are there already need not be trained again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.building.setup import Setup
from fedstill.core import tree
from fedstill.core.errors import SettingError
from fedstill.methods import registry
from fedstill.methods.base import Server
from fedstill.running.directory import RunDirectory
from fedstill.running.inputs import prepare_again
from fedstill.running.machine import one_thread, server_threads
from fedstill.train.evaluate import score


@dataclass(frozen=True)
class TaughtStudent:
    """What a global stage made of saved teachers."""

    settings: dict[str, Any]  # those that differ from the run's
    accuracy: float  # of the student, on the global test set
    seconds: float  # of the stage


class SavedEpisode:
    """The models that met at the end of an episode, of a run with `save_teachers`."""

    def __init__(self, path: Path, number: int | None = None) -> None:
        self.directory = RunDirectory.open(path, lock=False)
        saved = self.directory.saved_episodes()
        if not saved:
            raise SettingError(f"{path} has no saved teachers; run it with --set save_teachers=true")
        self.number = max(saved) if number is None else number
        if self.number not in saved:
            raise SettingError(f"episode {self.number}: those saved are {', '.join(map(str, sorted(saved)))}")
        self.setup: Setup = prepare_again(self.directory, self.directory.config())
        episode = tree.decode(saved[self.number].read_bytes())
        self.old: Tensor = episode["old"]
        self.teachers: dict[str, Tensor] = episode["teachers"]
        self.round: int = episode["round"]

    def accuracy(self, model: Tensor) -> float:
        """Of any of the models, on the global test set."""
        test = self.setup.federation.dataset.test
        with one_thread():
            predicted = score(self.setup.task, model, test.x, test.y)["predicted"]
        return float((predicted == test.y).double().mean())

    def teach(self, variants: Sequence[Mapping[str, Any]]) -> Iterator[TaughtStudent]:
        """The stage with each of several groups of the method's settings, one after the other."""
        config = self.setup.config
        methods = [registry.make(config.method, config.hyper | dict(variant)) for variant in variants]
        for variant, method in zip(variants, methods, strict=True):
            federation = self.setup.federation
            server = Server(
                self.setup.task,
                federation.sizes,
                self.directory.server_store,
                self.setup.pool(),
                threads=server_threads(self.setup.config),
            )
            server.model, server.round = self.old, self.round
            began = time.perf_counter()
            with one_thread(), torch.random.fork_rng(devices=[]):
                method.merge(server, list(self.teachers.values()))
            seconds = time.perf_counter() - began
            yield TaughtStudent(dict(variant), self.accuracy(server.model), seconds)
