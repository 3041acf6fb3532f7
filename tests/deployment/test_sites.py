"""A federation of sites that hold their own data, over a wire that the test controls."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill
from fedstill.building.config import resolve
from fedstill.core.errors import SettingError
from fedstill.core.reports import Code, Step, code_of, report, step_of
from fedstill.core.tree import Tree
from fedstill.data import tokens
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.site import Site, _labelled_as
from fedstill.metrics.records import RoundRecord
from fedstill.running import directory as rundir
from fedstill.running.callbacks import Callback, RunView
from fedstill.running.directory import RunDirectory
from support.runs import slow
from support.sites import MALFORMED, NAMES, SETTINGS, Silence, Wire, alone, served, sizes, weights

NUMBERS = ("round", "accuracy", "loss", "amp", "fm", "wlp", "local_accuracy", "train_loss", "bytes_up", "dropped")


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {}),
        slow("fedavg", {"local_unit": "equal_steps", "participation": 0.67, "model": "resnet8"}),
        ("scaffold", {}),
        slow("fedkf", {"width": 8, "z_dim": 8}),
        slow("dafkd", {"batches": 1}),
        ("fedavg+ccvr", {}),
        slow("fedavg+f2l", {"regions": 2, "rounds_per_episode": 1, "pool": 0.2}),
        slow("fedhyb", {"proxy": "pool", "pool": 0.2}),
        slow("fedgkd", {"data": "glosses-mini", "model": "bag", "image_size": 0, "fraction": 0.5}),
    ],
)
def test_sites_come_to_the_bits_of_a_run_on_one_machine(tmp_path: Path, method: str, settings: dict[str, Any]) -> None:
    there = served(Wire(tmp_path), tmp_path / "served", method, **settings)
    here = alone(tmp_path / "alone", method, **settings)
    assert weights(tmp_path / "served") == weights(tmp_path / "alone")
    for ours, theirs in zip(here.records, there.records, strict=True):
        assert {k: ours[k] for k in NUMBERS} == {k: theirs[k] for k in NUMBERS}


@pytest.mark.slow
def test_sites_begin_with_an_encoder_of_their_own_that_is_the_servers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    shape = {"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 16}
    texts = ["a plant of the family", "a small animal"] * 9
    for name in ("server", "site", "other"):
        torch.manual_seed(name == "other")
        config = transformers.DistilBertConfig(vocab_size=300, **shape)
        transformers.DistilBertModel(config).save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(tokens.trained(texts, 300), encoding="utf-8")
    options = {"pretrained": str(tmp_path / "server"), "lora": 2}
    settings: dict[str, Any] = {
        "data": "glosses-mini",
        "image_size": 0,
        "max_length": 16,
        "model": "distilbert",
        "fraction": 0.5,
    }
    settings |= {"model_options": options, "rounds": 1}

    def wire(name: str) -> Wire:
        made = Wire(tmp_path / f"sites of {name}")
        made.sites = {
            site: Site(tmp_path / name / site, LocalInputs(pretrained=str(tmp_path / name))) for site in NAMES
        }
        return made

    served(wire("site"), tmp_path / "served", **settings)
    alone(tmp_path / "alone", **settings)
    assert weights(tmp_path / "served") == weights(tmp_path / "alone")
    assert (tmp_path / "served" / "tokenizer.json").is_file()
    with pytest.raises(SettingError, match="frozen part of the network is not the server's"):
        served(wire("other"), tmp_path / "refused", **settings)
    with pytest.raises(SettingError, match="give yours to the site"):
        served(Wire(tmp_path), tmp_path / "unnamed", **settings)


def test_the_server_never_sees_a_sample_or_a_label(tmp_path: Path) -> None:
    class Watched(Wire):
        def answer(self, name: str, request: Tree) -> Any:
            said = super().answer(name, request)
            seen.append(said)
            return said

    seen: list[Any] = []
    served(Watched(tmp_path), tmp_path / "run")
    shapes = {tuple(sorted(said)) for said in seen}
    assert shapes == {("samples", "tests"), ("message", "metrics", "samples"), ("hits",), ("received",)}


def test_a_site_that_is_away_is_left_out_and_counts_again_when_it_is_back(tmp_path: Path) -> None:
    wire = Wire(tmp_path)

    class Leaving(Callback):
        def on_round_end(self, run: RunView, record: RoundRecord) -> None:
            wire.away = {1: {"south"}, 2: set()}.get(record["round"], set())

    result = served(wire, tmp_path / "run", rounds=3, callbacks=[Leaving()])
    assert [r["clients"] for r in result.records] == [3, 2, 3]
    assert "because they are not connected: south" in (tmp_path / "run/log.txt").read_text()


def test_a_site_that_does_not_answer_is_left_out_of_the_round(tmp_path: Path) -> None:
    class Silent(Wire):
        def answer(self, name: str, request: Tree) -> Any:
            quiet = name == "south" and request["request"] and request["request"].get("round") == 2
            return Silence("no answer within 5 s") if quiet else super().answer(name, request)

    result = served(Silent(tmp_path), tmp_path / "run", rounds=3)
    assert [r["dropped"] for r in result.records] == [0, 1, 0]
    assert "client south dropped: no answer within 5 s" in (tmp_path / "run/log.txt").read_text()


def test_a_site_that_comes_late_takes_part_from_then_on(tmp_path: Path) -> None:
    wire = Wire(tmp_path)
    wire.away = {"west"}

    class Coming(Callback):
        def on_round_end(self, run: RunView, record: RoundRecord) -> None:
            wire.away = set()

    result = served(wire, tmp_path / "run", "fedavg+t1", rounds=2, callbacks=[Coming()])
    assert [r["clients"] for r in result.records] == [2, 3]
    assert [r["dropped"] for r in result.records] == [0, 0]
    assert 0 not in sizes(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *MALFORMED,
        (lambda a: {"message": "hello"}, "not a dict"),
        (lambda a: {"samples": -3}, "samples"),
        (lambda a: {"samples": a["samples"] + 1}, "samples"),
        (lambda a: {"metrics": {"train_loss": "low"}}, "metrics are not numbers"),
        (lambda a: {"error": "out of disk"}, "not one of the known codes"),
    ],
)
def test_a_bad_answer_is_dropped_and_changes_nothing_else(tmp_path: Path, change: Any, reason: str) -> None:
    class Lying(Wire):
        def answer(self, name: str, request: Tree) -> Any:
            said = super().answer(name, request)
            return said | change(said) if name == "south" and "message" in said else said

    wire = Wire(tmp_path / "without")
    wire.away = {"south"}
    without = served(wire, tmp_path / "without/run", rounds=1)
    result = served(Lying(tmp_path / "lying"), tmp_path / "lying/run", rounds=1)
    assert [r["dropped"] for r in result.records] == [1]
    assert reason in (tmp_path / "lying/run/log.txt").read_text()
    assert without.records[0]["accuracy"] == result.records[0]["accuracy"]


@pytest.mark.slow
def test_a_server_that_was_killed_goes_on_and_sites_that_restarted_too(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    class Kill(Callback):
        def on_round_end(self, run: RunView, record: RoundRecord) -> None:
            if record["round"] == 2:
                raise Killed

    with pytest.raises(fedstill.CallbackError):
        served(Wire(tmp_path), tmp_path / "run", "scaffold", rounds=6, callbacks=[Kill()])
    result = served(Wire(tmp_path), tmp_path / "run", "scaffold", rounds=6)
    assert [r["round"] for r in result.records] == [1, 2, 3, 4, 5, 6]
    alone(tmp_path / "alone", "scaffold", rounds=6)
    assert weights(tmp_path / "run") == weights(tmp_path / "alone")
    kept = list((tmp_path / "north/state").rglob("*.safetensors"))
    assert 1 <= len(kept) <= 4, "states that no checkpoint needs are deleted"


@pytest.mark.slow
def test_no_site_hears_of_a_round_before_the_checkpoint_of_the_last_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server that is killed would ask again for a round that sites have left behind."""
    out, slow = tmp_path / "run", rundir.RunDirectory._write_checkpoint

    def slowly(self: rundir.RunDirectory, *parts: Any) -> None:
        time.sleep(0.2)
        slow(self, *parts)

    class Watched(Wire):
        def answer(self, name: str, request: Tree) -> Any:
            asked = request["request"]
            if asked and asked["kind"] == "Train" and asked["round"] > 1:
                assert (out / f"checkpoints/round-{asked['round'] - 1:06d}.safetensors").exists()
            return super().answer(name, request)

    monkeypatch.setattr(rundir.RunDirectory, "_write_checkpoint", slowly)
    assert len(served(Watched(tmp_path), out, rounds=3).records) == 3


