"""One site among many is broken or hostile: the others' round goes on, or ends with what to do."""

from __future__ import annotations

import math
import queue
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedstill
from fedstill.building.config import resolve
from fedstill.core.tree import Tree
from fedstill.deployment import waiting
from fedstill.deployment.audit import RecordedLink
from fedstill.deployment.protocol import failure_reason
from fedstill.deployment.server import serve
from fedstill.deployment.shares import capped
from fedstill.deployment.site_engine import Terms, _client_answer
from fedstill.methods.base import Server, Uplink
from fedstill.methods.fedavg import FedAvg
from fedstill.metrics.records import RoundRecord
from fedstill.running import judging, retries
from fedstill.running.callbacks import Callback, RunView
from fedstill.running.judging import AnswerBuffer, Judge
from fedstill.running.uplinks import RoundFailed
from support.sites import NAMES, SETTINGS, Silence, Wire, served, weights


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST", 0.01)


Change = Callable[[dict[str, Any]], dict[str, Any]]


class Lying(Wire):
    """One site changes what it answers: to training, or to the poll of how much it holds."""

    def __init__(self, folder: Path, change: Change, kind: str = "Train", liar: str = "south") -> None:
        super().__init__(folder)
        self.change, self.kind, self.liar = change, kind, liar

    def answer(self, name: str, request: Tree) -> Any:
        answer, body = super().answer(name, request), request["request"]
        kind = body["kind"] if body else "poll"
        return answer | self.change(answer) if name == self.liar and kind == self.kind else answer


class Reports(Callback):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_round_failed(self, run: RunView, reason: str) -> None:
        self.lines.append(reason)


def log(out: Path) -> str:
    return (out / "log.txt").read_text()


def scaled(factor: float) -> Change:
    return lambda a: {"message": {name: part * factor for name, part in a["message"].items()}}


# --- a round that always fails ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_round_that_always_fails_is_given_up_with_the_reason_of_each_site(tmp_path: Path) -> None:
    reports = Reports()
    with pytest.raises(fedstill.FedstillError, match="round 2 failed 3 times and is given up") as error:
        served(AllFail(tmp_path), tmp_path / "run", callbacks=[reports], round_retries=2)
    for name in ("north", "south", "west"):
        assert f"{name}: model is not finite" in str(error.value)
    assert f"fedstill rollback {tmp_path / 'run'} --to ROUND" in str(error.value)
    assert ["attempt 2 of 3" in reports.lines[0], "attempt 3 of 3" in reports.lines[1]] == [True, True]
    assert log(tmp_path / "run").count("round 2 is tried again") == 2
    result = served(Wire(tmp_path), tmp_path / "run")
    assert [r["round"] for r in result.records] == [1, 2, 3], "what was done is kept, and the run goes on"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"), [("fedavg+krum", {"byzantine": 0}), ("fedavg+bulyan", {"byzantine": 0})]
)
def test_a_round_with_too_few_answers_for_its_method_is_tried_again(
    tmp_path: Path, method: str, settings: dict[str, Any]
) -> None:
    reports = Reports()
    result = served(
        FailsOnce(tmp_path), tmp_path / "run", method, callbacks=[reports], rounds=1, round_retries=2, **settings
    )
    assert len(reports.lines) == 1
    assert "only 2 of 3 clients gave a usable answer, 3 are needed" in log(tmp_path / "run")
    assert "left_out" not in result.records[0]


class FailsOnce(Wire):
    """The first answer of one site to a training is NaN."""

    failed = False

    def answer(self, name: str, request: Tree) -> Any:
        answer, body = super().answer(name, request), request["request"]
        if body and body["kind"] == "Train" and name == "south" and not self.failed:
            self.failed = True
            answer["message"] = {part: value * torch.nan for part, value in answer["message"].items()}
        return answer


class AllFail(Wire):
    """From round 2 on every answer is NaN, as of a model that diverged."""

    def answer(self, name: str, request: Tree) -> Any:
        answer, body = super().answer(name, request), request["request"]
        if body and body.get("round", 0) > 1:
            answer["message"] = {name: part * torch.nan for name, part in answer["message"].items()}
        return answer


def test_sites_that_diverge_say_so_and_leave_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(fedstill.FedstillError, match="south: model is not finite"):
        served(Wire(tmp_path), tmp_path / "run", lr=1000.0, round_retries=1)
    assert not list((tmp_path / "run/checkpoints").glob("round-*"))


