"""The published datasets that are known by name: what each holds, the files it comes in, and what reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedstill.data.dataset import Dataset
from fedstill.data.download import Download
from fedstill.data.formats import cifar, heart, idx, images, leaf, mat, text
from fedstill.data.formats.decoded import Decoded, SourceFile, source_file
from fedstill.data.formats.text import Corpus

Decode = Callable[[tuple[Path, ...], int], Decoded]  # found paths, image size (0: as stored)


def _listed(paths: tuple[Path, ...]) -> list[SourceFile]:
    return [source_file(path) for path in paths]


@dataclass(frozen=True)
class Source:
    """A published dataset: what it holds, which files it comes in, and how they are decoded."""

    name: str
    train: int  # samples; 0: as many as whoever prepared the files has chosen
    test: int
    classes: int
    shape: tuple[int, ...]  # empty: text
    origin: str  # the page that publishes it
    layouts: tuple[tuple[str, ...], ...]  # each a complete set of paths; any of them, also with .gz, is enough. A path
    # with a * stands for any number of files, of which the first is found
    decode: Decode | None = None  # of images
    texts: Callable[[tuple[Path, ...]], Corpus] | None = None  # of text
    table: Callable[[tuple[Path, ...]], Dataset] | None = None  # of a table
    files: Callable[[tuple[Path, ...]], list[SourceFile]] = _listed
    inside: tuple[str, ...] = ("",)  # folders within the dataset's own that may hold the paths
    downloads: tuple[Download, ...] = ()
    image_size: int = 0  # what images are resized to unless asked otherwise
    owners: bool = False  # whether the files say whose a sample is


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

_LEAF = "https://github.com/TalwalkarLab/leaf"


def _leaf_root(paths: Sequence[Path]) -> Path:
    """The folder with train/ and test/."""
    return paths[0].parent.parent


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
        Source(
            *("leaf-femnist", 0, 0, 62, (1, 28, 28)),
            origin=_LEAF,
            layouts=(("train/*.json", "test/*.json"),),
            decode=_of_files(lambda paths: leaf.femnist(_leaf_root(paths))),
            files=lambda paths: leaf.files(_leaf_root(paths)),
            inside=("", "data", "femnist/data"),
            owners=True,
        ),
        Source(
            *("leaf-shakespeare", 0, 0, len(leaf.CLASSES), ()),
            origin=_LEAF,
            layouts=(("train/*.json", "test/*.json"),),
            texts=lambda paths: leaf.shakespeare(_leaf_root(paths)),
            files=lambda paths: leaf.files(_leaf_root(paths)),
            inside=("", "data", "shakespeare/data"),
            owners=True,
        ),
        Source(
            *("heart-disease", 736, 184, 2, (13,)),
            origin="https://archive.ics.uci.edu/dataset/45/heart+disease",
            layouts=(heart.FILES,),
            table=heart.read,
            inside=("", "heart+disease", "heart_disease"),
            owners=True,
        ),
    )
}
