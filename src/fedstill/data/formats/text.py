"""Text with labels: AG News' CSV, the Stanford Sentiment Treebank's trees, and CSV files that users bring.

Texts are left as they stand in the file, HTML entities and the treebank's escapes included, but for AG News' line
breaks and tags and the treebank's brackets.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.errors import DataError
from fedstill.data.formats.arrays import decode as decode_arrays
from fedstill.data.formats.decoded import Array, Decoded, SplitArrays

AG_NEWS = ("World", "Sports", "Business", "Sci/Tech")
GLOSSES = ("animal", "artifact", "food", "location", "plant")
SST5 = ("very negative", "negative", "neutral", "positive", "very positive")

_TOKEN = re.compile(r"[()]|[^\s()]+")
_BRACKETS = {"-LRB-": "(", "-RRB-": ")"}  # as the Penn Treebank writes them
_MARKUP = re.compile(r"\\|<[^>]{0,200}>")  # AG News writes a line break as a backslash, and has some HTML left
_SHOWN = 20  # names of columns in an error
_LONGEST_LINE = 2**27  # characters; a small .gz can unpack to one without end
LONGEST = 2**31 - 1  # characters of a field; Python's csv stops at 131,072 by default


@dataclass(frozen=True)
class Corpus:
    """Texts and their labels, not yet turned into numbers; without test texts, some of these are held out."""

    texts: list[str]
    labels: Array | None  # None: there are none, and nothing is held out
    test_texts: list[str] | None = None
    test_labels: Array | None = None
    classes: tuple[str, ...] | None = None  # None: the labels themselves
    client: Array | None = None  # the owner of each text

    def divided(self, where: str) -> tuple[Decoded, list[str], list[str]]:
        """Labels and owners, and the training and the test texts they belong to."""
        rows = np.arange(len(self.texts), dtype=np.int64)[:, None]  # texts by number, until there are tokens
        if self.labels is None:
            # The test part is never looked at, but nothing at all could not be kept.
            part, one = (SplitArrays(r, np.zeros(len(r), np.int64)) for r in (rows, rows[:1]))
            return Decoded(part, one, ("",)), self.texts, self.texts[:1]
        given: dict[str, Array | None] = {"x": rows, "y": self.labels, "client": self.client}
        if self.test_texts is not None:
            given |= {"x_test": np.arange(len(self.test_texts))[:, None], "y_test": self.test_labels}
        found = decode_arrays({name: a for name, a in given.items() if a is not None}, self.classes, where, tokens=True)
        held_out = self.texts if self.test_texts is None else self.test_texts
        return found, [self.texts[i] for i in found.train.x[:, 0]], [held_out[i] for i in found.test.x[:, 0]]


def is_table(name: str) -> bool:
    """Whether a file is a table of text.

    >>> is_table("reviews.CSV"), is_table("reviews.csv.gz"), is_table("reviews.npz")
    (True, True, False)
    """
    return name.lower().endswith((".csv", ".csv.gz"))


def ag_news(paths: Sequence[Path]) -> Corpus:
    """train.csv and test.csv: class 1 to 4, title, description."""
    return _titled(paths, AG_NEWS)


def glosses(paths: Sequence[Path]) -> Corpus:
    """The embedded texts, in the same format: class 1 to 5, headwords, gloss."""
    return _titled(paths, GLOSSES)


def sst5(paths: Sequence[Path]) -> Corpus:
    """train.txt and test.txt: a tree a line; what a sentence is called is the label of its root."""
    (texts, labels), (test_texts, test_labels) = (_trees(path) for path in paths)
    return Corpus(texts, labels, test_texts, test_labels, SST5)


def read_csv(path: Path, *, labelled: bool = True) -> Corpus:
    """A table with a header: `text`, `label`, and perhaps `client`; not `labelled`: the texts alone count."""
    rows = _rows(path)
    header = [name.strip().lower() for name in next(rows, (0, []))[1]]
    _check_header(path, header, ("text", "label") if labelled else ("text",))
    places = {name: place for place, name in enumerate(header) if name in ("text", "label", "client")}
    columns: dict[str, list[str]] = {name: [] for name in places}
    for line, row in rows:
        if len(row) != len(header):
            raise DataError(f"{path}, line {line}: {len(row)} fields, not {len(header)}")
        for name, place in places.items():
            columns[name].append(row[place] if name == "text" else row[place].strip())
            if labelled and name != "text" and not columns[name][-1]:
                raise DataError(f"{path}, line {line}: its {name} is empty")
    texts = columns["text"]
    if not texts:
        raise DataError(f"{path}: no texts")
    if not labelled:
        return Corpus(texts, None)
    if len(set(columns["label"])) == 1:
        raise DataError(f"{path}: all labels are {columns['label'][0]!r}; two classes are the fewest to tell apart")
    client = np.array(columns["client"]) if "client" in columns else None
    return Corpus(texts, np.array(columns["label"]), client=client)


def _check_header(path: Path, header: list[str], needed: Sequence[str]) -> None:
    for name, times in Counter(header).items():
        if times > 1:
            raise DataError(f"{path}: two columns are called {name!r}")
    if lacking := [name for name in needed if name not in header]:
        further = len(header) - _SHOWN
        found = " ".join(", ".join(header[:_SHOWN]).split())[:400]  # a quoted name may have lines
        found = found + (f" and {further:,} more" if further > 0 else "") or "nothing"
        other = next((mark for mark in (";", "\t", "|") if len(header) == 1 and mark in header[0]), "")
        hint = f"; columns are separated by commas, and here it seems by {other!r}" if other else ""
        raise DataError(
            f"{path}: no column {lacking[0]!r}; its first line, which names the columns, has {found}{hint}; if this is "
            "a table, name the column with the label: --target COLUMN"
        )


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
    for number, line in enumerate(lines(path), 1):
        if line.strip():
            try:
                found.append(parse_tree(line))
            except ValueError as error:
                raise DataError(f"{path}, line {number}: {error}") from None
    return [text for _, text in found], _numbers(path, [label for label, _ in found])


def _titled(paths: Sequence[Path], classes: tuple[str, ...]) -> Corpus:
    parts = []
    for path in paths:
        texts, labels = [], []
        numbers = {str(number): number - 1 for number in range(1, len(classes) + 1)}
        for line, row in _rows(path):
            if len(row) != 3 or row[0] not in numbers:
                raise DataError(f"{path}, line {line}: not a class of 1 to {len(classes)}, a title and a description")
            texts.append(_MARKUP.sub(" ", f"{row[1]} {row[2]}"))
            labels.append(numbers[row[0]])
        parts.append((texts, _numbers(path, labels)))
    (texts, labels_), (test_texts, test_labels) = parts
    return Corpus(texts, labels_, test_texts, test_labels, classes)


def _numbers(path: Path, labels: list[int]) -> Array:
    if not labels:
        raise DataError(f"{path}: no texts")
    return np.array(labels, np.int64)


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows of a CSV file with the lines they begin in, empty ones left out."""
    csv.field_size_limit(LONGEST)
    reader, line = csv.reader(lines(path), strict=True), 1
    try:
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: not CSV ({error})") from error


def lines(path: Path) -> Iterator[str]:
    """A file's lines, each with its end, unpacked if it is a .gz."""
    opened: Any = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            while line := file.readline(_LONGEST_LINE):
                if len(line) == _LONGEST_LINE:
                    raise DataError(f"{path}: a line has more than {_LONGEST_LINE:,} characters")
                yield line
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as text ({error})") from error
