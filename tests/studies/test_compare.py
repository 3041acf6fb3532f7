"""Many runs at once: statistics, continuation, and what a comparison says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import fedstill
from fedstill.building.config import Config, anchored, parse_sweeps, resolve
from fedstill.metrics.records import RoundRecord
from fedstill.metrics.statistics import paired, spread
from fedstill.running.callbacks import Callback, RunView
from fedstill.studies import cells as cells_module
from fedstill.studies.cells import Cell, Watcher, other_settings, run_cells
from fedstill.studies.comparison import Row, to_target
from support.commandline import fedstill as command
from support.runs import SMALL

QUICK: dict[str, Any] = SMALL | {"model": "mlp", "model_options": {"hidden": [8]}, "rounds": 2, "engine": "process"}


def config(method: str = "fedavg", **settings: Any) -> Config:
    return resolve({**QUICK, "method": method, **settings})


# --- statistics -------------------------------------------------------------------------------------------------------


def test_spread_is_the_mean_and_the_sample_deviation() -> None:
    x = np.random.default_rng(0).normal(size=7).tolist()
    found = spread(x)
    assert found.mean == pytest.approx(stats.describe(x).mean)
    assert found.std == pytest.approx(stats.describe(x).variance ** 0.5)
    assert np.isnan(spread([1.0]).std)


def test_paired_differences_against_scipy() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(0.7, 0.05, 8), rng.normal(0.65, 0.05, 8)
    found = paired(a.tolist(), b.tolist())
    expected = stats.bootstrap((a - b,), np.mean, method="percentile", n_resamples=9999, rng=np.random.default_rng(7))
    assert found.mean == pytest.approx((a - b).mean())
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval), abs=0.003)
    assert found.wins == sum(x > y for x, y in zip(a, b, strict=True))
    t = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert t.low < found.low < found.mean < found.high < t.high, "a bootstrap of few seeds is narrower than Student's t"
    student = paired(a.tolist(), b.tolist(), interval="student")
    assert (student.low, student.high) == pytest.approx((t.low, t.high))
    assert (student.mean, student.wins, student.n) == (found.mean, found.wins, found.n)
    assert np.isnan(paired([1.0], [0.5]).low)
    assert np.isnan(paired([0.5] * 4, [0.4] * 4).low), "four seeds have no bootstrap"
    same = paired([0.5] * 5, [0.4] * 5)
    assert (same.low, same.high) == pytest.approx((0.1, 0.1))


def test_sweeps_are_every_combination() -> None:
    assert parse_sweeps([]) == [{}]
    assert parse_sweeps(["alpha=0.1,1", "optimizer=sgd,adam"]) == [
        {"alpha": 0.1, "optimizer": "sgd"},
        {"alpha": 0.1, "optimizer": "adam"},
        {"alpha": 1, "optimizer": "sgd"},
        {"alpha": 1, "optimizer": "adam"},
    ]
    for wrong in ("alpha", "alpha=", "=1", "alpha=1,,2"):
        with pytest.raises(fedstill.SettingError, match="--sweep"):
            parse_sweeps([wrong])


def test_what_it_took_to_reach_a_target() -> None:
    records: list[RoundRecord] = [
        {"round": 1, "accuracy": 0.2, "bytes_down": 1, "bytes_up": 2, "seconds": 1.0},
        {"round": 2, "accuracy": None, "bytes_down": 1, "bytes_up": 2, "seconds": 2.0},
        {"round": 3, "accuracy": 0.6, "bytes_down": 1, "bytes_up": 2, "seconds": 4.0},
        {"round": 4, "accuracy": 0.5, "bytes_down": 1, "bytes_up": 2, "seconds": 8.0},
    ]
    assert list(to_target(records, 0.5).values()) == [3, 9, 7.0]
    assert list(to_target(records, 0.7).values()) == [None] * 3
    assert list(to_target(records, 0).values()) == [None] * 3


# --- many runs --------------------------------------------------------------------------------------------------------


class Seen(Watcher):
    def __init__(self) -> None:
        self.started_: list[str] = []
        self.rounds: list[tuple[str, int]] = []

    def started(self, cell: Cell) -> None:
        self.started_.append(cell.path.name)

    def round_done(self, cell: Cell, round_: int) -> None:
        self.rounds.append((cell.path.name, round_))


@pytest.mark.slow
def test_runs_side_by_side_have_the_bits_of_runs_alone_and_are_not_repeated(tmp_path: Path) -> None:
    wanted = [Cell(tmp_path / f"s{seed}", config(seed=seed)) for seed in range(3)]
    seen = Seen()
    run_cells(wanted, jobs=2, watcher=seen)
    assert sorted(seen.rounds) == [(f"s{s}", r) for s in range(3) for r in (1, 2)]
    alone = fedstill.run(**QUICK | {"seed": 1, "out": tmp_path / "alone"})
    assert wanted[1].summary()["final_accuracy"] == alone.summary["final_accuracy"]
    assert (wanted[1].path / "model.safetensors").read_bytes() == (tmp_path / "alone/model.safetensors").read_bytes()
    again = Seen()
    run_cells(wanted, watcher=again)
    assert again.started_ == []


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    cell = Cell(tmp_path / "run", config(rounds=3))

    class Stop(Exception):
        pass

    class Break(Callback):
        def on_round_end(self, run: RunView, record: RoundRecord) -> None:
            raise Stop

    with pytest.raises(fedstill.CallbackError):
        fedstill.run(**QUICK | {"rounds": 3, "out": cell.path, "callbacks": [Break()]})
    assert cell.rounds_done() == 1
    seen = Seen()
    run_cells([cell], watcher=seen)
    assert seen.rounds == [("run", 2), ("run", 3)]
    assert cell.finished


def test_a_directory_with_another_run_is_not_taken_for_this_one(tmp_path: Path) -> None:
    run_cells([Cell(tmp_path / "run", config())])
    with pytest.raises(fedstill.SettingError, match=r"alpha is 0\.5, not 3"):
        run_cells([Cell(tmp_path / "run", config(alpha=3.0))])
    run_cells([Cell(tmp_path / "run", config(workers=7, target_accuracy=0.3))])  # these change no number


def test_one_that_fails_is_named_after_the_others_have_ended(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from dataclasses import dataclass\nimport fedstill\n\n\n@dataclass(frozen=True)\n"
        "class Bad(fedstill.FedAvg):\n    def aggregate(self, server, uplinks):\n        raise ValueError('too bad')\n"
    )
    wanted = [Cell(tmp_path / "bad", config(f"{bad}:Bad")), Cell(tmp_path / "good", config())]
    with pytest.raises(fedstill.FedstillError, match="bad: too bad"):
        run_cells(wanted, jobs=1)
    assert wanted[1].finished


@pytest.mark.slow
def test_jobs_and_workers_do_not_exceed_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(cell: Cell, workers: int, pipe: Any, parent: int) -> None:
        (cell.path.parent / f"{cell.path.name}.workers").write_text(str(workers))

    monkeypatch.setattr(cells_module, "cores", lambda: 6)
    monkeypatch.setattr(cells_module, "_one", noted)
    for count, each in ((1, 6), (2, 3), (4, 1), (9, 1)):
        folder = tmp_path / str(count)
        folder.mkdir()
        run_cells([Cell(folder / str(i), config()) for i in range(count)])
        given = [int(p.read_text()) for p in folder.glob("*.workers")]
        assert given == [each] * count


# --- the command ------------------------------------------------------------------------------------------------------


def flags(out: Path) -> list[str]:
    words = ["--clients", "6", "--rounds", "2", "--epochs", "1", "--model", "mlp", "--participation", "0.5"]
    return [*words, "--set", "fraction=0.1", "--out", str(out)]


@pytest.mark.slow
def test_compare_over_seeds_and_a_sweep(tmp_path: Path) -> None:
    words = ["compare", "fedavg", "fedprox", "--seeds", "2", "--sweep", "alpha=0.1,10", "--target-accuracy", "0.15"]
    answer = command(*words, "--set", "mu=0.0", *flags(tmp_path / "all"))
    assert answer.code == 0, answer.err
    assert "alpha = 10" in answer.out
    assert "mean ± standard deviation of 2 seeds" in answer.out
    assert answer.out.count("┏") == 1, "one table, however many combinations"
    assert answer.out.count("fedprox ") == 2
    rows = json.loads((tmp_path / "all" / "comparison.json").read_text())
    assert [(r["method"], r["settings"]) for r in rows] == [
        (m, {"alpha": a}) for a in (0.1, 10) for m in ("fedavg", "fedprox")
    ]
    for first, second in (rows[:2], rows[2:]):
        assert first["seeds"] == [0, 1]
        assert first["final_accuracy"]["values"] == second["final_accuracy"]["values"], "mu = 0 is FedAvg"
        gap = second["final_accuracy"]["better_than_first"]
        assert (gap["mean"], gap["wins"]) == (0, 0)
    assert rows[0]["final_accuracy"]["values"] != rows[2]["final_accuracy"]["values"]
    summary = json.loads((tmp_path / "all" / "fedavg-alpha0.1-s1" / "summary.json").read_text())
    assert rows[0]["final_accuracy"]["values"][1] == summary["final_accuracy"]
    before = os.stat(tmp_path / "all" / "fedavg-alpha0.1-s1" / "summary.json").st_mtime_ns
    again = command(*words, "--set", "mu=0.0", *flags(tmp_path / "all"))
    assert "8 of 8 runs are there already" in again.out
    assert os.stat(tmp_path / "all" / "fedavg-alpha0.1-s1" / "summary.json").st_mtime_ns == before


def test_a_difference_is_positive_where_the_row_is_better(tmp_path: Path) -> None:
    def row(name: str, fm: float, accuracy: float) -> Row:
        cell = Cell(tmp_path / name, config())
        cell.path.mkdir()
        (cell.path / "summary.json").write_text(json.dumps({"final_fm": fm, "final_accuracy": accuracy}))
        return Row(name, {}, (cell,))

    fair, plain = row("fair", 0.1, 0.6), row("plain", 0.3, 0.7)
    less, worse = fair.against(plain, "final_fm"), fair.against(plain, "final_accuracy")
    assert less is not None
    assert worse is not None
    assert less.mean == pytest.approx(0.2)
    assert worse.mean == pytest.approx(-0.1)
    assert fair.spread("final_amp") is None


@pytest.mark.slow
def test_what_ccvr_gains_after_the_last_round_is_in_the_comparison(tmp_path: Path) -> None:
    words = ["compare", "fedavg", "fedavg+ccvr", *flags(tmp_path), "--alpha", "0.5"]
    shown = command(*words).out
    assert "after the last exchange" in shown
    rows = json.loads((tmp_path / "comparison.json").read_text())
    plain, calibrated = rows[0], next(row for row in rows if row["model"] == "after the last exchange")
    assert calibrated["final_accuracy"]["values"] != plain["final_accuracy"]["values"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--sweep", "seed=1,2"], "--seeds N"),
        (["--sweep", "method=fedprox"], "name the methods"),
        (["--sweep", "alpha=0.1", "--sweep", "alpha=0.3"], "alpha is swept already"),
        (["--sweep", "alpha=1,1.0"], "a value stands there twice"),
        (["--sweep", "proxy=cinic10"], "cinic10"),
    ],
)
def test_a_sweep_that_would_mislead_is_refused_before_any_run(tmp_path: Path, words: list[str], reason: str) -> None:
    result = command("compare", "feddf", *flags(tmp_path / "out"), *words)
    assert result.code != 0
    assert reason in " ".join(result.err.split())
    assert not list(tmp_path.rglob("config.toml"))


def test_a_folder_with_the_name_of_a_dataset_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fashion-mini").mkdir()
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert anchored(config(data="fashion-mini")).data == "fashion-mini"
    assert anchored(config(data="mine")).data == str(tmp_path / "mine")


def test_a_run_that_is_older_than_a_setting_of_its_method_is_the_same_run() -> None:
    now = resolve({"method": "fedgkd"})
    before = now.model_copy(update={"hyper": {key: value for key, value in now.hyper.items() if key != "across"}})
    assert before.hyper != now.hyper
    assert other_settings(before, now) == ""
    assert "hyper is" in other_settings(before, resolve({"method": "fedgkd", "across": True}))
