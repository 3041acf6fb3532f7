"""A federation of sites elsewhere: each holds its own data, and the server knows only how many.

Every request carries the settings of the run, so that a site needs nothing but its data, and one that was away or
started again goes on where the others are.
"""

from __future__ import annotations

import logging
import math
import secrets
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import DataError, FedstillError, SettingError
from fedstill.core.files import read_json, write_json
from fedstill.core.store import Store
from fedstill.core.tree import Message, Tree
from fedstill.data import sources
from fedstill.data.dataset import Dataset, sized
from fedstill.data.federation import Federation
from fedstill.engine.base import Engine, Inline
from fedstill.engine.worker import Request, Score, Worker, made
from fedstill.experiment import api
from fedstill.experiment.config import Config, anchored, resolve
from fedstill.experiment.machine import one_thread
from fedstill.experiment.rundir import RunDirectory
from fedstill.experiment.runner import Listener
from fedstill.experiment.setup import (
    divide,
    load_data,
    local_training,
    make_task,
    prepare,
    regional_method,
    undivided,
    wanted_size,
)
from fedstill.methods import registry

log = logging.getLogger(__name__)

_MOST = 10**8  # samples of a site; the server keeps a byte for each that is tested on
_GREETING = 30.0  # seconds that a newcomer may take to say how much it holds


class Link(Protocol):
    """Carries questions to sites by name, and their answers back."""

    def present(self) -> set[str]:
        """The sites that can be asked now."""

    def ask(
        self, requests: Mapping[str, Tree], *, timeout: float, name: str | None = None
    ) -> Iterator[tuple[str, Any]]:
        """Each site's answer as it comes: a tree, or something with a `reason` why there is none.

        A site that is asked under the same name again may repeat its last answer.
        """


# --- the server's end -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """How a server deals with its sites."""

    timeout: float = 600.0  # seconds a site may take to answer
    needed: int = 1  # sites without which it does not start


class Sites(Engine):
    """Sends each request to the site whose client it is about; tests the global model itself."""

    def __init__(self, worker: Worker, link: Link, roll: Roll, terms: Terms) -> None:
        self._link, self._roll, self._terms = link, roll, terms
        self._here = Inline(worker)

    def greet(self) -> bool:
        return self._roll.call(self._link, timeout=min(_GREETING, self._terms.timeout))

    def run(self, requests: Sequence[Request], down: Message) -> Iterator[Tree]:
        if all(isinstance(request, Score) and request.source == "local" for request in requests):
            right = self._right(down)
            for request in requests:
                assert isinstance(request, Score)
                yield {"right": right[request.start : request.stop]}
        elif any(isinstance(request, Score) for request in requests):
            yield from self._here.run(requests, down)
        else:
            yield from self._clients(requests, down)

    def _clients(self, requests: Sequence[Any], down: Message) -> Iterator[Tree]:
        asked = {}
        for request in requests:
            body = {"kind": type(request).__name__, **asdict(request)}
            asked[self._roll.names[request.client]] = self._roll.question(request.client, body, down)
        first = requests[0]
        name = f"{self._roll.number} {type(first).__name__} {first.round} {getattr(first, 'region', 0)}"
        waiting = self._link.ask(asked, timeout=self._terms.timeout, name=name)
        come: dict[str, Any] = {}
        for site, size in zip(asked, self._roll.federation.sizes[[r.client for r in requests]], strict=True):
            while site not in come:
                sender, answer = next(waiting)
                come[sender] = answer
            yield _client_answer(come.pop(site), int(size))

    def _right(self, down: Message) -> Tensor:
        """Whether the model is right, for every site's local tests; -1 where nobody answered.

        A site tells how often, not where: the order within a client does not matter.
        """
        offsets = self._roll.federation.test_offsets
        right = torch.full((int(offsets[-1]),), -1, dtype=torch.int8)
        tested = {name: k for k, name in enumerate(self._roll.names) if offsets[k + 1] > offsets[k]}
        body = {"kind": "Score", "source": "local", "start": 0, "stop": 0}
        asked = {name: self._roll.question(k, body, down) for name, k in tested.items()}
        for name, answer in self._link.ask(asked, timeout=self._terms.timeout):
            k = tested[name]
            count = int(offsets[k + 1] - offsets[k])
            hits = answer.get("hits") if isinstance(answer, dict) else None
            if isinstance(hits, int) and 0 <= hits <= count:
                right[offsets[k] : offsets[k + 1]] = torch.arange(count) < hits
            else:
                log.warning("site %s is left out of this evaluation: %s", name, _reason(answer))
        return right


def _client_answer(answer: Any, size: int) -> Tree:
    """What a site sent about its client, or why it does not count. The message itself is checked later."""
    if not isinstance(answer, dict) or "error" in answer:
        return {"failure": _reason(answer)}
    samples, metrics, message = answer.get("samples"), answer.get("metrics"), answer.get("message")
    if not isinstance(samples, int) or samples != size:  # by which its model counts
        return {"failure": f"it says that it trained on {samples!r:.40} samples, and it has {size}"}
    if not isinstance(metrics, dict) or not all(isinstance(m, float) and math.isfinite(m) for m in metrics.values()):
        return {"failure": "its metrics are not numbers"}
    return {"samples": samples, "metrics": metrics, "message": message}


