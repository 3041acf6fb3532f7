"""A federation of sites elsewhere: each holds its own data, and the server knows only how many.

Every request carries the settings of the run, so that a site needs nothing but its data, and one that was away or
started again goes on where the others are.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from fedstill.core.device import find, on
from fedstill.core.errors import DataError, FedstillError, SettingError
from fedstill.core.files import read_json, write_json
from fedstill.core.store import Store
from fedstill.core.tree import Message, Tree
from fedstill.data import sources
from fedstill.data.dataset import Dataset, sized
from fedstill.data.federation import Federation
from fedstill.data.partition import IntArray
from fedstill.engine.base import Engine, Inline
from fedstill.engine.worker import Request, Score, Worker, made
from fedstill.experiment import api
from fedstill.experiment.config import Config, anchored, fixed, resolve
from fedstill.experiment.episodes import Episodes
from fedstill.experiment.logfile import logging_to
from fedstill.experiment.machine import one_thread
from fedstill.experiment.regions import assign
from fedstill.experiment.rundir import SERVED, RunDirectory
from fedstill.experiment.runner import Listener, Run, refuse_changes
from fedstill.experiment.setup import (
    check_kept,
    divide,
    keep,
    kept_tokenizer,
    load_data,
    local_training,
    make_task,
    prepare,
    regional_method,
    undivided,
    wanted_size,
)
from fedstill.methods import registry
from fedstill.models.base import frozen_digest
from fedstill.models.pretrained import DISTILBERT

log = logging.getLogger(__name__)

_MOST = 10**8  # samples of a site; the server keeps a byte for each that is tested on
_GREETING = 30.0  # seconds that a newcomer may take to say how much it holds
_AGAIN = 20.0  # seconds after which one that could not take part is asked again


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

    def __init__(self, worker: Worker | None, link: Link, roll: Roll, terms: Terms) -> None:
        """Without a `worker` nothing is tested here."""
        self._link, self._roll, self._terms = link, roll, terms
        self._here = worker and Inline(worker)
        self.patience = terms.timeout  # seconds that a site may take, where that is less

    @property
    def patient(self) -> bool:
        return True

    @property
    def _timeout(self) -> float:
        return max(1.0, min(self.patience, self._terms.timeout))

    def greet(self) -> bool:
        return self._roll.call(self._link, timeout=min(_GREETING, self._timeout))

    def absent(self) -> set[int]:
        there = self._link.present()
        return {int(k) for name, clients in self._roll.clients.items() if name not in there for k in clients}

    def run(self, requests: Sequence[Request], down: Message) -> Iterator[Tree]:
        if all(isinstance(request, Score) and request.source == "local" for request in requests):
            right = self._right(down)
            for request in requests:
                assert isinstance(request, Score)
                yield {"right": right[request.start : request.stop]}
        elif any(isinstance(request, Score) for request in requests):
            assert self._here
            yield from self._here.run(requests, down)
        else:
            yield from self._clients(requests, down)

    def _clients(self, requests: Sequence[Any], down: Message) -> Iterator[Tree]:
        asked = {}
        for request in requests:
            body = {"kind": type(request).__name__, **asdict(request)}
            site = self._roll.site_of(request.client)
            asked[site] = self._roll.question(site, body, down, self._timeout)
        first = requests[0]
        name = f"{self._roll.number} {type(first).__name__} {first.round} {getattr(first, 'region', 0)}"
        waiting = self._link.ask(asked, timeout=self._timeout, name=name)
        come: dict[str, Any] = {}
        for site in asked:
            while site not in come:
                sender, answer = next(waiting)
                come[sender] = answer
            yield _client_answer(come.pop(site), self._roll.samples(site))

    def _right(self, down: Message) -> Tensor:
        """Whether the model is right, for every site's local tests; -1 where nobody answered.

        A site tells how often, not where: the order within a client does not matter.
        """
        offsets = self._roll.federation.test_offsets
        right = torch.full((int(offsets[-1]),), -1, dtype=torch.int8)
        for client, hits in self.hits(down).items():
            start, stop = int(offsets[client]), int(offsets[client + 1])
            right[start : start + hits], right[start + hits : stop] = 1, 0
        return right

    def hits(self, down: Message) -> dict[int, int]:
        """How often the model is right on the tests of each client that answered."""
        counts = self._roll.federation.test_sizes
        body = {"kind": "Score", "source": "local", "start": 0, "stop": 0}
        held_by = {name: clients for name, clients in self._roll.clients.items() if counts[clients].any()}
        there = self._link.present()
        if away := sorted(held_by.keys() - there):
            log.warning("left out of this evaluation, because they are not connected: %s", ", ".join(away))
        asked = {name: self._roll.question(name, body, down) for name in held_by if name in there}
        found = {}
        for name, answer in self._link.ask(asked, timeout=self._timeout) if asked else ():
            hits = answer.get("hits") if isinstance(answer, dict) else None
            for client, hit in zip(held_by[name], hits, strict=True) if _numbers(hits, len(held_by[name])) else ():
                if 0 <= hit <= counts[client]:
                    found[int(client)] = hit
            if not any(client in found for client in held_by[name]):
                log.warning("%s is left out of this evaluation: %s", name, _reason(answer))
        return found


def _client_answer(answer: Any, size: int | None) -> Tree:
    """What a site sent about its clients, or why it does not count. The message itself is checked later."""
    if not isinstance(answer, dict) or "error" in answer:
        return {"failure": _reason(answer)}
    samples, metrics, message = answer.get("samples"), answer.get("metrics"), answer.get("message")
    if size is not None and (not isinstance(samples, int) or samples != size):  # by which its model counts
        return {"failure": f"it says that it trained on {samples!r:.40} samples, and it has {size}"}
    if not isinstance(metrics, dict) or not all(isinstance(m, float) and math.isfinite(m) for m in metrics.values()):
        return {"failure": "its metrics are not numbers"}
    return {"samples": size or 0, "metrics": metrics, "message": message}


def _reason(answer: Any) -> str:
    if isinstance(answer, dict):
        return " ".join(str(answer.get("error", "its answer cannot be understood")).split())[:500]
    return str(getattr(answer, "reason", "its answer cannot be understood"))


class Roll:
    """Who takes part, and how much each has: sites, or regions, and the clients that each answers for."""

    def __init__(
        self,
        clients: Mapping[str, IntArray],
        dataset: Dataset,
        pool: Federation,
        told: Callable[[], dict[str, Any]],
        *,
        of: int,
        names: Sequence[str] = (),
        changing: bool = False,
    ) -> None:
        """`clients` are those of each site, among `of` in the run; `changing`: what a site holds may become more."""
        self.clients, self._told, self._changing = dict(clients), told, changing
        self._site_of = {int(k): name for name, held in clients.items() for k in held}
        zeros = np.zeros(of + 1, np.int64)
        nothing = np.zeros(0, np.int64)
        self.federation = Federation(
            dataset, nothing, zeros, nothing, zeros.copy(), pool.pool_index, names=tuple(names)
        )
        self._known: dict[str, tuple[list[int], list[int]]] = {}
        self._refused: dict[str, str] = {}  # why a site could not take part
        self._not_before: dict[str, float] = {}  # when it is asked again

    def site_of(self, client: int) -> str:
        return self._site_of[client]

    def samples(self, site: str) -> int | None:
        """How many a site trains on; None: a region, where that may change during an episode."""
        return None if self._changing else int(self.federation.sizes[self.clients[site]].sum())

    def question(self, site: str, body: Tree = None, down: Message | None = None, seconds: float = 0.0) -> Tree:
        """What to ask a site; nothing in particular: how much it holds."""
        run = self._told() | {"client": int(self.clients[site][0])}
        return {"run": run, "request": body, "down": down or {}, "seconds": seconds}

    def call(self, link: Link, *, timeout: float) -> bool:
        """Ask sites that are there how much they hold, unless that is known; whether anything changed."""
        there, before, now = link.present(), dict(self._known), time.monotonic()
        asked = {
            name: self.question(name)
            for name in self.clients
            if name in there and (self._changing or name not in self._known) and now > self._not_before.get(name, 0.0)
        }
        for name, answer in link.ask(asked, timeout=timeout) if asked else ():
            samples, tests = (answer.get(n) if isinstance(answer, dict) else None for n in ("samples", "tests"))
            count = len(self.clients[name])
            if _numbers(samples, count) and _numbers(tests, count) and min(samples) >= 0 and min(tests) >= 0:
                self._known[name] = samples, tests
            else:
                if self._refused.get(name) != _reason(answer):
                    log.warning("%s cannot take part: %s", name, _reason(answer))
                self._refused[name] = _reason(answer)
                self._not_before[name] = time.monotonic() + _AGAIN
        if self._known == before:
            return False
        for place, offsets in enumerate((self.federation.train_offsets, self.federation.test_offsets)):
            counts = np.zeros(len(offsets) - 1, np.int64)
            for name, known in self._known.items():
                counts[self.clients[name]] = known[place]
                if before.get(name) != known and place == 0:
                    log.info("%s has %d samples and %d to test on", name, sum(known[0]), sum(known[1]))
            offsets[1:] = np.cumsum(counts)
        return True

    @property
    def known(self) -> int:
        return len(self._known)

    @property
    def missing(self) -> dict[str, str]:
        """Who is not there, and why not if they said so."""
        return {name: self._refused.get(name, "") for name in self.clients if name not in self._known}

    @property
    def number(self) -> str:
        return str(self._told()["number"])


def _numbers(given: Any, count: int) -> TypeGuard[list[int]]:
    """Whether this is a list of so many whole numbers."""
    return isinstance(given, list) and len(given) == count and all(type(n) is int and n <= _MOST for n in given)


def serve(
    config: Config,
    names: Sequence[str],
    link: Link,
    out: Path,
    *,
    terms: Terms,
    pause: Callable[[dict[str, str]], bool],
    listener: Listener | None = None,
    regional: bool = False,
) -> api.Result:
    """Run a federation of sites, or continue it if it was begun in `out`.

    `regional`: each name is a regional server, with sites of its own. `pause` is told who is missing (and why, if that
    is known), waits a little, and says whether to wait on.
    """
    _check(config)
    if regional:
        clients = regions_of(config, names)
    else:
        config = config.model_copy(update={"clients": len(names)})
    # What a checkpoint does not have would have to be asked of the sites again.
    config = config.model_copy(update={"checkpoint_every": 1})
    dataset = load_data(config, kept_tokenizer(out))
    pool = undivided(config, dataset)
    begun = (out / "config.toml").is_file()
    directory = RunDirectory.open(out) if begun else RunDirectory.create(out, anchored(config))
    try:
        number = _number(directory)
        if not regional:
            names = _order(directory, names)
            clients = {name: np.array([k]) for k, name in enumerate(names)}
        frozen: list[str] = []  # what tells the frozen part of the network, where there is one
        steps: list[int] = []  # of an epoch in each region, once the sites have said how much they hold

        def told() -> dict[str, Any]:
            return {
                "number": number,
                "config": config.model_copy(update={"data_dir": ""}).toml(),  # the server's folders are its own
                "clients": config.clients,
                "classes": list(dataset.classes),
                "mean": list(dataset.mean),
                "std": list(dataset.std),
                "shape": list(dataset.shape),
                "tokenizer": dataset.tokenizer,  # all must make the same tokens of text
                "steps": steps,
                "frozen": frozen,
                "checkpoint": directory.oldest_checkpoint(),
            }

        called = () if regional else names
        roll = Roll(clients, dataset, pool, told, of=config.clients, names=called, changing=regional)
        with logging_to(directory.path / "log.txt"):
            while True:
                roll.call(link, timeout=terms.timeout)
                if roll.known == len(names) or not pause(roll.missing):
                    break
            if roll.known < terms.needed:
                raise FedstillError(f"only {roll.known} of {len(names)} sites are there, {terms.needed} are needed")
            setup = prepare(config, data=roll.federation, elsewhere=True)
        if begun and directory.oldest_checkpoint():
            refuse_changes(fixed(directory.config()), fixed(anchored(config)))
            check_kept(setup, out)
        keep(setup, directory)
        directory.write_config(anchored(config))
    except BaseException:
        directory.release()
        raise
    frozen += filter(None, [frozen_digest(setup.task.build().module)])
    steps += [region.task.local.steps_per_epoch for region in setup.hierarchy.regions]
    kind = Episodes if regional else Run
    return api.execute(setup, directory, listener, lambda worker: Sites(worker, link, roll, terms), kind=kind)


def _check(config: Config) -> None:
    """Refuse what only a run on one machine can do, and a device that this one has not."""
    find(config.device)
    if config.attack:
        raise SettingError("attack: sites that attack can be simulated on one machine, with 'fedstill run'")
    if not config.fixed_regions or config.late_clients or any(r.joins > 1 or r.leaves for r in config.region):
        raise SettingError(
            "fixed_regions, late_clients, joins, leaves: sites stay in their regions, and come and go as they do"
        )


def regions_of(config: Config, names: Sequence[str]) -> dict[str, IntArray]:
    """The clients of each regional server, by its name: a region's own in the settings, or in alphabetical order."""
    if config.flat:
        raise SettingError("there are no regions in the settings: regions, or a [[region]] table for each, is needed")
    tables = config.each_region()
    if len(tables) != len(names):
        raise SettingError(f"the settings have {len(tables)} regions, and there are keys of {len(names)}")
    wanted = [table.name for table in tables]
    if any(wanted) and sorted(wanted) != sorted(names):
        raise SettingError(
            f"the regions are called {', '.join(wanted)} in the settings, and the keys {', '.join(names)}"
        )
    if registry.make(config.method, config.hyper).has_final_exchange:
        raise SettingError(f"{config.method} asks every client once more at the end, which regions do not pass on")
    called = wanted if any(wanted) else sorted(names)
    return dict(zip(called, assign(config, config.clients), strict=True))


