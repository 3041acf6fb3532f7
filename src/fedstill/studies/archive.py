"""What finished runs came to, in files small enough for a repository: machines with the run directories come and go.

A file has one JSON object a line, sorted by the run's name. The name is a digest of the settings, which stand beside
it, and every line carries a digest of itself; both are checked when it is read.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from fedstill.building.config import IRRELEVANT, Config, anchored
from fedstill.core.errors import DataError, in_one_line
from fedstill.core.files import sha256, write_atomic
from fedstill.methods import registry
from fedstill.metrics.records import RoundRecord, Summary

_SCORES = ("accuracy", "amp", "fm", "wlp", "local_accuracy")
# Of a summary: what tables and claims read. Losses, bytes and results by class stay in the run directory.
_NUMBERS = tuple(f"{which}_{score}" for which in ("best", "final") for score in _SCORES)
_SUMMARY = (
    "method",
    "seed",
    "rounds",
    "best_round",
    "final_is_mean_of",
    "seconds",
    "stopped_by",
    "versions",
    *_NUMBERS,
)


@dataclass(frozen=True)
class Quote:
    """A number of a run of which nothing else is left."""

    metric: str  # a paper's word for it: a key of METRICS
    value: float
    model: str = ""  # which of the run's models
    at: dict[str, Any] = field(default_factory=dict)  # what the metric asks for beside, such as a round


@dataclass(frozen=True)
class ArchivedRun:
    """What a run came to; or, where it has no summary, quotes of it."""

    run: str  # its directory's name
    settings: dict[str, Any]
    summary: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)  # those with an evaluation or the end of an episode
    students: list[dict[str, Any]] = field(default_factory=list)  # of saved teachers: variants, and their accuracies
    quotes: list[Quote] = field(default_factory=list)
    source: str = ""  # where the quotes are from

    def as_summary(self) -> Summary:
        return cast(Summary, self.summary)

    def as_records(self) -> list[RoundRecord]:
        return cast(list[RoundRecord], self.rounds)

    def students_of(self, variants: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """What students came to that its teachers taught with each of some groups of settings; None: not kept."""
        wanted = _plain([dict(variant) for variant in variants])
        return next((each["accuracies"] for each in self.students if each["variants"] == wanted), None)


def settings_of(config: Config, root: Path | None = None) -> dict[str, Any]:
    """What a run's numbers depend on, where it is not the default; files below `root` by their path from there."""
    settings = {k: v for k, v in anchored(config).model_dump(exclude_defaults=True).items() if k not in IRRELEVANT}
    if revision := sum(part.revision for part in registry.find(config.method)):
        settings["revision"] = revision
    if config.hyper:
        settings["hyper"] = registry.with_old_names(config.method, config.hyper)
    if root:
        below = f"{root.resolve()}/"
        settings = {k: v.replace(below, "") if isinstance(v, str) else v for k, v in settings.items()}
    return dict(_plain(settings))


def name_of(settings: Mapping[str, Any]) -> str:
    """A name that only runs with the same numbers share, and that settings of later versions do not change."""
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    method = settings.get("method", Config.model_fields["method"].default)
    return f"{method.replace('/', '-').replace(':', '-')}-{key}"


def abridged(
    settings: dict[str, Any],
    summary: Mapping[str, Any],
    records: Iterable[Mapping[str, Any]],
    students: Sequence[tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]] = (),
) -> ArchivedRun:
    """What is kept of a finished run. Times of a round are not."""
    short = {key: summary[key] for key in _SUMMARY if summary.get(key) is not None}
    if "also" in summary:
        short["also"] = {m: {k: of[k] for k in _NUMBERS if of.get(k) is not None} for m, of in summary["also"].items()}
    taught = [{"variants": [dict(v) for v in variants], "accuracies": dict(of)} for variants, of in students]
    rounds = [found for record in records if len(found := _abridged_round(record)) > 2]  # than round and evaluated
    return ArchivedRun(name_of(settings), settings, _plain(short), _plain(rounds), _plain(taught))


def _abridged_round(record: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"round": record["round"], "evaluated": record["evaluated"]}
    if record["evaluated"]:
        found["accuracy"] = record.get("accuracy")
        if "also" in record:
            found["also"] = {model: {"accuracy": scores.get("accuracy")} for model, scores in record["also"].items()}
    if "episode" in record:
        episode = record["episode"]
        found["episode"] = {key: episode[key] for key in ("number", "stage") if key in episode}
        if "student" in episode:
            found["episode"]["student"] = {"accuracy": episode["student"]["accuracy"]}
        if "teachers" in episode:
            found["episode"]["teachers"] = {k: {"accuracy": v["accuracy"]} for k, v in episode["teachers"].items()}
    if "teachers_after" in record:
        found["teachers_after"] = record["teachers_after"]
    return found


class Archive:
    """The runs in a folder's files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {file.stem: _read(file) for file in sorted(folder.glob("*.jsonl"))}

    def run(self, name: str) -> ArchivedRun | None:
        """A run by its directory's name; None: there is none, or only quotes of it."""
        return next((run for run in self._named(name) if run.summary), None)

    def quoted(self, name: str, metric: str, model: str, at: Mapping[str, Any]) -> float | None:
        """A number of a run of which only quotes are left; None: it is not among them."""
        quotes = [quote for run in self._named(name) for quote in run.quotes]
        return next((q.value for q in quotes if (q.metric, q.model, q.at) == (metric, model, at)), None)

    def _named(self, name: str) -> list[ArchivedRun]:
        return [runs[name] for runs in self._files.values() if name in runs]

    def add(self, file: str, runs: Iterable[ArchivedRun]) -> int:
        """Put runs into a file, in place of what it has of them; how many lines are new or others now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{file}.jsonl"
        with _alone(self.folder):
            there = self._files[file] = _read(path) if path.exists() else {}  # somebody may have added to it
            new = {run.run: run for run in runs if there.get(run.run) != run}
            there.update(new)
            if new:
                write_atomic(path, "".join(f"{_line(there[name])}\n" for name in sorted(there)))
        return len(new)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process that asks for the same meanwhile."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _read(file: Path) -> dict[str, ArchivedRun]:
    found: dict[str, ArchivedRun] = {}
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            digest = entry.pop("sha256")
            entry["quotes"] = [Quote(**quote) for quote in entry.get("quotes", [])]
            run = ArchivedRun(**entry)
            if digest != _digest(run):
                raise ValueError("it is not what was written: its digest does not fit")
            if run.run != name_of(run.settings):
                raise ValueError(f"{run.run} does not fit its settings")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"{file}, line {number}: {in_one_line(error)}; put it back from a copy") from error
        found[run.run] = run
    return found


def _line(run: ArchivedRun) -> str:
    return json.dumps(_content(run) | {"sha256": _digest(run)}, ensure_ascii=False, allow_nan=False)


def _digest(run: ArchivedRun) -> str:
    return sha256(json.dumps(_content(run), sort_keys=True).encode())[:16]


def _content(run: ArchivedRun) -> dict[str, Any]:
    """Without what is empty."""
    return {key: value for key, value in asdict(run).items() if value}


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(value, default=str))
