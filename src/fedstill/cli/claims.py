"""What `fedstill claims` does: run what the papers' claims rest on, and write what came of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table

from fedstill.analysis.reproducing import unit
from fedstill.cli.commands import console
from fedstill.cli.presets import duration
from fedstill.core.errors import SettingError
from fedstill.core.files import read_json, write_atomic, write_json
from fedstill.metrics.statistics import ENOUGH, detectable
from fedstill.running.directory import without_nan
from fedstill.studies.cells import check, run_cells
from fedstill.studies.claims import Evidence, claims, saved
from fedstill.studies.progress import AllRuns
from fedstill.studies.reproduce import seconds_needed

Saved = dict[str, Any]


def carry_on(
    *,
    seeds: int,
    data_dir: str | None,
    engine: str | None = None,
    jobs: int,
    out: Path,
    page: Path | None,
    finished: bool,
    dry_run: bool,
) -> None:
    """Run what is not finished, unless only `finished` runs are to count, and write the page."""
    given = {key: value for key, value in (("data_dir", data_dir), ("engine", engine)) if value}
    evidence = Evidence(seeds, out / "cells", **given)
    every = [cell for claim in claims() for check in claim.check for cell in evidence.cells(check)]
    cells = list({cell.path: cell for cell in every}.values())
    todo = [cell for cell in cells if not cell.finished]
    console.print(
        f"{len(claims())} claims, {seeds} seeds: {len(cells)} runs, {len(cells) - len(todo)} done", style="bold"
    )
    if todo and not finished:
        check(todo)
        guess = duration(seconds_needed(todo))
        console.print(f"about {guess} for the clients' plain training; generators, teachers and tests come on top")
    if dry_run:
        return
    if not finished:
        with AllRuns(console, cells) as display:
            run_cells(cells, jobs=jobs, watcher=display)
    elif len(todo) == len(cells):
        raise SettingError(f"no run in {out / 'cells'} is finished")
    found = without_nan(saved(evidence))
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "claims.json", found)
    say(found, markdown(found), out / "claims.json", page or out / "claims.md")


def show(source: Path, page: Path | None) -> None:
    """Write the page of results that were saved before."""
    try:
        found: Saved = read_json(source)
        text = markdown(found)
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise SettingError(f"{source} is not what 'fedstill claims' saves: {error!r}") from error
    say(found, text, source, page)


def say(found: Saved, text: str, source: Path, page: Path | None) -> None:
    listing = Table(title="The papers' claims", caption="difference: mean and 95 % confidence interval of paired seeds")
    for column in ("", "difference", "seeds", "verdict"):
        listing.add_column(column, overflow="fold", justify="left" if column in ("", "verdict") else "right")
    for number, claim in enumerate(found["claims"], 1):
        listing.add_section()
        listing.add_row(f"[bold]{number}. {claim['title']}[/bold]", "", "", tally(claim))
        for result in claim["checks"]:
            listing.add_row(f"   {result['check']['says']}", difference(result), seeds_for(result), result["verdict"])
    console.print(listing)
    if page:
        write_atomic(page, text)
        console.print(f"saved: {page}, from {source}", highlight=False, soft_wrap=True)


def tally(claim: Saved) -> str:
    """A claim's verdicts in words."""
    counted = Counter(result["verdict"] for result in claim["checks"])
    judged = sum(n for verdict, n in counted.items() if verdict != "open")
    if not judged:
        return "open"
    beside = f"; {counted['open']} open" if counted["open"] else ""
    if counted["confirmed"] == judged:
        return "confirmed" + beside
    order = ("confirmed", "contradicted", "not seen at this scale", "too few seeds", "not run")
    return ", ".join(f"{counted[v]} {v}" for v in order if counted[v]) + f" of {judged}" + beside


def difference(result: Saved) -> str:
    """A mean and its interval, in the unit people read."""
    d = result.get("difference")
    return "" if d is None else f"{_in_unit(result, d['mean'])} {_interval(result, d)}".strip()


def seen_from(result: Saved) -> str:
    """The smallest difference that so many seeds would show in four cases of five."""
    found = detectable([a - b for a, b in zip(result["of"], result["than"], strict=True)])
    return "" if math.isnan(found) else _in_unit(result, found, "")


def seeds_for(result: Saved) -> str:
    """On how many seeds the sign is the one expected."""
    d = result.get("difference")
    if d is None:
        return ""
    lower = result["check"]["expect"] == "lower"
    pairs = list(zip(result["of"], result["than"], strict=True))
    ours, equal = sum((a < b if lower else a > b) for a, b in pairs), sum(a == b for a, b in pairs)
    return f"{ours}/{d['n']}" + (" lower" if lower else " higher") + (f", {equal} equal" if equal else "")


