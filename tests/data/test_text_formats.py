"""Files of text: trees, tables, what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from fedstill.building.config import resolve
from fedstill.core.errors import DataError
from fedstill.data import Dataset, load, sources
from fedstill.data.formats import text
from fedstill.data.formats.text import parse_tree
from support.text import SETTINGS, table

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.usefixtures("cache_folder")


def test_a_trees_label_is_its_roots_and_its_leaves_are_the_sentence() -> None:
    tree = "(3 (2 It) (4 (4 (2 's) (4 (3 (2 a) (4 (3 lovely) (2 film))))) (2 .)))"
    assert parse_tree(tree) == (3, "It 's a lovely film .")
    assert parse_tree("(0 (2 -LRB-) (1 (2 0) (2 -RRB-)))") == (0, "( 0 )"), "a leaf may look like a label"


@pytest.mark.parametrize("damaged", ["", "3 It", "(3 It", "(3 It))", "(7 It)", "(3)", "(x It)", ")(3 It("])
def test_what_is_not_a_tree_is_refused_with_its_line(tmp_path: Path, damaged: str) -> None:
    with pytest.raises(ValueError, match="not a tree"):
        parse_tree(damaged)
    if damaged:
        whole = table(tmp_path / "train.txt", "(2 good)\n")
        table(tmp_path / "test.txt", f"(2 good)\n\n{damaged}\n")
        with pytest.raises(DataError, match="line 3: not a tree"):
            text.sst5([whole, tmp_path / "test.txt"])


def test_the_treebanks_files_are_five_classes_of_whole_sentences(tmp_path: Path) -> None:
    trees = [
        "(0 (1 (2 A) (1 (0 dreadful) (2 pie))) (2 .))",
        "(1 (2 Cold) (1 (2 and\\\\or) (1 damp)))",
        "(2 (2 (2 -LRB-) (2 It)) (2 (2 rained) (2 -RRB-)))",
        "(3 (2 1\\\\/2) (3 (3 nice) (2 `))",
        "(4 (4 Sweet) (2 (2 as) (2 caf\u00e9-au-lait)))",
    ]
    trees[3] += ")"
    path = table(tmp_path / "train.txt", "\n".join(trees).replace("\\\\", "\\") + "\n\n")
    corpus = text.sst5([path, path])
    assert corpus.labels is not None
    assert corpus.labels.tolist() == [0, 1, 2, 3, 4]
    assert corpus.classes == ("very negative", "negative", "neutral", "positive", "very positive")
    assert corpus.texts == [
        "A dreadful pie .", "Cold and\\or damp", "( It rained )", "1\\/2 nice `", "Sweet as caf\u00e9-au-lait",
    ]  # fmt: skip


def test_the_embedded_texts_are_real_with_as_many_of_each_class_and_may_be_passed_on(mini: Dataset) -> None:
    corpus = text.glosses(sources.EMBEDDED_TEXT)
    assert mini.train.y.bincount().tolist() == [120] * 5
    assert mini.test.y.bincount().tolist() == [60] * 5
    assert mini.classes == ("animal", "artifact", "food", "location", "plant")
    assert corpus.test_texts
    assert not set(corpus.texts) & set(corpus.test_texts)
    words = np.array([len(said.split()) for said in corpus.texts])
    assert 10 < words.mean() < 25
    notice = sources.EMBEDDED.with_name("NOTICE").read_text()
    assert "WordNet 3.1 Copyright 2011 by Princeton University" in notice
    assert "Permission to use, copy, modify and distribute" in notice
    assert sum(path.stat().st_size for path in sources.EMBEDDED_TEXT) < 100_000


def test_ag_news_has_classes_from_1_and_texts_of_title_and_description(tmp_path: Path) -> None:
    rows = '"3","Oil, ""dear""","Prices\\rose &lt;b&gt;"\n"1","A","B, C"\n' * 3
    table(tmp_path / "train.csv", rows)
    table(tmp_path / "test.csv", '"4","Chips","<b>Fast</b>\\ones"\n')
    corpus = text.ag_news([tmp_path / "train.csv", tmp_path / "test.csv"])
    assert corpus.texts[:2] == ['Oil, "dear" Prices rose &lt;b&gt;', "A B, C"]
    assert corpus.test_texts == ["Chips  Fast  ones"]
    with pytest.warns(
        UserWarning, match=r"ag-news: the files hold 6 \+ 1 samples, the published ones 120,000 \+ 7,600"
    ):
        data = load("ag-news", tmp_path, text=SETTINGS)
    assert data.classes == ("World", "Sports", "Business", "Sci/Tech")
    assert data.train.y.tolist() == [2, 0] * 3
    assert data.test.y.tolist() == [3]


