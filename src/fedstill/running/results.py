"""What the end of a run writes: the models with what describes them, each client's result, the summary."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedstill.building.groups import first_network
from fedstill.building.setup import Setup
from fedstill.core import device
from fedstill.data.federation import Federation
from fedstill.inference.description import GroupNetwork, ModelDescription, describe, model_bytes, unwrapped
from fedstill.inference.predictor import Predictor
from fedstill.metrics.records import Summary
from fedstill.running import files
from fedstill.running.directory import RunDirectory, to_json
from fedstill.running.evaluation import Evaluation
from fedstill.train.task import Task, classifier


def write_results(
    setup: Setup,
    directory: RunDirectory,
    models: Mapping[str, Tensor],
    summary: Summary,
    evaluation: Evaluation | None,
) -> dict[str, NDArray[Any]]:
    """Write all that a finished run has, the digests last; the columns of clients.csv."""
    federation = setup.federation
    local = evaluation.fair.local if evaluation else np.full(federation.clients, np.nan)
    groups = setup.client_groups
    directory.write(files.CLIENTS, _client_rows(federation, local, groups))
    description = _described(setup, models)
    for name, model in models.items():
        file = files.MODEL if name == description.model else files.further_model(name)
        directory.write(file, model_file(setup, models, name, model))
    directory.write(files.DESCRIPTION, description.as_json(indent=2) + "\n")
    directory.write(files.SUMMARY, to_json(summary, indent=2) + "\n")
    directory.write_digests()
    return {
        "client": np.array(federation.names or range(federation.clients)),
        "train_samples": federation.sizes,
        "test_samples": federation.test_sizes,
        "accuracy": np.asarray(local, dtype=float),
        **({"group": np.array(groups)} if groups else {}),
    }


def _client_rows(federation: Federation, local: NDArray[Any], groups: Sequence[str]) -> bytes:
    """What clients.csv holds."""
    rows = io.BytesIO()  # lines as objects would take more than all else
    rows.write(f"client,train_samples,test_samples,accuracy{',group' if groups else ''}\n".encode())
    names, last = federation.names or map(str, range(federation.clients)), groups or repeat("")
    for name, n, m, accuracy, group in zip(names, federation.sizes, federation.test_sizes, local, last):  # noqa: B905
        own = f",{_quoted(group)}" if groups else ""
        rows.write(f"{_quoted(name)},{n},{m},{'' if math.isnan(accuracy) else f'{accuracy:.6f}'}{own}\n".encode())
    return rows.getvalue()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"' if any(c in name for c in ',"\n') else name


def model_file(setup: Setup, models: Iterable[str], name: str, model: Tensor, round_: int = 0) -> bytes:
    """One of the run's models as a file that describes itself, and may say which round it is of."""
    alone = _described(setup, models).model_copy(update={"model": name, "models": (name,), "round": round_})
    task = next((group.task for group in setup.groups if group.name == name), setup.task)
    return model_bytes(alone.of_group(name), network(task, model).state_dict())


def network(task: Task, model: Tensor | None = None) -> nn.Module:
    """The network with these weights, the user's own if there is one; untrained if there are none."""
    with device.on(device.CPU):
        net = task.build()
    if model is not None:
        net.load(model)
    return task.without_statistics(unwrapped(classifier(net))).eval()


def predictor(setup: Setup, models: Mapping[str, Tensor]) -> Predictor | None:
    """The first of the models with all that it needs to predict; None if there is none."""
    if not models:
        return None
    return Predictor(network(setup.task, next(iter(models.values()))), _described(setup, models))


def _described(setup: Setup, models: Iterable[str]) -> ModelDescription:
    found = describe(first_network(setup.config), setup.task, setup.method, tuple(models))
    if not setup.groups:
        return found
    each = {group.name: describe(group.config, group.task, setup.method, ()) for group in setup.groups}
    groups = {
        name: GroupNetwork(network=own.network, options=own.options, encoder=own.encoder, frozen=own.frozen)
        for name, own in each.items()
    }
    return found.model_copy(update={"groups": groups})
