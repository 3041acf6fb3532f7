"""Every setting of a run, with its type, default, bounds and meaning. Light: the flags of commands come from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Unpack, get_args, get_origin

import tomli_w
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from fedstill.building.sections import ColumnSettings, GroupSettings, RegionSettings
from fedstill.building.suggestions import unknown_setting
from fedstill.core.choices import ALPHA, SMALLEST_VOCABULARY, AttackKind, BufferPolicy, Precision
from fedstill.core.errors import SettingError, explain

if TYPE_CHECKING:
    from fedstill.building.keywords import Settings

IMAGE_MODEL, TEXT_MODEL, ROW_MODEL = "lenet5", "transformer", "mlp"  # unless another is named
_BOUNDS = {"gt": "above {:g}", "ge": "at least {:g}", "lt": "below {:g}", "le": "at most {:g}"}
TEXT_TRAINING = {"optimizer": "adam", "lr": 0.001}  # unless either is set: plain SGD hardly moves embeddings
TABLE_TRAINING = {"optimizer": "sgd", "lr": 0.1}  # unless either is set: docs/your-own-data.md says how it was chosen


def _names(given: Any) -> Any:
    """Names in one string, as a flag has them, as a list."""
    return [name.strip() for name in given.split(",") if name.strip()] if isinstance(given, str) else given


Names = Annotated[list[str], BeforeValidator(_names)]


class Config(BaseModel):
    """Every setting of a run, with its default and meaning. A method's own are in `hyper`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    if TYPE_CHECKING:  # for type checkers, which do not see the defaults of fields

        def __init__(
            self,
            *,
            method: str = ...,
            data: str = ...,
            model: str = ...,
            models: list[str] = ...,
            proxy: str = ...,
            **settings: Unpack[Settings],
        ) -> None: ...

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_line(cls, given: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        """What is wrong, as every other setting that is: a SettingError in one line."""
        for name in given if isinstance(given, Mapping) else ():
            if name not in cls.model_fields:
                raise unknown_setting(str(name), cls.model_fields)
        try:
            return check(given)
        except ValidationError as error:
            raise SettingError(explain(error)) from error

    method: str = Field("fedavg", description="method id, or file.py:Class")
    # data partition
    data: str = Field(
        "fashion-mini",
        description="dataset: a name from 'fedstill datasets', a folder, an .npz, a table of text, a table (.csv, "
        ".tsv, .parquet) with a target, hf:name, or file.py:function",
    )
    target: str = Field("", description="of a table: the column with the label")
    client_column: str = Field("", description="column that names the client of each row")
    split_column: str = Field(
        "", description='of a table: the column that says "train" or "test"; empty: a fifth tests'
    )
    categorical_columns: Names = Field(
        default_factory=list, description="of a table: columns of whole numbers that stand for categories"
    )
    drop_columns: Names = Field(default_factory=list, description="of a table: columns to leave out")
    columns: list[ColumnSettings] = Field(
        default_factory=list, description="of a table: what its columns are, as 'fedstill columns' writes it"
    )
    classes: Names = Field(default_factory=list, description="of a table: its classes; none: the labels that occur")
    data_dir: str = Field("", description="where dataset files are; empty: $FEDSTILL_DATA")
    image_size: int = Field(0, ge=0, description="resize images to this; 0: as the model needs, else as they are")
    text_column: str = Field("", description="column of the texts of a .csv, .tsv or .jsonl; empty: text")
    label_column: str = Field("", description="column of their labels; empty: label")
    tokenizer: str = Field(
        "",
        description="of text: a file, folder or hub name, or public text to train one on; empty: the pretrained "
        "encoder's own, else trained on the training texts",
    )
    vocabulary: int = Field(8000, ge=SMALLEST_VOCABULARY, description="tokens of a tokenizer that is trained, at most")
    max_length: int = Field(128, ge=3, description="tokens that a text is cut to")
    fraction: float = Field(1.0, gt=0, le=1, description="share of the training data used, of each class")
    imbalance_factor: float = Field(1.0, ge=1, description="long tail: largest class over smallest; 1: as it is")
    pool: float = Field(0.0, ge=0, description="samples the server holds: a count, or a share if below 1")
    proxy: str = Field("", description='unlabelled data for methods that need them: a dataset, or "pool"')
    proxy_size: int = Field(
        1000, ge=1, description="proxy samples, balanced over the classes of their own dataset; at most all"
    )
    partition: str = Field(
        "dirichlet",
        description="how the data are divided among clients: dirichlet, iid, natural, shards, n_way, quantity, "
        "dir_balanced, dir_feddf, dir_fedkf, dir_fedgen or dir_client_prior; default for data that name their clients: "
        "natural",
    )
    clients: int = Field(
        20, ge=0, description="number of clients; 0: as many as the data name; default with natural: 0"
    )
    alpha: float = Field(
        ALPHA, gt=0, description="Dirichlet concentration: 100 is nearly even, 0.1 is very heterogeneous"
    )
    min_size: int = Field(-1, ge=-1, description="fewest samples a client may get; -1: the partition's own")
    shards_per_client: int = Field(2, ge=1, description="shards, of about one class each, that a client gets (shards)")
    ways: int = Field(3, ge=1, description="classes that a client has, about (n_way)")
    shots: int = Field(100, ge=1, description="samples that it has of each, about (n_way)")
    ways_spread: int = Field(2, ge=0, description="how far a client's classes and samples may lie from these (n_way)")
    size_sigma: float = Field(0.0, ge=0, description="log-normal spread of the clients' sizes (dir_client_prior)")
    min_share: float = Field(0.5, ge=0, lt=1, description="smallest share of a mean client's size (dir_feddf)")
    ratio: float = Field(0.5, gt=0, le=1, description="share of the data used (dir_fedgen)")
    samples_per_client: int = Field(0, ge=0, description="samples a client keeps at most; 0: all")
    test_fraction: float = Field(0.2, ge=0, lt=1, description="share of a client's data held out for its own test")
    local_test: Literal["split", "matched", "shared", "own"] = Field(
        "split",
        description="a client's test data: split from its own, drawn from the test set in the same proportions, "
        "1/clients of the test samples of each class it has, or those of the test set that the data say are its own",
    )
    validation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of each client's training samples, and of the server's, held out to choose by; every "
        "evaluation then has val_accuracy, val_amp, val_wlp and so on",
    )
    # model
    model: str = Field(
        IMAGE_MODEL,
        description="network: lenet5, resnet8, resnet8-w64, resnet11, resnet18, resnet20, resnet32, resnet50, "
        "shufflenetv2, cnn, mlp; of text transformer, bag, lstm, distilbert; or file.py:function; default on text: "
        "transformer, on tables: mlp",
    )
    model_options: dict[str, Any] = Field(
        default_factory=dict,
        description="options of the network; feature_size gives any network penultimate features of that size",
    )
    models: Names = Field(
        default_factory=list,
        description="instead of model: networks dealt to the clients in turn, lenet5,cnn,resnet8; one that stands "
        "there twice goes to twice as many",
    )
    group: list[GroupSettings] = Field(
        default_factory=list, description="instead of models: which clients have which network"
    )
    augment: str = Field(
        "", description='random changes of training images, e.g. "crop,flip" or "flip,rotate:15,scale:0.8-1.0"'
    )
    buffers: BufferPolicy = Field(
        "average", description="BatchNorm statistics: average them, keep them local, or drop them"
    )
    # training
    rounds: int = Field(30, ge=1, description="communication rounds")
    participation: float = Field(0.2, gt=0, le=1, description="share of the clients that are active in a round")
    epochs: int = Field(5, ge=1, description="local epochs a round")
    local_unit: Literal["epochs", "equal_steps"] = Field(
        "epochs", description="an epoch is a pass over the client's data, or the same number of steps for all"
    )
    batch_size: int = Field(32, ge=1, description="local batch size")
    optimizer: Literal["sgd", "adam"] = Field(
        "sgd", description="local optimiser; default on text, if lr is not set: adam"
    )
    lr: float = Field(
        0.05,
        gt=0,
        description="local learning rate; default, if optimizer is not set, on text: 0.001, on tables: 0.1",
    )
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on lr after each round")
    momentum: float = Field(0.0, ge=0, lt=1, description="local momentum (sgd)")
    weight_decay: float = Field(0.0, ge=0, description="local weight decay")
    decay_norms: bool = Field(True, description="weight decay also of normalisation layers")
    clip: float = Field(0.0, ge=0, description="largest gradient norm; 0: no clipping")
    class_weight: str | dict[str, float] = Field(
        "",
        description="how much a sample of each class counts in the clients' loss: balanced, inversely to how many all "
        "clients have; or a number for each class, {no = 1, yes = 70}",
    )
    precision: Precision = Field(
        "float32", description="number format of passes through the network; weights stay in float32"
    )
    # regions
    regions: int = Field(
        1,
        ge=1,
        description="regions, each a federation of its own until the end of an episode; 1: none; default with f2l: 3",
    )
    rounds_per_episode: int = Field(5, ge=1, description="rounds after which the regions' models are merged")
    fixed_regions: bool = Field(True, description="clients stay in their region; else they are dealt anew each episode")
    region: list[RegionSettings] = Field(default_factory=list, description="what single regions have of their own")
    save_teachers: bool = Field(False, description="keep the regions' models of each episode, for 'fedstill reteach'")
    late_clients: int = Field(0, ge=0, description="clients, the last ones, that are not there from the start")
    late_from: int = Field(1, ge=1, description="first round of the late clients")
    # attacks
    attack: AttackKind = Field("", description="what malicious clients do: to their labels, or to what they send")
    attackers: int = Field(0, ge=0, description="number of malicious clients, drawn among those that have data")
    attack_class: int = Field(
        0, ge=0, description="class that malicious clients give to all their samples (label-flip)"
    )
    attack_scale: float = Field(
        1.0,
        ge=-1e30,
        le=1e30,
        description="noise: its spread over each layer's own; scale: the factor on the update; sign-flip, count, ipm: "
        "minus that factor; alie: spreads from the honest mean; buffers, extra: the number that is sent",
    )
    # running
    seed: int = Field(0, ge=0, description="the same seed gives the same bits")
    engine: Literal["process", "inline", "ray"] = Field(
        "process",
        description="where clients run: worker processes, inline in this one (to debug), or workers on a Ray cluster",
    )
    workers: int = Field(
        0, ge=0, description="worker processes, and threads for a server's predictions; 0: one a core; not on a GPU"
    )
    ray_address: str = Field(
        "",
        description="where the Ray cluster is, such as 10.0.0.1:6379, or auto for that of this machine; none: "
        "RAY_ADDRESS, else one is started on this machine",
    )
    worker_gpus: float = Field(
        0.0, ge=0, le=1, description="ray: what each worker has of a GPU; 0.25: four share one; 0: they use the CPU"
    )
    device: str = Field(
        "cpu",
        description="where to compute: cpu, cuda, cuda:1 and so on, or auto (a GPU if there is one); on a GPU all work "
        "is done in this process",
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
    secure_aggregation: bool = Field(
        False,
        description="the server gets only the sum of a round's updates, all counting alike: of sites under masks that "
        "cancel in it, in a simulation with the same rounding",
    )
    max_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="served: the largest share of all samples (and tests) that a site counts with; 0: 0.75 of three "
        "sites, 0.6 of four, half of more; 1: no limit",
    )
    metrics: list[str] = Field(
        default_factory=list,
        description="metrics beyond accuracy, such as auroc,ece or file.py:function of labels and probabilities; "
        "balanced_accuracy and macro_f1 are always there, but of sites' own tests only if named here",
    )
    select: str = Field(
        "", description="keep the model of the round that is best by this number, such as val_amp: best.safetensors"
    )
    restore_best: bool = Field(False, description="the run's model is that of the best round, by select")
    patience: int = Field(
        0, ge=0, description="stop after so many evaluations in which select did not improve; 0: never"
    )
    min_delta: float = Field(0.0, ge=0, description="smallest change of select that is an improvement, to stop by")
    target_accuracy: float = Field(0.0, ge=0, le=1, description="accuracy whose first round is reported; 0: none")
    hyper: dict[str, Any] = Field(default_factory=dict, description="the method's own settings")

    @field_validator("metrics", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        """`auroc,ece`, as on the command line, is a list."""
        return [name.strip() for name in given.split(",") if name.strip()] if isinstance(given, str) else given

    @field_validator("class_weight", mode="plain")
    @classmethod
    def _weights(cls, given: Any) -> Any:
        if given in ("", "balanced"):
            return given
        if isinstance(given, dict) and all(type(n) in (int, float) and 0 < n < math.inf for n in given.values()):
            return {str(name): float(number) for name, number in given.items()}
        raise ValueError("should be 'balanced', or a table with a number above 0 for each class, {no = 1, yes = 70}")

    @field_validator("engine", mode="before")
    @classmethod
    def _engine(cls, given: Any) -> Any:
        if given == "flower":
            raise ValueError("Flower's simulation engine has given way to 'ray': the same bits, on a cluster too")
        return given

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: Any) -> Any:
        """Runs of before 0.2 call the accuracy to reach `target`."""
        if isinstance(given, dict) and isinstance(given.get("target"), int | float):
            return {k: v for k, v in given.items() if k != "target"} | {"target_accuracy": given["target"]}
        return given

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """The method, and the settings that are not the defaults."""
        for name, value in super().__repr_args__():
            field = type(self).model_fields.get(name or "")
            if name == "method" or field is None or value != field.get_default(call_default_factory=True):
                yield name, value

    @property
    def flat(self) -> bool:
        """Whether there are no regions."""
        return self.regions == 1 and not self.region

    @property
    def same_network(self) -> bool:
        """Whether all clients have one network."""
        return not (self.models or self.group or self.regional_networks)

    @property
    def regional_networks(self) -> bool:
        """Whether regions have networks of their own."""
        return any(own.model or own.model_options for own in self.region)

    @property
    def network_names(self) -> str:
        """What readers are told of the network, or the networks."""
        return ", ".join(dict.fromkeys(group.name or group.model for group in self.each_group())) or self.model

    def each_group(self) -> list[GroupSettings]:
        """The groups of clients by their networks; none if all have the same."""
        if self.models and self.group:
            raise SettingError("models and [[group]] both say which clients have which network; leave one out")
        if self.regional_networks:
            named = [(own.name or f"region {i}", own) for i, own in enumerate(self.region, 1)]
            tables = [{"name": n, "model": r.model or self.model, "model_options": r.model_options} for n, r in named]
            return [GroupSettings.model_validate(table) for table in tables]
        return self.group or [GroupSettings.model_validate({"model": name}) for name in dict.fromkeys(self.models)]

    def each_region(self) -> list[RegionSettings]:
        """What each region has of its own, if anything."""
        return self.region or [RegionSettings.model_validate({})] * self.regions

    def toml(self, *, comments: bool = False) -> str:
        """The configuration as TOML, all settings written out; with `comments`, each with its meaning."""
        text = tomli_w.dumps(_writable(self.model_dump()))
        if not comments:
            return text
        from fedstill.methods import registry  # only now: it is heavy

        own = {parameter.name: parameter.meaning for parameter in registry.hyper_parameters(self.method)}
        settings, table, hyper = text.partition("[hyper]\n")
        commented = map(_commented, [*settings.splitlines(keepends=True), table])
        return "".join([*commented, *(_own_commented(line, own) for line in hyper.splitlines(keepends=True))])