def test_pauses_between_attempts_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    monkeypatch.setattr(retries, "time", clock)
    monkeypatch.setattr(retries, "_FIRST", 2.0)
    monkeypatch.setattr(retries, "_LOOK", 100.0)
    attempts = retries.Retries(1, 6, tmp_path, lambda text: None)
    for _ in range(6):
        attempts.after(RoundFailed("no"), {}, connected=True, arrived=lambda: True)
    assert slept == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    with pytest.raises(fedstill.FedstillError, match="failed 7 times"):
        attempts.after(RoundFailed("no"), {}, connected=True, arrived=lambda: True)


@pytest.mark.slow
def test_sites_that_are_not_connected_are_waited_for_without_counting(tmp_path: Path) -> None:
    class Away(Wire):
        tries = 0

        def send_requests(self, requests: Any, **how: Any) -> Any:
            if any(request["request"] and request["request"].get("round") == 2 for request in requests.values()):
                self.tries += 1
                self.away = set(self.sites) if self.tries < 5 else set()
            return super().send_requests(requests, **how)

    reports = Reports()
    result = served(Away(tmp_path), tmp_path / "run", callbacks=[reports], round_retries=1)
    assert [r["round"] for r in result.records] == [1, 2, 3]
    assert sum("waiting for sites to connect" in line for line in reports.lines) == 3


def test_finite_answers_that_add_up_to_no_model_are_no_checkpoint(tmp_path: Path) -> None:
    """SCAFFOLD's server goes twice as far as the clients' mean, and so beyond the largest float."""

    def huge(answer: dict[str, Any]) -> dict[str, Any]:
        most = torch.finfo(torch.float32).max
        return {"message": {name: torch.full_like(part, most) for name, part in answer["message"].items()}}

    class Huge(Wire):
        def answer(self, name: str, request: Tree) -> Any:
            answer = super().answer(name, request)
            return answer | huge(answer) if "message" in answer else answer

    with pytest.raises(fedstill.FedstillError, match="no longer finite on the server"):
        served(Huge(tmp_path), tmp_path / "run", "scaffold", round_retries=1, max_update_ratio=0, server_lr=2.0)
    assert not list((tmp_path / "run/checkpoints").glob("round-*"))


# --- finite but absurd ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_an_absurd_update_is_dropped_and_changes_nothing_else(tmp_path: Path, method: str) -> None:
    alone = Wire(tmp_path / "without")
    alone.away = {"south"}
    without = served(alone, tmp_path / "without/run", method, rounds=1)
    result = served(Lying(tmp_path / "with", scaled(1e20)), tmp_path / "with/run", method, rounds=1)
    assert [r["dropped"] for r in result.records] == [1]
    assert "client south dropped: its update of" in log(tmp_path / "with/run")
    assert result.records[0]["accuracy"] == without.records[0]["accuracy"]


def test_a_part_that_is_no_model_is_judged_too(tmp_path: Path) -> None:
    def shifted(answer: dict[str, Any]) -> dict[str, Any]:
        return {"message": answer["message"] | {"c_change": answer["message"]["c_change"] + 1e3}}

    result = served(Lying(tmp_path, shifted), tmp_path / "run", "scaffold", rounds=2)
    assert [r["dropped"] for r in result.records] == [1, 1]
    assert "its update of c_change has the norm" in log(tmp_path / "run")


def test_rounds_with_few_answers_are_judged_by_those_before(tmp_path: Path) -> None:
    class Late(Lying):
        def answer(self, name: str, request: Tree) -> Any:
            body = request["request"]
            self.change = scaled(1e20) if body and body.get("round", 0) == 2 else scaled(1)
            return super().answer(name, request)

    wire = Late(tmp_path, scaled(1))

    class Leaving(Callback):
        def on_round_end(self, run: RunView, record: RoundRecord) -> None:
            wire.away = {"west"}

    result = served(wire, tmp_path / "run", rounds=2, callbacks=[Leaving()])
    assert [(r["clients"], r["dropped"]) for r in result.records] == [(3, 0), (2, 1)]


def test_the_judgement_can_be_turned_off(tmp_path: Path) -> None:
    wire = Lying(tmp_path, scaled(1e6))
    assert served(wire, tmp_path / "run", rounds=1, max_update_ratio=0).records[0]["dropped"] == 0


def test_where_most_did_not_move_nobody_is_judged() -> None:
    sent = {"model": torch.ones(3)}
    judge = Judge(100, sent, {})
    still, moved = judge.norms({"model": torch.ones(3)}), judge.norms({"model": torch.full((3,), 2.0)})
    assert still == {"model": 0.0}
    assert judge.faults([still, still, moved]) == [None, None, None]


