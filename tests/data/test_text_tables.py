"""Tables of text as people have them: other columns, separators, quotes and encodings."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.core.errors import DataError
from fedstill.data.formats.text import Columns, Corpus, encoding_of, read_table, separator_of
from fedstill.deployment.local_inputs import LocalInputs
from support.commandline import fedstill as command
from support.sites import NAMES, Wire, served


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))


TEXTS = ["Naïve café – good", 'he said "no"', "a, b; c | d", "two\nlines", "plain"] * 2
LABELS = ["gut", "schlecht"] * 5


def contents(corpus: Corpus) -> tuple[list[str], list[str]]:
    assert corpus.labels is not None
    return corpus.texts, corpus.labels.tolist()


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_whatever_separates_the_columns_the_table_is_the_same(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "mine.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=separator).writerows([("text", "label"), *zip(TEXTS, LABELS, strict=True)])
    assert separator_of(path) == separator
    assert contents(read_table(path)) == (TEXTS, LABELS)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252"])
@pytest.mark.parametrize("name", ["mine.csv", "mine.csv.gz"])
def test_whatever_the_encoding_the_texts_are_the_same(tmp_path: Path, encoding: str, name: str) -> None:
    rows = "text,label\n" + "".join(f'"{text}",{label}\n' for text, label in zip(TEXTS[::4], LABELS[:3], strict=True))
    raw = rows.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    corpus = read_table(tmp_path / name)
    assert contents(corpus) == (TEXTS[::4], LABELS[:3])
    assert corpus.notes == ((f"{name} is not UTF-8 and was read as cp1252",) if encoding == "cp1252" else ())


def test_utf16_may_begin_with_either_byte(tmp_path: Path) -> None:
    for mark, encoding in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        (tmp_path / "a.csv").write_bytes(mark + "text,label\né,b\n".encode(encoding))
        assert read_table(tmp_path / "a.csv").texts == ["é"]


def test_what_windows_latin_does_not_have_is_read_as_isos(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,label\n\xe9\x81,b\n")
    assert encoding_of(tmp_path / "a.csv") == "latin-1"
    assert read_table(tmp_path / "a.csv").texts == [b"\xe9\x81".decode("latin-1")]


def test_a_character_cut_off_at_the_end_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("text,label\na,é".encode()[:-1])
    assert encoding_of(tmp_path / "a.csv") == "cp1252"


def test_quotes_in_a_table_separated_by_tabs_may_mean_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.tsv"
    path.write_text('text\tlabel\n"open and never closed\tb\nan inch is 1\ta\n')
    assert read_table(path).texts == ['"open and never closed', "an inch is 1"]
    path.write_text('text\tlabel\n"with a\ttab"\tb\n"and ""quotes"""\ta\n')
    assert read_table(path).texts == ["with a\ttab", 'and "quotes"']


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.JSONL", "mine.jsonl.gz"])
def test_json_lines_are_a_table_too(tmp_path: Path, name: str) -> None:
    objects = [{"text": t, "label": LABELS.index(la), "more": [1]} for t, la in zip(TEXTS, LABELS, strict=True)]
    raw = "\n".join(json.dumps({k: v for k, v in o.items() if k != "more"}) for o in objects).encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert contents(read_table(tmp_path / name)) == (TEXTS, ["0", "1"] * 5)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"text": "a", "label": 1}\nnope', "line 2: not JSON"),
        ('["a", 1]', "line 1: not an object with names"),
        ('{"text": "a", "label": [1, 2]}', "line 1: its label is no text or number"),
        ('{"text": "a", "label": 1}\n\n{"text": "a"}', "line 3: its label is empty"),
        ('{"body": "a", "label": 1}', r"no column 'text'.* has body, label; .*--text-column"),
        ("", "no column 'text'.* has nothing"),
    ],
)
def test_json_lines_that_are_no_table_are_refused(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(DataError, match=message) as caught:
        read_table(tmp_path / "a.jsonl")
    assert "\n" not in str(caught.value)


def test_columns_are_found_by_the_names_that_are_given(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Text;label;Body;stars;site\nnot this;x;this;5;north\nnor this;x;that;1;south\n")
    corpus = read_table(tmp_path / "a.csv", Columns("Body", "stars", "site"))
    assert contents(corpus) == (["this", "that"], ["5", "1"])
    assert corpus.client is not None
    assert corpus.client.tolist() == ["north", "south"]
    assert read_table(tmp_path / "a.csv", Columns("body", "STARS")).texts == ["this", "that"]
    with pytest.raises(DataError, match=r"no column 'ward'; .* has Text, label, Body, stars, site; .*--client-column"):
        read_table(tmp_path / "a.csv", Columns("Body", "stars", "ward"))


def test_labels_that_are_measurements_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"case {n},{(n % 30) / 7}\n" for n in range(90)))
    with pytest.raises(DataError, match="classification only"):
        fedstill.load_dataset(str(path))


