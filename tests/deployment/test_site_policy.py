"""A site agrees before it works: to methods, kinds of information and sizes. What it sent is written down."""

from __future__ import annotations

import json
import os
import stat
import threading
from functools import cache as cache_results
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill
from fedstill.building.config import Config, resolve
from fedstill.building.setup import Setup, prepare
from fedstill.core import trust
from fedstill.core.errors import DataError, SettingError
from fedstill.core.reports import Code, Refusal
from fedstill.core.tree import Tree
from fedstill.data import cache, tokens
from fedstill.deployment import policy as policies
from fedstill.deployment.audit import SENT, AuditLog, verify
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.policy import Consent, Policy, Usage, kinds_of
from fedstill.deployment.site import Site
from fedstill.methods import registry
from fedstill.methods.kinds import MEANING, Kind
from fedstill.running.files import RECEIVED
from support import commandline, sites
from support.quick import quick
from support.runs import SMALL

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {k: v for k, v in SMALL.items() if k != "engine"} | {
    "clients": 2, "participation": 1.0, "model": "mlp", "model_options": {"hidden": [4]},
}  # fmt: skip


def question(run: dict[str, Any] | None = None, **settings: Any) -> Tree:
    """What a server first asks of a site."""
    config = resolve(SETTINGS | settings).toml()
    dataset = fedstill.load_dataset("fashion-mini", image_size=16)
    told = {
        "number": "0123456789abcdef", "config": config, "clients": 2, "client": 0, "checkpoint": 0, "steps": [],
        "frozen": [], "tokenizer": "", "classes": list(dataset.classes), "shape": list(dataset.shape),
        "mean": list(dataset.mean), "std": list(dataset.std),
    }  # fmt: skip
    return {"run": told | (run or {}), "request": None, "down": {}, "seconds": 9.0}


def refused(asked: Tree, folder: Path, code: Code, policy: Policy | None = None, **own: str) -> str:
    with pytest.raises(Refusal) as caught:
        Site(folder / "site", LocalInputs(**own), policy).handle(asked)
    assert caught.value.code is code
    return str(caught.value)


# --- what a server sends is no path, no code and no address -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokenizer",
    [
        "{folder}/secret.json",
        "bert-base-uncased",
        "~/.ssh/id_rsa",
        "glosses-mini",
        '{{"model": 1}}',
        "[]",
        "{{",
        " {{}}",
    ],
)
def test_a_tokenizer_is_taken_as_json_alone(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.json").write_text("{}")

    def opened(*_: Any) -> Any:
        raise AssertionError("it was looked for")

    monkeypatch.setattr(tokens, "read", opened)
    monkeypatch.setattr(tokens, "trained", opened)
    asked = question(
        {"tokenizer": tokenizer.format(folder=tmp_path)}, data="glosses-mini", model="bag", model_options={}
    )
    refused(asked, tmp_path, Code.TOKENIZER_REFUSED)


def test_a_tokenizer_that_is_one_is_taken(tmp_path: Path) -> None:
    made = tokens.trained(["a few words"] * 3, 300)
    tokens.check_json(made)
    asked = question({"tokenizer": 7})
    refused(asked, tmp_path, Code.TOKENIZER_REFUSED)


@pytest.mark.parametrize(
    "named",
    [
        {"method": "{folder}/evil.py:Evil"}, {"model": "{folder}/evil.py:net"}, {"data": "{folder}/evil.py:data"},
        {"data": "{folder}/secret.csv"}, {"data": "{folder}"}, {"proxy": "{folder}/secret.csv"},
        {"proxy": "{folder}/evil.py:data"}, {"region": [{"method": "{folder}/evil.py:Evil"}]},
        {"model": "distilbert", "model_options": {"pretrained": "{folder}"}},
        {"model": "distilbert", "model_options": {"pretrained": "someone/else"}},
    ],
)  # fmt: skip
def test_no_file_that_a_server_names_is_opened_or_run(tmp_path: Path, named: dict[str, Any]) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "secret.csv").write_text("text,label\na,b\nc,d\n")
    asked = question()
    filled = json.loads(json.dumps(named).replace("{folder}", str(tmp_path)))
    import tomli_w

    asked["run"]["config"] = tomli_w.dumps(SETTINGS | filled)
    refused(asked, tmp_path, Code.FILE_NAMED)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("field", ["method", "model", "data", "proxy", "region.method"])