def test_a_norm_that_overflows_is_a_fault_by_itself() -> None:
    judge = Judge(0, {}, {})
    norms = judge.norms({"logits": torch.full((3,), 1e300, dtype=torch.float64), "counts": torch.ones(2).long()})
    assert judge.faults([norms]) == ["logits is so large that its norm overflows"]


def test_many_answers_wait_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "_IN_MEMORY", 50)
    held = AnswerBuffer()
    for k in range(5):
        held.add({"model": torch.full((4,), float(k))})
    assert sum(isinstance(answer, dict) for answer in held._answers) == 3
    assert [answer["model"][0].item() for answer in held] == [0, 1, 2, 3, 4]


def test_a_simulation_is_not_judged(tmp_path: Path) -> None:
    attacked = SETTINGS | {"attack": "scale", "attackers": 1, "attack_scale": 1e6, "rounds": 1}
    result = fedstill.run("fedavg", **attacked, engine="inline")
    assert result.records[0]["dropped"] == 0


# --- what sites claim -------------------------------------------------------------------------------------------------


class Claiming(Wire):
    """A site says that it has more than it has, in all its answers alike."""

    most = 10**8

    def answer(self, name: str, request: Tree) -> Any:
        answer = super().answer(name, request)
        if name == "south" and "tests" in answer:
            return {"samples": [self.most], "tests": [self.most]}
        if name == "south" and "samples" in answer:
            return answer | {"samples": self.most}
        return answer | {"hits": [self.most]} if name == "south" and "hits" in answer else answer


def weights_of(method: str, wire: Wire, out: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> dict[int, int]:
    seen: dict[int, int] = {}
    plain = FedAvg.aggregate

    def watched(self: FedAvg, server: Server, uplinks: Iterator[Uplink]) -> None:
        def pass_on() -> Iterator[Uplink]:
            for up in uplinks:
                seen[up.client] = up.samples
                yield up

        plain(self, server, pass_on())

    monkeypatch.setattr(FedAvg, "aggregate", watched)
    served(wire, out, method, rounds=1, **settings)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("share", "largest"), [(0.0, 0.75), (0.5, 0.5), (0.4, 0.4)])
def test_no_site_counts_more_than_its_share_whatever_it_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, largest: float
) -> None:
    seen = weights_of("fedavg", Claiming(tmp_path), tmp_path / "run", monkeypatch, max_share=share)
    assert largest - 0.02 < seen[1] / sum(seen.values()) <= largest + 1e-9
    assert log(tmp_path / "run").count("south says that it has 100000000 samples, and counts as if it had") == 1


