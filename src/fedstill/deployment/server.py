"""A federation of sites elsewhere: each holds its own data, and the server knows only how many.

Every request carries the settings of the run, so that a site needs nothing but its data, and one that was away or
started again goes on where the others are.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedstill.building.config import Config, anchored, fixed
from fedstill.building.data import dataset_in, declared, is_declared, load_data, undivided
from fedstill.building.members import clients_of_regions, numbered
from fedstill.building.setup import Setup, prepare
from fedstill.building.task import balanced_weights
from fedstill.core.arrays import IntArray
from fedstill.core.device import find
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.files import write_sealed_json
from fedstill.core.owner import private_folder
from fedstill.data.preprocessing import TablePreprocessing
from fedstill.data.statistics import with_table
from fedstill.deployment.audit import RecordedLink
from fedstill.deployment.delivery import deliver
from fedstill.deployment.episodes import EpisodeLoop
from fedstill.deployment.protocol import (
    BALANCED,
    RunInfo,
    SiteLink,
    run_number,
)
from fedstill.deployment.registry import SiteRegistry
from fedstill.deployment.site_engine import SiteEngine, Terms
from fedstill.deployment.statistics import StatisticsPoll
from fedstill.engine.base import Engine
from fedstill.engine.worker import Worker
from fedstill.methods import registry as methods
from fedstill.methods.base import Part
from fedstill.models.base import frozen_digest
from fedstill.running import api, files
from fedstill.running.callbacks import Callback
from fedstill.running.directory import RunDirectory
from fedstill.running.inputs import check_inputs, save_inputs, saved_table, saved_tokenizer
from fedstill.running.logfile import logging_to
from fedstill.running.loop import RoundLoop, refuse_changes
from fedstill.running.result import Result
from fedstill.running.rollback import ROLLBACKS
from fedstill.running.uplinks import fewest_answers

log = logging.getLogger(__name__)


def serve(
    config: Config,
    names: Sequence[str],
    link: SiteLink,
    out: Path,
    *,
    terms: Terms,
    pause: Callable[[dict[str, str]], bool],
    callbacks: Sequence[Callback] = (),
    regional: bool = False,
    revoked: Collection[str] = (),
) -> Result:
    """Run a federation of sites, or continue it if it was begun in `out`.

    `regional`: each name is a regional server, with sites of its own. `pause` gets the missing sites (and why, if
    that is known), waits a little, and returns whether to wait on. `revoked` sites may belong to the run; none is
    waited for.
    """
    _check(config, regional=regional)
    if regional:
        clients = regions_of(config, names)
    else:
        with_keys, names = names, sites_in_order(out, names, revoked)
        config = config.model_copy(update={"clients": len(names)})
    # What a checkpoint does not have would have to be requested from the sites again.
    config = config.model_copy(update={"checkpoint_every": 1})
    dataset = dataset_in(load_data(config, saved_tokenizer(out)))
    exists = (out / files.CONFIG).is_file()
    directory = RunDirectory.open(out) if exists else _created(out, config)
    try:
        directory.check_rounds(config.rounds)
        link = RecordedLink(link, out / files.RECEIVED)
        # Every request has the settings, without the server's own folder: with many sites it takes long to write them.
        number, settings = _number(directory), numbered(config, names).model_copy(update={"data_dir": ""}).toml()
        rollbacks = directory.served_run().get(ROLLBACKS, [])
        _check_counts(directory, names, terms)
        if not regional:
            write_sealed_json(directory.path / files.SERVED, directory.served_run() | {"sites": names})
            clients = {name: np.array([k]) for k, name in enumerate(names)}
        frozen: list[str] = []  # the digest of each network's frozen part, where there is one
        steps: list[int] = []  # of an epoch in each region, once the sites have reported their numbers of samples
        weights: list[float] = []  # of each class, likewise

        def run_info() -> RunInfo:
            return {
                "number": number,
                "config": settings,
                "clients": config.clients,
                "classes": list(dataset.classes),
                "mean": list(dataset.mean),
                "std": list(dataset.std),
                "shape": list(dataset.shape),
                "tokenizer": dataset.tokenizer,  # all must make the same tokens of text
                "table": dataset.table.model_dump_json() if dataset.table else "",  # and the same of a row
                "steps": steps,
                "class_weight": weights,
                "frozen": frozen,
                "checkpoint": directory.oldest_checkpoint(),
                ROLLBACKS: rollbacks,
            }

        def new_registry() -> SiteRegistry:
            return SiteRegistry(
                clients,
                dataset,
                undivided(config, dataset),
                run_info,
                total=config.clients,
                names=() if regional else names,
                changing=regional,
                max_share=config.max_share,
                path=directory.path / files.COUNTS,
                by_class=config.class_weight == BALANCED,
                validation=config.validation,
            )

        with logging_to(directory.path / files.LOG):
            wanted = set(names) - set(revoked)
            for name in set(names) - wanted:
                log.warning("%s belongs to this run, and its key was revoked: the run goes on without it", name)
            for name in () if regional else sorted(set(with_keys) - set(names)):
                log.warning("%s is new, and this run has begun without it: it is for the next one", name)
            if dataset.table is not None:
                saved = saved_table(out) if directory.oldest_checkpoint() else None
                poll = StatisticsPoll(new_registry(), dataset.table, config)
                dataset = with_table(dataset, saved or _columns(config, poll, link, wanted, terms, pause))
            registry = new_registry()
            registry.counts.forget(terms.recount)
            _gather(registry, link, wanted, terms, pause)
            setup = prepare(config, data=registry.federation, elsewhere=True)
        if exists and directory.oldest_checkpoint():
            refuse_changes(fixed(directory.config()), fixed(anchored(config)))
            check_inputs(setup, out)
        save_inputs(setup, directory)
        directory.write_config(anchored(config))
    except BaseException:
        directory.release()
        raise
    frozen += _frozen_digests(setup)
    steps += [region.task.local.steps_per_epoch for region in setup.hierarchy.regions]
    weights += _class_weight(directory, setup, registry)
    loop_class, least = (EpisodeLoop, 1) if regional else (RoundLoop, fewest_answers(config, setup.method))

    def engine(worker: Worker) -> Engine:
        # Regional servers see sums alone, and send their models as they are.
        return SiteEngine(
            worker,
            link,
            registry,
            terms,
            least=least,
            masked=None if regional else _declared(setup),
            networks=setup.group_of,
        )

    return api.run_in_directory(
        setup,
        directory,
        callbacks,
        engine,
        loop_class=loop_class,
        at_end=lambda loop: deliver(
            link,
            registry,
            loop.final_models(),
            setup.client_groups if setup.hierarchy.separate else (),
            timeout=terms.timeout,
        ),
    )


def _frozen_digests(setup: Setup) -> list[str]:
    """What tells each network's frozen part from others; nothing where there is none."""
    tasks = [group.task for group in setup.groups] or [setup.task]
    digests = [frozen_digest(task.build().module) for task in tasks]
    return digests if any(digests) else []


