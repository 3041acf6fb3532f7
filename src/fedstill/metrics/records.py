"""What a run writes down about its rounds and about itself: the lines of metrics.jsonl, and summary.json.

What is not a number there is None. Keys that not every round or run has are optional; those that a method adds
on its own account are not declared, and found by `value_of`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Required, TypeAlias, TypedDict

# None where it was not measured. Who reads a score that must be there need not ask: hence Any.
Measured: TypeAlias = float | Any


class Scores(TypedDict, total=False):
    """How one model does on the global test set, and over the clients."""

    accuracy: Measured
    loss: Measured
    amp: Measured
    fm: Measured
    wlp: Measured
    local_accuracy: Measured  # of the models as clients trained them, on their own tests
    per_class: list[Measured]
    val_accuracy: Measured  # on all samples that are held out for validation, the clients' and the server's
    val_loss: Measured
    val_amp: Measured  # over the clients
    val_fm: Measured
    val_wlp: Measured
    # Beyond accuracy: `auroc` on the global test set, `pooled_auroc`, `worst_auroc` and `var_auroc` over the clients.
    metrics: dict[str, Measured]
    unmeasured: dict[str, str]  # why a number is missing, or what it leaves out


VALIDATION = ("val_accuracy", "val_loss", "val_amp", "val_fm", "val_wlp")


class GroupScores(Scores, total=False):
    """The same of the clients that have one network: of their group's model, or of their own ones."""

    clients: int


class EpisodeModel(TypedDict):
    """How a region's model or the global one does on the global test set, at an episode's end."""

    accuracy: Measured
    confusion: list[list[int]]  # true classes by predicted ones


class EpisodeRecord(TypedDict, total=False):
    """The end of an episode; what the method notes is among it."""

    number: Required[int]
    regions: Required[list[str]]  # those that took part, by name
    bytes: Required[int]  # between the global server and the regions
    stage: str  # "average", or the stage that the method ran
    disagreement: Measured
    reliability: list[list[float]]  # (regions, classes)
    server_seconds: Required[float]
    teachers: dict[str, EpisodeModel]  # the regions' models, if evaluated
    student: EpisodeModel  # the global model, if evaluated


class RoundRecord(Scores, total=False):
    """One line of metrics.jsonl. The scores are those of the main model, None in a round without evaluation."""

    round: Required[int]
    evaluated: bool
    train_loss: Measured
    bytes_down: int
    bytes_up: int
    clients: int
    dropped: int
    seconds: float
    client_seconds: float
    server_seconds: float
    eval_seconds: float
    also: dict[str, Scores]  # further models, by name
    groups: dict[str, GroupScores]  # where clients have different networks, by the name of the group
    episode: EpisodeRecord
    server: dict[str, Any]  # what the method notes
    teachers_after: dict[str, Measured]  # accuracy of each region's model, one round after an episode's end
    left_out: list[str]  # sites whose answers do not count
    untested: list[str]  # clients with tests that did not report a result
    callbacks: dict[str, Measured]  # what callbacks logged
    epsilon: Measured  # what the models so far tell of a client or sample, if that is bounded
    privacy: dict[str, Any]  # the rest of this promise


class BestAndFinal(TypedDict, total=False):
    """The best of each score, and the mean of its last evaluations."""

    best_accuracy: Measured
    final_accuracy: Measured
    best_loss: Measured
    final_loss: Measured
    best_amp: Measured
    final_amp: Measured
    best_fm: Measured
    final_fm: Measured
    best_wlp: Measured
    final_wlp: Measured
    best_local_accuracy: Measured
    final_local_accuracy: Measured
    final_per_class: list[Measured] | None
    metrics: dict[str, Measured]  # `best_…` and `final_…` of those beyond accuracy


class Majority(TypedDict):
    """The largest class of the test samples: what always predicting it would come to."""

    name: str
    share: float
    tests: str  # which: "test set", or "clients' tests" where there is no other


class Summary(BestAndFinal, total=False):
    """What summary.json holds."""

    method: Required[str]
    seed: Required[int]
    rounds: Required[int]
    final_is_mean_of: int
    best_round: int | None
    best_round_of: str | None  # the number that it is the best of: accuracy, or AMP where there is no global test set
    metric_names: list[str]  # the metrics that the settings name
    unmeasured: dict[str, str]  # of the last evaluation
    majority: Majority
    bytes_down: int
    bytes_up: int
    dropped: int
    seconds: float
    eval_seconds: float
    bytes_regions: int
    also: dict[str, BestAndFinal]  # further models, by name
    groups: dict[str, BestAndFinal]  # where clients have different networks
    rounds_to_target: int | None
    parameters: int
    versions: dict[str, str]
    stopped_by: str  # the callback that ended the run before its last round
    epsilon: Measured  # with a private method: what was spent
    privacy: dict[str, Any]
    selected: dict[str, Any]  # with `select`: the round that is best by it, and that round's scores
    restored_round: int  # the round whose model is the result, if a callback chose one


def further(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a run, or a round, scored beside its main model, by name: further models, and groups of clients."""
    return {**summary.get("also", {}), **summary.get("groups", {})}


def headline(records: Sequence[Mapping[str, Any]]) -> str | None:
    """The number by which rounds are compared: accuracy, or what there is where there is no global test set.

    >>> headline([{"accuracy": None, "amp": 0.5}])
    'amp'
    """
    names = ("accuracy", "amp", "local_accuracy")
    return next((name for name in names if any(value_of(record, name) is not None for record in records)), None)


def curve_metrics(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What curves show unless somebody chooses: how accurate, and how even over the clients."""
    return [headline(records) or "accuracy", "fm"]


def value_of(record: Mapping[str, Any], name: str) -> float | None:
    """A number of a record by a name that is data; dots lead into it, as in `also.without T1.accuracy`.

    What is not there may be in the table `metrics` beside it. In a list, such as `per_class`, numbers lead.

    >>> value_of({"server": {"loss": 0.5}}, "server.loss"), value_of({"metrics": {"auroc": 0.9}}, "auroc")
    (0.5, 0.9)
    >>> value_of({"per_class": [0.8, 0.6]}, "per_class.1")
    0.6
    """
    found: Any = record
    *path, last = name.split(".")
    for part in path:
        found = _inside(found, part)
    if isinstance(found, Mapping) and last not in found:
        found = found.get("metrics")
    found = _inside(found, last)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def _inside(holder: Any, part: str) -> Any:
    if isinstance(holder, list):
        return holder[int(part)] if part.isdecimal() and int(part) < len(holder) else None
    return holder.get(part) if isinstance(holder, Mapping) else None


def scalars(record: Mapping[str, Any], separator: str = "/", before: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record by name, those inside others and of each class too; matrices are left out.

    >>> dict(scalars({"round": 1, "loss": 0.5, "fm": None, "per_class": [0.1, 0.2], "also": {"mean": {"loss": 1.0}}}))
    {'loss': 0.5, 'per_class/0': 0.1, 'per_class/1': 0.2, 'also/mean/loss': 1.0}
    >>> dict(scalars({"also": {"mean": {"loss": 1.0}}}, "."))  # as `value_of` reads them
    {'also.mean.loss': 1.0}
    """
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, separator, f"{before}{name}{separator}")
        elif isinstance(value, list):
            numbers = {str(i): v for i, v in enumerate(value) if isinstance(v, float)}
            yield from scalars(numbers, separator, f"{before}{name}{separator}")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "round":
            yield f"{before}{name}", float(value)
