"""Carry out every attack that docs/security.md names, and print its table: what happened once, and what happens now.

    python tools/security_table.py > attacks.md
    python tools/security_table.py --only "a claimed sample count"

The attackers are those of the tests. Ends with 1 if an attack does not come out as it should.
"""

# ruff: noqa: E402 - the tests' folder comes first

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import resource
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tests", "tests/running", "tests/deployment", "tests/flower", "tools")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

import numpy as np
import psutil
import pytest
import robustness_table
import test_damage as damage
import test_deployment as deployment
import test_flower_keys as certificates
import test_flower_limits as limits
import test_hostile_sites as hostile
import test_site_leaks as leaks
import test_site_policy as consent
import torch

import fedstill
from fedstill.core import reports
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.reports import Code, Refusal
from fedstill.core.tree import Tree
from fedstill.data import cache
from fedstill.deployment.site import LocalInputs, Site
from fedstill.flower import keys, node
from fedstill.flower.link import Certificates, FlowerLink
from fedstill.running import retries
from fedstill.running.rollback import rollback
from support import link as link_support
from support.commandline import fedstill as command
from support.commandline import interrupted_after, model, short
from support.sites import Wire, alone, served, weights

Outcome = tuple[bool, str]
"""Whether the defence held, and what was seen."""


@dataclass(frozen=True)
class Attack:
    name: str
    before: str
    carry_out: Callable[[Path], Outcome]


ATTACKS: list[Attack] = []


def attack(name: str, before: str) -> Callable[[Callable[[Path], Outcome]], Callable[[Path], Outcome]]:
    """Make a function that carries out an attack a row of the table; `before`: what an earlier version did."""

    def add(carry_out: Callable[[Path], Outcome]) -> Callable[[Path], Outcome]:
        ATTACKS.append(Attack(name, before, carry_out))
        return carry_out

    return add


# --- what a site tells, and what a server may ask of it ---------------------------------------------------------------


@attack("error messages about a site's data", "a patient's line, file names and labels on the server's console")
def error_messages(folder: Path) -> Outcome:
    leaked, home = [], logging.Logger("home")  # what a site logs stays on its own machine
    for case, (make, settings) in leaks.FAILING.items():
        (folder / case).mkdir()
        with patch.object(node, "_log", home):
            nodes, out = leaks.run(folder / case / "run", make(folder / case), **settings)
        written = [path.read_bytes() for path in out.rglob("*") if path.is_file()]
        leaked += [case] * any(leaks.MARKER.encode() in data.lower() for data in (*nodes.received, *written))
    count = len(leaks.FAILING)
    return not leaked, f"of {count} kinds of broken data {len(leaked)} tell the server more than a code"


@attack("forged log lines, an error of 1.2 MB", "written to the server's log as they came")
def forged_log_lines(folder: Path) -> Outcome:
    text = "failed\n2026-01-01 INFO all is well\x1b[2J" * 30_000
    forged = {"error": {"code": text, "step": text, "number": text}}
    result = served(hostile.Lying(folder, lambda answer: forged), folder / "run", rounds=1)
    log = hostile.log(folder / "run")
    longest = max(map(len, log.splitlines()))
    held = result.records[0]["dropped"] == 1 and "all is well" not in log and "\x1b" not in log and longest < 500
    return held, f"no byte of it is logged; longest line of the log: {longest} characters"


def refused_with(request: Tree, folder: Path) -> Code | None:
    """The code with which a site refuses a request; None: it does not."""
    try:
        Site(folder, LocalInputs()).handle(request)
    except Refusal as error:
        return error.code
    return None


@attack("a server's `tokenizer` names a file or a model hub", "the site opened it")
def tokenizer_as_path(folder: Path) -> Outcome:
    secret, opened = folder / "secret.json", []
    secret.write_text("{}")
    sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" and args[0] == str(secret) else None)
    text = {"data": "glosses-mini", "model": "bag", "model_options": {}}
    named = (str(secret), "bert-base-uncased", "~/.ssh/id_rsa")
    codes = [refused_with(consent.question({"tokenizer": name}, **text), folder / "site") for name in named]
    return codes == [Code.TOKENIZER_REFUSED] * 3 and not opened, f"refused (`{codes[0]}`), nothing opened"