def _declared(setup: Setup) -> Callable[[int], Mapping[str, Part]] | None:
    """What clients send, by region, if it is to be masked."""
    if not setup.config.secure_aggregation:
        return None
    return lambda number: setup.hierarchy.regions[number].method.wire(setup.hierarchy.regions[number].task).up


def _class_weight(directory: RunDirectory, setup: Setup, registry: SiteRegistry) -> list[float]:
    """How much each class counts in this run, also after a restart: sites that come later change nothing."""
    if setup.config.class_weight != BALANCED:
        return list(setup.task.local.class_weight)
    path = directory.path / files.SERVED
    saved = directory.served_run()
    if "class_weight" not in saved:
        saved |= {"class_weight": balanced_weights(registry.class_counts())}
        write_sealed_json(path, saved)
    return [float(weight) for weight in saved["class_weight"]]


def _columns(
    config: Config,
    poll: StatisticsPoll,
    link: SiteLink,
    wanted: set[str],
    terms: Terms,
    pause: Callable[[dict[str, str]], bool],
) -> TablePreprocessing:
    """What a table's columns are, and are standardised by: as declared, or else by what the sites report."""
    if is_declared(config):
        return declared(config)
    _gather(poll, link, wanted, terms, pause)
    return poll.settled()


def _gather(
    poll: SiteRegistry | StatisticsPoll,
    link: SiteLink,
    wanted: set[str],
    terms: Terms,
    pause: Callable[[dict[str, str]], bool],
) -> None:
    """Poll sites until all that are wanted have answered, or `pause` ends the waiting and enough have."""
    while True:
        poll.poll(link, timeout=terms.timeout)
        missing = {name: why for name, why in poll.missing.items() if name in wanted}
        if not missing or not pause(missing):
            break
    if poll.reported_sites < (needed := min(terms.needed, len(wanted))):
        raise FedstillError(f"only {poll.reported_sites} of {len(wanted)} sites are there, {needed} are needed")


