"""The settings of a run: checked before work starts, written as TOML that reproduces it."""

from __future__ import annotations

import itertools
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from fedstill.attacks.attack import AttackKind
from fedstill.core import custom, device
from fedstill.core.errors import SettingError, unknown
from fedstill.data import augment, sources
from fedstill.data.tokens import FEWEST
from fedstill.methods import registry
from fedstill.train.task import BufferPolicy, Precision

IMAGE_MODEL, TEXT_MODEL = "lenet5", "transformer"  # unless another is named
TEXT_TRAINING = {"optimizer": "adam", "lr": 0.001}  # unless either is set: plain SGD hardly moves embeddings


class RegionSettings(BaseModel):
    """What one region has of its own; what is not set is as in the rest of the run."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = ""
    clients: NonNegativeInt | list[NonNegativeInt] = Field(
        0, description="how many clients, or which; 0: an equal share"
    )
    joins: int = Field(1, ge=1, description="its first round")
    leaves: int = Field(0, ge=0, description="the first round without it; 0: it stays")
    method: str = Field("", description="the method inside the region")
    hyper: dict[str, Any] = Field(default_factory=dict, description="that method's own settings")
    participation: float | None = Field(None, gt=0, le=1)
    epochs: int | None = Field(None, ge=1)
    batch_size: int | None = Field(None, ge=1)
    optimizer: Literal["sgd", "adam"] | None = None
    lr: float | None = Field(None, gt=0)
    momentum: float | None = Field(None, ge=0, lt=1)
    weight_decay: float | None = Field(None, ge=0)

    def of_its_own(self) -> dict[str, Any]:
        """The settings of the run that the region has otherwise."""
        names = ("participation", "epochs", "batch_size", "optimizer", "lr", "momentum", "weight_decay")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class Config(BaseModel):
    """Every setting of a run, with its default and meaning. A method's own are in `hyper`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    method: str = Field("fedavg", description="method id, or file.py:Class")
    # who holds what
    data: str = Field("fashion-mini", description="dataset name, a folder, an .npz or .csv file, or file.py:function")
    data_dir: str = Field("", description="where dataset files are; default $FEDSTILL_DATA")
    image_size: int = Field(0, ge=0, description="resize images to this; 0: as the model needs, else as they are")
    tokenizer: str = Field(
        "",
        description="of text: a file, folder or hub name, or public text to train one on; empty: the pretrained "
        "encoder's own, else trained on the training texts",
    )
    vocabulary: int = Field(8000, ge=FEWEST, description="tokens of a tokenizer that is trained, at most")
    max_length: int = Field(128, ge=3, description="tokens that a text is cut to")
    fraction: float = Field(1.0, gt=0, le=1, description="share of the training data used, of each class")
    imbalance_factor: float = Field(1.0, ge=1, description="long tail: largest class over smallest; 1: as it is")
    pool: float = Field(0.0, ge=0, description="samples the server holds: a count, or a share if below 1")
    proxy: str = Field("", description='unlabelled data for methods that need them: a dataset, or "pool"')
    proxy_size: int = Field(
        1000, ge=1, description="proxy samples, balanced over the classes of their own dataset; at most all"
    )
    partition: str = Field("dirichlet", description="how the data are divided among clients")
    clients: int = Field(20, ge=0, description="number of clients; 0: as many as the data name (natural)")
    alpha: float = Field(0.1, gt=0, description="Dirichlet concentration; smaller is more heterogeneous")
    min_size: int = Field(-1, ge=-1, description="fewest samples a client may get; -1: the partition's own")
    shards_per_client: int = Field(2, ge=1, description="classes (shards) a client gets (shards)")
    size_sigma: float = Field(0.0, ge=0, description="log-normal spread of the clients' sizes (dir_client_prior)")
    min_share: float = Field(0.5, ge=0, lt=1, description="smallest share of a mean client's size (dir_feddf)")
    ratio: float = Field(0.5, gt=0, le=1, description="share of the data used (dir_fedgen)")
    samples_per_client: int = Field(0, ge=0, description="samples a client keeps at most; 0: all")
    test_fraction: float = Field(0.2, ge=0, lt=1, description="share of a client's data held out for its own test")
    local_test: Literal["split", "matched", "shared"] = Field(
        "split",
        description="a client's test data: split from its own, drawn from the test set in the same proportions, or "
        "1/clients of the test samples of each class it has",
    )
    # what is learnt
    model: str = Field(
        IMAGE_MODEL, description="network name, or file.py:function; of text, transformer if none is named"
    )
    model_options: dict[str, Any] = Field(default_factory=dict, description="options of the network")
    augment: str = Field("", description='e.g. "crop,flip" or "flip,rotate:15,scale:0.8-1.0"')
    buffers: BufferPolicy = Field(
        "average", description="BatchNorm statistics: average them, keep them local, or drop them"
    )
    # how it is learnt
    rounds: int = Field(30, ge=1, description="communication rounds")
    participation: float = Field(0.2, gt=0, le=1, description="share of clients active in a round")
    epochs: int = Field(5, ge=1, description="local epochs a round")
    local_unit: Literal["epochs", "equal_steps"] = Field(
        "epochs", description="an epoch is a pass over the client's data, or the same number of steps for all"
    )
    batch_size: int = Field(32, ge=1, description="local batch size")
    optimizer: Literal["sgd", "adam"] = Field(
        "sgd", description="local optimiser; of text adam, if lr is not set either"
    )
    lr: float = Field(0.05, gt=0, description="local learning rate; of text 0.001, if optimizer is not set either")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on lr after each round")
    momentum: float = Field(0.0, ge=0, lt=1, description="local momentum (sgd)")
    weight_decay: float = Field(0.0, ge=0, description="local weight decay")
    clip: float = Field(0.0, ge=0, description="largest gradient norm; 0: no clipping")
    precision: Precision = Field("float32", description="of passes through the network; weights stay in float32")
    # regions
    regions: int = Field(1, ge=1, description="regions, each a federation of its own between episodes' ends; 1: none")
    rounds_per_episode: int = Field(5, ge=1, description="rounds after which the regions' models are merged")
    fixed_regions: bool = Field(True, description="clients stay in their region; else they are dealt anew each episode")
    region: list[RegionSettings] = Field(default_factory=list, description="what single regions have of their own")
    save_teachers: bool = Field(False, description="keep the models that meet, for 'fedstill reteach'")
    late_clients: int = Field(0, ge=0, description="clients, the last ones, that are not there from the start")
    late_from: int = Field(1, ge=1, description="their first round")
    # attacks
    attack: AttackKind = Field("", description="what malicious clients do: to their labels, or to what they send")
    attackers: int = Field(0, ge=0, description="number of malicious clients, drawn among those that have data")
    attack_class: int = Field(0, ge=0, description="the class of all their samples (label-flip)")
    attack_scale: float = Field(
        1.0,
        ge=-1e30,
        le=1e30,
        description="noise: its spread over each layer's own; scale: the factor on the update; sign-flip, count, ipm: "
        "minus that factor; alie: spreads from the honest mean; buffers, extra: the number that is sent",
    )
    # how it is run
    seed: int = Field(0, ge=0, description="the same seed gives the same bits")
    engine: Literal["process", "inline", "flower"] = Field(
        "process", description="worker processes, all in this one, or Flower's simulation engine"
    )
    workers: int = Field(
        0, ge=0, description="worker processes, and threads of a server that asks models; 0: one a core; not on a GPU"
    )
    device: str = Field(
        "cpu", description="cpu, cuda, cuda:1 and so on, or auto; on a GPU all work is done in this process"
    )
    together: int = Field(
        1, ge=1, description="clients of equal size trained at once (vmap); for GPUs, on a CPU slower"
    )
    eval_every: int = Field(1, ge=0, description="evaluate every so many rounds; 0: only after the last")
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    keep_checkpoints: int = Field(2, ge=2, description="checkpoints kept, to which 'fedstill rollback' can go back")
    save_models: int = Field(0, ge=0, description="keep the global model every so many rounds; 0: none")
    min_clients: int = Field(1, ge=1, description="stop if fewer clients of a round (and region) give a usable answer")
    round_retries: int = Field(
        5, ge=0, description="served: how often a round without enough usable answers is tried again"
    )
    max_update_ratio: float = Field(
        100.0,
        ge=0,
        description="served: an update longer than so many times the round's median is dropped; 0: none is",
    )
    max_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="served: the largest share of all samples (and tests) that a site counts with; 0: 0.75 of three "
        "sites, 0.6 of four, half of more; 1: no limit",
    )
    target: float = Field(0.0, ge=0, le=1, description="report the first round with this accuracy; 0: none")
    hyper: dict[str, Any] = Field(default_factory=dict, description="the method's own settings")

    @property
    def flat(self) -> bool:
        """Whether there are no regions."""
        return self.regions == 1 and not self.region

    def each_region(self) -> list[RegionSettings]:
        """What each region has of its own, if anything."""
        return self.region or [RegionSettings.model_validate({})] * self.regions

    def toml(self) -> str:
        """The configuration as TOML, all settings written out."""
        return tomli_w.dumps(_writable(self.model_dump()))


