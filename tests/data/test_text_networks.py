"""Networks for text: padding changes no logit; DistilBERT from a folder; LoRA."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedstill
from fedstill.analysis.final import FinalModel, read_weights
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.core.errors import SettingError
from fedstill.core.tree import decode
from fedstill.core.weights import FlatNet
from fedstill.data import Dataset, from_arrays, tokens
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.models import build, pretrained
from fedstill.models.base import Classifier
from fedstill.models.pretrained import Pretrained
from support.recorder import record_rounds
from support.runs import weights
from support.text import LENGTH, TINY, VOCABULARY, table

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.usefixtures("cache_folder")


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
