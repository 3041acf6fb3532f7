"""The end of an episode once more, with other settings: teachers that are there already need not be trained again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.aggregate.mean import weighted_mean
from fedstill.building.config import IRRELEVANT, anchored
from fedstill.building.setup import Setup
from fedstill.core import tree
from fedstill.core.errors import DataError, SettingError
from fedstill.core.files import read_sealed_json, sha256, write_sealed_json
from fedstill.methods import registry
from fedstill.methods.base import Server
from fedstill.running import files
from fedstill.running.directory import RunDirectory
from fedstill.running.inputs import prepare_again
from fedstill.running.machine import one_thread, server_threads
from fedstill.running.records import versions
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
        self.config = self.directory.config()
        content = saved[self.number].read_bytes()
        self.digest = sha256(content)
        episode = tree.decode(content)
        self.old: Tensor = episode["old"]
        self.teachers: dict[str, Tensor] = episode["teachers"]
        self.round: int = episode["round"]

    @cached_property
    def setup(self) -> Setup:
        """The run's data and network, which take a while."""
        return prepare_again(self.directory, self.config)

    def accuracy(self, model: Tensor) -> float:
        """Of any of the models, on the global test set."""
        test = self.setup.federation.dataset.test
        with one_thread():
            predicted = score(self.setup.task, model, test.x, test.y)["predicted"]
        return float((predicted == test.y).double().mean())

    def teach(self, variants: Sequence[Mapping[str, Any]]) -> Iterator[TaughtStudent]:
        """The stage with each of several groups of the method's settings, one after the other."""
        config = self.config
        methods = [registry.make(config.method, config.hyper | dict(variant)) for variant in variants]
        for variant, method in zip(variants, methods, strict=True):
            federation = self.setup.federation
            server = Server(
                self.setup.task,
                federation.sizes,
                self.directory.server_store,
                self.setup.pool(),
                threads=server_threads(config),
            )
            server.model, server.round = self.old, self.round
            began = time.perf_counter()
            with one_thread(), torch.random.fork_rng(devices=[]):
                method.merge(server, list(self.teachers.values()))
            seconds = time.perf_counter() - began
            yield TaughtStudent(dict(variant), self.accuracy(server.model), seconds)


@dataclass(frozen=True)
class Accuracies:
    """Of the models at the end of a run's last saved episode, and of students that they teach."""

    teachers: list[float]
    mean: float  # of the teachers' mean, with which a student starts
    students: list[float]  # of each group of settings


def accuracies(run: Path, variants: Sequence[Mapping[str, Any]]) -> Accuracies:
    """Those of one run. They are computed once, and kept in a file beside the run directory."""
    saved = SavedEpisode(run)
    of = _all_that_counts(saved, variants)
    file = run.parent / files.STUDENTS / f"{sha256(json.dumps(of, sort_keys=True).encode())[:16]}.json"
    try:
        kept = read_sealed_json(file)
        if kept["of"] == of:
            return Accuracies(**kept["accuracies"])
    except (FileNotFoundError, DataError, LookupError, TypeError):
        pass  # it is not there, or is damaged, and is made again
    teachers = list(saved.teachers.values())
    found = Accuracies(
        [saved.accuracy(model) for model in teachers],
        saved.accuracy(weighted_mean((model, 1) for model in teachers)),
        [student.accuracy for student in saved.teach(variants)],
    )
    file.parent.mkdir(exist_ok=True)
    write_sealed_json(file, {"of": of, "accuracies": asdict(found)})
    return found


def _all_that_counts(saved: SavedEpisode, variants: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What students depend on: teachers, settings, and the versions of what teaches them."""
    config = anchored(saved.config)
    found = {
        "teachers": saved.digest,
        "settings": {k: v for k, v in config.model_dump(mode="json").items() if k not in IRRELEVANT},
        "variants": [dict(variant) for variant in variants],
        "revision": sum(part.revision for part in registry.find(config.method)),
        "versions": versions(),
    }
    return dict(json.loads(json.dumps(found, default=str)))
