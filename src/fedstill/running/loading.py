"""From a run directory, or a model file alone, to a model that predicts."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.building.task import Network
from fedstill.core import trust
from fedstill.core.errors import DataError, SettingError, unknown
from fedstill.core.files import home_path
from fedstill.core.tree import read_tensors
from fedstill.core.weights import FlatNet
from fedstill.data import sources
from fedstill.inference.description import (
    OWN,
    ModelDescription,
    build,
    load_weights,
    make_method,
    parse,
    read_description,
    unwrapped,
)
from fedstill.inference.predictor import Predictor
from fedstill.methods.base import Method
from fedstill.models.base import Classifier
from fedstill.running import files
from fedstill.running.directory import RunDirectory
from fedstill.running.places import check_result
from fedstill.train.client import BUFFERS

_SHOWN = 10  # names in an error


def load(
    path: str | Path,
    *,
    which: str | None = None,
    client: int | str | None = None,
    model: Network | str | None = None,
    method: Method | None = None,
) -> Predictor:
    """A trained model that takes raw inputs: of a run directory, of a site's folder, or of a model.safetensors alone.

    It is the one that headlines the results; `which` names another that the method evaluates ("without T1"), `client`,
    a number or name, gives the model that a client keeps for itself. A network of your own (or a method of your own
    that changes the network) is given again: an object, or `file.py:function`.

    Examples:
        >>> import fedstill, tempfile
        >>> out = tempfile.mkdtemp() + "/run"
        >>> _ = fedstill.run("fedavg", clients=4, rounds=1, epochs=1, fraction=0.05, engine="inline", out=out)
        >>> load(out)
        <Predictor: lenet5 by fedavg; image 1x32x32 -> 10 classes>
    """
    place = home_path(path)
    if place.is_file():
        return _from_file(place, which, client, model, method)
    description = _description(place)
    if description.groups:
        description = description.of_group(which or description.model if client is None else _group(place, client))
    if model is None or (description.changed and method is None):
        _check_code(place, description, given={"model": model, "method": method})
    if client is not None:
        if which is not None:
            raise SettingError(f"which={which!r} and client={client!r}: a client has one model of its own; give one")
        return _of_client(place, description, client, model, method)
    return _global(place, description, which, model, method)


def _from_file(
    path: Path, which: str | None, client: object, model: Network | str | None, method: Method | None
) -> Predictor:
    if path.suffix != ".safetensors":
        raise SettingError(f"{path} is no model; if it is data, fedstill.load_dataset({str(path)!r}) reads it")
    description = read_description(path)
    if client is not None or which not in (None, description.model):
        raise SettingError(f"{path} is one model, {description.model!r}; which and client are for run directories")
    for what, name in description.code.items():
        if {"model": model, "method": method}[what] is None:
            raise SettingError(f"{path} needs code, {name}, which is not run for a file alone; give it: {what}=…")
    return _with_file(path, description, model, method)


def _description(place: Path) -> ModelDescription:
    """What model.json of a directory says; an error says why there is none."""
    if not place.exists():
        name = str(place)
        if name in sources.names():
            raise SettingError(f"{name} is a dataset: fedstill.load_dataset({name!r}); load is for trained models")
        raise SettingError(f"there is no run directory or model file {name}")
    file = place / files.DESCRIPTION
    if file.is_file():
        check_result(place, files.DESCRIPTION)
        return parse(file.read_bytes(), file)
    if not (place / files.CONFIG).is_file():
        raise SettingError(f"{place} is not a run directory; if it is data, fedstill.load_dataset reads it")
    if (place / files.SUMMARY).is_file():
        raise SettingError(
            f"{place} has no {files.DESCRIPTION}: made by an earlier version; 'fedstill resume {place}' writes it, and "
            "trains nothing again"
        )
    raise SettingError(f"{place} has no model yet: the run has not ended; continue it with 'fedstill resume {place}'")


def _check_code(place: Path, description: ModelDescription, given: dict[str, object]) -> None:
    """Refuse code that the directory names, by the rules of `resume`; what the caller gives is the caller's."""
    code = {what: name for what, name in description.code.items() if given[what] is None}
    try:
        trust.check(place, code)
    except SettingError as error:
        hint = " and ".join(f"{what}={name!r}" for what, name in code.items())
        raise SettingError(f"{error}; or, from Python, give it to load: {hint}") from error


