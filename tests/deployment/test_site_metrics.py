"""What sites tell of their own tests and classes: by class only where a run asks and the site's owner agrees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstill
from fedstill.building.config import resolve
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.reports import Code, Refusal
from fedstill.core.tree import Tree
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.policy import Consent, Policy
from fedstill.deployment.protocol import scores_of
from fedstill.deployment.server import regions_of
from fedstill.deployment.site import Site
from fedstill.methods.kinds import Kind
from support.sites import NAMES, SETTINGS, Wire, alone, served, weights

TINY: dict[str, Any] = {"model": "mlp", "model_options": {"hidden": [8]}, "rounds": 2}
COUNTED: dict[str, Any] = {"metrics": ["balanced_accuracy", "macro_f1"]}
AGREED = Policy(allow=("class-counts",))


class Agreeing(Wire):
    """Sites with policies of their own, and what they answer."""

    def __init__(
        self, folder: Path, change: Callable[[Tree], Tree] = lambda answer: answer, **policies: Policy
    ) -> None:
        super().__init__(folder)
        for name in NAMES:
            self.sites[name] = Site(folder / name, LocalInputs(), policies.get(name, AGREED))
        self.answers: list[Any] = []
        self.change = change

    def answer(self, name: str, request: Tree) -> Any:
        answer = super().answer(name, request)
        self.answers.append(answer)
        return self.change(answer) if name == "south" else answer


@pytest.mark.slow
def test_counts_of_sites_give_the_metrics_of_a_run_on_one_machine(tmp_path: Path) -> None:
    there = served(Agreeing(tmp_path), tmp_path / "served", **TINY, **COUNTED)
    here = alone(tmp_path / "alone", **TINY, **COUNTED)
    for ours, theirs in zip(here.records, there.records, strict=True):
        assert theirs["metrics"] == pytest.approx(ours["metrics"])
        assert theirs.keys() == ours.keys()


def test_sites_tell_nothing_by_class_unless_a_run_asks_for_it(tmp_path: Path) -> None:
    wire = Agreeing(tmp_path)
    result = served(wire, tmp_path / "served", **TINY)
    assert {tuple(answer) for answer in wire.answers if "hits" in answer} == {("hits",)}
    assert set(result.records[-1]["metrics"]) == {"balanced_accuracy", "macro_f1"}  # of the server's own test set


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [Policy(), Policy(deny=(Kind.CLASS_COUNTS,)), Policy(allow=("class-counts",), deny=(Kind.CLASS_COUNTS,))]
)
def test_a_site_that_does_not_agree_sends_hits_alone_and_the_record_says_so(tmp_path: Path, policy: Policy) -> None:
    wire = Agreeing(tmp_path, north=policy, south=policy, west=policy)
    record = served(wire, tmp_path / "served", **TINY, **COUNTED).records[-1]
    assert not any("by_class" in answer for answer in wire.answers)
    assert record["amp"] is not None
    assert "pooled_macro_f1" not in record["metrics"]
    assert record["unmeasured"]["pooled_macro_f1"].startswith("3 of 3 sites send no counts by class")


@pytest.mark.slow
def test_what_needs_probabilities_is_worked_out_at_each_site(tmp_path: Path) -> None:
    named: dict[str, Any] = {"metrics": ["auroc", "ece"]}
    wire = Agreeing(tmp_path)
    there = served(wire, tmp_path / "served", **TINY, **named).records[-1]
    here = alone(tmp_path / "alone", **TINY, **named).records[-1]["metrics"]
    assert not any("probabilities" in json.dumps(answer, default=str) for answer in wire.answers)
    for name in ("worst_auroc", "var_auroc", "worst_ece", "var_ece"):
        assert there["metrics"][name] == pytest.approx(here[name])
    assert "pooled_auroc" not in there["metrics"]
    assert there["unmeasured"]["pooled_auroc"] == "sites send their own value, never probabilities"


def test_metrics_of_a_site_that_cannot_be_are_left_out() -> None:
    given: dict[str, Any] = {"auroc": [0.5, -1.0, 2.0, "0.5"], "ece": [0.1], "mine": [0.1] * 4}
    assert scores_of({"scores": given}, 4) == [{"auroc": 0.5}, {}, {}, {}]
    assert scores_of({"scores": "many"}, 1) == [{}]


@pytest.mark.slow
def test_a_site_that_denies_metrics_sends_none(tmp_path: Path) -> None:
    wire = Agreeing(tmp_path, north=Policy(deny=(Kind.METRICS,)))
    record = served(wire, tmp_path / "served", **TINY | {"rounds": 1}, metrics=["auroc"]).records[-1]
    assert sum("scores" in answer for answer in wire.answers if isinstance(answer, dict)) == 2
    assert record["metrics"]["worst_auroc"] > 0


def _more(answer: Tree, cell: tuple[int, int, int], by: int) -> Tree:
    if "by_class" not in answer:
        return answer
    changed = answer["by_class"].clone()
    changed[cell] += by
    return answer | {"by_class": changed}


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda answer: _more(answer, (0, 0, 0), 1),  # more samples than tests
        lambda answer: _more(answer, (0, 1, 0), -(10**6)),  # fewer than none
        lambda answer: _more(answer, (0, 2, 0), 1),  # more hits by class than hits
        lambda answer: (
            answer | {"by_class": torch.zeros(1, 3, 10**6, dtype=torch.int64)} if "hits" in answer else answer
        ),
        lambda answer: answer | {"by_class": torch.full((1, 3, 10), 0.1)} if "hits" in answer else answer,
        lambda answer: answer | {"by_class": "many"} if "hits" in answer else answer,
    ],
)
def test_counts_that_cannot_be_are_left_out(tmp_path: Path, change: Callable[[Tree], Tree]) -> None:
    record = served(Agreeing(tmp_path, change), tmp_path / "served", **TINY | {"rounds": 1}, **COUNTED).records[-1]
    assert record["unmeasured"]["pooled_macro_f1"].startswith("1 of 3 sites")
    assert "south sends counts by class that cannot be" in (tmp_path / "served/log.txt").read_text()
    assert record["amp"] is not None


def test_the_audit_log_calls_counts_by_class_what_they_are(tmp_path: Path) -> None:
    site = Agreeing(tmp_path).sites["north"]
    site.record({"run": {"number": "1"}}, {"body": {"hits": [1], "by_class": torch.zeros(1, 3, 2, dtype=torch.int64)}})
    (line,) = (tmp_path / "north/audit.jsonl").read_text().splitlines()
    assert [part["kind"] for part in json.loads(line)["parts"]] == ["class-counts"]


# --- class weights ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["balanced", "numbers"])
def test_sites_train_with_the_weights_of_a_run_on_one_machine(tmp_path: Path, weight: str) -> None:
    settings = TINY | {"imbalance_factor": 10.0, "class_weight": weight}
    policies: dict[str, Any] = {}
    if weight == "numbers":  # for which no site has to tell anything
        names = fedstill.load_dataset("fashion-mini").classes
        settings["class_weight"] = {name: 1.0 + i for i, name in enumerate(names)}
        policies = dict.fromkeys(NAMES, Policy(deny=(Kind.CLASS_COUNTS,)))
    served(Agreeing(tmp_path, **policies), tmp_path / "served", **settings)
    alone(tmp_path / "alone", **settings)
    assert weights(tmp_path / "served") == weights(tmp_path / "alone")


@pytest.mark.slow
def test_weights_stay_as_they_were_when_the_server_starts_again_without_a_site(tmp_path: Path) -> None:
    settings = TINY | {"imbalance_factor": 10.0, "class_weight": "balanced"}
    wire = Agreeing(tmp_path)
    served(wire, tmp_path / "served", **settings | {"rounds": 1})
    before = json.loads((tmp_path / "served/run.json").read_text())
    wire.away = {"south"}
    served(wire, tmp_path / "served", **settings | {"rounds": 2})
    after = json.loads((tmp_path / "served/run.json").read_text())
    assert "class_weight" in json.dumps(before)
    assert before == after


def test_a_site_takes_no_part_in_balanced_weights_unless_its_owner_agrees(tmp_path: Path) -> None:
    wire = Agreeing(tmp_path, south=Policy(allow=("fedavg",)))
    with pytest.raises(FedstillError, match="--allow class-counts"):
        served(wire, tmp_path / "served", **TINY, class_weight="balanced")


@pytest.mark.parametrize(
    ("policy", "code"),
    [(Policy(), Code.NOT_ALLOWED), (Policy(deny=(Kind.CLASS_COUNTS,)), Code.NOT_ALLOWED), (AGREED, None)],
)
def test_class_counts_need_consent_of_their_own(policy: Policy, code: Code | None) -> None:
    def refusal() -> Code | None:
        try:
            Consent(policy).check_setting("1", "class_weight = balanced", Kind.CLASS_COUNTS)
        except Refusal as found:
            return found.code
        return None

    assert refusal() is code


def test_class_counts_that_are_not_all_samples_are_refused(tmp_path: Path) -> None:
    def change(answer: Tree) -> Tree:
        return answer | {"class_counts": [1] * 10} if "class_counts" in answer else answer

    served(Agreeing(tmp_path, change), tmp_path / "served", **TINY, class_weight="balanced")
    log = (tmp_path / "served/log.txt").read_text()
    assert "south cannot take part: the samples of each class that it reports are not all of its samples" in log


def test_regional_servers_need_weights_as_numbers() -> None:
    config = resolve(SETTINGS | {"method": "fedavg", "regions": 3, "class_weight": "balanced"})
    with pytest.raises(SettingError, match="give numbers instead"):
        regions_of(config, NAMES)
