"""Text: reading it, tokens, networks whose logits padding does not change, LoRA, and every method on it."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedstill
from fedstill.analysis.final import FinalModel, read_weights
from fedstill.building.config import TEXT_TRAINING, resolve
from fedstill.building.setup import prepare
from fedstill.core.errors import DataError, SettingError
from fedstill.core.tree import decode
from fedstill.core.weights import FlatNet
from fedstill.data import Dataset, TextSettings, from_arrays, load, sources, tokens
from fedstill.data.formats import text
from fedstill.data.formats.text import Corpus, parse_tree
from fedstill.deployment.site import LocalInputs
from fedstill.methods import registry
from fedstill.models import build, pretrained
from fedstill.models.base import Classifier
from fedstill.models.pretrained import Pretrained
from fedstill.running.directory import RunDirectory
from support import commandline
from support.recorder import record_rounds
from support.runs import weights

pytest.importorskip("tokenizers")

LENGTH, VOCABULARY = 32, 400
SETTINGS = TextSettings(vocabulary=VOCABULARY, max_length=LENGTH)
TINY: dict[str, Any] = {
    "model": "transformer",
    "model_options": {"dim": 8, "layers": 1, "heads": 2},
    "clients": 4,
    "participation": 0.5,
    "partition": "iid",
    "rounds": 2,
    "rounds_per_episode": 1,
    "epochs": 1,
    "fraction": 0.25,
    "engine": "inline",
}
STEPS_OF_SGD = ("scaffold", "fednova")  # which count or correct them
PIXELS = ("fedkf", "dafkd", "fedftg", "fedhyb")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FEDSTILL_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def mini() -> Dataset:
    """The embedded texts, in few tokens."""
    return load("glosses-mini", text=SETTINGS)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a DistilBERT of two small layers."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("distilbert")
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=16, hidden_dim=32, n_layers=2, n_heads=2, max_position_embeddings=LENGTH
    )
    torch.manual_seed(0)
    transformers.DistilBertModel(config).save_pretrained(folder)
    return folder


def table(path: Path, rows: str) -> Path:
    path.write_text(rows, encoding="utf-8")
    return path


# --- the formats ------------------------------------------------------------------------------------------------------


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


# --- tokens -----------------------------------------------------------------------------------------------------------


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


# --- networks ---------------------------------------------------------------------------------------------------------


def networks(encoder: Path) -> list[Classifier]:
    """One of each kind, with weights that make logits differ."""
    torch.manual_seed(0)
    shape = (LENGTH,)
    found = [build("bag", shape, 3, vocabulary=VOCABULARY), build("transformer", shape, 3, vocabulary=VOCABULARY)]
    found += [
        build("distilbert", shape, 3, vocabulary=VOCABULARY, pretrained=str(encoder), lora=rank) for rank in (0, 2)
    ]
    return [net.eval() for net in found]


def test_padding_never_changes_a_logit(encoder: Path) -> None:
    short = torch.randint(1, VOCABULARY, (4, 5), dtype=torch.int32)
    narrow, wide = (nn.functional.pad(short, (0, length - 5)) for length in (8, LENGTH))
    longer = torch.randint(1, VOCABULARY, (1, LENGTH), dtype=torch.int32)
    for net in networks(encoder):
        logits = net(narrow)
        assert torch.equal(net(wide), logits), "the same bits, whatever the stored width"
        beside = net(torch.cat([wide, longer]))[:4]
        assert torch.allclose(beside, logits, atol=1e-5), "beside a longer text"
        assert logits.std(0).min() > 1e-4, "and not because all texts are alike"


def test_the_order_of_words_matters_to_a_transformer_and_not_to_a_bag(encoder: Path) -> None:
    x = torch.tensor([[5, 6, 7, 8]])
    bag, *others = networks(encoder)
    assert torch.allclose(bag(x), bag(x.flip(1)), atol=1e-6)
    assert all(not torch.allclose(net(x), net(x.flip(1)), atol=1e-5) for net in others)


def test_a_text_without_tokens_still_has_logits(encoder: Path) -> None:
    x = torch.zeros(2, LENGTH, dtype=torch.int32)
    x[1, :3] = 7
    for net in networks(encoder):
        assert torch.isfinite(net(x)).all()


def test_networks_and_data_that_do_not_fit_are_refused(mini: Dataset, encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="'lenet5' does not take text; those that do are bag, dist"):
        fedstill.run(data=mini, **TINY | {"model": "lenet5", "model_options": {}})
    with pytest.raises(SettingError, match="'bag' needs text, got samples of 1x28x28"):
        fedstill.run(model="bag")
    with pytest.raises(SettingError, match=r"dim = 10 cannot be divided among heads = 4"):
        build("transformer", (LENGTH,), 2, vocabulary=9, dim=10)
    with pytest.raises(SettingError, match="knows 400 tokens, and the text's tokenizer has 500"):
        build("distilbert", (LENGTH,), 2, vocabulary=500, pretrained=str(encoder))
    with pytest.raises(SettingError, match=r"reads 32 tokens at most; set max_length"):
        build("distilbert", (64,), 2, vocabulary=VOCABULARY, pretrained=str(encoder))
    with pytest.raises(SettingError, match="there is no such folder"):
        build("distilbert", (LENGTH,), 2, vocabulary=VOCABULARY, pretrained=str(tmp_path / "nothing"))
    with pytest.raises(SettingError, match="only images can be augmented"):
        fedstill.run(data=mini, augment="flip", **TINY)


def test_numbers_of_tokens_that_users_bring_are_text_too() -> None:
    data = from_arrays(np.random.default_rng(0).integers(0, 50, (40, 6)), np.arange(40) % 2, tokens=True)
    assert data.vocabulary == 50
    assert fedstill.run(data=data, **TINY | {"fraction": 1.0}).summary["rounds"] == 2
    assert from_arrays(np.zeros((10, 6), np.float32), np.arange(10) % 2).vocabulary == 0


# --- DistilBERT and LoRA ----------------------------------------------------------------------------------------------


def of(encoder: Path, **options: Any) -> dict[str, Any]:
    return TINY | {"model": "distilbert", "model_options": {"pretrained": str(encoder), **options}, "rounds": 3}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_distilbert_from_a_folder_trains_is_saved_and_resumes_in_the_same_bits(
    mini: Dataset, encoder: Path, tmp_path: Path, rank: int
) -> None:
    settings = of(encoder, lora=rank) | {"optimizer": "adam", "lr": 1e-3}
    whole = fedstill.run(data=mini, out=tmp_path / "whole", **settings)
    fedstill.run(data=mini, out=tmp_path / "parts", **settings | {"rounds": 1})
    parts = fedstill.resume(tmp_path / "parts", data=mini, rounds=3)
    assert torch.equal(weights(whole), weights(parts))
    kept = load_file(tmp_path / "whole" / "model.safetensors")
    assert set(kept) == set(whole.model.state_dict()), "the file holds all of the model"
    task = prepare(resolve(settings), data=mini).task
    assert torch.equal(read_weights(tmp_path / "whole", task), FlatNet(whole.model).read())


def test_a_folder_without_weights_gives_an_encoder_that_knows_nothing(
    mini: Dataset, encoder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((encoder / "config.json").read_bytes())
    tasks = [prepare(resolve(of(tmp_path), {"seed": seed}), data=mini).task for seed in (0, 0, 1)]
    first, same, other = (task.initial for task in tasks)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_what_lora_freezes_is_neither_sent_nor_kept_nor_changed(
    mini: Dataset, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed = record_rounds(monkeypatch)
    settings = of(encoder, lora=2) | {"optimizer": "adam", "lr": 0.01}
    result = fedstill.run(data=mini, out=tmp_path / "run", **settings)
    net = result.model
    assert isinstance(net, Pretrained)
    # Two layers of 16 units; LoRA's matrices beside queries and values; the layer above; the classifier.
    trained = 2 * 2 * (2 * 16 + 16 * 2) + (16 * 16 + 16) + (16 * 5 + 5)
    flat = FlatNet(net)
    assert flat.size == flat.trainable == trained
    assert crossed
    messages = [message for round_ in crossed for message in (round_.down, *round_.up.values())]
    assert {tensor.numel() for message in messages for tensor in message.values()} == {trained}
    for file in (tmp_path / "run" / "checkpoints").glob("round-*.safetensors"):
        assert decode(file.read_bytes())["model"].numel() == trained
    before = load_file(encoder / "model.safetensors")
    after = {
        name.removeprefix("encoder.base_model.model.").replace(".base_layer", ""): value
        for name, value in net.state_dict().items()
        if "lora_" not in name and name.startswith("encoder.")
    }
    assert set(after) == set(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    start = prepare(resolve(settings), data=mini).task.initial
    moved = [not torch.equal(entry.view(start), entry.view(flat.read())) for entry in flat.entries]
    assert all(moved), "all the rest has learnt"


def test_networks_with_lora_share_what_is_frozen(encoder: Path) -> None:
    make = [build("distilbert", (LENGTH,), 2, vocabulary=VOCABULARY, pretrained=str(encoder), lora=2) for _ in "ab"]
    frozen = [{p.data_ptr() for p in net.parameters() if not p.requires_grad} for net in make]
    assert frozen[0] == frozen[1] != set()
    plain = build("distilbert", (LENGTH,), 2, vocabulary=VOCABULARY, pretrained=str(encoder))
    assert all(p.requires_grad for p in plain.parameters())
    assert not frozen[0] & {p.data_ptr() for p in plain.parameters()}


def folder_like(encoder: Path, folder: Path, *files: str) -> Path:
    """A folder with these files of the encoder's."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in files or ("config.json", "model.safetensors"):
        shutil.copy(encoder / name, folder / name)
    return folder