def _reason(answer: Any) -> str:
    if isinstance(answer, dict):
        return str(answer.get("error", "its answer cannot be understood"))[:2000]
    return str(getattr(answer, "reason", "its answer cannot be understood"))


class Roll:
    """Who takes part, and how much each has: sites in a fixed order, the number of a client is its place."""

    def __init__(
        self, names: Sequence[str], dataset: Dataset, pool: Federation, told: Callable[[], dict[str, Any]]
    ) -> None:
        self.names, self._told = list(names), told
        zeros = np.zeros(len(names) + 1, np.int64)
        nothing = np.zeros(0, np.int64)
        self.federation = Federation(
            dataset, nothing, zeros, nothing, zeros.copy(), pool.pool_index, names=tuple(self.names)
        )
        self._known: dict[str, tuple[int, int]] = {}

    def question(self, client: int, body: Tree = None, down: Message | None = None) -> Tree:
        """What to ask a client's site; nothing in particular: how much it holds."""
        return {"run": self._told() | {"client": client}, "request": body, "down": down or {}}

    def call(self, link: Link, *, timeout: float) -> bool:
        """Ask sites that are there and not known yet how much they hold; whether any said so."""
        there, came = link.present(), False
        new = {name: k for k, name in enumerate(self.names) if name not in self._known and name in there}
        asked = {name: self.question(k) for name, k in new.items()}
        for name, answer in link.ask(asked, timeout=timeout) if asked else ():
            if isinstance(answer, dict) and _counts(answer):
                self._known[name] = (answer["samples"], answer["tests"])
                log.info("site %s has %d samples and %d to test on", name, answer["samples"], answer["tests"])
                came = True
            else:
                log.warning("site %s cannot take part: %s", name, _reason(answer))
        if came:
            held = np.array([self._known.get(name, (0, 0)) for name in self.names], np.int64)
            for offsets, counts in zip(
                (self.federation.train_offsets, self.federation.test_offsets), held.T, strict=True
            ):
                offsets[1:] = np.cumsum(counts)
        return came

    @property
    def known(self) -> int:
        return len(self._known)

    @property
    def number(self) -> str:
        return str(self._told()["number"])


def _counts(answer: Tree) -> bool:
    return all(isinstance(answer.get(key), int) and 0 <= answer[key] <= _MOST for key in ("samples", "tests"))


def serve(
    config: Config,
    names: Sequence[str],
    link: Link,
    out: Path,
    *,
    terms: Terms,
    pause: Callable[[], bool],
    listener: Listener | None = None,
) -> api.Result:
    """Run a federation of sites, or continue it if it was begun in `out`.

    `pause` waits a little for further sites, and says whether to wait on.
    """
    if config.attack:
        raise SettingError("attack: sites that attack can be simulated on one machine, with 'fedstill run'")
    if not config.fixed_regions or config.late_clients:
        raise SettingError("sites do not change regions, and come when they come: no fixed_regions=false, late_clients")
    config = config.model_copy(update={"clients": len(names)})
    dataset = load_data(config)
    pool = undivided(config, dataset)
    begun = (out / "config.toml").is_file()
    directory = RunDirectory.open(out) if begun else RunDirectory.create(out, anchored(config))
    try:
        number = _number(directory)
        names = _order(directory, names)
        steps: list[int] = []  # of an epoch in each region, once the sites have said how much they hold

        def told() -> dict[str, Any]:
            return {
                "number": number,
                "config": config.model_copy(update={"data_dir": ""}).toml(),  # the server's folders are its own
                "clients": len(names),
                "classes": list(dataset.classes),
                "mean": list(dataset.mean),
                "std": list(dataset.std),
                "shape": list(dataset.shape),
                "steps": steps,
                "checkpoint": directory.oldest_checkpoint(),
            }

        roll = Roll(names, dataset, pool, told)
        while True:
            roll.call(link, timeout=terms.timeout)
            if roll.known == len(names) or not pause():
                break
        if roll.known < terms.needed:
            raise FedstillError(f"only {roll.known} of {len(names)} sites are there, {terms.needed} are needed")
        setup = prepare(config, data=roll.federation)
    except BaseException:
        directory.release()
        raise
    steps += [region.task.local.steps_per_epoch for region in setup.hierarchy.regions]
    return api.execute(setup, directory, listener, lambda worker: Sites(worker, link, roll, terms))


def _number(directory: RunDirectory) -> str:
    """What tells this run from any other, also after a restart: a site's state belongs to one of them."""
    path = directory.path / "run.json"
    if not path.exists():
        write_json(path, {"number": secrets.token_hex(8), "sites": []})
    return str(read_json(path)["number"])


