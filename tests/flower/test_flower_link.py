"""Server and sites as real processes on loopback, over Flower's SuperLink with TLS and keys."""

from __future__ import annotations

import base64
import json
import math
import os
import signal
import ssl
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("flwr")

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.message_pb2 import Message, ObjectTree, PullObjectRequest, PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.recorddict_pb2 import BytesList
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import sign_message

from fedstill.core.errors import FedstillError, SettingError
from fedstill.flower import keys, private, superlink
from fedstill.flower.link import Failure, FlowerLink
from fedstill.flower.node import serve
from fedstill.flower.superlink import bundles
from support.link import PATIENCE, SITES, CutLine, Trial, ask, everyone, wait

pytestmark = [pytest.mark.slow, pytest.mark.servers]

HELD = 60.0  # seconds for which Flower holds the place of a process that died


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    trial = Trial(tmp_path_factory.mktemp("trial"))
    try:
        for site in SITES:
            trial.start(site)
        yield trial
    finally:
        trial.stop()


@pytest.fixture(scope="module")
def running(trial: Trial) -> Iterator[FlowerLink]:
    with trial.link() as link:
        yield link


@pytest.fixture
def link(running: FlowerLink) -> FlowerLink:
    everyone(running)
    return running


def test_private_keys_are_readable_by_their_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    keys.make(tmp_path, ["berlin"], ["example.org", "::1"])
    for name in ("server.key", "sites/berlin"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    before = (tmp_path / "sites/berlin").read_bytes()
    with pytest.raises(SettingError, match="not overwritten"):
        keys.make(tmp_path, ["lagos"], ["example.org"])
    assert (tmp_path / "sites/berlin").read_bytes() == before
    assert not (tmp_path / "sites/lagos").exists()


def test_names_of_sites_cannot_leave_their_folder(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"\.\./berlin"):
        keys.make(tmp_path, ["../berlin"], ["example.org"])


def test_three_sites_answer_each_its_own_tensor(link: FlowerLink) -> None:
    tensors = {site: torch.full((62_500,), float(i)) for i, site in enumerate(SITES)}
    answers = ask(link, {site: {"tensor": tensors[site], "note": [site, None]} for site in SITES})
    for site, tensor in tensors.items():
        assert torch.equal(answers[site]["tensor"], tensor + 1)
        assert answers[site]["note"] == [site, None]


def test_a_request_asked_again_is_answered_from_the_disk_even_by_a_new_process(trial: Trial, link: FlowerLink) -> None:
    request = {"quito": {"tensor": torch.arange(3.0)}}
    first = ask(link, request, name="round 1")["quito"]
    assert ask(link, request, name="round 1")["quito"]["calls"] == first["calls"]
    assert ask(link, request, name="round 2")["quito"]["calls"] == first["calls"] + 1
    trial.kill("quito")
    (trial.root / "quito/began").unlink()
    trial.start("quito")
    again = ask(link, request, name="round 2")["quito"]
    assert again["calls"] == first["calls"] + 1
    assert torch.equal(again["tensor"], torch.arange(1.0, 4.0))
    assert not (trial.root / "quito/began").exists()


def test_a_site_killed_at_work_and_started_again_answers_the_same_request(trial: Trial, link: FlowerLink) -> None:
    (trial.root / "berlin/began").unlink(missing_ok=True)
    answers = link.send_requests({"berlin": {"sleep": 2, "note": "hello"}}, timeout=HELD - 5)
    wait((trial.root / "berlin/began").exists)
    trial.kill("berlin")
    trial.start("berlin")
    assert list(answers) == [("berlin", {"sleep": 2, "note": "hello", "calls": 1})]


@pytest.mark.parametrize("killed", [False, True], ids=["the line is cut", "the site is killed"])
def test_what_has_arrived_of_an_answer_is_not_sent_again(trial: Trial, link: FlowerLink, killed: bool) -> None:
    size, after = 1_600_000, 800_000
    line = CutLine(trial.port, after, (lambda: trial.kill("lagos")) if killed else None)
    trial.kill("lagos")
    place = trial.root / "lagos/node"
    connected = place.stat().st_mtime_ns
    trial.start("lagos", server=line.address)
    # Else the request may go to the dead process's place, be sent again, and the server not read what is cut.
    wait(lambda: place.stat().st_mtime_ns > connected)
    tensor = torch.rand(size // 4)  # 25 chunks
    answers = link.send_requests({"lagos": {"tensor": tensor}}, timeout=PATIENCE, name=f"cut {killed}")
    wait(line.was_cut.is_set)
    if killed:
        trial.start("lagos", server=line.address)
    ((_, answer),) = answers
    assert isinstance(answer, dict)
    assert torch.equal(answer["tensor"], tensor + 1)
    assert size < line.sent < size + after / 2  # from the start again, it would be size + after
    trial.kill("lagos")
    trial.start("lagos")


def test_an_answer_is_given_up_once_its_process_has_gone_and_what_has_arrived_stays() -> None:
    announced = PullAppMessagesResponse(
        messages_list=[Message()], message_object_trees=[ObjectTree(object_id="a" * 64)]
    )
    client = mock.Mock(spec=["PullMessages", "PullObject"])  # to confirm it would delete it
    client.PullMessages.return_value = announced
    client.PullObject.return_value = PullObjectResponse(object_found=True, object_available=False)
    run = object.__new__(private.FlowerRun)
    run._client, run._node, run._id, run._begun = client, Node(), 1, {}
    looks = iter([False, False, True])
    with pytest.raises(private.UploadAbandonedError):
        run.pull("request", most_bytes=1, seconds=math.inf, abandoned=lambda: next(looks))
    assert next(looks, None) is None


def test_sites_that_hang_or_announce_only_fail_at_the_timeout_and_hold_up_nobody(link: FlowerLink) -> None:
    asked = time.monotonic()
    answers = link.send_requests({"berlin": {"sleep": 1000}, "lagos": {"announce": True}, "quito": {}}, timeout=6)
    assert next(answers) == ("quito", {"calls": mock.ANY})
    failures = dict(answers)
    assert failures.keys() == {"berlin", "lagos"}
    assert all(failure.reason.startswith("no answer within 6 s") for failure in failures.values())
    assert time.monotonic() - asked > 5, "and not before"
    # Once nobody waits for it, berlin gives up, and is there for the next request.
    assert ask(link, {"berlin": {"note": 1}, "lagos": {"note": 1}})["berlin"]["note"] == 1


def test_answers_too_large_malformed_or_failed_are_failures_with_a_reason(link: FlowerLink) -> None:
    requests = {"berlin": {"big": 1_000_000}, "lagos": {"forge": True}, "quito": {"divide": 0}}
    answers = ask(link, requests)
    assert "more than the 2,000,000 bytes allowed" in answers["berlin"].reason
    assert "6 bytes do not hold float32" in answers["lagos"].reason
    assert answers["quito"].reason.startswith("its work failed (code failed, step request, number ")
    complaint = ask(link, {"quito": {"complain": "a patient's name\nhere"}})["quito"].reason
    assert complaint.startswith("its work failed (code failed")
    assert "patient" not in complaint


def test_a_chunk_named_many_times_counts_many_times() -> None:
    def content(kind: str, children: list[str], body: bytes) -> bytes:
        return f"{kind} {','.join(children)} {len(body)}".encode() + b"\x00" + body

    array = content("Array", ["a" * 64], json.dumps({"arraychunk_ids": [0] * 1000}).encode())
    with pytest.raises(ValueError, match="more than the 10,000 allowed"):
        private._check_sizes({"b" * 64: array, "a" * 64: content("ArrayChunk", [], bytes(1000))}, 10_000)


def test_what_is_no_tensor_is_small_before_flower_makes_objects_of_it() -> None:
    def content(kind: str, size: int) -> bytes:
        return f"{kind}  {size}".encode() + b"\x00" + bytes(size)

    private._check_sizes({"a": content("ArrayChunk", 5 << 20), "b": content("ConfigRecord", 1 << 20)}, 10 << 20)
    for kind in ("ConfigRecord", "MetricRecord", "Array", "ArrayRecord", "RecordDict", "Message"):
        with pytest.raises(ValueError, match="1,048,576 bytes beside its tensors"):
            private._check_sizes({"a": content(kind, 2 << 20)}, 10 << 20)


def test_unknown_sites_are_told_apart_before_anything_is_sent(link: FlowerLink) -> None:
    with pytest.raises(SettingError, match="did you mean 'berlin'"):
        link.send_requests({"berlinn": {}}, timeout=1)


def test_a_site_with_the_wrong_authority_or_no_encryption_is_told_so(trial: Trial, link: FlowerLink) -> None:
    def joining(key: str, ca: str | None, directory: str = "new") -> None:
        authority, place = None if ca is None else trial.root / ca, trial.root / directory
        serve(lambda tree: tree, server=trial.server, key=trial.root / key, ca=authority, directory=place)

    with pytest.raises(FedstillError, match="is not the server that"):
        joining("keys/sites/lagos", "others/ca.pem")
    with pytest.raises(FedstillError, match="wants an encrypted connection"):
        joining("keys/sites/lagos", None)
    with pytest.raises(FedstillError, match="not a private key"):
        joining("keys/ca.pem", "keys/ca.pem")
    with pytest.raises(FedstillError, match="is in use"):
        joining("keys/sites/lagos", "keys/ca.pem", "lagos")
    assert link.present() == set(SITES)


def signature(path: Path) -> dict[str, str]:
    """The head of a request that a site signed just now."""
    key = serialization.load_ssh_private_key(path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    pem = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    stamp = now().isoformat()
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: base64.b64encode(pem).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(sign_message(key, stamp.encode("ascii"))).decode(),
        TIMESTAMP_HEADER: stamp,
    }


def test_only_the_fleet_interface_is_open_and_only_to_known_keys(trial: Trial, link: FlowerLink) -> None:
    signed = signature(trial.root / "keys/sites/lagos")
    known = {FLEET_HTTP_PUBLIC_KEY_HEADER: signed[FLEET_HTTP_PUBLIC_KEY_HEADER]}
    context = ssl.create_default_context(cafile=str(trial.root / "keys/ca.pem"))
    with httpx.Client(base_url=f"https://{trial.server}", verify=context) as client:
        for path in ("control/list-nodes", "control/start-run", "runtime/acquire-task", "fleet/register-node"):
            assert client.post(f"/v1/{path}", headers=known).status_code == 404
        assert client.get("/docs").status_code == 404
        assert client.post("/v1/fleet/pull-messages", content=b"").status_code == 401
        assert client.post("/v1/fleet/pull-messages", headers=known, content=b"").status_code == 401
        assert client.post("/v1/fleet/push-object", headers=known, content=bytes(11 << 20)).status_code == 401
        assert client.post("/v1/fleet/push-object", headers=signed, content=bytes(11 << 20)).status_code == 413
        assert client.post("/v1/fleet/push-object", headers=known, content=iter([b"a"])).status_code == 411
        for path in bundles.PATHS:
            other = BytesList(vals=[PullObjectRequest(node=Node(node_id=1), object_id="a").SerializeToString()])
            content = other.SerializeToString()
            assert client.post(path, content=content).status_code == 401
            assert client.post(path, headers=known, content=content).status_code == 401
            assert client.post(path, headers=signed, content=content).status_code == 400, "another site's number"
            assert client.post(path, headers=signed, content=bytes(4 << 20)).status_code == 413
        assert client.post(superlink.PULL_PATH, headers=signed, content=bytes(1 << 17)).status_code == 413


def test_a_port_in_use_is_told_at_once(trial: Trial, link: FlowerLink) -> None:
    with pytest.raises(FedstillError, match="cannot listen"), trial.link():
        pass


def test_the_superlink_killed_comes_back_and_questions_are_answered(link: FlowerLink, trial: Trial) -> None:
    (trial.root / "lagos/began").unlink(missing_ok=True)
    during = link.send_requests({"lagos": {"sleep": 1, "note": "during"}}, timeout=PATIENCE)
    wait((trial.root / "lagos/began").exists)
    assert link._process is not None
    os.kill(link._process.pid, signal.SIGKILL)
    assert list(during) == [("lagos", {"sleep": 1, "note": "during", "calls": mock.ANY})]
    after = ask(link, {site: {"note": "after"} for site in SITES})
    assert [after[site]["note"] for site in SITES] == ["after"] * 3


def test_without_encryption_and_database_too_a_killed_superlink_comes_back(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    try:
        trial.start("lagos", ca="-")
        with trial.link(certificates=None, database=False) as link:
            everyone(link, 1)
            assert ask(link, {"lagos": {}}) == {"lagos": {"calls": 1}}
            assert link._process is not None
            os.kill(link._process.pid, signal.SIGKILL)
            assert ask(link, {"lagos": {}}) == {"lagos": {"calls": 2}}
            trial.processes["lagos"].terminate()
            assert trial.processes["lagos"].wait(PATIENCE) == 0
            wait(lambda: not link.present())  # it signed off
            assert ask(link, {"lagos": {}}, timeout=1) == {"lagos": Failure("not connected")}
            process = link._process
        assert process.poll() is not None
    finally:
        trial.stop()
