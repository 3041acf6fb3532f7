"""Trackers: what they are given, against the real libraries, and that none of them ever ends a run."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import fedstill
from fedstill.cli.main import app
from fedstill.running.trackers import _IMPATIENT, Tracker, placed
from support.commandline import fedstill as type_in
from support.runs import SMALL, weights

TINY: dict[str, Any] = SMALL | {"model": "mlp", "model_options": {"hidden": [8]}, "rounds": 3}


class Notes(Tracker):
    """A tracker whose library is always there."""

    needs = ("json", "notes")

    def __init__(self, fails: str = "", folder: Path | None = None) -> None:
        super().__init__(folder)
        self.fails, self.heard = fails, list[Any]()

    def note(self, event: str, what: Any) -> None:
        self.heard.append((event, what))
        if event == self.fails:
            raise ConnectionError("the tracker's server is gone")

    def begin(self, run: fedstill.RunView, settings: Mapping[str, Any]) -> None:
        self.id = self.id or "run 7"
        self.note("begin", (self.experiment(run), self.name(run), self.id, settings))

    def write(self, run: fedstill.RunView, round_: int, numbers: Mapping[str, float]) -> None:
        self.note("write", (round_, numbers))

    def end(self, run: fedstill.RunView, artefacts: Sequence[Path], *, failed: bool) -> None:
        self.note("end", ([path.name for path in artefacts], failed))


@pytest.mark.parametrize("fails", ["begin", "write", "end"])
def test_a_tracker_that_fails_changes_nothing(fails: str, caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes(fails)
    result = fedstill.run(**TINY, callbacks=[notes])
    assert result.summary["rounds"] == 3
    assert weights(result).equal(weights(fedstill.run(**TINY)))
    assert [event for event, _ in notes.heard][-1] == fails  # and nothing after it
    assert caplog.text.count("Notes: nothing is tracked any more: ConnectionError: the tracker's server is gone") == 1


def test_a_tracker_gets_settings_numbers_and_files_and_goes_on_with_its_run(tmp_path: Path) -> None:
    class Interrupt(fedstill.Callback):
        def on_round_start(self, run: fedstill.RunView, round_: int, clients: int) -> None:
            if round_ == 3:
                raise KeyboardInterrupt

    path = tmp_path / "study/fedprox"
    before, after = Notes(), Notes(folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fedstill.run("fedprox", **TINY, mu=0.5, out=path, callbacks=[before, Interrupt()])
    experiment, name, id_, settings = before.heard[0][1]
    assert (experiment, name, settings["hyper.mu"], settings["rounds"]) == ("study", "fedprox", 0.5, 3)
    assert before.heard[-1] == ("end", ([], True))
    result = fedstill.resume(path, callbacks=[after])
    assert after.heard[0][1][:3] == (tmp_path.name, "study/fedprox", id_)
    (_, (round_, numbers)), (_, (artefacts, failed)) = after.heard[1:]
    assert (round_, numbers["accuracy"], failed) == (3, result.records[-1]["accuracy"], False)
    assert numbers["per_class/T-shirt/top"] == result.records[-1]["per_class"][0]
    assert {"config.toml", "model.safetensors", "summary.json", "curves.png", "report.html"} <= set(artefacts)
    assert "fedprox" in (path / "report.html").read_text()


def test_runs_of_a_comparison_are_one_experiment(tmp_path: Path) -> None:
    ours, given = Notes(), Notes(folder=tmp_path / "mine")
    assert [getattr(each, "folder", None) for each in placed([ours, given], tmp_path)] == [tmp_path, tmp_path / "mine"]
    assert ours.folder is None


@pytest.mark.parametrize("command", ["run", "resume", "compare", "tune", "serve"])
def test_every_command_that_trains_has_a_flag_for_each_tracker(command: str) -> None:
    flags = {option.name for option in get_command(app).commands[command].params}  # type: ignore[attr-defined]
    assert {"tensorboard", "mlflow", "wandb", "trackio"} <= flags


@pytest.mark.parametrize("tracker", ["mlflow", "wandb", "trackio"])
def test_a_library_that_is_missing_is_named_before_the_run(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    answer = type_in("run", "fedavg", f"--{tracker}", "--out", tmp_path / "run")
    assert f"pip install 'fedstill[{tracker}]'" in answer.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_weights_and_biases_has_the_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    fedstill.run("fedprox", **TINY, mu=0.125, out=tmp_path / "run", callbacks=[fedstill.WandB()])
    wandb.teardown()  # its service, before the test's processes are ended
    (log,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    written = log.read_bytes()
    assert all(word in written for word in (b"hyper.mu", b"0.125", b"wlp", b"train_loss"))
    assert b"model.safetensors" in written


@pytest.mark.slow
def test_mlflow_has_the_settings_every_round_and_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    result = fedstill.run("fedprox", **TINY, mu=0.125, out=tmp_path / "study/run", callbacks=[fedstill.MLflow()])
    client = mlflow.tracking.MlflowClient((tmp_path / "study/mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("study").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["hyper.mu"]) == ("run", "FINISHED", "0.125")
    history = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "accuracy")}
    assert history == {record["round"]: record["accuracy"] for record in result.records}
    assert "model.safetensors" in {found.path for found in client.list_artifacts(run.info.run_id)}


@pytest.mark.slow
def test_mlflow_goes_on_with_a_run_and_has_those_of_a_comparison_in_one_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    fedstill.compare(["fedavg", "fedprox"], **TINY, out=tmp_path / "both", callbacks=[fedstill.MLflow()], jobs=2)
    fedstill.resume(tmp_path / "both/fedprox", rounds=5, callbacks=[fedstill.MLflow(folder=tmp_path / "both")])
    client = mlflow.tracking.MlflowClient((tmp_path / "both/mlruns").as_uri())
    runs = client.search_runs([client.get_experiment_by_name("both").experiment_id])
    steps = {
        run.info.run_name: sorted(metric.step for metric in client.get_metric_history(run.info.run_id, "accuracy"))
        for run in runs
    }
    assert steps == {"fedavg": [1, 2, 3], "fedprox": [1, 2, 3, 4, 5]}


@pytest.mark.slow
def test_a_run_does_not_wait_long_for_an_mlflow_server_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # where nobody answers
    for name in _IMPATIENT:
        monkeypatch.delenv(name, raising=False)
    assert fedstill.run(**TINY, callbacks=[fedstill.MLflow()]).summary["rounds"] == 3
    assert "MLflow: nothing is tracked any more" in caplog.text
    assert {name: os.environ[name] for name in _IMPATIENT} == _IMPATIENT


@pytest.mark.slow
def test_trackio_has_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    result = fedstill.run("fedprox", **TINY, mu=0.125, out=tmp_path / "study/run", callbacks=[fedstill.Trackio()])
    with closing(sqlite3.connect(tmp_path / "trackio/study.db")) as kept:
        rows = kept.execute("select run_name, step, metrics from metrics order by step").fetchall()
    found = {(name, step, json.loads(numbers)["accuracy"]) for name, step, numbers in rows}
    assert found == {("run", record["round"], record["accuracy"]) for record in result.records}