def _number(directory: RunDirectory) -> str:
    """What tells this run from any other, also after a restart: a site's state belongs to one of them."""
    path = directory.path / SERVED
    if not path.exists():
        write_json(path, {"number": secrets.token_hex(8), "sites": []})
    return str(read_json(path)["number"])


def _order(directory: RunDirectory, names: Sequence[str]) -> list[str]:
    """Sites in the order in which the run knows them; new ones come last."""
    path = directory.path / SERVED
    kept = read_json(path)
    if gone := [name for name in kept["sites"] if name not in names]:
        raise SettingError(f"site {gone[0]} belongs to this run; its key is needed")
    order = [*kept["sites"], *sorted(name for name in names if name not in kept["sites"])]
    if kept["sites"] and len(order) > len(kept["sites"]):
        raise SettingError(f"site {order[-1]} is new: begin another run, for this one has {len(kept['sites'])} sites")
    write_json(path, kept | {"sites": order})
    return order


# --- a site's end -----------------------------------------------------------------------------------------------------


def run_number(told: Mapping[str, Any]) -> str:
    """What tells a run from others, and names a folder here: so no server may send anything else."""
    number = str(told["number"])
    if not re.fullmatch("[0-9a-f]{16}", number):
        raise SettingError(f"the server's run has the number {number!r:.40}, which is none")
    return number


