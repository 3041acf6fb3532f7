"""Text: reading it, tokens, networks whose logits padding does not change, LoRA, and every method on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import commandline
import numpy as np
import pytest
import torch
from byhand import record_crossings
from conftest import weights
from safetensors.torch import load_file
from torch import nn

import fedstill
from fedstill.core.errors import DataError, SettingError
from fedstill.core.tree import decode
from fedstill.core.weights import FlatNet
from fedstill.data import Dataset, TextSettings, from_arrays, load, sources, tokens
from fedstill.data.formats import text
from fedstill.data.formats.text import Corpus, parse_tree
from fedstill.experiment.config import resolve
from fedstill.experiment.final import read_weights
from fedstill.experiment.rundir import RunDirectory
from fedstill.experiment.setup import prepare
from fedstill.methods import registry
from fedstill.models import build
from fedstill.models.base import Classifier
from fedstill.models.pretrained import Pretrained

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
PIXELS = ("fedkf", "dafkd", "fedftg", "fedhyb")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FEDSTILL_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def mini() -> Dataset:
    """The embedded sentences, in few tokens."""
    return load("sst-mini", text=SETTINGS)


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


def test_the_embedded_sentences_are_real_trees_with_as_many_of_each_class(mini: Dataset) -> None:
    corpus = text.sst5(sources.EMBEDDED_TEXT)
    assert np.bincount(corpus.labels).tolist() == [120] * 5
    assert mini.test.y.bincount().tolist() == [60] * 5
    assert mini.classes == ("very negative", "negative", "neutral", "positive", "very positive")
    assert not any("(" in sentence.split() and ")" not in sentence for sentence in corpus.texts)
    words = np.array([len(sentence.split()) for sentence in corpus.texts])
    assert 17 < words.mean() < 22, "19 in the whole treebank"
    notice = sources.EMBEDDED.with_name("NOTICE").read_text()
    assert "Stanford Sentiment Treebank" in notice
    assert "Socher" in notice
    assert sum(path.stat().st_size for path in sources.EMBEDDED_TEXT) < 100_000


def test_ag_news_has_classes_from_1_and_texts_of_title_and_description(tmp_path: Path) -> None:
    rows = '"3","Oil, ""dear""","Prices\\rose &lt;b&gt;"\n"1","A","B, C"\n' * 3
    table(tmp_path / "train.csv", rows)
    table(tmp_path / "test.csv", '"4","Chips","<b>Fast</b>\\ones"\n')
    corpus = text.ag_news([tmp_path / "train.csv", tmp_path / "test.csv"])
    assert corpus.texts[:2] == ['Oil, "dear" Prices rose &lt;b&gt;', "A B, C"]
    assert corpus.test_texts == ["Chips  Fast  ones"]
    assert corpus.labels.tolist() == [2, 0] * 3
    data = load("ag-news", tmp_path, text=SETTINGS)
    assert data.classes == ("World", "Sports", "Business", "Sci/Tech")
    assert data.train.y.tolist() == [2, 0] * 3
    assert data.test.y.tolist() == [3]


