"""Callbacks: every event once, a clean stop, state that survives a kill, errors that name the callback."""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedstill
from fedstill.inference.description import read_description
from fedstill.metrics.records import EpisodeRecord, RoundRecord, Scores, Summary
from fedstill.running.rollback import rollback
from fedstill.running.verify import verify
from support.runs import SMALL, RunSmall, numbers, weights
from support.sites import Wire, served

TINY: dict[str, Any] = SMALL | {"model": "mlp", "model_options": {"hidden": [8]}, "rounds": 4}


class Diary(fedstill.Callback):
    """Every event, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_run_start(self, run: fedstill.RunView) -> None:
        self.events.append(("run start", run.round))

    def on_round_start(self, run: fedstill.RunView, round_: int, clients: int) -> None:
        self.events.append(("round start", round_, clients))

    def on_client_end(self, run: fedstill.RunView, client: int, metrics: Mapping[str, float]) -> None:
        self.events.append(("client", client, metrics["train_loss"] > 0))

    def on_aggregation_end(self, run: fedstill.RunView, episode: EpisodeRecord) -> None:
        self.events.append(("aggregation", episode["number"]))

    def on_evaluation_end(self, run: fedstill.RunView, scores: Scores) -> None:
        self.events.append(("evaluation", scores["accuracy"]))

    def on_round_end(self, run: fedstill.RunView, record: RoundRecord) -> None:
        self.events.append(("round end", record["round"], run.records[-1] == record))

    def on_run_end(self, run: fedstill.RunView, summary: Summary) -> None:
        self.events.append(("run end", summary["rounds"]))

    def on_run_failed(self, run: fedstill.RunView, error: BaseException) -> None:
        self.events.append(("failed", type(error).__name__))

    def kinds(self) -> list[str]:
        return [event[0] for event in self.events]


class StopAt(fedstill.Callback):
    def __init__(self, round_: int) -> None:
        self.round = round_

    def on_round_end(self, run: fedstill.RunView, record: RoundRecord) -> bool:
        return record["round"] >= self.round


class Metric(fedstill.Callback):
    """Logs numbers that the test chooses, one a round."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def on_round_end(self, run: fedstill.RunView, record: RoundRecord) -> None:
        run.log("metric", self.values[record["round"] - 1])


class Interrupt(fedstill.Callback):
    """As Ctrl-C or a kill at the start of a round."""

    def __init__(self, round_: int) -> None:
        self.round = round_

    def on_round_start(self, run: fedstill.RunView, round_: int, clients: int) -> None:
        if round_ == self.round:
            raise KeyboardInterrupt


def test_every_event_comes_in_its_order() -> None:
    diary = Diary()
    result = fedstill.run("fedavg", **TINY | {"rounds": 2}, callbacks=[diary])
    one = ["round start", "client", "client", "client", "evaluation", "round end"]
    assert diary.kinds() == ["run start", *one, *one, "run end"]
    assert diary.events[1] == ("round start", 1, 3)
    assert diary.events[5] == ("evaluation", result.records[0]["accuracy"])
    assert diary.events[6] == ("round end", 1, True)


@pytest.mark.slow
def test_aggregations_of_regions_are_events() -> None:
    diary = Diary()
    fedstill.run("fedavg", **TINY | {"regions": 2, "rounds_per_episode": 2}, callbacks=[diary])
    assert [event for event in diary.events if event[0] == "aggregation"] == [("aggregation", 1), ("aggregation", 2)]


@pytest.mark.slow
def test_served_runs_have_the_same_events(tmp_path: Path) -> None:
    here, there = Diary(), Diary()
    settings = {k: v for k, v in TINY.items() if k != "engine"} | {"rounds": 2, "clients": 3, "participation": 1.0}
    fedstill.run("fedavg", **settings, engine="inline", callbacks=[here])
    served(Wire(tmp_path), tmp_path / "run", callbacks=[there, StopAt(1)], **settings)
    ended = here.events.index(("round end", 1, True))
    assert there.events == [*here.events[: ended + 1], ("run end", 1)]


