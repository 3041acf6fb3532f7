"""`fedstill rollback`: a run forgets its last rounds, and goes on with the bits of one that never had them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import fedstill
from fedstill.core.tree import Tree
from fedstill.deployment import region as regional
from fedstill.metrics.records import RoundRecord
from fedstill.running.callbacks import Callback, RunView
from fedstill.running.directory import RunDirectory
from fedstill.running.rollback import rollback
from support import commandline, regions
from support.runs import SMALL
from support.sites import Wire, alone, served, weights

QUICK: dict[str, Any] = SMALL | {"rounds": 5, "keep_checkpoints": 4, "save_models": 1}


def rounds(path: Path) -> list[int]:
    return [record["round"] for record in RunDirectory.open(path, lock=False).records()]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scaffold", "fedavg+t1"])
@pytest.mark.parametrize("to", [0, 2, 4])
def test_a_run_that_went_back_comes_to_the_same_bits(tmp_path: Path, method: str, to: int) -> None:
    whole = fedstill.run(method, **QUICK, out=tmp_path / "run")
    before = weights(tmp_path / "run")
    assert rollback(tmp_path / "run", to) == 5 - to
    assert rounds(tmp_path / "run") == list(range(1, to + 1))
    assert not (tmp_path / "run/summary.json").exists()
    assert len(list((tmp_path / "run/models").iterdir())) == to
    assert not [p for p in (tmp_path / "run/checkpoints").rglob("*.safetensors") if _round(p) > to]
    again = fedstill.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == before
    assert [r["loss"] for r in again.records] == [r["loss"] for r in whole.records]


def _round(path: Path) -> int:
    return int(path.stem.removeprefix("round-").split(".")[-1])


def test_only_rounds_that_are_kept_can_be_gone_back_to(tmp_path: Path) -> None:
    fedstill.run("fedavg", **QUICK | {"keep_checkpoints": 2}, out=tmp_path / "run")
    with pytest.raises(fedstill.SettingError, match=r"--to 3: .* can go back to 0, 4, 5, where 0 is the start"):
        rollback(tmp_path / "run", 3)
    path = tmp_path / "run/checkpoints/round-000004.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(fedstill.FedstillError, match="round 4 is damaged"):
        rollback(tmp_path / "run", 4)
    assert rounds(tmp_path / "run") == [1, 2, 3, 4, 5]
    assert (tmp_path / "run/summary.json").exists(), "nothing was changed"


def test_a_run_that_is_running_does_not_go_back(tmp_path: Path) -> None:
    fedstill.run("fedavg", **QUICK | {"rounds": 2}, out=tmp_path / "run")
    running = RunDirectory.open(tmp_path / "run")
    with pytest.raises(fedstill.FedstillError, match="in use by another process"):
        rollback(tmp_path / "run", 1)
    running.release()


def test_the_command_says_how_to_go_on(tmp_path: Path) -> None:
    fedstill.run("fedavg", **QUICK | {"rounds": 2}, out=tmp_path / "run")
    answer = commandline.fedstill("rollback", tmp_path / "run", "--to", 1)
    said = f"1 rounds are forgotten; continue after round 1 with: fedstill resume {tmp_path / 'run'}"
    assert said in " ".join(answer.out.split())


class Repeating(Wire):
    """Sites repeat their last answer to a question of the same name; `poison` spoils what they answer now."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.last: dict[str, tuple[str, Any]] = {}
        self.poison = False

    def send_requests(
        self, requests: Mapping[str, Tree], *, name: str | None = None, **how: Any
    ) -> Iterator[tuple[str, Any]]:
        for site in requests:
            if name and self.last.get(site, ("", None))[0] == name:
                yield site, self.last[site][1]
                continue
            for _, answer in super().send_requests({site: requests[site]}, **how):
                if self.poison and "message" in answer:
                    answer["message"]["model"] = answer["message"]["model"] * 1.01
                if name:
                    self.last[site] = name, answer
                yield site, answer


@pytest.mark.slow
@pytest.mark.parametrize("to", [0, 2])
def test_sites_forget_with_the_server(tmp_path: Path, to: int) -> None:
    settings: dict[str, Any] = {"participation": 0.67, "keep_checkpoints": 4}
    wire = Repeating(tmp_path)
    if to:
        served(wire, tmp_path / "run", "scaffold", rounds=to, **settings)
    wire.poison = True
    served(wire, tmp_path / "run", "scaffold", rounds=5, **settings)
    rollback(tmp_path / "run", to)
    wire.poison = False
    result = served(wire, tmp_path / "run", "scaffold", rounds=5, **settings)
    assert [r["round"] for r in result.records] == [1, 2, 3, 4, 5]
    alone(tmp_path / "alone", "scaffold", rounds=5, **settings)
    assert weights(tmp_path / "run") == weights(tmp_path / "alone")


@pytest.mark.slow
def test_a_site_that_is_away_when_a_round_is_repeated_does_not_go_on_from_the_forgotten_one(tmp_path: Path) -> None:
    def with_a_gap(folder: Path, *, detour: bool) -> bytes:
        wire = Wire(folder)

        class Coming(Callback):
            def on_round_end(self, run: RunView, record: RoundRecord) -> None:
                wire.away = set() if record["round"] == 2 else wire.away

        served(wire, folder / "run", "scaffold", rounds=1)
        if detour:
            served(wire, folder / "run", "scaffold", rounds=2)
            rollback(folder / "run", 1)
        wire.away = {"south"}
        served(wire, folder / "run", "scaffold", rounds=4, callbacks=[Coming()])
        return weights(folder / "run")

    assert with_a_gap(tmp_path / "a", detour=True) == with_a_gap(tmp_path / "b", detour=False)


@pytest.mark.slow
def test_back_at_the_start_the_settings_may_be_others(tmp_path: Path) -> None:
    served(Wire(tmp_path), tmp_path / "run", rounds=1, lr=0.5)
    rollback(tmp_path / "run", 0)
    served(Wire(tmp_path), tmp_path / "run", rounds=1, lr=0.1)
    alone(tmp_path / "alone", rounds=1, lr=0.1)
    assert weights(tmp_path / "run") == weights(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("to", [0, 2])
def test_regions_forget_with_the_global_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: int) -> None:
    monkeypatch.setattr(regional, "_NEWCOMERS_TIMEOUT", 0.5)
    settings: dict[str, Any] = {"rounds": 6, "keep_checkpoints": 3}
    regions.served(regions.World(tmp_path), tmp_path / "run", "scaffold+f2l", **settings)
    rollback(tmp_path / "run", to)
    world = regions.World(tmp_path)
    regions.served(world, tmp_path / "run", "scaffold+f2l", **settings)
    trained = {body["round"] for _, body in world.sites["east"].requests if body and body["kind"] == "Train"}
    assert trained == set(range(to + 1, 7)), "what was forgotten is done again"
    regions.alone(tmp_path / "alone", "scaffold+f2l", **settings)
    assert weights(tmp_path / "run") == weights(tmp_path / "alone")
