"""LEAF's and FLamby's federations, from small files of the published formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill
from fedstill import DataError, SettingError
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.data import TextSettings, load, tokens
from fedstill.data.formats import heart, leaf
from fedstill.models import build


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))


RNG = np.random.default_rng(0)
LINE = "O Romeo, Romeo, wherefore art thou Romeo?\nDeny thy father and refuse thy name; " * 4


def write(folder: Path, part: str, number: int, users: dict[str, Any]) -> None:
    """A file as LEAF's scripts write it."""
    path = folder / part / f"all_data_{number}_niid_0_keep_0_{part}_9.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = [len(user["y"]) for user in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": sizes, "user_data": users}))


def digits(labels: list[int]) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    pixels = RNG.integers(0, 256, (len(labels), 28 * 28))
    return {"x": (pixels / 255).tolist(), "y": labels}, pixels.reshape(-1, 28, 28)


def femnist(folder: Path) -> dict[str, Any]:
    users, pixels = {}, {}
    for name, labels in (("f0001_41", [0, 10, 61]), ("f0002_00", [36, 0]), ("f0003_12", [5] * 10)):
        users[name], pixels[name] = digits(labels)
    write(folder, "train", 0, {name: users[name] for name in ("f0001_41", "f0002_00")})
    write(folder, "train", 1, {"f0003_12": users["f0003_12"]})
    write(folder, "test", 0, {"f0002_00": digits([9])[0], "f0001_41": digits([61])[0]})
    return pixels


def speech(start: int, count: int) -> dict[str, list[str]]:
    return {
        "x": [LINE[at : at + leaf.WINDOW] for at in range(start, start + count)],
        "y": [LINE[at + leaf.WINDOW] for at in range(start, start + count)],
    }


def shakespeare(folder: Path) -> None:
    write(folder, "train", 0, {"ROMEO_AND_JULIET_JULIET": speech(0, 60), "HAMLET_GHOST": speech(60, 40)})
    write(folder, "test", 0, {"HAMLET_GHOST": speech(100, 10), "ROMEO_AND_JULIET_JULIET": speech(110, 5)})


@pytest.mark.parametrize("place", ["leaf-femnist", "leaf-femnist/data", "femnist/data"])
def test_femnists_writers_are_clients_and_its_pixels_are_bytes(tmp_path: Path, place: str) -> None:
    pixels = femnist(tmp_path / place)
    data = load("leaf-femnist", tmp_path)
    assert data.client_names == ("f0001_41", "f0002_00", "f0003_12")
    assert (len(data.classes), data.classes[0], data.classes[10], data.classes[61]) == (62, "0", "A", "z")
    assert data.train.client is not None
    assert data.test.client is not None
    for number, name in enumerate(data.client_names):
        mine = data.train.client == number
        assert np.array_equal(data.train.x[mine][:, 0].numpy(), pixels[name])
    assert data.train.y.tolist() == [0, 10, 61, 36, 0] + [5] * 10
    assert (data.test.client.tolist(), data.test.y.tolist()) == ([1, 0], [9, 61])


def test_a_folder_of_leafs_is_recognised_by_what_is_in_it(tmp_path: Path) -> None:
    femnist(tmp_path / "mine")
    shakespeare(tmp_path / "plays")
    assert (leaf.kind(tmp_path / "mine"), leaf.kind(tmp_path / "plays"), leaf.kind(tmp_path)) == ("images", "text", "")
    assert tuple(load(str(tmp_path / "mine")).shape) == (1, 28, 28)
    assert tuple(load(str(tmp_path / "plays")).shape) == (80,)
    config = resolve({"data": str(tmp_path / "plays")})
    assert (config.partition, config.model, config.optimizer) == ("natural", "transformer", "adam")
    assert resolve({"data": str(tmp_path / "mine")}).partition == "natural"


def test_shakespeare_is_the_next_of_eighty_characters(tmp_path: Path) -> None:
    shakespeare(tmp_path / "leaf-shakespeare")
    data = load("leaf-shakespeare", tmp_path)
    assert data.client_names == ("HAMLET_GHOST", "ROMEO_AND_JULIET_JULIET")
    assert data.train.client is not None
    assert data.train.client.bincount().tolist() == [40, 60]
    assert len(data.classes) == len(leaf.CHARACTERS) == 80
    assert (data.classes[0], data.classes[1], data.vocabulary) == ("newline", "space", 82)
    # LEAF numbers a character by its place in its list; 0 is padding here.
    expected = [[1 + leaf.CHARACTERS.index(c) for c in text] for text in speech(60, 40)["x"]]
    mine = data.train.client == 0
    assert data.train.x[mine].tolist() == expected
    assert data.train.y[mine].tolist() == [leaf.CHARACTERS.index(c) for c in speech(60, 40)["y"]]
    encoded = data.preprocessing.encode(["A€"])
    assert encoded[0, :3].tolist() == [1 + leaf.CHARACTERS.index("A"), 81, 0]


def test_shakespeare_takes_no_other_tokens(tmp_path: Path) -> None:
    shakespeare(tmp_path / "leaf-shakespeare")
    other = tokens.trained(["a text"] * 3, 300)
    with pytest.raises(SettingError, match="leaf-shakespeare has tokens of its own"):
        load("leaf-shakespeare", tmp_path, text=TextSettings(other))


