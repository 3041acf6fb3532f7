"""One site among many is broken or hostile: the others' round goes on, or ends with what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_sites import SETTINGS, Wire, served

import fedstill
from fedstill.core.tree import Tree
from fedstill.experiment import judging, retries
from fedstill.experiment.judging import Held, Judge
from fedstill.experiment.runner import Listener
from fedstill.experiment.uplinks import RoundFailed


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


class Reports(Listener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def round_failed(self, text: str) -> None:
        self.lines.append(text)


def log(out: Path) -> str:
    return (out / "log.txt").read_text()


def scaled(factor: float) -> Change:
    return lambda a: {"message": {name: part * factor for name, part in a["message"].items()}}


# --- a round that always fails ----------------------------------------------------------------------------------------


def test_a_round_that_always_fails_is_given_up_with_the_reason_of_each_site(tmp_path: Path) -> None:
    reports = Reports()
    with pytest.raises(fedstill.FedstillError, match="round 2 failed 3 times and is given up") as error:
        served(AllFail(tmp_path), tmp_path / "run", listener=reports, round_retries=2)
    for name in ("north", "south", "west"):
        assert f"{name}: model is not finite" in str(error.value)
    assert f"fedstill rollback {tmp_path / 'run'} --to ROUND" in str(error.value)
    assert ["attempt 2 of 3" in reports.lines[0], "attempt 3 of 3" in reports.lines[1]] == [True, True]
    assert log(tmp_path / "run").count("round 2 is tried again") == 2
    result = served(Wire(tmp_path), tmp_path / "run")
    assert [r["round"] for r in result.records] == [1, 2, 3], "what was done is kept, and the run goes on"


class AllFail(Wire):
    """From round 2 on every answer is NaN, as of a model that diverged."""

    def answer(self, name: str, request: Tree) -> Any:
        answer, body = super().answer(name, request), request["request"]
        if body and body.get("round", 0) > 1:
            answer["message"] = {name: part * torch.nan for name, part in answer["message"].items()}
        return answer


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


def test_sites_that_are_not_connected_are_waited_for_without_counting(tmp_path: Path) -> None:
    class Away(Wire):
        tries = 0

        def ask(self, requests: Any, **how: Any) -> Any:
            if any(request["request"] and request["request"].get("round") == 2 for request in requests.values()):
                self.tries += 1
                self.away = set(self.sites) if self.tries < 5 else set()
            return super().ask(requests, **how)

    reports = Reports()
    result = served(Away(tmp_path), tmp_path / "run", listener=reports, round_retries=1)
    assert [r["round"] for r in result.records] == [1, 2, 3]
    assert sum("waiting for sites to connect" in line for line in reports.lines) == 3


def test_finite_answers_that_add_up_to_no_model_are_no_checkpoint(tmp_path: Path) -> None:
    """SCAFFOLD adds control variates up: two of them near the largest float are finite, and their sum is not."""

    def huge(answer: dict[str, Any]) -> dict[str, Any]:
        most = torch.finfo(torch.float32).max
        return {"message": {name: torch.full_like(part, most) for name, part in answer["message"].items()}}

    class Huge(Wire):
        def answer(self, name: str, request: Tree) -> Any:
            answer = super().answer(name, request)
            return answer | huge(answer) if "message" in answer else answer

    with pytest.raises(fedstill.FedstillError, match="no longer finite on the server"):
        served(Huge(tmp_path), tmp_path / "run", "scaffold", round_retries=1, max_update_ratio=0)
    assert not list((tmp_path / "run/checkpoints").glob("round-*"))


# --- finite but absurd ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_an_absurd_update_is_dropped_and_changes_nothing_else(tmp_path: Path, method: str) -> None:
    alone = Wire(tmp_path / "without")
    alone.away = {"south"}
    without = served(alone, tmp_path / "without/run", method, rounds=1)
    result = served(Lying(tmp_path / "with", scaled(1e20)), tmp_path / "with/run", method, rounds=1)
    assert [r["dropped"] for r in result.records] == [1]
    assert "client 1 dropped: its update of" in log(tmp_path / "with/run")
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

    class Leaving(Listener):
        def round_done(self, record: dict[str, Any]) -> None:
            wire.away = {"west"}

    result = served(wire, tmp_path / "run", rounds=2, listener=Leaving())
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
    held = Held()
    for k in range(5):
        held.add({"model": torch.full((4,), float(k))})
    assert sum(isinstance(answer, dict) for answer in held._answers) == 3
    assert [answer["model"][0].item() for answer in held] == [0, 1, 2, 3, 4]


def test_a_simulation_is_not_judged(tmp_path: Path) -> None:
    attacked = SETTINGS | {"attack": "scale", "attackers": 1, "attack_scale": 1e6, "rounds": 1}
    result = fedstill.run("fedavg", **attacked, engine="inline")
    assert result.records[0]["dropped"] == 0
