"""Differential privacy where there is somebody to protect: sites that a server asks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.building.config import resolve
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.files import read_sealed_json
from fedstill.core.reports import Refusal, report, step_of
from fedstill.core.tree import Tree
from fedstill.deployment import region as regional
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.policy import Policy
from fedstill.deployment.site import Site
from fedstill.methods.dp import DP
from fedstill.methods.dp_sgd import sample_epsilon
from fedstill.methods.kinds import Kind
from fedstill.privacy.accounting import Plan, Release, composed, epsilon
from fedstill.running.directory import RunDirectory
from fedstill.running.rollback import rollback
from support import regions
from support.sites import NAMES, POLICY, SETTINGS, Silence, Wire, served, weights

pytest.importorskip("dp_accounting")

PRIVATE: dict[str, Any] = {"hyper": {"noise_multiplier": 4.0, "delta": 1e-3, "clip": 0.01}}


class Tapped(Wire):
    """Notes what sites answer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.metrics: set[str] = set()
        self.kinds: list[str | None] = []

    def answer(self, name: str, request: Tree) -> Any:
        answer = super().answer(name, request)
        self.kinds.append(request["request"] and request["request"].get("kind"))
        self.metrics |= set(answer.get("metrics", {}))
        return answer


@pytest.mark.slow
def test_sites_are_not_asked_how_they_do_and_the_noise_is_not_in_the_seed(tmp_path: Path) -> None:
    wire = Tapped(tmp_path / "sites")
    result = served(wire, tmp_path / "one", "fedavg+dp", rounds=2, **PRIVATE)
    assert [record["epsilon"] for record in result.records] == pytest.approx(
        [epsilon(Plan(3, 3, n), 4.0, 1e-3) for n in (1, 2)]
    )
    assert wire.metrics == {"seconds"}
    assert "Score" not in wire.kinds
    assert all(record["train_loss"] is record["amp"] is None for record in result.records)
    served(Wire(tmp_path / "others"), tmp_path / "two", "fedavg+dp", rounds=2, **PRIVATE)
    assert weights(tmp_path / "one") != weights(tmp_path / "two")  # of one seed


@pytest.mark.slow
def test_sites_that_vote_send_votes_alone(tmp_path: Path) -> None:
    """Their own models are measured by nobody else, though there is no other."""
    wire, policy = Tapped(tmp_path / "sites"), replace(POLICY, allow=("predictions",), deny=(Kind.WEIGHTS, Kind.LOGITS))
    wire.sites = {name: Site(tmp_path / "sites" / name, LocalInputs(), policy) for name in NAMES}
    hyper = {"noise_multiplier": 4.0, "delta": 1e-3, "queries": 20, "average_weights": False}
    result = served(wire, tmp_path / "one", "fedmd+votes", rounds=2, proxy="pool", pool=0.2, hyper=hyper)
    assert [record["epsilon"] for record in result.records] == pytest.approx(
        [epsilon(Plan(3, 3, n), 4.0, 1e-3) for n in (1, 2)]
    )
    assert wire.metrics == {"seconds"}
    assert "Score" not in wire.kinds
    assert all(record["accuracy"] is record["local_accuracy"] is None for record in result.records)


@pytest.mark.slow
def test_a_regional_server_reports_what_its_region_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regional, "_NEWCOMERS_TIMEOUT", 0.5)
    result = regions.served(regions.World(tmp_path), tmp_path / "served", "fedavg+dp+f2l", participation=1.0, **PRIVATE)
    members = {len(sites) for sites in regions.SITES.values()}
    spent = max(epsilon(Plan(n, n, 4), 4.0, 1e-3) for n in members)
    assert result.summary["epsilon"] == pytest.approx(spent)


@pytest.mark.slow
def test_a_regional_server_finds_the_noise_of_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regional, "_NEWCOMERS_TIMEOUT", 0.5)
    budget: dict[str, Any] = {"hyper": {"target_epsilon": 9.0, "delta": 1e-3, "clip": 0.01}}
    result = regions.served(regions.World(tmp_path), tmp_path / "served", "fedavg+dp+f2l", participation=1.0, **budget)
    assert 8.5 < result.summary["epsilon"] <= 9.0


# --- noise that the sites add, and what each counts for itself --------------------------------------------------------

