"""What the papers claim, checked against runs of presets."""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedstill.building.config import Config
from fedstill.core.errors import DataError, SettingError, unknown
from fedstill.metrics.statistics import ENOUGH, Paired, paired
from fedstill.studies import presets
from fedstill.studies.archive import Archive
from fedstill.studies.cells import Cell
from fedstill.studies.presets import METRICS, Point
from fedstill.studies.reproduce import MEAN, Plan, number, plans, student_accuracies, variants_of

Term = dict[str, Any]  # a row of a preset, and where in its sweep
Expectation = Literal["higher", "lower", "same", "not higher", "open"]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Gap(_Table):
    """The best of some numbers less the best of others."""

    of: list[Term] = Field(min_length=1)
    than: list[Term] = Field(min_length=1)


class Check(Gap):
    """A claim in numbers."""

    says: str
    preset: str
    metric: str
    growth: Gap | None = None  # the gap is to exceed this one
    expect: Expectation
    margin: float = 0.0

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.metric not in METRICS:
            raise unknown("metric", self.metric, METRICS)
        if self.expect in ("same", "not higher") and self.margin <= 0:
            raise SettingError(f"{self.says}: {self.expect!r} needs a margin above 0")
        return self

    @property
    def terms(self) -> list[Term]:
        return [*self.of, *self.than, *(self.growth.of + self.growth.than if self.growth else [])]


class Claim(_Table):
    title: str
    paper: str
    note: str = ""  # what a reader must know to trust the verdicts
    # Of what is not confirmed:
    hypotheses: list[str] = Field(default_factory=list)  # why, and of each whether it has been tested
    decides: str = ""  # what has been found out about them
    factorials: list[str] = Field(default_factory=list)  # what tests them: files of tools/factorials, without .toml
    still_open: str = ""
    check: list[Check] = Field(min_length=1)


@cache
def claims() -> list[Claim]:
    """Every claim that is checked, in order."""
    text = files("fedstill.presets").joinpath("claims.toml").read_text("utf-8")
    return [Claim.model_validate(claim) for claim in tomllib.loads(text)["claim"]]


@dataclass(frozen=True)
class Place:
    """Where a term's numbers are: one run a seed."""

    point: Point
    cells: tuple[Cell, ...]
    further: dict[str, Any]  # what a metric asks for beside, such as a round