@pytest.mark.parametrize("own", ["method", "model", "data"])
def test_a_file_of_the_sites_own_is_for_its_field_alone(tmp_path: Path, field: str, own: str) -> None:
    import tomli_w

    given = LocalInputs(**{own: f"{tmp_path}/mine.py:it"})
    settings = {"region": [{"method": f"{tmp_path}/mine.py:it"}]} if "." in field else {field: f"{tmp_path}/mine.py:it"}
    try:
        given.config(tomli_w.dumps(SETTINGS | settings))
        code = None
    except Refusal as refusal:
        code = refusal.code
    except SettingError:  # there is no such file: it would have been opened
        code = None
    assert code == (None if field.removeprefix("region.") == own else Code.FILE_NAMED)


def test_a_servers_folder_and_device_are_not_the_sites(tmp_path: Path) -> None:
    text = resolve(SETTINGS, {"data_dir": "/etc", "device": "cpu"}).toml()
    assert LocalInputs(data_dir="mine").config(text).data_dir == "mine"
    assert LocalInputs().config(text).data_dir == ""


def test_nothing_that_a_server_names_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_OFFLINE", "0")
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("it was fetched"))
    with pytest.raises(DataError, match="a site fetches nothing that a server names, but with --download"):
        Site(tmp_path / "site", LocalInputs(data_dir=str(tmp_path))).handle(question(data="mnist", model="lenet5"))


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 10**9}, {"batch_size": 10**9}, {"image_size": 10**6}, {"max_length": 10**9}, {"clients": 10**12},
        {"model_options": {"hidden": [10**9]}}, {"model_options": {"hidden": [50_000, 50_000]}},
        {"model_options": {"hidden": [4] * 1000}}, {"region": [{"epochs": 10**9}, {}], "regions": 2},
        {"method": "fedgkd", "buffer": 10**9}, {"method": "fedkf", "z_dim": 10**8}, {"proxy_size": 10**9},
    ],
)  # fmt: skip
def test_a_run_that_would_exhaust_the_site_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    refused(question(**settings), tmp_path, Code.LIMIT_EXCEEDED)


def test_regions_are_counted_before_there_is_a_table_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question(regions=10**9)
    monkeypatch.setattr(Config, "each_region", lambda _: pytest.fail("a table for each region was made"))
    for body in (None, {"kind": "Train", "client": 0, "round": 1, "measure": False, "region": 0}):
        refused(asked | {"request": body}, tmp_path, Code.LIMIT_EXCEEDED)


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ({"clients": 10**13}, Code.LIMIT_EXCEEDED), ({"client": -1}, Code.BAD_REQUEST),
        ({"steps": [10**12]}, Code.LIMIT_EXCEEDED), ({"classes": [1]}, Code.BAD_REQUEST),
        ({"shape": [1] * 9}, Code.LIMIT_EXCEEDED), ({"config": "x" * 2_000_000}, Code.LIMIT_EXCEEDED),
        ({"checkpoint": "0"}, Code.BAD_REQUEST), ({"tokenizer": "{" * (65 << 20)}, Code.TOKENIZER_REFUSED),
    ],
)  # fmt: skip
def test_a_description_of_a_run_is_checked(tmp_path: Path, told: dict[str, Any], code: Code) -> None:
    refused(question(told), tmp_path, code)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        {"client": 1, "round": 1}, {"client": "../../x", "round": 1}, {"client": 0, "round": "../../x"},
        {"client": 0, "round": 0}, {"client": 0, "round": 1, "region": 3}, {"client": 0, "round": 1, "region": -1},
        {"client": 0, "round": 1},
    ],
)  # fmt: skip
def test_a_request_is_about_this_client_and_fits_the_method(tmp_path: Path, body: dict[str, Any]) -> None:
    asked = question() | {"request": {"kind": "Train", **body}, "down": {"model": torch.zeros(3)}}
    refused(asked, tmp_path, Code.BAD_REQUEST)


# --- consent ----------------------------------------------------------------------------------------------------------


@cache_results
def declared(name: str) -> Setup:
    """A run of that method, ready to start: of as many clients as any rule needs."""
    return prepare(resolve(quick(name) | {"clients": 12, "participation": 1.0}, {"method": name}))


def uplink_kinds(name: str) -> dict[str, Kind]:
    setup = declared(name)
    return kinds_of(setup.method, setup.task)


