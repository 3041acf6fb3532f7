"""Sites with different networks, over a wire that the test controls: weights cross inside a group alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstill
from fedstill.building.config import resolve
from fedstill.cli import network
from fedstill.core import tree
from fedstill.core.errors import SettingError
from fedstill.core.reports import Refusal, code_of, report, step_of
from fedstill.core.tree import Tree
from fedstill.deployment import region as regional
from fedstill.deployment import site_engine
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.policy import Policy
from fedstill.deployment.region import RegionalServer
from fedstill.deployment.server import serve
from fedstill.deployment.site import Site
from fedstill.deployment.site_engine import Terms
from fedstill.deployment.waiting import ResponseTimes
from fedstill.methods.t1 import T1
from fedstill.metrics.records import RoundRecord
from fedstill.running import retries
from fedstill.running.callbacks import Callback, RunView
from fedstill.running.retries import Retries
from fedstill.running.uplinks import RoundFailed
from support import regions
from support.commandline import fedstill as type_in
from support.quick import QUICK
from support.runs import slow
from support.sites import NAMES, SETTINGS, Silence, Wire, alone, served

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


class InPairs(Wire):
    """Four sites, two of each group. The answers to requests to train in a round do not arrive of those that are quiet.

    `quiet`: by round, at each attempt, and what is trained again at the last.
    """

    def __init__(self, folder: Path, quiet: Mapping[int, Sequence[str]]) -> None:
        self.sites = {name: Site(folder / name, LocalInputs(), Policy()) for name in "abcd"}
        self.away, self.quiet = set[str](), {round_: list(names) for round_, names in quiet.items()}

    def send_requests(self, requests: Mapping[str, Tree], **more: Any) -> Iterator[tuple[str, Any]]:
        bodies = [request["request"] for request in requests.values()]
        trains = bodies and bodies[0] and bodies[0]["kind"] == "Train"
        attempts = self.quiet.get(bodies[0]["round"], []) if trains else []
        silent = attempts.pop(0) if attempts else ""
        for name, answer in super().send_requests(requests, **more):
            yield name, Silence("no answer within 5 s") if name in silent else answer

    def served(self, out: Path, method: str = "fedavg+t1", **settings: Any) -> Any:
        group = [SETTINGS_OF_GROUPS["group"][0] | {"clients": ["a", "b"]}, DEEP]
        callbacks = settings.pop("callbacks", ())
        config = resolve(SETTINGS | {"group": group, "clients": 4, "rounds": 3, "method": method} | settings)
        pause = lambda missing: False  # noqa: E731
        return serve(config, "abcd", self, out, terms=Terms(timeout=5), pause=pause, callbacks=callbacks)


@pytest.fixture
def t1_needs_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(T1, "fewest_clients", 2)


@pytest.mark.usefixtures("t1_needs_two")
def test_a_group_of_which_too_few_answer_for_its_rule_is_as_if_nobody_had(tmp_path: Path) -> None:
    """T1 forgets the latest model of the one that did."""
    for quiet in ("b", "ab"):
        result = InPairs(tmp_path / quiet, {2: [quiet]}).served(tmp_path / quiet / "run")
        assert [record["dropped"] for record in result.records] == [0, len(quiet), 0]
        kept = f"small keeps its model: only {2 - len(quiet)} of 2 clients gave a usable answer, 2 are needed"
        assert kept in (tmp_path / quiet / "run/log.txt").read_text()
    assert models(tmp_path / "b/run") == models(tmp_path / "ab/run")


def test_a_group_that_nobody_has_trained_yet_keeps_its_first_model_with_t1(tmp_path: Path) -> None:
    class Silent(Wire):
        def answer(self, name: str, request: Tree) -> Any:
            body = request["request"]
            quiet = name == "south" and body and body["kind"] == "Train" and body["round"] == 1
            return Silence("no answer within 5 s") if quiet else super().answer(name, request)

    result = served(Silent(tmp_path / "sites"), tmp_path / "run", "fedprox+t1", **SETTINGS_OF_GROUPS)
    plain = alone(tmp_path / "plain", "fedprox", **HERE | {"rounds": 1})
    first, second = (record["groups"]["small"]["accuracy"] for record in result.records)
    assert first != second
    assert plain.records[0]["groups"]["small"]["accuracy"] != first, "it was not trained"
    assert "no longer finite" not in (tmp_path / "run/log.txt").read_text()


@pytest.mark.usefixtures("t1_needs_two")
@pytest.mark.parametrize(("away", "tried"), [("bd", False), ("d", True)])
def test_a_round_counts_as_tried_where_some_group_has_enough_of_its_clients(
    away: str, tried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaving(Callback):
        def on_round_end(self, run: RunView, record: RoundRecord) -> None:
            wire.away = set(away)

    def after(self: Retries, error: RoundFailed, names: Any, *, connected: bool, arrived: Any) -> None:
        seen.append(connected)
        raise error

    seen: list[bool] = []
    monkeypatch.setattr(Retries, "after", after)
    wire = InPairs(tmp_path, {2: ["abcd"]})
    with pytest.raises(RoundFailed, match="only 0 of"):
        wire.served(tmp_path / "run", callbacks=[Leaving()])
    assert seen == [tried]


def test_what_a_group_sent_in_an_attempt_that_failed_does_not_teach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "_FIRST", 0.01)
    settings = POOL | QUICK["feddf"] | {"min_clients": 2}
    for name, quiet in {"retried": ["bcd", "ab"], "once": ["ab"]}.items():
        InPairs(tmp_path / name, {2: quiet}).served(tmp_path / name / "run", "feddf", **settings)
    assert "is tried again" in (tmp_path / "retried/run/log.txt").read_text()
    assert models(tmp_path / "retried/run") == models(tmp_path / "once/run")


def test_what_sites_spent_of_their_privacy_is_counted_in_rounds_that_their_group_did_not_count(tmp_path: Path) -> None:
    spent = {}
    for name, quiet in {"all": {}, "late": {2: ["ab"], 3: ["cd"]}}.items():
        result = InPairs(tmp_path / name, quiet).served(tmp_path / name / "run", "fedavg+dp-sgd", noise_multiplier=1.0)
        spent[name] = [record["epsilon"] for record in result.records]
    assert spent["late"] == spent["all"], "every site has trained three times"


def test_sites_are_waited_for_as_long_as_their_group_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noted(ResponseTimes):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    made: list[ResponseTimes] = []
    monkeypatch.setattr(site_engine, "ResponseTimes", Noted)
    InPairs(tmp_path, {}).served(tmp_path / "run", rounds=1)
    assert [made[0].network_of(name) for name in "abcd"] == [0, 0, 1, 1]


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


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        (
            "fedavg",
            {"group": [{"model": "mlp", "clients": ["east"]}, {"model": "cnn"}]},
            "unknown client in group 'east'",
        ),
        ("fedavg", {"models": ["mlp", "cnn", "mlp", "cnn", "lenet5"]}, "group 'lenet5' has none of the 3 clients"),
        ("fedproto", {"models": ["mlp", "cnn"]}, "feature_size=84 gives all networks"),
        ("fedavg+dp", {"models": ["mlp", "cnn"], "noise_multiplier": 1.0}, "dp adds noise to the sum"),
        ("fedavg", {"models": ["mlp", "cnn"], "secure_aggregation": True}, "secure_aggregation adds up"),
        ("fedavg+ccvr", {"models": ["mlp", "cnn"]}, "ccvr needs one network"),
        ("fedavg+krum", {"models": ["mlp", "cnn"]}, "mlp: krum asks for at least 5 clients a round, and round 1 has 2"),
        ("fedavg+krum", {}, "krum asks for at least 5 clients a round, and round 1 has 3"),
    ],
)
def test_a_server_refuses_what_cannot_work_before_a_site_has_come(
    method: str, settings: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listening(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(network, "_listening", listening)
    text = resolve(SETTINGS | settings | {"method": method}).toml()
    (tmp_path / "run.toml").write_text(text)
    for folder in ("sites", "keys"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(network, "_public_keys", lambda keys: dict.fromkeys(NAMES, b""))
    monkeypatch.setattr(network, "_revoked", lambda keys: set())
    answer = type_in("serve", tmp_path / "run.toml", "--keys", tmp_path / "keys", "--out", tmp_path / "out")
    assert answer.code == 2
    assert words in answer.err
    assert not (tmp_path / "out").exists()


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
    with pytest.raises(Refusal, match=r"every site work with all groups' networks, and .*server\.py:net is a file, or"):
        served(
            wire_of(tmp_path, north=LocalInputs(model=files["site"])), tmp_path / "across", "fedgkd",
            group=group, rounds=1, across=True,
        )  # fmt: skip


@pytest.mark.parametrize("dealt", [["evil.py:net", "mlp"], "mlp,evil.py:net", ["distilbert", "mlp"]])
def test_a_site_opens_nothing_that_a_server_names_among_its_networks(dealt: Any, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"(evil\.py:net|distilbert); give yours to the site"):
        served(wire_of(tmp_path), tmp_path / "run", "local", models=dealt)


def test_a_region_opens_no_file_that_another_region_is_dealt(files: dict[str, str], tmp_path: Path) -> None:
    """Nor does it need one: it has its own."""

    class Noted(RegionalServer):
        def handle(self, message: Tree) -> Tree:
            requests[self.directory.name] = message
            return super().handle(message)

    requests: dict[str, Tree] = {}
    east, west = regions.SETTINGS["region"]
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(regional, "_NEWCOMERS_TIMEOUT", 0.5)
        patch.setattr(regions, "RegionalServer", Noted)
        world = regions.World(tmp_path)
        world.regions["east"].inputs = LocalInputs(model=files["site"])
        for site in regions.SITES["east"]:
            world.sites["east"].there[site] = Site(tmp_path / site, LocalInputs(model=files["site"]), regions.POLICY)
        named = [east | {"model": files["server"]}, west | {"model": "mlp"}]
        result = regions.served(world, tmp_path / "run", "f2l", region=named, rounds=2)
        assert result.summary["dropped"] == 0
        elsewhere = tmp_path / "elsewhere.py"  # not loaded by this process yet
        elsewhere.write_text((tmp_path / "server.py").read_text())
        for name, message in requests.items():
            message["run"]["config"] = message["run"]["config"].replace(files["server"], f"{elsewhere}:net")
            message["run"]["number"] = "f" * 16
            world.regions[name].handle(message | {"request": None, "down": {}})
        assert not elsewhere.with_suffix(".ran").exists()


def test_a_group_s_encoder_is_the_site_s_own_or_none() -> None:
    table = {"name": "a", "model": "distilbert", "model_options": {"pretrained": "/the/servers"}, "clients": [0]}
    text = resolve(SETTINGS | {"group": [table, DEEP]}).toml()
    for inputs in (LocalInputs(model="distilbert", pretrained="/mine"), LocalInputs(pretrained="/mine")):
        assert inputs.network(inputs.config(text), 0).model_options["pretrained"] == "/mine"
    for inputs in (LocalInputs(model="distilbert"), LocalInputs()):
        with pytest.raises(Refusal, match="give yours to the site"):
            inputs.network(inputs.config(text), 0)
    own = LocalInputs(model="distilbert", pretrained="/mine").network(LocalInputs(model="mlp").config(text), 1)
    assert own.model_options["pretrained"] == "/mine"


def test_a_network_of_a_site_s_own_has_the_features_that_all_have_in_common(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"models": ["mlp", "cnn"], "model_options": {"feature_size": 6}, "rounds": 1}
    allow = ("fedproto",)
    wire = wire_of(tmp_path, allow, west=LocalInputs(model="resnet8"))
    assert served(wire, tmp_path / "run", "fedproto", **settings).summary["dropped"] == 0
    group: list[dict[str, Any]] = [
        {"name": "a", "model": "mlp", "clients": ["west"], "model_options": {"feature_size": 6}},
        {"name": "b", "model": "cnn", "model_options": {"feature_size": 6}},
    ]
    wire = wire_of(tmp_path / "own", allow, west=LocalInputs(model="resnet8"))
    assert served(wire, tmp_path / "own/run", "fedproto", group=group, rounds=1).summary["dropped"] == 0
    wire = wire_of(tmp_path / "other", allow, west=LocalInputs(model="mlp"))
    alike = [{**table, "model": "cnn", "model_options": {}} for table in group]
    with pytest.raises(SettingError, match=r"features of one size: here they are 200, elsewhere 84; .*feature_size=84"):
        served(wire, tmp_path / "other/run", "fedproto", group=alike, rounds=1)


def test_a_site_of_a_network_of_its_own_builds_none_of_the_server_s_beyond_its_limit(tmp_path: Path) -> None:
    big = {"name": "big", "model": "cnn", "clients": ["west"], "model_options": {"hidden": [6000], "feature_size": 6}}
    group = [big, {"name": "b", "model": "mlp", "model_options": {"hidden": [8], "feature_size": 6}}]
    wire = wire_of(tmp_path, ("fedproto",))
    wire.sites["west"] = Site(tmp_path / "west", LocalInputs(model="mlp"), Policy(("fedproto",), max_parameters=10**5))
    with pytest.raises(Refusal, match=r"number of parameters is .*, and this site's policy allows 100000"):
        served(wire, tmp_path / "run", "fedproto", group=group, rounds=1)


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
