"""Files to predict of: what the commands read, write and refuse."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import metrics

import fedstill as library
from fedstill.core.errors import DataError
from fedstill.data.dataset import Dataset, Split
from fedstill.data.formats.rows import read_columns
from fedstill.data.preprocessing import Column, TablePreprocessing
from fedstill.inference.evaluation import Evaluation
from support.commandline import fedstill
from support.quick import TINY

DATA = library.load_dataset("fashion-mini")
NAMES = tuple(name.replace("/", " or ") for name in DATA.classes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on images, and images by class and without classes beside it."""
    folder = tmp_path_factory.mktemp("inputs")
    x, y = DATA.train.x[:200, 0].numpy(), np.array(NAMES)[DATA.train.y[:200].numpy()]
    library.run("fedavg", **TINY | {"fraction": 1.0, "data": library.from_arrays(x, y)}, out=folder / "run")
    for i in range(40):
        image, label = Image.fromarray(DATA.test.x[i, 0].numpy()), NAMES[DATA.test.y[i]]
        for file in (folder / "labelled" / label / f"{i}.png", folder / "plain" / f"{i:02}.png"):
            file.parent.mkdir(parents=True, exist_ok=True)
            image.save(file)
    np.savez(folder / "test.npz", x=DATA.test.x[:40, 0].numpy(), y=np.array(NAMES)[DATA.test.y[:40].numpy()])
    return folder / "run"


def table_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_predictions_of_a_folder_are_those_of_the_predictor(run: Path) -> None:
    out = run.parent / "predictions.csv"
    answer = fedstill("predict", run, "--data", run.parent / "plain", "--out", out)
    assert answer.code == 0, answer.err
    rows, predictor = table_of(out), library.load(run)
    files = sorted((run.parent / "plain").iterdir())
    assert [row["file"] for row in rows] == [file.name for file in files]
    assert [row["predicted"] for row in rows] == predictor.predict(files).tolist()
    found = np.array([[float(row[f"p_{name}"]) for name in predictor.classes] for row in rows])
    np.testing.assert_allclose(found, predictor.predict_proba(files), atol=1e-5)


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize("data", ["labelled", "test.npz"])
def test_an_evaluation_has_the_numbers_of_scikit_learn(run: Path, data: str) -> None:
    answer = fedstill("evaluate", run, "--data", run.parent / data, "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    out = run.parent / "again.csv"
    fedstill("predict", run, "--data", run.parent / data, "--out", out)
    rows = table_of(out)
    labels = (
        [row["file"].split("/")[0] for row in rows]
        if data == "labelled"
        else [NAMES[DATA.test.y[int(row["row"]) - 1]] for row in rows]
    )
    predicted = [row["predicted"] for row in rows]
    assert found["samples"] == 40
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(labels, predicted))
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(labels, predicted))
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(labels, predicted, average="macro"))
    matrix = metrics.confusion_matrix(labels, predicted, labels=list(found["recall"]))
    assert [list(row.values()) for row in found["confusion"].values()] == matrix.tolist()
    shown = fedstill("evaluate", run, "--data", run.parent / data)
    assert "40 samples: accuracy" in shown.out
    assert "Sneaker" in shown.out


def test_a_class_without_samples_has_no_recall() -> None:
    found = Evaluation.of(["a", "a"], ["a", "b"], ("a", "b", "c")).as_json()
    assert found["recall"] == {"a": 0.5, "b": None, "c": None}
    assert found["balanced_accuracy"] == 0.5
    assert found["macro_f1"] == pytest.approx((2 / 3 + 0) / 2)  # of a and b, as c has neither samples nor predictions