# Settings of the data partition: of no use where the data are divided already.
DIVISION = {
    *("fraction", "imbalance_factor", "pool", "partition", "clients", "alpha", "min_size", "shards_per_client"),
    *("ways", "shots", "ways_spread", "size_sigma", "min_share", "ratio"),
    *("samples_per_client", "test_fraction", "local_test"),
}
# Settings that a run may be resumed with another value of: they do not change what is computed, but for
# rounding (device, together) and for which answers of sites are refused (min_clients, max_update_ratio).
CHANGEABLE = {
    "rounds",
    "workers",
    "engine",
    "ray_address",
    "worker_gpus",
    "device",
    "together",
    "eval_every",
    "checkpoint_every",
    "keep_checkpoints",
    "min_clients",
    "round_retries",
    "max_update_ratio",
    "target_accuracy",
    "metrics",
    "data_dir",
    "save_teachers",
    "save_models",
}
# Settings that may differ between two runs whose numbers are the same.
IRRELEVANT = CHANGEABLE - {"rounds", "eval_every", "metrics"}


def meaning(field: FieldInfo) -> str:
    """What a setting means, with its default and its bounds.

    >>> meaning(Config.model_fields["epochs"])
    'Local epochs a round. [default: 5; at least 1]'
    """
    text = field.description or ""
    default = "" if field.default_factory or field.default == "" else f"default: {field.default}"
    limits = "; ".join(part for part in (default, bounds(field)) if part)
    return f"{text[:1].upper()}{text[1:]}." + (f" [{limits}]" if limits else "")


