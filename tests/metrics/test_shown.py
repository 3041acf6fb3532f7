"""What a reader is told: rounds compared by the number that exists, imbalance, and why a number is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.metrics.records import headline, value_of
from fedstill.running.result import Result
from support import commandline
from support.runs import SMALL

LINEAR: dict[str, Any] = {k: v for k, v in SMALL.items() if k not in ("image_size", "fraction", "alpha", "clients")}
LINEAR |= {"model": "mlp", "model_options": {"hidden": [4]}, "participation": 1.0}


def rare(n: int = 500, positives: int = 7) -> fedstill.Dataset:
    """1.4 % are positive."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, 4)).astype("float32"), np.full(n, "no")
    y[rng.choice(n, positives, replace=False)] = "yes"
    test = np.full(1000, "no")
    test[:14] = "yes"
    return fedstill.from_arrays(x, y, rng.normal(size=(1000, 4)).astype("float32"), test)


def of_clients(*sizes: int, **settings: Any) -> Result:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 4)).astype("float32"), np.arange(n) % 2) for n in sizes]
    data = fedstill.from_clients(clients)
    return fedstill.run("fedavg", data=data, **LINEAR | {"rounds": 5, "lr": 0.5} | settings)


def test_without_a_global_test_set_rounds_are_compared_by_what_clients_measure() -> None:
    result = of_clients(60, 50, 40, target=0.01)
    best = max(result.records, key=lambda record: record["amp"])
    assert result.summary["final_accuracy"] is None
    assert (result.summary["best_round"], result.summary["best_round_of"]) == (best["round"], "amp")
    assert result.summary["rounds_to_target"] == 1
    assert result.summary["unmeasured"] == {"accuracy": "there is no global test set"}


def test_with_a_global_test_set_they_are_compared_by_accuracy() -> None:
    result = fedstill.run("fedavg", **SMALL)
    best = max(result.records, key=lambda record: record["accuracy"])
    assert (result.summary["best_round"], result.summary["best_round_of"]) == (best["round"], "accuracy")
    assert headline([]) is None


def test_one_client_with_tests_has_no_fairness() -> None:
    result = of_clients(60, 1, 2)  # of one or two samples, a fifth is none
    assert result.records[-1]["fm"] is None
    assert result.records[-1]["metrics"]["var_macro_f1"] is None
    assert result.records[-1]["unmeasured"]["fm"] == "only one client has test samples"


@pytest.mark.parametrize(("participation", "warned"), [(0.2, True), (0.5, False), (1.0, False)])
def test_a_round_of_one_client_is_warned_about(participation: float, warned: bool) -> None:
    setup = prepare(resolve(SMALL | {"clients": 5, "participation": participation}))
    assert any("of the 5 clients one trains in a round" in warning for warning in setup.warnings) == warned


def test_where_one_class_is_nearly_all_a_table_and_a_page_do_not_look_like_success(tmp_path: Path) -> None:
    path = tmp_path / "run"
    result = fedstill.run("fedavg", data=rare(), **LINEAR, clients=3, alpha=100.0, out=path, metrics=["ece"])
    assert result.summary["majority"] == {"name": "no", "share": 0.986, "tests": "test set"}
    shown = commandline.fedstill("show", path).out
    balanced = f"{100 * (value_of(result.summary, 'final_balanced_accuracy') or 0):.2f} %"
    row = next(line for line in shown.splitlines() if line.startswith("│ run"))
    assert "balanced" in shown
    assert [cell.strip() for cell in row.split("│")][4] == balanced
    assert "always predicting 'no' would reach 98.6 % on the test set" in " ".join(shown.split())
    assert "ECE" in shown
    commandline.fedstill("report", path, "--out", tmp_path / "page.html")
    page = re.sub("</?(span|strong)>", "", (tmp_path / "page.html").read_text())
    assert "Always predicting &#x27;no&#x27; would reach 98.6 % on the test set." in page
    assert f">{balanced}</td>" in page
    assert f">{value_of(result.summary, 'final_worst_ece'):.4f}</td>" in page


def test_where_classes_are_even_nothing_is_said_about_them(tmp_path: Path) -> None:
    answer = commandline.fedstill("run", "fedavg", *commandline.short(rounds=1, out=tmp_path / "run"))
    assert "always predicting" not in answer.out
    assert "balanced" not in answer.out


@pytest.mark.slow
def test_a_metric_of_ones_own_goes_all_the_way_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def missed(labels, probabilities):\n    return -float((probabilities.argmax(1) != labels).mean())\n"
    )
    words = commandline.short(rounds=2, alpha=100, out=tmp_path / "both")
    answer = commandline.fedstill("compare", "fedavg", "fedprox", *words, "--metrics", "auroc,mine.py:missed")
    assert answer.code == 0, answer.err
    assert [word in answer.out for word in ("AUROC", "missed", "worst client")] == [True] * 3
    records = [json.loads(line) for line in (tmp_path / "both/fedavg/metrics.jsonl").read_text().splitlines()]
    assert records[-1]["metrics"]["missed"] == pytest.approx(records[-1]["accuracy"] - 1)
    rows = json.loads((tmp_path / "both/comparison.json").read_text())
    assert rows[0]["final_worst_auroc"]["values"] == [pytest.approx(_mean(records, "worst_auroc"))]
    monkeypatch.chdir("/")  # the file is found again
    drawn = commandline.fedstill(
        "figure", "curves", tmp_path / "both", "--metric", "worst_auroc", "--out", tmp_path / "curves.svg"
    )
    assert "AUROC (worst client)" in (tmp_path / "curves.svg").read_text(), drawn.err
    assert commandline.fedstill("resume", tmp_path / "both/fedavg", "--rounds", 3).code == 0
    (tmp_path / "mine.py").write_text("def missed(labels, probabilities):\n    return 0.0\n")
    refused = commandline.fedstill("resume", tmp_path / "both/fedavg", "--rounds", 4)
    assert "the file has changed" in refused.err


def _mean(records: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([record["metrics"][name] for record in records]))