@dataclass(frozen=True)
class Own:
    """What a site has of its own; empty: as the run's settings say."""

    data: str = ""
    data_dir: str = ""
    method: str = ""  # a file (file.py:name): no file that a server names is ever run
    model: str = ""
    pretrained: str = ""  # a folder, or a name on the hub: neither is looked for where a server says
    device: str = "cpu"

    def config(self, text: str) -> Config:
        """The settings of a run, as a server sent them, with what is this site's own."""
        told = tomllib.loads(text)
        files = {"method": self.method, "model": self.model, "data": self.data}
        told |= {name: value for name, value in files.items() if value}
        told.pop("tokenizer", None)  # the server sends it, not where it has it
        named = [(name, told.get(name, "")) for name in ("method", "model", "data", "proxy")]
        named += [("method", region.get("method", "")) for region in told.get("region", [])]
        for name, value in named:
            known = value in ("", "pool", *sources.names()) if name in ("data", "proxy") else ":" not in value
            if not known and value not in files.values():
                raise SettingError(f"the run has a {name} that is no name but a file, {value}; give yours to the site")
        self._name_encoder(told)
        return resolve(told, {"data_dir": self.data_dir, "device": self.device})

    def _name_encoder(self, told: dict[str, Any]) -> None:
        options = told.get("model_options", {})
        if told.get("model") != "distilbert" or not isinstance(options, dict):
            return
        if self.pretrained:
            told["model_options"] = options | {"pretrained": self.pretrained}
        elif (named := options.get("pretrained", DISTILBERT)) != DISTILBERT:
            raise SettingError(f"the run begins with a pretrained encoder, {named!r:.80}; give yours to the site")