# Settings that say who holds what: of no use where that is settled.
DIVISION = {
    *("fraction", "imbalance_factor", "pool", "partition", "clients", "alpha", "min_size", "shards_per_client"),
    *("size_sigma", "min_share", "ratio", "samples_per_client", "test_fraction", "local_test"),
}
# Settings that a run may be resumed with another value of: they do not change what is computed, but for
# rounding (device, together) and for which answers of sites are refused (min_clients, max_update_ratio).
FREE = {
    "rounds",
    "workers",
    "engine",
    "device",
    "together",
    "eval_every",
    "checkpoint_every",
    "keep_checkpoints",
    "min_clients",
    "round_retries",
    "max_update_ratio",
    "target",
    "data_dir",
    "save_teachers",
    "save_models",
}


def fixed(config: Config) -> dict[str, str]:
    """The settings that must stay the same while a run goes on, as text."""
    return {name: repr(value) for name, value in config.model_dump().items() if name not in FREE}


def anchored(config: Config) -> Config:
    """The configuration with paths that hold wherever it is read."""
    update: dict[str, Any] = {}
    for name in ("method", "model", "data", "proxy", "tokenizer"):
        value = getattr(config, name)
        files = name in ("data", "proxy", "tokenizer")
        if custom.is_reference(value):
            update[name] = _anchored(value)
        elif files and value and value not in sources.names() and Path(value).expanduser().exists():
            update[name] = str(Path(value).expanduser().resolve())
    folder = config.model_options.get("pretrained")
    if isinstance(folder, str) and Path(folder).expanduser().is_dir():
        update["model_options"] = config.model_options | {"pretrained": str(Path(folder).expanduser().resolve())}
    update["region"] = [r.model_copy(update={"method": _anchored(r.method)}) for r in config.region]
    data_dir = config.data_dir or os.environ.get("FEDSTILL_DATA", "")
    if data_dir:
        update["data_dir"] = str(Path(data_dir).expanduser().resolve())
    return config.model_copy(update=update)


