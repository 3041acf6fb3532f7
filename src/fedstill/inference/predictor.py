"""A trained model that takes inputs as people have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedstill.core.kernels import protect
from fedstill.data.preprocessing import Preprocessing
from fedstill.inference.description import ModelDescription
from fedstill.models.base import as_classifier
from fedstill.train.evaluate import logits, split_for_evaluation


class Preprocessed(nn.Module):
    """A network behind the preprocessing of its inputs: encoded samples in, logits out."""

    def __init__(self, network: nn.Module, description: ModelDescription) -> None:
        super().__init__()
        self.network = as_classifier(network)
        self.network.precision = torch.bfloat16 if description.precision == "bfloat16" else None
        self.preprocessing: Preprocessing = description.preprocessing

    def forward(self, x: Tensor) -> Tensor:
        return logits(self.network, self.preprocessing.normalise(x))


class Predictor:
    """A trained model: `predict` gives the names of classes, `predict_proba` their probabilities.

    Both take raw inputs, one or many: images as arrays of any size and layout (pixels of 0 to 255, or floats of 0 to
    1), as PIL images or as paths of files; rows of a table by the names of the columns (a DataFrame, a dict, a list of
    dicts); strings. `module` is a plain `nn.Module` that takes what `encode` gives.
    """

    def __init__(self, network: nn.Module, description: ModelDescription) -> None:
        protect(network)
        self.description = description
        self.module = Preprocessed(network, description).eval()

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the probabilities."""
        return self.description.classes

    def encode(self, raw: Any) -> Tensor:
        """Raw inputs as a batch for `module`: images at its size, rows as numbers, texts as tokens."""
        return self.description.preprocessing.encode(raw)

    def predict(self, raw: Any) -> npt.NDArray[np.str_]:
        """The class of each input, (N,)."""
        found: npt.NDArray[np.str_] = np.array(self.classes)[self._logits(raw).argmax(1).numpy()]
        return found

    def predict_proba(self, raw: Any) -> npt.NDArray[np.float64]:
        """The probability of each class for each input, (N, classes)."""
        found: npt.NDArray[np.float64] = self._logits(raw).double().softmax(1).numpy()
        return found

    @torch.inference_mode()
    def _logits(self, raw: Any) -> Tensor:
        parts = list(self._parts(self.encode(raw)))
        return torch.cat(parts) if parts else torch.zeros(0, len(self.classes))

    def _parts(self, x: Tensor) -> Iterator[Tensor]:
        where = next(self.module.parameters()).device
        for batch in split_for_evaluation(x):
            yield self.module(batch.to(where)).float().cpu()

    def __repr__(self) -> str:
        about = self.description
        shape = "x".join(map(str, about.preprocessing.input_shape))
        which = "" if about.model == "model" else f", {about.model}"
        kind = about.preprocessing.kind
        return f"<Predictor: {about.network} by {about.method}{which}; {kind} {shape} -> {len(about.classes)} classes>"
