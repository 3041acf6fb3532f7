"""The run directory: whole at any moment, and nobody else's files touched."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstill
from fedstill.building.config import Config, parse_assignments, resolve
from fedstill.core import tree
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.files import write_atomic
from fedstill.metrics.records import EpisodeModel, RoundRecord, Scores, Summary
from fedstill.running import api
from fedstill.running import directory as rundir
from fedstill.running.directory import RunDirectory, to_json
from fedstill.running.logfile import logging_to
from support.runs import SMALL

CONFIG = resolve({"method": "fedprox", "rounds": 3, "mu": 0.5})


def files(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}


def state(round_: int) -> dict[str, Any]:
    return {"model": torch.full((4,), float(round_)), "state": {"round": round_}}


def after_rounds(path: Path, rounds: int, every: int = 1) -> RunDirectory:
    """A directory in which so many rounds were done by one client that keeps state."""
    run = RunDirectory.create(path, CONFIG.model_copy(update={"checkpoint_every": every}))
    for round_ in range(1, rounds + 1):
        run.client_store.write(5, round_, {"written": round_})
        run.append({"round": round_, "accuracy": round_ / 10})
        if round_ % every == 0:
            run.checkpoint(round_, state(round_), active=[5])
    run.settle()
    return run


# --- creating and opening ---


def test_a_new_directory_holds_its_configuration(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "deep" / "run", CONFIG)
    assert run.config() == CONFIG
    assert files(run.path) == {"config.toml", "checkpoints/lock", "checkpoints/index"}
    assert run.records() == []
    assert run.restore() is None


def test_a_folder_without_a_configuration_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"not a run directory: it has no config\.toml"):
        RunDirectory.open(tmp_path)


def test_only_one_holds_a_directory_at_a_time(tmp_path: Path) -> None:
    first = RunDirectory.create(tmp_path / "run", CONFIG)
    with pytest.raises(FedstillError, match="in use by another process"):
        RunDirectory.open(first.path)
    with pytest.raises(FedstillError, match="in use by another process"):
        RunDirectory.create(first.path, CONFIG, force=True)
    first.write_config(CONFIG.model_copy(update={"rounds": 9}))
    with pytest.raises(FedstillError, match="in use"):
        RunDirectory.open(first.path)
    assert RunDirectory.open(first.path, lock=False).config().rounds == 9, "who only looks needs no lock"
    first.release()
    RunDirectory.open(first.path).release()


def test_a_start_that_failed_leaves_the_place_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: RunDirectory, config: Config) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "write_config", full)
        with pytest.raises(OSError, match="No space"):
            RunDirectory.create(tmp_path / "run", CONFIG)
    RunDirectory.create(tmp_path / "run", CONFIG).release()


def test_a_run_that_cannot_begin_gives_its_directory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(api, "save_inputs", full)
    with pytest.raises(OSError, match="no space"):
        fedstill.run(**SMALL | {"rounds": 1}, out=tmp_path / "run")
    RunDirectory.open(tmp_path / "run").release()


def test_a_lock_alone_is_no_run_that_could_be_lost(tmp_path: Path) -> None:
    lock = tmp_path / "run" / "checkpoints" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    RunDirectory.create(tmp_path / "run", CONFIG).release()


# --- records ---


def test_records_come_back_as_they_were_appended(tmp_path: Path) -> None:
    run = after_rounds(tmp_path / "run", 2)
    assert run.records() == [{"round": 1, "accuracy": 0.1}, {"round": 2, "accuracy": 0.2}]


@pytest.mark.parametrize("cut", ['{"round": 3, "accur', "\0\0\0\0", "\udcff"])
def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path, cut: str) -> None:
    run = after_rounds(tmp_path / "run", 2)
    with (run.path / "metrics.jsonl").open("a", errors="surrogateescape") as file:
        file.write(cut)
    assert [r["round"] for r in run.records()] == [1, 2]
    run.restore()
    run.append({"round": 3})
    assert [r["round"] for r in run.records()] == [1, 2, 3]


def test_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    given_ = {"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}, "e": None, "f": "NaN"}
    assert json.loads(to_json(given_)) == {"a": None, "b": [None, 1.5], "c": {"d": None}, "e": None, "f": "NaN"}


# --- checkpoints ---


def test_the_newest_checkpoint_is_restored(tmp_path: Path) -> None:
    restored = after_rounds(tmp_path / "run", 3).restore()
    assert restored is not None
    assert restored[0] == 3
    assert torch.equal(restored[1]["model"], torch.full((4,), 3.0))


def test_two_checkpoints_are_kept_and_the_client_state_they_need(tmp_path: Path) -> None:
    run = after_rounds(tmp_path / "run", 5)
    assert files(run.checkpoints) == {
        "lock",
        "index",
        "round-000004.safetensors",
        "round-000005.safetensors",
        "clients/0/5.4.safetensors",
        "clients/0/5.5.safetensors",
    }


def test_rounds_after_the_checkpoint_leave_no_trace(tmp_path: Path) -> None:
    run = after_rounds(tmp_path / "run", 5, every=2)
    restored = run.restore()
    assert restored is not None
    assert restored[0] == 4
    assert [r["round"] for r in run.records()] == [1, 2, 3, 4]
    assert run.client_store.read(5, before=10**9) == {"written": 4}


def test_a_damaged_checkpoint_gives_way_to_the_older_one(tmp_path: Path) -> None:
    run = after_rounds(tmp_path / "run", 3)
    newest = run.checkpoints / "round-000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    restored = run.restore()
    assert restored is not None
    assert restored[0] == 2
    assert restored[1]["state"] == {"round": 2}
    assert [r["round"] for r in run.records()] == [1, 2]
    assert run.client_store.read(5, before=10**9) == {"written": 2}
    assert newest.with_suffix(".damaged").exists(), "set aside, not deleted"


def test_if_no_checkpoint_can_be_read_nothing_is_touched(tmp_path: Path) -> None:
    run = after_rounds(tmp_path / "run", 3)
    for file in run.checkpoints.glob("round-*"):
        file.write_bytes(b"")
    before = files(run.path)
    with pytest.raises(FedstillError, match=r"no checkpoint can be read: .*round-000003\.safetensors is damaged"):
        run.restore()
    assert files(run.path) == before
    assert len(run.records()) == 3


def test_a_run_that_lost_its_checkpoints_does_not_start_anew_over_its_results(tmp_path: Path) -> None:
    run = after_rounds(tmp_path / "run", 3)
    for file in run.checkpoints.glob("round-*"):
        file.unlink()
    with pytest.raises(FedstillError, match="holds no checkpoint of the 3 rounds done"):
        run.restore()
    assert len(run.records()) == 3


@pytest.mark.parametrize(("rounds", "every"), [(1, 1), (2, 5)])
def test_a_crash_before_the_first_checkpoint_starts_anew(tmp_path: Path, rounds: int, every: int) -> None:
    run = after_rounds(tmp_path / "run", rounds, every)
    (run.checkpoints / "round-000001.safetensors").unlink(missing_ok=True)
    assert run.restore() is None
    assert run.records() == []
    assert run.client_store.read(5, before=10**9) is None


def test_a_first_step_of_many_rounds_without_its_checkpoint_starts_anew(tmp_path: Path) -> None:
    """With regions elsewhere, one step is an episode."""
    run = RunDirectory.create(tmp_path / "run", CONFIG)
    run.append({"round": 5})
    assert run.restore() is None


def test_a_run_broken_off_is_restored_only_after_its_last_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, disk = after_rounds(tmp_path / "run", 1), threading.Event()

    def slow(path: Path, data: bytes) -> None:
        assert disk.wait(30)
        write_atomic(path, data)

    monkeypatch.setattr(rundir, "write_atomic", slow)
    run.append({"round": 2})
    run.checkpoint(2, state(2), active=[5])
    threading.Timer(0.3, disk.set).start()
    restored = run.restore()
    assert restored is not None
    assert restored[0] == 2


def test_leftovers_of_writes_cut_off_are_removed_and_other_hidden_files_are_not(tmp_path: Path) -> None:
    run = after_rounds(tmp_path / "run", 1)
    (run.path / ".summary.json.0123456789ab.tmp").touch()
    (run.checkpoints / "clients" / "0" / ".5.2.safetensors.0123456789ab.tmp").touch()
    (run.path / ".git").mkdir()
    (run.path / ".git" / "HEAD").write_text("mine")
    (run.path / ".notes").write_text("mine too")
    run.restore()
    assert not list(run.path.rglob("*.tmp"))
    assert {".git/HEAD", ".notes"} <= files(run.path)


# --- checkpoints in the background ---


def test_rounds_go_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, disk = RunDirectory.create(tmp_path / "run", CONFIG), threading.Event()

    def slow(path: Path, data: bytes) -> None:
        assert disk.wait(30)
        write_atomic(path, data)

    monkeypatch.setattr(rundir, "write_atomic", slow)
    model = torch.zeros(4)
    run.checkpoint(1, {"model": model}, active=[])
    assert not list(run.checkpoints.glob("round-*"))
    model += 1  # the next round's
    disk.set()
    run.settle()
    assert torch.equal(
        tree.decode((run.checkpoints / "round-000001.safetensors").read_bytes())["model"], torch.zeros(4)
    )


def test_no_round_is_recorded_before_the_last_checkpoint_is_there(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", CONFIG)
    for round_ in range(1, 6):
        run.append({"round": round_})
        there = {int(p.stem.removeprefix("round-")) for p in run.checkpoints.glob("round-*")}
        assert round_ == 1 or round_ - 1 in there
        run.checkpoint(round_, state(round_), active=[])


def test_a_checkpoint_holds_what_was_there_whatever_becomes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, changed, encode = RunDirectory.create(tmp_path / "run", CONFIG), threading.Event(), tree.encode

    def late(kept: Any) -> bytes:
        assert changed.wait(60)
        return encode(kept)

    monkeypatch.setattr(tree, "encode", late)
    kept: dict[str, Any] = {"sum": torch.zeros(3), "models": [torch.zeros(3)], "rounds": {"last": 1}}
    run.append({"round": 1})
    run.checkpoint(1, kept, active=[])
    kept["sum"] += 1
    kept["models"][0].add_(1)
    kept["models"].append(torch.ones(3))
    kept["rounds"]["last"] = 2
    changed.set()
    restored = run.restore()
    assert restored is not None
    found = restored[1]
    assert [float(t.sum()) for t in (found["sum"], *found["models"])] == [0.0, 0.0]
    assert found["rounds"] == {"last": 1}


def test_a_checkpoint_that_cannot_be_written_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = after_rounds(tmp_path / "run", 1)

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(rundir, "write_atomic", full)
    run.checkpoint(2, state(2), active=[5])
    with pytest.raises(OSError, match=r"No space left on device.*round-000002"):
        run.append({"round": 3})
    monkeypatch.undo()
    restored = run.restore()
    assert restored is not None
    assert restored[0] == 1


def test_what_a_checkpoint_rests_on_is_on_disk_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, reached = RunDirectory.create(tmp_path / "run", CONFIG), list[str]()
    fsync = os.fsync

    def recorded(opened: int) -> None:
        reached.append(Path(os.readlink(f"/proc/self/fd/{opened}")).name)
        fsync(opened)

    monkeypatch.setattr(os, "fsync", recorded)
    run.client_store.write(5, 1, {"written": 1})
    run.server_store.write(6, 1, {"written": 1})
    run.append({"round": 1})
    assert reached == []  # nobody waited for the disk
    run.checkpoint(1, state(1), active=[5, 6])
    run.settle()
    checkpoint = next(i for i, name in enumerate(reached) if name.startswith(".round-000001"))
    assert {"5.1.safetensors", "6.1.safetensors", "metrics.jsonl", "0", "clients", "server"} <= set(
        reached[:checkpoint]
    )


# --- the log ---


def log_and_fail(path: Path) -> None:
    with logging_to(path):
        logging.getLogger("fedstill.somewhere").info("so far so good")
        _ = 1 // 0


def test_the_log_holds_the_traceback_of_what_stopped_the_run(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        log_and_fail(tmp_path / "log.txt")
    text = (tmp_path / "log.txt").read_text()
    assert "INFO so far so good" in text
    assert "ERROR stopped: integer division" in text
    assert "Traceback" in text


def test_an_interruption_is_named_in_the_log(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), logging_to(tmp_path / "log.txt"):
        raise KeyboardInterrupt
    assert "stopped: KeyboardInterrupt" in (tmp_path / "log.txt").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_log_on_a_full_disk_does_not_hide_the_runs_own_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        log_and_fail(Path("/dev/full"))
    assert capsys.readouterr().err == ""


# --- the configuration ---

some_settings = st.fixed_dictionaries(
    {},
    optional={
        "rounds": st.integers(1, 10**9),
        "seed": st.integers(0, 2**63 - 1),
        "alpha": st.floats(0, 1e6, exclude_min=True),
        "lr": st.floats(1e-300, 1e300),
        "data": st.text(st.characters(codec="utf-8"), min_size=1),
        "data_dir": st.text(st.characters(codec="utf-8")),
        "buffers": st.sampled_from(["average", "local", "drop"]),
        "mu": st.floats(0, 1e6),
        "model_options": st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), st.integers(-9, 9)),
    },
)


@settings(max_examples=60, deadline=None)
@given(some_settings)
def test_a_configuration_written_as_toml_reads_back_the_same(given_: dict[str, Any]) -> None:
    config = resolve({"method": "fedprox"}, given_)
    assert resolve(tomllib.loads(config.toml())) == config


def test_later_layers_win_and_tables_are_merged_key_by_key() -> None:
    config = resolve(
        {"method": "fedprox", "lr": 0.1, "rounds": 5, "model_options": {"norm": "batch"}, "hyper": {"mu": 0.1}},
        {"lr": 0.2, "model_options": {"width": 3}, "mu": 0.9},
    )
    assert (config.lr, config.rounds, config.epochs) == (0.2, 5, 5)
    assert config.model_options == {"norm": "batch", "width": 3}
    assert config.hyper == {"mu": 0.9}


def test_values_of_set_are_read_as_toml_and_else_as_text() -> None:
    words = ["a=1", "b=0.5", "c=true", "d=[1, 2]", "e=crop,flip", 'f="3"', "g=x=y", "model_options.hidden=[5]"]
    assert parse_assignments(words, "fedavg") == {
        "a": 1,
        "b": 0.5,
        "c": True,
        "d": [1, 2],
        "e": "crop,flip",
        "f": "3",
        "g": "x=y",
        "hyper": {},
        "model_options": {"hidden": [5]},
    }


def test_objects_of_the_users_own_are_named_in_the_configuration(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"hyper": {"net": torch.nn.Linear(2, 2), "folder": tmp_path, "nothing": None}})
    assert tomllib.loads(config.toml())["hyper"] == {"net": "<Linear>", "folder": str(tmp_path)}


def test_a_run_of_a_method_of_ones_own_says_that_it_must_be_given_again(tmp_path: Path) -> None:
    class Mine(fedstill.FedAvg):
        pass

    settings_: dict[str, Any] = {"clients": 2, "fraction": 0.02, "model": "mlp", "engine": "inline", "rounds": 1}
    fedstill.run(Mine(), out=tmp_path / "run", **settings_)
    with pytest.raises(SettingError, match="with a method of your own, <Mine>; give it again"):
        fedstill.resume(tmp_path / "run")


# --- what is written is what the types declare ---


def test_every_key_of_a_runs_records_and_summary_is_declared() -> None:
    regions = {"regions": 2, "rounds_per_episode": 1, "pool": 0.2, "rounds": 2, "clients": 6}
    flat, regional = fedstill.run("fedavg+t1", **SMALL), fedstill.run("f2l", **(SMALL | regions))
    episodes = [record["episode"] for record in regional.records if "episode" in record]
    assert flat.records[-1]["also"]
    assert regional.records[-1]["teachers_after"]
    assert len(episodes) == 2
    for result in (flat, regional):
        assert result.summary.keys() <= Summary.__annotations__.keys()
        for record in result.records:
            assert record.keys() <= RoundRecord.__annotations__.keys()
            assert all(scores.keys() <= Scores.__annotations__.keys() for scores in record.get("also", {}).values())
    for episode in episodes:
        assert {"number", "regions", "bytes", "server_seconds", "teachers", "student"} <= episode.keys()
        for model in (*episode["teachers"].values(), episode["student"]):
            assert model.keys() == EpisodeModel.__annotations__.keys()
