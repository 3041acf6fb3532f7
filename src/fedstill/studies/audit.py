"""What an attacker learns of a run's training samples: from its final model, and from what crosses the wire.

Members are training samples of the clients. Others are samples that nobody trained on: the clients' own tests, or the
test set. They are taken in pairs of one class, so that a class alone tells nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.building.config import Config
from fedstill.building.setup import Setup, prepare
from fedstill.core.arrays import IntArray
from fedstill.core.errors import SettingError
from fedstill.core.files import read_json, write_json
from fedstill.core.seeds import numpy_rng
from fedstill.core.store import Store
from fedstill.core.table import Table
from fedstill.data.dataset import Split
from fedstill.data.federation import Federation
from fedstill.privacy.membership import (
    Advantage,
    Floats,
    advantage,
    balanced_halves,
    confidence_logits,
    likelihood_ratios,
)
from fedstill.report import leaks
from fedstill.running import files
from fedstill.running.api import run_in_directory, run_setup
from fedstill.running.callbacks import Callback
from fedstill.running.directory import RunDirectory
from fedstill.running.inputs import prepare_again
from fedstill.running.machine import one_thread
from fedstill.running.servers import global_model, read_servers
from fedstill.studies.inversion import Inversion, chosen, invert, reason_against
from fedstill.studies.wire_leaks import Exchanged, on_the_wire
from fedstill.train.evaluate import score
from fedstill.train.task import Samples, Task

Told = Callable[[str, int, int], None]
"""Hears what is done next: what, its number, and of how many."""
_BATCHES = (1, 4)  # of which an update is inverted
_DELTA = 1e-5


@dataclass(frozen=True)
class Leak:
    """What one attack achieves on one thing that an attacker sees."""

    seen: str
    attack: str
    members: int
    advantage: Advantage

    def row(self) -> dict[str, Any]:
        """The numbers, by name."""
        found = asdict(self.advantage)
        low, high = found.pop("interval")
        return {"seen": self.seen, "attack": self.attack, "members": self.members, **found, "low": low, "high": high}


@dataclass(frozen=True)
class Audit:
    """What was found; `print` shows it as a table."""

    path: Path
    method: str
    leaks: tuple[Leak, ...]
    inversions: tuple[Inversion, ...]
    notes: tuple[str, ...]  # what was not measured, and why
    epsilon: float | None  # what the run itself accounts for
    delta: float

    def table(self) -> Table:
        """A row for each attack on what an attacker sees."""
        spent = "" if self.epsilon is None else f"; the run accounts for epsilon {self.epsilon:.3g}"
        table = Table(
            f"Members of the training set, told from others: {self.method}",
            ("seen", "attack", "members", "AUC", "95 %", "TPR at 1 % FPR", "epsilon at least"),
            caption=f"AUC 0.5 is a guess. Epsilon at delta {self.delta:g}, with 95 % confidence{spent}.",
            values=[leak.row() for leak in self.leaks],
        )
        for leak in self.leaks:
            found = leak.advantage
            low, high = found.interval
            table.add(
                leak.seen, leak.attack, str(leak.members), f"{found.auc:.3f}", f"{low:.3f} to {high:.3f}",
                f"{100 * found.tpr:.1f} %", f"{found.epsilon:.2f}",
            )  # fmt: skip
        return table

    def inversion_table(self) -> Table:
        """What was rebuilt from an update, a row for each size of a batch."""
        table = Table(
            "Samples rebuilt from one step's update",
            ("samples in the batch", "labels read off", "samples recovered"),
            caption="Recovered: share of the samples' variance; 0 % is no better than a mean sample.",
            values=[asdict(found) for found in self.inversions],
        )
        for found in self.inversions:
            table.add(str(found.batch), f"{100 * found.labels:.0f} %", f"{100 * max(0.0, found.recovered):.0f} %")
        return table

    def plot(self, path: str | Path) -> None:
        """Draw the AUC of each attack with its interval."""
        rows = [(f"{leak.seen}: {leak.attack}", leak.advantage.auc, leak.advantage.interval) for leak in self.leaks]
        leaks.leaks(rows, Path(path), title=self.method)

    def save(self) -> None:
        """Write everything to the folder of the audit: audit.json."""
        found = {
            "method": self.method,
            "leaks": [leak.row() for leak in self.leaks],
            "inversions": [asdict(inversion) for inversion in self.inversions],
            "notes": list(self.notes),
            "epsilon": self.epsilon,
            "delta": self.delta,
        }
        write_json(self.path / files.AUDIT, found)

    def tables(self) -> list[Table]:
        """All that was measured."""
        return [self.table(), *([self.inversion_table()] if self.inversions else [])]

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.tables()), *self.notes])


def audit(
    path: str | Path,
    *,
    shadows: int = 0,
    samples: int = 500,
    clients: int = 10,
    inversion_steps: int = 300,
    out: str | Path | None = None,
    told: Told = lambda what, number, count: None,
    callbacks: Sequence[Callback] = (),
    **given: Any,
) -> Audit:
    """Attack a run that is finished, or has some rounds behind it, and say how far one gets.

    Args:
        path: The run directory. It is not changed, but for its folder `audit`.
        shadows: Runs like it, each without half of the samples that are looked at, for LiRA: an even number from 4 on;
            0: none. They go on where they stopped if the audit is started again.
        samples: Members that are looked at, and as many others.
        clients: Clients whose messages are looked at, at most.
        inversion_steps: Steps of gradient inversion; 0: none is tried.
        out: Folder for shadow runs and results; by default `audit` in the run directory.
        given: What the run was given as objects: `method`, `data`, `model`, `proxy`.

    Examples:
        >>> import fedstill, tempfile
        >>> out = tempfile.mkdtemp() + "/run"
        >>> _ = fedstill.run("fedavg", clients=4, rounds=1, epochs=1, fraction=0.05, engine="inline", out=out)
        >>> found = audit(out, samples=50, inversion_steps=0)
        >>> [leak.seen for leak in found.leaks]
        ['final model', 'weights of a client']
    """
    place = Path(path).expanduser()
    directory = RunDirectory.open(place)
    try:
        if directory.served:
            raise SettingError(
                f"{path} is a run of sites elsewhere, whose samples are not here: simulate it to audit it"
            )
        if not directory.checkpoint_rounds():
            raise SettingError(f"{path} has no round behind it yet; 'fedstill resume {path}' goes on with it")
        own = {name: value for name, value in given.items() if value is not None}
        setup = prepare_again(directory, directory.config(replaced=list(own)), **own)
        with one_thread():
            found = _Auditor(setup, directory, Path(out) if out else place / files.AUDITS, samples, told)
            return found.run(shadows, clients, inversion_steps, callbacks, own)
    finally:
        directory.release()


class _Auditor:
    """The samples that are looked at, and the run that they are looked for in."""

    def __init__(self, setup: Setup, directory: RunDirectory, out: Path, samples: int, told: Told) -> None:
        self._setup, self._directory, self._out, self._told = setup, directory, out, told
        self.members, self.others, self._owners = pairs(setup.federation, samples, setup.config.seed)
        source = setup.federation.dataset.train
        others = _others_split(setup.federation)
        self._split = Split(
            torch.cat([source.x[self.members], others.x[self.others]]),
            torch.cat([source.y[self.members], others.y[self.others]]),
        )
        spent = [record.get("epsilon") for record in directory.records()]
        numbers = [epsilon for epsilon in spent if isinstance(epsilon, int | float)]
        self._epsilon = float(numbers[-1]) if numbers else None
        delta = setup.config.hyper.get("delta")
        self._delta = float(delta) if isinstance(delta, int | float) and 0 < delta < 1 else _DELTA

    def run(
        self, shadows: int, clients: int, inversion_steps: int, callbacks: Sequence[Callback], own: dict[str, Any]
    ) -> Audit:
        included = balanced_halves(shadows, len(self._split.y), self._setup.config.seed) if shadows else None
        self._out.mkdir(parents=True, exist_ok=True)
        server, regional = read_servers(self._setup, self._directory)
        leaks: list[Leak] = []
        if self._setup.method.global_model:
            self._told("final model", 1, 1)
            target = self._confidences(self._setup.task, global_model(self._setup, server))
            leaks.append(self._leak("final model", "loss", *self._halves(target)))
            if included is not None:
                found = np.stack(list(self._shadows(included, callbacks, own)))
                leaks.append(
                    self._leak("final model", "LiRA", *self._halves(likelihood_ratios(target, found, included)))
                )
        self._told("messages of the next round", 1, 1)
        with tempfile.TemporaryDirectory() as folder:
            exchanged = Exchanged.next_round(
                self._setup, regional, self._directory.client_store, Store(Path(folder)), self._owners, clients
            )
            seen, notes = on_the_wire(exchanged, self._split, self._owners)
        leaks += [self._leak(what, attack, members, others) for what, attack, members, others in seen]
        inversions, more = self._inversions(exchanged, inversion_steps)
        config = self._setup.config
        found_all = Audit(
            self._out, config.method, tuple(leaks), inversions, (*notes, *more), self._epsilon, self._delta
        )
        found_all.save()
        return found_all

    def _leak(self, seen: str, attack: str, members: Floats, others: Floats) -> Leak:
        return Leak(seen, attack, len(members), advantage(members, others, self._delta))

    def _halves(self, values: Floats) -> tuple[Floats, Floats]:
        return values[: len(self.members)], values[len(self.members) :]

    def _confidences(self, task: Task, model: Tensor) -> Floats:
        return confidence_logits(score(task, model, self._split.x, self._split.y)["loss"].double().cpu().numpy())

    def _shadows(
        self, included: NDArray[np.bool_], callbacks: Sequence[Callback], own: dict[str, Any]
    ) -> Iterator[Floats]:
        """The confidences under each shadow run, from a file where it is done."""
        config = self._setup.config
        about = {"config": config.toml(), "samples": [self.members.tolist(), self.others.tolist()], "of": len(included)}
        for number, mask in enumerate(included):
            file, place = self._out / f"shadow-{number:03d}.json", self._out / f"shadow-{number:03d}"
            known = read_json(file) if file.is_file() else {}
            if known.get("about") != about:
                self._told("shadow run", number + 1, len(included))
                own_config = shadow_config(config, number)
                federation = shadow_federation(self._setup.federation, self.members, self._owners, self._split, mask)
                setup = prepare(own_config, **{**own, "data": federation})
                values = self._confidences(setup.task, _trained(setup, place, callbacks)).tolist()
                known = {"about": about, "confidences": values}
                write_json(file, known)
                shutil.rmtree(place)
            yield np.array(known["confidences"])

    def _inversions(self, exchanged: Exchanged, steps: int) -> tuple[tuple[Inversion, ...], tuple[str, ...]]:
        if not steps:
            return (), ()
        task, method, down = exchanged.task, exchanged.method, exchanged.down
        if exchanged.masked:
            return (), ("gradient inversion was not tried: with secure_aggregation no client's own update is seen",)
        if reason := reason_against(task, method, down):
            return (), (f"gradient inversion was not tried: {reason}",)
        dataset, client = task.dataset, exchanged.clients[0]
        count = len(self.members)
        prior = dataset.normalise(self._split.x[count:])
        own = torch.from_numpy(np.flatnonzero(self._owners == client))
        found = []
        for size in (size for size in _BATCHES if size <= len(own)):
            self._told("gradient inversion of a batch of", size, max(_BATCHES))
            batch = own[chosen(size, self._split.y[own], self._setup.config.seed)]
            samples = Samples(self._split.x, self._split.y, batch, dataset.normalise)
            state = exchanged.states.get(client, {})
            found.append(
                invert(
                    task, method, down, samples, prior, round_=exchanged.round, state=state, client=client, steps=steps
                )
            )
        return tuple(found), ()


def pairs(federation: Federation, count: int, seed: int) -> tuple[IntArray, IntArray, IntArray]:
    """Members (in the training split), others, and whose each member is: as many, class by class."""
    rng = numpy_rng(seed, "audit: samples")
    train, other = federation.dataset.train.y.numpy(), _others_split(federation).y.numpy()
    own = rng.permutation(len(federation.train_index))
    members, candidates = federation.train_index[own], rng.permutation(_candidates(federation))
    owners = np.repeat(np.arange(federation.clients), federation.sizes)[own]
    chosen_members, chosen_others = [], []
    for label in np.unique(train[members]):
        inside, outside = np.flatnonzero(train[members] == label), candidates[other[candidates] == label]
        both = min(len(inside), len(outside))
        chosen_members.append(inside[:both])
        chosen_others.append(outside[:both])
    places, others = np.concatenate(chosen_members), np.concatenate(chosen_others)
    if len(places) < 4:
        raise SettingError(
            "there are fewer than 4 test samples of the classes that were trained on: nothing to compare"
        )
    order = rng.permutation(len(places))[:count]
    return members[places[order]], others[order], owners[places[order]]


def _others_split(federation: Federation) -> Split:
    return federation.test_split if len(federation.test_index) else federation.dataset.test


def _candidates(federation: Federation) -> IntArray:
    """Samples that nobody trained on: the clients' own tests, which are distributed as their training samples are."""
    return np.unique(federation.test_index) if len(federation.test_index) else np.arange(len(federation.dataset.test))