def test_rows_of_a_table_are_predicted_and_evaluated(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    age = rng.normal(50, 20, (300, 1))
    y = (age[:, 0] > 50).astype(np.int64)
    columns = (Column(name="age", mean=50, std=20),)
    split = Split(torch.from_numpy(age), torch.from_numpy(y))
    data = Dataset("patients", split, split, ("well", "ill"), table=TablePreprocessing(columns=columns))
    settings = TINY | {"data": data, "fraction": 1.0, "lr": 0.5, "participation": 1.0, "epochs": 5}
    result = library.run("fedavg", **settings, out=tmp_path / "run")
    lines = [{"outcome": data.classes[n], "age": a, "name": "-"} for a, n in zip(age[:, 0], y, strict=True)]
    with (tmp_path / "patients.tsv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["outcome", "age", "name"], delimiter="\t")
        writer.writeheader()
        writer.writerows(lines)
    (tmp_path / "patients.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name in ("patients.tsv", "patients.jsonl"):
        answer = fedstill("evaluate", tmp_path / "run", "--data", tmp_path / name, "--target", "outcome", "--json")
        assert answer.code == 0, answer.err
        assert json.loads(answer.out)["accuracy"] == pytest.approx(result.records[-1]["accuracy"], abs=1e-6)
    (tmp_path / "other.csv").write_text("height;weight\n1;2\n")
    answer = fedstill("predict", tmp_path / "run", "--data", tmp_path / "other.csv", "--out", tmp_path / "p.csv")
    assert (answer.code, answer.err) == (2, "error: no column 'age'; there are height, weight\n")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--data", "nowhere"], "there is no file or folder nowhere"),
        (["--data", "{run}/config.toml"], "this model takes images"),
        (["--data", "{run}/checkpoints"], "no image files in it"),
        (["--data", "{run}/../plain"], "there are no labels to compare with (no class folders)"),
        (["--data", "{run}/../test.npz", "--client", "3"], "keeps no model of its own"),
        (["--data", "{run}/../test.npz", "--which", "best"], "unknown model 'best'"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(run: Path, words: list[str], problem: str) -> None:
    answer = fedstill("evaluate", run, *(word.format(run=run) for word in words))
    assert answer.code == 2
    assert problem in answer.err
    assert answer.err.count("\n") == 1


def test_a_label_that_the_model_does_not_know_is_named(run: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=DATA.test.x[:2, 0].numpy(), y=np.array(["Bag", "Hat"]))
    answer = fedstill("evaluate", run, "--data", tmp_path / "x.npz")
    assert "the label 'Hat' (input 2) is none of the model's classes" in answer.err


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", "x,y\n1,a\n2,b\n", {"x": ["1", "2"], "y": ["a", "b"]}),
        ("a.csv", 'x;y\n1;"a;b"\n', {"x": ["1"], "y": ["a;b"]}),
        ("a.tsv", "x\ty\n1,5\ta\n", {"x": ["1,5"], "y": ["a"]}),
        ("a.csv.gz", "x\n1\n", {"x": ["1"]}),
        ("a.jsonl", '{"x": 1}\n\n{"y": "a"}\n', {"x": [1, None], "y": [None, "a"]}),
    ],
)
def test_rows_are_read_by_column(tmp_path: Path, name: str, text: str, expected: dict[str, Any]) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    assert read_columns(path) == expected


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.csv", "x,y\n1\n", "line 2: 1 fields, not 2"),
        ("a.csv", "x,x\n1,2\n", "two columns are called 'x'"),
        ("a.csv", "", "no rows"),
        ("a.csv", "x\na\0\n", "not a file of text"),
        ("a.jsonl", "[1]\n", "line 1: no JSON object"),
        ("a.jsonl", "{\n", "line 1: no JSON"),
    ],
)
def test_rows_that_cannot_be_read_are_one_line(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=problem):
        read_columns(tmp_path / name)


@pytest.mark.slow
def test_texts_are_predicted_from_the_column_that_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    settings = TINY | {"data": "glosses-mini", "model": "bag", "model_options": {}, "image_size": 0}
    library.run("fedavg", **settings, out=tmp_path / "run")
    texts = ["a small animal", "a large town"]
    (tmp_path / "new.csv").write_text("review\n" + "\n".join(texts) + "\n")
    words = ["predict", tmp_path / "run", "--data", tmp_path / "new.csv", "--out", tmp_path / "p.csv"]
    answer = fedstill(*words)
    assert "no column 'text'; --text-column names that of the texts: review" in answer.err
    assert fedstill(*words, "--text-column", "review").code == 0
    found = [row["predicted"] for row in table_of(tmp_path / "p.csv")]
    assert found == library.load(tmp_path / "run").predict(texts).tolist()
