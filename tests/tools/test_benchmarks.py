"""What the benchmarks make of what they measure."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks import methods, profile
from benchmarks.__main__ import compared
from benchmarks.engine import SMALL_CLIENTS, in_turn, without_order
from benchmarks.methods import CASES, SERVER_CASES, Case, with_pool
from benchmarks.peers.environments import Unavailable
from benchmarks.peers.job import Job
from benchmarks.profile import profiled
from benchmarks.table import Row, shown, write
from benchmarks.work import Work
from fedstill.methods import registry


@pytest.mark.parametrize(
    ("ratio", "at_least", "at_most", "reached"),
    [
        (1.3, 1.2, None, True),
        (1.199, 1.2, None, False),
        (1.03, None, 1.03, True),
        (1.04, None, 1.03, False),
        (1.0, None, None, None),
        (None, 1.0, None, None),
    ],
)
def test_a_goal_is_reached_or_missed(
    ratio: float | None, at_least: float | None, at_most: float | None, reached: bool | None
) -> None:
    row = Row("part", "what", "here", "beside", ratio, at_least, at_most, note="note")
    assert row.reached is reached
    assert row.cells()[-1] == ("missed; note" if reached is False else "note")


def test_all_rows_are_one_table(tmp_path: Path) -> None:
    rows = [Row("a", "first", "1 s"), Row("b", "second", "2 s", "4 s", 2.0, at_least=1.5)]
    write(rows, tmp_path / "new" / "all.md")
    lines = (tmp_path / "new" / "all.md").read_text().splitlines()
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert "2.000 | ≥ 1.5" in lines[-1]
    assert shown(rows).row_count == 2


def test_what_several_turns_took_is_kept_and_who_never_runs_is_left_out() -> None:
    taken = {"slow": iter([3.0, 2.0, 4.0]), "once": iter([5.0])}
    said: list[str] = []

    def once() -> float:
        if (seconds := next(taken["once"], None)) is None:
            raise Unavailable("once: failed")
        return seconds

    def never() -> float:
        raise Unavailable("never: not installed")

    runners = {"slow": lambda: next(taken["slow"]), "once": once, "never": never}
    assert in_turn(runners, 3, float, said.append) == {"slow": [3.0, 2.0, 4.0], "once": [5.0, math.inf, math.inf]}
    assert said == ["never: not installed", "once: failed", "once: failed"]


def test_the_best_turns_are_compared() -> None:
    turns = {"fedstill": [2.0, 1.0, 4.0], "peer": [6.0, 4.0, math.inf]}
    (row,) = compared("runs", "all", turns, {"peer": 3.5}, lambda seconds: f"{seconds:g} s")
    assert (row.here, row.beside, row.ratio, row.reached) == ("1 s", "4 s", 4.0, True)
    assert row.note == "turn by turn 3.00 to 4.00"


def test_the_check_of_peers_does_not_depend_on_the_order_of_samples() -> None:
    one, several = without_order(SMALL_CLIENTS)
    assert (one.batches, several.batches) == (1, 3)
    x, y = several.data()
    for client in range(several.clients):
        held = several.samples_of(client)
        assert len(torch.unique(x[held], dim=0)) == len(torch.unique(y[held])) == 1
    assert len(torch.unique(one.data()[0], dim=0)) == one.clients * one.samples
    job = Job(several, 2, "here.pt")
    assert Job.from_json(job.to_json()) == job


def test_every_method_and_modifier_is_timed_against_fedavg() -> None:
    timed = {part for case in (*CASES, *SERVER_CASES) for part in case.method.split("+")}
    assert timed == {*registry.names(), *registry.modifiers()}


def test_rounds_that_are_timed_have_as_many_clients_as_each_modifier_needs() -> None:
    modified = [case for case in CASES if "+" in case.method]
    fewest = max(registry.make(case.method, case.settings).fewest_clients for case in modified)
    assert 1 < fewest <= min(methods.WORK.cohort, profile.WORK.cohort)


def test_a_profile_tells_kernels_from_what_is_around_them() -> None:
    work = Work("small", "mlp", (1, 32, 32), 2, 100, 2, 50, 1)
    found = profiled(Case("fedavg", {}), work, with_pool(work))
    assert 0 < found.outside < found.seconds
    assert found.most
