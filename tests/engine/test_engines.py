"""The same bits whatever the engine, the number of workers, or the moment of a kill."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.building.topology import draw_cohort, with_data
from fedstill.core.store import Store
from fedstill.core.tree import Message, nbytes
from fedstill.engine.process import Processes
from fedstill.engine.worker import Score, Train, Worker
from fedstill.methods.base import Server
from fedstill.running.directory import RunDirectory
from support.engines import Remembering, Suicidal, all_client_states, command, lines, rounds_written
from support.preloaded import Process, start_python
from support.runs import SMALL, RunSmall, numbers, weights


@pytest.mark.parametrize(("engine", "workers"), [("process", 1), ("process", 2), ("process", 4)])
def test_same_bits_with_any_number_of_workers(run_small: RunSmall, engine: str, workers: int) -> None:
    inline = run_small(Remembering(), participation=1.0)
    other = run_small(Remembering(), participation=1.0, engine=engine, workers=workers)
    assert torch.equal(weights(inline), weights(other))
    assert numbers(inline) == numbers(other)


def test_another_seed_gives_other_bits(run_small: RunSmall) -> None:
    assert not torch.equal(weights(run_small(seed=1)), weights(run_small(seed=2)))


def test_the_global_random_state_of_the_caller_changes_nothing(run_small: RunSmall) -> None:
    torch.manual_seed(1)
    first = run_small(rounds=1)
    torch.manual_seed(2)
    assert torch.equal(weights(first), weights(run_small(rounds=1)))


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_gives_the_same_bits(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def started(words: list[str]) -> Process:
        return start_python(*words[1:], cwd=tmp_path, log=tmp_path / "log.txt")

    assert started(command(tmp_path, whole)).wait() == 0
    seconds = [json.loads(line)["seconds"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
    a_round = min(seconds)  # the next rounds take at least about as long, whatever else the machine does

    rng, words = random.Random(0), command(tmp_path, broken)
    resume = [sys.executable, "-m", "fedstill", "resume", str(broken)]
    for kills in range(1, 5):  # after at least so many rounds, at a moment within the next ones
        process = started(words)
        while process.poll() is None and rounds_written(broken) < kills:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 1.5 * a_round))
        assert process.poll() is None, "the run ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        words = resume
    assert started(resume).wait() == 0

    assert lines(broken) == lines(whole)
    ours, theirs = load_file(broken / "model.safetensors"), load_file(whole / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    states, expected = all_client_states(broken), all_client_states(whole)
    assert states.keys() == expected.keys()
    for k, state in expected.items():
        assert torch.equal(states[k]["past"], state["past"])
        assert states[k]["rounds"] == state["rounds"]


def test_resumed_after_every_single_round_gives_the_same_bits(run_small: RunSmall, tmp_path: Path) -> None:
    whole = run_small(Remembering(), rounds=4)
    path = tmp_path / "run"
    run_small(Remembering(), rounds=1, out=path)
    for rounds in (2, 3, 4):
        last = fedstill.resume(path, method=Remembering(), rounds=rounds)
    assert torch.equal(weights(last), weights(whole))
    assert numbers(last) == numbers(whole)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_is_replaced_and_the_bits_stay_the_same(
    run_small: RunSmall, tmp_path: Path, by: signal.Signals
) -> None:
    undisturbed = run_small(participation=1.0)
    flag = tmp_path / "died"
    survived = run_small(Suicidal(flag=str(flag), by=by), participation=1.0, engine="process", workers=2)
    assert flag.exists()
    assert torch.equal(weights(survived), weights(undisturbed))
    assert numbers(survived) == numbers(undisturbed)


@dataclass(frozen=True)
class Barrier(fedstill.FedAvg):
    """Clients who each wait until another one trains at the same time, in another process."""

    folder: str = ""

    def uplink(self, client: fedstill.Client) -> Message:
        here = Path(self.folder) / f"{client.round}"
        here.mkdir(exist_ok=True)
        (here / f"{os.getpid()}").touch()
        deadline = time.monotonic() + 200
        while len(list(here.iterdir())) < 2:
            assert time.monotonic() < deadline, "alone"
            time.sleep(0.01)
        return super().uplink(client)


def test_two_clients_keep_two_workers_busy(run_small: RunSmall, tmp_path: Path) -> None:
    run_small(Barrier(folder=str(tmp_path)), clients=2, participation=1.0, rounds=2, engine="process", workers=2)
    assert {len(list((tmp_path / round_).iterdir())) for round_ in ("1", "2")} == {2}


def test_the_last_client_of_a_round_goes_to_the_worker_that_is_free(tmp_path: Path) -> None:
    """Three clients, the first of which takes until the others are done: one worker has it, the other has both."""
    given: list[tuple[int, int]] = []

    class Noted(Processes):
        def _send(self, handle: Any, todo: Any, *others: Any) -> bool:
            given.append((handle.process.pid, todo[0]))
            return super()._send(handle, todo, *others)

    setup = prepare(resolve({**SMALL, "clients": 3}))
    worker = Worker(setup.task, setup.federation, Slow(folder=str(tmp_path)), Store(tmp_path / "clients"))
    with Noted(worker, 2) as engine:
        answers = list(engine.run([Train(k, 1) for k in range(3)], {"model": setup.task.initial}))
    assert len(answers) == 3
    by_place = {place: pid for pid, place in given}
    assert by_place[0] != by_place[1] == by_place[2]


def test_a_worker_is_sent_the_weights_once_a_round_however_many_clients_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    send = Connection.send_bytes

    def noted(self: Any, data: bytes) -> None:
        sent.append(len(data))
        send(self, data)

    monkeypatch.setattr(Connection, "send_bytes", noted)
    setup = prepare(resolve({**SMALL, "clients": 6}))
    down = {"model": setup.task.initial}
    worker = Worker(setup.task, setup.federation, fedstill.FedAvg(), Store(tmp_path / "clients"))
    with Processes(worker, 2) as engine:
        for round_ in (1, 2):
            assert len(list(engine.run([Train(k, round_) for k in range(6)], down))) == 6
    assert sum(size >= nbytes(down) for size in sent) == 2 * 2


@dataclass(frozen=True)
class Slow(fedstill.FedAvg):
    """Client 0 answers after the other two."""

    folder: str = ""

    def uplink(self, client: fedstill.Client) -> Message:
        done = Path(self.folder)
        deadline = time.monotonic() + 200
        while client.id == 0 and len(list(done.glob("done*"))) < 2:
            assert time.monotonic() < deadline, "nobody else was asked"
            time.sleep(0.01)
        (done / f"done {client.id}").touch()
        return super().uplink(client)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 4])
def test_workers_that_die_between_rounds_are_replaced(tmp_path: Path, workers: int) -> None:
    setup = prepare(resolve({**SMALL, "clients": 4}))
    worker = Worker(setup.task, setup.federation, fedstill.FedAvg(), Store(tmp_path / "clients"))
    with Processes(worker, workers) as engine:
        for round_ in (1, 2):
            assert len(list(engine.run([Train(k, round_) for k in range(4)], {"model": setup.task.initial}))) == 4
            for handle in engine._handles:
                handle.process.kill()
                handle.process.join()
        assert engine.deaths == workers


def test_who_is_hired_while_requests_are_dealt_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two workers dies between the look at who is alive and its first request of the round."""
    setup = prepare(resolve({**SMALL, "clients": 2}))
    method = Barrier(folder=str(tmp_path))
    worker = Worker(setup.task, setup.federation, method, Store(tmp_path / "clients"))
    with Processes(worker, 2) as engine:
        for round_ in (1, 2):
            assert len(list(engine.run([Train(k, round_) for k in range(2)], {"model": setup.task.initial}))) == 2
            first = engine._handles[0]
            first.process.kill()
            first.process.join()
            monkeypatch.setattr(first.process, "is_alive", lambda: True)
        assert engine.deaths == 1


