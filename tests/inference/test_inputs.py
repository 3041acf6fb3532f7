"""Files to predict of: what the commands read, write and refuse."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
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
from fedstill.data.preprocessing import ArrayPreprocessing, Column, ImagePreprocessing, TablePreprocessing
from fedstill.inference.description import ModelDescription
from fedstill.inference.evaluation import Evaluation
from fedstill.inference.inputs import read_inputs
from fedstill.metrics.scores import find
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
    found = Evaluation.of(["a", "a"], np.array([[1.0, 0, 0], [0, 1, 0]]), ("a", "b", "c")).as_json()
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
    assert (answer.code, answer.err) == (2, f"error: {tmp_path}/other.csv: no column 'age'; there are height, weight\n")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--data", "nowhere"], "there is no file or folder nowhere"),
        (["--data", "{run}/config.toml"], "this model takes images"),
        (["--data", "{run}/checkpoints"], "no image files found in <class>/"),
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


TABLE = ModelDescription(
    method="fedavg",
    classes=("0", "1"),
    label_column="ill",
    split_column="part",
    preprocessing=TablePreprocessing(columns=(Column(name="âge"), Column(name="ward", categories=("a", "b;c")))),
    network="mlp",
    encoder="",
)
ROWS = {"âge": [1.5, np.nan, 3.0], "ward": ["a", "b;c", "new"]}
COMMAS = 'âge,ward,ill,part\n1.5,a,0.0,train\n,"b;c",1.0,test\n3,new,1.0,test\n'
OBJECTS = (
    '{"âge": 1.5, "ward": "a", "ill": 0, "x": []}\n\n{"ward": "b;c", "ill": 1}\n{"âge": "3", "ward": "new", "ill": 1.0}'
)


@pytest.mark.parametrize(
    ("name", "text", "encoding"),
    [
        ("a.csv", COMMAS, "utf-8"),
        ("a.csv", COMMAS, "utf-16"),
        ("a.csv", 'âge;ward;ill\n1,5;a;0\n;"b;c";1\n3,0;new;1\n', "cp1252"),  # as German programs write it
        ("a.tsv", "âge\tward\till\n1.5\ta\t0\n\tb;c\t1\n3\tnew\t1\n", "utf-8"),
        ("a.csv", ',âge,ward,ill\n0,1.5,a,0\n1,,"b;c",1\n2,3,new,1\n', "utf-8"),  # an index without a name
        ("a.jsonl", OBJECTS, "utf-8"),
        ("a.csv.gz", COMMAS, "utf-8"),
    ],
)
def test_rows_to_predict_are_read_as_rows_that_train(tmp_path: Path, name: str, text: str, encoding: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode(encoding)) if name.endswith(".gz") else text.encode(encoding))
    found = read_inputs(path, TABLE)
    assert found.labels == ["0", "1", "1"]
    x = TABLE.preprocessing.encode(found.part(0, 3))
    torch.testing.assert_close(x, TABLE.preprocessing.encode(ROWS), equal_nan=True, rtol=0, atol=0)


def test_of_a_table_with_a_split_column_the_test_rows_are_evaluated(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(COMMAS)
    found = read_inputs(tmp_path / "a.csv", TABLE, tests=True)
    assert (found.names, found.labels, found.held_out) == (["2", "3"], ["1", "1"], True)
    assert read_inputs(tmp_path / "a.csv", TABLE).names == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.csv", "âge,ward\n1\n", "line 2: 1 fields, not 2"),
        ("a.csv", "", "no column 'âge'; there are none"),
        ("a.csv", "âge,ward\n", "no rows"),
        ("a.csv", "âge,ward\na\0\n", "not a file of text"),
        ("a.jsonl", "[1]\n", "line 1: not an object"),
        ("a.jsonl", "{\n", "line 1: not JSON"),
    ],
)
def test_rows_that_cannot_be_read_are_one_line(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_bytes(text.encode())
    with pytest.raises(DataError, match=problem):
        read_inputs(tmp_path / name, TABLE)


@pytest.mark.parametrize(
    ("y", "more"),
    [
        (np.array(["no", "yes", "no"]), {}),
        (np.array([0.0, 1.0, 0.0]), {}),  # the model's own numbers
        (np.array([1, 2, 1]), {"classes": np.array(["no", "yes"])}),
    ],
)
def test_labels_of_arrays_are_those_that_training_reads(tmp_path: Path, y: Any, more: dict[str, Any]) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((3, 2)), y=y, **more)
    about = TABLE.model_copy(update={"classes": ("no", "yes"), "preprocessing": ArrayPreprocessing(shape=(2,))})
    assert read_inputs(tmp_path / "x.npz", about).labels == ["no", "yes", "no"]


@pytest.mark.parametrize("layout", ["{}", "train/{}", "clients/north/{}", "test/{}"])
def test_folders_of_images_are_read_in_every_layout_that_trains(tmp_path: Path, layout: str) -> None:
    for label in ("cat", "dog"):
        file = tmp_path / layout.format(label) / "1.png"
        file.parent.mkdir(parents=True)
        Image.new("L", (4, 4)).save(file)
    about = TABLE.model_copy(update={"preprocessing": ImagePreprocessing(shape=(1, 4, 4), mean=(0.5,), std=(0.5,))})
    if layout.startswith("test"):  # beside what trained
        (tmp_path / "train").mkdir()
        shutil.copytree(tmp_path / "test" / "cat", tmp_path / "train" / "cat")
    found = read_inputs(tmp_path, about)
    assert found.labels == ["cat", "dog"]
    assert found.names == [f"{layout.format(label)}/1.png" for label in ("cat", "dog")]


def test_a_dataset_that_has_a_name_gives_its_test_images() -> None:
    shape = ImagePreprocessing(shape=(1, 28, 28), mean=(0.5,), std=(0.5,))
    found = read_inputs(Path("fashion-mini"), TABLE.model_copy(update={"preprocessing": shape}))
    assert found.held_out
    np.testing.assert_array_equal(found.part(3, 5), DATA.test.x[3:5].numpy())
    assert found.labels == [DATA.classes[n] for n in DATA.test.y.tolist()]
    with pytest.raises(library.SettingError, match="only images can be read here"):
        read_inputs(Path("glosses-mini"), TABLE.model_copy(update={"preprocessing": shape}))


def test_an_evaluation_measures_what_is_named() -> None:
    labels, likely = np.array([0, 1, 1, 0]), np.array([0.2, 0.7, 0.3, 0.4])
    names = [("no", "yes")[n] for n in labels]
    found = Evaluation.of(names, np.stack([1 - likely, likely], 1), ("no", "yes"), find(["auroc"], (), 2))
    assert found.as_json()["auroc"] == metrics.roc_auc_score(labels, likely)
    with pytest.raises(DataError, match=r"an empty label \(input 2\) is none of the model's classes: no, yes"):
        Evaluation.of(["no", ""], np.ones((2, 2)) / 2, ("no", "yes"))


@pytest.mark.slow
def test_texts_are_predicted_from_the_column_that_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    settings = TINY | {"data": "glosses-mini", "model": "bag", "model_options": {}, "image_size": 0}
    library.run("fedavg", **settings, out=tmp_path / "run")
    texts = ["a small animal", "a large town"]
    (tmp_path / "new.csv").write_text("review\n" + "\n".join(texts) + "\n")
    words = ["predict", tmp_path / "run", "--data", tmp_path / "new.csv", "--out", tmp_path / "p.csv"]
    answer = fedstill(*words)
    assert "no column 'text'; its first line, which names the columns, has review" in answer.err
    assert fedstill(*words, "--text-column", "review").code == 0
    found = [row["predicted"] for row in table_of(tmp_path / "p.csv")]
    assert found == library.load(tmp_path / "run").predict(texts).tolist()


@pytest.mark.slow
def test_a_run_is_tested_on_the_rows_it_held_out_and_told_when_they_are_those_it_trained_on(tmp_path: Path) -> None:
    ages = np.random.default_rng(0).integers(200, 800, 200).tolist()  # in tenths
    rows = [
        f"{a // 10},{a % 10};{'yes' if a > 500 else 'no'};{'train' if i % 4 else 'test'}" for i, a in enumerate(ages)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["age;ill;part", *rows]))
    settings: dict[str, Any] = {
        "data": str(tmp_path / "t.csv"),
        "target": "ill",
        "clients": 2,
        "rounds": 1,
        "engine": "inline",
    }
    result = library.run("fedavg", **settings, split_column="part", out=tmp_path / "run")
    found = fedstill("evaluate", tmp_path / "run", "--data", tmp_path / "t.csv", "--json")
    assert json.loads(found.out)["accuracy"] == pytest.approx(result.records[-1]["accuracy"], abs=1e-9)
    assert found.err == ""
    library.run("fedavg", **settings, drop_columns=["part"], out=tmp_path / "other")
    told = fedstill("evaluate", tmp_path / "other", "--data", tmp_path / "t.csv", "--json")
    assert json.loads(told.out)["samples"] == 200
    assert told.err.startswith("the run trained on most of these")
