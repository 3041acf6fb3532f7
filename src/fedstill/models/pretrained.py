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
from fedstill.models.base import Classifier
from fedstill.models.checks import whole
from fedstill.models.text import trimmed

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
    pretrained: str = "distilbert/distilbert-base-uncased",
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
    loaded = _loaded(pretrained)
    config: Any = loaded.config if isinstance(loaded, nn.Module) else loaded
    if config.vocab_size < vocabulary:
        raise SettingError(
            f"{pretrained} knows {config.vocab_size} tokens, and the text's tokenizer has {vocabulary}; "
            f"set tokenizer={pretrained}"
        )
    if config.max_position_embeddings < shape[0]:
        raise SettingError(f"{pretrained} reads {config.max_position_embeddings} tokens at most; set max_length")
    if not isinstance(loaded, nn.Module):
        encoder = _library("transformers").AutoModel.from_config(config)
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


@lru_cache(maxsize=1)
def _loaded(name: str) -> Any:
    """The encoder of that name, read once; its configuration alone, if that is all there is."""
    from fedstill.data import download  # late: who builds other networks needs none of what reads data

    library, folder = _library("transformers"), Path(name).expanduser()
    library.utils.logging.disable_progress_bar()
    local = folder.is_dir() or not download.allowed()
    where = str(folder) if folder.is_dir() else name
    try:
        with torch.random.fork_rng(devices=[]):  # later networks, which find it read, must draw the same weights
            if folder.is_dir() and not any(folder.glob("*.safetensors")):
                return library.AutoConfig.from_pretrained(where, local_files_only=True)
            # No other format: reading a pickle can run code.
            return library.AutoModel.from_pretrained(where, local_files_only=local, use_safetensors=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SettingError(
            f"pretrained = {name!r} is neither a folder with config.json and model.safetensors nor a name on the hub "
            f"that can be reached: {reason}"
        ) from error


def _library(name: str) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return __import__(name)
    except ImportError as error:
        raise SettingError(f"it needs the {name} library: pip install 'fedstill[text]'") from error
