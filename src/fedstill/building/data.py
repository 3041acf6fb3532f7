"""The data of a run: loaded, divided among the clients, and what stands in for them on the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedstill.building.config import Config, is_object
from fedstill.building.given import as_data
from fedstill.core import custom
from fedstill.core.errors import DataError, SettingError
from fedstill.core.files import home_path
from fedstill.data import TableSettings, TextSettings, load_dataset, tokens
from fedstill.data.dataset import Dataset, Split, sized
from fedstill.data.federation import Federation, federate
from fedstill.data.formats.table import read as read_table
from fedstill.data.formats.text import Columns
from fedstill.data.preprocessing import Column, TablePreprocessing
from fedstill.data.proxy import balanced, check_stands_in, match_channels
from fedstill.data.sources import Glance, existing_path, glance, is_table, is_text
from fedstill.data.statistics import ColumnSums, client_sums, constant, merged, with_table
from fedstill.data.validation import hold_out
from fedstill.models import image_size
from fedstill.models.pretrained import DISTILBERT, has_learnt
from fedstill.train.task import Samples


def load_data(config: Config, tokenizer: str = "", table: TablePreprocessing | None = None) -> Dataset | Federation:
    """The dataset that the configuration names, images at the size that the model needs, text in a model's tokens.

    It is a federation if a function of the user's makes one. Of a `table` the columns are known already: at a site,
    those of the run.
    """
    if custom.is_own(config.data, "datasets"):
        found = custom_data(config.data)
        return found if isinstance(found, Federation) else sized(found, wanted_size(config))
    if is_table(config.data, config.target):
        return read_table(existing_path(config.data), table_settings(config, table))
    _check_no_table(config)
    if not config.data:
        return _described(config)
    if is_text(config.data):
        tokenizer = tokenizer or wanted_tokenizer(config)
    text = TextSettings(tokenizer, config.vocabulary, config.max_length, columns=columns_of(config))
    size = config.image_size if glance(config.data).kind == "rows" else wanted_size(config)
    try:
        return load_dataset(config.data, config.data_dir or None, size, text=text)
    except tokens.NoTokenizer as error:
        if config.tokenizer or tokenizer != encoder_of(config):
            raise
        hint = "name a folder that has it: --set model_options.pretrained=FOLDER"
        raise SettingError(
            f"the pretrained encoder of {config.model} is not on this machine; {hint}; {error}"
        ) from error


def table_settings(config: Config, table: TablePreprocessing | None = None) -> TableSettings:
    """What the settings say of a table's columns, or what is known of them already."""
    columns = declared(config).columns if table is None and config.columns else table.columns if table else ()
    return TableSettings(
        target=config.target,
        client=config.client_column,
        split=config.split_column,
        categorical=tuple(config.categorical_columns),
        drop=tuple(config.drop_columns),
        columns=columns,
        classes=tuple(config.classes),
    )


def declared(config: Config) -> TablePreprocessing:
    """The columns as the settings declare them; what they do not say is 0, 1, no, or no category."""
    if len({column.name for column in config.columns}) < len(config.columns):
        raise SettingError("columns: two of them have the same name")
    columns = [
        Column(
            name=column.name,
            categories=None if column.categories is None else tuple(column.categories),
            mean=column.mean or 0.0,
            std=column.std or 1.0,
            missing=bool(column.missing),
        )
        for column in config.columns
    ]
    return TablePreprocessing(columns=tuple(columns))


def is_declared(config: Config) -> bool:
    """Whether the settings say everything of a table's columns, so that nothing has to be found from rows."""
    return bool(config.columns) and all(column.complete for column in config.columns)


def settled(config: Config, table: TablePreprocessing, owners: Sequence[ColumnSums]) -> TablePreprocessing:
    """The preprocessing of a table: what the settings declare, and else what the owners' rows have together."""
    if is_declared(config):
        return declared(config)
    found = {column.name: column for column in merged(table, owners).columns}
    for own in config.columns:
        if own.name not in found:
            raise SettingError(f"columns: the data have no column {own.name!r}")
        given = own.model_dump(exclude_none=True)
        if categories := given.pop("categories", None):
            given["categories"] = tuple(categories)
        found[own.name] = found[own.name].model_copy(update=given)
    return TablePreprocessing(columns=tuple(found.values()))


def standardise(config: Config, federation: Federation) -> tuple[Federation, list[str]]:
    """A federation of rows of a table, with the preprocessing that its clients' training samples give; and warnings."""
    if federation.dataset.table is None:
        return federation, []
    owners = [] if is_declared(config) else client_sums(federation)
    table = settled(config, federation.dataset.table, owners)
    same = [f"column {name!r} is the same in all training samples" for name in constant(table, owners) if owners]
    return replace(federation, dataset=with_table(federation.dataset, table)), same


def _described(config: Config) -> Dataset:
    """What a server without data knows of the sites' tables: their columns and classes, and no row."""
    if not config.columns or len(config.classes) < 2:
        raise SettingError(
            "data is empty: name a dataset or a file; a server without data needs columns and classes instead, as "
            "'fedstill columns' writes them"
        )
    if config.pool:
        raise SettingError(f"pool = {config.pool:g}: the server has no data to take it from")
    table = declared(config)
    rows = Split(torch.zeros(2, len(table.columns), dtype=torch.float64), torch.tensor([0, 1]))  # in name only
    return Dataset("table", rows, Split(rows.x[:0], rows.y[:0]), tuple(config.classes), table=table)


