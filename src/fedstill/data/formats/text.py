"""Text with labels: AG News' CSV, the Stanford Sentiment Treebank's trees, and tables that users bring.

Texts are left as they stand in the file, HTML entities and the treebank's escapes included, but for AG News' line
breaks and tags and the treebank's brackets.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.errors import DataError, in_one_line
from fedstill.data.formats import parquet
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


SUFFIXES = (".csv", ".tsv", ".jsonl")  # of tables of text, each also with .gz
Rows = Iterator[tuple[int, list[Any]]]  # with the lines they begin in
SEPARATORS = (",", ";", "\t", "|")
_MARKS = {  # the first bytes of a file that says how it is encoded; those of UTF-32 begin with those of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


@dataclass(frozen=True)
class Corpus:
    """Texts and their labels, not yet turned into numbers; without test texts, some of these are held out."""

    texts: list[str]
    labels: Array | None  # None: there are none, and nothing is held out
    test_texts: list[str] | None = None
    test_labels: Array | None = None
    classes: tuple[str, ...] | None = None  # None: the labels themselves
    client: Array | None = None  # the owner of each text
    test_client: Array | None = None
    notes: tuple[str, ...] = ()
    tokenizer: str = ""  # as JSON, where texts come with tokens of their own
    length: int = 0  # tokens of a text, where all have as many

    def divided(self, where: str) -> tuple[Decoded, list[str], list[str]]:
        """Labels and owners, and the training and the test texts they belong to."""
        rows = np.arange(len(self.texts), dtype=np.int64)[:, None]  # texts by number, until there are tokens
        if self.labels is None:
            # The test part is never looked at, but nothing at all could not be kept.
            part, one = (SplitArrays(r, np.zeros(len(r), np.int64)) for r in (rows, rows[:1]))
            return Decoded(part, one, ("",), notes=self.notes), self.texts, self.texts[:1]
        given: dict[str, Array | None] = {"x": rows, "y": self.labels, "client": self.client}
        if self.test_texts is not None:
            given |= {"x_test": np.arange(len(self.test_texts))[:, None], "y_test": self.test_labels}
            given |= {"client_test": self.test_client}
        found = decode_arrays({name: a for name, a in given.items() if a is not None}, self.classes, where, tokens=True)
        found = replace(found, notes=self.notes)
        held_out = self.texts if self.test_texts is None else self.test_texts
        return found, [self.texts[i] for i in found.train.x[:, 0]], [held_out[i] for i in found.test.x[:, 0]]


def is_table(name: str) -> bool:
    """Whether a file is a table of text.

    >>> is_table("reviews.CSV"), is_table("reviews.tsv.gz"), is_table("reviews.npz")
    (True, True, False)
    """
    return name.lower().removesuffix(".gz").endswith(SUFFIXES)


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


@dataclass(frozen=True)
class Columns:
    """What the columns of a table of text are called; empty: text, label, and client if there is one."""

    text: str = ""
    label: str = ""
    client: str = ""


def read_table(path: Path, columns: Columns | None = None, *, labelled: bool = True) -> Corpus:
    """A file of texts, their labels and perhaps their owners; not `labelled`: the texts alone count."""
    wanted = columns or Columns()
    names, rows = named_rows(path)
    places = {"text": _place(path, names, "text", wanted.text)}
    if labelled:
        places["label"] = _place(path, names, "label", wanted.label)
        if wanted.client or "client" in map(str.lower, names):
            places["client"] = _place(path, names, "client", wanted.client)
    found: dict[str, list[str]] = {name: [] for name in places}
    for line, row in rows:
        if len(row) != len(names):
            raise DataError(f"{path}, line {line}: {len(row)} fields, not {len(names)}")
        for name, place in places.items():
            cell = _cell(row[place], path, line, names[place])
            found[name].append(cell if name == "text" else cell.strip())
            if name != "text" and not found[name][-1]:
                raise DataError(f"{path}, line {line}: its {names[place]} is empty")
    if not found["text"]:
        raise DataError(f"{path}: no texts")
    if not labelled:
        return Corpus(found["text"], None, notes=encoding_notes(path))
    client = np.array(found["client"]) if "client" in found else None
    return Corpus(found["text"], np.array(found["label"]), client=client, notes=encoding_notes(path))


def header(path: Path) -> list[str]:
    """The names of a table's columns."""
    return named_rows(path)[0]


def _place(path: Path, header: list[str], role: str, name: str) -> int:
    """Where a column stands: the one that is named, else the one called by its role; the case counts if it must."""
    wanted = name or role
    places = [place for place, found in enumerate(header) if name and found == name]
    places = places or [place for place, found in enumerate(header) if found.lower() == wanted.lower()]
    if len(places) > 1:
        raise DataError(f"{path}: two columns are called {wanted!r}")
    if places:
        return places[0]
    further = len(header) - _SHOWN
    shown = " ".join(", ".join(header[:_SHOWN]).split())[:400]  # a quoted name may have lines
    shown = shown + (f" and {further:,} more" if further > 0 else "") or "nothing"
    raise DataError(
        f"{path}: no column {wanted!r}; its first line, which names the columns, has {shown}; name the one of the "
        f"{role}s with {role}_column (--{role}-column)"
        + ("; if this is a table of features, name the label with target (--target)" if role != "client" else "")
    )