@attack("a server names code or files of the site", "")
def files_of_the_site(folder: Path) -> Outcome:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    named = [{kind: f"{folder}/evil.py:it"} for kind in ("method", "model", "data", "proxy")]
    codes = []
    for settings in named:
        request = consent.question()
        lines = request["run"]["config"].splitlines()
        (kind, value), *_ = settings.items()
        lines = [f'{kind} = "{value}"' if line.startswith(f"{kind} =") else line for line in lines]
        request["run"]["config"] = "\n".join(lines)
        codes.append(refused_with(request, folder / "site"))
    held = codes == [Code.FILE_NAMED] * 4 and not (folder / "ran").exists()
    return held, f"refused (`{codes[0]}`), nothing run"


@attack("a method that sends more than weights", "run without a question")
def more_than_weights(folder: Path) -> Outcome:
    more = ("dafkd", "scaffold", "feddistill", "fedhkd", "qffl", "fedavg+ccvr")
    codes = {name: refused_with(consent.question(method=name), folder / name) for name in more}
    return set(codes.values()) == {Code.NOT_ALLOWED}, f"{', '.join(more)}: refused (`{codes['dafkd']}`)"


def modes(folder: Path) -> tuple[bool, str]:
    """Whether a folder and all below is its owner's alone, and the modes found."""
    found = {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    return not any(mode & 0o077 for mode in found), ", ".join(f"{mode:04o}" for mode in sorted(found))


@attack("another user of the machine reads the decoded cache", "files 0644 in folders 0755, for ever")
def cache_of_others(folder: Path) -> Outcome:
    np.savez(folder / "mine.npz", x=np.zeros((20, 8, 8, 3), np.uint8), y=np.arange(20) % 4)
    before = os.umask(0o022)
    try:
        with patch.dict(os.environ, FEDSTILL_CACHE=str(folder / "cache")):
            fedstill.load_dataset(str(folder / "mine.npz"))
            held, found = modes(folder / "cache")
            cleared = command("cache", "--clear").code == 0 and not cache.entries()
    finally:
        os.umask(before)
    return held and cleared, f"modes {found}; `fedstill cache --clear` deletes it"


@attack("another user reads a site's last answer and state", "`answer.safetensors` 0644")
def answer_of_others(folder: Path) -> Outcome:
    site = folder / "site"
    handled = node._Site(lambda request: request, site, None)
    before = os.umask(0o022)
    try:
        node.private_folder(site)
        with node.owner_only():
            handled.answer(node.to_records({"id": "x", "seconds": 60.0, "keep": True, "body": {"a": torch.ones(3)}}))
    finally:
        os.umask(before)
    held, found = modes(site)
    return held and (site / "answer.safetensors").exists(), f"modes {found}"


@attack("another user of the server reads the run", "folders 0755")
def run_of_others(folder: Path) -> Outcome:
    before = os.umask(0o022)
    try:
        served(Wire(folder), folder / "run", rounds=1)
    finally:
        os.umask(before)
    mode = stat.S_IMODE((folder / "run").stat().st_mode)
    return mode == 0o700, f"the run directory has mode {mode:04o}"


@attack("a key that others can read", "used")
def key_of_others(folder: Path) -> Outcome:
    keys.make(folder / "keys", ["north"], ["127.0.0.1"])
    key = folder / "keys/sites/north"
    key.chmod(0o644)
    try:
        node.serve(lambda asked: asked, server="127.0.0.1:1", key=key, ca=None, directory=folder / "site")
    except SettingError as error:
        return "chmod 600" in str(error), "refused, with what to do"
    return False, "used"


@attack("code that a foreign run directory names", "run by `resume`, `samples`, `figure`")
def foreign_code(folder: Path) -> Outcome:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    (folder / "run").mkdir()
    names = {"method": f"{folder}/evil.py:Evil"}
    (folder / "run/config.toml").write_text("\n".join(f"{k} = {v!r}" for k, v in names.items()))
    (folder / "run/model.safetensors").touch()
    codes = []
    for words in (("resume",), ("samples",), ("figure", "confusion")):
        out = [] if words == ("resume",) else ["--out", str(folder / "x.png")]
        answer = command(*words, folder / "run", *out)
        codes.append(answer.code if "--trust-code" in answer.err else -1)
    return codes == [2] * 3 and not (folder / "ran").exists(), "not run: exit 2, unless asked or `--trust-code`"


# --- one hostile or broken site among many ----------------------------------------------------------------------------


@attack("all answers diverge (`lr` = 1000)", "tried for ever, silently")
def divergence(folder: Path) -> Outcome:
    reported = hostile.Reports()
    try:
        served(Wire(folder), folder / "run", lr=1000.0, round_retries=3, listener=reported)
    except FedstillError as error:
        spoilt = list((folder / "run/checkpoints").glob("round-*"))
        held = "failed 4 times and is given up" in str(error) and not spoilt
        return held, f"given up after 4 attempts ({len(reported.lines)} on the console), no checkpoint of it"
    return False, "it went on"


@attack("one finite answer of 10²⁰", "a livelock, also after a restart")
def absurd_answer(folder: Path) -> Outcome:
    gone = Wire(folder / "without")
    gone.away = {"south"}
    without = served(gone, folder / "without/run", rounds=2)
    result = served(hostile.Lying(folder, hostile.scaled(1e20)), folder / "run", rounds=2)
    same = weights(folder / "run") == weights(folder / "without/run")
    dropped = [record["dropped"] for record in result.records]
    return same and dropped == [1, 1] and len(without.records) == 2, "dropped; the model has the bits without it"


@attack("a spoilt model that became a checkpoint", "a restart looped from it")
def poisoned_checkpoint(folder: Path) -> Outcome:
    wire = hostile.Lying(folder, hostile.scaled(1))
    served(wire, folder / "run", rounds=1)
    wire.change = hostile.scaled(1e3)
    spoilt = served(wire, folder / "run", rounds=2, max_update_ratio=0).records[-1]["loss"]
    rollback(folder / "run", 1)
    wire.change = hostile.scaled(1)
    mended = served(wire, folder / "run", rounds=2).records[-1]["loss"]
    alone(folder / "alone", rounds=2)
    same = weights(folder / "run") == weights(folder / "alone")
    bits = "and on to the bits of a run without it"
    return same and spoilt > 10 * mended, f"`fedstill rollback DIR --to 1` (loss {spoilt:.0e} → {mended:.1f}), {bits}"


@attack("uploads that are refused", "kept in memory: 8 of 240 MB, 2.1 GB")
def refused_uploads(folder: Path) -> Outcome:
    with trial(folder) as (made, link_of):
        made.start("berlin")
        with link_of(most_bytes=1 << 20, database=False) as link:
            link_support.everyone(link, 1)

            def send(times: int) -> bool:
                answers = [
                    link_support.ask(link, {"berlin": {"big": 6 << 20}})["berlin"] for _ in range(times)
                ]  # 24 MB
                return all("is refused" in answer.reason for answer in answers)

            refused, before = send(1), limits.memory(link._process)
            refused &= send(8)
            grown = (limits.memory(link._process) - before) / limits.MB
            return refused and grown < 60, f"8 of 24 MB: {max(0, grown):.0f} MB more"


@contextmanager
def trial(folder: Path) -> Iterator[tuple[link_support.Trial, Any]]:
    """A SuperLink, and sites that misbehave."""
    made = link_support.Trial(folder)
    try:
        yield made, made.link
    finally:
        made.stop()


@attack("a claimed sample count", "10⁸ believed: the site's weight became 1")
def claimed_count(folder: Path) -> Outcome:
    with pytest.MonkeyPatch.context() as monkeypatch:
        seen = hostile.weights_of("fedavg", hostile.Claiming(folder), folder / "run", monkeypatch)
    share = seen[1] / sum(seen.values())
    return share <= 0.75, f"counts as {100 * share:.0f} % of three sites (`max_share`; of five or more, half), logged"


@attack("another sample count after joining", "believed")
def changed_count(folder: Path) -> Outcome:
    served(Wire(folder), folder / "run", rounds=1)
    more = hostile.Lying(folder, lambda answer: {"samples": [10**8]}, kind="poll")
    result = served(more, folder / "run", rounds=2)
    left = result.records[-1]["clients"]
    return left == 2 and "when it joined" in hostile.log(folder / "run"), "left out until `--recount`"


@attack("a claimed number of tests", "10⁸ took 2.6 GB")
def claimed_tests(folder: Path) -> Outcome:
    tracemalloc.start()
    try:
        result = served(hostile.Claiming(folder), folder / "run", rounds=1)
        peak = tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()
    amp = result.records[0]["amp"]
    return peak < 100 and amp < 0.9, f"{peak:.0f} MB at most; capped like samples"


@attack("metrics out of range", "accuracy −5 and 10³⁰⁸ averaged")
def impossible_metrics(folder: Path) -> Outcome:
    forged = {"local_accuracy": -5.0, "train_loss": 1e308}
    wire = hostile.Lying(folder, lambda answer: {"metrics": answer["metrics"] | forged})
    found = served(wire, folder / "run", rounds=1).records[0]
    served(Wire(folder / "plain"), folder / "plain/run", rounds=1)
    same = weights(folder / "run") == weights(folder / "plain/run")
    held = same and 0 <= found["local_accuracy"] <= 1 and found["train_loss"] < 10
    return held, "left out and logged; its model counts"


def against_rules(rules: tuple[str, ...], lie: int) -> Outcome:
    """Accuracies without and with one client of eight that lies; held if that costs less than 10 points."""
    method, net, forged = robustness_table.LIES[lie]
    common = {name: robustness_table.COMMON[name] for name in ("image_size", "fraction", "epochs", "batch_size", "lr")}
    common |= {"clients": 8, "participation": 1.0, "alpha": 1.0, "rounds": 10, "engine": "inline", "eval_every": 0}
    found = []
    for rule in rules:
        pair = [
            100 * fedstill.run(f"{method}+{rule}", model=net, **common, **how).summary["final_accuracy"]
            for how in ({}, forged | {"attackers": 1})
        ]
        found.append((rule, *pair))
    texts = [f"{rule} {plain:.1f} → {attacked:.1f} %" for rule, plain, attacked in found]
    return all(plain - attacked < 10 for _, plain, attacked in found), ", ".join(texts)


@attack("robust rules: a claimed count and a sign-flip", "norm-clip 58.6 → 11.7 %, multi-krum 60.5 → 10.0 %")
def rules_and_counts(folder: Path) -> Outcome:
    return against_rules(("norm-clip", "multi-krum"), 0)


@attack("robust rules: BatchNorm statistics of 10¹²", "not looked at")
def rules_and_statistics(folder: Path) -> Outcome:
    return against_rules(("norm-clip", "multi-krum"), 1)


@attack("robust rules: SCAFFOLD's `c_change` of 10³", "not looked at")
def rules_and_other_parts(folder: Path) -> Outcome:
    return against_rules(("median", "multi-krum"), 2)


@attack("a site that hangs", "held every round for `--timeout`")
def hung_site(folder: Path) -> Outcome:
    with pytest.MonkeyPatch.context() as monkeypatch:
        wire, result = hostile.hung(folder, monkeypatch, 7.0)
    left = [record["left_out"] for record in result.records]
    held = set(wire.waited) == {7.0} and left == [["south"]] * 2
    return held, "`--timeout` 600, `--wait-after` 7: left out 7 s after the last answer"


@attack("an unknown key, added later, then revoked", "gave up at the first refusal; could not be revoked")
def unknown_and_revoked_key(folder: Path) -> Outcome:
    with trial(folder) as (made, _):
        held_keys = folder / "keys"
        shutil.copy(folder / "others/sites/stranger", held_keys / "sites/stranger")
        (held_keys / "sites/stranger").chmod(0o600)
        files = Certificates(held_keys / "ca.pem", held_keys / "server.pem", held_keys / "server.key")
        public = partial(keys.public_keys, held_keys)
        place = {"host": "127.0.0.1", "port": made.port, "certificates": files, "most_bytes": 10**6}
        with FlowerLink(folder / "link", public, database=False, **place) as link:
            made.start("stranger")
            log = folder / "stranger.log"
            link_support.wait(lambda: log.exists() and "does not know the key" in log.read_text())
            (held_keys / "sites/stranger").rename(folder / "stranger.key")  # so that `add` finds nothing of that name
            keys.add(held_keys, "stranger", folder / "others/sites/stranger.pub")
            times = [time.monotonic()]
            link_support.wait(lambda: "stranger" in link.present())
            times.append(time.monotonic())
            keys.revoke(held_keys, "stranger")
            link_support.wait(lambda: "stranger" not in link.present())
            added, gone = np.diff([*times, time.monotonic()])
    return True, f"refused; let in {added:.1f} s after `keys add`, out {gone:.1f} s after `keys revoke`"


@attack("an expired certificate", "named after 123 s")
def expired_certificate(folder: Path) -> Outcome:
    lines: list[str] = []
    handler = leaks.SimpleHandler(lines)
    logging.getLogger(node.__name__).addHandler(handler)

    def sleep(seconds: float) -> None:
        raise certificates.Enough

    began = time.monotonic()
    try:
        with (
            certificates.listening_with_expired(folder) as (made, server),
            patch("fedstill.flower.node.time.sleep", sleep),
            contextlib.suppress(certificates.Enough),
        ):
            with pytest.raises(SettingError):  # as `fedstill serve` does
                keys.check_dates(made / "server.pem")
            began = time.monotonic()
            node._wait_for_server(server, made / "ca.pem")
    finally:
        logging.getLogger(node.__name__).removeHandler(handler)
    named = any("has expired" in line for line in lines)
    return named, f"named after {time.monotonic() - began:.1f} s; `serve` does not start with one"


@attack("SIGTERM to `fedstill serve`", "left its SuperLink and files behind")
def sigterm(folder: Path) -> Outcome:
    made = deployment.Trial(folder, deployment.free_port())
    keys.make(folder / "keys", list(deployment.NAMES), ["127.0.0.1"])
    scratch = folder / "tmp"
    scratch.mkdir()
    try:
        with patch.dict(os.environ, TMPDIR=str(scratch)):
            server = made.serve("run", "fedavg")
        deployment.until(lambda: "waiting for" in made.log("run"))
        started = deployment.children(server)
        server.send_signal(signal.SIGTERM)
        code = server.wait(deployment.PATIENCE)
        deployment.until(lambda: not any(process.is_running() for process in started))
        left = list(scratch.glob("fedstill-*"))
    finally:
        made.stop()
    return code == 143 and bool(started) and not left, f"exit {code}, 0 processes and {len(left)} files left"


@attack("idle connections without a key", "1,500 filled the descriptors")
def idle_connections(folder: Path) -> Outcome:
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with trial(folder) as (made, link_of), link_of(database=False) as link:
        idle = [socket.create_connection(("127.0.0.1", made.port), 10) for _ in range(1500)]
        try:
            made.start("lagos")
            answered = link_support.ask(link, {"lagos": {"note": 1}})["lagos"]["note"] == 1
            connections = psutil.Process(link._process.pid).net_connections()
            held = sum(connection.status == "ESTABLISHED" for connection in connections)
        finally:
            for connection in idle:
                connection.close()
    return answered and held < 100, f"1,500 opened, {held} held; a site gets in beside them"


# --- disks that lie ---------------------------------------------------------------------------------------------------


@contextmanager
def damaged(folder: Path) -> Iterator[tuple[Path, Callable[[], Outcome]]]:
    """A run of which three of four rounds are done, to be damaged; then, what `fedstill resume` makes of it."""
    with interrupted_after(3):
        command("run", damage.METHOD, *short(out=folder / "run", rounds=damage.ROUNDS))
    whole = damage.run(damage.METHOD, folder / "whole", rounds=damage.ROUNDS)

    def resumed() -> Outcome:
        answer = command("resume", folder / "run")
        if answer.code:
            return damage.named(answer.err, "", folder / "run"), f"exit {answer.code}, the file is named"
        found, expected = model(folder / "run"), model(whole)
        same = all(torch.equal(found[name], expected[name]) for name in expected)
        noticed = "the checkpoint before" in hostile.log(folder / "run")
        return same, "noticed; goes on from the checkpoint before, to the same bits" if noticed else "the same bits"

    yield folder / "run", resumed


@attack("a flipped byte in a checkpoint", "resumed with exit 0 to another model")
def flipped_byte(folder: Path) -> Outcome:
    with damaged(folder) as (path, resumed):
        damage.flip(path / "checkpoints/round-000003.safetensors", 0.7)
        return resumed()


@attack("a deleted client state", "resumed with exit 0 to another model")
def deleted_state(folder: Path) -> Outcome:
    with damaged(folder) as (path, resumed):
        damage.states(path)[0].unlink()
        return resumed()


@attack("client states swapped, or replaced by older ones", "not noticed")
def swapped_states(folder: Path) -> Outcome:
    with damaged(folder / "a") as (path, resumed):
        one, two = damage.states(path)[:2]
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
        swapped = resumed()
    with damaged(folder / "b") as (path, resumed):
        new = damage.states(path)[0]
        client = new.name.split(".")[0]
        old = next(p for p in sorted(new.parent.glob(f"{client}.*")) if p != new)
        shutil.copy(old, new)
        replayed = resumed()
    return swapped[0] and replayed[0], swapped[1] if swapped == replayed else f"{swapped[1]}; {replayed[1]}"


@attack("a flipped byte in a site's last answer", "repeated with another bit")
def flipped_answer(folder: Path) -> Outcome:
    request = {"id": "round 1", "seconds": 60.0, "keep": True, "body": {"model": torch.ones(50)}}
    whole, site = node.to_records(request), partial(node._Site, lambda body: body, folder, None)
    site().answer(whole)
    damage.flip(folder / "answer.safetensors", 0.9)
    answer = node.from_records(site().answer(whole))
    return torch.equal(answer["body"]["model"], torch.ones(50)), "made again, the same bits"


@attack("a deleted `metrics.jsonl`", "resumed with exit 0")
def deleted_metrics(folder: Path) -> Outcome:
    with damaged(folder) as (path, _):
        (path / "metrics.jsonl").unlink()
        answer = command("resume", path)
        return answer.code == 2 and "metrics.jsonl is" in answer.err, f"exit {answer.code}: the file is named"


@attack("a flipped byte in a finished run's model", "not noticed")
def flipped_model(folder: Path) -> Outcome:
    whole = damage.run("fedavg", folder / "run", rounds=1)
    damage.flip(whole / "model.safetensors", 0.9)
    answer = command("verify", whole)
    return (
        answer.code == 1 and "model.safetensors" in answer.out,
        f"`fedstill verify` ends with {answer.code}, names it",
    )


# --- the table --------------------------------------------------------------------------------------------------------


def row(name: str, before: str, now: str, held: str) -> str:
    return f"| {name} | {before or '–'} | {now} | {held} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the name of one attack")
    given = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    print(row("attack", "once", "now", "held"), "|---|---|---|---|", sep="\n", flush=True)
    for each in ATTACKS:
        if given.only and each.name != given.only:
            continue
        quiet = io.StringIO()
        with tempfile.TemporaryDirectory(prefix="attack-") as folder, patch.object(retries, "_FIRST", 0.01):
            try:
                with redirect_stdout(quiet), redirect_stderr(quiet):
                    held, now = each.carry_out(Path(folder))
            except Exception as error:  # noqa: BLE001 - a row of its own, and the other attacks go on
                held, now = False, f"{type(error).__name__}: {reports.cleaned(str(error))}"
        failed += not held
        print(row(each.name, each.before, now, "yes" if held else "**no**"), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    logging.lastResort = None
    sys.exit(main())
