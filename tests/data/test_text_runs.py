"""Runs on text: every method, and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedstill
from fedstill.building.config import TEXT_TRAINING, resolve
from fedstill.building.setup import prepare
from fedstill.core.errors import DataError, SettingError
from fedstill.data import Dataset, TextSettings, load
from fedstill.methods import registry
from fedstill.running.directory import RunDirectory
from support import commandline
from support.runs import weights
from support.text import LENGTH, TINY, VOCABULARY, table

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.usefixtures("cache_folder")

STEPS_OF_SGD = ("scaffold", "fednova")  # which count or correct them

PIXELS = ("fedkf", "dafkd", "fedftg", "fedhyb")


OWN: dict[str, dict[str, Any]] = {  # what makes a method quick
    "feddf": {"server_steps": 2},
    "fedgen": {"generator_steps": 2},
    "fedbe": {"samples": 2},
    "fml": {"shared": "bag"},
    "fedkd": {"shared": "bag"},
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
    assert {'optimizer = "adam"', "lr = 0.001"} <= set(answer.out.splitlines())


def test_help_names_what_text_takes() -> None:
    said = " ".join(commandline.fedstill("run", "--help").out.replace("│", " ").split())
    for word in ("transformer, bag, lstm, distilbert", "table of text"):
        assert word in said


@pytest.mark.slow
def test_a_method_that_does_not_take_text_says_so_and_what_to_set() -> None:
    text = ("--data", "glosses-mini", "--model", "bag", "--set", "vocabulary=300")
    refused = {name: commandline.fedstill("methods", name, *text) for name in (*PIXELS, *STEPS_OF_SGD)}
    assert {answer.code for answer in refused.values()} == {2}
    assert all("optimizer=sgd" in refused[name].err for name in STEPS_OF_SGD)
    assert "this method's generator makes images" in refused["fedkf"].err