def bounds(field: FieldInfo) -> str:
    """What values a setting may have, in words; empty: any of its type."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(value or "none" for value in get_args(field.annotation))
    return ", ".join(
        words.format(getattr(bound, key))
        for bound in field.metadata
        for key, words in _BOUNDS.items()
        if hasattr(bound, key)
    )


def fixed(config: Config) -> dict[str, str]:
    """The settings that must stay the same while a run goes on, as text."""
    return {name: repr(value) for name, value in config.model_dump().items() if name not in CHANGEABLE}


def _commented(line: str) -> str:
    """A line of TOML below what its setting means; inside tables, settings are not those of the run."""
    name = line.partition(" = ")[0].strip("[]\n")
    field = Config.model_fields.get(name)
    return f"# {meaning(field)}\n{line}" if field else line


def _own_commented(line: str, meanings: Mapping[str, str]) -> str:
    """The same for a method's own setting."""
    text = meanings.get(line.partition(" = ")[0].strip('"'), "")
    return f"# {text[:1].upper()}{text[1:]}.\n{line}" if text else line


def _writable(node: Any) -> Any:
    """What TOML can say of a value: None is left out, an object of the user's own is named."""
    if isinstance(node, Mapping):
        return {str(k): _writable(v) for k, v in node.items() if v is not None}
    if isinstance(node, list | tuple):
        return [_writable(v) for v in node if v is not None]
    if isinstance(node, PurePath):
        return str(node)
    return node if isinstance(node, bool | int | float | str) else f"<{type(node).__name__}>"