def test_a_view_gives_what_the_run_is_and_the_weights_of_now(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Look(fedstill.Callback):
        def on_round_end(self, run: fedstill.RunView, record: RoundRecord) -> None:
            flat = torch.cat([p.flatten() for p in run.model().state_dict().values()])
            seen.update(path=run.path, rounds=run.rounds, clients=run.federation.clients, method=run.config.method)
            seen.update(round=run.round, weights=run.weights(), flat=flat)
            run.weights().zero_()

    result = fedstill.run("fedavg", **TINY, out=tmp_path / "run", callbacks=[Look()])
    assert [seen[k] for k in ("path", "rounds", "round", "clients", "method")] == [tmp_path / "run", 4, 4, 6, "fedavg"]
    assert torch.equal(seen["weights"], seen["flat"])
    assert torch.equal(seen["weights"], weights(result)), "what a callback does to its copy changes nothing"


@pytest.mark.slow
def test_a_stopped_run_is_the_run_with_fewer_rounds_and_can_go_on(tmp_path: Path) -> None:
    whole = fedstill.run("scaffold", **TINY)
    short = fedstill.run("scaffold", **TINY | {"rounds": 2})
    stopped = fedstill.run("scaffold", **TINY, out=tmp_path / "run", callbacks=[StopAt(2)])
    assert stopped.summary["stopped_by"] == "StopAt"
    assert numbers(stopped) == numbers(short)
    assert torch.equal(weights(stopped), weights(short))
    assert all(check.sound for check in verify(tmp_path / "run"))
    resumed = fedstill.resume(tmp_path / "run")
    assert "stopped_by" not in resumed.summary
    assert numbers(resumed) == numbers(whole)
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("method", ["fedavg", "feddistill"])
def test_a_run_that_stops_where_nothing_was_evaluated_has_a_summary(method: str) -> None:
    result = fedstill.run(method, **TINY | {"eval_every": 0}, callbacks=[StopAt(2)])
    assert result.summary["rounds"] == 2
    if method == "fedavg":
        evaluated = fedstill.run(method, **TINY | {"rounds": 2})
        assert result.summary["final_accuracy"] == evaluated.records[1]["accuracy"]


def test_a_run_stops_only_where_the_regions_have_one_model() -> None:
    result = fedstill.run("fedavg", **TINY | {"regions": 2, "rounds_per_episode": 2}, callbacks=[StopAt(1)])
    assert [record["round"] for record in result.records] == [1, 2]


def test_logged_numbers_are_in_the_record_on_disk_and_seen_by_later_callbacks(tmp_path: Path) -> None:
    stop = fedstill.EarlyStopping("callbacks.metric", patience=1)
    logger = Metric(0.5, 0.6, 0.4, 0.7)
    result = fedstill.run("fedavg", **TINY, out=tmp_path / "run", callbacks=[logger, stop])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["callbacks"] for line in lines] == [{"metric": 0.5}, {"metric": 0.6}, {"metric": 0.4}]
    assert result.summary["stopped_by"] == "EarlyStopping"


# --- early stopping ---


@pytest.mark.parametrize(
    ("values", "options", "last"),
    [
        ((1, 2, 3, 4), {"patience": 1}, 4),
        ((1, 1, 2, 3), {"patience": 1}, 2),
        ((1, 0, 2, 1), {"patience": 2}, 4),
        ((1, 0, 0, 9), {"patience": 2}, 3),
        ((1, 1.5, 2, 9), {"patience": 1, "min_delta": 0.6}, 2),
        ((1, 2, 0, 9), {"patience": 1, "mode": "min"}, 2),
        ((1, float("nan"), 2, 3), {"patience": 1}, 4),
    ],
)
def test_patience_counts_evaluations_without_a_better_one(
    values: tuple[float, ...], options: dict[str, Any], last: int
) -> None:
    stop = fedstill.EarlyStopping("callbacks.metric", **options)
    result = fedstill.run("fedavg", **TINY, callbacks=[Metric(*values), stop])
    assert result.records[-1]["round"] == last