def _global(
    place: Path, description: ModelDescription, which: str | None, model: Network | str | None, method: Method | None
) -> Predictor:
    if not description.model:
        raise SettingError(
            f"{place}: {description.method} has no global model, every client keeps its own; choose one: client=0, or "
            f"by name: {_listed(_clients(place))}"
        )
    chosen = description.model if which is None else which
    if chosen not in description.models:
        raise unknown("model", chosen, description.models)
    name = files.MODEL if chosen == description.model else files.further_model(chosen)
    check_result(place, name)
    return _with_file(place / name, description.model_copy(update={"model": chosen}), model, method)


def _with_file(
    path: Path, description: ModelDescription, model: Network | str | None, method: Method | None
) -> Predictor:
    if not path.is_file():
        raise DataError(f"{path} is missing")
    net = build(description, model=model, method=method)
    return Predictor(load_weights(description, net, read_tensors(path), path), description)


# --- clients ---


def _of_client(
    place: Path, description: ModelDescription, client: int | str, model: Network | str | None, method: Method | None
) -> Predictor:
    """What a client keeps for itself: a model, or BatchNorm's statistics for the global one."""
    names = _clients(place)
    number = _number(client, names)
    state, kept = RunDirectory.open(place, lock=False).client_states(number)
    own = (method or make_method(description)).own_model(state, kept)
    net = build(description, model=model, method=method)
    mine = description.model_copy(update={"model": f"{OWN} of {names[number]}", "models": (), "buffers": "average"})
    if own is not None:
        return Predictor(with_vector(net, own, f"the model of client {names[number]}"), mine)
    if BUFFERS in state and description.model:
        check_result(place, files.MODEL)
        trained = build(description, model=model, method=method)
        load_weights(description, trained, read_tensors(place / files.MODEL), place / files.MODEL)
        shared = FlatNet(trained)
        vector = torch.cat([shared.vector[: shared.trainable], state[BUFFERS]])
        return Predictor(with_vector(net, vector, f"the model of client {names[number]}"), mine)
    never = "" if state or kept else " (or it never took part, or checkpoints/ was deleted)"
    there = f"; there is {', '.join(map(repr, description.models))}" if description.models else ""
    raise SettingError(f"{place}: with {description.method} client {client} keeps no model of its own{never}{there}")


def with_vector(net: Classifier, vector: Tensor, what: str) -> Any:
    """The user's network, or ours, with these weights, in evaluation mode."""
    flat = FlatNet(net)
    if vector.shape != flat.vector.shape:
        raise DataError(f"{what} has {len(vector):,} weights, and the network {flat.size:,}")
    flat.load(vector)
    return unwrapped(net).eval()


def _clients(place: Path) -> list[str]:
    """The names of the clients, by number."""
    if not (place / files.CLIENTS).is_file():
        raise SettingError(f"{place} knows no clients: there is no {files.CLIENTS}")
    with (place / files.CLIENTS).open(encoding="utf-8", newline="") as file:
        return [row[0] for row in csv.reader(file)][1:]


def _group(place: Path, client: int | str) -> str:
    """The name of a client's group."""
    names = _clients(place)
    with (place / files.CLIENTS).open(encoding="utf-8", newline="") as file:
        return [row["group"] for row in csv.DictReader(file)][_number(client, names)]


def _number(client: int | str, names: list[str]) -> int:
    if isinstance(client, str):
        if client not in names:
            raise unknown("client", client, names)
        return names.index(client)
    if not 0 <= client < len(names):
        raise SettingError(f"client={client}: clients are 0 to {len(names) - 1}")
    return client


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