class Evidence:
    """The runs that claims rest on, those that are finished of them."""

    def __init__(self, seeds: int, root: Path, archive: Archive | None = None, **given: Any) -> None:
        self._seeds, self._root, self._archive, self._given = seeds, root, archive, given
        self._plans: dict[str, Plan] = {}
        self._student_accuracies: dict[str, dict[str, list[float | None]]] = {}
        self._finished: set[tuple[Path, bool]] = set()  # many checks ask for the same run

    def plan(self, preset: str) -> Plan:
        if preset not in self._plans:
            (plan,) = plans(preset, "cpu", self._seeds, self._root, **self._given)
            self._plans[preset] = with_archived(plan, self._archive) if self._archive else plan
        return self._plans[preset]

    def cells(self, check: Check) -> list[Cell]:
        """Each run that a check needs."""
        found = [cell for term in check.terms for cell in self._place(check, term).cells]
        return list({cell.path: cell for cell in found}.values())

    def seeds(self, check: Check) -> list[int]:
        """Those of which every run is finished."""
        places = [self._place(check, term) for term in check.terms]
        return [s for s in range(self._seeds) if all(self._known(check, place, s) for place in places)]

    def missing(self, check: Check) -> list[Cell]:
        """The runs that a check still needs."""
        places = [self._place(check, term) for term in check.terms]
        found = [place.cells[s] for s in range(self._seeds) for place in places if not self._known(check, place, s)]
        return list({cell.path: cell for cell in found}.values())

    def _known(self, check: Check, place: Place, seed: int) -> bool:
        return self.finished(place.cells[seed]) or self._quoted(check, place, seed) is not None

    def _quoted(self, check: Check, place: Place, seed: int) -> float | None:
        """A number of a run of which nothing else is left."""
        if self._archive is None or self.plan(check.preset).preset.reteach:
            return None
        return self._archive.quoted(place.cells[seed].path.name, check.metric, place.point.model, place.further)

    def finished(self, cell: Cell) -> bool:
        """Whether a run is; once it is, its directory is not read again for that.

        An archived run may serve one preset and not another, that wants other students of its teachers.
        """
        key = cell.path, cell.archived is not None
        if key not in self._finished and cell.finished:
            self._finished.add(key)
        return key in self._finished

    def numbers(self, check: Check, term: Term, seeds: Sequence[int]) -> list[float]:
        """A term's numbers on some seeds."""
        plan, place = self.plan(check.preset), self._place(check, term)
        if plan.preset.reteach:
            if check.preset not in self._student_accuracies:
                every = student_accuracies(plan, seeds)
                self._student_accuracies[check.preset] = {_key(row, at): values for row, at, values in every}
            values = self._student_accuracies[check.preset][_key(term["row"], place.point.at)]
        else:
            at = place.point.at | place.further
            values = [
                number(cell, place.point.model, check.metric, at)
                if self.finished(cell := place.cells[s])
                else self._quoted(check, place, s)
                for s in seeds
            ]
        known = [v for v in values if v is not None and math.isfinite(v)]
        if len(known) < len(values):
            raise DataError(f"{check.preset}: {check.metric} of {term} is not a number in every run")
        return known

    def same_rounds(self, check: Check, seed: int) -> bool:
        """Whether all runs of a check, but for those only quoted, were evaluated in the same rounds."""
        cells = [self._place(check, term).cells[seed] for term in check.terms]
        runs = [cell.records() for cell in cells if self.finished(cell)]
        rounds = [[record["round"] for record in records if record["evaluated"]] for records in runs]
        return all(each == rounds[0] for each in rounds)

    def runs(self, check: Check, seeds: Sequence[int]) -> list[str]:
        """The directories that a check was read from."""
        found = [self._place(check, term).cells[s].path.name for term in check.terms for s in seeds]
        return list(dict.fromkeys(found))

    def near(self) -> dict[str, Any]:
        """What the finished runs at the scale nearest to the papers came to, beside the papers' numbers."""
        found: dict[str, Any] = {}
        for name in presets.names():
            if presets.load(name).near is None:
                continue
            (plan,) = plans(name, "near", self._seeds, self._root, **self._given)
            plan = with_archived(plan, self._archive) if self._archive else plan
            rows = []
            for (point, cells), metric in itertools.product(plan.runs, plan.preset.metrics):
                done = [cell for cell in cells if self.finished(cell)]
                paper = presets.paper_number(name, plan.preset, point.row, metric, point.at) or {}
                values = [number(cell, point.model, metric, point.at) for cell in done]
                row = {"row": point.row, "at": point.at, "metric": metric, "values": values}
                rows += [row | {"paper": paper.get("value"), "runs": [cell.path.name for cell in done]}] if done else []
            if rows:
                reduces = plan.reduction.reduces if plan.reduction else ""
                found[name] = {"title": plan.title, "reduces": reduces, "rows": rows}
        return found

    def paper(self, check: Check, term: Term) -> float | None:
        """What the paper has for a term."""
        place, preset = self._place(check, term), self.plan(check.preset).preset
        found = presets.paper_number(check.preset, preset, term["row"], check.metric, place.point.at | place.further)
        return found["value"] if found else None

    def _place(self, check: Check, term: Term) -> Place:
        row, where = term["row"], {k: v for k, v in term.items() if k != "row"}
        plan = self.plan(check.preset)
        for point, cells in plan.runs:
            # A taught student's teachers have no runs of their own.
            same_row = point.row == row or (plan.preset.reteach and (row.startswith("Teacher ") or row == MEAN))
            further = {k: v for k, v in where.items() if k not in point.at}
            if same_row and all(where.get(k) == v for k, v in point.at.items()) and further.keys() <= _FURTHER:
                return Place(point, cells, further)
        raise SettingError(f"{check.preset} has no {term}")


def with_archived(plan: Plan, archive: Archive) -> Plan:
    """A plan whose runs need not be run again where the archive has what it takes of them."""

    def look_up(cell: Cell) -> Cell:
        run = archive.run(cell.path.name)
        if run and plan.preset.reteach and run.students_of(variants_of(plan)) is None:
            run = None
        return replace(cell, archived=run)

    runs = tuple((point, tuple(look_up(cell) for cell in cells)) for point, cells in plan.runs)
    return replace(plan, runs=runs)


_FURTHER = {"round", "episode"}  # what a metric may ask for beside a point of the sweep


def _key(row: str, at: Mapping[str, Any]) -> str:
    return json.dumps([row, at], sort_keys=True)


@dataclass(frozen=True)
class Finding:
    """What a check came to."""

    check: Check
    seeds: list[int]
    of: list[float]
    than: list[float]
    difference: Paired | None  # None: no seed is finished
    paper: float | None  # the paper's difference, where it prints all that it takes
    verdict: str


