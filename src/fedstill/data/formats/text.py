"""Text with labels: AG News' CSV, the Stanford Sentiment Treebank's trees, and CSV files that users bring."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.errors import DataError
from fedstill.data.formats.arrays import decode as decode_arrays
from fedstill.data.formats.decoded import Array, Decoded

AG_NEWS = ("World", "Sports", "Business", "Sci/Tech")
SST5 = ("very negative", "negative", "neutral", "positive", "very positive")

_TOKEN = re.compile(r"[()]|[^\s()]+")
_BRACKETS = {"-LRB-": "(", "-RRB-": ")"}  # as the Penn Treebank writes them
_MARKUP = re.compile(r"\\|<[^>]{0,200}>")  # AG News writes a line break as a backslash, and has some HTML left


@dataclass(frozen=True)
class Corpus:
    """Texts and their labels, not yet turned into numbers; without test texts, some of these are held out."""

    texts: list[str]
    labels: Array
    test_texts: list[str] | None = None
    test_labels: Array | None = None
    classes: tuple[str, ...] | None = None  # None: the labels themselves
    client: Array | None = None  # the owner of each text

    def decoded(self, x: Array, x_test: Array | None, where: str) -> Decoded:
        """The corpus with tokens in place of its texts."""
        given = {"x": x, "y": self.labels, "x_test": x_test, "y_test": self.test_labels, "client": self.client}
        found = decode_arrays({name: a for name, a in given.items() if a is not None}, self.classes, where)
        train, test = (replace(part, x=part.x.astype(np.int32)) for part in (found.train, found.test))
        return replace(found, train=train, test=test)


def ag_news(paths: Sequence[Path]) -> Corpus:
    """train.csv and test.csv: class 1 to 4, title, description."""
    (texts, labels), (test_texts, test_labels) = (_ag_news(path) for path in paths)
    return Corpus(texts, labels, test_texts, test_labels, AG_NEWS)


def sst5(paths: Sequence[Path]) -> Corpus:
    """train.txt and test.txt: a tree a line; what a sentence is called is the label of its root."""
    (texts, labels), (test_texts, test_labels) = (_trees(path) for path in paths)
    return Corpus(texts, labels, test_texts, test_labels, SST5)


def read_csv(path: Path, *, labelled: bool = True) -> Corpus:
    """A table with a header: `text`, `label`, and perhaps `client`; without `labelled`, labels need not be there."""
    rows = _rows(path)
    header = [name.strip().lower() for name in next(rows, [])]
    lacking = [name for name in (("text", "label") if labelled else ("text",)) if name not in header]
    if lacking:
        found = ", ".join(header) or "nothing"
        raise DataError(f"{path}: no column {lacking[0]!r}; its first line, which names the columns, has {found}")
    columns: dict[str, list[str]] = {name: [] for name in header}
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise DataError(f"{path}: row {number} has {len(row)} fields, not {len(header)}")
        for name, field in zip(header, row, strict=True):
            columns[name].append(field)
    texts = columns["text"]
    if not texts:
        raise DataError(f"{path}: no texts")
    labels = np.array(columns["label"]) if "label" in columns else np.zeros(len(texts), np.int64)
    return Corpus(texts, labels, client=np.array(columns["client"]) if "client" in columns else None)


def parse_tree(tree: str) -> tuple[int, str]:
    """The label of a tree's root, and the sentence that its leaves make.

    >>> parse_tree("(3 (2 It) (4 (2 's) (4 good)))")
    (3, "It 's good")
    """
    depth, leaves = 0, []
    tokens: list[str] = _TOKEN.findall(tree)
    for before, token in zip(["", *tokens], tokens, strict=False):
        depth += (token == "(") - (token == ")")
        if depth < 0:
            break
        if token not in "()" and before != "(":
            leaves.append(_BRACKETS.get(token, token))
    if depth or not leaves or tokens[0] != "(" or tokens[1] not in {"0", "1", "2", "3", "4"}:
        raise ValueError(f"not a tree with a label of 0 to 4: {tree[:60]!r}")
    return int(tokens[1]), " ".join(leaves)


def _trees(path: Path) -> tuple[list[str], Array]:
    found = []
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            try:
                found.append(parse_tree(line))
            except ValueError as error:
                raise DataError(f"{path}, line {number}: {error}") from None
    return [text for _, text in found], _numbers(path, [label for label, _ in found])


def _ag_news(path: Path) -> tuple[list[str], Array]:
    texts, labels = [], []
    for number, row in enumerate(_rows(path), 1):
        if len(row) != 3 or row[0] not in {"1", "2", "3", "4"}:
            raise DataError(f"{path}: row {number} is not a class of 1 to 4, a title and a description")
        texts.append(_MARKUP.sub(" ", f"{row[1]} {row[2]}"))
        labels.append(int(row[0]) - 1)
    return texts, _numbers(path, labels)


def _numbers(path: Path, labels: list[int]) -> Array:
    if not labels:
        raise DataError(f"{path}: no texts")
    return np.array(labels, np.int64)


def _rows(path: Path) -> Iterator[list[str]]:
    """Rows of a CSV file, empty ones left out."""
    try:
        yield from (row for row in csv.reader(_lines(path), strict=True) if row)
    except csv.Error as error:
        raise DataError(f"{path}: not CSV ({error})") from error


def _lines(path: Path) -> Iterator[str]:
    """A file's lines, each with its end, unpacked if it is a .gz."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield from file
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error})") from error
