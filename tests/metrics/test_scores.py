"""Metrics beyond accuracy: scikit-learn's on a model's real outputs, the same on every engine."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import balanced_accuracy_score, f1_score, recall_score, roc_auc_score

import fedstill
from fedstill.core.errors import SettingError
from fedstill.engine import worker as workers
from fedstill.metrics import scores
from fedstill.metrics.records import value_of
from fedstill.metrics.scores import ClassCounts
from support.runs import SMALL, numbers

RUN: dict[str, Any] = SMALL | {"model": "mlp", "model_options": {"hidden": [8]}, "rounds": 2, "fraction": 0.2}
NAMES = ["balanced_accuracy", "macro_f1", "auroc", "ece"]


class Spy:
    """A metric that keeps what it was given: of the test set, of the clients' tests together, of each client's."""

    __name__ = "spy"

    def __init__(self) -> None:
        self.calls: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []

    def __call__(self, labels: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
        self.calls.append((labels, probabilities))
        return float(probabilities[np.arange(len(labels)), labels].mean())


def by_scikit_learn(name: str, labels: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    predicted = probabilities.argmax(1)
    if name == "balanced_accuracy":
        return float(balanced_accuracy_score(labels, predicted))
    if name == "macro_f1":
        return float(f1_score(labels, predicted, average="macro"))
    if name == "ece":
        edges, confidence = np.linspace(0, 1, 16), probabilities.max(1)
        found = 0.0
        for low, high in pairwise(edges):
            inside = (confidence > low) & (confidence <= high)
            if inside.any():
                found += inside.mean() * abs((predicted == labels)[inside].mean() - confidence[inside].mean())
        return found
    known = np.unique(labels)
    if len(known) == probabilities.shape[1]:
        return float(roc_auc_score(labels, probabilities, multi_class="ovr"))
    # scikit-learn refuses where a class has no samples: the mean over those that have.
    areas = [roc_auc_score(labels == c, probabilities[:, c]) for c in known] if len(known) > 1 else []
    return float(np.mean(areas)) if areas else math.nan


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:UserWarning:sklearn")  # about classes that a client does not have
def test_metrics_of_a_trained_model_are_scikit_learns() -> None:
    spy = Spy()
    result = fedstill.run("fedavg", **RUN, metrics=[*NAMES, spy])
    data = fedstill.load_dataset("fashion-mini", image_size=16)
    clients = fedstill.federate(
        data, clients=RUN["clients"], alpha=RUN["alpha"], fraction=RUN["fraction"], seed=0
    ).test_sizes
    last = spy.calls[-(2 + int((clients > 0).sum())) :]  # the test set, all clients' tests, those of each client
    labels, probabilities = last[0]
    assert labels.tolist() == data.test.y.tolist()
    with torch.no_grad():
        expected = result.model(data.normalise(data.test.x)).softmax(1)
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)
    assert [len(labels) for labels, _ in last[2:]] == clients[clients > 0].tolist()
    found = result.records[-1]["metrics"]
    for name in NAMES:
        on_test, pooled, *each = (by_scikit_learn(name, *call) for call in last)
        known = [value for value in each if not math.isnan(value)]
        assert found[name] == pytest.approx(on_test)
        assert found[f"pooled_{name}"] == pytest.approx(pooled)
        assert found[f"worst_{name}"] == pytest.approx(max(known) if name == "ece" else min(known))
        assert found[f"var_{name}"] == pytest.approx(np.var(known))
    final = np.mean([record["metrics"]["worst_auroc"] for record in result.records])
    assert value_of(result.summary, "final_worst_auroc") == pytest.approx(final)
    assert value_of(result.summary, "best_ece") == min(record["metrics"]["ece"] for record in result.records)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=40))
def test_counts_of_each_client_give_what_scikit_learn_makes_of_its_samples(rows: list[tuple[int, int, int]]) -> None:
    labels, predicted, owner = np.array(sorted(rows, key=lambda row: row[2])).T
    counts = ClassCounts.of(labels, predicted, 4, owner)
    recall, f1 = scores.balanced_accuracy(counts), scores.macro_f1(counts)
    for k in np.unique(owner).tolist():
        own, guess = labels[owner == k], predicted[owner == k]
        assert recall[k] == pytest.approx(recall_score(own, guess, labels=np.unique(own), average="macro"))
        assert f1[k] == pytest.approx(f1_score(own, guess, average="macro"))


def test_auroc_of_two_classes_is_that_of_the_second() -> None:
    rng = np.random.default_rng(0)
    labels, second = rng.integers(0, 2, 50), rng.random(50)
    found = scores.auroc(labels, np.stack([1 - second, second], 1))
    assert found == pytest.approx(roc_auc_score(labels, second))


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"engine": "process", "workers": 2}, {"engine": "process", "workers": 1}])
@pytest.mark.parametrize("local_test", ["split", "matched"])
def test_metrics_have_the_same_bits_on_every_engine(other: dict[str, Any], local_test: str) -> None:
    run = RUN | {"metrics": NAMES, "local_test": local_test}
    assert numbers(fedstill.run("fedavg", **run)) == numbers(fedstill.run("fedavg", **run | other))


def test_probabilities_are_computed_only_where_a_metric_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    original = workers.score  # type: ignore[attr-defined]

    def watched(*arguments: Any, probabilities: bool) -> Any:
        asked.append(probabilities)
        return original(*arguments, probabilities=probabilities)

    monkeypatch.setattr(workers, "score", watched)
    usual = fedstill.run("fedavg", **RUN, metrics=["macro_f1"])
    before = len(asked)
    assert not any(asked)
    more = fedstill.run("fedavg", **RUN, metrics=["auroc"])
    assert all(asked[before:])
    assert len(asked) == 2 * before, "no sample goes through the network twice"
    without = [{**record, "metrics": {}} for record in numbers(more)]
    assert [{**record, "metrics": {}} for record in numbers(usual)] == without


# --- metrics of one's own ---------------------------------------------------------------------------------------------


def returns_nothing(labels: Any, probabilities: Any) -> None: ...


def takes_one(labels: Any) -> float:
    return 0.0


def accuracy(labels: Any, probabilities: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["aroc"], "unknown metric 'aroc'; there are balanced_accuracy, macro_f1, auroc, ece, and file.py:function"),
        (["ece", "ece"], "metrics: ece stands there twice"),
        ([returns_nothing], r"returns_nothing\(labels, probabilities\).* returns a NoneType; it must return a number"),
        ([takes_one], "takes_one.* fails: TypeError"),
        ([accuracy], "metrics: accuracy is in every record already; give it another name"),
        ([3], "a list of names or functions is needed"),
        (["nowhere.py:cost"], "there is no file nowhere.py"),
    ],
)
def test_a_metric_that_is_none_is_refused_before_anything_is_trained(
    tmp_path: Path, metrics: list[Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        fedstill.run("fedavg", **SMALL, metrics=metrics, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_function_that_fails_for_some_clients_is_measured_over_the_others_and_says_so() -> None:
    def picky(labels: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
        if len(np.unique(labels)) < 3:
            raise ValueError("too few classes")
        return 1.0

    record = fedstill.run("fedavg", **RUN | {"alpha": 0.05, "rounds": 1}, metrics=[picky]).records[-1]
    assert record["metrics"]["picky"] == record["metrics"]["worst_picky"] == 1.0
    assert record["unmeasured"]["worst_picky"].endswith("clients: ValueError: too few classes")


def test_a_run_goes_on_with_a_function_only_if_it_is_given_again(tmp_path: Path) -> None:
    def cost(labels: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
        return -float((probabilities.argmax(1) != labels).mean())

    fedstill.run("fedavg", **RUN, metrics=[cost], out=tmp_path / "run")
    with pytest.raises(SettingError, match="cost was a function of your own; give it again"):
        fedstill.resume(tmp_path / "run", rounds=3)
    records = fedstill.resume(tmp_path / "run", rounds=3, metrics=[cost]).records
    assert [record["metrics"]["cost"] for record in records] == pytest.approx([r["accuracy"] - 1 for r in records])
