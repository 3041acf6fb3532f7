"""Regions with servers of their own, over a wire that the test controls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedstill
from fedstill.core.tree import Tree
from fedstill.data import download
from fedstill.deployment import region as regional
from fedstill.metrics.records import RoundRecord
from fedstill.running.callbacks import Callback, RunView
from support.regions import SETTINGS, SITES, Wire, World, alone, served
from support.runs import slow
from support.sites import MALFORMED, weights


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regional, "_NEWCOMERS_TIMEOUT", 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        slow("fedavg+f2l", {}),
        slow("fedavg+f2l", {"local_unit": "equal_steps", "participation": 1.0}),
        ("scaffold+f2l", {}),
        slow("fedavg+t1+f2l", {}),
        slow("fedavg", {}),
        slow("fedgkd-vote+f2l", {"buffer": 2}),
        slow("fedavg+f2l", {"data": "glosses-mini", "model": "bag", "image_size": 0, "fraction": 0.5}),
    ],
)
def test_regions_come_to_the_bits_of_a_run_on_one_machine(
    tmp_path: Path, method: str, settings: dict[str, Any]
) -> None:
    there = served(World(tmp_path), tmp_path / "served", method, **settings)
    here = alone(tmp_path / "alone", method, **settings)
    assert weights(tmp_path / "served") == weights(tmp_path / "alone")
    meetings = [record for record in here.records if "episode" in record]
    assert [r["round"] for r in there.records] == [2, 4]
    for ours, theirs in zip(meetings, there.records, strict=True):
        for name in ("round", "accuracy", "loss", "amp", "fm", "wlp"):
            assert ours[name] == theirs[name]
        assert ours["episode"]["teachers"] == theirs["episode"]["teachers"]
    assert here.summary["bytes_up"] == there.summary["bytes_up"]
    assert here.summary["bytes_down"] == there.summary["bytes_down"]


@pytest.mark.slow
def test_regions_pass_on_what_their_sites_count_by_class_and_how_classes_count(tmp_path: Path) -> None:
    names = fedstill.load_dataset("fashion-mini").classes
    settings: dict[str, Any] = {"metrics": ["balanced_accuracy", "macro_f1"], "max_share": 1.0}
    settings |= {"class_weight": {name: 1.0 + i for i, name in enumerate(names)}}
    there = served(World(tmp_path), tmp_path / "served", "fedavg+f2l", **settings)
    here = alone(tmp_path / "alone", "fedavg+f2l", **settings)
    assert weights(tmp_path / "served") == weights(tmp_path / "alone")
    assert there.records[-1]["metrics"] == pytest.approx(here.records[-1]["metrics"])


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_regional_server_that_was_killed_in_the_middle_of_an_episode_goes_on(tmp_path: Path) -> None:
    class Dying(Wire):
        def send_requests(self, requests: Mapping[str, Tree], **how: Any) -> Iterator[tuple[str, Any]]:
            kinds = [request["request"] and request["request"].get("round") for request in requests.values()]
            if 4 in kinds and not self.died:
                self.died = True
                raise Killed
            return super().send_requests(requests, **how)

        died = False

    world = World(tmp_path)
    world.sites["east"] = Dying(world.sites["east"].there)
    with pytest.raises(Killed):
        served(world, tmp_path / "served", "scaffold+f2l", rounds=6)
    rounds = next((tmp_path / "east/runs").iterdir()) / "metrics.jsonl"
    assert [json.loads(line)["round"] for line in rounds.read_text().splitlines()] == [1, 2, 3]
    again = World(tmp_path)
    result = served(again, tmp_path / "served", "scaffold+f2l", rounds=6)
    alone(tmp_path / "alone", "scaffold+f2l", rounds=6)
    assert [r["round"] for r in result.records] == [2, 4, 6]
    assert weights(tmp_path / "served") == weights(tmp_path / "alone")
    trained = [body["round"] for _, body in again.sites["east"].requests if body and body["kind"] == "Train"]
    assert min(trained) == 4, "rounds that are done are not done again"


@pytest.mark.slow
def test_a_region_that_is_away_is_left_out_and_comes_back(tmp_path: Path) -> None:
    world = World(tmp_path)

    class Leaving(Callback):
        def on_round_end(self, run: RunView, record: RoundRecord) -> None:
            world.top.away = {2: {"west"}, 4: set()}.get(record["round"], set())

    result = served(world, tmp_path / "run", "fedavg+f2l", rounds=6, callbacks=[Leaving()])
    assert [r["episode"]["regions"] for r in result.records] == [["east", "west"], ["east"], ["east", "west"]]
    assert "because they are not connected: west" in (tmp_path / "run/log.txt").read_text()


@pytest.mark.slow
def test_a_region_and_a_site_that_come_late_take_part_from_then_on(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.top.away, world.sites["east"].away = {"west"}, {"bob"}

    class Coming(Callback):
        def on_round_end(self, run: RunView, record: RoundRecord) -> None:
            world.top.away, world.sites["east"].away = set(), set()

    result = served(world, tmp_path / "run", "fedavg+f2l", callbacks=[Coming()], participation=1.0)
    assert [r["episode"]["regions"] for r in result.records] == [["east"], ["east", "west"]]
    assert [r["clients"] for r in result.records] == [4, 10]
    held = [line.split(",")[1] for line in (tmp_path / "run/clients.csv").read_text().splitlines()[1:]]
    assert "0" not in held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *MALFORMED,
        (lambda a: {"metrics": {"clients": "three"}}, "metrics are not numbers"),
    ],
)
def test_a_bad_answer_of_a_region_is_dropped(tmp_path: Path, change: Any, reason: str) -> None:
    class Lying(Wire):
        def send_requests(self, requests: Mapping[str, Tree], **how: Any) -> Iterator[tuple[str, Any]]:
            for who, answer in super().send_requests(requests, **how):
                yield who, answer | change(answer) if who == "west" and "message" in answer else answer

    world = World(tmp_path)
    world.top = Lying(world.regions)
    result = served(world, tmp_path / "run", "fedavg+f2l", rounds=2)
    assert result.records[0]["episode"]["regions"] == ["east"]
    assert reason in (tmp_path / "run/log.txt").read_text()


def test_what_regions_cannot_do_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refused(what: str, method: str = "fedavg+f2l", **settings: Any) -> None:
        with pytest.raises(fedstill.SettingError, match=what):
            served(World(tmp_path), tmp_path / "refused", method, **settings)

    one = SETTINGS["region"][0] | {"clients": [0, 1, 2, 3, 4]}
    refused("1 regions, and there are keys of 2", region=[one])
    refused("called east, south in the settings", region=[SETTINGS["region"][0], {"name": "south", "clients": [1, 2]}])
    refused("joins", region=[SETTINGS["region"][0], {"name": "west", "clients": [1, 2], "joins": 3}])
    refused("asks every client once more", "fedavg+f2l+ccvr")
    assert not (tmp_path / "refused").exists()
    other = [{"name": "east", "clients": [0, 3]}, {"name": "west", "clients": [1, 2, 4]}]
    with pytest.raises(fedstill.FedstillError, match="only 0 of 2 sites are there"):
        served(World(tmp_path), tmp_path / "keys", "fedavg+f2l", region=other)
    assert "keys of another number of sites than its region has clients" in caplog.text


def test_regions_whose_sites_have_data_of_their_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    files = {}
    for i, name in enumerate(name for names in SITES.values() for name in names):
        x = rng.integers(0, 255, (20 + 10 * i, 28, 28), dtype=np.uint8)
        files[name] = str(tmp_path / f"{name}.npz")
        np.savez(files[name], x=x, y=rng.integers(0, 10, len(x)))
    result = served(World(tmp_path, **files), tmp_path / "run", "fedavg+f2l")
    held = [line.split(",")[1] for line in (tmp_path / "run/clients.csv").read_text().splitlines()[1:]]
    assert held == ["16", "40", "48", "24", "32"]
    assert result.records[-1]["amp"] is not None


@pytest.mark.slow
def test_a_dead_site_does_not_take_its_region_out(tmp_path: Path) -> None:
    world = World(tmp_path)

    class Dying(Callback):
        def on_round_end(self, run: RunView, record: RoundRecord) -> None:
            world.sites["east"].away = {"bob"}

    result = served(world, tmp_path / "run", "fedavg+f2l", rounds=6, participation=1.0, callbacks=[Dying()])
    assert [r["episode"]["regions"] for r in result.records] == [["east", "west"]] * 3
    assert result.records[-1]["amp"] is not None


@pytest.mark.slow
def test_sites_have_no_more_time_than_the_episode(tmp_path: Path) -> None:
    class Timed(Wire):
        def send_requests(
            self, requests: Mapping[str, Tree], *, timeout: float, **how: Any
        ) -> Iterator[tuple[str, Any]]:
            if any(request["request"] and request["request"]["kind"] == "Train" for request in requests.values()):
                given.append(timeout)
            return super().send_requests(requests, timeout=timeout, **how)

    given: list[float] = []
    world = World(tmp_path)
    world.sites["east"] = Timed(world.sites["east"].there)
    served(world, tmp_path / "run", "fedavg+f2l", rounds=2)
    assert len(given) == 2
    assert given[0] <= 5 * 0.9 / 2
    assert given[1] <= 5 * 0.9


@pytest.mark.slow
def test_a_global_server_that_went_back(tmp_path: Path) -> None:
    """Its newest checkpoint is damaged, so that an episode is asked for which a region has left behind."""

    class Stop(Callback):
        def on_round_end(self, run: RunView, record: RoundRecord) -> None:
            if record["round"] == 4:
                raise Killed

    with pytest.raises(fedstill.CallbackError):
        served(World(tmp_path), tmp_path / "run", "fedavg+f2l", rounds=6, callbacks=[Stop()])
    for path in (tmp_path / "run/checkpoints").glob("round-*.safetensors"):
        path.unlink()
    (tmp_path / "run/metrics.jsonl").unlink()
    result = served(World(tmp_path), tmp_path / "run", "fedavg+f2l", rounds=6)
    assert [r["round"] for r in result.records] == [2, 4, 6]
    alone(tmp_path / "alone", "fedavg+f2l", rounds=6)
    assert weights(tmp_path / "run") == weights(tmp_path / "alone")
    rounds = next((tmp_path / "east/runs").iterdir()) / "metrics.jsonl"
    assert [json.loads(line)["round"] for line in rounds.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


def test_a_region_fetches_no_encoder_that_the_global_server_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetching: dict[str, list[bool]] = {"largest_answer": [], "make_task": []}
    for name, seen in fetching.items():
        original = getattr(regional, name)

        def noted(*given: Any, seen: list[bool] = seen, original: Any = original) -> Any:
            seen.append(download.allowed())
            return original(*given)

        monkeypatch.setattr(regional, name, noted)
    monkeypatch.delenv("FEDSTILL_OFFLINE", raising=False)
    served(World(tmp_path), tmp_path / "run", "fedavg+f2l", rounds=2)
    assert fetching == {"largest_answer": [False, False], "make_task": [False, False]}
