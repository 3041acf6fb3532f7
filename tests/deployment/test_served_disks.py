"""Disks of servers and sites that lie: no served run goes on to another model, and `fedstill verify` names them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstill.building.config import resolve
from fedstill.core.errors import DataError, FedstillError
from fedstill.core.files import read_sealed_json
from fedstill.core.reports import code_of, report, step_of
from fedstill.core.tree import Tree
from fedstill.deployment.server import serve
from fedstill.deployment.site_engine import Terms
from fedstill.running import retries
from fedstill.running.api import resume
from fedstill.running.rollback import rollback
from support.commandline import fedstill
from support.sites import NAMES, SETTINGS, Wire, served, weights


class Reporting(Wire):
    """Sites that report their errors, as over a network."""

    def answer(self, name: str, request: Tree) -> Any:
        try:
            return super().answer(name, request)
        except FedstillError as error:
            return {"error": report(code_of(error), step_of(error), "4f2a")}


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server and its sites after two rounds of SCAFFOLD, where both keep a state."""
    folder = tmp_path_factory.mktemp("half")
    served(Wire(folder), folder / "run", "scaffold", rounds=2)
    return folder


@pytest.fixture(scope="module")
def whole(half: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model after four rounds."""
    folder = Path(shutil.copytree(half, tmp_path_factory.mktemp("whole") / "copy"))
    return go_on(folder)


@pytest.fixture
def folder(half: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half, tmp_path / "copy"))


def go_on(folder: Path, recount: tuple[str, ...] = (), **settings: Any) -> bytes:
    config = resolve(SETTINGS | {"method": "scaffold", "rounds": 4} | settings)
    terms = Terms(timeout=5, recount=recount)
    serve(config, NAMES, Reporting(folder), folder / "run", terms=terms, pause=lambda missing: False)
    return weights(folder / "run")


def lose_run(folder: Path) -> None:
    (folder / "run/run.json").unlink()


def lose_counts(folder: Path) -> None:
    (folder / "run/counts.json").unlink()


def change(folder: Path, name: str, **fields: Any) -> None:
    """Change a sealed file, and take its digest away."""
    path = folder / "run" / name
    value = json.loads(path.read_text()) | fields
    value.pop("sha256")
    path.write_text(json.dumps(value))


def change_counts(folder: Path) -> None:
    change(folder, "counts.json", north=[[1000], [36]])


def change_run(folder: Path) -> None:
    change(folder, "run.json", number="0" * 16)


def lose_a_line(folder: Path) -> None:
    path = folder / "run/received.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]))


def lose_last_lines(folder: Path) -> None:
    path = folder / "run/received.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))


def lose_received(folder: Path) -> None:
    (folder / "run/received.jsonl").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "named"),
    [(lose_run, "run.json"), (lose_counts, "counts.json"), (change_counts, "counts.json"), (change_run, "run.json")],
)
def test_a_server_that_lost_what_it_knows_of_its_sites_does_not_go_on(
    folder: Path, harm: Callable[[Path], None], named: str
) -> None:
    harm(folder)
    with pytest.raises((FedstillError, DataError), match=named) as error:
        go_on(folder)
    assert "put it back" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lose_run, "run.json"),
        (lose_counts, "counts.json"),
        (change_counts, "counts.json"),
        (change_run, "run.json"),
        (lose_a_line, "received.jsonl"),
        (lose_last_lines, "received.jsonl"),
        (lose_received, "received.jsonl"),
    ],
)
def test_verify_names_what_a_server_lost(folder: Path, harm: Callable[[Path], None], named: str) -> None:
    assert fedstill("verify", folder / "run").code == 0
    harm(folder)
    answer = fedstill("verify", folder / "run")
    assert answer.code == 1
    assert named in answer.out


def test_a_served_run_without_its_number_is_not_resumed_on_the_servers_own_data(folder: Path) -> None:
    for name in ("run.json", "counts.json", "received.jsonl"):
        (folder / "run" / name).unlink()
        with pytest.raises(FedstillError, match=r"'fedstill serve'|run\.json is missing"):
            resume(folder / "run", rounds=3)


@pytest.mark.slow
def test_a_run_that_lost_its_number_can_begin_again(folder: Path, tmp_path: Path, whole: bytes) -> None:
    lose_run(folder)
    rollback(folder / "run", 0)
    assert go_on(folder) == whole
    assert len(read_sealed_json(folder / "run/run.json")["number"]) == 16


@pytest.mark.slow
def test_lost_counts_can_be_reported_anew(folder: Path, whole: bytes) -> None:
    lose_counts(folder)
    assert go_on(folder, recount=NAMES) == whole


def lose_states(folder: Path, site: str = "north", rounds: str = "*") -> None:
    for path in (folder / site / "state").rglob(f"*.{rounds}.safetensors"):
        path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("rounds", ["*", "2"])
def test_a_site_that_lost_its_state_is_left_out_and_says_so(folder: Path, whole: bytes, rounds: str) -> None:
    lose_states(folder, rounds=rounds)
    without = shutil.copytree(folder, folder.with_name("without"))
    assert go_on(folder) != whole
    log = (folder / "run/log.txt").read_text()
    assert "code state-lost, step train" in log
    last = json.loads((folder / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["left_out"] == ["north"]
    assert go_on(without, recount=("north",)) != weights(folder / "run"), "it begins anew if the server says so"
    last = json.loads((without / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert "left_out" not in last


@pytest.mark.slow
def test_where_every_site_is_needed_a_lost_state_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST", 0.01)
    lose_states(folder)
    with pytest.raises(FedstillError, match="north: what it kept of its earlier rounds is missing there"):
        go_on(folder, min_clients=3, round_retries=1)


@pytest.mark.slow
def test_a_site_of_a_method_without_states_may_lose_its_folder(tmp_path: Path) -> None:
    served(Wire(tmp_path), tmp_path / "run", rounds=1)
    shutil.rmtree(tmp_path / "north", ignore_errors=True)
    result = served(Wire(tmp_path), tmp_path / "run", rounds=2)
    assert "left_out" not in result.records[-1]


def test_a_sites_folder_is_verified(folder: Path) -> None:
    site = Wire(folder).sites["north"]
    for answer in ({"body": {"samples": 1}}, {"body": {"samples": 2}}, {"body": {"samples": 3}}):
        site.record({}, answer)
    north = folder / "north"
    found = fedstill("verify", north)
    assert (found.code, "1 of 1 runs and sites are sound" in found.out) == (0, True), found.out
    log = north / "audit.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([lines[0], lines[2]]))
    found = fedstill("verify", north)
    assert found.code == 1
    assert "line 2" in found.out
    log.write_text("".join(lines))
    state = next((north / "state").rglob("*.safetensors"))
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    found = fedstill("verify", north)
    assert found.code == 1
    assert state.name in found.out