@pytest.mark.slow
def test_another_run_does_not_find_the_state_of_the_one_before(tmp_path: Path) -> None:
    wire = Wire(tmp_path)
    for name in ("one", "two"):
        served(wire, tmp_path / name, "scaffold")
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
    assert len(list((tmp_path / "north/state").iterdir())) == 2


def test_sites_with_data_of_their_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i, name in enumerate(NAMES):
        x = rng.integers(0, 255, (20 + 10 * i, 28, 28), dtype=np.uint8)
        np.savez(tmp_path / f"{name}.npz", x=x, y=rng.integers(0, 10, len(x)))
    files = {name: str(tmp_path / f"{name}.npz") for name in NAMES}
    result = served(Wire(tmp_path, **files), tmp_path / "run")
    assert sizes(tmp_path / "run") == [16, 24, 32]
    assert result.records[-1]["amp"] is not None


def test_a_site_runs_no_file_that_a_server_names(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        f"from pathlib import Path\nfrom torch import nn\nPath({str(tmp_path / 'ran')!r}).touch()\n\n\n"
        "def net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(256, classes))\n"
    )
    config = resolve(SETTINGS | {"method": "fedavg", "model": f"{mine}:net"})
    question = {"run": {"config": config.toml()}, "request": None, "down": {}}
    with pytest.raises(fedstill.SettingError, match="a model that is no name but a file"):
        Site(tmp_path / "north").handle(question)
    assert not (tmp_path / "ran").exists()
    wire = Wire(tmp_path)
    wire.sites = {name: Site(tmp_path / name, LocalInputs(model=f"{mine}:net")) for name in NAMES}
    served(wire, tmp_path / "run", model=f"{mine}:net")
    assert (tmp_path / "ran").exists()


