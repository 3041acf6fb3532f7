"""Sites with different networks, over a wire that the test controls: weights cross inside a group alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstill
from fedstill.core import tree
from fedstill.core.reports import Refusal, code_of, report, step_of
from fedstill.core.tree import Tree
from fedstill.deployment import region as regional
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.policy import Policy
from fedstill.deployment.site import Site
from fedstill.metrics.records import RoundRecord
from fedstill.running.callbacks import Callback, RunView
from support import regions
from support.quick import QUICK
from support.runs import slow
from support.sites import NAMES, Silence, Wire, alone, served

DEEP = {"name": "deep", "model": "mlp", "model_options": {"hidden": [12, 8]}}
SETTINGS_OF_GROUPS: dict[str, Any] = {
    "group": [{"name": "small", "model": "mlp", "model_options": {"hidden": [8]}, "clients": ["south"]}, DEEP],
    "rounds": 2,
}
HERE = SETTINGS_OF_GROUPS | {"group": [{**SETTINGS_OF_GROUPS["group"][0], "clients": [1]}, DEEP]}  # by number
POOL = {"proxy": "pool", "pool": 0.1}
NUMBERS = ("round", "accuracy", "loss", "amp", "fm", "wlp", "local_accuracy", "train_loss", "bytes_up", "bytes_down")


def wire_of(folder: Path, allow: tuple[str, ...] = ("dafkd", "fedmd"), **own: LocalInputs) -> Wire:
    wire = Wire(folder)
    wire.sites = {n: Site(folder / n, own.get(n, LocalInputs()), Policy(allow=allow)) for n in NAMES}
    return wire


def models(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.glob("model*.safetensors")}


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {}),
        ("fedgkd", {"across": True}),
        ("feddf", POOL | QUICK["feddf"]),
        slow("fedkf", QUICK["fedkf"] | {"across": True}),
        slow("fedprox+t1", {"participation": 0.67}),
        slow("lkd", {"pool": 0.1}),
        slow("fedhyb", POOL),
        slow("dafkd", QUICK["dafkd"]),
        slow("fedmd", POOL),
        slow("scaffold", {"validation": 0.2}),
    ],
)
def test_sites_with_different_networks_come_to_the_bits_of_a_run_on_one_machine(
    tmp_path: Path, method: str, settings: dict[str, Any]
) -> None:
    wire = wire_of(tmp_path, allow=("dafkd", "fedmd", "scaffold"))
    there = served(wire, tmp_path / "served", method, **SETTINGS_OF_GROUPS | settings)
    here = alone(tmp_path / "alone", method, **HERE | settings)
    assert models(tmp_path / "served") == models(tmp_path / "alone")
    assert len(models(tmp_path / "served")) == 2
    numbers = (*NUMBERS, *(("val_accuracy", "val_amp", "val_fm", "val_wlp") if "validation" in settings else ()))
    for ours, theirs in zip(here.records, there.records, strict=True):
        assert {k: ours[k] for k in numbers} == {k: theirs[k] for k in numbers}
        for group in ("small", "deep"):
            both = [record["groups"][group] for record in (ours, theirs)]
            assert {k: both[0].get(k) for k in numbers} == {k: both[1].get(k) for k in numbers}


def test_every_site_takes_its_own_groups_model_home(tmp_path: Path) -> None:
    result = served(wire_of(tmp_path), tmp_path / "run", "fedavg", **SETTINGS_OF_GROUPS)
    for name in NAMES:
        group = "small" if name == "south" else "deep"
        home, here = fedstill.load(tmp_path / name), fedstill.load(tmp_path / "run", which=group)
        assert home.description.options == {"hidden": [8] if group == "small" else [12, 8]}
        for own, theirs in zip(home.module.parameters(), here.module.parameters(), strict=True):
            assert torch.equal(own, theirs)
    assert result.summary["dropped"] == 0


def test_all_groups_are_sent_their_requests_at_once(tmp_path: Path) -> None:
    class Watched(Wire):
        def send_requests(self, requests: Mapping[str, Tree], **more: Any) -> Iterator[tuple[str, Any]]:
            kinds.append(
                {site: request["request"] and request["request"]["kind"] for site, request in requests.items()}
            )
            yield from super().send_requests(requests, **more)

    kinds: list[Any] = []
    wire = Watched(tmp_path)
    served(wire, tmp_path / "run", "fedavg", **SETTINGS_OF_GROUPS)
    assert kinds.count(dict.fromkeys(NAMES, "Train")) == 2
    assert kinds.count(dict.fromkeys(NAMES, "Score")) == 2


@pytest.mark.parametrize(("method", "settings"), [("fedgkd", {"across": True}), slow("lkd", {"pool": 0.1})])
def test_a_group_of_which_nobody_answers_keeps_its_model_and_the_round_goes_on(
    tmp_path: Path, method: str, settings: dict[str, Any]
) -> None:
    """As if none of the group had been drawn."""

    class Silent(Wire):
        def answer(self, name: str, request: Tree) -> Any:
            body = request["request"]
            quiet = name == "south" and body and body["kind"] == "Train" and body["round"] == 2
            return Silence("no answer within 5 s") if quiet else super().answer(name, request)

    class Leaving(Callback):
        def on_round_end(self, run: RunView, record: RoundRecord) -> None:
            away.away = {1: {"south"}}.get(record["round"], set())

    settings = SETTINGS_OF_GROUPS | settings | {"rounds": 3}
    result = served(Silent(tmp_path / "silent"), tmp_path / "silent/run", method, **settings)
    away = Wire(tmp_path / "away")
    served(away, tmp_path / "away/run", method, **settings, callbacks=[Leaving()])
    assert [record["dropped"] for record in result.records] == [0, 1, 0]
    assert [record["clients"] for record in result.records] == [3, 3, 3]
    log = (tmp_path / "silent/run/log.txt").read_text()
    assert "small keeps its model: only 0 of 1 clients gave a usable answer" in log
    assert "is tried again" not in log
    assert models(tmp_path / "silent/run") == models(tmp_path / "away/run")


@pytest.mark.slow
def test_a_round_in_which_no_group_gets_enough_answers_is_tried_again(tmp_path: Path) -> None:
    class Dying(Wire):
        asked = 0

        def answer(self, name: str, request: Tree) -> Any:
            body = request["request"]
            if body and body["kind"] == "Train" and body["round"] == 2 and self.asked < 3:
                self.asked += 1
                return Silence("no answer within 5 s")
            return super().answer(name, request)

    served(Dying(tmp_path / "dying"), tmp_path / "dying/run", "fedprox+t1", **SETTINGS_OF_GROUPS)
    served(Wire(tmp_path / "well"), tmp_path / "well/run", "fedprox+t1", **SETTINGS_OF_GROUPS)
    assert "only 0 of 3 clients gave a usable answer" in (tmp_path / "dying/run/log.txt").read_text()
    assert models(tmp_path / "dying/run") == models(tmp_path / "well/run")


@pytest.mark.slow
def test_a_killed_server_goes_on_with_all_groups(tmp_path: Path) -> None:
    class Kill(Callback):
        def on_round_end(self, run: RunView, record: RoundRecord) -> None:
            if record["round"] == 2:
                raise RuntimeError

    settings = SETTINGS_OF_GROUPS | {"rounds": 4, "across": True}
    with pytest.raises(fedstill.CallbackError):
        served(Wire(tmp_path), tmp_path / "run", "fedgkd", **settings, callbacks=[Kill()])
    served(Wire(tmp_path), tmp_path / "run", "fedgkd", **settings)
    alone(tmp_path / "alone", "fedgkd", **HERE | {"rounds": 4, "across": True})
    assert models(tmp_path / "run") == models(tmp_path / "alone")


# --- networks of one's own --------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """The same network in a file at the server and in one at a site."""
    text = (
        "from pathlib import Path\nfrom torch import nn\nPath(__file__).with_suffix('.ran').touch()\n\n\n"
        "def net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(256, 5), nn.Linear(5, classes))\n"
    )
    found = {}
    for place in ("server", "site"):
        (tmp_path / f"{place}.py").write_text(text)
        found[place] = f"{tmp_path / place}.py:net"
    return found


def test_a_group_may_have_a_network_that_its_sites_have_in_a_file(files: dict[str, str], tmp_path: Path) -> None:
    group: list[dict[str, Any]] = [{"name": "own", "model": files["server"], "clients": ["south"]}, DEEP]
    served(wire_of(tmp_path, south=LocalInputs(model=files["site"])), tmp_path / "run", group=group, rounds=1)
    here = alone(tmp_path / "alone", group=[{**group[0], "clients": [1]}, DEEP], rounds=1)
    assert models(tmp_path / "run") == models(tmp_path / "alone")
    assert here.summary["groups"]["own"]


def test_a_site_opens_no_file_that_a_server_deals_it(files: dict[str, str], tmp_path: Path) -> None:
    group: list[dict[str, Any]] = [{"name": "own", "model": files["server"], "clients": ["south"]}, DEEP]
    with pytest.raises(Refusal, match=r"server\.py:net; give yours to the site"):
        served(wire_of(tmp_path, south=LocalInputs()), tmp_path / "run", group=group, rounds=1)
    assert not (tmp_path / "server.ran").exists()
    group[0]["clients"] = ["north"]
    with pytest.raises(Refusal, match=r"every site work with all groups' networks, and .*server\.py:net is a file"):
        served(
            wire_of(tmp_path, north=LocalInputs(model=files["site"])), tmp_path / "across", "fedgkd",
            group=group, rounds=1, across=True,
        )  # fmt: skip


@pytest.mark.parametrize("dealt", [["evil.py:net", "mlp"], "mlp,evil.py:net", ["distilbert", "mlp"]])
def test_a_site_opens_nothing_that_a_server_names_among_its_networks(dealt: Any, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"(evil\.py:net|distilbert); give yours to the site"):
        served(wire_of(tmp_path), tmp_path / "run", "local", models=dealt)


def test_a_site_with_another_network_than_its_group_is_left_out(tmp_path: Path) -> None:
    class Reporting(Wire):
        def answer(self, name: str, request: Tree) -> Any:
            try:
                return super().answer(name, request)
            except fedstill.FedstillError as error:
                return {"error": report(code_of(error), step_of(error), "4f2a")}

    wire = Reporting(tmp_path)
    wire.sites["west"] = Site(tmp_path / "west", LocalInputs(model="resnet8"), Policy())
    result = served(wire, tmp_path / "run", "fedavg", models=["mlp", "cnn"], rounds=1)
    assert result.records[0]["left_out"] == ["west"]
    assert "client west dropped" in (tmp_path / "run/log.txt").read_text()


def test_what_a_group_receives_and_sends_is_of_its_own_size(tmp_path: Path) -> None:
    class Watched(Wire):
        def answer(self, name: str, request: Tree) -> Any:
            answer = super().answer(name, request)
            if request["request"] and request["request"]["kind"] == "Train":
                crossed[name] = request["down"]["model"].numel(), answer["message"]["model"].numel()
            return answer

    crossed: dict[str, tuple[int, int]] = {}
    result = served(Watched(tmp_path), tmp_path / "run", "fedavg", **SETTINGS_OF_GROUPS)
    small, deep = 256 * 8 + 8 + 8 * 10 + 10, 256 * 12 + 12 + 12 * 8 + 8 + 8 * 10 + 10
    assert crossed == {"north": (deep, deep), "south": (small, small), "west": (deep, deep)}
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == 2 * 4 * (small + 2 * deep)


# --- regions ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["f2l", "scaffold+f2l"])
def test_regions_with_different_networks_come_to_the_bits_of_a_run_on_one_machine(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regional, "_NEWCOMERS_TIMEOUT", 0.5)
    east, west = regions.SETTINGS["region"]
    settings: dict[str, Any] = {
        "region": [east | {"model": "mlp"}, west | {"model": "cnn", "model_options": {}}],
        "epsilon": 0.0,
    }
    world = regions.World(tmp_path)
    there = regions.served(world, tmp_path / "served", method, **settings)
    here = regions.alone(tmp_path / "alone", method, **settings)
    assert models(tmp_path / "served") == models(tmp_path / "alone")
    assert len(models(tmp_path / "served")) == 2
    meetings = [record for record in here.records if "episode" in record]
    for ours, theirs in zip(meetings, there.records, strict=True):
        for name in ("round", "accuracy", "loss", "amp", "fm", "wlp"):
            assert ours[name] == theirs[name]
        assert ours["episode"]["teachers"] == theirs["episode"]["teachers"]
    networks = {name: fedstill.load(tmp_path / name).description.network for name in ("ann", "eve")}
    assert networks == {"ann": "mlp", "eve": "cnn"}


def test_a_message_of_another_groups_size_is_dropped(tmp_path: Path) -> None:
    class Lying(Wire):
        def answer(self, name: str, request: Tree) -> Any:
            answer = super().answer(name, request)
            if name == "west" and "message" in answer:
                small = 256 * 8 + 8 + 8 * 10 + 10
                answer = answer | {"message": {"model": torch.zeros(small)}}
            return tree.decode(tree.encode(answer))

    result = served(Lying(tmp_path), tmp_path / "run", "fedavg", **SETTINGS_OF_GROUPS)
    assert [record["dropped"] for record in result.records] == [1, 1]
