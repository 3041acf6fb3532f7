"""A small factorial of settings on several seeds: which of them decides?

    python tools/factorial.py tools/factorials/dafkd.toml --out runs/dafkd --data-dir DATA
    python tools/factorial.py tools/factorials/dafkd.toml --out runs/dafkd --table      # the table of what is there
    python tools/factorial.py tools/factorials/dafkd.toml --out runs/dafkd --table --results docs/results.json
    fedstill claims --saved docs/results.json --page docs/results.md                    # the page, with the table

The file says what is expected and why (`hypothesis`), before any run; `settings` of every run; `factors`, each with its
levels, of which the first is what the presets do; `variants`, groups of settings that every combination is run with, of
which the first is compared with each of the others; `seeds` of at least 100, so that 0 to 4 stay untouched. Judge on
images held out of the training images (tools/held_out.py), not on the test images.

With `confounded`, of factors with two levels each, only a fraction of the combinations is run: a factor named there has
its second level where an odd number of the factors listed for it have theirs (a fractional factorial design). Its
effect is still of all runs, but not told apart from what those do together. With `teachers`, a run has these settings
and saves its teachers, and variants and the factors in `taught` are settings of students that they teach at its end:
the teachers are trained once for all of them.

Every run has its directory: interrupted, the same command goes on where it stopped. The runs of a seed are carried out
before those of the next, and the table is written to table.md after every run.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedstill.core.files import read_json, write_atomic, write_json
from fedstill.metrics.statistics import detectable, paired, spread
from fedstill.studies.archive import Archive, name_of, settings_of
from fedstill.studies.cells import Cell, check, run_cells
from fedstill.studies.presets import resolved
from fedstill.studies.reteach import accuracies

HERE = Path(__file__).parents[1]  # so that a run has the same name in every checkout, though it names tools/held_out.py
UNTOUCHED = 100  # seeds below are for runs that confirm
Levels = tuple[int, ...]  # of each factor


class Factorial(BaseModel):
    """What a file holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    hypothesis: str
    metric: str = "final_accuracy"
    seeds: list[int] = Field(min_length=2)
    settings: dict[str, Any]
    factors: dict[str, list[Any]] = Field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = Field(min_length=1)
    confounded: dict[str, list[str]] = Field(default_factory=dict)  # factors, by those that say which level they have
    teachers: dict[str, Any] = Field(default_factory=dict)  # settings of the runs, where students are compared
    taught: list[str] = Field(default_factory=list)  # factors that are settings of students

    @model_validator(mode="after")
    def _fits(self) -> Factorial:
        if self.confounded and any(len(levels) != 2 for levels in self.factors.values()):
            raise ValueError("confounded: it takes factors of two levels each")
        basic = self.factors.keys() - self.confounded.keys()
        for name, listed in self.confounded.items():
            if name not in self.factors or len(listed) < 2 or not basic.issuperset(listed):
                raise ValueError(
                    f"confounded: {name} is to be a factor, with two or more of {', '.join(sorted(basic))}"
                )
        if unknown := set(self.taught) - self.factors.keys() or (set(self.taught) if not self.teachers else set()):
            raise ValueError(f"taught: {', '.join(sorted(unknown))}: factors of a file with teachers")
        return self

    @property
    def combinations(self) -> list[Levels]:
        found = []
        for levels in itertools.product(*(range(len(levels)) for levels in self.factors.values())):
            at = dict(zip(self.factors, levels, strict=True))
            if all(at[name] == sum(at[one] for one in listed) % 2 for name, listed in self.confounded.items()):
                found.append(levels)
        return found

    def students(self) -> dict[tuple[str, Levels], dict[str, Any]]:
        """Settings of each student that the teachers of a run teach, by variant and combination of `taught`.

        What a variant sets itself is not varied: labels alone stay labels alone.
        """
        if not self.teachers:
            return {}
        choices = list(itertools.product(*(range(len(self.factors[name])) for name in self.taught)))
        return {
            (variant, levels): {n: self.factors[n][level] for n, level in zip(self.taught, levels, strict=True)} | own
            for levels in choices
            for variant, own in self.variants.items()
        }

    def taught_levels(self, levels: Levels) -> Levels:
        """Of a combination, those of `taught`."""
        return tuple(levels[list(self.factors).index(name)] for name in self.taught)

    def at(self, levels: Levels) -> dict[str, Any]:
        """The settings of a combination. A level that is a table sets several things at once."""
        found: dict[str, Any] = {}
        for (name, values), level in zip(self.factors.items(), levels, strict=True):
            if name in self.taught:
                continue
            found |= values[level] if isinstance(values[level], dict) else {name: values[level]}
        return found


