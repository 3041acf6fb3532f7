"""Secure aggregation of sites: the bits of the simulation, whoever dies; and what the server receives tells nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from fedstill.core import tree
from fedstill.core.errors import FedstillError
from fedstill.core.reports import Refusal, report, step_of
from fedstill.core.tree import Tree
from fedstill.deployment.audit import verify
from fedstill.deployment.masked_site import SiteMasks
from fedstill.deployment.policy import Policy
from fedstill.deployment.site import LocalInputs, Site
from fedstill.methods.summed import to_integers
from fedstill.running.directory import RunDirectory
from support import regions
from support.sites import NAMES, POLICY, Silence, Wire, alone, served, weights

SHORT: dict[str, Any] = {"secure_aggregation": True, "rounds": 1, "fraction": 0.05, "eval_every": 0, "round_retries": 0}
STEPS = ("MaskKeys", "MaskShares", "Train", "MaskReveal")


class Tapped(Wire):
    """Keeps what the server receives; `dies` says which site does not answer, by name and request."""

    def __init__(self, folder: Path, policy: Policy = POLICY) -> None:
        super().__init__(folder)
        self.sites = {name: Site(folder / name, LocalInputs(), policy) for name in NAMES}
        self.requests: dict[str, Tree] = {}  # the first of each site
        self.received: list[tuple[str, str, Tree]] = []
        self.dies: Callable[[str, Tree], bool] = lambda name, request: False

    def answer(self, name: str, request: Tree) -> Any:
        if self.dies(name, request["request"] or {}):
            return Silence("it is gone")
        self.requests.setdefault(name, request)
        try:
            answer = super().answer(name, request)
        except Refusal as error:
            return {"error": report(error.code, step_of(error), "0000")}
        self.sites[name].record(request, {"body": answer})
        self.received.append((name, (request["request"] or {}).get("kind", "Join"), answer))
        return answer


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, Tensor]]:
    """What every client had to send before it was masked, by round."""
    found: list[dict[int, Tensor]] = []
    masked, rounds = SiteMasks.masked, dict[str, int]()

    def spy(self: SiteMasks, masking: Any, message: Any, declared: Any, run: Any) -> Any:
        place = rounds.setdefault(masking["session"], len(rounds))
        if place == len(found):
            found.append({})
        found[place][run["client"]] = message["model"].clone()
        return masked(self, masking, message, declared, run)

    monkeypatch.setattr(SiteMasks, "masked", spy)
    return found


def test_sites_have_the_bits_of_the_simulation_and_their_updates_stay_there(
    tmp_path: Path, updates: list[dict[int, Tensor]]
) -> None:
    wire = Tapped(tmp_path / "sites")
    served(wire, tmp_path / "served", "scaffold", **SHORT)
    alone(tmp_path / "alone", "scaffold", **SHORT)
    assert weights(tmp_path / "served") == weights(tmp_path / "alone")
    (sent,) = updates
    masked = [answer["message"]["masked"].numpy() for _, kind, answer in wire.received if kind == "Train"]
    assert len(sent) == len(masked) == 3
    everything = [tree.encode(answer) for _, _, answer in wire.received]
    for update in sent.values():
        plain, integers = update.numpy(), to_integers({"model": update}, {"model": None}).numpy()  # type: ignore[dict-item]
        for piece in (plain[:8].tobytes(), plain[-8:].tobytes(), integers[:4].tobytes(), integers[-4:].tobytes()):
            assert not any(piece in received for received in everything)
    for seen in (masked[0], masked[1], masked[0] - masked[1]):
        assert chisquare(np.bincount(seen.view(np.uint8), minlength=256)).pvalue > 1e-6
    log = (tmp_path / "sites" / "north" / "audit.jsonl").read_text()
    assert '"kind": "masked gradients, weights"' in log
    assert '"kind": "weights"' not in log
    assert verify(tmp_path / "sites" / "north" / "audit.jsonl") > 4


@pytest.mark.slow
def test_a_site_may_die_at_every_step(tmp_path: Path, updates: list[dict[int, Tensor]]) -> None:
    """In each round another step: the model is the mean of those whose update had come."""
    wire = Tapped(tmp_path / "sites", replace(POLICY, min_sites=2))
    steps: list[str] = []

    def dies(name: str, request: Tree) -> bool:
        if request.get("kind") == "MaskKeys" and name == "west":  # the first that is asked
            steps.append(STEPS[len(steps)])
        return name == "south" and bool(steps) and request.get("kind") == steps[-1]

    wire.dies = dies
    result = served(wire, tmp_path / "served", **SHORT | {"rounds": 4, "save_models": 1})
    assert steps == list(STEPS)
    assert [record["dropped"] for record in result.records] == [1, 1, 1, 0]
    assert [record.get("left_out") for record in result.records] == [["south"]] * 3 + [None]
    last = RunDirectory.open(tmp_path / "served", lock=False).read_checkpoint(4)["model"]
    assert [sorted(sent) for sent in updates] == [[0, 2], [0, 2], [0, 2], [0, 1, 2]]
    torch.testing.assert_close(last, torch.stack(list(updates[3].values())).mean(0), rtol=1e-5, atol=1e-7)
    before = RunDirectory.open(tmp_path / "served", lock=False).read_checkpoint(3)["model"]
    torch.testing.assert_close(before, torch.stack(list(updates[2].values())).mean(0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("step", STEPS)
def test_with_too_few_left_the_round_fails_as_a_whole(step: str, tmp_path: Path) -> None:
    wire = Tapped(tmp_path / "sites", replace(POLICY, min_sites=2))
    wire.dies = lambda name, request: name != "west" and request.get("kind") == step
    with pytest.raises(FedstillError, match="round 1 failed 1 times and is given up"):
        served(wire, tmp_path / "served", **SHORT)
    assert not RunDirectory(tmp_path / "served").checkpoint_rounds()


def test_a_site_refuses_to_be_singled_out(tmp_path: Path) -> None:
    """By its policy, by a request to train without masks, and by a run without them."""
    wire = Tapped(tmp_path / "sites", replace(POLICY, min_sites=4))
    with pytest.raises(FedstillError, match="too few sites are in it"):
        served(wire, tmp_path / "served", **SHORT)
    join = wire.requests["north"]
    body = {"kind": "Train", "client": 0, "round": 1, "measure": False, "region": 0, "state": 0}
    with pytest.raises(Refusal, match="secure aggregation"):
        wire.sites["north"].handle(join | {"request": body, "down": {"model": torch.zeros(15626)}})
    without = join["run"]["config"].replace("secure_aggregation = true", "secure_aggregation = false")
    strict = Site(tmp_path / "strict", LocalInputs(), Policy(secure_only=True))
    with pytest.raises(Refusal, match="secure_only"):
        strict.handle(join | {"run": join["run"] | {"config": without}})


@pytest.mark.slow
def test_inside_regions_updates_are_masked_and_only_the_regions_models_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "POLICY", replace(regions.POLICY, min_sites=2))
    settings = SHORT | {"rounds": 2, "rounds_per_episode": 2, "participation": 1.0, "fraction": 0.1}
    world = regions.World(tmp_path)
    regions.served(world, tmp_path / "served", "fedavg+f2l", **settings)
    regions.alone(tmp_path / "alone", "fedavg+f2l", **settings)
    assert weights(tmp_path / "served") == weights(tmp_path / "alone")
    asked = [request["kind"] for wire in world.sites.values() for _, request in wire.requests if request]
    assert [asked.count(step) for step in STEPS] == [2 * 5] * 4
