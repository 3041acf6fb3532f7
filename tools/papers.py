"""The runs that docs/results.md still wants: what is next, how long it takes, and carrying it out.

    python tools/papers.py --list                       # what is wanted, what is there, minutes left on one core
    python tools/papers.py --data-dir DATA              # carry it out, the most telling for a minute first
    python tools/papers.py --data-dir DATA --minutes 60 # begin nothing after an hour
    python tools/papers.py --collect                    # only put what is finished in --out into the archive
    python tools/papers.py --page                       # docs/results.json and docs/results.md from the archive

tools/papers.toml has the list. Runs go to --out, each in a directory of its own; one that was interrupted goes on where
it stopped. As soon as one is finished, what it came to is added to docs/archive, which belongs into the repository: on
the next machine it need not be run again. For two idle cores start it twice, with --part 1/2 and --part 2/2.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from factorial import HERE, Factorial, Runs
from pydantic import BaseModel, ConfigDict, model_validator

from fedstill.core.errors import FedstillError
from fedstill.studies.archive import Archive, ArchivedRun, abridged, settings_of
from fedstill.studies.cells import Cell, carry_out
from fedstill.studies.claims import with_archived
from fedstill.studies.presets import Scale
from fedstill.studies.reproduce import Plan, plans, variants_of
from fedstill.studies.reteach import accuracies

ARCHIVE, RESULTS = HERE / "docs" / "archive", HERE / "docs" / "results.json"


class Wanted(BaseModel):
    """An entry of the list."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    why: str
    preset: str = ""
    factorial: str = ""
    scale: Scale = "cpu"
    rows: list[str] = []  # of the preset; empty: all
    variants: list[str] = []  # of the factorial; empty: all
    at: dict[str, Any] = {}  # where in the preset's sweep
    seeds: int
    minutes: float

    @model_validator(mode="after")
    def _one_of_two(self) -> Wanted:
        if bool(self.preset) == bool(self.factorial):
            raise ValueError(f"{self.why}: name a preset or a factorial")
        return self

    @property
    def name(self) -> str:
        return f"factorial {self.factorial}" if self.factorial else f"{self.preset} {self.scale}"

    @property
    def file(self) -> str:
        """Of the archive."""
        return f"factorial-{self.factorial}" if self.factorial else self.preset.partition("/")[0]


@dataclass(frozen=True)
class Run:
    """A run that is wanted."""

    wanted: Wanted
    cell: Cell  # with what it came to, if the archive has it
    plan: Plan | None  # of its preset
    factorial: Runs | None = None  # that it is one of

    @property
    def kept(self) -> bool:
        """Whether the archive has it, with the students that are wanted of its teachers."""
        known = self.cell.archived
        return known is not None and (not self.variants or known.students_of(self.variants) is not None)

    @property
    def anew(self) -> Cell:
        """The run by its directory alone, which students need, whatever the archive has of it."""
        return replace(self.cell, archived=None)

    @property
    def variants(self) -> list[dict[str, Any]]:
        """The settings of the students that are wanted of its teachers; none, if it has no teachers."""
        if self.factorial:
            return list(self.factorial.students.values())
        return variants_of(self.plan) if self.plan and self.plan.preset.reteach else []

    def archived(self, archive: Archive) -> ArchivedRun:
        """What is kept of it, now that it is finished."""
        known = archive.run(self.cell.path.name)
        students = [(each["variants"], each["accuracies"]) for each in known.students] if known else []
        if self.variants and (known is None or known.students_of(self.variants) is None):
            students.append((self.variants, asdict(accuracies(self.cell.path, self.variants))))
        root = HERE if self.wanted.factorial else None
        return abridged(settings_of(self.cell.config, root), self.cell.summary(), self.cell.records(), students)


def wanted_list() -> list[Wanted]:
    return [Wanted.model_validate(each) for each in tomllib.loads((HERE / "tools/papers.toml").read_text())["wanted"]]