SHORT: dict[str, Any] = {"fraction": 0.05, "eval_every": 0, "round_retries": 0}
SHARES: dict[str, Any] = SHORT | {
    "secure_aggregation": True,
    "hyper": {"noise_multiplier": 4.0, "noise_shares": 3, "clip": 0.5, "delta": 1e-3},
}
SAMPLES: dict[str, Any] = SHORT | {"model": "mlp", "hyper": {"noise_multiplier": 1.5, "clip": 1.0}}

BY_REGIONS: dict[str, Any] = {
    "hyper": {},
    "rounds": 2,
    "rounds_per_episode": 1,
    "region": [{"method": "fedavg+dp-sgd", "hyper": SAMPLES["hyper"]}] * 2,
}


class Watched(Wire):
    """Sites with a policy; `changed` may change a request, or say that its site is gone."""

    def __init__(self, folder: Path, policy: Policy = POLICY) -> None:
        super().__init__(folder)
        self.sites = {name: Site(folder / name, LocalInputs(), policy) for name in NAMES}
        self.changed: Callable[[str, Tree], bool] = lambda name, request: False
        self.refusals: list[str] = []
        self.trainings = 0

    def answer(self, name: str, request: Tree) -> Any:
        self.trainings += kind(request) == "Train"
        if self.changed(name, request):
            return Silence("it is gone")
        try:
            return super().answer(name, request)
        except Refusal as error:
            self.refusals.append(str(error))
            return {"error": report(error.code, step_of(error), "0000")}


def spent(folder: Path, name: str = "north") -> list[list[float]]:
    found: list[list[float]] = read_sealed_json(folder / name / "privacy.json")["spent"]
    return found


def kind(request: Tree) -> str:
    return str((request["request"] or {}).get("kind", ""))


