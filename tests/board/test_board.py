"""The board over HTTP: what it says of runs, and whom it answers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

from fedstill.analysis.runs import read_run
from fedstill.board import runs as board_runs
from fedstill.board.app import STATIC, make_app
from fedstill.core.errors import FedstillError
from fedstill.report.runs import RunData
from fedstill.running.directory import RunDirectory
from support.commandline import fedstill
from support.written import round_line, write_run


def client(root: Path) -> TestClient:
    return TestClient(make_app(root, ["board.example"]), base_url="http://127.0.0.1:8765")


def listed(root: Path) -> dict[str, dict[str, Any]]:
    return {run["name"]: run for run in client(root).get("/api/runs").json()["runs"]}


def test_runs_are_running_finished_or_interrupted(tmp_path: Path) -> None:
    write_run(tmp_path / "compare" / "done", [0.2, 0.4])
    write_run(tmp_path / "cut", [0.3], rounds=5)
    held = RunDirectory.open(write_run(tmp_path / "live", [0.1, 0.2, None], rounds=9))
    try:
        found = listed(tmp_path)
    finally:
        held.release()
    assert {name: run["state"] for name, run in found.items()} == {
        "compare/done": "finished",
        "cut": "interrupted",
        "live": "running",
    }
    assert (found["live"]["round"], found["live"]["rounds"], found["live"]["accuracy"]) == (3, 9, 0.2)
    assert (found["live"]["bytes"], found["live"]["seconds"]) == (3 * 1500, 3 * 1.5)
    assert listed(tmp_path)["live"]["state"] == "interrupted"


def test_looking_at_a_run_does_not_keep_it_from_going_on(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", [0.1], rounds=5)
    first = RunDirectory.open(path)
    with pytest.raises(FedstillError, match="in use by another process"):
        RunDirectory.open(path)
    first.release()
    listed(tmp_path)
    RunDirectory.open(path).release()


def test_compared_runs_have_the_curves_and_tables_of_the_report(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.2, 0.4])
    write_run(tmp_path / "b", [0.3, 0.6], method="fedprox", hyper={"mu": 0.1})
    write_run(tmp_path / "c", [0.5], method="fedgkd", rounds=4)
    found = client(tmp_path).get("/api/compare", params={"run": ["a", "b", "c"]}).json()
    lines = {group["name"].partition(",")[0]: group["lines"]["accuracy"] for group in found["curves"]["groups"]}
    assert lines["fedprox"] == {"x": [1, 2], "y": [0.3, 0.6]}
    assert lines["fedgkd"] == {"x": [1], "y": [0.5]}
    results, differences = found["tables"]
    assert [row[0]["text"] for row in results["rows"]] == ["fedavg", "fedprox"], "those that are finished"
    assert differences["rows"][0][3]["text"] == "+20.00 (1/1)"


def test_a_run_in_detail_lists_its_clients_the_worst_served_first(tmp_path: Path) -> None:
    write_run(tmp_path / "r", [0.5], served={"ward 1": (10, 0.9), "ward 2": (20, 0.1)})
    found = client(tmp_path).get("/api/run", params={"run": "r"}).json()
    assert [(each["name"], each["accuracy"]) for each in found["clients"]] == [("ward 2", 0.1), ("ward 1", 0.9)]
    assert found["log"] == "2026-01-01 INFO begun"
    assert 'method = "fedavg"' in found["config"]


def test_the_partition_is_that_of_the_runs_settings(tmp_path: Path) -> None:
    write_run(tmp_path / "r", [0.5], partition="iid", fraction=0.1, clients=4)
    found = client(tmp_path).get("/api/partition", params={"run": "r"}).json()["partition"]
    assert (len(found["clients"]), found["all"], len(found["classes"])) == (4, 4, 10)
    assert "Trouser" in found["classes"]
    assert all(len(row) == 10 for row in found["counts"])


def test_code_that_a_run_names_is_not_run_and_data_are_not_fetched(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef data(): pass\n")
    write_run(tmp_path / "own", [0.5], data=f"{code}:data")
    write_run(tmp_path / "far", [0.5], data="cifar10", data_dir=str(tmp_path))
    answers = {n: client(tmp_path).get("/api/partition", params={"run": n}).json() for n in ("own", "far")}
    assert "does not run" in answers["own"]["problem"]
    assert "problem" in answers["far"]
    assert not (tmp_path / "ran").exists()


def test_a_torn_last_line_is_left_out_until_it_is_whole(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", [0.1, 0.2], rounds=5)
    line = round_line(3, 0.3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(line[:20])
        file.flush()
        assert listed(tmp_path)["r"]["round"] == 2
        file.write(line[20:])
    assert listed(tmp_path)["r"]["round"] == 3


def test_a_run_that_cannot_be_read_is_named_with_the_reason_beside_the_others(tmp_path: Path) -> None:
    write_run(tmp_path / "good", [0.5])
    (write_run(tmp_path / "bad", [0.5]) / "config.toml").write_text("= nonsense")
    write_run(tmp_path / "odd", [0.5], seed="none")
    (write_run(tmp_path / "numbers", [0.5]) / "metrics.jsonl").write_text(
        '{"round": 1, "accuracy": NaN, "fm": "x", "bytes_down": []}\n'
    )
    found = listed(tmp_path)
    assert found["good"]["state"] == "finished"
    assert "is not TOML" in found["bad"]["problem"]
    assert found["odd"]["state"] == "unreadable"
    assert found["numbers"]["accuracy"] is None
    assert client(tmp_path).get("/api/compare", params={"run": list(found)}).status_code == 200


def test_names_outside_the_folder_and_links_lead_nowhere(tmp_path: Path) -> None:
    secret = write_run(tmp_path / "outside", [0.5])
    root = tmp_path / "runs"
    run = write_run(root / "r", [0.5])
    (root / "link").symlink_to(secret)
    (tmp_path / "secret.txt").write_text("a secret")
    (run / "log.txt").unlink()
    (run / "log.txt").symlink_to(tmp_path / "secret.txt")
    linked = write_run(root / "linked", [0.5])
    (linked / "config.toml").unlink()
    (linked / "config.toml").symlink_to(secret / "config.toml")
    call = client(root)
    assert set(listed(root)) == {"r", "linked"}
    assert "not a plain file" in listed(root)["linked"]["problem"]
    assert call.get("/api/run", params={"run": "r"}).json()["log"] == ""
    for name in ("../outside", str(secret), "r/../../outside", "link", ".", "", "r\0"):
        for path in ("/api/run", "/api/compare", "/api/partition"):
            assert call.get(path, params={"run": name}).status_code == 404, name
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/board.html", "/static//etc/passwd", "/runs/r"):
        assert call.get(path).status_code == 404, path
    assert "secret" not in json.dumps([call.get("/api/run", params={"run": n}).json() for n in ("r", "linked")])


def test_only_its_own_names_are_answered(tmp_path: Path) -> None:
    call = client(tmp_path)
    own = ("localhost:8765", "127.0.0.1", "[::1]:8765", "192.168.0.7:8765", "board.example", "BOARD.example:80")
    for host in own:
        assert call.get("/api/runs", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", "localhost.evil.example:8765", "127.0.0.1.evil.example", "", "testserver"):
        for path in ("/", "/api/runs", "/static/chart.js"):
            answer = call.get(path, headers={"Host": host})
            assert (answer.status_code, "runs" in answer.text and "root" in answer.text) == (421, False), host


def test_it_only_reads_and_tells_browsers_to_run_nothing_else(tmp_path: Path) -> None:
    write_run(tmp_path / "r", [0.5])
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    call = client(tmp_path)
    for path in ("/", "/api/runs", "/api/run?run=r", "/api/compare?run=r", *(f"/static/{name}" for name in STATIC)):
        answer = call.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
        for method in ("POST", "PUT", "DELETE"):
            assert call.request(method, path).status_code == 405
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    assert call.get("/api/run").status_code == call.get("/api/compare", params={"run": ["r"] * 101}).status_code == 400


def test_runs_are_read_again_only_when_they_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(20):
        write_run(tmp_path / f"r{i}", [0.5], seed=i)
    read: list[Path] = []

    def noted(path: Path) -> RunData:
        read.append(path)
        return read_run(path)

    monkeypatch.setattr(board_runs, "read_run", noted)
    found = board_runs.Runs(tmp_path)
    assert len(found.entries()) == len(read) == 20
    found.entries()
    assert len(read) == 20
    with (tmp_path / "r7" / "metrics.jsonl").open("a") as file:
        file.write(round_line(2, 0.6))
    assert len(found.entries()["r7"].run.records) == 2  # type: ignore[union-attr]
    assert read[20:] == [tmp_path / "r7"]


def test_the_end_of_a_long_log_is_shown_from_a_whole_line_on(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", [0.5])
    (path / "log.txt").write_bytes(b"\n".join(b"line %06d \xff" % i for i in range(50_000)))
    lines = board_runs.log_tail(path).splitlines()
    assert lines == [f"line {i:06d} \N{REPLACEMENT CHARACTER}" for i in range(50_000 - board_runs.LOG_LINES, 50_000)]


def test_the_command_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is not a folder" in fedstill("board", tmp_path / "none").err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "fedstill.board.server", raising=False)
    answer = fedstill("board", tmp_path)
    assert (answer.code, "pip install 'fedstill[board]'" in answer.err) == (2, True)


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = fedstill("board", tmp_path, "--port", taken.getsockname()[1])
    assert answer.code == 2
    assert "choose another port" in answer.err


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_a_run_that_may_not_be_read_is_unreadable(tmp_path: Path) -> None:
    (write_run(tmp_path / "r", [0.5]) / "config.toml").chmod(0)
    assert listed(tmp_path)["r"]["state"] == "unreadable"
