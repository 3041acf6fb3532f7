"""Tuning: chosen by validation alone, halved without running anything twice, the same after a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import fedstill
from fedstill.analysis.winners import doubts
from fedstill.building.config import read_toml, resolve
from fedstill.core.errors import DataError, SettingError
from fedstill.core.space import Choices, Range, parse_axis, parse_space
from fedstill.methods import registry
from fedstill.studies import tuning
from fedstill.studies.cells import Cell, Failure
from fedstill.studies.trials import Search, Terms, Trial
from support.commandline import fedstill as type_in
from support.in_process import in_process, one_by_one
from support.runs import SMALL

pytest.importorskip("optuna")
TINY: dict[str, Any] = SMALL | {"model": "mlp", "model_options": {"hidden": [8]}, "rounds": 4}
FLAGS = "--model mlp --clients 4 --epochs 1 --engine inline --set fraction=0.05"
SPACE = {"lr": [1e30, 0.1, 0.001], "mu": [0.0, 1.0]}
KILLED = [6, 2]  # runs of the first stage, and of the second
HALVED: dict[str, Any] = {
    "space": SPACE,
    "sampler": "grid",
    "halving": 2,
    "validation": 0.3,
    "jobs": 2,
    "test_seeds": 2,
}


@pytest.fixture(scope="module", autouse=True)
def cells_in_process() -> Iterator[None]:
    with in_process():
        yield


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> fedstill.Tuning:
    folder = tmp_path_factory.mktemp("tuning") / "halved"
    return fedstill.tune(["fedavg", "fedprox"], out=folder, **HALVED, **TINY)


def trials(found: fedstill.Tuning, method: str = "fedprox") -> list[Trial]:
    return found.searches[method].trials


def rounds_on_disk(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.glob("trial-*/s*/metrics.jsonl"))


@pytest.mark.slow
def test_the_better_half_goes_on_and_no_round_is_run_twice(halved: fedstill.Tuning) -> None:
    found = halved.searches["fedprox"]
    assert [trial.settings for trial in found.trials] == [
        {"lr": lr, "mu": mu} for lr in SPACE["lr"] for mu in SPACE["mu"]
    ]
    alive = [trial for trial in found.trials if not trial.failed]
    assert {trial.settings["lr"] for trial in found.trials if trial.failed} == {1e30}
    for before, after in ((1, 2), (2, 4)):
        reached = sorted(
            (trial for trial in alive if before in trial.values), key=lambda t: t.score(before), reverse=True
        )
        promoted = [trial for trial in alive if after in trial.values]
        assert len(promoted) == -(-len(reached) // 2)
        assert min(trial.score(before) for trial in promoted) >= max(
            (trial.score(before) for trial in reached if trial not in promoted), default=(0.0,)
        )
    assert rounds_on_disk(halved.path / "fedprox") == sum(trial.rounds for trial in found.trials)


@pytest.mark.slow
def test_a_promoted_trial_has_the_bits_of_a_run_that_never_stopped(halved: fedstill.Tuning, tmp_path: Path) -> None:
    best = halved.searches["fedprox"].best
    fedstill.run("fedprox", **TINY | best.settings, validation=0.3, out=tmp_path / "whole")
    there = best.path / "s0"
    assert (there / "model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    records = [json.loads(line) for line in (there / "metrics.jsonl").read_text().splitlines()]
    mean = sum(record["val_accuracy"] for record in records) / 4  # of the last five, of which there are four
    assert best.score()[0] == pytest.approx(mean)


@pytest.mark.slow
def test_a_search_that_was_killed_ends_as_if_it_had_not_been(
    halved: fedstill.Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    def killed(todo: Sequence[Cell], **how: Any) -> dict[Path, Failure]:
        calls.append(len(todo))
        if calls == KILLED:
            raise KeyboardInterrupt
        return one_by_one(todo, **how)

    monkeypatch.setattr(tuning, "try_cells", killed)
    again: dict[str, Any] = HALVED | TINY | {"out": tmp_path / "killed", "test_seeds": 0}
    with pytest.raises(KeyboardInterrupt):
        fedstill.tune("fedprox", **again)
    shutil.rmtree(next((tmp_path / "killed/fedprox").glob("trial-003")))  # a trial is lost as well
    found = fedstill.tune("fedprox", **again)
    values = [(trial.number, trial.settings, trial.values, bool(trial.failed)) for trial in trials(found)]
    assert values == [(t.number, t.settings, t.values, bool(t.failed)) for t in trials(halved)]
    assert calls[2:] == [1, 2, 1]  # what was deleted, and the stages that were left
    calls.clear()
    fedstill.tune("fedprox", **again)
    assert sum(calls) == 0  # everything is there, also that two trials cannot be trained


@pytest.mark.slow
def test_winners_are_written_down_and_tested_once_on_fresh_seeds_and_all_samples(halved: fedstill.Tuning) -> None:
    for method, settings in halved.winners.items():
        config = resolve(read_toml(halved.path / method / "best.toml"))
        chosen = {name: config.hyper.get(name, getattr(config, name, None)) for name in settings}
        assert (config.method, chosen, config.validation) == (method, settings, 0.0)
    assert halved.comparison is not None
    tested = [cell.config for row in halved.comparison.rows[0] for cell in row.cells]
    assert {config.seed for config in tested} == {1, 2}  # 0 was for the trials
    assert {config.validation for config in tested} == {0.0}
    assert len(halved.frame()) == 3 + 6
    assert all(word in halved.to_latex() for word in ("fedavg", "fedprox", r"\toprule"))
    assert "chosen without test data" in halved.to_markdown()
    assert [path.name for path in halved.plot()] == ["slices.png", "importance.png"]


@pytest.mark.slow
def test_compare_uses_the_winners(halved: fedstill.Tuning, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = type_in(
        "compare",
        "fedprox",
        "--tuned",
        str(halved.path),
        "--rounds",
        "1",
        *FLAGS.split(),
        "--out",
        str(tmp_path / "both"),
    )
    assert done.code == 0, done.err
    config = resolve(read_toml(tmp_path / "both/fedprox/config.toml"))
    assert {"lr": config.lr, "mu": config.hyper["mu"]} == halved.winners["fedprox"]
    assert "fedprox was tuned with other settings" in caplog.text
    assert "seeds 0 to 0 chose the settings of fedprox; --seed 1 is fresh" in caplog.text
    (halved.path / "fedavg/best.toml").rename(tmp_path / "best.toml")
    assert doubts(halved.path, "fedavg", [config]) == ["the search for fedavg has not ended"]
    (tmp_path / "best.toml").rename(halved.path / "fedavg/best.toml")
    other = type_in("compare", "fedgkd", "--tuned", str(halved.path), *FLAGS.split(), "--out", str(tmp_path / "other"))
    assert "fedgkd was not tuned there" in other.err


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_tpe_learns_from_the_first_group_of_a_halved_search(sampler: Any) -> None:
    def second_group(sign: int) -> list[dict[str, Any]]:
        space = {"lr": parse_axis("lr", "log:1e-4..1")}
        study = tuning._Study(Search("fedavg", space, Terms(sampler=sampler), rounds=9), seed=0)
        group = [Trial(i, drawn, Path(), {9: [[sign * drawn["lr"]]]}) for i, drawn in enumerate(study.ask(9))]
        study.tell(group)
        return study.ask(9)

    assert (second_group(1) == second_group(-1)) is (sampler == "random")


def test_the_front_holds_what_nothing_exceeds_in_both() -> None:
    scores = [(0.5, 0.5), (0.6, 0.4), (0.4, 0.6), (0.5, 0.4), (0.6, 0.3)]
    found = Search("fedavg", {}, Terms(("val_accuracy", "val_wlp")), rounds=3)
    found.trials = [Trial(i, {}, Path(str(i)), {3: [[a], [b]]}) for i, (a, b) in enumerate(scores)]
    assert [trial.number for trial in found.front] == [1, 0, 2]
    least = Search("fedavg", {}, Terms(("val_loss",)), rounds=3)
    least.trials = [Trial(i, {}, Path(str(i)), {3: [[a, b]]}) for i, (a, b) in enumerate(scores[:4])]
    assert least.best.number == 3  # the smallest mean over the seeds


@pytest.mark.slow
def test_a_budget_of_rounds_ends_a_search_and_two_objectives_are_never_halved(tmp_path: Path) -> None:
    found = fedstill.tune(
        "fedavg", objective=["val_accuracy", "val_wlp"], trials=0, budget_rounds=5, test_seeds=0,
        out=tmp_path / "two", **TINY | {"rounds": 1},
    ).searches["fedavg"]  # fmt: skip
    assert len(found.trials) == 2 * tuning.TOGETHER  # the budget is looked at between groups
    assert {trial.rounds for trial in found.trials} == {1}
    assert all(0.003 <= trial.settings["lr"] <= 0.3 for trial in found.trials)


def test_every_space_that_a_method_declares_can_be_searched() -> None:
    for method in (*registry.names(), "fedavg+ccvr", "fedavg+trimmed-mean"):
        for parameter in registry.hyper_parameters(method):
            if parameter.space:
                axis = parse_axis(parameter.name, parameter.space)
                for value in axis.ends:
                    registry.make(method, {parameter.name: value})
                low, high = min(axis.ends), max(axis.ends)
                assert low <= parameter.default <= high, (method, parameter)


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("0.1..0.9", Range(0.1, 0.9)),
        ("int:1..9", Range(1, 9, whole=True)),
        ("sgd,adam", Choices(("sgd", "adam"))),
        ("true,false", Choices((True, False))),
    ],
)
def test_spaces_are_read_as_people_write_them(text: str, axis: Any) -> None:
    assert parse_axis("x", text) == axis


@pytest.mark.parametrize("text", ["1..", "log:0..1", "lug:1..2", "2..1", "", "1,1", "int:0.5..2", "1...2"])
def test_what_is_no_space_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match=r"space of x|--space"):
        parse_axis("x", text) if text else parse_space(["x="])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "accuracy"}, "validation data"),
        ({"space": {"seed": [1, 2]}}, "no setting to search"),
        ({"space": {"mux": [1, 2]}}, "mux"),
        ({"space": {"lr": [-1.0, 1.0]}}, "lr = -1.0"),
        ({"sampler": "bayes"}, "tpe, random, grid"),
        ({"sampler": "grid"}, "a grid needs its values"),
        ({"halving": 1}, "at least 2"),
        ({"trials": 0}, "needs a budget"),
        ({"objective": "val_auroc"}, "of validation there are"),
        ({"validation": 0}, "held out"),
        ({"space": {"partition": ["iid", "natural"]}}, "does not say who owns a sample"),
        ({"validation": 0.1, "objective": "val_accuracy", "trials": -1}, "trials = -1"),
    ],
)
def test_what_cannot_be_searched_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((SettingError, DataError), match=message):
        fedstill.tune("fedprox", **TINY | {"rounds": 1, "trials": 1, "out": tmp_path / "no"} | change)
    assert not (tmp_path / "no").exists()  # before the first run


def test_a_setting_that_is_searched_cannot_be_set_as_well(tmp_path: Path) -> None:
    done = type_in(
        "tune", "fedprox", "--space", "mu=0,1", "--set", "mu=3", *FLAGS.split(), "--out", str(tmp_path / "no")
    )
    assert "is set as well" in done.err


def test_a_sweep_says_that_it_is_judged_on_test_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    type_in("compare", "fedavg", "--sweep", "lr=0.1,0.2", "--rounds", "1", *FLAGS.split(), "--out", str(tmp_path / "s"))
    assert "judged on test data" in caplog.text
