"""One hostile or broken site among many, and strangers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import socket
import ssl
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import psutil
import pytest
import robustness_table
import test_deployment as deployment
import test_flower_keys as certificates
import test_flower_limits as limits
import test_flower_link as wires
import test_hostile_sites as hostile
import test_site_leaks as leaks
from attack import Outcome, attack
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

import fedstill
from fedstill.core.errors import DataError, FedstillError, SettingError
from fedstill.flower import keys, node
from fedstill.flower.link import Certificates, FlowerLink
from fedstill.flower.records import MOST_TEXT, from_records
from fedstill.flower.superlink import PUSH_PATH
from fedstill.running.rollback import rollback
from support import link as link_support
from support.sites import Wire, alone, served, weights


@attack("all answers diverge (`lr` = 1000)", "tried for ever, silently")
def divergence(folder: Path) -> Outcome:
    reported = hostile.Reports()
    try:
        served(Wire(folder), folder / "run", lr=1000.0, round_retries=3, callbacks=[reported])
    except FedstillError as error:
        spoilt = list((folder / "run/checkpoints").glob("round-*"))
        safe = "failed 4 times and is given up" in str(error) and not spoilt
        return safe, f"given up after 4 attempts ({len(reported.lines)} on the console), no checkpoint of it"
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


def refused(text: str, *tensors: str) -> Outcome:
    """Whether an answer with this text and tensors of 1 MB is refused, and how many MB it took until then."""
    array = Array(np.zeros(250_000, np.float32))
    records = RecordDict({"tensors": ArrayRecord(dict.fromkeys(tensors, array)), "tree": ConfigRecord({"json": text})})
    tracemalloc.start()
    try:
        with contextlib.suppress(DataError):
            from_records(records, most_bytes=100_000_000, most_text=MOST_TEXT)
            return False, "taken"
        peak = tracemalloc.get_traced_memory()[1] / 1e6
        return peak < 20, f"refused, with {peak:.1f} MB"
    finally:
        tracemalloc.stop()


@attack("an answer of 1 MB that names one tensor 2,000 times", "took all of the server's memory, and ended the run")
def named_often(folder: Path) -> Outcome:
    return refused(json.dumps({str(i): {"$tensor": "t"} for i in range(2000)}), "t")


@attack("an answer of 12 MB of empty values", "530 MB more")
def empty_values(folder: Path) -> Outcome:
    return refused("[" + ",".join(["{}"] * 4_000_000) + "]")


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
    safe = same and 0 <= found["local_accuracy"] <= 1 and found["train_loss"] < 10
    return safe, "left out and logged; its model counts"


def against_rules(rules: tuple[str, ...], lie: int) -> Outcome:
    """Accuracies without and with one client of eight that lies; safe if that costs less than 10 points."""
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
    safe = set(wire.waited) == {7.0} and left == [["south"]] * 2
    return safe, "`--timeout` 600, `--wait-after` 7: left out 7 s after the last answer"


@attack("a site that answers as late as it may", "held rounds for 29 s, 292 s, then all of `--timeout`")
def late_site(folder: Path) -> Outcome:
    with pytest.MonkeyPatch.context() as monkeypatch:
        held = hostile.held_by_a_late_site(monkeypatch, rounds=6)
    return max(held) < 33, f"six rounds of 2 s: {min(held):.0f} to {max(held):.0f} s each"


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
            open_ones = sum(connection.status == "ESTABLISHED" for connection in connections)
        finally:
            for connection in idle:
                connection.close()
    return answered and open_ones < 100, f"1,500 opened, {open_ones} held; a site gets in beside them"


@attack("2 MB of requests for objects, a million of them empty", "")
def many_requests(folder: Path) -> Outcome:
    with trial(folder) as (made, link_of), link_of(database=False) as link:
        made.start("lagos")
        link_support.everyone(link, 1)
        context = ssl.create_default_context(cafile=str(made.root / "keys/ca.pem"))
        before = limits.memory(link._process)
        with httpx.Client(base_url=f"https://{made.server}", verify=context) as client:
            statuses = {
                client.post(
                    PUSH_PATH,
                    headers=wires.signature(made.root / "keys/sites/berlin"),
                    content=b"\n\0" * 1_000_000,
                ).status_code
                for _ in range(8)
            }
        grown = max(0.0, (limits.memory(link._process) - before) / limits.MB)
        answered = link_support.ask(link, {"lagos": {"note": 1}})["lagos"]["note"] == 1
    return answered and statuses == {400} and grown < 100, f"refused; 8 of them: {grown:.0f} MB more"