EVERY = [*registry.names(), *(f"fedavg+{name}" for name in registry.modifiers())]
WEIGHTS_ALONE = {
    *("fedavg", "fedprox", "fedgkd", "fedgkd-vote", "fedgkd-plus", "fedkf", "moon", "fedmgda-plus", "feddyn", "feddf"),
    *("fedbe", "fedhyb", "lkd", "mtkd", "f2l"),
    *("fedavg+t1", "fedavg+median", "fedavg+trimmed-mean", "fedavg+norm-clip", "fedavg+krum", "fedavg+multi-krum"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_part_that_a_method_sends_is_of_a_kind(name: str) -> None:
    kinds = uplink_kinds(name)
    assert kinds or name == "local"
    assert Kind.OTHER not in kinds.values()
    if name in WEIGHTS_ALONE:
        assert set(kinds.values()) == {Kind.WEIGHTS}


@pytest.mark.parametrize("name", EVERY)
def test_the_default_allows_what_sends_weights_alone(name: str) -> None:
    setup = declared(name)
    check = (("0" * 16), name, setup.method, setup.task)
    kinds = set(uplink_kinds(name).values())
    if kinds <= {Kind.WEIGHTS}:
        Consent(Policy()).check(*check)
    else:
        with pytest.raises(Refusal, match=f"--allow {name.removeprefix('fedavg+')}") as caught:
            Consent(Policy()).check(*check)
        assert caught.value.code is Code.NOT_ALLOWED
        Consent(Policy(allow=(name.removeprefix("fedavg+"),))).check(*check)
    for kind in kinds:
        with pytest.raises(Refusal, match="policy denies"):
            Consent(Policy(allow=(name,), deny=(kind,))).check(*check)


def test_of_a_composition_what_sends_more_is_named(tmp_path: Path) -> None:
    asked = question(method="fedprox+dafkd+t1", batches=1)
    assert "--allow dafkd," in refused(asked, tmp_path, Code.NOT_ALLOWED)
    assert "samples" in Site(tmp_path / "b", LocalInputs(), Policy(allow=("dafkd",))).handle(asked)
    assert "samples" in Site(tmp_path / "c", LocalInputs(), Policy(allow=("fedprox+dafkd+t1",))).handle(asked)
    refused(asked, tmp_path, Code.NOT_ALLOWED, Policy(allow=("dafkd",), deny=(Kind.GENERATOR,)))


def test_an_owner_who_is_asked_may_take_time(tmp_path: Path) -> None:
    put, go, answered = [], threading.Event(), threading.Event()

    def ask(text: str) -> bool:
        put.append(text)
        go.wait(60)
        answered.set()
        return True

    site = Site(tmp_path, LocalInputs(), Policy(), ask)
    for _ in range(2):
        with pytest.raises(Refusal) as caught:
            site.handle(question(method="qffl"))
        assert caught.value.code is Code.CONSENT_PENDING
    go.set()
    assert answered.wait(60)
    for thread in threading.enumerate():
        if thread.name.startswith("consent"):
            thread.join(60)
    assert "samples" in site.handle(question(method="qffl"))
    assert len(put) == 1
    assert "loss (the loss of the sent model" in put[0]


def test_metrics_can_be_kept_at_home(tmp_path: Path) -> None:
    wire = sites.Wire(tmp_path)
    wire.sites["south"] = Site(tmp_path / "silent", LocalInputs(), Policy(deny=(Kind.METRICS,)))
    result = sites.served(wire, tmp_path / "run", rounds=1)
    assert sites.sizes(tmp_path / "run")[1] > 0
    assert result.records[0]["dropped"] == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / RECEIVED).read_text().splitlines()]
    assert [line["values"] for line in lines if line["site"] == "south"][1] == ["samples", "metrics/seconds"]


def test_a_site_trains_and_works_no_longer_than_agreed(tmp_path: Path) -> None:
    spent = Usage(tmp_path, Policy(max_rounds=2))
    for _ in range(2):
        with spent.work(training=True):
            pass
    with pytest.raises(Refusal, match="trained 2 times"), Usage(tmp_path, Policy(max_rounds=2)).work(training=True):
        pass
    with spent.work(training=False):
        pass
    (tmp_path / "spent.json").write_text('{"trainings": 0, "seconds": 3601}')
    with pytest.raises(Refusal, match="worked 1 hours"), Usage(tmp_path, Policy(max_hours=1)).work(training=False):
        pass


def test_a_site_stops_after_its_last_round(tmp_path: Path) -> None:
    class Counted(sites.Wire):
        def answer(self, name: str, request: Tree) -> Any:
            try:
                return super().answer(name, request)
            except Refusal as error:
                return {"error": {"code": error.code.value, "step": "request", "number": "0000"}}

    wire = Counted(tmp_path)
    wire.sites["south"] = Site(tmp_path / "short", LocalInputs(), Policy(max_rounds=2))
    result = sites.served(wire, tmp_path / "run", rounds=3)
    assert [record["dropped"] for record in result.records] == [0, 0, 1]
    assert "asks for more than the site's limits allow" in (tmp_path / "run/log.txt").read_text()


