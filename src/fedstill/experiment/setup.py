"""From settings to the objects of a run. Whatever can be wrong is found here, before the first round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstill.attacks.attack import Attack, plan
from fedstill.core import custom, kernels
from fedstill.core.errors import FedstillError, SettingError
from fedstill.data import TextSettings, augment, tokens
from fedstill.data import load as load_dataset
from fedstill.data.dataset import Dataset, sized
from fedstill.data.federation import Federation, federate
from fedstill.data.proxy import balanced, check_stands_in, match_channels
from fedstill.data.sources import is_text
from fedstill.experiment.config import Config, RegionSettings, is_object
from fedstill.experiment.regions import Hierarchy, Region, assign, cohort_size, with_data
from fedstill.experiment.rundir import RunDirectory
from fedstill.methods import registry
from fedstill.methods.base import Method
from fedstill.models import as_classifier, build, image_size
from fedstill.models.base import Classifier, frozen_digest
from fedstill.models.pretrained import DISTILBERT, has_learnt
from fedstill.train.evaluate import outputs
from fedstill.train.task import LocalTraining, Samples, Task, classifier
from fedstill.train.together import check_together

FROZEN = "frozen.txt"

Network = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Setup:
    """A run ready to start."""

    config: Config
    task: Task
    federation: Federation
    method: Method
    hierarchy: Hierarchy
    attack: Attack
    warnings: tuple[str, ...] = ()  # what whoever started the run should know

    def pool(self) -> Samples | None:
        """The samples that the server itself holds."""
        index = torch.from_numpy(self.federation.pool_index)
        dataset = self.federation.dataset
        return Samples(dataset.train.x, dataset.train.y, index, dataset.normalise) if len(index) else None


def prepare(
    config: Config,
    *,
    data: Dataset | Federation | None = None,
    model: Network | None = None,
    method: Method | None = None,
    proxy: Dataset | None = None,
    elsewhere: bool = False,
    tokenizer: str = "",
) -> Setup:
    """Load, divide and build what the configuration names; what is given as an object is taken as it is.

    Clients that are `elsewhere` may still come: it is no error that a region has nobody with data. A `tokenizer`, as
    JSON, stands in for the one that is named.
    """
    method = registry.make(config.method, config.hyper) if method is None else registry.checked(method)
    if isinstance(data, Federation):
        federation = data
    else:
        found = load_data(config, tokenizer) if data is None else sized(data, wanted_size(config))
        federation = divide(config, found)
    task = make_task(config, federation, method, model, proxy)
    (method if config.flat else method.regional()).check(task)
    _check_labels(config.method, method, federation)
    hierarchy = arrange(config, task, federation, method)
    _check_attendance(hierarchy, config, federation, elsewhere=elsewhere)
    attack = attack_of(config, federation, hierarchy)
    return Setup(config, task, federation, method, hierarchy, attack, warnings=tuple(_warnings(config, task)))


def _warnings(config: Config, task: Task) -> Iterator[str]:
    if task.proxy is not None and config.proxy != "pool" and len(task.proxy) < config.proxy_size:
        yield f"proxy_size = {config.proxy_size}: the proxy data have {len(task.proxy)} samples, and all are used"
    if (encoder := _encoder(config)) and not has_learnt(encoder):
        yield f"{encoder} has no weights: the encoder begins with random ones, as if it had learnt nothing"


def keep(setup: Setup, directory: RunDirectory) -> None:
    """Write down what the settings only name, and a run cannot go on without: its tokenizer, and what is frozen."""
    if setup.task.dataset.tokenizer:
        directory.write("tokenizer.json", setup.task.dataset.tokenizer)
    if digest := frozen_digest(setup.task.build().module):
        directory.write(FROZEN, digest + "\n")
    else:
        (directory.path / FROZEN).unlink(missing_ok=True)  # of a run that was replaced


def prepare_again(directory: RunDirectory, config: Config, **own: Any) -> Setup:
    """Prepare a run that has begun: with its own tokenizer, and refused if what it froze has changed since."""
    setup = prepare(config, tokenizer=kept_tokenizer(directory.path), **own)
    check_kept(setup, directory.path)
    return setup


def kept_tokenizer(path: Path) -> str:
    """The tokenizer of a run directory, as JSON; empty if it has none."""
    kept = path / "tokenizer.json"
    return kept.read_text(encoding="utf-8") if kept.is_file() else ""


def check_kept(setup: Setup, path: Path) -> None:
    """Refuse to go on in other tokens, or upon other frozen weights, than a run began with."""
    tokenizer = kept_tokenizer(path)
    if tokenizer and setup.task.dataset.tokenizer != tokenizer:
        raise SettingError(f"the data are in other tokens than {path}/tokenizer.json makes, with which the run began")
    if (path / FROZEN).is_file() and (path / FROZEN).read_text().strip() != frozen_digest(setup.task.build().module):
        raise SettingError(
            f"the weights that {path} froze, and was trained upon, have changed; put the encoder back, or begin another"
        )


def make_task(
    config: Config, federation: Federation, method: Method, model: Network | None = None, proxy: Dataset | None = None
) -> Task:
    """What a server and its clients agree on."""
    if config.augment and len(federation.dataset.shape) != 3:
        raise SettingError(f"augment = {config.augment!r}: only images can be augmented")
    _check_tokenizer(config, federation.dataset)
    task = Task(
        dataset=federation.dataset,
        make_network=network_maker(config, federation.dataset, method, model),
        local=local_training(config, federation),
        augment=augment.parse(config.augment),
        buffers=config.buffers,
        seed=config.seed,
        precision=config.precision,
        proxy=proxy_samples(config, federation, proxy),
    )
    _check_fit(task, config)
    if config.together > 1:
        check_together(task)
    return task


def largest_answer(config: Config, federation: Federation) -> int:
    """Bytes of the tensors that a client sends at most."""
    method = registry.make(config.method, config.hyper)
    task = make_task(config, federation, method)
    inside = [regional_method(own, config, method) for own in config.each_region()] or [method]
    wires = [each.wire(task) for each in (method, *inside)]
    return max(sum(part.nbytes for part in parts.values()) for wire in wires for parts in (wire.up, wire.last))


def arrange(config: Config, task: Task, federation: Federation, method: Method) -> Hierarchy:
    """The regions of a run, each with its method and how its clients train; one, of all clients, if there are none."""
    clients = federation.clients
    if config.late_clients >= clients:
        raise SettingError(f"late_clients = {config.late_clients}: some of the {clients} clients must be there at once")
    tables = config.region
    if tables and config.regions != len(tables):
        raise SettingError(f"regions = {config.regions}, but there are {len(tables)} [[region]] tables")
    if config.flat:
        everyone = Region(0, "", np.arange(clients), method, task, config.participation)
        return Hierarchy((everyone,), late=config.late_clients, late_from=config.late_from)
    if config.rounds % config.rounds_per_episode:
        raise SettingError(
            f"rounds = {config.rounds} is not a whole number of episodes; rounds_per_episode is "
            f"{config.rounds_per_episode}"
        )
    found = []
    for number, (own, members) in enumerate(zip(config.each_region(), assign(config, clients), strict=True)):
        settings = config.model_copy(update=own.of_its_own())
        name = own.name or f"region {number + 1}"
        regional_task = task.trained_as(local_training(settings, federation)) if own.of_its_own() else task
        inside = regional_method(own, config, method)
        _check_region(name, inside, regional_task, config)
        _check_labels(f"{name}: its method", inside, federation)
        found.append(
            Region(number, name, members, inside, regional_task, settings.participation, own.joins, own.leaves)
        )
    return Hierarchy(
        tuple(found),
        config.rounds_per_episode,
        not config.fixed_regions,
        config.late_clients,
        config.late_from,
        config.seed,
    )


def _check_labels(name: str, method: Method, federation: Federation) -> None:
    if method.needs().server_labels and not len(federation.pool_index):
        raise SettingError(
            f"{name} needs labelled samples on the server: set pool, for example pool=0.1, or give pool to from_clients"
        )


def regional_method(own: RegionSettings, config: Config, method: Method) -> Method:
    """The method inside a region: its own, or the run's with the region's settings."""
    if own.method:
        return registry.make(own.method, own.hyper)
    return (registry.make(config.method, config.hyper | own.hyper) if own.hyper else method).regional()


def _check_region(name: str, method: Method, task: Task, config: Config) -> None:
    """Refuse, inside a region, what cannot be merged with others."""
    if not method.global_model:
        raise SettingError(f"{name}: its method has no global model that could be merged with other regions'")
    changes_model = method.needs().changed_model
    if changes_model and any(r.method and r.method != config.method for r in config.region):
        raise SettingError(f"{name}: its method changes the network, so all regions must run it")
    if not config.fixed_regions and (any(r.method or r.hyper for r in config.region) or method.averages_all_clients):
        raise SettingError(
            f"{name}: fixed_regions = false deals the clients anew, which asks for one method in all regions, and "
            "one that does not average clients it no longer has (T1)"
        )
    method.check(task)


def _check_attendance(hierarchy: Hierarchy, config: Config, federation: Federation, *, elsewhere: bool) -> None:
    """Refuse a plan in which somebody has nobody to work with."""
    names = [region.name for region in hierarchy.regions]
    if len(set(names)) < len(names):
        raise SettingError(f"region: each needs a name of its own, and they are {', '.join(names)}")
    for region in hierarchy.regions:
        if region.leaves and region.leaves <= region.joins:
            raise SettingError(f"{region.name}: it leaves in round {region.leaves} and joins in round {region.joins}")
    changes = {1, config.late_from, *(r.joins for r in hierarchy.regions), *(r.leaves for r in hierarchy.regions)}
    if hierarchy.redrawn:  # each episode deals anew
        changes |= set(range(1, config.rounds + 1, config.rounds_per_episode))
    for round_ in sorted(r for r in changes if 1 <= r <= config.rounds):
        present = hierarchy.present(round_)
        if not present:
            raise SettingError(f"region: no region is there in round {round_}")
        for region, members in present:
            where = f"{region.name}: " if region.name else ""
            if not federation.sizes[members].any():
                if elsewhere:
                    continue
                raise SettingError(f"{where}none of the clients has data in round {round_}")
            count = cohort_size(len(with_data(federation.sizes, members)), len(members), region.participation)
            for part in region.method.parts():
                if count < part.fewest_clients:
                    raise SettingError(
                        f"{where}{part.name} asks for at least {part.fewest_clients} clients a round, and round "
                        f"{round_} has {count}; raise participation"
                    )


def attack_of(config: Config, federation: Federation, hierarchy: Hierarchy) -> Attack:
    """Who is malicious, and how; refused where the attack has nothing to change."""
    attack = plan(
        config.attack,
        config.attackers,
        federation.sizes,
        len(federation.dataset.classes),
        target=config.attack_class,
        scale=config.attack_scale,
        seed=config.seed,
    )
    for region in hierarchy.regions if attack.on_updates else ():
        wire = region.method.wire(region.task)
        if "model" not in wire.up or "model" not in wire.down:
            raise SettingError(f"attack = {config.attack!r} changes clients' models, and this method sends none")
    return attack


def load_data(config: Config, tokenizer: str = "") -> Dataset:
    """The dataset that the configuration names, images at the size that the model needs, text in a model's tokens."""
    if custom.is_reference(config.data):
        return made_dataset(config.data)
    if is_text(config.data):
        tokenizer = tokenizer or wanted_tokenizer(config)
    text = TextSettings(tokenizer, config.vocabulary, config.max_length)
    return load_dataset(config.data, config.data_dir or None, wanted_size(config), text=text)