def _anchored(reference: str) -> str:
    """`file.py:object` with the whole path of the file; anything else as it is."""
    if not custom.is_reference(reference):
        return reference
    file, _, rest = reference.rpartition(":")
    return f"{Path(file).expanduser().resolve()}:{rest}"


def resolve(*layers: Mapping[str, Any], custom_method: bool = False) -> Config:
    """One complete configuration from several partial ones, the later ones first in rank.

    A name that is not a setting of the run is taken for one of the method's own, wherever it stands.
    """
    merged: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {"hyper": {}, "model_options": {}}
    for layer in layers:
        for key, value in layer.items():
            if key in tables:
                if not isinstance(value, Mapping):
                    raise SettingError(f"{key} = {value!r}: a table of settings is needed")
                tables[key] |= value
            elif key in Config.model_fields:
                merged[key] = value
            else:
                tables["hyper"][key] = value
    hyper, method = tables["hyper"], merged.get("method", "fedavg")
    if not isinstance(method, str):
        raise SettingError(f"method = {method!r}: the name of a method is needed")
    _follow_up(merged, method)
    merged |= tables
    if not custom_method and not is_object(method):
        own, hyper = [p.name for p in registry.hyper_parameters(method)], registry.with_new_names(method, hyper)
        for key in hyper:
            if key not in own:
                raise unknown("setting", key, [*own, *Config.model_fields])
        merged["hyper"] = registry.settings_of(registry.make(method, hyper))
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise SettingError(registry.explain(error)) from error
    augment.parse(config.augment)
    device.check(config.device)
    return config