def test_the_best_model_is_restored_and_reported(tmp_path: Path) -> None:
    stop = fedstill.EarlyStopping("callbacks.metric", patience=2, restore_best=True)
    logger = Metric(1, 2, 0, 1)
    result = fedstill.run("fedavg", **TINY, out=tmp_path / "run", callbacks=[logger, stop])
    best = fedstill.run("fedavg", **TINY | {"rounds": 2}, out=tmp_path / "two")
    assert result.summary["restored_round"] == 2
    assert torch.equal(weights(result), weights(best))
    for name in ("model.safetensors", "clients.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.slow
def test_early_stopping_is_exact_after_a_kill(tmp_path: Path) -> None:
    def stopping() -> list[fedstill.Callback]:
        return [Metric(3, 2, 1, 0), fedstill.EarlyStopping("callbacks.metric", patience=3, restore_best=True)]

    whole = fedstill.run("fedavg", **TINY | {"rounds": 6}, callbacks=stopping())
    with pytest.raises(KeyboardInterrupt):
        fedstill.run("fedavg", **TINY | {"rounds": 6}, out=tmp_path / "run", callbacks=[*stopping(), Interrupt(3)])
    resumed = fedstill.resume(tmp_path / "run", callbacks=stopping())
    assert resumed.summary["rounds"] == whole.summary["rounds"] == 4
    assert resumed.summary["restored_round"] == 1
    assert numbers(resumed) == numbers(whole)
    assert torch.equal(weights(resumed), weights(whole))


def test_early_stopping_is_exact_after_a_kill_before_the_results(tmp_path: Path) -> None:
    def stopping() -> list[fedstill.Callback]:
        return [Metric(3, 2, 1, 0), fedstill.EarlyStopping("callbacks.metric", patience=1, restore_best=True)]

    fedstill.run("fedavg", **TINY, out=tmp_path / "run", callbacks=stopping())
    before = (tmp_path / "run/model.safetensors").read_bytes()
    for name in ("summary.json", "model.safetensors"):
        (tmp_path / "run" / name).unlink()
    summary = fedstill.resume(tmp_path / "run", callbacks=stopping()).summary
    assert (summary["rounds"], summary["stopped_by"], summary["restored_round"]) == (2, "EarlyStopping", 1)
    assert (tmp_path / "run/model.safetensors").read_bytes() == before


def test_a_metric_that_no_round_has_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(fedstill.SettingError, match=r"metric = 'acuracy': the rounds have accuracy, loss"):
        fedstill.run("fedavg", **TINY, callbacks=[fedstill.EarlyStopping("acuracy")])


@pytest.mark.parametrize("method", ["fedavg+ccvr", "feddistill"])
def test_no_best_model_where_the_result_is_another(method: str) -> None:
    with pytest.raises(fedstill.SettingError, match="restore_best"):
        fedstill.run(method, **TINY, callbacks=[fedstill.EarlyStopping("amp", restore_best=True)])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: fedstill.EarlyStopping("amp", patience=0), "patience = 0: at least 1"),
        (lambda: fedstill.EarlyStopping("amp", min_delta=-1), "min_delta = -1: at least 0"),
        (lambda: fedstill.EarlyStopping("amp", mode="most"), "mode = 'most'"),  # type: ignore[arg-type]
        (fedstill.Budget, "give seconds=, bytes="),
        (lambda: fedstill.Budget(seconds=0), "seconds = 0: more than 0"),
    ],
)
def test_wrong_arguments_are_refused_at_once(make: Any, text: str) -> None:
    with pytest.raises(fedstill.SettingError, match=text):
        make()


# --- the others ---


def test_the_best_round_is_kept_in_a_file_and_forgotten_by_a_rollback(tmp_path: Path) -> None:
    best, run = tmp_path / "run/best.safetensors", tmp_path / "run"
    settings = TINY | {"save_models": 1, "keep_checkpoints": 4}
    fedstill.run("fedavg", **settings, out=run, callbacks=[Metric(1, 3, 2, 5), fedstill.SaveBest("callbacks.metric")])
    assert read_description(best).round == 4
    saved, fourth = load_file(best), load_file(run / "models/round-000004.safetensors")
    assert all(torch.equal(saved[name], fourth[name]) for name in fourth)
    assert fedstill.load(best).module.network.state_dict().keys() == saved.keys()
    rollback(run, 3)
    assert not best.exists()