def _check_no_table(config: Config) -> None:
    """Refuse settings of a table where the data are something else."""
    names: tuple[str, ...] = ("target", "client_column", "split_column", "categorical_columns", "drop_columns")
    if is_text(config.data) or config.data.startswith("hf:"):
        names = tuple(name for name in names if name != "client_column")
    for name in (*names, *(("columns", "classes") if config.data else ())):
        if (value := getattr(config, name)) and (config.data or name not in ("target", "client_column")):
            hint = "; for an accuracy to reach, set target_accuracy" if name == "target" else ""
            raise SettingError(
                f"{name} = {value if name != 'columns' else '…'!r} is for tables (.csv, .tsv or .parquet files with a "
                f"target), and the data are {config.data!r}{hint}"
            )


def columns_of(config: Config) -> Columns:
    """What the columns of a table of text are called."""
    return Columns(config.text_column, config.label_column, config.client_column)


def data_source(config: Config) -> tuple[str | int, ...]:
    """What `load_data` depends on."""
    if is_table(config.data, config.target):
        return (config.data, repr(table_settings(config)))
    columns = (config.text_column, config.label_column, config.client_column)
    text = (wanted_tokenizer(config), config.vocabulary, config.max_length) if is_text(config.data) else ()
    return (config.data, config.data_dir, wanted_size(config), *columns, *text)


def wanted_tokenizer(config: Config) -> str:
    """The tokenizer that is set, else the encoder's own: what it has learnt of one token holds of no other."""
    encoder = encoder_of(config)
    if config.tokenizer or not encoder:
        return config.tokenizer
    folder = home_path(encoder)
    if not folder.is_dir() or (folder / "tokenizer.json").is_file():
        return encoder
    if has_learnt(encoder):
        raise SettingError(f"{encoder} comes without a tokenizer.json; set tokenizer to the one it was trained with")
    return ""


def check_tokens(config: Config, dataset: Dataset) -> None:
    """Refuse text in other tokens than the encoder has learnt."""
    own = home_path(encoder_of(config) or ".") / "tokenizer.json"
    if not (encoder_of(config) and dataset.tokenizer and own.is_file()):
        return
    if not tokens.same_vocabulary(dataset.tokenizer, tokens.read(str(own))):
        raise SettingError(f"the text is in other tokens than {own} has, which the encoder was trained with; set it")


def encoder_of(config: Config) -> str:
    """The pretrained encoder that the network begins with, if it does with one."""
    return str(config.model_options.get("pretrained", DISTILBERT)) if config.model == "distilbert" else ""


_made: dict[str, Dataset | Federation] = {}  # by functions that were called to see what they make, until it is used


def own_glance(reference: str) -> Glance | None:
    """What a user's function makes, which no name tells: it is called. None: the name is of something else."""
    if not custom.is_own(reference, "datasets"):
        return None
    _made[reference] = custom_data(reference)
    return Glance.of(dataset_in(_made[reference]))


def custom_data(reference: str) -> Dataset | Federation:
    """What a user's function makes."""
    if reference in _made:
        return _made.pop(reference)
    data = as_data(custom.call(reference, kind="datasets"), f"what {reference} returns")
    if isinstance(data, str):
        raise SettingError(f"{reference} returns the name {data!r}; set data to that, or return the data themselves")
    return data


def dataset_in(data: Dataset | Federation) -> Dataset:
    """The dataset, divided or not."""
    return data.dataset if isinstance(data, Federation) else data


def dataset_of(data: Dataset | Federation, what: str) -> Dataset:
    """Data that are not divided yet."""
    if isinstance(data, Federation):
        raise DataError(f"{what} is a Federation, which is divided already; a fedstill.Dataset is needed")
    return data


def wanted_size(config: Config) -> int:
    """The side that images should have: what is set, else what the model needs; 0: as they are."""
    models = [group.model for group in config.each_group()] or [config.model]
    named = [model for model in models if not (custom.is_own(model, "models") or is_object(model))]
    return config.image_size or max([image_size(model) or 0 for model in named], default=0)


def data_notes(config: Config, dataset: Dataset) -> Iterator[str]:
    """What was done to the data before the run."""
    if dataset.original_size:
        to = f"images {dataset.original_size} resized to {dataset.shape[2]}x{dataset.shape[1]}"
        own = config.image_size or not wanted_size(config)
        yield to + (
            "" if config.image_size else "; image_size sets another size" if own else f" for {config.network_names}"
        )
    yield from dataset.notes


def divide(config: Config, dataset: Dataset | Federation) -> Federation:
    """The dataset divided among the clients; a federation is divided already."""
    if isinstance(dataset, Federation):
        return dataset
    # A partition ignores what only others use.
    settings: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("shards_per_client", "ways", "shots", "ways_spread", "size_sigma", "min_share", "ratio")
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


def undivided(config: Config, dataset: Dataset | Federation) -> Federation:
    """The dataset as a server holds it whose clients have their own: its pool is the one that `divide` takes."""
    whole = federate(
        dataset_in(dataset),
        clients=1,
        partition="iid",
        seed=config.seed,
        test_fraction=0.0,
        pool=config.pool,
        imbalance_factor=config.imbalance_factor,
        fraction=config.fraction,
    )
    return hold_out(whole, config.validation, config.seed)


def load_proxy(config: Config, given: Dataset | None, target: Dataset) -> Dataset:
    """The dataset that stands in for the target: given as an object, made by a function, or named."""
    size = target.shape[-1] if len(target.shape) == 3 else 0
    if given is not None:
        return sized(given, size)
    if custom.is_own(config.proxy, "datasets"):
        return sized(dataset_of(custom_data(config.proxy), f"proxy = {config.proxy!r}"), size)
    if config.proxy == config.data:
        raise SettingError(
            f"proxy = {config.proxy!r} is what the clients hold; for a part of it, set pool and proxy=pool"
        )
    if target.table is not None:
        rows = read_table(home_path(config.proxy), TableSettings(columns=target.table.columns, labelled=False))
        return with_table(rows, target.table)
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