def tiny_network() -> nn.Module:
    return TinyNet(nn.Flatten(), nn.Linear(16 * 16, 10))


class TinyNet(nn.Sequential):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "advice"),
    [
        (signal.SIGSEGV, "--engine inline"),
        (signal.SIGABRT, "--engine inline"),
        (signal.SIGKILL, "memory runs out: fewer workers"),
    ],
)
def test_work_that_always_kills_its_worker_ends_with_whose_it_was_and_goes_on_when_it_is_mended(
    run_small: RunSmall, tmp_path: Path, by: signal.Signals, advice: str
) -> None:
    deadly, out = Suicidal(flag=str(tmp_path / "died"), always=True, by=int(by)), tmp_path / "run"
    settings: dict[str, Any] = {"participation": 1.0, "model": tiny_network, "engine": "process", "workers": 2}
    with pytest.raises(fedstill.FedstillError) as caught:
        run_small(deadly, out=out, **settings)
    said = str(caught.value)
    assert said.startswith(
        f"client 3 in round 2, network <tiny_network> (TinyNet), ended its worker process 2 times ({by.name}); "
    )
    assert advice in said
    assert "\n" not in said
    assert f"ended its worker process ({by.name}); it is tried once more" in (out / "log.txt").read_text()

    resumed = fedstill.resume(out, method=fedstill.FedAvg(), model=tiny_network)
    undisturbed = run_small(fedstill.FedAvg(), **settings)
    assert torch.equal(weights(resumed), weights(undisturbed))
    assert numbers(resumed) == numbers(undisturbed)