def runs(wanted: Wanted, out: Path, data_dir: str, archive: Archive) -> list[Run]:
    """Those of an entry, seed by seed."""
    given = {"data_dir": data_dir} if data_dir else {}
    if wanted.factorial:
        path = HERE / "tools" / "factorials" / f"{wanted.factorial}.toml"
        factorial = Factorial.model_validate(tomllib.loads(path.read_text()))
        seeds, variants = factorial.seeds[: wanted.seeds], wanted.variants or list(factorial.variants)
        of = Runs(factorial, out / wanted.factorial, data_dir, archive)
        found = [Run(wanted, c, None, of) for (v, _, seed), c in of.cells.items() if seed in seeds and v in variants]
    else:
        (plan,) = plans(wanted.preset, wanted.scale, wanted.seeds, out / "cells", **given)
        plan = with_archived(plan, archive)
        if unknown := set(wanted.rows) - {point.row for point, _ in plan.runs}:
            raise FedstillError(f"tools/papers.toml: {wanted.name} has no row {', '.join(sorted(unknown))}")
        chosen = [
            cells
            for point, cells in plan.runs
            if point.row in (wanted.rows or [point.row]) and wanted.at.items() <= point.at.items()
        ]
        found = [Run(wanted, cells[seed], plan) for seed in range(wanted.seeds) for cells in chosen]
    if not found:
        raise FedstillError(f"tools/papers.toml: {wanted.name} has no such runs ({wanted.why})")
    return list({run.cell.path: run for run in found}.values())


def show(out: Path, data_dir: str, archive: Archive) -> None:
    total, seen = 0.0, set[Path]()
    for wanted in wanted_list():
        every = runs(wanted, out, data_dir, archive)
        left = [run for run in every if not run.kept and not run.anew.finished and run.cell.path not in seen]
        seen.update(run.cell.path for run in every)
        minutes = wanted.minutes * len(left)
        total += minutes
        print(f"{len(left):3} of {len(every):3} runs  {minutes:6.0f} min  {wanted.name}: {wanted.why}")
    print(f"{total / 60:.1f} hours left on one core")


def todo(out: Path, data_dir: str, archive: Archive, part: tuple[int, int]) -> Iterator[Run]:
    """Runs that the archive has not, or not with all students, in the order of the list."""
    number, of = part
    for wanted in wanted_list():
        for i, run in enumerate(runs(wanted, out, data_dir, archive)):
            if not run.kept and i % of == number - 1:
                yield replace(run, cell=run.anew)


def _part(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError("such as 1/2: the first of two parts")
    return int(number), int(of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/papers"), help="where run directories are")
    parser.add_argument("--data-dir", default="", help="where dataset files are; empty: $FEDSTILL_DATA")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="only every N-th run, from the I-th")
    parser.add_argument("--list", action="store_true", help="only show what is wanted")
    parser.add_argument("--collect", action="store_true", help="only put finished runs into the archive")
    parser.add_argument("--page", action="store_true", help="write the results and their page")
    given = parser.parse_args()
    given.out = given.out.resolve()
    os.chdir(HERE)  # factorials name tools/held_out.py
    if given.data_dir:
        os.environ["FEDSTILL_DATA"] = given.data_dir  # functions that load data look there
    archive, began, failed = Archive(ARCHIVE), time.monotonic(), 0
    if given.list:
        show(given.out, given.data_dir, archive)
        return
    if given.page:
        write_page(given.out)
        return
    for run in todo(given.out, given.data_dir, archive, given.part):
        if not run.cell.finished:
            if given.collect:
                continue
            if (time.monotonic() - began) / 60 > given.minutes:
                break
            print(f"{run.wanted.name}: {run.cell.path}, about {run.wanted.minutes:g} min", flush=True)
            try:
                carry_out(run.cell, engine="inline", workers=1)
            except FedstillError as error:  # the others go on
                print(f"{run.cell.path}: {error}", file=sys.stderr, flush=True)
                failed += 1
                continue
        archive.add(run.wanted.file, [run.archived(archive)])
    if failed:
        sys.exit(1)


def write_page(out: Path) -> None:
    """By the commands, in their order: findings, factorials' tables, the page."""
    page = HERE / "docs" / "results.md"
    words = ["--finished", "--archive", str(ARCHIVE), "--earlier", str(RESULTS), "--out", str(out), "--page", str(page)]
    subprocess.run([sys.executable, "-m", "fedstill", "claims", *words], check=True, stdout=subprocess.DEVNULL)
    RESULTS.write_bytes((out / "claims.json").read_bytes())
    for path in sorted((HERE / "tools" / "factorials").glob("*.toml")):
        if (ARCHIVE / f"factorial-{path.stem}.jsonl").is_file():
            words = [str(path), "--out", str(out / path.stem), "--table"]
            words += ["--archive", str(ARCHIVE), "--results", str(RESULTS)]
            tool = [sys.executable, str(HERE / "tools" / "factorial.py")]
            subprocess.run([*tool, *words], check=True, stdout=subprocess.DEVNULL)
    words = ["--saved", str(RESULTS), "--page", str(page)]
    subprocess.run([sys.executable, "-m", "fedstill", "claims", *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