@pytest.mark.parametrize("name", ["seconds", "bytes"])
def test_a_budget_counts_all_rounds_also_those_before_a_resume(tmp_path: Path, name: str) -> None:
    spent = {"seconds": 1e-9, "bytes": 1}[name]
    with pytest.raises(KeyboardInterrupt):
        fedstill.run("fedavg", **TINY, out=tmp_path / "run", callbacks=[Interrupt(2)])
    result = fedstill.resume(tmp_path / "run", callbacks=[fedstill.Budget(**{name: spent})])
    assert (result.summary["rounds"], result.summary["stopped_by"]) == (2, "Budget")


def test_a_budget_of_bytes_lets_the_run_stop_at_the_first_round_beyond_it() -> None:
    plain = fedstill.run("fedavg", **TINY)
    a_round = plain.records[0]["bytes_down"] + plain.records[0]["bytes_up"]
    limited = fedstill.run("fedavg", **TINY, callbacks=[fedstill.Budget(bytes=2 * a_round + 1)])
    assert limited.summary["rounds"] == 3


def test_the_table_of_rounds_is_whole_after_a_resume(tmp_path: Path) -> None:
    settings, run = TINY | {"eval_every": 2}, tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fedstill.run("fedavg", **settings, out=run, callbacks=[fedstill.CSVLog(), Interrupt(4)])
    result = fedstill.resume(run, callbacks=[fedstill.CSVLog()])
    with open(run / "rounds.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["round"]) for row in rows] == [1, 2, 3, 4]
    assert [row["accuracy"] for row in rows] == ["", str(result.records[1]["accuracy"]), "",
                                                 str(result.records[3]["accuracy"])]  # fmt: skip


# --- errors ---


@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_run_start", "on_client_end", "on_evaluation_end", "on_round_end", "on_run_end"])
def test_an_error_names_the_callback_and_its_line_and_loses_nothing(tmp_path: Path, event: str) -> None:
    def fail(self: Any, run: fedstill.RunView, *what: object) -> None:
        if run.round == 2 or event == "on_run_start":
            raise ValueError("no such colour")

    broken = type("Broken", (fedstill.Callback,), {event: fail})()
    settings = TINY | {"rounds": 2 if event == "on_run_end" else 4, "checkpoint_every": 10}
    diary, whole = Diary(), fedstill.run("scaffold", **settings)
    line = fail.__code__.co_firstlineno + 2
    with pytest.raises(fedstill.CallbackError) as raised:
        fedstill.run("scaffold", **settings, out=tmp_path / "run", callbacks=[broken, diary])
    assert str(raised.value) == f"callback Broken.{event}: ValueError: no such colour ({__file__}, line {line})"
    assert diary.kinds().count("round end") == (0 if event == "on_run_start" else 2), "the others miss nothing"
    assert diary.events[-1] == ("failed", "CallbackError")
    done = (tmp_path / "run/metrics.jsonl").read_text().count("\n") if event != "on_run_start" else 0
    assert done == (0 if event == "on_run_start" else 2)
    resumed = fedstill.resume(tmp_path / "run")
    assert numbers(resumed) == numbers(whole)
    assert torch.equal(weights(resumed), weights(whole))


def test_state_that_cannot_be_kept_is_named() -> None:
    class Opaque(fedstill.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"lock": object()}

    with pytest.raises(fedstill.CallbackError, match=r"callback Opaque\.state_dict: TypeError: cannot be kept"):
        fedstill.run("fedavg", **TINY, callbacks=[Opaque()])


def test_a_class_instead_of_an_object_is_refused_with_what_to_write() -> None:
    with pytest.raises(fedstill.SettingError, match=r"write Diary\(…\)"):
        fedstill.run("fedavg", **TINY, callbacks=[Diary])  # type: ignore[list-item]


def test_what_no_run_would_call_is_refused_before_there_is_a_directory(tmp_path: Path) -> None:
    class Misspelt(fedstill.Callback):
        def on_rund_end(self, run: fedstill.RunView, record: RoundRecord) -> None: ...

    class Short(fedstill.Callback):
        def on_round_end(self, run: fedstill.RunView) -> None: ...  # type: ignore[override]

    refused = {Misspelt: "did you mean 'on_round_end'", Short: r"takes other arguments than \(self, run, record\)"}
    for callback, reason in refused.items():
        with pytest.raises(fedstill.SettingError, match=reason):
            fedstill.run("fedavg", **TINY, out=tmp_path / "run", callbacks=[callback()])
    with pytest.raises(fedstill.SettingError, match="give a list of them"):
        fedstill.run("fedavg", **TINY, out=tmp_path / "run", callbacks=Diary(), progress=True)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_a_callback_cannot_change_what_happened() -> None:
    class Forger(fedstill.Callback):
        """Changes all it can, and keeps what the run refused."""

        def __init__(self) -> None:
            self.refused = 0

        def forge(self, record: Any) -> None:
            try:
                record["accuracy"] = 1.0
            except TypeError:
                self.refused += 1

        def on_evaluation_end(self, run: fedstill.RunView, scores: Scores) -> None:
            self.forge(scores)
            scores["per_class"].clear()

        def on_round_end(self, run: fedstill.RunView, record: RoundRecord) -> None:
            self.forge(record)
            self.forge(run.records[0])
            run.weights().zero_()
            copied = copy.deepcopy(record)
            copied["accuracy"] = 1.0  # its own

        def on_run_end(self, run: fedstill.RunView, summary: Summary) -> None:
            self.forge(summary)

    forger = Forger()
    assert numbers(fedstill.run("fedavg", **TINY, callbacks=[forger])) == numbers(fedstill.run("fedavg", **TINY))
    assert forger.refused == 4 + 2 * 4 + 1


def test_two_of_a_kind_keep_their_own_state(tmp_path: Path) -> None:
    def both() -> list[fedstill.Callback]:
        return [fedstill.EarlyStopping("amp", patience=90), fedstill.EarlyStopping("fm", patience=90)]

    fedstill.run("fedavg", **TINY | {"rounds": 2}, out=tmp_path / "run", callbacks=both())
    again = both()
    result = fedstill.resume(tmp_path / "run", rounds=3, callbacks=again)
    for callback, name, pick in zip(again, ("amp", "fm"), (max, min), strict=True):
        assert isinstance(callback, fedstill.EarlyStopping)
        assert callback.best == pick(record[name] for record in result.records)  # type: ignore[literal-required]


def test_one_object_given_to_two_runs_begins_anew_with_each(run_small: RunSmall) -> None:
    stop = fedstill.EarlyStopping("train_loss", patience=1, min_delta=10, restore_best=True)
    first, second = (run_small(rounds=4, seed=seed, callbacks=[stop]) for seed in (0, 1))
    alone = run_small(
        rounds=4, seed=1, callbacks=[fedstill.EarlyStopping("train_loss", patience=1, min_delta=10, restore_best=True)]
    )
    assert torch.equal(weights(second), weights(alone))
    assert not torch.equal(weights(second), weights(first))


def test_a_run_that_patience_ended_goes_on_when_more_rounds_are_wanted_and_only_then(
    run_small: RunSmall, tmp_path: Path
) -> None:
    settings = {"validation": 0.2, "select": "val_accuracy", "patience": 1, "min_delta": 1.0, "out": tmp_path / "run"}
    assert run_small(rounds=4, **settings).summary["rounds"] == 2
    assert fedstill.resume(tmp_path / "run").summary["rounds"] == 2
    more = fedstill.resume(tmp_path / "run", rounds=6)
    assert more.summary["rounds"] == 3  # patience is counted anew
    assert "stopped by EarlyStopping after round 3" in (tmp_path / "run/log.txt").read_text()


@pytest.mark.parametrize("wrong", [{"method": "local"}, {"group": [{"name": "a b"}, {"name": "a-b"}]}])
def test_what_cannot_be_kept_is_refused_before_there_is_a_directory(
    run_small: RunSmall, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    groups = [each | {"model": "cnn", "clients": 3} for each in wrong.get("group", [])]
    settings = {"validation": 0.2, "select": "val_accuracy"} | ({"group": groups} if groups else {})
    with pytest.raises(fedstill.SettingError, match=r"select|one file"):
        run_small(wrong.get("method", "fedavg"), **settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