@pytest.mark.slow
def test_claimed_tests_take_no_memory_and_no_more_than_a_share(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        result = served(Claiming(tmp_path), tmp_path / "run", rounds=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10**8, "numpy's arrays are traced"
    assert result.records[0]["amp"] < 0.9, "the site that is always right is three quarters of it at most"


def test_equal_sites_count_as_they_are() -> None:
    for counts in ([5, 5, 5], [100, 1], [7], [0, 0], [3, 3, 2, 2]):
        assert capped(np.array(counts), 0).tolist() == counts
    assert capped(np.array([10**8, 10**8, 100, 100, 100]), 0.3).tolist() == [225, 225, 100, 100, 100]
    assert capped(np.array([10, 20, 30]), 0.1).tolist() == [10, 10, 10], "no less than an equal share"
    assert capped(np.array([1, 2, 10**8]), 1).tolist() == [1, 2, 10**8]


@pytest.mark.slow
def test_a_site_holds_what_it_held_when_it_joined_also_after_a_restart(tmp_path: Path) -> None:
    served(Wire(tmp_path), tmp_path / "run", rounds=1)
    more = Lying(tmp_path, lambda a: {"samples": [a["samples"][0] + 5]}, kind="poll")
    result = served(more, tmp_path / "run", rounds=2)
    assert [r["clients"] for r in result.records] == [3, 2]
    assert "south cannot take part: it had 84 samples and 21 tests when it joined, and has 89" in log(tmp_path / "run")
    config = resolve(SETTINGS | {"rounds": 3})
    terms = Terms(timeout=5, recount=("south",))
    serve(config, NAMES, more, tmp_path / "run", terms=terms, pause=lambda missing: False)
    assert "south has 89 samples" in log(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [("local_accuracy", -5.0), ("train_loss", 1e308), ("train_loss", math.nan)])
def test_a_metric_that_cannot_be_is_missing(tmp_path: Path, name: str, value: float) -> None:
    wire = Lying(tmp_path, lambda a: {"metrics": a["metrics"] | {name: value, "other": 1.0}})
    plain = served(Wire(tmp_path / "plain"), tmp_path / "plain/run", rounds=1)
    result = served(wire, tmp_path / "run", rounds=1)
    assert result.records[0]["dropped"] == 0
    assert f"south reports a {name} of" in log(tmp_path / "run")
    assert 0 <= result.records[0][name] < 10
    assert weights(tmp_path / "run") == weights(tmp_path / "plain/run")
    assert plain.records[0]["accuracy"] == result.records[0]["accuracy"]


def test_more_hits_than_tests_leave_a_site_out_of_the_evaluation(tmp_path: Path) -> None:
    result = served(Lying(tmp_path, lambda a: {"hits": [10**6]}, kind="Score"), tmp_path / "run", rounds=1)
    assert result.records[0]["untested"] == ["south"]
    assert "south says it is right 1000000 times in 21 tests" in log(tmp_path / "run")


# --- a site that hangs ------------------------------------------------------------------------------------------------


class Hung(Wire):
    """One site never answers training or tests; time passes only while it is waited for."""

    def __init__(self, folder: Path, clock: list[float]) -> None:
        super().__init__(folder)
        self.clock = clock
        self.waited: list[float] = []

    def send_requests(
        self, requests: Mapping[str, Tree], *, until: Any = None, **how: Any
    ) -> Iterator[tuple[str, Any]]:
        if until is None:
            yield from super().send_requests(requests, **how)
            return
        yield from super().send_requests({k: v for k, v in requests.items() if k != "south"}, **how)
        if "south" in requests:
            began, self.clock[0] = self.clock[0], min(until(), self.clock[0] + how["timeout"])
            self.waited.append(self.clock[0] - began)
            yield "south", Silence("no answer")


def hung(out: Path, monkeypatch: pytest.MonkeyPatch, wait_after: float | None, **settings: Any) -> tuple[Hung, Any]:
    clock = [0.0]
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    wire, terms = Hung(out, clock), Terms(timeout=600, wait_after=wait_after)
    config = resolve(SETTINGS | {"rounds": 2} | settings)
    return wire, serve(config, NAMES, wire, out / "run", terms=terms, pause=lambda missing: False)


def test_a_hung_site_holds_a_round_and_an_evaluation_no_longer_than_the_wait_after_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, result = hung(tmp_path, monkeypatch, 7.0)
    assert wire.waited == [7.0] * 4
    assert [r["left_out"] for r in result.records] == [["south"]] * 2
    assert [r["untested"] for r in result.records] == [["south"]] * 2


def test_without_a_wait_of_its_own_a_hung_site_has_ten_times_as_long_as_the_others_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, _ = hung(tmp_path, monkeypatch, None)
    assert wire.waited == [30.0] * 4, "of training and of testing"


def test_a_round_waits_for_as_many_as_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fedstill.FedstillError, match="given up"):
        hung(tmp_path, monkeypatch, 7.0, min_clients=3, round_retries=0)


def test_sites_are_waited_for_ten_times_the_median_of_the_others() -> None:
    waits = waiting.ResponseTimes(None)
    for name, seconds in {"quick": 1.0, "usual": 8.0, "slow": 9.0, "slowest": 400.0}.items():
        waits.add("Train", name, seconds)
    found = {name: waits.allowance("Train", name, 5) for name in ("quick", "usual", "slowest", "silent")}
    assert found == {"quick": 90.0, "usual": 90.0, "slowest": 80.0, "silent": 90.0}
    assert waits.allowance("Score", "quick", 5) == math.inf, "of which nothing is known yet"
    assert waits.allowance("Train", "silent", 8) == math.inf, "four of eight are not most"
    waits.finish("Train", ["silent"])
    assert waits.allowance("Train", "silent", 8) == 90.0, "it had its time"


def test_of_two_sites_the_first_is_no_measure_for_the_other_until_both_were_asked_once() -> None:
    waits = waiting.ResponseTimes(None)
    waits.add("Train", "quick", 1.0)
    assert waits.allowance("Train", "slow", 2) == math.inf
    waits.add("Train", "slow", 500.0)
    waits.finish("Train", ["quick", "slow"])
    assert waits.allowance("Train", "slow", 2) == 30.0
    assert waits.allowance("Train", "quick", 2) == 5000.0


def test_sites_with_a_slower_network_are_measured_by_each_other() -> None:
    """Else they would be left out of every round."""
    slow = {"deep", "deeper", "deepest"}
    waits = waiting.ResponseTimes(None, lambda site: site in slow)
    sites = ["a", "b", "c", "d", "deep", "deeper"]
    first = waiting.RequestDeadline(waits, "Train", sites, least=1)
    arriving = first.watch((site, {}) for site in sites)
    assert [next(arriving)[0] for _ in range(4)] == sites[:4]
    assert first.moment() == math.inf, "none of them has answered yet"
    for site, seconds in {"deep": 60.0, "deeper": 70.0, "b": 4.0, "c": 4.0}.items():
        waits.add("Train", site, seconds)
    waits.finish("Train", sites)
    assert waits.allowance("Train", "deeper", 2) == 600.0
    assert waits.allowance("Train", "a", 4) == 40.0
    alone = waiting.ResponseTimes(None, lambda site: site == "a")
    alone.add("Train", "b", 5.0)
    alone.finish("Train", ["a"])
    assert alone.allowance("Train", "a", 1) == 50.0, "there is nobody like it"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1))