def is_json(path: Path) -> bool:
    """Whether a file has a JSON object a line.

    >>> is_json(Path("a.JSONL.gz")), is_json(Path("a.csv"))
    (True, False)
    """
    return _plain_suffix(path) == ".jsonl"


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines, with their lines."""
    for number, line in enumerate(lines(path), 1):
        if line.strip():
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number}: not JSON ({in_one_line(error)})") from error
            if not isinstance(found, dict):
                raise DataError(f'{path}, line {number}: not an object with names, as {{"text": …}}')
            yield number, found


def _json_table(path: Path) -> tuple[list[str], Rows]:
    """JSON lines as a table, whose first object names the columns."""
    header = list(next(json_objects(path), (0, {}))[1])
    return header, ((number, [found.get(name) for name in header]) for number, found in json_objects(path))


def _parquet_table(path: Path) -> tuple[list[str], Rows]:
    def rows() -> Rows:
        with parquet.opened(path) as file:
            columns = file.read().to_pydict().values()
        yield from enumerate(map(list, zip(*columns, strict=True)), 1)

    return parquet.header(path), rows()


def named_rows(path: Path) -> tuple[list[str], Rows]:
    """The names of the columns of a file of rows, and the rows with the lines they begin in."""
    if parquet.is_parquet(path):
        return _parquet_table(path)
    return _json_table(path) if is_json(path) else _delimited_table(path)


def _cell(value: Any, path: Path, line: int, name: str) -> str:
    if isinstance(value, dict | list):
        raise DataError(f"{path}, line {line}: its {name} is no text or number")
    return "" if value is None else str(value)


def _delimited_table(path: Path) -> tuple[list[str], Rows]:
    """The names of the columns, and the rows with the lines they begin in."""
    separator = separator_of(path)
    quoted = separator != "\t" or _is_quoted(path)
    rows = csv_rows(path, separator, quoted=quoted)
    return [name.strip() for name in next(rows, (0, []))[1]], rows


def separator_of(path: Path) -> str:
    """What separates columns: of the usual marks the one that the first line has most of, of a .tsv the tab."""
    if _plain_suffix(path) == ".tsv":
        return "\t"
    first = next((line for line in lines(path) if line.strip()), "")
    return max(SEPARATORS, key=lambda mark: len(next(csv.reader([first], delimiter=mark), [])))


def _is_quoted(path: Path) -> bool:
    """Whether quotes enclose fields, as in CSV files; in many files that are separated by tabs they mean nothing."""
    try:
        widths = {len(row) for _, row in csv_rows(path, "\t")}
    except DataError:
        return False
    return len(widths) == 1


def _plain_suffix(path: Path) -> str:
    """The suffix, without that of packing."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


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
        for line, row in csv_rows(path):
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


def csv_rows(
    path: Path, separator: str = ",", *, quoted: bool = True, strip: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Rows of a CSV file with the lines they begin in, empty ones left out; `strip`: spaces after a separator go."""
    csv.field_size_limit(LONGEST)
    reader = csv.reader(lines(path), delimiter=separator, strict=True, skipinitialspace=strip)
    if not quoted:
        reader = csv.reader(lines(path), delimiter=separator, quoting=csv.QUOTE_NONE)
    line = 1
    try:
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: not CSV ({error})") from error


def lines(path: Path) -> Iterator[str]:
    """A file's lines, each with its end, unpacked if it is a .gz, in whatever encoding it has."""
    try:
        with _opened(path) as raw, io.TextIOWrapper(raw, encoding_of(path), newline="") as file:
            while line := file.readline(_LONGEST_LINE):
                if len(line) == _LONGEST_LINE:
                    raise DataError(f"{path}: a line has more than {_LONGEST_LINE:,} characters")
                if "\0" in line:
                    raise DataError(f"{path}: not a file of text")
                yield line
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as text ({error})") from error


def encoding_of(path: Path) -> str:
    """How characters are written: as the file's first bytes say, else UTF-8 if it is, else Windows' or ISO's Latin."""
    with _opened(path) as file:
        start = file.read(4)
        for mark, encoding in _MARKS.items():
            if start.startswith(mark):
                return encoding
        decoders = {name: codecs.getincrementaldecoder(name)() for name in ("utf-8", "cp1252")}
        while start and b"\0" not in start:  # which is no text, and may be without end
            for name, decoder in list(decoders.items()):
                try:
                    decoder.decode(start)
                except UnicodeDecodeError:
                    del decoders[name]
            start = file.read(1 << 20)
    with suppress(UnicodeDecodeError, KeyError):
        decoders["utf-8"].decode(b"", final=True)
        return "utf-8"
    return "cp1252" if "cp1252" in decoders else "latin-1"


def encoding_notes(path: Path) -> tuple[str, ...]:
    """What to say of a file that may have been read in the wrong encoding."""
    encoding = "" if parquet.is_parquet(path) else encoding_of(path)
    return (f"{path.name} is not UTF-8 and was read as {encoding}",) if encoding in ("cp1252", "latin-1") else ()


def _opened(path: Path) -> Any:
    return gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb")
