"""Advice: each rule speaks where it should and nowhere else, and its evidence is what our runs say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedstill.analysis.advice import advise, facts_of, lacks, ranked, rules
from fedstill.analysis.listings import example
from fedstill.building.config import resolve
from fedstill.building.data import divide, load_data
from fedstill.core.errors import SettingError
from fedstill.methods import registry
from fedstill.methods.kinds import Kind
from support.commandline import fedstill as type_in

RESULTS = json.loads((Path(__file__).parents[2] / "docs/results.json").read_text())
EVEN: dict[str, Any] = {
    "skew": 0.0, "participation": 1.0, "clients": 100, "active": 100, "samples": 500.0, "size_ratio": 1.0,
    "imbalance": 1.0, "kind": "image", "regions": 1, "proxy": False, "labels": False, "weights": True,
}  # fmt: skip
# What each rule needs to speak, and a change of it at which it is silent.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "inactive clients are forgotten": ({"participation": 0.2}, {"participation": 1.0}),
    "very uneven classes, few clients a round": ({"skew": 0.5, "participation": 0.5}, {"skew": 0.49}),
    "very uneven images, few clients a round": ({"skew": 0.5, "participation": 0.5}, {"kind": "text"}),
    "local models drift apart": ({"skew": 0.3}, {"skew": 0.29}),
    "a teacher at hand": ({}, {"weights": False}),
    "uneven classes": ({"skew": 0.3}, {"skew": 0.29}),
    "uneven classes of texts": ({"skew": 0.3, "kind": "text"}, {"kind": "table"}),
    "uneven classes in tables": ({"skew": 0.3, "kind": "table"}, {"skew": 0.29}),
    "nearly even classes": ({"skew": 0.29}, {"skew": 0.3}),
    "few samples a client": ({"samples": 49.0}, {"samples": 50.0}),
    "clients of very different size": ({"size_ratio": 5.0}, {"size_ratio": 4.9}),
    "few clients, all active": ({"clients": 10, "skew": 0.3}, {"clients": 11}),
    "samples without labels on the server": ({"proxy": True}, {"proxy": False}),
    "labelled samples on the server": ({"labels": True}, {"labels": False}),
    "several servers": ({"regions": 2, "labels": True}, {"regions": 1}),
    "a long tail of classes": ({"imbalance": 10.0}, {"imbalance": 9.9}),
    "weights must stay": ({"weights": False}, {"weights": True}),
    "weights must stay, mean features may cross": ({"weights": False}, {"weights": True}),
    "weights must stay, the server may learn prototypes": ({"weights": False}, {"weights": True}),
    "weights must stay, samples without labels at hand": ({"weights": False, "proxy": True}, {"proxy": False}),
}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.name)
def test_a_rule_speaks_where_it_should_for_methods_that_there_are(rule: Any) -> None:
    there, elsewhere = CASES[rule.name]
    assert rule.holds(EVEN | there)
    assert not rule.holds(EVEN | there | elsewhere)
    assert {method for method in rule.methods if rule in ranked(EVEN | there)[method]} == set(rule.methods)
    for method in rule.methods:
        registry.make(method)


def test_evidence_is_what_the_results_say() -> None:
    checks = {
        tuple(check["check"][name] for name in ("preset", "metric", "says")): check
        for claim in RESULTS["claims"]
        for check in claim["checks"]
    }
    cited = [(rule, rule.evidence) for rule in rules() if rule.evidence]
    assert len(cited) >= 4
    for rule, evidence in cited:
        found = checks[evidence["preset"], evidence["metric"], evidence["says"]]
        assert found["verdict"] == "confirmed"
        (of,), (than,) = found["check"]["of"], found["check"]["than"]
        assert (of["row"], than["row"], of.get("alpha")) == (evidence["of"], evidence["than"], evidence.get("alpha"))
        assert evidence["data"] == RESULTS["presets"][evidence["preset"]]["settings"]["data"]
        assert list(rule.methods) == [of["row"].lower()]  # and of no other method
        for name in ("mean", "low", "high"):
            assert found["difference"][name] == pytest.approx(evidence[name], abs=5e-5)


def test_facts_are_those_of_the_partition() -> None:
    config = resolve({"partition": "shards", "shards_per_client": 1, "clients": 10, "fraction": 0.2, "pool": 0.1})
    federation = divide(config, load_data(config))
    facts = facts_of(federation, config)
    assert facts["skew"] > 0.9  # a shard is of about one class
    assert (facts["kind"], facts["labels"], facts["proxy"], facts["clients"]) == ("image", True, False, 10)
    assert facts_of(federation, config.model_copy(update={"participation": 0.05}))["active"] == 1


def test_what_the_data_do_not_give_is_left_out_with_its_reason() -> None:
    assert "proxy" in lacks("feddf", EVEN)
    assert "pool" in lacks("fedgkd-vote", EVEN)
    assert not lacks("fedprox", EVEN)
    assert "sends" in lacks("scaffold", EVEN, only_weights=True)


def test_three_methods_are_named_with_why_cost_and_what_is_not_known() -> None:
    config = resolve({"alpha": 0.01, "fraction": 0.2, "model": "mlp", "participation": 0.2})
    found = advise(config)
    assert [each.method for each in found.suggestions] == ["fedkf", "fedavg+t1", "fedgkd"]
    kf, t1, gkd = found.suggestions
    assert (kf.time, t1.time) == (3.0, 1.0)
    assert (gkd.bytes_down, t1.bytes_down) == (2 * gkd.bytes_up, t1.bytes_up)  # two models go down, and one
    assert "not known" in found.to_markdown()
    with pytest.raises(SettingError, match="nothing else is left"):
        advise(config, weights=False, only_weights=True)


@pytest.mark.parametrize("proxy", [False, True])
def test_where_weights_must_stay_nothing_that_is_named_sends_any(proxy: bool) -> None:
    config = resolve({"fraction": 0.2, "model": "mlp", "proxy": "fashion-mini" if proxy else ""})
    found = advise(config, weights=False).suggestions
    assert [each.method for each in found][: 1 + proxy] == ["fedmd", "feddistill"][1 - proxy :]
    assert len(found) == 3
    for each in found:
        setup = example(each.method, {"model": "mlp", "hyper": each.settings})
        assert Kind.WEIGHTS not in {part.kind for part in setup.method.wire(setup.task).up.values()}


def test_fewer_than_three_are_said_to_be_all() -> None:
    found = advise(resolve({"partition": "iid", "participation": 1.0, "fraction": 0.2, "model": "mlp"}))
    assert [each.method for each in found.suggestions] == ["fedprox", "fedgkd"]
    assert "no rule speaks for another method here" in found.to_markdown()


def test_the_command_prints_it() -> None:
    answer = type_in("advise", "--alpha", "0.05", "--model", "mlp", "--no-weights")
    assert answer.code == 0, answer.err
    assert "feddistill" in answer.out
    assert "fedprox" not in answer.out