def built(folder: Path, **options: Any) -> Classifier:
    return build("distilbert", (LENGTH,), 2, vocabulary=VOCABULARY, pretrained=str(folder), **options)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "tf_model.h5", "flax_model.msgpack"])
def test_weights_that_are_not_safetensors_are_refused_and_not_left_out(
    encoder: Path, tmp_path: Path, name: str
) -> None:
    folder_like(encoder, tmp_path, "config.json")
    (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(SettingError, match=rf"its weights in {name} alone, and only safetensors are read"):
        built(tmp_path)
    folder_like(encoder, tmp_path)
    assert built(tmp_path).feature_dim == 16, "beside safetensors they do not matter"


def test_a_run_says_that_its_encoder_has_learnt_nothing(mini: Dataset, encoder: Path, tmp_path: Path) -> None:
    folder = folder_like(encoder, tmp_path / "bare", "config.json")
    for name, said in ((folder, True), (encoder, False)):
        fedstill.run(data=mini, out=tmp_path / str(said), **of(name) | {"rounds": 1})
        assert ("as if it had learnt nothing" in (tmp_path / str(said) / "log.txt").read_text()) == said


def test_code_beside_a_model_is_never_run_nor_asked_about(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", asked.append)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    for given in (own, own | json.loads((encoder / "config.json").read_text())):
        (tmp_path / "config.json").write_text(json.dumps(given))
        if given["model_type"] == "own":
            with pytest.raises(SettingError, match="custom code"):
                built(tmp_path)
        else:
            assert built(tmp_path).feature_dim == 16
    assert not asked
    assert not (tmp_path / "ran").exists()


def test_a_file_that_lacks_layers_or_is_cut_is_refused(encoder: Path, tmp_path: Path) -> None:
    folder_like(encoder, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layers": 3}))
    with pytest.raises(SettingError, match=r"lacks 16 of the weights, such as transformer\.layer\.2"):
        built(tmp_path)
    folder_like(encoder, tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for length in (4, 500, len(whole) - 8):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(SettingError, match="neither a folder with"):
            built(tmp_path)


@pytest.mark.parametrize("kind", ["GPT2", "T5", "Bart", "ResNet"])
def test_what_is_no_encoder_of_text_is_refused(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    with pytest.raises(SettingError, match="no encoder of text"):
        built(tmp_path)


def bert_without_pooler(folder: Path) -> Any:
    """A folder with a BERT as it is after filling in masked words, in half precision; its configuration."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **shape)
    transformers.BertForMaskedLM(config).half().save_pretrained(folder)
    return config


def test_bert_without_its_pooler_in_half_precision_is_read_in_full(tmp_path: Path) -> None:
    config = bert_without_pooler(tmp_path)
    net = built(tmp_path)
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert not [name for name in net.state_dict() if "pooler" in name], "which nothing uses"
    shutil.rmtree(tmp_path)
    config.dtype = torch.float16
    config.save_pretrained(tmp_path)
    assert {p.dtype for p in built(tmp_path).parameters()} == {torch.float32}


@pytest.mark.parametrize("files", [("config.json",), ("config.json", "model.safetensors"), ()])
@pytest.mark.parametrize("rank", [0, 2])
def test_initial_weights_do_not_depend_on_what_was_read_before(
    encoder: Path, tmp_path: Path, files: tuple[str, ...], rank: int
) -> None:
    if files:
        folder_like(encoder, tmp_path, *files)
    else:
        bert_without_pooler(tmp_path)  # what its file lacks is drawn when it is read

    def initial(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return FlatNet(built(tmp_path, lora=rank)).read()

    pretrained._loaded.cache_clear()
    cold = initial(1)
    pretrained._loaded.cache_clear()
    initial(0)
    assert torch.equal(initial(1), cold)


def test_an_encoder_brings_its_own_tokenizer_and_takes_no_other(mini: Dataset, encoder: Path, tmp_path: Path) -> None:
    folder = folder_like(encoder, tmp_path / "distilbert")
    settings = of(folder) | {"data": "glosses-mini", "max_length": LENGTH, "rounds": 1}
    with pytest.raises(SettingError, match=r"comes without a tokenizer\.json; set tokenizer to the one"):
        fedstill.run(**settings)
    texts = ["quite other words"] * 9
    own = tokens.trained(texts, VOCABULARY)
    (folder / "tokenizer.json").write_text(own, encoding="utf-8")
    fedstill.run(out=tmp_path / "run", **settings)
    assert (tmp_path / "run" / "tokenizer.json").read_text(encoding="utf-8") == own
    with pytest.raises(SettingError, match=r"in other tokens than .* has, which the encoder was trained with"):
        fedstill.run(**settings | {"tokenizer": mini.tokenizer})
    with pytest.raises(SettingError, match="in other tokens than"):
        fedstill.run(**settings | {"data": mini})
    bare = folder_like(encoder, tmp_path / "bare", "config.json")
    nothing_learnt = settings | {"model_options": {"pretrained": str(bare)}, "vocabulary": VOCABULARY}
    assert fedstill.run(**nothing_learnt).summary["rounds"] == 1, "which has no tokens of its own"


def test_a_run_goes_on_in_its_own_tokens(mini: Dataset, tmp_path: Path) -> None:
    named = table(tmp_path / "tokenizer.json", mini.tokenizer)
    settings = TINY | {"data": "glosses-mini", "tokenizer": str(named), "max_length": LENGTH, "epochs": 1}
    whole = fedstill.run(out=tmp_path / "whole", **settings)
    fedstill.run(out=tmp_path / "parts", **settings | {"rounds": 1})
    named.write_text(tokens.trained(["other words"] * 9, VOCABULARY), encoding="utf-8")
    assert torch.equal(weights(fedstill.resume(tmp_path / "parts", rounds=2)), weights(whole))
    final = FinalModel(tmp_path / "whole")
    assert torch.equal(final.samples().x(torch.arange(9)), mini.test.x[:9])
    named.unlink()
    assert FinalModel(tmp_path / "parts").task.dataset.tokenizer == mini.tokenizer


def test_a_run_does_not_go_on_upon_another_frozen_encoder(mini: Dataset, encoder: Path, tmp_path: Path) -> None:
    folder = folder_like(encoder, tmp_path / "distilbert")
    settings = of(folder, lora=2) | {"rounds": 1}
    fedstill.run(data=mini, out=tmp_path / "run", **settings)
    fedstill.resume(tmp_path / "run", data=mini, rounds=2)
    changed = load_file(folder / "model.safetensors")
    changed["embeddings.word_embeddings.weight"][7, 3] += 1
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingError, match="froze, and was trained upon, have changed"):
        fedstill.resume(tmp_path / "run", data=mini, rounds=3)
    with pytest.raises(SettingError, match="have changed"):
        FinalModel(tmp_path / "run", data=mini)
    fedstill.run(data=mini, out=tmp_path / "run", force=True, **TINY)
    fedstill.resume(tmp_path / "run", data=mini, rounds=3)


def test_a_site_loads_no_encoder_that_only_a_server_names(encoder: Path) -> None:
    told = resolve(of(encoder), {"data": "glosses-mini"}).toml()
    with pytest.raises(SettingError, match=r"begins with a pretrained encoder, .*; give yours to the site"):
        LocalInputs().config(told)
    assert LocalInputs(pretrained="mine").config(told).model_options["pretrained"] == "mine"
    unnamed = resolve({"model": "distilbert", "data": "glosses-mini"}).toml()
    assert "pretrained" not in LocalInputs().config(unnamed).model_options
    plain = resolve({"data": "glosses-mini"}).toml()
    assert LocalInputs(pretrained="mine").config(plain).model_options == {}


# --- methods ----------------------------------------------------------------------------------------------------------

OWN: dict[str, dict[str, Any]] = {  # what makes a method quick
    "feddf": {"server_steps": 2},
    "fedgen": {"generator_steps": 2},
    "fedbe": {"samples": 2},
    "creff": {"features": 4, "match_steps": 2, "retrain_epochs": 2, "draws": 1},
}
PLAIN = [name for name in registry.names() if name not in PIXELS]
COMBINED = ["fedprox+t1", "fedgkd+feddf", "fedprox+lkd", *(f"fedavg+{name}" for name in registry.modifiers())]


@pytest.mark.slow
@pytest.mark.parametrize("method", [*PLAIN, *COMBINED])
def test_every_method_that_makes_no_pixels_runs_on_text(mini: Dataset, method: str) -> None:
    needs = registry.make(method).needs()
    known = {parameter.name for parameter in registry.hyper_parameters(method)}
    own = {key: value for part in method.split("+") for key, value in OWN.get(part, {}).items() if key in known}
    settings = TINY | own
    settings |= {"pool": 0.2, "proxy": "pool" if needs.proxy_data else ""}
    settings |= {"optimizer": "sgd"} if method in STEPS_OF_SGD else {}
    fewest = registry.make(method).fewest_clients
    settings |= {"participation": 1.0, "clients": fewest} if fewest > 1 else {}
    settings |= {"server_epochs": 1} if "server_epochs" in known else {}
    result = fedstill.run(method, data=mini, **settings)
    assert result.summary["rounds"] == 2
    assert all(np.isfinite(record["loss"]) for record in result.records)


@pytest.mark.parametrize("attack", ["label-flip", "noise", "sign-flip"])
def test_clients_attack_on_text_too(mini: Dataset, attack: str) -> None:
    settings: dict[str, Any] = TINY | {"participation": 1.0}
    how = {"attack": attack, "attackers": 1}
    honest, attacked = (fedstill.run("fedavg+median", data=mini, **given) for given in (settings, settings | how))
    assert not torch.equal(weights(honest), weights(attacked))


@pytest.mark.parametrize("method", PIXELS)
def test_a_method_that_makes_or_turns_pixels_refuses_text(mini: Dataset, method: str) -> None:
    with pytest.raises(SettingError, match="images"):
        fedstill.run(method, data=mini, **TINY | {"pool": 0.2, "proxy": "pool"})


def test_fedhyb_without_its_sub_networks_takes_text(mini: Dataset) -> None:
    settings = TINY | {"pool": 0.2, "proxy": "pool", "variant": "3", "server_epochs": 1}
    assert fedstill.run("fedhyb", data=mini, **settings).summary["rounds"] == 2


def test_unlabelled_text_stands_in_for_the_clients(tmp_path: Path, mini: Dataset) -> None:
    path = table(tmp_path / "public.csv", "text\n" + "".join(f"a film about {k} things\n" for k in range(60)))
    settings = TINY | {"data": "glosses-mini", "vocabulary": VOCABULARY, "max_length": LENGTH, "server_steps": 2}
    result = fedstill.run("feddf", proxy=str(path), out=tmp_path / "run", **settings)
    assert result.summary["rounds"] == 2
    assert (
        "proxy_size = 1000: the proxy data have 60 samples, and all are used" in (tmp_path / "run/log.txt").read_text()
    )
    task = prepare(resolve(settings, {"method": "feddf", "proxy": str(path), "proxy_size": 40})).task
    assert task.proxy is not None
    assert len(task.proxy) == 40
    from tokenizers import Tokenizer

    said = Tokenizer.from_str(mini.tokenizer).decode(task.proxy.x(torch.tensor([0]))[0].tolist())
    assert said.strip().startswith("a film about"), "in the tokens of the clients' texts"
    with pytest.raises(DataError, match="same tokenizer"):
        fedstill.run(
            "feddf", proxy=load("glosses-mini", text=TextSettings(vocabulary=300, max_length=LENGTH)), **settings
        )


def test_text_has_a_model_and_an_optimiser_of_its_own_unless_they_are_named(mini: Dataset, tmp_path: Path) -> None:
    assert resolve({"data": "sst5"}).model == "transformer"
    assert resolve({"data": "./mine.csv", "model": "bag"}).model == "bag"
    assert resolve({"data": "mnist"}).model == "lenet5"
    given: list[dict[str, Any]] = [{}, {"lr": 0.1}, {"optimizer": "sgd"}]
    for data, plain in (("glosses-mini", ("adam", 0.001)), ("mnist", ("sgd", 0.05))):
        found = [resolve({"data": data}, settings) for settings in given]
        assert [(c.optimizer, c.lr) for c in found] == [plain, ("sgd", 0.1), ("sgd", 0.05)]
    options = {key: value for key, value in TINY.items() if key != "model"}
    result = fedstill.run(data=mini, out=tmp_path / "run", **options)
    assert type(result.model).__name__ == "Transformer"
    assert RunDirectory.open(tmp_path / "run", lock=False).config().optimizer == "adam"


def test_the_same_bits_in_one_process_or_two(mini: Dataset) -> None:
    one, two = (fedstill.run("fedgkd", data=mini, **TINY | {"engine": e, "workers": 2}) for e in ("inline", "process"))
    assert torch.equal(weights(one), weights(two))


@pytest.mark.parametrize("model", ["bag", "transformer"])
def test_networks_learn_from_nothing(tmp_path: Path, model: str) -> None:
    rng = np.random.default_rng(0)
    words = np.array(["the", "of", "a", "and", "on", "it", "was", "were"])
    told = (("ball", "goal", "team"), ("bank", "stock", "price"))
    lines = [
        f"{' '.join(rng.permutation([*rng.choice(words, 6), rng.choice(told[k % 2])]))},{k % 2}" for k in range(200)
    ]
    path = table(tmp_path / "news.csv", "text,label\n" + "\n".join(lines) + "\n")
    result = fedstill.run(
        data=str(path), model=model, clients=2, partition="iid", participation=1.0, rounds=4, epochs=3, batch_size=16,
        optimizer="adam", lr=0.01, vocabulary=VOCABULARY, max_length=LENGTH, engine="inline",
    )  # fmt: skip
    assert result.summary["best_accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("model", "lr"), [("transformer", 0.001), ("bag", 0.01)])
def test_the_embedded_texts_can_be_learnt(model: str, lr: float) -> None:
    settings: dict[str, Any] = {} if lr == TEXT_TRAINING["lr"] else {"lr": lr, "optimizer": "adam"}
    result = fedstill.run(
        data="glosses-mini", model=model, clients=4, partition="iid", participation=1.0, rounds=4,
        max_length=LENGTH, engine="inline", eval_every=0, **settings,
    )  # fmt: skip
    assert result.summary["final_accuracy"] > 0.45, "chance is 0.2"


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_on_text_from_the_command_line_repeats_from_its_file(tmp_path: Path) -> None:
    words = ["--data", "glosses-mini", "--model", "bag", "--clients", "3", "--rounds", "1", "--epochs", "1"]
    words += ["--set", "vocabulary=300", "--set", "max_length=16", "--set", "engine=inline", "--out"]
    assert commandline.fedstill("run", "fedavg", *words, str(tmp_path / "once")).code == 0
    answer = commandline.fedstill("run", str(tmp_path / "once" / "config.toml"), "--out", str(tmp_path / "again"))
    assert answer.code == 0, answer
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("once", "again")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert RunDirectory.open(tmp_path / "again", lock=False).config().max_length == 16
    used = load("glosses-mini", text=TextSettings(vocabulary=300, max_length=16)).tokenizer
    assert (tmp_path / "once" / "tokenizer.json").read_text(encoding="utf-8") == used


def test_a_dry_run_asks_nothing_of_the_hub_and_shows_how_text_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_OFFLINE", "0")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("it went to the network"))
    answer = commandline.fedstill("run", "fedavg", "--data", "glosses-mini", "--model", "distilbert", "--dry-run")
    assert answer.code == 0, answer
    assert 'optimizer = "adam"\nlr = 0.001\n' in answer.out


def test_help_names_what_text_takes() -> None:
    said = " ".join(commandline.fedstill("run", "--help").out.replace("│", " ").split())
    for word in ("transformer, bag, lstm, distilbert", "table of text"):
        assert word in said


def test_the_list_of_methods_says_which_do_not_take_text() -> None:
    answer = commandline.fedstill("methods", "--data", "glosses-mini", "--model", "bag", "--set", "vocabulary=300")
    assert answer.code == 0, answer
    assert answer.out.count("not on these data") == len(PIXELS) + len(STEPS_OF_SGD)
    assert answer.out.count("optimizer=sgd") == len(STEPS_OF_SGD), "what to set is said"
    alone = commandline.fedstill("methods", "fedkf", "--data", "glosses-mini", "--model", "bag")
    assert alone.code == 2
    assert "its generator makes images" in alone.err
