"""Trained models for other programs: a graph of PyTorch (`.pt2`) or ONNX, the preprocessing's numbers inside.

The graph takes a batch of any size, of what `Predictor.encode` gives, and returns the probabilities of the classes:
images as uint8 (N, C, H, W) at the model's size; rows of a table as float64 (N, columns), a category by its number in
the description and NaN where a value is missing; texts as int64 token numbers (N, length), 0 for padding; other arrays
as float32. The description, with the classes, goes along as metadata.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedstill.core.custom import summary
from fedstill.core.errors import SettingError
from fedstill.core.files import write_atomic
from fedstill.data.preprocessing import ImagePreprocessing, Preprocessing, TablePreprocessing, TextPreprocessing
from fedstill.inference.description import METADATA
from fedstill.inference.predictor import Predictor

SUFFIX = {"onnx": ".onnx", "torch": ".pt2"}  # by format
INPUT, OUTPUT = "input", "probabilities"
_EXTRA_FILE = "fedstill.json"  # in a .pt2


class _Probabilities(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input: Tensor) -> Tensor:
        probabilities: Tensor = self.module(input).float().softmax(1)
        return probabilities


def export(predictor: Predictor, path: Path, format: str) -> None:
    """Write the model as a graph that gives probabilities."""
    check_format(format, path)
    if predictor.description.buffers != "average":
        raise SettingError(
            "this model normalises by the batch it sees (buffers=local or drop), so no graph gives the same for "
            "a single sample; train with buffers=average"
        )
    if format == "onnx":
        _require_onnx()
    module = _Probabilities(copy.deepcopy(predictor.module).cpu()).eval()
    predictor_module: Any = module.module
    predictor_module.network.precision = None  # a graph is in float32
    example = _example(predictor.description.preprocessing)
    try:
        with _quiet():
            program = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
            data = _onnx(program, predictor) if format == "onnx" else _torch(program, predictor)
    except Exception as error:  # torch.export raises of many kinds where a network branches on its data
        raise SettingError(f"{predictor.description.network} cannot be exported: {summary(error)}") from error
    write_atomic(path, data)


def check_format(format: str, path: Path | None) -> None:
    """Refuse a format that there is not, or a name that its readers refuse."""
    if format not in SUFFIX:
        raise SettingError(f"format {format!r}: one of {', '.join(SUFFIX)} is needed")
    if path is not None and path.suffix != SUFFIX[format]:
        raise SettingError(f"{path}: the name of a file of format {format} ends in {SUFFIX[format]}")


def _example(preprocessing: Preprocessing) -> Tensor:
    """Two samples as `encode` gives them: a graph that has seen one would take one only."""
    if isinstance(preprocessing, ImagePreprocessing):
        return torch.zeros(2, *preprocessing.shape, dtype=torch.uint8)
    if isinstance(preprocessing, TextPreprocessing):
        return torch.ones(2, preprocessing.length, dtype=torch.int64)
    if isinstance(preprocessing, TablePreprocessing):
        return torch.zeros(2, len(preprocessing.columns), dtype=torch.float64)
    return torch.zeros(2, *preprocessing.shape, dtype=torch.int64 if preprocessing.tokens else torch.float32)


def _torch(program: Any, predictor: Predictor) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={_EXTRA_FILE: predictor.description.as_json()})
    return file.getvalue()


def _onnx(program: Any, predictor: Predictor) -> bytes:
    made = torch.onnx.export(program, dynamo=True, input_names=[INPUT], output_names=[OUTPUT], verbose=False)
    assert made is not None
    proto = made.model_proto
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    about = predictor.description
    for key, value in (("classes", json.dumps(about.classes)), (METADATA, about.as_json())):
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    found: bytes = proto.SerializeToString()
    return found


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise SettingError("ONNX needs onnx and onnxscript: pip install 'fedstill[export]'") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """What the exporters say about themselves is for their developers."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