def test_the_median_of_the_others_is_that_of_their_last_times(answers: list[tuple[int, int]]) -> None:
    waits, last = waiting.ResponseTimes(None), dict[str, float]()
    for number, times in answers:
        waits.add("Train", str(number), 10.0 * times)
        last[str(number)] = 10.0 * times
    waits.finish("Train", map(str, range(7)))
    for site in map(str, range(7)):
        others = [seconds for who, seconds in last.items() if who != site]
        expected = max(30.0, 10 * statistics.median_high(others)) if others else math.inf
        assert waits.allowance("Train", site, 7) == expected


def test_a_site_that_answers_as_late_as_it_may_gets_no_more_time_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    held = held_by_a_late_site(monkeypatch, rounds=6)
    assert held == pytest.approx([31.9] * 6), "2 s of the others, and 30 s from then on"


def held_by_a_late_site(monkeypatch: pytest.MonkeyPatch, rounds: int) -> list[float]:
    """How long each round takes if five sites answer after 2 s, and one at the last moment; `--timeout` is 600."""
    clock, held, sites = [0.0], [], ["a", "b", "c", "d", "e", "late"]
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    times = waiting.ResponseTimes(None)
    for _ in range(rounds):
        start = clock[0]
        deadline = waiting.RequestDeadline(times, "Train", sites, least=1)

        def answers(start: float = start, deadline: Any = deadline) -> Iterator[tuple[str, Any]]:
            clock[0] = start + 2
            yield from ((site, {}) for site in sites[:-1])
            clock[0] = min(deadline.moment(), start + 600) - 0.1
            yield "late", {}

        list(deadline.watch(answers()))
        held.append(clock[0] - start)
    return held


def test_the_link_stops_waiting_when_it_is_over() -> None:
    pytest.importorskip("flwr")
    from fedstill.flower.link import Failure, _arriving, _RequestBatch

    answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    answers.put(("north", {"fine": 1}))
    question = _RequestBatch("q", False, 600.0, time.monotonic() + 600, threading.Event())
    seen = set[str]()
    arriving = _arriving({"north", "south"}, answers, question, lambda: 0.0 if seen else math.inf)
    for site, answer in arriving:
        seen.add(site)
        assert site == "north" or (isinstance(answer, Failure) and "--wait-after" in answer.reason)
    assert seen == {"north", "south"}
    assert question.closed.is_set(), "nobody works for it any longer"


class Unwritable(Wire):
    """Its answer has a key that no message may have."""

    def send_requests(self, requests: Mapping[str, Tree], **more: Any) -> Iterator[tuple[str, Any]]:
        yield "lagos", {"samples": 1, "$tensor": "x"}


def test_an_answer_that_cannot_be_recorded_is_a_failure_of_its_site(tmp_path: Path) -> None:
    link = RecordedLink(Unwritable(tmp_path), tmp_path / "received.jsonl")
    ((name, answer),) = link.send_requests({"lagos": {}}, timeout=1.0)
    assert (name, failure_reason(answer)) == ("lagos", "its answer cannot be recorded")
    assert "its answer cannot be recorded" in (tmp_path / "received.jsonl").read_text()


@pytest.mark.parametrize(("samples", "found"), [("secret", "no number of"), (True, "no number of"), (7, "7")])
def test_of_a_wrong_number_of_samples_only_a_number_is_repeated(samples: Any, found: str) -> None:
    failure = _client_answer({"samples": samples}, 5, 5, "lagos")["failure"]
    assert failure == f"it says that it trained on {found} samples, and it has 5"