def test_clients_that_are_trained_at_once_are_all_named(tmp_path: Path) -> None:
    setup = prepare(resolve(SMALL))
    worker = Worker(setup.task, setup.federation, fedstill.FedAvg(), Store(tmp_path), together=3)
    assert worker.describe([Train(1, 7), Train(4, 7)]) == "clients 1, 4 in round 7, network cnn (Stacked),"
    assert worker.describe([Score("test", 0, 50)]) == "the evaluation of samples 0 to 49, network cnn (Stacked),"


def test_a_worker_that_answered_before_it_died_is_not_blamed_for_that(tmp_path: Path) -> None:
    """It dies between its answer and the next request: the answer counts, and nobody is to blame."""
    setup = prepare(resolve({**SMALL, "clients": 3, "model": "mlp", "model_options": {"hidden": [8]}}))
    worker = Worker(setup.task, setup.federation, fedstill.FedAvg(), Store(tmp_path / "clients"))
    blamed: list[list[int]] = []

    class Fatal(Processes):
        def _send(self, handle: Any, todo: Any, *others: Any) -> bool:
            if todo[0] and handle.assigned and not blamed:
                handle.pipe.close()  # it ends once it has answered
                handle.process.join()
            return super()._send(handle, todo, *others)

        def _replace(self, handle: Any, *others: Any) -> None:
            blamed.append(list(handle.assigned))
            super()._replace(handle, *others)

    with Fatal(worker, 1) as engine:
        answers = list(engine.run([Train(k, 1) for k in range(3)], {"model": setup.task.initial}))
    assert len(answers) == 3
    assert blamed == [[]]
    assert engine.deaths == 1


def test_no_worker_outlives_the_engine(tmp_path: Path) -> None:
    setup = prepare(resolve({**SMALL, "clients": 4}))
    worker = Worker(setup.task, setup.federation, setup.method, RunDirectory(tmp_path).client_store)
    server = Server(setup.task, setup.federation.sizes, RunDirectory(tmp_path).server_store)
    with Processes(worker, 2) as engine:
        answers = engine.run([Train(k, 1) for k in range(4)], {"model": server.model})
        next(answers)
        processes = [handle.process for handle in engine._handles]
        assert all(p.is_alive() for p in processes)
    assert not any(p.is_alive() for p in processes)


def test_the_cohort_is_the_same_for_every_method_and_largest_first() -> None:
    federation = fedstill.federate(fedstill.load_dataset("fashion-mini"), clients=20, alpha=0.1)
    able = with_data(federation.sizes, np.arange(20))
    cohort = draw_cohort(federation.sizes, able, 4, seed=5, round_=3)
    assert cohort == draw_cohort(federation.sizes, able, 4, seed=5, round_=3)
    assert len(set(cohort)) == 4
    sizes = federation.sizes[cohort]
    assert (sizes[:-1] >= sizes[1:]).all()
    assert cohort != draw_cohort(federation.sizes, able, 4, seed=5, round_=4)
