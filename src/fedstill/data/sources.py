"""From a name or a path to a dataset: where files are looked for, what can be known of them, and `load`."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from fedstill.core.errors import DataError, SettingError, unknown
from fedstill.core.files import home_path
from fedstill.data import download, huggingface, tokens
from fedstill.data.cache import cached
from fedstill.data.dataset import Dataset
from fedstill.data.download import Progress
from fedstill.data.formats import arrays, columns, images, leaf, table, text
from fedstill.data.formats.decoded import Decoded, finish, source_file, to_dataset
from fedstill.data.formats.table import TableSettings
from fedstill.data.formats.table import read as read_table
from fedstill.data.formats.text import Columns, Corpus
from fedstill.data.published import SOURCES, Source
from fedstill.data.tokens import TextSettings

EMBEDDED = Path(__file__).parent / "embedded" / "fashion-mini.npz"
EMBEDDED_TEXT = tuple(EMBEDDED.with_name(f"glosses-mini-{part}.csv.gz") for part in ("train", "test"))

_ARRAYS_VERSION = 3  # of what arrays are recognised as
_TEXT_VERSION = 3  # of how texts are divided and encoded


@dataclass(frozen=True)
class Description:
    """One row of the list of datasets."""

    name: str
    train: int
    test: int
    classes: int
    shape: tuple[int, ...]  # empty: text
    origin: str
    found: str  # where the files are, "in the package", or "" if they are not there


def names() -> tuple[str, ...]:
    """Names that `load` knows."""
    return ("fashion-mini", "glosses-mini", *SOURCES)


def is_text(name: str) -> bool:
    """Whether a name stands for text.

    >>> is_text("ag-news"), is_text("./reviews.csv"), is_text("mnist")
    (True, True, False)
    """
    if name in SOURCES:
        return SOURCES[name].texts is not None
    if huggingface.is_name(name):
        return huggingface.is_text(name)
    return name == "glosses-mini" or text.is_table(name) or leaf.kind(home_path(name)) == "text"


def is_table(name: str, target: str = "") -> bool:
    """Whether a name stands for a table: a file of that kind, with a target column named if it could be text.

    >>> is_table("patients.csv", "outcome"), is_table("reviews.csv"), is_table("patients.parquet")
    (True, False, True)
    """
    return table.is_table(name) and (bool(target) or name.lower().endswith(".parquet"))


Kind = Literal["images", "text", "table", "rows"]  # rows: arrays whose samples have one axis


@dataclass(frozen=True)
class Glance:
    """What can be known of data before they are read."""

    kind: Kind = "images"
    owners: bool = False  # whether they say who owns a sample

    @staticmethod
    def of(dataset: Dataset) -> Glance:
        kind: Kind = "table" if dataset.table else "text" if dataset.vocabulary else "images"
        if kind == "images" and len(dataset.shape) == 1:
            kind = "rows"
        return Glance(kind, owners=dataset.train.client is not None)


def glance(name: str, target: str = "", client_column: str = "") -> Glance:
    """What a name or a path says of its data; what cannot be read is found out when it is loaded.

    >>> glance("mnist"), glance("ag-news")
    (Glance(kind='images', owners=False), Glance(kind='text', owners=False))
    """
    path = home_path(name)
    rows = not name or (name in SOURCES and SOURCES[name].table)  # no name: a server that knows only tables' columns
    kind: Kind = "table" if rows or is_table(name, target) else "text" if is_text(name) else "images"
    if not name or name in names() or not path.exists():
        published = name in SOURCES and SOURCES[name].owners
        return Glance(kind, owners=published or (huggingface.is_name(name) and bool(client_column)))
    if path.is_dir():
        return Glance(kind, owners=(path / "clients").is_dir() or bool(leaf.kind(path)))
    try:
        if kind in ("table", "text"):
            header = text.header if kind == "text" else columns.header
            found = ["client"] if client_column else header(path)
            return Glance(kind, owners="client" in [c.lower() if kind == "text" else c for c in found])
        shapes = arrays.shapes(path) if path.suffix == ".npz" else {}
    except (DataError, SettingError):
        return Glance(kind)
    rows = len(shapes.get("x", shapes.get("x_train", ()))) == 2
    return Glance("rows" if rows else kind, bool({"client", "client_train"} & shapes.keys()))


def data_folder(data_dir: str | Path | None = None) -> Path:
    """Where datasets are looked for: the given folder, else FEDSTILL_DATA, else ~/.cache/fedstill/data."""
    return home_path(data_dir or os.environ.get("FEDSTILL_DATA") or "~/.cache/fedstill/data")


def load(
    name: str,
    data_dir: str | Path | None = None,
    image_size: int = 0,
    progress: Progress | None = None,
    text: TextSettings | None = None,
    table: TableSettings | None = None,
) -> Dataset:
    """A dataset by name, or from a path: an `.npz` file, a folder of images, or a `.csv` file, of text or a table.

    Files are looked for in `<data_dir>/<name>/` and in `data_dir` itself, and downloaded if they are in
    neither and FEDSTILL_OFFLINE is not 1. `image_size` resizes images to that many pixels a side; `text` says how
    text becomes numbers, and `table` which column of a table is the label.

    >>> data = load("fashion-mini")
    >>> len(data.train), len(data.test), tuple(data.shape)
    (6000, 1000, (1, 28, 28))
    """
    if image_size < 0:
        raise SettingError(f"image_size is {image_size}; give the pixels of a side, or 0 to keep images as they are")
    if is_table(name, table.target if table else ""):
        return read_table(existing_path(name), table or TableSettings())
    if huggingface.is_name(name):
        settings = text or TextSettings()
        tokenizer = _tokenizer(settings, (), data_folder(data_dir), progress)
        return huggingface.load(name, replace(settings, tokenizer=tokenizer), image_size)
    if is_text(name):
        return _load_text(name, data_folder(data_dir), text or TextSettings(), progress)
    if name == "fashion-mini":
        return to_dataset(_embedded_images(image_size), name)
    if name in SOURCES:
        return _load_named(SOURCES[name], data_folder(data_dir), image_size, progress)
    return _load_path(existing_path(name), image_size)


@lru_cache(maxsize=4)
def _embedded_images(image_size: int) -> Decoded:
    """Kept in memory: small enough, and spares the first run any trace on the disk."""
    return _frozen(finish(arrays.read_npz(EMBEDDED), image_size))


@lru_cache(maxsize=4)
def _embedded_texts(settings: TextSettings) -> Decoded:
    return _frozen(tokens.encoded(text.glosses(EMBEDDED_TEXT), "glosses-mini", settings))


def _frozen(decoded: Decoded) -> Decoded:
    """Arrays that many datasets are made of: each gets a copy."""
    for part in (decoded.train, decoded.test):
        part.x.setflags(write=False)
        part.y.setflags(write=False)
    return decoded


def _load_path(path: Path, image_size: int) -> Dataset:
    """LEAF's images, a folder of image files, or an `.npz`."""
    if leaf.kind(path):
        decoded = cached("leaf", image_size, path, leaf.files(path), lambda: finish(leaf.femnist(path), image_size))
        return to_dataset(decoded, path.resolve().name)
    if path.is_dir():
        tree = images.folder(path)
        decoded = cached(
            "folder",
            (image_size, images.LARGEST),
            path,
            tree.files(),
            lambda: finish(images.decode(tree, image_size, any_size=True), image_size),
        )
        return to_dataset(decoded, path.resolve().name)
    if path.suffix != ".npz":
        raise DataError(
            f"{path}: a dataset is a folder of images, an .npz file, a table of text (.csv, .tsv, .jsonl), or a table "
            "(.csv, .tsv, .parquet) with a target (--target)"
        )
    decoded = cached(
        "npz",
        (_ARRAYS_VERSION, image_size),
        path.parent,
        [source_file(path)],
        lambda: finish(arrays.read_npz(path), image_size),
    )
    return to_dataset(decoded, path.stem)