def test_what_a_site_cannot_do_is_said(tmp_path: Path) -> None:
    np.savez(tmp_path / "odd.npz", x=np.zeros((9, 7), np.float32), y=np.arange(9))

    class Caught(Wire):
        def answer(self, name: str, request: Tree) -> Any:
            try:
                return super().answer(name, request)
            except fedstill.FedstillError as error:
                return {"error": report(code_of(error), step_of(error), "4f2a")}

    result = served(Caught(tmp_path, south=str(tmp_path / "odd.npz")), tmp_path / "run")
    assert [r["clients"] for r in result.records] == [2, 2, 2]
    assert (
        "cannot take part: it cannot work with a setting of the run (code setting-refused, step load"
        in (tmp_path / "run/log.txt").read_text()
    )
    with pytest.raises(fedstill.SettingError, match="attack"):
        served(Wire(tmp_path), tmp_path / "other", attack="noise", attackers=1)
    nobody = Wire(tmp_path)
    nobody.away = set(NAMES)
    with pytest.raises(fedstill.FedstillError, match="only 0 of 3 sites"):
        served(nobody, tmp_path / "empty")


@pytest.mark.slow
def test_a_round_without_enough_answers_is_tried_again_with_those_that_are_there(tmp_path: Path) -> None:
    """Otherwise one dead site that is drawn alone would end the run."""

    class Dying(Wire):
        def answer(self, name: str, request: Tree) -> Any:
            body = request["request"]
            if body and body.get("round") == 2 and not self.away:
                self.away = {name}  # the first that is asked in round 2, which no other is
                return Silence("no answer within 5 s")
            return super().answer(name, request)

    wire = Dying(tmp_path)
    result = served(wire, tmp_path / "run", "fedavg+t1", participation=0.34, rounds=4)
    assert [r["round"] for r in result.records] == [1, 2, 3, 4]
    assert [r["dropped"] for r in result.records] == [0, 0, 0, 0]
    assert "round 2 is tried again: only 0 of 1 clients" in (tmp_path / "run/log.txt").read_text()


def test_classes_are_matched_by_name(tmp_path: Path) -> None:
    server = ("cat", "dog", "owl")
    x = torch.zeros(3, 1, 4, 4, dtype=torch.uint8)

    def labelled(*classes: str) -> list[int]:
        split = fedstill.Split(x, torch.arange(3) % len(classes))
        found = _labelled_as(fedstill.Dataset("site", split, split, classes), server)
        assert found.classes == server
        assert torch.equal(found.train.y, found.test.y)
        return found.train.y.tolist()

    assert labelled("owl", "cat") == [2, 0, 2]
    assert labelled(*server) == [0, 1, 2]
    assert labelled("0", "1") == [0, 1, 0], "classes without names keep their numbers"
    assert labelled("0", "2") == [0, 2, 0]
    with pytest.raises(fedstill.DataError, match="the class 'cow' here is none of the server's: cat, dog, owl"):
        labelled("cat", "cow")
    with pytest.raises(fedstill.DataError, match="label 3 here is none of the server's 3 classes"):
        labelled("0", "1", "2", "3")


@pytest.mark.slow
def test_settings_change_until_the_first_round_is_done(tmp_path: Path) -> None:
    nobody = Wire(tmp_path)
    nobody.away = set(NAMES)
    with pytest.raises(fedstill.FedstillError, match="only 0 of 3"):
        served(nobody, tmp_path / "run", lr=0.5)
    served(Wire(tmp_path), tmp_path / "run", lr=0.1)
    assert RunDirectory.open(tmp_path / "run", lock=False).config().lr == 0.1
    with pytest.raises(fedstill.SettingError, match=r"lr was 0\.1"):
        served(Wire(tmp_path), tmp_path / "run", lr=0.2)
    with pytest.raises(fedstill.SettingError, match=r"rounds = 2: .* has 3 rounds done; give 3 or more"):
        served(Wire(tmp_path), tmp_path / "run", lr=0.1, rounds=2)
    with pytest.raises(fedstill.SettingError, match="'fedstill serve' with the same --out continues it"):
        fedstill.resume(tmp_path / "run", rounds=5)


def test_a_site_that_cannot_take_part_is_complained_about_once(tmp_path: Path) -> None:
    class Unable(Wire):
        asked = 0

        def answer(self, name: str, request: Tree) -> Any:
            if name == "south":
                self.asked += 1
                return {"error": report(Code.DATA_UNREADABLE, Step.LOAD, "4f2a")}
            return super().answer(name, request)

    wire = Unable(tmp_path)
    served(wire, tmp_path / "run", rounds=4)
    said = (tmp_path / "run/log.txt").read_text()
    assert said.count("south cannot take part: its data could not be read (code data-unreadable, step load") == 1
    assert wire.asked == 1