@pytest.mark.parametrize("row", ['"5","A","B"', '"1","A"', '"x","A","B"', '"1","A","B'])
def test_a_row_that_is_not_of_ag_news_is_refused(tmp_path: Path, row: str) -> None:
    path = table(tmp_path / "train.csv", f'"1","A","B"\n{row}\n')
    with pytest.raises(DataError, match=r"row 2|not CSV"):
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
        ("text,label\nA\n", "row 2 has 1 fields, not 2"),
        ("text,label\n", "no texts"),
    ],
)
def test_a_table_that_lacks_something_is_refused(tmp_path: Path, rows: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        load(str(table(tmp_path / "mine.csv", rows)))


def test_a_table_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        load(str(tmp_path / "mine.csv"))
    (tmp_path / "mine.csv").write_bytes(b"text,label\n\xff\xfe,1\n")
    with pytest.raises(DataError, match="cannot be read as text"):
        load(str(tmp_path / "mine.csv"))


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_the_same_texts_give_the_same_tokenizer_and_it_can_spell_everything() -> None:
    texts = text.sst5(sources.EMBEDDED_TEXT).texts
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
        same = load("sst-mini", text=TextSettings(str(name), max_length=LENGTH))
        assert same.tokenizer == mini.tokenizer
        assert torch.equal(same.train.x, mini.train.x)
    public = table(tmp_path / "public.csv", "text\n" + "anybody may read this\n" * 9)
    other = load("sst-mini", text=TextSettings(str(public), max_length=LENGTH))
    assert set(json.loads(other.tokenizer)["model"]["vocab"]) >= {"Ġanybody", "Ġmay", "Ġread", "Ġthis"}
    assert "Ġfilm" not in json.loads(other.tokenizer)["model"]["vocab"], "nothing of the clients' texts"


def test_a_tokenizer_that_cannot_be_had_or_used_is_refused(
    tmp_path: Path, mini: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match="no such file, and FEDSTILL_OFFLINE is set"):
        load("sst-mini", text=TextSettings("nobody/nothing"))
    with pytest.raises(DataError, match="not a tokenizer"):
        load("sst-mini", text=TextSettings(str(table(tmp_path / "t.json", "{}"))))
    unpadded = mini.tokenizer.replace("[PAD]", "word")
    with pytest.raises(SettingError, match="token 0 must be padding"):
        load("sst-mini", text=TextSettings(unpadded))
    with pytest.raises(SettingError, match="max_length = 2"):
        load("sst-mini", text=TextSettings(mini.tokenizer, max_length=2))
    with pytest.raises(SettingError, match="vocabulary = 100: at least 259"):
        load("sst-mini", text=TextSettings(vocabulary=100))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SettingError, match=r"pip install 'fedstill\[text\]'"):
        load("sst-mini")


def test_a_table_is_read_once_and_then_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path / "mine.csv", "text,label\n" + "good,1\nbad,0\n" * 10)
    first = load(str(path), text=SETTINGS)
    reads: list[Path] = []
    real = text.read_csv

    def counted(path: Path, *, labelled: bool = True) -> Corpus:
        reads.append(path)
        return real(path, labelled=labelled)

    monkeypatch.setattr(text, "read_csv", counted)
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
    with pytest.raises(SettingError, match="neither a folder"):
        build("distilbert", (LENGTH,), 2, vocabulary=VOCABULARY, pretrained=str(tmp_path / "nothing"))
    with pytest.raises(SettingError, match="only images can be augmented"):
        fedstill.run(data=mini, augment="flip", **TINY)


def test_numbers_of_tokens_that_users_bring_are_text_too() -> None:
    data = from_arrays(np.random.default_rng(0).integers(0, 50, (40, 6)), np.arange(40) % 2)
    assert data.vocabulary == 50
    assert fedstill.run(data=data, **TINY | {"fraction": 1.0}).summary["rounds"] == 2
    assert from_arrays(np.zeros((10, 6), np.float32), np.arange(10) % 2).vocabulary == 0


# --- DistilBERT and LoRA ----------------------------------------------------------------------------------------------


def of(encoder: Path, **options: Any) -> dict[str, Any]:
    return TINY | {"model": "distilbert", "model_options": {"pretrained": str(encoder), **options}, "rounds": 3}


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
    crossed = record_crossings(monkeypatch)
    settings = of(encoder, lora=2) | {"optimizer": "adam", "lr": 0.01}
    result = fedstill.run(data=mini, out=tmp_path / "run", **settings)
    net = result.model
    assert isinstance(net, Pretrained)
    # Two layers of 16 units; LoRA's matrices beside queries and values; the layer above; the classifier.
    trained = 2 * 2 * (2 * 16 + 16 * 2) + (16 * 16 + 16) + (16 * 5 + 5)
    flat = FlatNet(net)
    assert flat.size == flat.trainable == trained
    assert crossed
    messages = [message for round_ in crossed for message in (round_.down, *round_.up)]
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