def data_source(config: Config) -> tuple[str | int, ...]:
    """What `load_data` depends on."""
    text = (wanted_tokenizer(config), config.vocabulary, config.max_length) if is_text(config.data) else ()
    return (config.data, config.data_dir, wanted_size(config), *text)


def wanted_tokenizer(config: Config) -> str:
    """The tokenizer that is set, else the encoder's own: what it has learnt of one token holds of no other."""
    encoder = _encoder(config)
    if config.tokenizer or not encoder:
        return config.tokenizer
    folder = Path(encoder).expanduser()
    if not folder.is_dir() or (folder / "tokenizer.json").is_file():
        return encoder
    if has_learnt(encoder):
        raise SettingError(f"{encoder} comes without a tokenizer.json; set tokenizer to the one it was trained with")
    return ""


def _check_tokenizer(config: Config, dataset: Dataset) -> None:
    """Refuse text in other tokens than the encoder has learnt."""
    own = Path(_encoder(config) or ".").expanduser() / "tokenizer.json"
    if not (_encoder(config) and dataset.tokenizer and own.is_file()):
        return
    if not tokens.same_vocabulary(dataset.tokenizer, tokens.read(str(own))):
        raise SettingError(f"the text is in other tokens than {own} has, which the encoder was trained with; set it")