def _order(directory: RunDirectory, names: Sequence[str]) -> list[str]:
    """Sites in the order in which the run knows them; new ones come last."""
    path = directory.path / "run.json"
    kept = read_json(path)
    if gone := [name for name in kept["sites"] if name not in names]:
        raise SettingError(f"site {gone[0]} belongs to this run; its key is needed")
    order = [*kept["sites"], *sorted(name for name in names if name not in kept["sites"])]
    if kept["sites"] and len(order) > len(kept["sites"]):
        raise SettingError(f"site {order[-1]} is new: begin another run, for this one has {len(kept['sites'])} sites")
    write_json(path, kept | {"sites": order})
    return order


# --- a site's end -----------------------------------------------------------------------------------------------------


class Site:
    """Answers what a server asks, from data that stay here."""

    def __init__(
        self, directory: Path, *, data: str = "", data_dir: str = "", method: str = "", model: str = ""
    ) -> None:
        """`data` names the site's own data; empty: its share of what the run divides, to try things out.

        A `method` or `model` that is a file (file.py:name) is this site's: it runs no file that a server names.
        """
        self._directory, self._data, self._data_dir = directory, data, data_dir
        self._files = {"method": method, "model": model}
        self._ready: tuple[dict[str, Any], Worker] | None = None

    def handle(self, asked: Tree) -> Tree:
        run, body = asked["run"], asked["request"]
        worker = self._worker(run)
        if body is None:
            return {"samples": len(worker.federation.train_index), "tests": len(worker.federation.test_index)}
        request = made(body)
        with one_thread():
            if isinstance(request, Score):
                whole = Score("local", 0, len(worker.federation.test_index))
                return {"hits": int(worker.handle(whole, asked["down"])["right"].sum())}
            answer = worker.handle(request, asked["down"])
        worker.store.prune([run["client"]], needed=run["checkpoint"])
        return answer

    def _worker(self, run: dict[str, Any]) -> Worker:
        """Made when a run's settings are first seen."""
        key = {name: value for name, value in run.items() if name != "checkpoint"}
        if self._ready is None or self._ready[0] != key:
            self._ready = (key, self._prepared(run))
        return self._ready[1]

    def _prepared(self, run: dict[str, Any]) -> Worker:
        config = resolve(self._settings(run["config"]), {"data_dir": self._data_dir})
        if self._data and config.proxy == "pool":  # which the server alone has
            config = config.model_copy(update={"proxy": ""})
        federation = self._federation(config, run)
        method = registry.make(config.method, config.hyper)
        task = make_task(config, federation, method)
        steps = run["steps"] or [0] * max(1, len(config.each_region()))
        regional = []
        if config.flat:
            task = task.trained_as(replace(task.local, steps_per_epoch=steps[0]))
        else:
            for own, count in zip(config.each_region(), steps, strict=True):
                local = local_training(config.model_copy(update=own.of_its_own()), federation)
                inside = regional_method(own, config, method)
                regional.append((task.trained_as(replace(local, steps_per_epoch=count)), inside))
        store = Store(self._directory / "state" / run["number"])
        return Worker(task, federation, method, store, tuple(regional))

    def _settings(self, text: str) -> dict[str, Any]:
        """The run's settings, with this site's own files."""
        told = tomllib.loads(text)
        told |= {name: value for name, value in self._files.items() if value}
        if self._data:
            told["data"] = self._data
        named = [(name, told.get(name, "")) for name in ("method", "model", "data", "proxy")]
        named += [("method", region.get("method", "")) for region in told.get("region", [])]
        for name, value in named:
            known = value in ("", "pool", *sources.names()) if name in ("data", "proxy") else ":" not in value
            if not known and value not in (self._data, *self._files.values()):
                raise SettingError(f"the run has a {name} that is no name but a file, {value}; give yours to the site")
        return told

    def _federation(self, config: Config, run: dict[str, Any]) -> Federation:
        """A federation in which this site's client alone has anything: its training and its test samples."""
        source: Literal["train", "test"] = "test"
        if self._data:
            found = sized(load_data(config), wanted_size(config))
            pool = np.zeros(0, np.int64)
            train, test = np.arange(len(found.train)), np.arange(len(found.test))
        else:
            shared = divide(config, load_data(config))
            found, train, test = shared.dataset, shared.train(run["client"]), shared.test(run["client"])
            source, pool = shared.test_source, shared.pool_index
        if list(found.shape) != run["shape"]:
            raise DataError(f"samples here have shape {tuple(found.shape)}, the server's {tuple(run['shape'])}")
        if len(found.classes) > len(run["classes"]):
            raise DataError(f"there are {len(found.classes)} classes here, and the server knows {len(run['classes'])}")
        dataset = replace(found, classes=tuple(run["classes"]), mean=tuple(run["mean"]), std=tuple(run["std"]))
        later = np.arange(run["clients"] + 1) > run["client"]
        return Federation(dataset, train, later * len(train), test, later * len(test), pool, source)