def _follow_up(merged: dict[str, Any], method: str) -> None:
    """Defaults that depend on other settings."""
    if merged.get("partition") == "natural":
        merged.setdefault("clients", 0)
    if sources.is_text(str(merged.get("data", ""))):
        merged.setdefault("model", TEXT_MODEL)
        if not TEXT_TRAINING.keys() & merged.keys():
            merged |= TEXT_TRAINING
    if "region" in merged:
        merged["region"] = _regions(merged["region"], method)
        merged.setdefault("regions", len(merged["region"]) or 1)
    elif "f2l" in method.split("+"):
        merged.setdefault("regions", 3)


def _regions(tables: Any, method: str) -> list[dict[str, Any]]:
    """The regions' tables, a name that is no setting of a region taken for one of its method's own."""
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise SettingError("region: a list of tables is needed, [[region]] for each in a file")
    found = []
    for table in tables:
        plain = {k: v for k, v in table.items() if k in RegionSettings.model_fields}
        given = plain.pop("hyper", {})
        if not isinstance(given, Mapping) or not isinstance(plain.get("method", ""), str):
            raise SettingError("region: hyper is a table of settings, and method the name of one")
        own = dict(given) | {k: v for k, v in table.items() if k not in RegionSettings.model_fields}
        runs = plain.get("method") or method
        known = [] if is_object(runs) else [p.name for p in registry.hyper_parameters(runs)]
        own = own if is_object(runs) else registry.with_new_names(runs, own)
        for key in own:
            if key not in known:
                raise unknown("setting of a region", key, [*known, *RegionSettings.model_fields])
        found.append(plain | {"hyper": own})
    return found


def read_toml(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise SettingError(f"there is no file {path}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is not TOML: {error}") from error


def parse_assignments(pairs: list[str], method: str) -> dict[str, Any]:
    """`key=value` words as settings. The method's own settings win over the run's where both have the name."""
    settings: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {"hyper": {}, "model_options": {}}
    own = {p.name for p in registry.hyper_parameters(method)}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise SettingError(f"--set {pair}: write it as key=value")
        value = _value(text)
        table, _, rest = key.partition(".")
        if key in own:
            tables["hyper"][key] = value
        elif rest and table in tables:
            tables[table][rest] = value
        elif key in tables:
            raise SettingError(f"--set {pair}: name the setting, --set {key}.name=value")
        else:
            settings[key] = value
    return settings | tables


def parse_sweeps(words: Sequence[str]) -> list[dict[str, Any]]:
    """`key=a,b,c` words as every combination of the values.

    >>> parse_sweeps(["mu=0.1,1", "q=2"])
    [{'mu': 0.1, 'q': 2}, {'mu': 1, 'q': 2}]
    """
    axes: dict[str, list[Any]] = {}
    for word in words:
        key, equals, values = word.partition("=")
        if not key or not equals or not all(values.split(",")):
            raise SettingError(f"--sweep {word}: write it as key=value,value")
        if key in axes:
            raise SettingError(f"--sweep {word}: {key} is swept already; write all its values in one --sweep")
        found = [_value(value) for value in values.split(",")]
        if any(found.count(value) > 1 for value in found):
            raise SettingError(f"--sweep {word}: a value stands there twice")
        axes[key] = found
    return [dict(zip(axes, combination, strict=True)) for combination in itertools.product(*axes.values())]


def _value(text: str) -> Any:
    """A value as TOML reads it; what is not TOML is a string."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _writable(node: Any) -> Any:
    """What TOML can say of a value: None is left out, an object of the user's own is named."""
    if isinstance(node, Mapping):
        return {str(k): _writable(v) for k, v in node.items() if v is not None}
    if isinstance(node, list | tuple):
        return [_writable(v) for v in node if v is not None]
    if isinstance(node, PurePath):
        return str(node)
    return node if isinstance(node, bool | int | float | str) else f"<{type(node).__name__}>"


def is_object(name: str) -> bool:
    """Whether a setting stands for an object that was given from Python, such as `<MyNet>`."""
    return name.startswith("<")


def is_config_file(name: str) -> bool:
    return name.endswith(".toml") and not custom.is_reference(name)
