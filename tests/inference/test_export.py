"""Exported graphs give the probabilities of the model that they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill
from fedstill.core.errors import SettingError
from fedstill.data.dataset import Dataset, Split
from fedstill.data.preprocessing import Column, TablePreprocessing
from fedstill.inference.export import export
from support import commandline
from support.quick import TINY

IMAGES: Any = fedstill.load_dataset("fashion-mini").test.x[:9].numpy()


def table() -> Dataset:
    x = torch.tensor([[30.0, 0], [60, 1], [torch.nan, 2], [50, torch.nan]] * 20, dtype=torch.float64)
    split = Split(x, torch.arange(80) % 2)
    columns = (Column(name="age", mean=45, std=12, missing=True), Column(name="ward", categories=("a", "b", "c")))
    return Dataset("patients", split, split, ("well", "ill"), table=TablePreprocessing(columns=columns))


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "mlp": ({}, IMAGES),
    "lenet5": ({"model": "lenet5", "image_size": 0, "model_options": {}}, IMAGES),
    "batch norm": ({"model": "resnet8", "model_options": {"norm": "batch"}}, IMAGES),
    "moon's head": ({"method": "moon"}, IMAGES),
    "text": (
        {"data": "glosses-mini", "model": "transformer", "model_options": {}, "image_size": 0},
        ["a small animal", "food", "a town in the north of a large country with many rivers"],
    ),
    "table": ({"fraction": 1.0}, [{"age": 70, "ward": "b"}, {"age": None, "ward": "?"}, {"age": 20, "ward": "c"}]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_graph_gives_the_same_probabilities(tmp_path: Path, case: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    settings, raw = CASES[case]
    data = {"data": table()} if case == "table" else {}
    chosen = TINY | {"rounds": 1, "method": "fedavg"} | settings | data
    fedstill.run(**chosen, out=tmp_path / "run")
    predictor = fedstill.load(tmp_path / "run")
    expected = predictor.predict_proba(raw)
    for name in ("onnx", "torch"):
        file = tmp_path / ("model.onnx" if name == "onnx" else "model.pt2")
        answer = commandline.fedstill("export", tmp_path / "run", "--format", name, "--out", file)
        assert answer.code == 0, answer.err
    x = predictor.encode(raw)
    x = x.long() if x.dtype == torch.int32 else x
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    found = {count: session.run(["probabilities"], {"input": x[:count].numpy()})[0] for count in (1, len(x))}
    np.testing.assert_allclose(found[len(x)], expected, atol=1e-5)
    np.testing.assert_allclose(found[1], expected[:1], atol=1e-5)
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == list(predictor.classes)
    extra = {"fedstill.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra).module()
    with torch.no_grad():
        np.testing.assert_allclose(program(x).numpy(), expected, atol=1e-5)
        np.testing.assert_allclose(program(x[:1]).numpy(), expected[:1], atol=1e-5)
    assert json.loads(extra["fedstill.json"])["classes"] == list(predictor.classes)


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    options = {"model": "resnet8", "model_options": {"norm": "batch"}, "buffers": "drop", "rounds": 1}
    result = fedstill.run("fedavg", **TINY | options)
    with pytest.raises(SettingError, match="normalises by the batch"):
        export(result.predictor, tmp_path / "model.pt2", "torch")
    with pytest.raises(SettingError, match="format 'tflite': one of onnx, torch"):
        export(result.predictor, tmp_path / "model.tflite", "tflite")
    with pytest.raises(SettingError, match=r"ends in \.pt2"):
        export(result.predictor, tmp_path / "model.onnx", "torch")


@pytest.mark.slow
def test_a_network_that_branches_on_its_data_is_refused_in_one_line(tmp_path: Path) -> None:
    class Branching(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(256, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer(x.flatten(1))
            return found if float(found.detach().sum()) > 0 else 2 * found

    result = fedstill.run("fedavg", **TINY | {"model": Branching(), "model_options": {}, "rounds": 1})
    with pytest.raises(SettingError, match=r"<Branching> cannot be exported: [^\n]*$"):
        export(result.predictor, tmp_path / "model.pt2", "torch")
