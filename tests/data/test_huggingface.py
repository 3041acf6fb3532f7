"""Datasets of the Hugging Face library: as objects, saved to disk, and by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedstill
from fedstill import DataError, from_huggingface
from fedstill.building.config import anchored, resolve
from fedstill.building.setup import prepare
from fedstill.data import load

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_OFFLINE", "1")
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))


def pictures(count: int = 20, sizes: tuple[tuple[int, int], ...] = ((6, 5),)) -> Any:
    """Pictures whose level tells their class, with the ward they come from."""
    images = [Image.new("L", sizes[n % len(sizes)], 40 + 160 * (n % 2)) for n in range(count)]
    columns = {
        "image": images,
        "label": [n % 2 for n in range(count)],
        "ward": [f"ward {n % 3}" for n in range(count)],
        "note": ["seen"] * count,
    }
    names = datasets.ClassLabel(names=["dark", "light"])
    features = datasets.Features(
        image=datasets.Image(), label=names, ward=datasets.Value("string"), note=datasets.Value("string")
    )
    return datasets.Dataset.from_dict(columns, features)


def reviews(count: int = 20) -> Any:
    texts = [f"{('awful', 'good')[n % 2]} film number {n}" for n in range(count)]
    return datasets.Dataset.from_dict({"body": texts, "stars": [1 + 4 * (n % 2) for n in range(count)]})


def test_pictures_have_their_class_names_their_owners_and_their_pixels() -> None:
    data = from_huggingface(pictures(), client="ward")
    assert data.classes == ("dark", "light")
    assert data.client_names == ("ward 0", "ward 1", "ward 2")
    assert tuple(data.shape) == (1, 5, 6)
    assert data.train.x[:, 0, 0, 0].tolist() == [40 + 160 * int(y) for y in data.train.y]
    assert (len(data.train), len(data.test)) == (16, 4)


def test_pictures_of_different_sizes_get_the_most_common_one() -> None:
    data = from_huggingface(pictures(sizes=((6, 5), (6, 5), (9, 9))))
    assert (tuple(data.shape), data.original_size) == ((1, 5, 6), "of 2 sizes, mostly 6x5,")
    assert tuple(from_huggingface(pictures(), image_size=8).shape) == (1, 8, 8)


def test_a_selection_in_another_order_is_read_in_its_own_order() -> None:
    some = pictures().select([3, 0, 1, 2, 4, 6, 8])
    data = from_huggingface(datasets.DatasetDict(train=some, test=some))
    assert data.train.y.tolist() == [1, 0, 1, 0, 0, 0, 0]
    assert data.train.x[:, 0, 0, 0].tolist() == [200, 40, 200, 40, 40, 40, 40]


def test_the_test_split_tests_or_else_the_validation_split_or_else_a_fifth() -> None:
    whole = pictures()
    data = from_huggingface(datasets.DatasetDict(train=whole, validation=pictures(6), test=pictures(8)))
    assert (len(data.train), len(data.test), data.notes) == (20, 8, ())
    unlabelled = pictures(8).remove_columns("label").add_column("label", [-1] * 8)
    data = from_huggingface(datasets.DatasetDict(train=whole, validation=pictures(6), test=unlabelled), name="wards")
    assert (len(data.test), data.notes) == (6, ("the validation split of wards is the test set",))
    assert len(from_huggingface(datasets.DatasetDict(only=whole)).test) == 4


def test_texts_become_tokens_and_labels_that_are_numbers_name_their_classes() -> None:
    data = from_huggingface(reviews(), text="body", label="stars", max_length=16)
    assert data.classes == ("1", "5")
    assert (tuple(data.shape), data.vocabulary > 0, bool(data.tokenizer)) == ((16,), True, True)
    result = fedstill.run(
        data=data, model="bag", lr=0.05, optimizer="adam", clients=2, partition="iid", rounds=2, participation=1.0,
        engine="inline",
    )  # fmt: skip
    assert result.records[-1]["accuracy"] == 1.0


def test_columns_of_arrays_are_samples_too() -> None:
    features = datasets.Features(image=datasets.Array2D((4, 3), "uint8"), label=datasets.Value("string"))
    x = np.random.default_rng(0).integers(0, 256, (10, 4, 3), np.uint8)
    split = datasets.Dataset.from_dict({"image": x, "label": ["a", "b"] * 5}, features)
    data = from_huggingface(datasets.DatasetDict(train=split, test=split), image="image")
    assert data.train.x.shape[0] == 10
    assert data.classes == ("a", "b")


def test_an_object_is_taken_as_data_of_a_run() -> None:
    result = fedstill.run(data=pictures(), model="mlp", clients=2, partition="iid", rounds=1, engine="inline")
    assert result.summary["rounds"] == 1


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (reviews, {"text": "nope"}, r"no column 'nope'; there are body .string., stars .int64."),
        (reviews, {"text": "body"}, r"which column has the labels .label, --label-column."),
        (reviews, {"label": "stars", "client": "x"}, "no column 'x'"),
        (lambda: reviews().select([]), {}, "no samples"),
        (lambda: reviews().to_iterable_dataset(), {}, "without streaming=True"),
        (lambda: datasets.DatasetDict(a=reviews(), b=reviews()), {}, "none of the splits is called train"),
        (lambda: datasets.Dataset.from_dict({"a": [1.0], "label": [1]}), {}, "from_frame.dataset.to_pandas"),
        (
            lambda: datasets.Dataset.from_dict({"text": ["a", None], "label": [1, 2]}),
            {},
            "column 'text' is not text throughout: one of its values is NoneType",
        ),
        (
            lambda: datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, None]}),
            {},
            "1 of 2 samples have no label",
        ),
        (lambda: [1, 2], {}, "a list was given; a datasets.Dataset or DatasetDict is needed"),
        (pictures, {"image": "image", "text": "note"}, "give image or text"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(make: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        from_huggingface(make(), **given)
    assert "\n" not in str(caught.value)


def test_a_folder_saved_to_disk_is_data_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.DatasetDict(train=reviews(30), test=reviews(10)).save_to_disk(tmp_path / "reviews")
    pictures().save_to_disk(tmp_path / "wards")
    monkeypatch.chdir(tmp_path)
    settings = {"data": "hf:./reviews", "text_column": "body", "label_column": "stars"}
    config = resolve(settings)
    assert (config.model, config.optimizer) == ("transformer", "adam")
    dataset = prepare(resolve(settings | {"clients": 2, "partition": "iid"})).federation.dataset
    assert (dataset.name, len(dataset.train), len(dataset.test)) == ("reviews", 30, 10)
    assert anchored(config).data == f"hf:{tmp_path / 'reviews'}"
    wards = resolve({"data": "hf:wards", "client_column": "ward", "model": "mlp"})
    assert wards.partition == "natural"
    assert prepare(wards).federation.client_names == ("ward 0", "ward 1", "ward 2")


def test_a_name_that_cannot_be_had_is_one_line() -> None:
    with pytest.raises(DataError, match=r"^hf:no-such-dataset cannot be loaded: .* FEDSTILL_OFFLINE is set") as caught:
        load("hf:no-such-dataset")
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"hf:\./nowhere: there is no folder \./nowhere"):
        load("hf:./nowhere")


def test_a_folder_that_was_not_saved_by_the_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be loaded") as caught:
        load(f"hf:{tmp_path}")
    assert "\n" not in str(caught.value)