@pytest.mark.slow
def test_an_lstm_learns_shakespeare_by_clients_and_resumes_in_the_same_bits(tmp_path: Path) -> None:
    shakespeare(tmp_path / "leaf-shakespeare")
    settings: dict[str, Any] = {
        **{"data": "leaf-shakespeare", "data_dir": str(tmp_path), "model": "lstm", "engine": "inline"},
        **{"participation": 1.0, "epochs": 4, "lr": 0.01, "optimizer": "adam", "batch_size": 10},
    }
    whole = fedstill.run(**settings, rounds=3, out=tmp_path / "whole")
    assert [line.split(",")[0] for line in (tmp_path / "whole" / "clients.csv").read_text().splitlines()[1:]]
    assert whole.records[-1]["train_loss"] < whole.records[0]["train_loss"]
    fedstill.run(**settings, rounds=2, out=tmp_path / "part")
    again = fedstill.resume(tmp_path / "part", rounds=3)
    for one, two in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_leafs_lstm_has_its_sizes_and_padding_never_changes_a_logit() -> None:
    net = build("lstm", (80,), 80, vocabulary=82).eval()
    # Embedding 82 x 8; two layers of four gates, each with two biases; a linear layer.
    gates = 4 * 256
    expected = 82 * 8 + gates * (8 + 256 + 2) + gates * (256 + 256 + 2) + 257 * 80
    assert sum(p.numel() for p in net.parameters()) == expected
    x = torch.randint(1, 82, (3, 20), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([x, torch.zeros(3, 60, dtype=x.dtype)], 1)
    assert torch.allclose(net(x), net(padded), atol=1e-6)
    assert torch.allclose(net(torch.cat([padded, torch.randint(1, 82, (1, 80))]))[:3], net(x), atol=1e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nope", "not a file of LEAF's"),
        ('{"users": ["a"]}', "not a file of LEAF's"),
        ('{"user_data": {"a": {"x": [[0.5]], "y": [1]}}}', "samples of user 'a' are not 784 pixels"),
        ('{"user_data": {"a": {"x": [["b"]], "y": [1]}}}', "not all numbers"),
        ('{"user_data": {"a": {"x": [], "y": [1]}}}', "0 samples but 1 labels"),
        (json.dumps({"user_data": {"a": {"x": [[2] * 784], "y": [1]}}}), "of 0 to 1"),
        (json.dumps({"user_data": {"a": {"x": [[1] * 784], "y": [62]}}}), "label 62 of user 'a' is not 0 to 61"),
        (json.dumps({"user_data": {"a": {"x": ["short"], "y": ["b"]}}}), "a sample of 'a' is not 80 characters"),
        (json.dumps({"user_data": {"a": {"x": [""], "y": ["b"]}}}), "is not 80 characters: ''"),
        (json.dumps({"user_data": {"a": {"x": ["x" * 80], "y": [0]}}}), "label 0 of 'a' is none of LEAF's"),
        (json.dumps({"user_data": {"a": {"x": ["x" * 80], "y": ["€"]}}}), "label '€' of 'a' is none of LEAF's"),
    ],
)
def test_files_that_are_not_leafs_are_refused_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "a.json").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)


def hearts(folder: Path) -> Path:
    """The four files, a few patients each; of the third no cholesterol is known."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    for number, name in enumerate(heart.FILES):
        rows = []
        for patient in range(10 + 5 * number):
            ill = patient % 3
            cells = [50.0 + 5 * ill + rng.normal(), patient % 2, 1 + patient % 4, 130, 200 + 30 * ill, 0, patient % 3]
            cells += [150 - 10 * ill, ill > 0, 0.5 * ill, 1 + patient % 3, 0, (3, 6, 7)[patient % 3], ill]
            words = [f"{float(cell):.1f}" for cell in cells[:-1]] + [str(int(cells[-1]))]
            words[4] = "?" if number == 2 else words[4]
            rows.append(",".join(words))
        (folder / name).write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.filterwarnings("ignore:heart-disease. the files hold")
def test_heart_disease_is_four_hospitals_of_thirteen_features(tmp_path: Path) -> None:
    hearts(tmp_path / "heart-disease")
    data = load("heart-disease", tmp_path)
    assert data.client_names == heart.HOSPITALS
    assert data.classes == ("absent", "present")
    assert tuple(data.shape) == (13,)
    assert data.train.client is not None
    assert data.test.client is not None
    both = torch.cat([data.train.client, data.test.client]).bincount().tolist()
    assert both == [10, 15, 20, 25]
    assert data.table is not None
    chol = [column.name for column in data.table.columns].index("chol")
    assert data.train.x[:, chol].isnan().tolist() == (data.train.client == 2).tolist()
    assert data.table.columns[chol].missing
    thal = next(column for column in data.table.columns if column.name == "thal")
    assert thal.categories == ("3", "6", "7")
    config = resolve({"data": "heart-disease", "data_dir": str(tmp_path)})
    assert (config.model, config.partition) == ("mlp", "natural")
    assert prepare(config).federation.client_names == heart.HOSPITALS


@pytest.mark.filterwarnings("ignore:heart-disease. the files hold")
def test_heart_disease_can_be_learnt(tmp_path: Path) -> None:
    hearts(tmp_path)
    result = fedstill.run(data="heart-disease", data_dir=str(tmp_path), rounds=3, participation=1.0, engine="inline")
    assert result.records[-1]["accuracy"] == 1.0


@pytest.mark.parametrize("line", ["1,2,3", "x" + ",1" * 13, "1," * 13 + "?", "inf" + ",1" * 13])
def test_a_line_that_is_no_patient_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    hearts(tmp_path)
    with open(tmp_path / heart.FILES[1], "a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"processed\.hungarian\.data, line 16: not 14 numbers"):
        load("heart-disease", tmp_path)


@pytest.mark.parametrize("name", ["leaf-femnist", "leaf-shakespeare", "heart-disease"])
def test_what_is_missing_is_named_with_where_to_get_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"{name}: .* not found; get it from https://.* and put it in"):
        load(name, tmp_path)
