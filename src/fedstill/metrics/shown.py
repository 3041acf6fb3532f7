"""What tables, pages and figures say of runs beyond their fixed columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.metrics.records import Majority, value_of

IMBALANCED = 0.8  # share of the largest class from which accuracy alone would look like success
# Where a metric is measured, by what its name begins with.
PLACES = {"": "test set", "pooled_": "clients' tests", "worst_": "worst client", "var_": "variance over clients"}
_WRITTEN = {"amp": "AMP", "fm": "FM", "wlp": "WLP", "auroc": "AUROC", "ece": "ECE", "macro_f1": "macro F1"}

Summaries = Sequence[Mapping[str, Any]]


def title(name: str) -> str:
    """The name of a metric for readers.

    >>> title("auroc"), title("worst_macro_f1"), title("my_cost")
    ('AUROC', 'macro F1 (worst client)', 'my cost')
    """
    if name.startswith("val_"):
        return f"{title(name.removeprefix('val_'))} (validation)"
    for start, place in PLACES.items():
        if start and name.startswith(start):
            return f"{title(name.removeprefix(start))} ({place})"
    return _WRITTEN.get(name, name.replace("_", " "))


def is_imbalanced(majority: Majority | None) -> bool:
    """Whether the test samples are mostly of one class."""
    return majority is not None and majority["share"] >= IMBALANCED


def always_predicting(majority: Majority) -> str:
    """What a model that has learnt nothing would come to, in words."""
    name, share, tests = majority["name"], majority["share"], majority["tests"]
    return f"always predicting {name!r} would reach {100 * share:.1f} % on the {tests}"


def balanced_column(summaries: Summaries) -> str | None:
    """The number that tables show beside accuracy where the test classes are imbalanced; None where they are not."""
    if not any(is_imbalanced(summary.get("majority")) for summary in summaries):
        return None
    names = ("final_balanced_accuracy", "final_pooled_balanced_accuracy")  # the latter without a global test set
    return next((name for name in names if any(value_of(s, name) is not None for s in summaries)), names[0])


def named_metrics(summaries: Summaries) -> list[str]:
    """The metrics that the settings of these runs name."""
    return list(dict.fromkeys(name for summary in summaries for name in summary.get("metric_names", [])))


def remarks(summaries: Summaries) -> list[str]:
    """What a reader has to know of the numbers: what predicting one class would reach, and why some are missing."""
    found = [always_predicting(s["majority"]) for s in summaries if is_imbalanced(s.get("majority"))]
    for summary in summaries:
        found += [f"{title(name)}: {reason}" for name, reason in summary.get("unmeasured", {}).items()]
    return list(dict.fromkeys(found))