@pytest.mark.parametrize("row", ['"5","A","B"', '"1","A"', '"x","A","B"', '"1","A","B'])
def test_a_row_that_is_not_of_ag_news_is_refused(tmp_path: Path, row: str) -> None:
    path = table(tmp_path / "train.csv", f'"1","A","B"\n{row}\n')
    with pytest.raises(DataError, match=r"line 2: not (a class|CSV)"):
        text.ag_news([path, path])


def test_a_users_table_has_texts_labels_and_perhaps_owners(tmp_path: Path) -> None:
    lines = [f"hospital {k % 2},case number {k},{'ill' if k % 3 else 'well'}" for k in range(30)]
    path = table(tmp_path / "mine.csv", "\ufeffClient,Text,label\n" + "\n".join(lines) + "\n")
    data = load(str(path), text=SETTINGS)
    assert data.name == "mine"
    assert data.classes == ("ill", "well")
    assert data.client_names == ("hospital 0", "hospital 1")
    assert len(data.train) + len(data.test) == 30
    assert data.train.client is not None
    assert data.train.client.bincount().tolist() == [12, 12]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("text,class\nA,b\n", "no column 'label'"),
        ("", "no column 'text'"),
        ("text,label,Label\nA,b,c\n", "two columns are called 'label'"),
        ("text,label\nA\n", "line 2: 1 fields, not 2"),
        ('text,label\n"A\nB",c\n\nA\n', "line 5: 1 fields, not 2"),
        ("text,label\nA,b\nC, \n", "line 3: its label is empty"),
        ("text,label,client\nA,b,\n", "line 2: its client is empty"),
        ("text,label\n", "no texts"),
    ],
)
def test_a_table_that_lacks_something_is_refused(tmp_path: Path, rows: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        load(str(table(tmp_path / "mine.csv", rows)))


def test_a_wide_table_is_checked_without_comparing_every_two_columns(tmp_path: Path) -> None:
    compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    columns = 2_000
    header = [Name(f"column {k}") for k in range(columns)]
    with pytest.raises(DataError, match=r"no column 'text'; .* has column 0, .*, column 19 and 1,980 more; name"):
        text._place(tmp_path, header, "text", "")  # type: ignore[arg-type]
    assert compared <= 10 * columns

    wide = ",".join(f"c{k}" for k in range(60_000))
    rows = "".join(f"case {k},{'ab'[k % 2]}{',' * 60_000}\n" for k in range(10))
    corpus = text.read_table(table(tmp_path / "wide.csv", f"text,label,{wide}\n{rows}"))
    assert corpus.texts == [f"case {k}" for k in range(10)]
    assert corpus.labels is not None
    assert corpus.labels.tolist() == list("ab" * 5)


def test_a_table_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        load(str(tmp_path / "mine.csv"))
    (tmp_path / "mine.csv").write_bytes(b"text,label\na\0,1\n")
    with pytest.raises(DataError, match="not a file of text"):
        load(str(tmp_path / "mine.csv"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine.CSV", "mine.csv.gz"])
def test_a_table_may_be_packed_and_its_texts_long(tmp_path: Path, name: str) -> None:
    long = "word " * 30_000  # 150,000 characters: more than Python's csv takes unless told
    rows = "text,label\n" + f"{long},a\nshort, b \n" * 5
    packed = gzip.compress(rows.encode()) if name.endswith(".gz") else rows.encode()
    (tmp_path / name).write_bytes(packed)
    data = load(str(tmp_path / name), text=SETTINGS)
    assert (data.name, data.classes, len(data.train), len(data.test)) == ("mine", ("a", "b"), 8, 2)
    assert resolve({"data": str(tmp_path / name)}).model == "transformer"