def _encoder(config: Config) -> str:
    """The pretrained encoder that the network begins with, if it does with one."""
    return str(config.model_options.get("pretrained", DISTILBERT)) if config.model == "distilbert" else ""


def made_dataset(reference: str) -> Dataset:
    """What a user's function makes."""
    made = custom.call(reference)
    if not isinstance(made, Dataset):
        raise SettingError(
            f"{reference} returns a {type(made).__name__}; it must return a fedstill.Dataset "
            "(fedstill.from_arrays makes one)"
        )
    return made


def wanted_size(config: Config) -> int:
    """The side that images should have: what is set, else what the model needs; 0: as they are."""
    own = custom.is_reference(config.model) or is_object(config.model)
    return config.image_size or (0 if own else image_size(config.model) or 0)


def divide(config: Config, dataset: Dataset) -> Federation:
    """The dataset divided among the clients."""
    # A partition ignores what only others use.
    settings: dict[str, Any] = {
        name: getattr(config, name) for name in ("shards_per_client", "size_sigma", "min_share", "ratio")
    }
    if config.min_size >= 0:
        settings["min_size"] = config.min_size
    return federate(
        dataset,
        clients=config.clients,
        partition=config.partition,
        seed=config.seed,
        alpha=config.alpha,
        test_fraction=config.test_fraction,
        pool=config.pool,
        imbalance_factor=config.imbalance_factor,
        fraction=config.fraction,
        samples_per_client=config.samples_per_client,
        local_test=config.local_test,
        **settings,
    )