# --- methods ----------------------------------------------------------------------------------------------------------

OWN: dict[str, dict[str, Any]] = {  # what makes a method quick
    "feddf": {"steps": 2},
    "fedgen": {"generator_steps": 2},
    "fedbe": {"samples": 2},
    "creff": {"features": 4, "match_steps": 2, "retrain_epochs": 2, "draws": 1},
}
PLAIN = [name for name in registry.names() if name not in PIXELS]
COMBINED = ["fedprox+t1", "fedgkd+feddf", "fedprox+lkd", *(f"fedavg+{name}" for name in registry.modifiers())]


@pytest.mark.parametrize("method", [*PLAIN, *COMBINED])
def test_every_method_that_makes_no_pixels_runs_on_text(mini: Dataset, method: str) -> None:
    needs = registry.make(method).needs()
    known = {parameter.name for parameter in registry.hyper_parameters(method)}
    own = {key: value for part in method.split("+") for key, value in OWN.get(part, {}).items() if key in known}
    settings = TINY | own
    settings |= {"pool": 0.2, "proxy": "pool" if needs.proxy_data else ""}
    settings |= {"participation": 1.0, "clients": 5} if "krum" in method else {}
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
    settings = TINY | {"data": "sst-mini", "vocabulary": VOCABULARY, "max_length": LENGTH, "steps": 2}
    result = fedstill.run("feddf", proxy=str(path), proxy_size=40, **settings)
    assert result.summary["rounds"] == 2
    task = prepare(resolve(settings, {"method": "feddf", "proxy": str(path), "proxy_size": 40})).task
    assert task.proxy is not None
    from tokenizers import Tokenizer

    said = Tokenizer.from_str(mini.tokenizer).decode(task.proxy.x(torch.tensor([0]))[0].tolist())
    assert said.strip().startswith("a film about"), "in the tokens of the clients' texts"
    with pytest.raises(DataError, match="same tokenizer"):
        fedstill.run("feddf", proxy=load("sst-mini", text=TextSettings(vocabulary=300, max_length=LENGTH)), **settings)


def test_text_has_a_model_of_its_own_unless_one_is_named(mini: Dataset) -> None:
    assert resolve({"data": "sst5"}).model == "transformer"
    assert resolve({"data": "./mine.csv", "model": "bag"}).model == "bag"
    assert resolve({"data": "mnist"}).model == "lenet5"
    options = {key: value for key, value in TINY.items() if key != "model"}
    assert type(fedstill.run(data=mini, **options).model).__name__ == "Transformer"


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


# --- the command line -------------------------------------------------------------------------------------------------


def test_a_run_on_text_from_the_command_line_repeats_from_its_file(tmp_path: Path) -> None:
    words = ["--data", "sst-mini", "--model", "bag", "--clients", "3", "--rounds", "1", "--epochs", "1"]
    words += ["--set", "vocabulary=300", "--set", "max_length=16", "--set", "engine=inline", "--out"]
    assert commandline.fedstill("run", "fedavg", *words, str(tmp_path / "once")).code == 0
    answer = commandline.fedstill("run", str(tmp_path / "once" / "config.toml"), "--out", str(tmp_path / "again"))
    assert answer.code == 0, answer
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("once", "again")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert RunDirectory.open(tmp_path / "again", lock=False).config().max_length == 16
    used = load("sst-mini", text=TextSettings(vocabulary=300, max_length=16)).tokenizer
    assert (tmp_path / "once" / "tokenizer.json").read_text(encoding="utf-8") == used


def test_the_list_of_methods_says_which_do_not_take_text() -> None:
    answer = commandline.fedstill("methods", "--data", "sst-mini", "--model", "bag", "--set", "vocabulary=300")
    assert answer.code == 0, answer
    assert answer.out.count("not on these data") == len(PIXELS)
    alone = commandline.fedstill("methods", "fedkf", "--data", "sst-mini", "--model", "bag")
    assert alone.code == 2
    assert "its generator makes images" in alone.err
