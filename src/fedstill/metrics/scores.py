"""Metrics beyond accuracy: of a model on one test set, and over the clients' own.

Those in `COUNTED` follow from how many samples, predictions and right predictions each class has, which is always
known. The others are functions of labels (N,) and class probabilities (N, C), computed only where a run names them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core import custom
from fedstill.core.errors import SettingError

Labels = NDArray[np.int64]
Numbers = NDArray[np.float64]
Function = Callable[[Labels, Numbers], float]

ECE_BINS = 15
_AT_ONCE = 1 << 22  # counts of clients by classes that are held at a time


@dataclass(frozen=True)
class ClassCounts:
    """Of each class: its samples, how often it was predicted, and how often rightly; each (…, classes)."""

    samples: NDArray[Any]
    predictions: NDArray[Any]
    right: NDArray[Any]

    @classmethod
    def of(cls, labels: Labels, predicted: Labels, classes: int, owner: Labels | None = None) -> ClassCounts:
        """Of some samples together; with `owner`, from 0, of each owner's, (owners, classes).

        >>> ClassCounts.of(np.array([0, 0, 1]), np.array([0, 1, 1]), 2).right.tolist()
        [1, 1]
        """
        rows = 1 if owner is None else int(owner.max(initial=-1)) + 1
        start = 0 if owner is None else owner * classes
        right = labels == predicted

        def counted(which: Labels) -> Labels:
            return np.bincount(which, minlength=rows * classes).reshape(rows, classes)[0 if owner is None else ...]

        return cls(counted(labels + start), counted(predicted + start), counted((labels + start)[right]))

    def stacked(self) -> NDArray[Any]:
        """Samples, predictions and right ones as one array, (3, classes)."""
        return np.stack([self.samples, self.predictions, self.right])

    def times(self, factor: float) -> ClassCounts:
        """The same, each sample counting so much."""
        return ClassCounts(self.samples * factor, self.predictions * factor, self.right * factor)


def balanced_accuracy(counts: ClassCounts) -> Numbers:
    """Mean recall of the classes that have samples; NaN without any."""
    return _mean_share(counts.right, counts.samples)


def macro_f1(counts: ClassCounts) -> Numbers:
    """Mean F1 of the classes that have samples or predictions; NaN without any."""
    return _mean_share(2 * counts.right, counts.samples + counts.predictions)


def _mean_share(part: NDArray[Any], whole: NDArray[Any]) -> Numbers:
    shares = np.divide(part, whole, out=np.zeros(whole.shape), where=whole > 0)
    known = (whole > 0).sum(-1)
    means: Numbers = np.divide(shares.sum(-1), known, out=np.full(known.shape, np.nan), where=known > 0)
    return means


def auroc(labels: Labels, probabilities: Numbers) -> float:
    """Area under the ROC curve: of the second of two classes, of more the mean of each against the others.

    Classes without samples, and one that has all of them, have no such curve and are left out.
    """
    from sklearn.metrics import roc_auc_score  # half a second, and only those who name it need it

    classes = probabilities.shape[1]
    found = [c for c in np.unique(labels).tolist() if (labels != c).any()]
    chosen = [c for c in found if classes > 2 or c == 1]
    areas = [float(roc_auc_score(labels == c, probabilities[:, c])) for c in chosen]
    return float(np.mean(areas)) if areas else np.nan


def ece(labels: Labels, probabilities: Numbers) -> float:
    """Expected calibration error (Guo et al. 2017): |accuracy - confidence| over 15 bins of equal width.

    >>> round(ece(np.array([0, 1]), np.array([[0.8, 0.2], [0.8, 0.2]])), 9)  # half are right, and 80 % are expected
    0.3
    """
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    bins = np.clip(np.ceil(confidence * ECE_BINS).astype(np.int64) - 1, 0, ECE_BINS - 1)
    gaps = np.bincount(bins, weights=right - confidence, minlength=ECE_BINS)
    return float(np.abs(gaps).sum() / len(labels)) if len(labels) else np.nan


COUNTED: dict[str, Callable[[ClassCounts], Numbers]] = {
    "balanced_accuracy": balanced_accuracy,
    "macro_f1": macro_f1,
}
FUNCTIONS: dict[str, Function] = {"auroc": auroc, "ece": ece}
_TAKEN = ("accuracy", "loss", "amp", "fm", "wlp", "local_accuracy")  # names of other numbers of a record
_ERRORS = ("ece",)  # the smaller, the better


def lower_is_better(name: str) -> bool:
    """Whether a smaller number of this name in a record is the better one.

    >>> [lower_is_better(name) for name in ("auroc", "worst_ece", "var_auroc")]
    [False, True, True]
    """
    return name.startswith("var_") or re.sub("^(pooled|worst|val)_", "", name) in _ERRORS


@dataclass(frozen=True)
class Metric:
    """A function of labels and class probabilities, under the name that it has in records."""

    name: str
    function: Function


def check_names(names: Sequence[str]) -> None:
    """Refuse the name of a metric that there is not, or that stands there twice."""
    for name in names:
        if not (custom.is_reference(name) or name.startswith("<") or name in (*COUNTED, *FUNCTIONS)):
            known = ", ".join((*COUNTED, *FUNCTIONS))
            raise SettingError(f"unknown metric {name!r}; there are {known}, and file.py:function for one of your own")
    shown = [*_TAKEN, *map(short_name, names)]
    if twice := next((name for name in shown if shown.count(name) > 1), None):
        what = "is in every record already; give it another name" if twice in _TAKEN else "stands there twice"
        raise SettingError(f"metrics: {twice} {what}")


def short_name(name: str) -> str:
    """What a metric of the settings is called in records.

    >>> short_name("mine.py:cost"), short_name("<cost>"), short_name("auroc")
    ('cost', 'cost', 'auroc')
    """
    return name.rpartition(":")[2] if custom.is_reference(name) else name.strip("<>")


def find(names: Sequence[str], given: Sequence[Function], classes: int) -> tuple[Metric, ...]:
    """The functions of probabilities that settings name; `given` are those that were handed over as objects.

    Each of a user's own is tried on a few samples of every class, before a round is spent on it.
    """
    check_names(names)
    own = {f"<{getattr(function, '__name__', type(function).__name__)}>": function for function in given}
    found = []
    for name in names:
        if name in COUNTED:
            continue
        if name not in FUNCTIONS and name not in own and not custom.is_reference(name):
            raise SettingError(f"metrics: {short_name(name)} was a function of your own; give it again")
        function: Any = FUNCTIONS.get(name) or own.get(name) or custom.load(name)
        if not callable(function):
            raise SettingError(f"metrics: {name} is not a function")
        if name not in FUNCTIONS:
            _try(short_name(name), function, classes)
        found.append(Metric(short_name(name), function))
    return tuple(found)


def _try(name: str, function: Function, classes: int) -> None:
    labels = np.arange(2 * classes) % classes
    scores = 1 + np.eye(classes)[labels] + np.arange(2 * classes)[:, None] / (2 * classes)
    call = f"metrics: {name}(labels, probabilities), with arrays of ({2 * classes},) and ({2 * classes}, {classes}),"
    try:
        value = function(labels, scores / scores.sum(1, keepdims=True))
    except Exception as error:
        raise SettingError(f"{call} fails: {custom.summary(error)}") from error
    if not isinstance(value, int | float | np.number):
        raise SettingError(f"{call} returns a {type(value).__name__}; it must return a number, the larger the better")


@dataclass(frozen=True)
class Outcomes:
    """What a model made of labelled samples; `probabilities` only where a metric needs them."""

    labels: Labels
    predicted: Labels
    probabilities: Numbers | None = None

    def take(self, index: Labels) -> Outcomes:
        """Of some of the samples."""
        likely = None if self.probabilities is None else self.probabilities[index]
        return Outcomes(self.labels[index], self.predicted[index], likely)


@dataclass
class Table:
    """Numbers by name, NaN where there is none, and what is to be said about them."""

    values: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # why a number is missing, or what it leaves out

    def __or__(self, other: Table) -> Table:
        return Table(self.values | other.values, self.reasons | other.reasons)

    def add_clients(self, name: str, pooled: float, local: Numbers) -> None:
        """A metric over the clients: of their samples together, of the worst served, and how unevenly."""
        self.values[f"pooled_{name}"] = float(pooled)
        self.add_each_client(name, local)

    def add_each_client(self, name: str, local: Numbers) -> None:
        """A metric of the client that is served worst, and how unevenly; NaN stands for clients without one."""
        known = local[~np.isnan(local)]
        pick = np.max if lower_is_better(name) else np.min
        self.values[f"worst_{name}"] = float(pick(known)) if len(known) else np.nan
        self.values[f"var_{name}"] = float(known.var()) if len(known) > 1 else np.nan  # of one, it says nothing


def on_one_set(found: Outcomes, classes: int, metrics: Sequence[Metric]) -> Table:
    """Every metric of a model on one test set."""
    counts, table = ClassCounts.of(found.labels, found.predicted, classes), Table()
    table.values |= {name: float(function(counts)) for name, function in COUNTED.items()}
    for metric in metrics:
        value, reason = _value(metric, found, slice(None))
        table.values[metric.name] = value
        if reason and len(found.labels):
            table.reasons[metric.name] = reason
    return table


def over_clients(found: Outcomes, offsets: Labels, classes: int, metrics: Sequence[Metric]) -> Table:
    """Every metric over the clients' own tests; client k has the samples from offsets[k] to offsets[k+1]."""
    local = {name: np.full(len(offsets) - 1, np.nan) for name in COUNTED}
    for first in range(0, len(offsets) - 1, step := max(1, _AT_ONCE // classes)):
        ends = offsets[first : first + step + 1]
        where = slice(int(ends[0]), int(ends[-1]))
        owner = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
        counts = ClassCounts.of(found.labels[where], found.predicted[where], classes, owner)
        for name, function in COUNTED.items():
            values = function(counts)  # clients after the last that has tests are not among the owners
            local[name][first : first + len(values)] = values
    table, pooled = Table(), on_one_set(found, classes, metrics)
    for name in COUNTED:
        table.add_clients(name, pooled.values[name], local[name])
    for metric in metrics:
        tried = [_value(metric, found, slice(int(a), int(b))) for a, b in pairwise(offsets)]
        table.add_clients(metric.name, pooled.values[metric.name], np.array([value for value, _ in tried]))
        tested = int((np.diff(offsets) > 0).sum())
        if failed := [reason for (_, reason), n in zip(tried, np.diff(offsets), strict=True) if n and reason]:
            table.reasons[f"worst_{metric.name}"] = f"undefined for {len(failed)} of {tested} clients: {failed[0]}"
    return table


def over_sites(counts: Mapping[int, ClassCounts], names: Sequence[str]) -> Table:
    """The named metrics over clients elsewhere that sent no more than counts."""
    table = Table()
    if counts:
        each = [np.stack([getattr(c, part) for c in counts.values()]) for part in ("samples", "predictions", "right")]
        together = ClassCounts(*(part.sum(0) for part in each))
        for name in (name for name in names if name in COUNTED):
            table.add_clients(name, float(COUNTED[name](together)), COUNTED[name](ClassCounts(*each)))
    return table


def _value(metric: Metric, found: Outcomes, where: slice) -> tuple[float, str]:
    """A metric of some of the samples, or NaN and why it has none."""
    labels, probabilities = found.labels[where], found.probabilities
    if not len(labels) or probabilities is None:
        return np.nan, "no test samples"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scikit-learn's, about classes without samples: the reason says it
            value = float(metric.function(labels, probabilities[where]))
    except Exception as error:  # noqa: BLE001 - of the user's own function; one client must not end a run
        return np.nan, custom.summary(error)
    if np.isfinite(value):
        return value, ""
    return np.nan, "all samples are of one class" if len(np.unique(labels)) == 1 else f"it is {value}"
