"""The data of a run: loaded, divided among the clients, and what stands in for them on the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.building.config import Config, is_object
from fedstill.core import custom
from fedstill.core.errors import SettingError
from fedstill.data import TextSettings, load_dataset, tokens
from fedstill.data.dataset import Dataset, sized
from fedstill.data.federation import Federation, federate
from fedstill.data.proxy import balanced, check_stands_in, match_channels
from fedstill.data.sources import is_text
from fedstill.models import image_size
from fedstill.models.pretrained import DISTILBERT, has_learnt
from fedstill.train.task import Samples


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
    encoder = encoder_of(config)
    if config.tokenizer or not encoder:
        return config.tokenizer
    folder = Path(encoder).expanduser()
    if not folder.is_dir() or (folder / "tokenizer.json").is_file():
        return encoder
    if has_learnt(encoder):
        raise SettingError(f"{encoder} comes without a tokenizer.json; set tokenizer to the one it was trained with")
    return ""


def check_tokens(config: Config, dataset: Dataset) -> None:
    """Refuse text in other tokens than the encoder has learnt."""
    own = Path(encoder_of(config) or ".").expanduser() / "tokenizer.json"
    if not (encoder_of(config) and dataset.tokenizer and own.is_file()):
        return
    if not tokens.same_vocabulary(dataset.tokenizer, tokens.read(str(own))):
        raise SettingError(f"the text is in other tokens than {own} has, which the encoder was trained with; set it")


def encoder_of(config: Config) -> str:
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