def undivided(config: Config, dataset: Dataset) -> Federation:
    """The dataset as a server holds it whose clients have their own: its pool is the one that `divide` takes."""
    return federate(
        dataset,
        clients=1,
        partition="iid",
        seed=config.seed,
        test_fraction=0.0,
        pool=config.pool,
        imbalance_factor=config.imbalance_factor,
        fraction=config.fraction,
    )


def load_proxy(config: Config, given: Dataset | None, target: Dataset) -> Dataset:
    """The dataset that stands in for the target: given as an object, made by a function, or named."""
    size = target.shape[-1] if len(target.shape) == 3 else 0
    if given is not None:
        return sized(given, size)
    if custom.is_reference(config.proxy):
        return sized(made_dataset(config.proxy), size)
    if config.proxy == config.data:
        raise SettingError(
            f"proxy = {config.proxy!r} is what the clients hold; for a part of it, set pool and proxy=pool"
        )
    # Text in the target's tokens.
    text = TextSettings(target.tokenizer, config.vocabulary, target.shape[-1], labelled=False)
    return load_dataset(config.proxy, config.data_dir or None, size, text=text)


def proxy_samples(config: Config, federation: Federation, given: Dataset | None = None) -> Samples | None:
    """The unlabelled samples that the configuration names: of the server's pool, or of another dataset."""
    dataset = federation.dataset
    if not config.proxy:
        return None
    if config.proxy == "pool":
        if not len(federation.pool_index):
            raise SettingError("proxy = 'pool': the server has no pool; set pool, for example pool=0.1")
        index = torch.from_numpy(federation.pool_index)
        return Samples(dataset.train.x, torch.zeros_like(dataset.train.y), index, dataset.normalise)
    other = load_proxy(config, given, dataset)
    check_stands_in(other, dataset)
    index = balanced(other.train.y, config.proxy_size, config.seed)

    def prepare(x: Tensor) -> Tensor:
        return dataset.normalise(match_channels(x, dataset.shape[0]) if x.dim() == 4 else x)

    return Samples(other.train.x, torch.zeros_like(other.train.y), index, prepare)


def local_training(config: Config, federation: Federation) -> LocalTraining:
    """How clients train; `equal_steps` gives all of them the number an average client would need."""
    steps = 0
    if config.local_unit == "equal_steps":
        steps = max(1, int(np.sum(federation.sizes)) // (federation.clients * config.batch_size))
    return LocalTraining(
        epochs=config.epochs,
        batch_size=config.batch_size,
        optimizer=config.optimizer,
        lr=config.lr,
        lr_decay=config.lr_decay,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        clip=config.clip,
        steps_per_epoch=steps,
    )


def network_maker(config: Config, dataset: Dataset, method: Method, model: Network | None) -> Callable[[], Classifier]:
    """A function that builds the network the method trains."""
    classes, shape = len(dataset.classes), tuple(dataset.shape)
    if isinstance(model, nn.Module):
        given = model
        return lambda: method.network(as_classifier(copy.deepcopy(given)))
    if model is not None:
        made = model
        return lambda: method.network(as_classifier(made()))
    if custom.is_reference(config.model):
        return lambda: method.network(as_classifier(_own_network(config.model, shape, classes)))
    vocabulary = dataset.vocabulary
    return lambda: method.network(build(config.model, shape, classes, vocabulary=vocabulary, **config.model_options))


def _own_network(reference: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """What a user's function makes of the shape of a sample and the number of classes."""
    made = custom.call(reference, shape, classes)
    if not isinstance(made, nn.Module):
        raise SettingError(f"{reference} returns a {type(made).__name__}; it must return a torch.nn.Module")
    return made


def _check_fit(task: Task, config: Config) -> None:
    """Try the network on two samples: it must take them and give one logit a class."""
    net = task.nets.get("student")
    net.module.eval()
    x = task.dataset.normalise(task.dataset.train.x[:2])
    try:
        with torch.no_grad(), kernels.Refusing():
            logits = outputs(classifier(net), x).logits
    except FedstillError:
        raise
    except Exception as error:
        shape = "x".join(map(str, task.dataset.shape))
        reason = custom.summary(error)
        raise SettingError(f"model {config.model!r} does not take samples of {shape}: {reason}") from error
    if logits.shape != (len(x), task.classes):
        raise SettingError(
            f"model {config.model!r} gives outputs of shape {tuple(logits.shape)} for {len(x)} samples; "
            f"the data have {task.classes} classes, so it must give {(len(x), task.classes)}"
        )