def reviews(path: Path, site: str = "") -> Path:
    """Texts whose first word tells the class."""
    rows = [f"{site or 'north'}\t{('good', 'awful')[n % 2]} film number {n}\t{1 + n % 2}" for n in range(40)]
    path.write_text("where\tbody\tstars\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return path


RUN: dict[str, Any] = {
    "model": "bag",
    "optimizer": "adam",
    "lr": 0.05,
    "rounds": 2,
    "epochs": 3,
    "participation": 1.0,
    "max_length": 16,
}


def test_a_run_learns_from_a_table_of_other_columns_and_says_what_it_took_the_encoding_for(tmp_path: Path) -> None:
    path = reviews(tmp_path / "reviews.tsv")
    path.write_bytes(path.read_bytes().replace(b"number 7", b"num\xe9ro 7"))
    named = {"data": str(path), "text_column": "body", "label_column": "stars"}
    setup = prepare(resolve(RUN | named | {"clients": 2, "partition": "iid", "participation": 1.0}))
    assert setup.warnings == ("reviews.tsv is not UTF-8 and was read as cp1252",)
    assert setup.federation.dataset.classes == ("1", "2")
    assert prepare(setup.config).warnings == setup.warnings  # from the cache
    result = fedstill.run(**RUN | named | {"clients": 2, "partition": "iid", "engine": "inline"})
    assert result.records[-1]["accuracy"] == 1.0


def test_the_command_line_takes_the_columns(tmp_path: Path) -> None:
    path = reviews(tmp_path / "reviews.tsv")
    flags = ("--text-column", "body", "--label-column", "stars", "--client-column", "where", "--clients", "1")
    out = tmp_path / "clients.png"
    answer = command("partition", "--data", path, *flags, "--partition", "natural", "--out", out)
    assert "north" in answer.out, answer.err
    assert out.is_file()


def test_sites_name_the_columns_of_their_own_tables_and_a_server_cannot(tmp_path: Path) -> None:
    own = LocalInputs(data="reviews.tsv", text_column="body", label_column="stars")
    told = resolve({"data": "glosses-mini", "text_column": "name", "label_column": "diagnosis"}).toml()
    config = own.config(told)
    assert (config.text_column, config.label_column) == ("body", "stars")
    plain = LocalInputs(data="reviews.tsv").config(told)
    assert (plain.text_column, plain.label_column, plain.client_column) == ("", "", "")


@pytest.mark.slow
def test_sites_train_on_tables_of_their_own_columns(tmp_path: Path) -> None:
    server = reviews(tmp_path / "server.tsv")
    wire = Wire(tmp_path / "sites")
    for name in NAMES:
        inputs = LocalInputs(
            data=str(reviews(tmp_path / f"{name}.tsv", name)), text_column="body", label_column="stars"
        )
        wire.sites[name]._inputs = inputs
    named = {"data": str(server), "text_column": "body", "label_column": "stars"}
    result = served(wire, tmp_path / "run", **RUN | named | {"fraction": 1.0, "epochs": 5, "model_options": {}})
    assert result.records[-1]["accuracy"] == 1.0