def existing_path(name: str) -> Path:
    """The file or folder of this name; if there is none, an error that says so, or which names there are."""
    path = home_path(name)
    if path.exists():
        return path
    if not (path.suffix or os.sep in name or name.startswith((".", "~"))):
        here = [entry.name for entry in Path().iterdir()]
        raise unknown("dataset, file or folder", name, [*names(), *difflib.get_close_matches(name, here)])
    if not path.parent.is_dir():
        raise DataError(f"there is no file or folder {name}, nor a folder {path.parent}")
    near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(str(path.parent / other) for other in near)}?" if near else ""
    raise DataError(f"there is no file or folder {name}{hint}")


def describe(data_dir: str | Path | None = None) -> list[Description]:
    """What each name stands for and whether its files are there; nothing is read or downloaded."""
    here = "in the package"
    rows = [
        Description("fashion-mini", 6_000, 1_000, 10, (1, 28, 28), SOURCES["fashion-mnist"].origin, here),
        Description("glosses-mini", 600, 300, 5, (), "https://wordnet.princeton.edu", here),
    ]
    for source in SOURCES.values():
        found = _find(source, data_folder(data_dir))
        where = "" if found is None else str(_root(found))
        rows.append(
            Description(
                *(source.name, source.train, source.test, source.classes, source.shape, source.origin),
                found=where,
            )
        )
    return rows


def _load_named(source: Source, folder: Path, image_size: int, progress: Progress | None) -> Dataset:
    paths = _find(source, folder) or _obtain(source, folder, progress)
    if source.table is not None:
        found = source.table(paths)
        _check_counts(source.name, len(found.train), len(found.test))
        return found
    size, decode = image_size or source.image_size, source.decode
    assert decode is not None
    decoded = cached(source.name, size, _root(paths), source.files(paths), lambda: finish(decode(paths, size), size))
    _check_counts(source.name, len(decoded.train.y), len(decoded.test.y))
    return to_dataset(decoded, source.name)


