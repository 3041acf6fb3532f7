"""Datasets of the Hugging Face library: objects that users have, names on the hub, folders saved to disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from fedstill.core.errors import DataError, SettingError, in_one_line
from fedstill.core.files import home_path
from fedstill.data import download, tokens
from fedstill.data.dataset import Dataset
from fedstill.data.formats import arrays, images
from fedstill.data.formats.decoded import Array, finish, to_dataset
from fedstill.data.formats.text import Columns, Corpus
from fedstill.data.tokens import TextSettings

PREFIX = "hf:"
_USUAL = {"text": ("text", "sentence"), "image": ("image", "img"), "label": ("label", "labels")}  # names of columns
_TESTS = ("test", "validation")  # splits, whichever is labelled first


def is_name(name: str) -> bool:
    """Whether a name is one on the hub, or a folder saved by the library.

    >>> is_name("hf:ag_news"), is_name("ag-news")
    (True, False)
    """
    return name.startswith(PREFIX)


def is_object(value: object) -> bool:
    """Whether an object is a dataset of the library, which is not imported for that."""
    module = type(value).__module__.partition(".")[0]
    return module == "datasets" and hasattr(value, "column_names")


def is_text(name: str) -> bool:
    """Whether what a name stands for is text."""
    features = _splits(_opened(name), name)[0].features.values()
    pictures = any(type(feature).__name__ == "Image" for feature in features)
    return not pictures and any(getattr(feature, "dtype", "") in _STRINGS for feature in features)


def load(name: str, settings: TextSettings, image_size: int = 0) -> Dataset:
    """The dataset `hf:NAME`, `hf:NAME:CONFIGURATION` or `hf:FOLDER`."""
    called = name.removeprefix(PREFIX).rstrip("/").rpartition("/")[2]
    return _read(_opened(name), settings, image="", name=called, image_size=image_size)


def from_huggingface(
    dataset: Any,
    *,
    image: str = "",
    text: str = "",
    label: str = "",
    client: str = "",
    name: str = "",
    image_size: int = 0,
    tokenizer: str = "",
    vocabulary: int = 8000,
    max_length: int = 128,
) -> Dataset:
    """A dataset from a `datasets.Dataset`, or a `datasets.DatasetDict` with the splits train and test.

    `image` or `text`, `label` and `client` name columns; those that can be guessed need not be named. Without a test
    split, a validation split tests; without either, a fifth of the samples.
    """
    if not is_object(dataset) and not isinstance(dataset, Mapping):
        raise DataError(
            f"from_huggingface: a {type(dataset).__name__} was given; a datasets.Dataset or DatasetDict is needed"
        )
    if image and text:
        raise DataError("from_huggingface: give image or text, whichever the network is to see, not both")
    settings = TextSettings(tokenizer, vocabulary, max_length, columns=Columns(text, label, client))
    return _read(dataset, settings, image=image, name=name or "huggingface", image_size=image_size)


def _read(dataset: Any, settings: TextSettings, *, image: str, name: str, image_size: int) -> Dataset:
    train, tests = _splits(dataset, name)
    columns = settings.columns
    image, text, label = _roles(train, columns, image, name)
    test, notes = None, tuple[str, ...]()
    for split, candidate in tests.items():
        if label in candidate.column_names and not all(value in (-1, None) for value in _values(candidate, label)):
            test, notes = candidate, () if split == "test" else (f"the {split} split of {name} is the test set",)
            break
    y = _labels(train, label, name)
    y_test = None if test is None else _labels(test, label, name)
    feature = train.features[label]
    classes = tuple(map(str, feature.names)) if hasattr(feature, "names") else None  # a ClassLabel
    owner = None if not columns.client else _owners(train, columns.client, name)
    owner_test = _owners(test, columns.client, name) if columns.client and test is not None else None
    if text:
        corpus = Corpus(_texts(train, text, name), y, classes=classes, client=owner, notes=notes)
        if test is not None:
            corpus = replace(corpus, test_texts=_texts(test, text, name), test_labels=y_test, test_client=owner_test)
        own = replace(settings, tokenizer=_tokenizer(settings.tokenizer))
        return to_dataset(tokens.encoded(corpus, name, own), name)
    x, x_test, original = _samples(train, test, image, image_size)
    given = {"x": x, "y": y, "x_test": x_test, "y_test": y_test, "client": owner, "client_test": owner_test}
    found = arrays.decode({key: value for key, value in given.items() if value is not None}, classes, name)
    found = finish(found, image_size)
    return to_dataset(replace(found, notes=notes, original_size=original or found.original_size), name)


def _tokenizer(name: str) -> str:
    return name if not name or name.startswith("{") else tokens.read(name)


# --- splits and columns ---


def _splits(dataset: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """The training split, and those that may test."""
    if isinstance(dataset, Mapping):
        if not dataset:
            raise DataError(f"{name}: no splits")
        if "train" not in dataset and len(dataset) > 1:
            raise DataError(f"{name}: none of the splits is called train; there are {', '.join(map(str, dataset))}")
        training = "train" if "train" in dataset else next(iter(dataset))
        train = dataset[training]
        tests = {split: dataset[split] for split in _TESTS if split in dataset and split != training}
    else:
        train, tests = dataset, {}
    for part in (train, *tests.values()):
        if not hasattr(part, "__len__") or not hasattr(part, "select"):
            raise DataError(f"{name}: a dataset that is streamed cannot be divided; load it without streaming=True")
    if not len(train):
        raise DataError(f"{name}: no samples")
    return train, tests


def _roles(split: Any, columns: Columns, image: str, name: str) -> tuple[str, str, str]:
    """The columns of the images, or else of the texts, and of the labels: as named, else as they can be guessed."""
    features = split.features
    pictures = [column for column, feature in features.items() if type(feature).__name__ == "Image"]
    strings = [column for column, feature in features.items() if getattr(feature, "dtype", "") in _STRINGS]
    labels = [column for column, feature in features.items() if type(feature).__name__ == "ClassLabel"]
    text = columns.text
    if not image and not text:
        image = _only(pictures, _USUAL["image"])
        text = "" if image else _only([column for column in strings if column != columns.label], _USUAL["text"])
    label = columns.label or _only(labels, _USUAL["label"]) or _only(list(features), _USUAL["label"], alone=False)
    there = ", ".join(f"{column} ({_kind(feature)})" for column, feature in list(features.items())[:20])
    for column in filter(None, (image, text, label, columns.client)):
        if column not in features:
            raise DataError(f"{name}: no column {column!r}; there are {there}")
    if not label or not (image or text):
        samples, table = "the images or texts (image or text, --text-column)", ""
        if image or text:
            samples = "the labels (label, --label-column)"
        else:
            table = "; a table of features is for fedstill.from_frame(dataset.to_pandas(), target=…)"
        raise DataError(f"{name}: which column has {samples}? There are {there}{table}")
    return image, text, label


_STRINGS = ("string", "large_string", "string_view")


def _only(columns: Sequence[str], usual: Sequence[str], *, alone: bool = True) -> str:
    """The one column there is, else the one of a usual name; empty: neither."""
    if alone and len(columns) == 1:
        return columns[0]
    return next((name for name in usual if name in columns), "")


def _kind(feature: Any) -> str:
    return str(getattr(feature, "dtype", "") or type(feature).__name__)


def _values(split: Any, column: str) -> list[Any]:
    found = split.select_columns([column])[:][column]
    return list(found)


def _labels(split: Any, label: str, name: str) -> Array:
    values = _values(split, label)
    missing = sum(value is None or (hasattr(split.features[label], "names") and value == -1) for value in values)
    if missing:
        raise DataError(f"{name}: {missing:,} of {len(values):,} samples have no {label}; leave them out")
    return arrays.as_array(values)


def _owners(split: Any, client: str, name: str) -> Array:
    values = _values(split, client)
    if missing := sum(value is None for value in values):
        raise DataError(f"{name}: {missing:,} of {len(values):,} samples have no {client}")
    names = getattr(split.features[client], "names", None)
    return np.array([str(names[value] if names else value) for value in values])


def _texts(split: Any, text: str, name: str) -> list[str]:
    values = _values(split, text)
    if wrong := next((type(value).__name__ for value in values if not isinstance(value, str)), ""):
        raise DataError(f"{name}: column {text!r} is not text throughout: one of its values is {wrong}")
    return values


class _Pictures(Sequence[images.Picture]):
    """The files of a column of images, read one at a time."""

    def __init__(self, split: Any, column: str) -> None:
        self._split, self._column = split, column

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: Any) -> Any:
        file = self._split[int(index)][self._column]
        if file is None:
            raise DataError(f"sample {index} has no {self._column}")
        return file["path"] if file["bytes"] is None else file["bytes"]


def _samples(train: Any, test: Any, image: str, image_size: int) -> tuple[Array, Array | None, str]:
    """Images of both splits at one size, and what their sizes were if they had to be resized."""
    if type(train.features[image]).__name__ != "Image":  # arrays of numbers
        x, x_test = (None if part is None else _array(part, image) for part in (train, test))
        assert x is not None
        return x, x_test, ""
    files = [_Pictures(_undecoded(part, image), image) for part in (train, test) if part is not None]
    size, original = images.chosen_size(*files, image_size=image_size)
    (x, grey), *others = (images.pixels(part, size, resize=True) for part in files)
    if grey and all(other_grey for _, other_grey in others):
        return x[..., :1], others[0][0][..., :1] if others else None, original
    return x, others[0][0] if others else None, original


def _array(split: Any, column: str) -> Array:
    found = np.asarray(split.select_columns([column]).with_format("numpy")[:][column])
    if found.dtype == object:
        raise DataError(f"samples of column {column!r} are not all arrays of one shape")
    kind = getattr(split.features[column], "dtype", "")
    return found.astype(np.uint8) if kind == "uint8" else found  # which the library reads as int64


def _undecoded(split: Any, image: str) -> Any:
    import datasets

    return split.select_columns([image]).cast_column(image, datasets.Image(decode=False))


# --- the hub and the disk ---


def _opened(name: str) -> Any:
    """What a name or a folder stands for."""
    wanted = name.removeprefix(PREFIX)
    called, _, configuration = wanted.partition(":")
    folder = home_path(wanted)
    if not folder.is_dir() and (wanted.startswith((".", "~", "/")) or not tokens.HUB_NAME.fullmatch(called)):
        raise DataError(f"{name}: there is no folder {wanted}, and on the hub no such name")
    try:
        import datasets
    except ImportError as error:
        raise SettingError(f"{name} needs the datasets library: pip install 'fedstill[huggingface]'") from error
    try:
        with _quiet(datasets):
            if folder.is_dir():
                return datasets.load_from_disk(str(folder))
            return _from_hub(called, configuration, online=download.allowed())
    except Exception as error:  # of many kinds, those of the network among them
        reason = f"; {download.why_not()}" if not download.allowed() and not folder.is_dir() else ""
        raise DataError(f"{name} cannot be loaded: {in_one_line(error)}{reason}") from error


@lru_cache(maxsize=1)
def _from_hub(name: str, configuration: str, *, online: bool) -> Any:
    import datasets
    from huggingface_hub import constants

    switches: tuple[Any, ...] = (datasets.config, constants)  # both read HF_HUB_OFFLINE only when they are imported
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    try:
        for switch in switches if not online else ():
            switch.HF_HUB_OFFLINE = True
        return datasets.load_dataset(name, configuration or None)
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Without progress bars, which would run into ours."""
    shown = library.utils.logging.is_progress_bar_enabled()
    library.utils.logging.disable_progress_bar()
    try:
        with download.quiet("datasets"):
            yield
    finally:
        if shown:
            library.utils.logging.enable_progress_bar()