class Site:
    """Answers what a server asks, from data that stay here."""

    def __init__(self, directory: Path, own: Own | None = None) -> None:
        """Without `data` of its own, a site has its share of what the run divides, to try things out."""
        self._directory, self._own = directory, own or Own()
        self._device = find(self._own.device)
        self._ready: tuple[dict[str, Any], Worker] | None = None

    def handle(self, asked: Tree) -> Tree:
        run, body = asked["run"], asked["request"]
        worker = self._worker(run)
        if body is None:
            return {"samples": [len(worker.federation.train_index)], "tests": [len(worker.federation.test_index)]}
        request = made(body)
        with one_thread(), on(self._device):
            if isinstance(request, Score):
                whole = Score("local", 0, len(worker.federation.test_index))
                return {"hits": [int(worker.handle(whole, asked["down"])["right"].sum())]}
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
        config = self._own.config(run["config"]).model_copy(update={"tokenizer": run["tokenizer"]})
        if self._own.data and config.proxy == "pool":  # which the server alone has
            config = config.model_copy(update={"proxy": ""})
        federation = self._federation(config, run)
        method = registry.make(config.method, config.hyper)
        task = make_task(config, federation, method)
        if run["frozen"] and run["frozen"] != [frozen_digest(task.build().module)]:
            raise SettingError(
                "the frozen part of the network is not the server's: another pretrained encoder is meant"
            )
        steps = run["steps"] or [0] * max(1, len(config.each_region()))
        regional = []
        if config.flat:
            task = task.trained_as(replace(task.local, steps_per_epoch=steps[0]))
        else:
            for own, count in zip(config.each_region(), steps, strict=True):
                local = local_training(config.model_copy(update=own.of_its_own()), federation)
                inside = regional_method(own, config, method)
                regional.append((task.trained_as(replace(local, steps_per_epoch=count)), inside))
        store = Store(self._directory / "state" / run_number(run))
        return Worker(task, federation, method, store, tuple(regional))

    def _federation(self, config: Config, run: dict[str, Any]) -> Federation:
        """A federation in which this site's client alone has anything: its training and its test samples."""
        source: Literal["train", "test"] = "test"
        if self._own.data:
            found = sized(load_data(config), wanted_size(config))
            pool = np.zeros(0, np.int64)
            train, test = np.arange(len(found.train)), np.arange(len(found.test))
        else:
            shared = divide(config, load_data(config))
            found, train, test = shared.dataset, shared.train(run["client"]), shared.test(run["client"])
            source, pool = shared.test_source, shared.pool_index
        if list(found.shape) != run["shape"]:
            raise DataError(f"samples here have shape {tuple(found.shape)}, the server's {tuple(run['shape'])}")
        dataset = replace(_labelled_as(found, run["classes"]), mean=tuple(run["mean"]), std=tuple(run["std"]))
        later = np.arange(run["clients"] + 1) > run["client"]
        return Federation(dataset, train, later * len(train), test, later * len(test), pool, source)


def _labelled_as(found: Dataset, classes: Sequence[str]) -> Dataset:
    """The data with the server's classes: the same names get its numbers; classes that are only numbers keep theirs."""
    unknown = [name for name in found.classes if name not in classes]
    if not unknown:
        number = torch.tensor([classes.index(name) for name in found.classes])
        splits = {part: getattr(found, part) for part in ("train", "test")}
        if number.tolist() != list(range(len(number))):
            splits = {part: replace(split, y=number[split.y]) for part, split in splits.items()}
        return replace(found, classes=tuple(classes), **splits)
    if not all(name.isdecimal() for name in found.classes):
        raise DataError(f"the class {unknown[0]!r} here is none of the server's: {', '.join(classes)}")
    if len(found.classes) > len(classes):
        raise DataError(f"there are {len(found.classes)} classes here, and the server knows {len(classes)}")
    return replace(found, classes=tuple(classes))