def _load_text(name: str, folder: Path, settings: TextSettings, progress: Progress | None) -> Dataset:
    paths, read = _corpus(name, folder, progress, labelled=settings.labelled, columns=settings.columns)
    tokenizer = _tokenizer(settings, paths, folder, progress)

    def build() -> Decoded:
        return tokens.encoded(read(), name, replace(settings, tokenizer=tokenizer))

    if name == "glosses-mini":
        return to_dataset(_embedded_texts(replace(settings, tokenizer=tokenizer)), name)
    key = (_TEXT_VERSION, tokenizer or settings.vocabulary, settings.max_length, settings.labelled, settings.columns)
    listed = [source_file(path) for path in paths]
    if name not in SOURCES:
        own = _root(paths).resolve().name if home_path(name).is_dir() else paths[0].name.split(".")[0]
        return to_dataset(cached("table of text", key, _root(paths), listed, build), own)
    decoded = cached(name, key, _root(paths), listed, build)
    _check_counts(name, len(decoded.train.y), len(decoded.test.y))
    return to_dataset(decoded, name)


def _check_counts(name: str, *found: int) -> None:
    """Warn if the files of a published dataset hold another number of samples."""
    source = SOURCES[name]
    if source.train and found != (source.train, source.test):
        warnings.warn(
            f"{name}: the files hold {found[0]:,} + {found[1]:,} samples, the published ones {source.train:,} + "
            f"{source.test:,}; numbers will not be comparable",
            stacklevel=3,
        )


def _corpus(
    name: str,
    folder: Path,
    progress: Progress | None,
    *,
    labelled: bool = True,
    columns: Columns | None = None,
) -> tuple[tuple[Path, ...], Callable[[], Corpus]]:
    """The files that a name of text stands for, and what reads them."""
    if name == "glosses-mini":
        return EMBEDDED_TEXT, lambda: text.glosses(EMBEDDED_TEXT)
    if text.is_table(name):
        path = existing_path(name)
        return (path,), lambda: text.read_table(path, columns, labelled=labelled)
    if name not in SOURCES:
        root = home_path(name)
        return tuple(Path(file.path) for file in leaf.files(root)), lambda: leaf.shakespeare(root)
    source = SOURCES[name]
    paths, read = _find(source, folder) or _obtain(source, folder, progress), source.texts
    assert read is not None
    return tuple(Path(file.path) for file in source.files(paths)), lambda: read(paths)


def _tokenizer(settings: TextSettings, data: tuple[Path, ...], folder: Path, progress: Progress | None) -> str:
    """The tokenizer that the settings name, as JSON; empty: one is to be trained on the data's training texts."""
    named = settings.tokenizer
    if not named or named.startswith("{"):
        return named
    if is_text(named):
        paths, read = _corpus(named, folder, progress, labelled=False, columns=settings.columns)
        if [path.resolve() for path in paths] == [path.resolve() for path in data]:
            return ""
        return tokens.trained(read().texts, settings.vocabulary)
    return tokens.read(named)


def _root(paths: Sequence[Path]) -> Path:
    return Path(os.path.commonpath([path.parent for path in paths]))


def _places(source: Source, folder: Path) -> Iterator[Path]:
    """Folders that may hold a dataset's files."""
    own = [source.name, source.name.replace("-", "_")]
    plain = source.name.replace("-", "")
    bases = [folder / name for name in dict.fromkeys(own)]
    # MNIST and Fashion-MNIST share their file names: a folder named after another dataset is not this one's.
    called = folder.resolve().name.lower().replace("-", "").replace("_", "")
    if called == plain or called not in {name.replace("-", "") for name in SOURCES}:
        bases.append(folder)
    for base in bases:
        for inside in source.inside:
            yield base / inside


def _existing(path: Path) -> Path | None:
    if "*" in path.name:
        return next(iter(sorted(path.parent.glob(path.name))), None)
    return next((p for p in (path, path.with_name(path.name + ".gz")) if p.exists()), None)


def _find(source: Source, folder: Path) -> tuple[Path, ...] | None:
    for place in _places(source, folder):
        for layout in source.layouts:
            found = [_existing(place / name) for name in layout]
            complete = tuple(path for path in found if path is not None)
            if len(complete) == len(layout):
                return complete
    return None


def _obtain(source: Source, folder: Path, progress: Progress | None) -> tuple[Path, ...]:
    """Download what is missing; if that cannot be, the error says what to put where."""
    target = folder / source.name
    reason = ""
    if source.downloads and not download.allowed():
        reason = f" (not downloaded: {download.why_not()})"
    elif source.downloads:
        try:
            for item in source.downloads:
                if not (target / item.file_name).exists():
                    download.fetch(item, target, progress)
            found = _find(source, folder)
            if found is not None:
                return found
        except DataError as error:
            reason = f" ({error})"
    # Name what is missing from the layout that is nearest to complete.
    missing = min(
        (
            [name for name in layout if _existing(place / name) is None]
            for place in _places(source, folder)
            for layout in source.layouts
        ),
        key=len,
    )
    more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
    address = source.downloads[0].url if len(source.downloads) == 1 else source.origin
    raise DataError(
        f"{source.name}: {', '.join(missing[:2])}{more} not found; get it from {address} and put it in {target}{reason}"
    )