class Runs:
    """The runs of a factorial, and what those that are finished came to."""

    def __init__(self, factorial: Factorial, out: Path, data_dir: str, archive: Archive | None = None) -> None:
        self.factorial, self.cells = factorial, dict[tuple[str, Levels, int], Cell]()
        self.students = factorial.students()
        for seed, levels in itertools.product(factorial.seeds, factorial.combinations):
            for variant, own in factorial.variants.items():
                run = factorial.teachers or own
                layers = [factorial.settings, factorial.at(levels), run, {"seed": seed, "data_dir": data_dir}]
                config = resolved(run["method"], layers)  # without factors that are settings of other methods
                name = name_of(settings_of(config, HERE))
                known = archive.run(name) if archive else None
                self.cells[variant, levels, seed] = Cell(out / "cells" / name, config, archived=known)

    def number(self, variant: str, levels: Levels, seed: int) -> float | None:
        cell, factorial = self.cells[variant, levels, seed], self.factorial
        if not cell.finished:
            return None
        if self.students:
            place = list(self.students).index((variant, factorial.taught_levels(levels)))
            return float(self.taught(cell)["students"][place])
        return float(cell.summary()[factorial.metric])  # type: ignore[literal-required]

    def taught(self, cell: Cell) -> dict[str, Any]:
        """The accuracies of a finished run's teachers, and of their students."""
        variants = list(self.students.values())
        known = cell.archived.students_of(variants) if cell.archived else None
        return known or asdict(accuracies(cell.path, variants))

    def markdown(self) -> str:
        """The page of a factorial."""
        return f"# {self.factorial.title}\n\nExpected: {self.factorial.hypothesis}\n\n{self.tables()}"

    def tables(self) -> str:
        """Each combination with its variants' means, then each factor's effect."""
        f = self.factorial
        first, *others = f.variants
        gaps = [(first, other) for other in others]
        numbers = {key: self.number(*key) for key in self.cells}
        done = sum(value is not None for value in numbers.values())
        what = "students. Accuracy" if f.teachers else f"runs. {f.metric}"

        def means(of: Sequence[str], combinations: Sequence[Levels]) -> dict[int, float]:
            """By seed, a variant's mean over combinations, or that of its difference to another variant."""
            found = {}
            for seed in f.seeds:
                known = [number for v in of for c in combinations if (number := numbers[v, c, seed]) is not None]
                if len(known) == len(of) * len(combinations):
                    mean, *other = np.reshape(known, (len(of), -1)).mean(axis=1)
                    found[seed] = float(mean - sum(other))
            return found

        lines = [f"{done} of {len(numbers)} {what}, in %.", ""]
        lines += _head([*f.factors, *f.variants, *map(" − ".join, gaps)])
        for levels in f.combinations:
            row = [_level(values[level]) for values, level in zip(f.factors.values(), levels, strict=True)]
            row += [_mean(list(means((variant,), [levels]).values())) for variant in f.variants]
            row += [_difference(means((one,), [levels]), means((other,), [levels])) for one, other in gaps]
            lines.append("| " + " | ".join(row) + " |")
        lines += ["", "What a level changes against the first of its factor, over all combinations of the others:", ""]
        lines += _head(["factor", "level", first, *(f"in {' − '.join(gap)}" for gap in gaps)])
        for place, (name, levels_of) in enumerate(f.factors.items()):
            for level in range(1, len(levels_of)):
                after, before = ([c for c in f.combinations if c[place] == n] for n in (level, 0))
                effects = [_difference(means(of, after), means(of, before)) for of in [(first,), *gaps]]
                lines.append("| " + " | ".join([name, _level(levels_of[level]), *effects]) + " |")
        lines += [
            "",
            "Differences are of paired seeds, with Student's 95 % interval of their mean, on how many seeds they are",
            "above 0 and, after ≥, the smallest difference that so many seeds would show in four cases of five.",
        ]
        if f.confounded:
            every = math.prod(len(levels) for levels in f.factors.values())
            listed = "; ".join(f"{name} from {', '.join(of)}" for name, of in f.confounded.items())
            lines += [
                f"{len(f.combinations)} of {every} combinations were run: an effect is not told apart from what others",
                f"do together ({listed}).",
            ]
        return "\n".join([*lines, ""])


def _head(columns: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]


def _level(value: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _mean(values: list[float]) -> str:
    found = spread(values) if values else None
    return "" if found is None else f"{100 * found.mean:.2f}" + (f" ± {100 * found.std:.2f}" * (found.n > 1))


def _difference(of: dict[int, float], than: dict[int, float]) -> str:
    """On the seeds that both have."""
    seeds = sorted(of.keys() & than.keys())
    if len(seeds) < 2:
        return ""
    ours, theirs = ([side[seed] for seed in seeds] for side in (of, than))
    d = paired(ours, theirs, interval="student")
    power = detectable(np.subtract(ours, theirs).tolist())
    return f"{100 * d.mean:+.2f} [{100 * d.low:+.2f}, {100 * d.high:+.2f}] {d.wins}/{d.n}, ≥ {100 * power:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="where the runs and the table go")
    parser.add_argument("--data-dir", default="", help="where dataset files are; empty: $FEDSTILL_DATA")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--table", action="store_true", help="write the table of what is finished, run nothing")
    parser.add_argument(
        "--archive", type=Path, help="what finished runs came to, which are not run again: docs/archive"
    )
    parser.add_argument("--results", type=Path, help="what 'fedstill claims' saved: the tables are added to it")
    given = parser.parse_args()
    if given.data_dir:
        os.environ["FEDSTILL_DATA"] = given.data_dir  # functions that load data look there
    factorial = Factorial.model_validate(tomllib.loads(given.file.read_text()))
    if min(factorial.seeds) < UNTOUCHED:
        parser.error(f"{given.file}: seeds must be at least {UNTOUCHED}; smaller ones are for runs that confirm")
    runs = Runs(factorial, given.out, given.data_dir, Archive(given.archive) if given.archive else None)
    cells = list({cell.path: cell for cell in runs.cells.values()}.values())
    if not given.table:
        check([cell for cell in cells if not cell.finished])
        given.out.mkdir(parents=True, exist_ok=True)
        for start in range(0, len(cells), given.jobs):
            run_cells(cells[start : start + given.jobs], jobs=given.jobs)
            write_atomic(given.out / "table.md", runs.markdown())
    if given.results:
        results = read_json(given.results)
        results.setdefault("factorials", {})[given.file.stem] = {"title": factorial.title, "tables": runs.tables()}
        write_json(given.results, results)
    print(runs.markdown())


if __name__ == "__main__":
    main()