def test_sites_add_the_noise_and_their_server_sees_no_sum_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server has is the mean of what the sites sent, which is not what they learnt."""
    sent: list[Any] = []
    noisy = DP._noisy

    def spy(self: DP, client: Any, message: Any) -> Any:
        sent.append((message["model"].double(), noisy(self, client, message)["model"]))
        return {"model": sent[-1][1]}

    monkeypatch.setattr(DP, "_noisy", spy)
    result = served(Watched(tmp_path / "sites"), tmp_path / "served", "fedavg+dp", rounds=1, **SHARES)
    assert len(sent) == 3
    model = RunDirectory.open(tmp_path / "served", lock=False).read_checkpoint(1)["model"].double()
    torch.testing.assert_close(model, torch.stack([mine for _, mine in sent]).mean(0), rtol=1e-5, atol=1e-6)
    noise = torch.cat([mine - learnt for learnt, mine in sent])
    assert float(noise.std()) == pytest.approx(4.0 * 0.5 / 3**0.5, rel=0.02)  # clipping is nothing beside it
    assert result.summary["epsilon"] == pytest.approx(epsilon(Plan(1, 1, 1), 4.0, 1e-3))
    assert spent(tmp_path / "sites") == [[4.0, 1.0, 1]]


def test_with_fewer_sites_than_shares_of_the_noise_there_is_no_sum(tmp_path: Path) -> None:
    wire = Watched(tmp_path / "sites", replace(POLICY, min_sites=2))
    wire.changed = lambda name, request: name == "west" and kind(request) == "Train"
    with pytest.raises(FedstillError, match="given up"):
        served(wire, tmp_path / "served", "fedavg+dp", rounds=1, **SHARES)


def test_a_server_cannot_ask_for_little_noise_and_then_unmask_a_small_sum(tmp_path: Path) -> None:
    """The settings come with every request: a site keeps to those by which it made its noise."""
    wire = Watched(tmp_path / "sites", replace(POLICY, min_sites=2))

    def lies(name: str, request: Tree) -> bool:
        if kind(request) == "Train":  # a tenth of the noise's variance for each
            request["run"]["config"] = request["run"]["config"].replace("noise_shares = 3", "noise_shares = 30")
        return False

    wire.changed = lies
    with pytest.raises(FedstillError, match="given up"):
        served(wire, tmp_path / "served", "fedavg+dp", rounds=1, **SHARES)
    assert "only 3 of 3 clients are there" in wire.refusals[-1]


def test_a_site_sends_no_share_of_the_noise_without_masks(tmp_path: Path) -> None:
    wire = Watched(tmp_path / "sites")

    def lies(name: str, request: Tree) -> bool:
        run = request["run"]
        run["config"] = run["config"].replace("secure_aggregation = true", "secure_aggregation = false")
        return False

    wire.changed = lies
    with pytest.raises((FedstillError, SettingError), match="set secure_aggregation = true"):
        served(wire, tmp_path / "served", "fedavg+dp", rounds=1, **SHARES)


def test_a_site_with_a_limit_of_its_own_answers_no_more_once_it_is_spent(tmp_path: Path) -> None:
    two, little = composed([Release(4.0, 1.0, 2)], 1e-5), {"hyper": SHARES["hyper"] | {"clip": 0.01}}
    wire = Watched(tmp_path / "sites", replace(POLICY, max_epsilon=two + 1e-6))
    with pytest.raises(FedstillError, match="round 3 failed"):
        served(wire, tmp_path / "served", "fedavg+dp", rounds=3, **SHARES | little)
    assert "with this round the site would have spent epsilon" in wire.refusals[-1]
    assert spent(tmp_path / "sites") == [[4.0, 1.0, 2]]
    with pytest.raises(FedstillError):  # another run does not begin anew
        served(wire, tmp_path / "another", "fedavg+dp", rounds=1, **SHARES | little | {"seed": 5})
    assert spent(tmp_path / "sites") == [[4.0, 1.0, 2]]


@pytest.mark.parametrize("method", ["fedavg", "fedavg+dp"])
def test_a_site_with_a_limit_refuses_what_hides_nothing_from_its_server(method: str, tmp_path: Path) -> None:
    wire = Watched(tmp_path / "sites", replace(POLICY, max_epsilon=5.0))
    with pytest.raises(FedstillError):
        served(wire, tmp_path / "served", method, rounds=1, **PRIVATE if method == "fedavg+dp" else {})
    assert "hides nothing from its server" in wire.refusals[0]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("feddistill-plus+dp-sgd", {}),  # which sends logits as they are
        ("fedavg+dp-sgd+ccvr", {}),  # which collects statistics after the last round
        ("fedavg+dp-sgd", {"model": "resnet8", "model_options": {"norm": "batch"}}),  # which mixes samples
        ("fedavg+ccvr", BY_REGIONS),  # the regions' method is private, and the run's collects statistics at the end
    ],
)
def test_a_site_with_a_limit_checks_for_itself_what_its_server_should_have_refused(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("opacus")
    policy = replace(POLICY, max_epsilon=5.0, allow=("feddistill-plus", "ccvr"))
    wire = Watched(tmp_path / "sites", policy)
    plain = {"secure_aggregation": False, "image_size": 16} | SAMPLES | settings
    seen: list[str] = []

    def lies(name: str, request: Tree) -> bool:
        told = resolve(SETTINGS | plain | {"method": method, "clients": 3})
        request["run"]["config"] = told.model_copy(update={"data_dir": ""}).toml()
        try:
            wire.sites[name].handle(request)
        except (Refusal, FedstillError) as error:
            seen.append(str(error))
        return True

    wire.changed = lies
    with pytest.raises(FedstillError):
        served(wire, tmp_path / "served", "fedavg", rounds=1, **SHORT | {"image_size": 16, "model": plain["model"]})
    assert seen
    assert all(re.search("dp-sgd|nothing after it", problem) for problem in seen), seen


def test_the_account_of_samples_is_that_of_opacus(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    wire = Watched(tmp_path / "sites")
    served(wire, tmp_path / "served", "fedavg+dp-sgd", rounds=2, **SAMPLES)
    ((noise, share, steps),) = spent(tmp_path / "sites")
    ready = wire.sites["north"]._ready
    assert ready is not None
    samples, local = len(ready[1].federation.train_index), ready[1].task.local
    assert noise == 1.5
    assert share == pytest.approx(min(1.0, local.batch_size / samples))
    assert composed([Release(noise, share, int(steps))], 1e-5) == pytest.approx(
        sample_epsilon(samples, 2, local, 1.5, 1e-5), rel=0.02
    )


@pytest.mark.parametrize("to", [0, 1])
def test_what_was_spent_stays_spent_when_a_run_goes_back(to: int, tmp_path: Path) -> None:
    wire = Watched(tmp_path / "sites")
    served(wire, tmp_path / "served", "fedavg+dp", rounds=2, **SHORT | PRIVATE)
    rollback(tmp_path / "served", to)
    result = served(wire, tmp_path / "served", "fedavg+dp", rounds=2, **SHORT | PRIVATE)
    assert result.summary["epsilon"] == pytest.approx(epsilon(Plan(3, 3, 4 - to), 4.0, 1e-3))
    rollback(tmp_path / "served", 0)
    rollback(tmp_path / "served", 0)
    result = served(wire, tmp_path / "served", "fedavg+dp", rounds=1, **SHORT | PRIVATE)
    assert result.summary["epsilon"] == pytest.approx(epsilon(Plan(3, 3, 5 - to), 4.0, 1e-3))


def test_a_run_that_went_back_to_its_start_has_no_new_budget(tmp_path: Path) -> None:
    wire, hyper = Watched(tmp_path / "sites"), PRIVATE["hyper"]
    budget = SHORT | {"hyper": hyper | {"target_epsilon": epsilon(Plan(3, 3, 2), 4.0, 1e-3) + 1e-6}}
    assert len(served(wire, tmp_path / "served", "fedavg+dp", rounds=3, **budget).records) == 2
    rollback(tmp_path / "served", 0)
    trained = wire.trainings
    with pytest.raises(FedstillError, match="went back behind have taken it"):
        served(wire, tmp_path / "served", "fedavg+dp", rounds=3, **budget)
    assert wire.trainings == trained


def test_a_site_whose_answer_comes_too_late_has_spent_all_the_same(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    wire = Watched(tmp_path / "sites")
    wire.changed = lambda name, request: name == "west" and kind(request) == "Train"
    served(wire, tmp_path / "served", "fedavg+dp-sgd", rounds=1, **SAMPLES)
    state = RunDirectory.open(tmp_path / "served", lock=False).read_checkpoint(1)["state"]
    assert state["dp-sgd"] == {"0": 1, "1": 1, "2": 1}


def test_a_site_is_asked_for_its_consent_to_what_a_run_with_regions_collects_at_the_end(tmp_path: Path) -> None:
    wire = Watched(tmp_path / "sites", Policy())
    regional = SHORT | {"rounds": 2, "rounds_per_episode": 1, "region": [{"method": "fedavg"}, {"method": "fedprox"}]}
    seen: list[str] = []

    def lies(name: str, request: Tree) -> bool:
        told = resolve(SETTINGS | regional | {"method": "fedavg+ccvr"})
        request["run"]["config"] = told.model_copy(update={"data_dir": ""}).toml()
        request["run"]["steps"] = [0, 0]
        with pytest.raises(Refusal, match="start the site with --allow ccvr") as refused:
            wire.sites[name].handle(request)
        seen.append(str(refused.value))
        return True

    wire.changed = lies
    with pytest.raises(FedstillError):
        served(wire, tmp_path / "served", "fedavg", rounds=1, **SHORT)
    assert seen


@pytest.mark.slow
def test_a_region_that_is_stopped_after_it_went_back_still_counts_what_it_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regional, "_NEWCOMERS_TIMEOUT", 0.5)
    settings: dict[str, Any] = {"participation": 1.0, "round_retries": 0} | PRIVATE

    def serve() -> Any:
        return regions.served(regions.World(tmp_path), tmp_path / "served", "fedavg+dp+f2l", **settings)

    def stopped(*_: Any, **__: Any) -> Any:
        raise FedstillError("stopped")

    serve()
    rollback(tmp_path / "served", 2)
    with monkeypatch.context() as patched:
        patched.setattr(regional.RegionalLoop, "episode", stopped)
        with pytest.raises(FedstillError):
            serve()
    members = {len(sites) for sites in regions.SITES.values()}
    assert serve().summary["epsilon"] == pytest.approx(max(epsilon(Plan(n, n, 6), 4.0, 1e-3) for n in members))
    for folder in tmp_path.glob("*/runs/*"):  # the region's owner goes back with it
        rollback(folder, 2)
    rollback(tmp_path / "served", 2)
    assert serve().summary["epsilon"] == pytest.approx(max(epsilon(Plan(n, n, 8), 4.0, 1e-3) for n in members))
