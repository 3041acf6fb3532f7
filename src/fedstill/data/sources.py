"""The datasets known by name, where their files are looked for, and `load`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from fedstill.core.errors import DataError, SettingError, unknown
from fedstill.data import download, tokens
from fedstill.data.cache import cached
from fedstill.data.dataset import Dataset
from fedstill.data.download import Download, Progress
from fedstill.data.formats import arrays, cifar, idx, images, mat, table, text
from fedstill.data.formats.decoded import Decoded, SourceFile, finish, source_file, to_dataset
from fedstill.data.formats.table import TableSettings
from fedstill.data.formats.table import read as read_table
from fedstill.data.formats.text import Columns, Corpus
from fedstill.data.tokens import TextSettings

EMBEDDED = Path(__file__).parent / "embedded" / "fashion-mini.npz"
EMBEDDED_TEXT = tuple(EMBEDDED.with_name(f"glosses-mini-{part}.csv.gz") for part in ("train", "test"))

_ARRAYS_VERSION = 3  # of what arrays are recognised as
_TEXT_VERSION = 3  # of how texts are divided and encoded

Decode = Callable[[tuple[Path, ...], int], Decoded]  # found paths, image size (0: as stored)


def _listed(paths: tuple[Path, ...]) -> list[SourceFile]:
    return [source_file(path) for path in paths]


@dataclass(frozen=True)
class Source:
    """A published dataset: what it holds, which files it comes in, and how they are decoded."""

    name: str
    train: int
    test: int
    classes: int
    shape: tuple[int, ...]  # empty: text
    origin: str  # the page that publishes it
    layouts: tuple[tuple[str, ...], ...]  # each a complete set of paths; any of them, also with .gz, is enough
    decode: Decode | None = None  # of images
    texts: Callable[[tuple[Path, ...]], Corpus] | None = None  # of text
    files: Callable[[tuple[Path, ...]], list[SourceFile]] = _listed
    inside: tuple[str, ...] = ("",)  # folders within the dataset's own that may hold the paths
    downloads: tuple[Download, ...] = ()
    image_size: int = 0  # what images are resized to unless asked otherwise


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
    if name == "glosses-mini" or text.is_table(name):
        return True
    return name in SOURCES and SOURCES[name].texts is not None


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
    path = Path(name).expanduser()
    kind: Kind = "table" if is_table(name, target) else "text" if is_text(name) else "images"
    if name in names() or not path.exists():
        return Glance(kind)
    if path.is_dir():
        return Glance(owners=(path / "clients").is_dir())
    try:
        if table.is_table(name):
            columns = ["client"] if client_column else table.header(path)
            return Glance(kind, owners="client" in [c.lower() if kind == "text" else c for c in columns])
        shapes = arrays.shapes(path) if path.suffix == ".npz" else {}
    except (DataError, SettingError):
        return Glance(kind)
    rows = len(shapes.get("x", shapes.get("x_train", ()))) == 2
    return Glance("rows" if rows else kind, bool({"client", "client_train"} & shapes.keys()))


def data_folder(data_dir: str | Path | None = None) -> Path:
    """Where datasets are looked for: the given folder, else FEDSTILL_DATA, else ~/.cache/fedstill/data."""
    return Path(data_dir or os.environ.get("FEDSTILL_DATA") or "~/.cache/fedstill/data").expanduser()


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
        return read_table(Path(name).expanduser(), table or TableSettings())
    if is_text(name):
        return _load_text(name, data_folder(data_dir), text or TextSettings(), progress)
    if name == "fashion-mini":
        # Small enough to read every time, which spares the first run any trace on the disk.
        return to_dataset(finish(arrays.read_npz(EMBEDDED), image_size), name)
    if name in SOURCES:
        return _load_named(SOURCES[name], data_folder(data_dir), image_size, progress)
    path = Path(name).expanduser()
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
    if path.is_file():
        if path.suffix != ".npz":
            raise DataError(
                f"{path}: a dataset is a folder of images, an .npz file, a .csv file of text, or a table (.csv, .tsv, "
                ".parquet) with a target (--target)"
            )
        decoded = cached(
            "npz",
            (_ARRAYS_VERSION, image_size),
            path.parent,
            [source_file(path)],
            lambda: finish(arrays.read_npz(path), image_size),
        )
        return to_dataset(decoded, path.stem)
    raise unknown("dataset", name, names())


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
    size, decode = image_size or source.image_size, source.decode
    assert decode is not None
    decoded = cached(source.name, size, _root(paths), source.files(paths), lambda: finish(decode(paths, size), size))
    return to_dataset(decoded, _counted(source.name, decoded))


def _load_text(name: str, folder: Path, settings: TextSettings, progress: Progress | None) -> Dataset:
    paths, read = _corpus(name, folder, progress, labelled=settings.labelled, columns=settings.columns)
    tokenizer = _tokenizer(settings, paths, folder, progress)

    def build() -> Decoded:
        found, texts, test_texts = read().divided(name)
        made = tokenizer or tokens.trained(texts, settings.vocabulary)  # which thus knows no word of a test
        train, test = (
            replace(part, x=tokens.encode(made, part_texts, settings.max_length))
            for part, part_texts in ((found.train, texts), (found.test, test_texts))
        )
        return replace(found, train=train, test=test, tokenizer=made)

    if name == "glosses-mini":
        return to_dataset(build(), name)
    is_file = text.is_table(name)
    key = (_TEXT_VERSION, tokenizer or settings.vocabulary, settings.max_length, settings.labelled, settings.columns)
    decoded = cached(
        "table of text" if is_file else name, key, _root(paths), [source_file(path) for path in paths], build
    )
    return to_dataset(decoded, paths[0].name.split(".")[0] if is_file else _counted(name, decoded))


def _counted(name: str, decoded: Decoded) -> str:
    """The name of a published dataset, with a warning if the files hold another number of samples."""
    source, found = SOURCES[name], (len(decoded.train.y), len(decoded.test.y))
    if found != (source.train, source.test):
        warnings.warn(
            f"{name}: the files hold {found[0]:,} + {found[1]:,} samples, the published ones {source.train:,} + "
            f"{source.test:,}; numbers will not be comparable",
            stacklevel=3,
        )
    return name


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
        path = Path(name).expanduser()
        if not path.is_file():
            raise DataError(f"there is no file {path}")
        return (path,), lambda: text.read_table(path, columns, labelled=labelled)
    source = SOURCES[name]
    paths, read = _find(source, folder) or _obtain(source, folder, progress), source.texts
    assert read is not None
    return paths, lambda: read(paths)


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


# --- the list ---


def _of_files(decode: Callable[[Sequence[Path]], Decoded]) -> Decode:
    """A decoder that leaves resizing to `finish`."""
    return lambda paths, _size: decode(paths)


def _cinic10_tree(paths: tuple[Path, ...]) -> images.Tree:
    return images.Tree(paths[0].parent, images.by_class(paths[0]), images.by_class(paths[1]))


_MNIST_FILES = (
    *("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    *("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)


def _mnist_downloads(address: str, *checksums: str) -> tuple[Download, ...]:
    return tuple(Download(f"{address}{n}.gz", md5) for n, md5 in zip(_MNIST_FILES, checksums, strict=True))


def _emnist(split: str, train: int, test: int, classes: tuple[str, ...], first_label: int) -> Source:
    return Source(
        *(f"emnist-{split}", train, test, len(classes), (1, 28, 28)),
        origin="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        layouts=(
            tuple(
                f"emnist-{split}-{part}-{kind}"
                for part in ("train", "test")
                for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
            ),
        ),
        decode=_of_files(partial(idx.decode, classes=classes, first_label=first_label, transposed=True)),
        inside=("", "gzip", "raw"),
        downloads=(
            Download(
                "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                "58c8d27c78d21e728a6bc7b3cc06412e",
                members=f"gzip/emnist-{split}-",
            ),
        ),
    )


def _cifar(name: str, classes: tuple[str, ...], layouts: tuple[tuple[str, ...], ...], archive: str, md5: str) -> Source:
    return Source(
        *(name, 50_000, 10_000, len(classes), (3, 32, 32)),
        origin="https://www.cs.toronto.edu/~kriz/cifar.html",
        layouts=layouts,
        decode=_of_files(partial(cifar.decode, classes=classes)),
        downloads=(Download(f"https://www.cs.toronto.edu/~kriz/{archive}", md5),),
    )


_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")

_AG_NEWS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            *("fashion-mnist", 60_000, 10_000, 10, (1, 28, 28)),
            origin="https://github.com/zalandoresearch/fashion-mnist",
            layouts=(_MNIST_FILES,),
            decode=_of_files(partial(idx.decode, classes=idx.FASHION)),
            inside=("", "raw"),
            downloads=_mnist_downloads(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                *("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe"),
                *("bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"),
            ),
        ),
        Source(
            *("mnist", 60_000, 10_000, 10, (1, 28, 28)),
            origin="https://ossci-datasets.s3.amazonaws.com/mnist/",
            layouts=(_MNIST_FILES,),
            decode=_of_files(partial(idx.decode, classes=idx.DIGITS)),
            inside=("", "raw"),
            downloads=_mnist_downloads(
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                *("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432"),
                *("9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"),
            ),
        ),
        _emnist("letters", 124_800, 20_800, idx.EMNIST_LETTERS, first_label=1),
        _emnist("balanced", 112_800, 18_800, idx.EMNIST_BALANCED, first_label=0),
        _emnist("byclass", 697_932, 116_323, idx.EMNIST_BYCLASS, first_label=0),
        Source(
            *("svhn", 73_257, 26_032, 10, (3, 32, 32)),
            origin="http://ufldl.stanford.edu/housenumbers/",
            layouts=(("train_32x32.mat", "test_32x32.mat"),),
            decode=_of_files(mat.decode),
            downloads=(
                Download(
                    "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
                    "e26dedcc434d2e4c54c9b2d4a06d8373",
                ),
                Download(
                    "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
                    "eb5a983be6a315427106f1b164d9cef3",
                ),
            ),
        ),
        _cifar(
            *("cifar10", cifar.CIFAR10),
            layouts=(
                tuple(f"cifar-10-batches-bin/{batch}.bin" for batch in _BATCHES),
                tuple(f"cifar-10-batches-py/{batch}" for batch in _BATCHES),
            ),
            archive="cifar-10-binary.tar.gz",
            md5="c32a1d4ab5d03f1284b67883e8d87530",
        ),
        _cifar(
            *("cifar100", cifar.CIFAR100),
            layouts=(
                ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
                ("cifar-100-python/train", "cifar-100-python/test"),
            ),
            archive="cifar-100-binary.tar.gz",
            md5="03b5dce01913d631647c71ecec9e9cb8",
        ),
        Source(
            *("cinic10", 90_000, 90_000, 10, (3, 32, 32)),
            origin="https://doi.org/10.7488/ds/2448",
            layouts=(("train", "test", "train/airplane", "test/airplane"),),
            decode=lambda paths, size: images.decode(_cinic10_tree(paths), size, colour=True, classes=cifar.CIFAR10),
            files=lambda paths: _cinic10_tree(paths).files(),
            inside=("", "CINIC-10"),
            downloads=(
                Download(
                    "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                    "6ee4d0c996905fe93221de577967a372",
                ),
            ),
        ),
        Source(
            *("tiny-imagenet", 100_000, 10_000, 200, (3, 64, 64)),
            origin="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            layouts=(("train", "val/val_annotations.txt", "val/images"),),
            decode=lambda paths, size: images.decode(images.tiny_imagenet(paths[0].parent), size, colour=True),
            files=lambda paths: images.tiny_imagenet_files(paths[0].parent),
            inside=("", "tiny-imagenet-200"),
            downloads=(
                Download("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),
            ),
        ),
        Source(
            *("celeba", 162_770, 19_962, 2, (3, 64, 64)),
            origin="https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
            layouts=(("img_align_celeba", "list_attr_celeba.txt", "list_eval_partition.txt"),),
            decode=lambda paths, size: images.decode(
                images.celeba(paths[0].parent), size, colour=True, classes=("female", "male")
            ),
            files=lambda paths: images.celeba_files(paths[0].parent),
            image_size=64,
        ),
        Source(
            *("ag-news", 120_000, 7_600, 4, ()),
            origin="http://groups.di.unipi.it/~gulli/AG_corpus_of_news_articles.html",
            layouts=(("train.csv", "test.csv"),),
            texts=text.ag_news,
            inside=("", "ag_news_csv"),
            downloads=(
                Download(f"{_AG_NEWS}train.csv", "b1a00f826fdfbd249f79597b59e1dc12"),
                Download(f"{_AG_NEWS}test.csv", "d52ea96a97a2d943681189a97654912d"),
            ),
        ),
        Source(
            *("sst5", 8_544, 2_210, 5, ()),
            origin="https://nlp.stanford.edu/sentiment/trainDevTestTrees_PTB.zip",
            layouts=(("train.txt", "test.txt"),),
            texts=text.sst5,
            inside=("", "trees"),
        ),
    )
}