def finding(check: Check, evidence: Evidence) -> Finding:
    """Carry out a check on the seeds whose runs are finished."""
    seeds = evidence.seeds(check)
    if not seeds:
        return Finding(check, [], [], [], None, None, "not run")
    ours, larger_is_better = METRICS[check.metric]
    if (ours.startswith("final_") or ours == "roughness") and not evidence.same_rounds(check, seeds[0]):
        raise SettingError(f"{check.says}: its runs are evaluated in different rounds, so name one (top1_at_round)")
    best = max if larger_is_better else min

    def bests(terms: Sequence[Term]) -> list[float]:
        return [best(values) for values in zip(*(evidence.numbers(check, t, seeds) for t in terms), strict=True)]

    def printed(terms: Sequence[Term]) -> float | None:
        values = [evidence.paper(check, term) for term in terms]
        return None if None in values else best(v for v in values if v is not None)

    def paper_gap(terms: Gap) -> float | None:
        of, than = printed(terms.of), printed(terms.than)
        return None if of is None or than is None else of - than

    of, than, paper = bests(check.of), bests(check.than), paper_gap(check)
    if check.growth:
        of = [a - b for a, b in zip(of, than, strict=True)]
        than = [a - b for a, b in zip(bests(check.growth.of), bests(check.growth.than), strict=True)]
        elsewhere = paper_gap(check.growth)
        paper = None if paper is None or elsewhere is None else paper - elsewhere
    difference = paired(of, than, interval="student")
    return Finding(check, seeds, of, than, difference, paper, verdict(check.expect, difference, check.margin))


def verdict(expect: Expectation, found: Paired, margin: float = 0.0) -> str:
    """What a difference's confidence interval says about an expectation.

    >>> verdict("higher", Paired(0.02, 0.01, 0.03, 5, 5))
    'confirmed'
    >>> verdict("higher", Paired(0.02, -0.01, 0.03, 4, 5))
    'not seen at this scale'
    """
    if expect == "open":
        return "open"
    if found.n < ENOUGH:
        return "too few seeds"
    low, high = (found.low, found.high) if expect != "lower" else (-found.high, -found.low)
    supported, refuted = {
        "higher": (low > 0, high < 0),
        "lower": (low > 0, high < 0),
        "same": (-margin < low and high < margin, low > margin or high < -margin),
        "not higher": (high < margin, low > margin),
    }[expect]
    return "confirmed" if supported else "contradicted" if refuted else "not seen at this scale"


def saved(evidence: Evidence, earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Every claim with its findings, and the settings of the runs behind them, as data.

    Of `earlier` results, whose runs may be elsewhere, a check's are kept where they have more seeds.
    """
    earlier = earlier or {"versions": [], "presets": {}, "claims": [], "factorials": {}}
    used = list(dict.fromkeys(check.preset for claim in claims() for check in claim.check))
    described_presets = {name: described(evidence.plan(name)) for name in used}
    known = {
        _question(result["check"]): result
        for claim in earlier["claims"]
        for result in claim["checks"]
        if earlier["presets"].get(result["check"]["preset"]) == described_presets.get(result["check"]["preset"])
    }

    def result(check: Check) -> dict[str, Any]:
        here = _as_data(finding(check, evidence), evidence)
        there = known.get(_question(here["check"]), here)
        return there | {"check": here["check"]} if len(there["seeds"]) > len(here["seeds"]) else here

    every = {cell.path: cell for claim in claims() for check in claim.check for cell in evidence.cells(check)}
    summaries = [cell.summary() for cell in every.values() if evidence.finished(cell)]
    versions = {json.dumps(summary.get("versions", {}), sort_keys=True) for summary in summaries}
    return {
        "versions": sorted(versions.union(earlier["versions"])),
        "presets": described_presets,
        "claims": [
            claim.model_dump(exclude={"check"}) | {"checks": [result(check) for check in claim.check]}
            for claim in claims()
        ],
        "factorials": earlier.get("factorials", {}),
        "near": earlier.get("near", {}) | evidence.near(),
        "tuned": earlier.get("tuned", ""),  # by tools/tuned.py
    }


def _question(check: Mapping[str, Any]) -> str:
    """A check but for its words."""
    return json.dumps({key: value for key, value in check.items() if key != "says"}, sort_keys=True)


def _as_data(found: Finding, evidence: Evidence) -> dict[str, Any]:
    runs = evidence.runs(found.check, found.seeds)
    entry = asdict(found) | {"check": found.check.model_dump(exclude_none=True), "runs": runs}
    return {key: value for key, value in entry.items() if value is not None}


# What a reader wants to know of a run; the rest is in the preset.
_SHOWN = ("data", "fraction", "samples_per_client", "pool", "model", "clients", "participation", "partition", "rounds",
         "epochs", "batch_size", "optimizer", "lr")  # fmt: skip
_SELDOM = ("fraction", "samples_per_client", "pool")  # shown where set


def described(plan: Plan) -> dict[str, Any]:
    config = plan.runs[0][0].config.model_dump()
    entry = {k: config[k] for k in _SHOWN if k not in _SELDOM or config[k] != Config.model_fields[k].default}
    return {"title": plan.title, "reduces": plan.preset.cpu.reduces if plan.preset.cpu else "", "settings": entry}