def _created(out: Path, config: Config) -> RunDirectory:
    """For its owner alone, as what each site sent may be in there; the owner may share it later."""
    directory = RunDirectory.create(out, anchored(config))
    private_folder(out)
    return directory


def _check(config: Config, *, regional: bool) -> None:
    """Refuse what only a run on one machine can do, and a device that this one has not."""
    find(config.device)
    if regional and (config.target or config.columns) and not is_declared(config):
        raise SettingError("columns: of tables in regions, all must be declared, as 'fedstill columns' does")
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
    if config.class_weight == BALANCED:
        raise SettingError("class_weight = 'balanced': regions do not pass class counts on; give numbers instead")
    if methods.make(config.method, config.hyper).has_final_exchange:
        raise SettingError(f"{config.method} asks every client once more at the end, which regions do not pass on")
    called = wanted if any(wanted) else sorted(names)
    return dict(zip(called, clients_of_regions(config, config.clients), strict=True))


def _number(directory: RunDirectory) -> str:
    """The number that identifies this run, also after a restart: a site's state belongs to one run."""
    path = directory.path / files.SERVED
    if not path.exists():
        if directory.checkpoint_rounds() or directory.records():
            raise FedstillError(
                f"{path} is missing, though rounds are done: sites would take this for another run, and begin anew; "
                f"put it back from a copy, or begin again: 'fedstill rollback {directory.path} --to 0'"
            )
        write_sealed_json(path, {"number": secrets.token_hex(8), "sites": []})
    return run_number(directory.served_run())


def _check_counts(directory: RunDirectory, names: Sequence[str], terms: Terms) -> None:
    """Refuse to believe anew what sites say that they have, unless that is asked for."""
    path, known = directory.path / files.COUNTS, set(names) <= set(terms.recount)
    # Directories of earlier versions, which have no index, had no such file.
    if directory.checkpoint_rounds() and directory.client_store.run and not path.exists() and not known:
        raise FedstillError(
            f"{path} is missing, though rounds are done; put it back from a copy, or have all sites report their "
            "numbers of samples anew: --recount NAME, for each of them"
        )


def sites_in_order(out: Path, names: Sequence[str], revoked: Collection[str]) -> list[str]:
    """The sites of a run, in the order of their clients: those of a new one by name, and of one that has begun its own.

    A run that has begun keeps the number of its clients: one that was revoked is absent from now on, and one that was
    added since is left out.
    """
    begun = RunDirectory.open(out, lock=False).served_run() if (out / files.SERVED).exists() else {}
    members: list[str] = begun.get("sites", [])
    if not members:
        return sorted(names)
    for name in members:
        if name not in names and name not in revoked:
            hint = "its key is needed, or 'fedstill keys revoke', to go on without it"
            raise SettingError(f"site {name} belongs to this run; {hint}")
    return members
