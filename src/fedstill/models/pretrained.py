"""DistilBERT, and other encoders of the transformers library, with or without LoRA."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedstill.core.errors import SettingError
from fedstill.core.files import home_path
from fedstill.models.base import Classifier
from fedstill.models.checks import whole
from fedstill.models.text import trimmed

DISTILBERT = "distilbert/distilbert-base-uncased"
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
ADAPTED = ("q_lin", "v_lin", "query", "value")  # what DistilBERT, and BERT and its like, call queries and values


class Pretrained(Classifier):
    """An encoder with the classifier of DistilBERT: what it says of the first token, a layer with ReLU, the logits."""

    def __init__(self, encoder: nn.Module, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.layer = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(width, classes)
        self.feature_dim = width

    def features(self, x: Tensor) -> Tensor:
        tokens, real = trimmed(x)
        states = self.encoder(input_ids=tokens, attention_mask=real.long()).last_hidden_state
        features: Tensor = self.layer(states[:, 0])
        return features


def distilbert(
    shape: Sequence[int],
    classes: int,
    vocabulary: int,
    *,
    pretrained: str = DISTILBERT,
    dropout: float = 0.2,
    lora: int = 0,
    lora_alpha: int = 16,
) -> Classifier:
    """DistilBERT, or another encoder: `pretrained` is a folder or a name on the hub.

    A folder with a config.json and no weights gives an encoder that has learnt nothing. With `lora`, a rank, the
    encoder is frozen, and what is trained, sent and kept is LoRA's matrices (scaled by lora_alpha/lora), the layer
    above and the classifier.
    """
    peft = _library("peft") if whole("lora", lora, 0) else None
    loaded = _loaded(pretrained, _state(pretrained))
    config: Any = loaded.config if isinstance(loaded, nn.Module) else loaded
    if config.vocab_size < vocabulary:
        raise SettingError(
            f"{pretrained} knows {config.vocab_size} tokens, and the text's tokenizer has {vocabulary}; "
            "set tokenizer to its own, or vocabulary if it has learnt nothing"
        )
    if config.max_position_embeddings < shape[0]:
        raise SettingError(f"{pretrained} reads {config.max_position_embeddings} tokens at most; set max_length")
    if not isinstance(loaded, nn.Module):
        encoder = _without_pooler(
            _library("transformers").AutoModel.from_config(config, trust_remote_code=False, dtype=torch.float32)
        )
    elif peft:  # what is frozen is there only once, however many networks share it
        encoder = copy.deepcopy(loaded, {id(p): p for p in loaded.parameters()})
    else:
        encoder = copy.deepcopy(loaded).requires_grad_()  # which a network with LoRA may have switched off
    if peft:
        beside = peft.LoraConfig(r=lora, lora_alpha=whole("lora_alpha", lora_alpha, 1), target_modules=list(ADAPTED))
        try:
            encoder = peft.get_peft_model(encoder, beside)
        except ValueError as error:
            raise SettingError(f"lora: {pretrained} has no layers named {' or '.join(ADAPTED)}") from error
    return Pretrained(encoder, config.hidden_size, classes, dropout)


def has_learnt(pretrained: str) -> bool:
    """Whether there are weights: a folder may have a configuration alone."""
    folder = home_path(pretrained)
    return not folder.is_dir() or any(folder.glob("*.safetensors"))


def _state(name: str) -> tuple[tuple[str, int, int], ...]:
    """What tells whether the files of a folder are those that were read before."""
    folder = home_path(name)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)


@lru_cache(maxsize=1)
def _loaded(name: str, state: object) -> Any:
    """The encoder of that name, read once while its files are in this `state`; its configuration, if that is all."""
    from fedstill.data import download  # late: who builds other networks needs none of what reads data
    from fedstill.data.tokens import HUB_NAME

    library, folder = _library("transformers"), home_path(name)
    library.utils.logging.disable_progress_bar()
    if folder.is_dir():
        _refuse_other_formats(folder)
        return _read(library, name, str(folder), local=True)
    if not HUB_NAME.fullmatch(name):
        raise SettingError(f"pretrained = {name!r}: there is no such folder")
    try:
        return _read(library, name, name, local=True)  # what was fetched before
    except SettingError:
        if not download.allowed():
            raise
    with download.quiet("huggingface_hub"):
        return _read(library, name, name, local=False)


def _refuse_other_formats(folder: Path) -> None:
    """Reading a pickle can run code, and without its weights an encoder would silently know nothing."""
    others = sorted(file.name for file in folder.iterdir() if file.suffix in _OTHER_FORMATS)
    if others and not has_learnt(str(folder)):
        raise SettingError(
            f"pretrained = {str(folder)!r} has its weights in {others[0]} alone, and only safetensors are read; if you "
            "trust the file, load it with the transformers library and save it again with save_pretrained"
        )


def _read(library: Any, name: str, where: str, *, local: bool) -> Any:
    from fedstill.data.tokens import first_line

    options = {"local_files_only": local, "trust_remote_code": False}
    try:
        with torch.random.fork_rng(devices=[]):  # later networks, which find it read, must draw the same weights
            config = library.AutoConfig.from_pretrained(where, **options)
            # Those that transformers can train to fill in masked words; others see what comes before a word, or images.
            if type(config) not in library.MODEL_FOR_MASKED_LM_MAPPING or _decodes(config):
                raise SettingError(
                    f"pretrained = {name!r} is a {config.model_type}, and no encoder of text such as DistilBERT or BERT"
                )
            if not has_learnt(where):
                return config
            model, found = library.AutoModel.from_pretrained(
                where, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **options
            )
    except SettingError:
        raise
    except Exception as error:  # a damaged file, the network, a configuration that makes no sense: of many kinds
        raise SettingError(
            f"pretrained = {name!r} is neither a folder with config.json and model.safetensors nor a name on the hub "
            f"that can be reached: {first_line(error)}"
        ) from error
    if lacking := sorted(key for key in found["missing_keys"] if not key.startswith("pooler.")):
        raise SettingError(f"pretrained = {name!r}: the file lacks {len(lacking)} of the weights, such as {lacking[0]}")
    return _without_pooler(model)


def _decodes(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False))


def _without_pooler(encoder: Any) -> Any:
    """Without the layer that BERT has above its states: nothing here uses it, and many files do not have it."""
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return encoder


def _library(name: str) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return __import__(name)
    except ImportError as error:
        raise SettingError(f"it needs the {name} library: pip install 'fedstill[text]'") from error


def encoder_config(module: nn.Module) -> str:
    """The configuration of the pretrained encoder in a network, as JSON: enough to build it again; empty: it has none.

    >>> encoder_config(nn.Linear(2, 2))
    ''
    """
    found = next((layer.encoder for layer in module.modules() if isinstance(layer, Pretrained)), None)
    if found is None:
        return ""
    config: Any = getattr(found, "get_base_model", lambda: found)().config
    return str(config.to_json_string(use_diff=False))