def shadow_config(config: Config, number: int) -> Config:
    """The settings of a shadow run: another seed, and nothing written that is not needed."""
    return config.model_copy(update={"seed": config.seed + 1 + number, "eval_every": 0, "save_models": 0, "attack": ""})


def shadow_federation(
    federation: Federation, members: IntArray, owners: IntArray, samples: Split, included: NDArray[np.bool_]
) -> Federation:
    """The same clients, with those of the samples that are included: an other sample goes to the client of its pair."""
    dataset, count, size = federation.dataset, len(members), len(federation.dataset.train)
    left_out = members[~included[:count]]
    held, sizes = [], [0]
    for client in range(federation.clients):
        own = federation.train(client)
        more = size + np.flatnonzero(included[count:] & (owners == client))
        held.append(np.concatenate([own[~np.isin(own, left_out)], more]))
        sizes.append(len(held[-1]))
    train = Split(torch.cat([dataset.train.x, samples.x[count:]]), torch.cat([dataset.train.y, samples.y[count:]]))
    return replace(
        federation,
        dataset=replace(dataset, train=train),
        train_index=np.concatenate(held),
        train_offsets=np.cumsum(sizes),
    )


def _trained(setup: Setup, place: Path, callbacks: Sequence[Callback]) -> Tensor:
    """The final model of a shadow run, begun or continued."""
    if (place / files.CONFIG).is_file():
        directory = RunDirectory.open(place)
        run_in_directory(setup, directory, callbacks)
    else:
        run_setup(setup, place, callbacks=callbacks)
    directory = RunDirectory.open(place)
    try:
        return global_model(setup, read_servers(setup, directory)[0])
    finally:
        directory.release()