def _in_unit(result: Saved, value: float, sign: str = "+") -> str:
    factor, digits = unit(result["check"]["metric"])
    return f"{factor * value:{sign}.{digits}f}"


def _interval(result: Saved, d: Saved) -> str:
    if d.get("low") is None:
        return ""
    return f"[{_in_unit(result, d['low'])}, {_in_unit(result, d['high'])}]"


HEAD = """\
# What the papers claim, and what our runs show

`fedstill claims` writes this page; nothing in it is written by hand. Each number comes from a run directory of a preset
at its cpu scale, which two cores can do, so that sizes, networks and some datasets are smaller than the papers' (see
the end). To carry it all out again:

    fedstill claims --seeds 5 --data-dir DATA

A check compares two rows of a preset on the same seeds: same partition, same schedule of clients, same initial weights.
The interval is the 95 % confidence interval of the mean paired difference (Student's). All verdicts are about this
scale. **Confirmed**: the interval lies on the side that the paper says, or, where a check has a margin ("within",
"not more than"), inside it. **Contradicted**: on the other side, or outside the margin. **Not seen at this scale**: the
interval leaves it open; that is no evidence against a claim, least of all where most seeds agree with it. Fewer than
{enough} seeds are not judged; open questions are measured and not judged. **Seen from**: the smallest true difference
that so many seeds would show in four cases of five, from how much their differences vary. Where the paper's difference
is smaller than that, no verdict could be expected.

Of {judged} intervals that are judged about one in twenty misses by chance alone, and many share runs: a verdict whose
interval nearly touches zero is worth little. The number of seeds was fixed beforehand; adding seeds until an interval
clears zero would make these intervals false. Hyper-parameters are the papers', beside what a preset says it reduces;
none was chosen by results. Where a scale was changed after results had been seen, the claim's note says so. "Final" is
the mean of the last five evaluations. Accuracies are in percent; roughness is the standard deviation of the change from
one evaluation to the next, over the second half of them.
"""


def markdown(found: Saved) -> str:
    """The page."""
    results = [result for claim in found["claims"] for result in claim["checks"]]
    judged = sum(result["verdict"] not in ("open", "not run") for result in results)
    lines = [HEAD.format(enough=ENOUGH, judged=judged), "| | claim | verdict |", "|---|---|---|"]
    for number, claim in enumerate(found["claims"], 1):
        lines.append(f"| {number} | {claim['title']} | {tally(claim)} |")
    for number, claim in enumerate(found["claims"], 1):
        lines += [
            "",
            f"## {number}. {claim['title']}",
            "",
            f"Claimed in: {claim['paper']}. **{_capital(tally(claim))}.**",
            *(["", claim["note"]] if claim.get("note") else []),
            *(["", f"**What decides it.** {claim['decides']}"] if claim.get("decides") else []),
        ]
        lines += ["", "| check | preset | in | ours | against | difference | seen from | seeds | paper | verdict |"]
        lines.append("|---|---|---|--:|--:|--:|--:|--:|--:|---|")
        lines += [_line(result) for result in claim["checks"]]
    lines += ["", "## The runs", "", "What each preset reduces, and its settings at the cpu scale:", ""]
    for name, preset in found["presets"].items():
        settings = ", ".join(f"{key} {value}" for key, value in preset["settings"].items())
        lines.append(f"- `{name}` ({preset['title']}). Reduced: {preset['reduces']}. Settings: {settings}.")
    runs = {run for claim in found["claims"] for result in claim["checks"] for run in result["runs"]}
    versions = "; ".join(", ".join(f"{k} {v}" for k, v in json.loads(each).items()) for each in found["versions"])
    lines += ["", f"{len(runs)} runs. Versions: {versions}.", ""]
    return "\n".join(lines)


def _line(result: Saved) -> str:
    check = result["check"]
    cells = [check["says"], f"`{check['preset']}`", check["metric"]]
    if "difference" in result:
        means = [_in_unit(result, sum(result[side]) / len(result[side]), "") for side in ("of", "than")]
        paper = _in_unit(result, result["paper"]) if "paper" in result else "–"
        cells += [*means, difference(result), seen_from(result), seeds_for(result), paper]
    else:
        cells += [""] * 6
    return "| " + " | ".join([*cells, result["verdict"]]) + " |"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
