"""Tokens: the same texts give the same, padding is zeros at the end, no test text is seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from fedstill.core.errors import DataError, SettingError
from fedstill.data import Dataset, TextSettings, load, sources, tokens
from fedstill.data.formats import text
from fedstill.data.formats.text import Corpus
from support.text import LENGTH, SETTINGS, VOCABULARY, table

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.usefixtures("cache_folder")


def test_the_same_texts_give_the_same_tokenizer_and_it_can_spell_everything() -> None:
    texts = text.glosses(sources.EMBEDDED_TEXT).texts
    once, again = (tokens.trained(texts, 1000) for _ in range(2))
    assert once == again
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(once)
    for sentence in ("Ein völlig neuer Satz, 你好 🙂", texts[0]):
        said = tokenizer.decode(tokenizer.encode(sentence).ids).replace(" ", "")
        assert "".join(said.split()) == "".join(sentence.lower().replace("ö", "o").split())
    assert [tokenizer.token_to_id(name) for name in ("[PAD]", "[CLS]", "[SEP]")] == [0, 1, 2]


def test_padding_is_zeros_at_the_end_and_nothing_else_is(mini: Dataset) -> None:
    x = mini.train.x
    assert x.dtype == torch.int32
    assert x.shape == (600, LENGTH)
    lengths = (x != 0).sum(1)
    assert torch.equal(x != 0, torch.arange(LENGTH) < lengths.unsqueeze(1))
    assert (x[:, 0] == 1).all(), "every text begins with [CLS]"
    assert int(x.max()) < mini.vocabulary == VOCABULARY
    cut = lengths == LENGTH
    assert (x[cut, -1] == 2).all(), "and ends with [SEP], even where it is cut"


def test_a_tokenizer_comes_from_a_file_a_folder_or_public_text(tmp_path: Path, mini: Dataset) -> None:
    (tmp_path / "tokenizer.json").write_text(mini.tokenizer, encoding="utf-8")
    for name in (tmp_path / "tokenizer.json", tmp_path):
        same = load("glosses-mini", text=TextSettings(str(name), max_length=LENGTH))
        assert same.tokenizer == mini.tokenizer
        assert torch.equal(same.train.x, mini.train.x)
    public = table(tmp_path / "public.csv", "text\n" + "anybody may read this\n" * 9)
    other = load("glosses-mini", text=TextSettings(str(public), max_length=LENGTH))
    assert set(json.loads(other.tokenizer)["model"]["vocab"]) >= {"Ġanybody", "Ġmay", "Ġread", "Ġthis"}
    assert "Ġplant" not in json.loads(other.tokenizer)["model"]["vocab"], "nothing of the clients' texts"


def words_of(data: Dataset) -> set[str]:
    return {token.removeprefix("Ġ") for token in json.loads(data.tokenizer)["model"]["vocab"]}


def test_a_trained_tokenizer_never_sees_a_test_text(tmp_path: Path) -> None:
    rows = [f"{c * 6} {c * 6},{k % 2}" for k, c in enumerate("abcdefghijklmnopqrst")]  # each has a word of its own
    path = table(tmp_path / "mine.csv", "text,label\n" + "\n".join(rows) + "\n")
    for settings in (SETTINGS, TextSettings(str(path), VOCABULARY, LENGTH)):
        data = load(str(path), text=settings)
        known = {c for c in "abcdefghijklmnopqrst" if c * 6 in words_of(data)}
        assert len(data.test) == 4
        assert len(known) == 16, "one for each training text"
    (tmp_path / "test.csv").write_text('"1","unheardof unheardof","unheardof"\n')
    (tmp_path / "train.csv").write_text('"1","usual usual","usual"\n"2","usual","usual"\n')
    (tmp_path / "test.txt").write_text("(1 (2 unheardof) (2 (2 unheardof) (2 unheardof)))\n")
    (tmp_path / "train.txt").write_text("(1 (2 usual) (2 (2 usual) (2 usual)))\n")
    for name in ("ag-news", "sst5"):
        with pytest.warns(UserWarning, match="published"):
            words = words_of(load(name, tmp_path, text=SETTINGS))
        assert "usual" in words
        assert "unheardof" not in words


def test_one_table_in_two_vocabularies_is_two_entries_of_the_cache(tmp_path: Path) -> None:
    rows = "".join(
        f"{said},{label}\n"
        for said, label in zip(text.glosses(sources.EMBEDDED_TEXT).texts, "ab" * 300, strict=True)
        if "," not in said and '"' not in said
    )
    path = table(tmp_path / "mine.csv", "text,label\n" + rows)
    sizes = [load(str(path), text=TextSettings(vocabulary=size, max_length=16)).vocabulary for size in (300, 350, 300)]
    assert sizes == [300, 350, 300]


def test_marks_that_a_text_spells_out_are_not_taken_for_marks(mini: Dataset) -> None:
    plain, spelt = tokens.encode(mini.tokenizer, ["a b", "a [PAD] [CLS] [SEP] b"], 64)
    assert (plain[plain != 0] <= 2).sum() == (spelt[spelt != 0] <= 2).sum() == 2, "the two that every text has"
    length = (spelt != 0).sum()
    assert (spelt[:length] != 0).all()


def test_a_tokenizer_that_cannot_be_had_or_used_is_refused(
    tmp_path: Path, mini: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match="no such file, and FEDSTILL_OFFLINE is set"):
        load("glosses-mini", text=TextSettings("nobody/nothing"))
    with pytest.raises(DataError, match="not a tokenizer"):
        load("glosses-mini", text=TextSettings(str(table(tmp_path / "t.json", "{}"))))
    unpadded = mini.tokenizer.replace("[PAD]", "word")
    with pytest.raises(SettingError, match="token 0 must be padding"):
        load("glosses-mini", text=TextSettings(unpadded))
    unknown_is_padding = json.loads(mini.tokenizer)
    unknown_is_padding["model"]["unk_token"] = "[PAD]"
    with pytest.raises(SettingError, match="would become padding"):
        load("glosses-mini", text=TextSettings(json.dumps(unknown_is_padding)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingError, match=r"this folder has no tokenizer\.json"):
        load("glosses-mini", text=TextSettings(str(tmp_path / "empty")))
    with pytest.raises(SettingError, match="there is no such file or folder"):
        load("glosses-mini", text=TextSettings(str(tmp_path / "nothing")))
    with pytest.raises(SettingError, match="max_length = 2"):
        load("glosses-mini", text=TextSettings(mini.tokenizer, max_length=2))
    with pytest.raises(SettingError, match="vocabulary = 100: at least 259"):
        load("glosses-mini", text=TextSettings(vocabulary=100))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SettingError, match=r"pip install 'fedstill\[text\]'"):
        load("glosses-mini")


def test_a_table_is_read_once_and_then_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path / "mine.csv", "text,label\n" + "good,1\nbad,0\n" * 10)
    first = load(str(path), text=SETTINGS)
    reads: list[Path] = []
    real = text.read_table

    def counted(path: Path, columns: text.Columns, *, labelled: bool = True) -> Corpus:
        reads.append(path)
        return real(path, columns, labelled=labelled)

    monkeypatch.setattr(text, "read_table", counted)
    again = load(str(path), text=SETTINGS)
    assert not reads
    assert torch.equal(first.train.x, again.train.x)
    assert first.tokenizer == again.tokenizer
    assert load(str(path), text=TextSettings(vocabulary=VOCABULARY, max_length=16)).shape == (16,)
    assert len(reads) == 1, "of another length is another entry"
