"""Everything that a prediction needs beside the weights, as data: `model.json`, and the metadata of model files."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedstill.building.config import Config, anchored, is_object
from fedstill.building.task import Network, make_network
from fedstill.core import custom
from fedstill.core.choices import BufferPolicy, Precision
from fedstill.core.errors import DataError, SettingError, in_one_line
from fedstill.data.preprocessing import Preprocessing
from fedstill.methods import registry
from fedstill.methods.base import Method
from fedstill.models.base import Classifier, Wrapped, frozen_digest
from fedstill.models.norms import drop_statistics
from fedstill.models.pretrained import encoder_config
from fedstill.train.task import Task

METADATA = "fedstill"  # the key in a model file's header
OWN = "own"  # what a client's own model is called
_COLUMNS = ("text_column", "label_column", "split_column")


class GroupNetwork(BaseModel):
    """The network of one group, where clients have different ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    network: str
    options: dict[str, Any] = {}
    encoder: str = Field("", repr=False)
    frozen: str = ""


class ModelDescription(BaseModel):
    """What a trained model is, and what to do to its inputs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    method: str
    hyper: dict[str, Any] = {}  # the method's settings
    model: str = ""  # which of the method's models this is; empty: the method has no global one
    models: tuple[str, ...] = ()  # all that the run saved
    classes: tuple[str, ...]
    text_column: str = ""  # what the training data called these; empty: text and label, or no file of rows
    label_column: str = ""
    split_column: str = ""
    preprocessing: Annotated[Preprocessing, Field(discriminator="kind")]
    network: str  # a name, file.py:function, or <Class> for an object
    options: dict[str, Any] = {}
    vocabulary: NonNegativeInt = 0
    encoder: str = Field("", repr=False)  # the configuration of a pretrained one, as JSON; its weights are the model's
    changed: bool = False  # whether the method changes the network
    frozen: str = ""  # the digest of weights that were not trained
    precision: Precision = "float32"
    buffers: BufferPolicy = "average"
    groups: dict[str, GroupNetwork] = {}  # where clients have different networks, each group's
    round: NonNegativeInt = 0  # of a best.safetensors: the round that it is the model of

    def of_group(self, name: str) -> ModelDescription:
        """The description of one group's model alone; the same if there are no groups."""
        own = self.groups[name].model_dump() if name in self.groups else {}
        return self.model_copy(update=own | {"groups": {}})

    def as_json(self, exclude: Collection[str] = (), indent: int | None = None) -> str:
        """Without what only some models have, so that others keep their bytes."""
        lacking = {name for name in ("groups", "round") if not getattr(self, name)}
        return self.model_dump_json(exclude={*exclude, *lacking}, indent=indent)

    @property
    def own_network(self) -> bool:
        """Whether the network is the user's: a file or an object."""
        return custom.is_reference(self.network) or is_object(self.network)

    @property
    def code(self) -> dict[str, str]:
        """The files of code that loading the model runs, by what they are."""
        named = {"model": self.network} | ({"method": self.method} if self.changed else {})
        return {what: name for what, name in named.items() if any(map(custom.is_reference, name.split("+")))}


def describe(config: Config, task: Task, method: Method, models: Sequence[str]) -> ModelDescription:
    """What a run on these settings gives; the first of the `models` is the one to use."""
    module, config = task.build().module, anchored(config)
    dataset = task.dataset
    return ModelDescription(
        method=config.method,
        hyper=dict(config.hyper),
        model=next(iter(models), ""),
        models=tuple(models),
        classes=dataset.classes,
        text_column=config.text_column,
        label_column=config.target or config.label_column,
        split_column=config.split_column,
        preprocessing=dataset.preprocessing,
        network=config.model,
        options=dict(config.model_options),
        vocabulary=dataset.vocabulary,
        encoder=encoder_config(module),
        changed=method.needs().changed_model,
        frozen=frozen_digest(module),
        precision=config.precision,
        buffers=config.buffers,
    )


def parse(text: str | bytes, where: object) -> ModelDescription:
    """A description from its JSON; DataError if it is none."""
    try:
        return ModelDescription.model_validate_json(text)
    except ValueError as error:
        raise DataError(f"{where}: this describes no model: {in_one_line(error)}") from error


# --- model files ---


def model_bytes(description: ModelDescription, state: Mapping[str, Tensor]) -> bytes:
    """A model file that can be loaded alone: named tensors, and the description in its header.

    What the training data called their columns is in model.json alone: the same model has the same bytes.
    """
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    return save(tensors, metadata={METADATA: description.as_json(_COLUMNS)})


def read_description(path: Path) -> ModelDescription:
    """The description in a model file's header."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is no model file, or damaged: {in_one_line(error)}") from error
    if METADATA not in metadata:
        raise DataError(f"{path} does not say what network it is of, and what inputs it takes: an earlier version's")
    return parse(metadata[METADATA], path)


# --- networks ---


def build(
    description: ModelDescription, *, model: Network | str | None = None, method: Method | None = None
) -> Classifier:
    """The network, untrained, that the weights belong to; what is the user's own object has to be given."""
    if model is None and is_object(description.network):
        raise SettingError(
            f"the network is one of your own, {description.network}, which no file holds; give it again: model=net, or "
            "model='file.py:function'"
        )
    with _encoder(description) as options:
        net = make_network(
            description.network if model is None else model,
            description.preprocessing.input_shape,
            len(description.classes),
            description.vocabulary,
            options,
        )
    if description.changed:
        net = (method or make_method(description)).network(net)
    return net


def make_method(description: ModelDescription) -> Method:
    """The method that the model was trained by."""
    if is_object(description.method):
        raise SettingError(f"the method is one of your own, {description.method}; give it again: method=…")
    return registry.make(description.method, description.hyper)


def load_weights(
    description: ModelDescription, net: Classifier, tensors: Mapping[str, Tensor], where: object
) -> nn.Module:
    """The user's network, or ours, with these weights, in evaluation mode."""
    module = unwrapped(net)
    if description.buffers != "average":
        drop_statistics(module)
    own = module.state_dict()
    for name in sorted(own.keys() | tensors.keys()):
        if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
            ours, theirs = (tuple(t[name].shape) if name in t else "nothing" for t in (own, tensors))
            raise DataError(f"{where} is not of this network: {name} is {theirs} there and {ours} here")
    module.load_state_dict(dict(tensors))
    if description.frozen and frozen_digest(net) != description.frozen:
        raise DataError(f"{where}: the weights that were not trained are not those that the run began with")
    return module.eval()


def unwrapped(net: Classifier) -> nn.Module:
    """The user's own module, where the network is one."""
    return net.module if isinstance(net, Wrapped) else net


@contextmanager
def _encoder(description: ModelDescription) -> Iterator[dict[str, Any]]:
    """The network's options; a pretrained encoder is made by its configuration, as the weights are in the model."""
    if not description.encoder:
        yield dict(description.options)
        return
    with tempfile.TemporaryDirectory(prefix="fedstill-") as folder:
        Path(folder, "config.json").write_text(description.encoder, encoding="utf-8")
        yield {**description.options, "pretrained": folder}