def test_a_policy_is_read_from_a_file_and_flags_add_to_it(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('allow = ["dafkd"]\ndeny = ["logits"]\nmax_rounds = 5\n')
    found = policies.read(file, allow=["scaffold"], deny=[], max_rounds=None, max_hours=2.0)
    assert found == Policy(allow=("dafkd", "scaffold"), deny=(Kind.LOGITS,), max_rounds=5, max_hours=2.0)
    for text, problem in (
        ("alow = []", "did you mean 'allow'"), ('deny = ["logit"]', "deny"), ("max_rounds = -1", "max_rounds = -1"),
        ('allow = ["dafk"]', "did you mean 'dafkd'"), ("max_hours = inf", "max_hours"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(SettingError, match=problem):
            policies.read(file)


# --- audit ------------------------------------------------------------------------------------------------------------


def test_both_ends_write_down_the_same_digests(tmp_path: Path) -> None:
    class Written(sites.Wire):
        def answer(self, name: str, request: Tree) -> Any:
            answer = super().answer(name, request)
            self.sites[name].record(request, {"id": "x", "body": answer})
            return answer

    sites.served(Written(tmp_path), tmp_path / "run", "scaffold", rounds=1)
    ours = [json.loads(line) for line in (tmp_path / "north" / SENT).read_text().splitlines()]
    received = [json.loads(line) for line in (tmp_path / "run" / RECEIVED).read_text().splitlines()]
    theirs = [line for line in received if line["site"] == "north"]
    assert [line["sha256"] for line in ours] == [line["sha256"] for line in theirs]
    assert [line["request"] for line in ours] == ["Join", "Train", "Score", "Finish"]
    assert ours[1]["round"] == 1
    assert [(part["name"], part["kind"]) for part in ours[1]["parts"]] == [
        ("model", "weights"),
        ("c_change", "gradients"),
    ]
    assert ours[1]["bytes"] > 4 * ours[1]["parts"][0]["shape"][0]
    assert verify(tmp_path / "north" / SENT) == len(ours)
    assert stat.S_IMODE((tmp_path / "north" / SENT).stat().st_mode) == 0o600


def test_a_line_that_was_changed_or_taken_out_shows(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for number in range(4):
        AuditLog(path).append(number=number)  # a new process each time
    lines = path.read_text().splitlines()
    assert verify(path) == 4
    for damaged in ([*lines[:1], *lines[2:]], [lines[0], lines[1].replace("1", "7"), *lines[2:]], lines[1:]):
        path.write_text("\n".join(damaged) + "\n")
        with pytest.raises(DataError, match="lines were changed"):
            verify(path)
    path.write_text("\n".join(lines)[:-5])  # a kill cut the last line
    AuditLog(path).append(number=9)
    assert verify(path) == 5


# --- copies are private -----------------------------------------------------------------------------------------------


def test_a_decoded_copy_is_its_owners_alone_and_can_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDSTILL_CACHE", str(folder))
    np.savez(tmp_path / "mine.npz", x=np.zeros((20, 8, 8, 3), np.uint8), y=np.arange(20) % 4)
    before = os.umask(0o022)
    try:
        fedstill.load_dataset(str(tmp_path / "mine.npz"))
    finally:
        os.umask(before)
    files = [folder, *folder.rglob("*")]
    assert len(files) > 5
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in files)
    (entry,) = cache.entries()
    assert entry.source == str(tmp_path)
    assert entry.bytes > 20 * 8 * 8 * 3
    entry.path.chmod(0o755)  # as an older version left it
    fedstill.load_dataset(str(tmp_path / "mine.npz"))
    assert stat.S_IMODE(entry.path.stat().st_mode) == 0o700
    assert str(tmp_path) in "".join(commandline.fedstill("cache").out.split())
    assert "deleted 0 copies" in commandline.fedstill("cache", "--clear", "--older-than", "1").out
    os.utime(entry.path / "meta.json", (0, 0))
    assert "deleted 1 copies" in commandline.fedstill("cache", "--clear", "--older-than", "1").out
    assert cache.entries() == []


def test_copies_that_nobody_uses_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    for name in ("old", "new"):
        if name == "new":
            os.utime(cache.entries()[0].path / "meta.json", (0, 0))
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((20, 4), np.float32), y=np.arange(20) % (2 + len(name)))
        fedstill.load_dataset(str(tmp_path / f"{name}.npz"))
        fedstill.load_dataset(str(tmp_path / f"{name}.npz"))
    assert len(cache.entries()) == 1


@pytest.mark.slow
def test_a_served_run_is_its_owners_alone_until_the_owner_shares_it(tmp_path: Path) -> None:
    out, wire = tmp_path / "run", sites.Wire(tmp_path)
    sites.served(wire, out, rounds=1)
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    out.chmod(0o750)
    sites.served(wire, out, rounds=2)
    assert stat.S_IMODE(out.stat().st_mode) == 0o750


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from fedstill.flower.keys import make
    from fedstill.flower.node import serve

    make(tmp_path / "keys", ["north"], ["127.0.0.1"])
    key = tmp_path / "keys/sites/north"
    key.chmod(0o640)
    with pytest.raises(SettingError, match=r"read or changed by others \(mode 0640\); run 'chmod 600 "):
        serve(lambda asked: asked, server="127.0.0.1:1", key=key, ca=None, directory=tmp_path / "site")


# --- code that a run directory names ----------------------------------------------------------------------------------

MINE = """
from dataclasses import dataclass
import fedstill
open({ran!r}, "a").write("x")

@dataclass(frozen=True)
class Mine(fedstill.FedAvg):
    pass
"""


def test_code_that_changed_since_the_run_is_not_run_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, file, out = tmp_path / "ran", tmp_path / "mine.py", tmp_path / "run"
    file.write_text(MINE.format(ran=str(ran)))
    fedstill.run(f"{file}:Mine", **SETTINGS | {"rounds": 1}, engine="inline", out=out)
    fedstill.resume(out, rounds=2)
    ran.unlink()
    file.write_text(MINE.format(ran=str(ran)) + "# more\n")
    with pytest.raises(SettingError, match=r"mine\.py \(the file has changed, or moved.*--trust-code"):
        fedstill.resume(out, rounds=3)
    assert not ran.exists()
    put: list[str] = []

    def agree(text: str) -> bool:
        put.append(text)
        return True

    token = trust.confirm.set(agree)
    try:
        fedstill.resume(out, rounds=3)
    finally:
        trust.confirm.reset(token)
    assert "names code that would be run" in put[0]
    (out / trust.CODE).unlink()
    with pytest.raises(SettingError, match="does not say what the file held"):
        fedstill.resume(out, rounds=4)
    monkeypatch.setattr("os.getuid", lambda: out.stat().st_uid + 1)
    with pytest.raises(SettingError, match="belongs to another user"):
        fedstill.resume(out, rounds=4)


def test_a_method_given_again_does_not_vouch_for_the_other_code_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    text = resolve(SETTINGS).toml().replace('model = "mlp"', f'model = "{tmp_path}/evil.py:net"')
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text(text)
    with pytest.raises(SettingError, match=r"names code that would be run.*evil\.py"):
        fedstill.resume(tmp_path / "run", method=fedstill.FedAvg())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("words", [("resume",), ("samples",), ("figure", "confusion"), ("figure", "bubbles")])
def test_commands_ask_before_they_run_code_of_a_run_directory(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    names = {"method": f"{tmp_path}/evil.py:Evil"} if words[-1] != "bubbles" else {"data": f"{tmp_path}/evil.py:data"}
    import tomli_w

    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text(tomli_w.dumps(SETTINGS | names))
    (tmp_path / "run/model.safetensors").touch()
    out = [] if words == ("resume",) else ["--out", str(tmp_path / "x.png")]
    shown = commandline.fedstill(*words, str(tmp_path / "run"), *out)
    assert shown.code == 2
    assert "--trust-code" in shown.err
    assert not (tmp_path / "ran").exists()
    commandline.fedstill(*words, str(tmp_path / "run"), *out, "--trust-code")
    assert (tmp_path / "ran").exists()


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_says_what_each_method_sends() -> None:
    page = (ROOT / "docs/security.md").read_text()
    for name in EVERY:
        kinds = sorted(set(uplink_kinds(name).values()), key=list(Kind).index)
        row = f"| `{name.removeprefix('fedavg+') if '+' in name else name}` | {', '.join(kinds) or 'nothing'} |"
        assert row in page, row
    for kind in Kind:
        assert f"| {kind} | {MEANING[kind]} |" in page
    for field in Policy.__dataclass_fields__:
        assert f"`{field}`" in page
