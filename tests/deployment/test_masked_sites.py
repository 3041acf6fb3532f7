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
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.masked_site import SiteMasks
from fedstill.deployment.policy import Policy
from fedstill.deployment.site import Site
from fedstill.flower import keys
from fedstill.methods.summed import to_integers
from fedstill.privacy.masks import Participant
from fedstill.privacy.signatures import Signer
from fedstill.running.directory import RunDirectory
from support import regions
from support.sites import NAMES, POLICY, Silence, Wire, alone, served, weights

SHORT: dict[str, Any] = {"secure_aggregation": True, "rounds": 1, "fraction": 0.05, "eval_every": 0, "round_retries": 0}
STEPS = ("MaskKeys", "MaskShares", "Train", "MaskConfirm", "MaskReveal")


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

    def spy(self: SiteMasks, masking: Any, message: Any, declared: Any, run: Any, *more: Any) -> Any:
        place = rounds.setdefault(masking["session"], len(rounds))
        if place == len(found):
            found.append({})
        found[place][run["client"]] = message["model"].clone()
        return masked(self, masking, message, declared, run, *more)

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
    result = served(wire, tmp_path / "served", **SHORT | {"rounds": 5, "save_models": 1})
    assert steps == list(STEPS)
    assert [record["dropped"] for record in result.records] == [1, 1, 1, 0, 0]
    assert [record.get("left_out") for record in result.records] == [["south"]] * 3 + [None, None]
    last = RunDirectory.open(tmp_path / "served", lock=False).read_checkpoint(5)["model"]
    assert [sorted(sent) for sent in updates] == [[0, 2], [0, 2], [0, 2], [0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(last, torch.stack(list(updates[4].values())).mean(0), rtol=1e-5, atol=1e-7)
    before = RunDirectory.open(tmp_path / "served", lock=False).read_checkpoint(4)["model"]
    torch.testing.assert_close(before, torch.stack(list(updates[3].values())).mean(0), rtol=1e-5, atol=1e-7)


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


def test_a_server_that_names_a_site_as_gone_to_some_learns_nothing_of_it(tmp_path: Path) -> None:
    wire = Tapped(tmp_path / "sites", replace(POLICY, min_sites=2))
    told = {"north": ([0, 1], [2]), "south": ([0, 1, 2], []), "west": ([1, 2], [0])}

    def lies(name: str, request: Tree) -> bool:
        if request.get("kind") == "MaskConfirm":
            request["answered"], request["gone"] = told[name]
        return False

    wire.dies = lies
    with pytest.raises(FedstillError, match="round 1 failed 1 times and is given up"):
        served(wire, tmp_path / "served", **SHORT)
    assert [name for name, kind, _ in wire.received if kind == "MaskConfirm"] == ["west", "south", "north"]
    assert "MaskReveal" not in [kind for _, kind, _ in wire.received]


@pytest.mark.parametrize("changed", ["model", "settings"])
def test_a_server_that_gives_one_site_another_model_learns_nothing_of_its_update(changed: str, tmp_path: Path) -> None:
    """With a model from which the others learn nothing, the sum would be this site's update alone.

    Two of three confirm each other, and reveal what they have: their masks and the third's still do not cancel, also
    for a server that takes no notice.
    """
    wire = Tapped(tmp_path / "sites")
    about: list[str] = []

    def answer(name: str, request: Tree) -> Any:
        if (request["request"] or {}).get("kind") == "Train" and name != "west":
            if changed == "model":
                request["down"] = {"model": torch.zeros_like(request["down"]["model"])}
            else:
                request["run"]["config"] = request["run"]["config"].replace("lr = 0.1", "lr = 1e-9")
                assert "lr = 1e-9" in request["run"]["config"]
        found = Tapped.answer(wire, name, request)
        if isinstance(found, dict) and "about" in found:
            about.append(found["about"])
            found["about"] = about[0]
        return found

    wire.answer = answer  # type: ignore[method-assign]
    with pytest.raises(FedstillError, match="cannot be a sum of updates"):
        served(wire, tmp_path / "served", **SHORT | {"lr": 0.1})
    assert len(set(about)) == 2
    assert "MaskReveal" in [kind for _, kind, _ in wire.received]


def with_keys(folder: Path, wire: Tapped, policy: Policy, *strangers: str) -> Tapped:
    """The same with sites that sign, and know each other; strangers are known to nobody."""
    known = folder / "known"
    for name in NAMES:
        keys.make(folder / name, [name], ["server.example"])
        known.mkdir(exist_ok=True)
        if name not in strangers:
            (known / f"{name}.pub").write_bytes((folder / name / "sites" / f"{name}.pub").read_bytes())
    policy = replace(policy, known_sites=str(known))
    for name in NAMES:
        signer = Signer(folder / name / "sites" / name)
        wire.sites[name] = Site(folder / f"site-{name}", LocalInputs(), policy, signer=signer)
    return wire


def test_sites_that_know_each_other_take_no_keys_from_anybody_else(tmp_path: Path) -> None:
    wire = with_keys(tmp_path / "good", Tapped(tmp_path / "sites"), POLICY)
    served(wire, tmp_path / "served", **SHORT)
    alone(tmp_path / "alone", **SHORT)
    assert weights(tmp_path / "served") == weights(tmp_path / "alone")
    for case, refused in (("stranger", "known site"), ("twice", "for two clients"), ("forged", "is not right")):
        wire = with_keys(tmp_path / case, Tapped(tmp_path / f"{case} sites"), POLICY, *["west"][: case == "stranger"])
        problems: list[str] = []

        def lies(
            name: str, request: Tree, case: str = case, problems: list[str] = problems, wire: Tapped = wire
        ) -> bool:
            signed = request.get("signatures", {}) if request.get("kind") == "MaskShares" else {}
            if signed and case == "twice":
                signed["2"] = signed["1"]
            if signed and case == "forged":  # a server of its own keys in the place of a site's
                request["keys"]["2"] = list(Participant(2, request["session"]).public_keys())
            if signed:
                with pytest.raises(Refusal) as error:
                    wire.sites[name].handle(wire.requests[name] | {"request": request})
                problems.append(str(error.value))
            return False

        wire.dies = lies
        with pytest.raises(FedstillError, match="given up"):
            served(wire, tmp_path / f"served {case}", **SHORT)
        assert problems
        assert all(refused in problem for problem in problems if "another one stands" not in problem)


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
    assert [asked.count(step) for step in STEPS] == [2 * 5] * 5
