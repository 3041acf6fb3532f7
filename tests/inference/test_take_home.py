"""What a run leaves behind predicts raw inputs as well as the run reported, in a process that knows nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedstill
from fedstill.data.dataset import Dataset, Split
from fedstill.data.preprocessing import Column, TablePreprocessing
from support.preloaded import start_python
from support.runs import SMALL

SETTINGS: dict[str, Any] = {k: v for k, v in SMALL.items() if k not in ("image_size", "model", "fraction")}
SETTINGS |= {"rounds": 2, "clients": 3, "participation": 1.0}
ELSEWHERE = """
import json, sys
import fedstill
inputs = json.load(open(sys.argv[2]))
options = {"model": sys.argv[3]} if len(sys.argv) > 3 else {}
predictor = fedstill.load(sys.argv[1], **options)
found = predictor.predict(inputs["raw"])
rows = predictor.predict_proba(inputs["raw"])
assert abs(rows.sum(1) - 1).max() < 1e-9
print(sum(a == b for a, b in zip(found, inputs["labels"], strict=True)) / len(found))
"""


def accuracy_elsewhere(tmp_path: Path, raw: Any, labels: list[str], *options: str) -> float:
    """The accuracy on raw inputs, in a new process that has only the run directory."""
    (tmp_path / "inputs.json").write_text(json.dumps({"raw": raw, "labels": labels}))
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    words, log = ("elsewhere.py", "run", "inputs.json", *options), tmp_path / "elsewhere.log"
    assert start_python(*words, cwd=tmp_path, log=log).wait() == 0, log.read_text()
    return float(log.read_text().splitlines()[-1])


def pixels(count: int, test: int) -> tuple[Any, Any, Any, Any, tuple[str, ...]]:
    data = fedstill.load_dataset("fashion-mini")
    x, y = data.train.x[:count, 0].numpy(), data.train.y[:count].numpy()
    return x, y, data.test.x[:test, 0].numpy(), data.test.y[:test].numpy(), data.classes


def image_folder(tmp_path: Path) -> tuple[Any, list[str], dict[str, Any]]:
    x, y, x_test, y_test, names = pixels(300, 120)
    files, labels = [], []
    for part, images, numbers in (("train", x, y), ("test", x_test, y_test)):
        for i, (image, number) in enumerate(zip(images, numbers, strict=True)):
            label = names[number].replace("/", " or ")
            file = tmp_path / "images" / part / label / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
            if part == "test":
                files.append(str(file))
                labels.append(label)
    return files, labels, {"data": str(tmp_path / "images"), "model": "lenet5"}


def npz(tmp_path: Path) -> tuple[Any, list[str], dict[str, Any]]:
    x, y, x_test, y_test, names = pixels(300, 120)
    np.savez(tmp_path / "mine.npz", x=x, y=y, x_test=x_test, y_test=y_test, classes=np.array(names))
    return x_test.tolist(), [names[n] for n in y_test], {"data": str(tmp_path / "mine.npz"), "model": "cnn"}


def table(tmp_path: Path) -> tuple[Any, list[str], dict[str, Any]]:
    rng = np.random.default_rng(0)
    age, ward = rng.normal(50, 20, 400), rng.integers(0, 3, 400).astype(float)
    y = torch.from_numpy((age + 15 * ward > 65).astype(np.int64))
    age[::7] = np.nan
    wards = ("north", "south", "west")
    columns = (Column(name="age", mean=50, std=20, missing=True), Column(name="ward", categories=wards))
    x = torch.from_numpy(np.stack([age, ward], 1))
    data = Dataset(
        *("patients", Split(x[:300], y[:300]), Split(x[300:], y[300:]), ("well", "ill")),
        table=TablePreprocessing(columns=columns),
    )
    rows = [{"ward": wards[int(w)], "age": None if np.isnan(a) else a} for a, w in x[300:].tolist()]
    return rows, [data.classes[n] for n in y[300:]], {"data": data, "model": "mlp"}


def text(tmp_path: Path) -> tuple[Any, list[str], dict[str, Any]]:
    from fedstill.data.formats.text import glosses
    from fedstill.data.sources import EMBEDDED_TEXT

    corpus = glosses(EMBEDDED_TEXT)
    assert corpus.test_texts
    assert corpus.classes
    assert corpus.test_labels is not None
    return (
        corpus.test_texts,
        [corpus.classes[n] for n in corpus.test_labels],
        {"data": "glosses-mini", "model": "bag", "optimizer": "adam", "lr": 0.01},
    )


def own_network(tmp_path: Path) -> tuple[Any, list[str], dict[str, Any]]:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def net(shape, classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, classes))\n"
    )
    return (*npz(tmp_path)[:2], {"data": str(tmp_path / "mine.npz"), "model": f"{tmp_path}/mine.py:net"})


@pytest.mark.slow
@pytest.mark.parametrize("made", [image_folder, npz, table, text, own_network], ids=lambda made: made.__name__)
def test_raw_inputs_get_the_accuracy_that_the_run_reports(
    tmp_path: Path, made: Callable[[Path], tuple[Any, list[str], dict[str, Any]]]
) -> None:
    if made is text:
        pytest.importorskip("tokenizers")
    raw, labels, settings = made(tmp_path)
    # One evaluation, so that the summary's mean of the last evaluations is the final round's.
    fedstill.run("fedprox", **SETTINGS | settings | {"eval_every": 2}, out=tmp_path / "run")
    reported = json.loads((tmp_path / "run" / "summary.json").read_text())["final_accuracy"]
    assert accuracy_elsewhere(tmp_path, raw, labels) == pytest.approx(reported, abs=1e-6)
    assert reported > 2 / len(set(labels)) / 3


@pytest.mark.slow
def test_a_network_given_as_an_object_is_given_again(tmp_path: Path) -> None:
    raw, labels, settings = own_network(tmp_path)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 10))
    result = fedstill.run("fedavg", **SETTINGS | settings | {"model": net}, out=tmp_path / "run")
    with pytest.raises(fedstill.SettingError, match=r"one of your own, <Sequential>.*give it again"):
        fedstill.load(tmp_path / "run")
    again = fedstill.load(tmp_path / "run", model=net)
    np.testing.assert_array_equal(again.predict_proba(np.array(raw, np.uint8)), result.predict_proba(np.uint8(raw)))
    found = accuracy_elsewhere(tmp_path, raw, labels, f"{tmp_path}/mine.py:net")
    assert found == pytest.approx(result.records[-1]["accuracy"], abs=1e-6)


@pytest.mark.slow
def test_a_pretrained_encoder_is_in_the_model_and_its_folder_is_not_needed(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from fedstill.data import tokens

    shape = {"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 16}
    torch.manual_seed(0)
    transformers.DistilBertModel(transformers.DistilBertConfig(vocab_size=300, **shape)).save_pretrained(
        tmp_path / "encoder"
    )
    texts = ["a plant of the family", "a small animal"] * 9
    (tmp_path / "encoder" / "tokenizer.json").write_text(tokens.trained(texts, 300), encoding="utf-8")
    options = {"pretrained": str(tmp_path / "encoder"), "lora": 2}
    settings = SETTINGS | {"data": "glosses-mini", "max_length": 16, "model": "distilbert", "model_options": options}
    result = fedstill.run("fedavg", **settings, out=tmp_path / "run")
    (tmp_path / "encoder").rename(tmp_path / "elsewhere")
    raw, labels, _ = text(tmp_path)
    found = accuracy_elsewhere(tmp_path, raw, labels)
    assert found == pytest.approx(result.records[-1]["accuracy"], abs=1e-6)
