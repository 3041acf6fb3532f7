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
from fedstill.core.errors import DataError, SettingError
from fedstill.core.files import read_json, write_atomic, write_json
from fedstill.metrics.statistics import ENOUGH, detectable
from fedstill.running.directory import without_nan
from fedstill.studies.archive import Archive
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
    earlier: Path | None,
    archive: Path | None,
    dry_run: bool,
) -> None:
    """Run what is not finished, unless only `finished` runs are to count, and write the page."""
    known = _read(earlier) if earlier else None
    given = {key: value for key, value in (("data_dir", data_dir), ("engine", engine)) if value}
    if archive and not archive.is_dir():
        raise SettingError(f"--archive {archive}: there is no such folder; the repository's is docs/archive")
    evidence = Evidence(seeds, out / "cells", Archive(archive) if archive else None, **given)
    checks = [check for claim in claims() for check in claim.check]
    cells = list({cell.path: cell for check in checks for cell in evidence.cells(check)}.values())
    todo = list({cell.path: cell for check in checks for cell in evidence.missing(check)}.values())
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
        with AllRuns(console, todo) as display:
            run_cells(todo, jobs=jobs, watcher=display)
    elif len(todo) == len(cells) and not known:
        raise SettingError(f"no run in {out / 'cells'} is finished")
    found = without_nan(saved(evidence, known))
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "claims.json", found)
    say(found, markdown(found), out / "claims.json", page or out / "claims.md")


def show(source: Path, page: Path | None) -> None:
    """Write the page of results that were saved before."""
    found = _read(source)
    say(found, markdown(found), source, page)


def _read(source: Path) -> Saved:
    try:
        found: Saved = read_json(source)
        markdown(found)
    except (OSError, DataError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise SettingError(f"{source} is not what 'fedstill claims' saves: {error!r}") from error
    return found


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
    open_ = counted.pop("open", 0)
    if not counted:
        return "open"
    order = ("confirmed", "contradicted", "not seen at this scale", "too few seeds", "not run")
    first, *others = (verdict for verdict in order if counted[verdict])
    told = f"{counted[first]} of {counted.total()} {first}" if others else first
    told += "".join(f", {counted[verdict]} {verdict}" for verdict in others)
    return told + (f"; {open_} open" if open_ else "")


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

fedstill has the tables and figures of five papers on federated learning where the clients' data differ. This page takes
their main claims one by one, says how we checked each, and what came out, also where it is not what the paper says.

- **FedKF** (Zhou et al. 2022, [arXiv:2207.11447](https://arxiv.org/abs/2207.11447)): clients learn from the mean of all
  clients' latest models, on a generator's samples. **T1** is the first half of it, and can be added to any method: the
  model is the mean of every client's latest one, also of those that did not take part in the round.
- **FedGKD** (Yao et al. 2022, [arXiv:2107.00051](https://arxiv.org/abs/2107.00051)): the mean of the last global models
  teaches every client. **VOTE**: each of them does, weighted by its loss on the server's samples.
- **F2L** (Nguyen et al. 2022, [arXiv:2209.14520](https://arxiv.org/abs/2209.14520)): regions train alone for an
  episode; then their models teach a global student on labelled samples of the server, each by its reliability on the
  class (**LKD**), or are averaged once they agree.
- **DaFKD** (Wang et al., CVPR 2023): the clients' models teach the global one on generated samples; each counts as far
  as its discriminator takes such samples for its own.
- **FedHyb** (Liu et al. 2024): clients teach their own sub-networks, and the server distils the clients' models on
  proxy data.

FedAvg, FedProx and q-FFL are the baselines that these papers compare themselves with.
[Which method for what](choose-a-method.md), [glossary](glossary.md).

## How to read it

`fedstill claims` writes this page. No number in a table was written by hand: each is read from runs of a
[preset](reproduce.md), a paper's table or figure as a file of settings, at the `cpu` scale, which two cores can do:
networks and numbers of samples, clients and rounds are smaller than the papers', and some datasets are others
([the list](#the-runs)). To carry it all out again, and to go on with what is not run yet:

    fedstill claims --seeds 5 --data-dir DATA
    python tools/papers.py --data-dir DATA

A check compares two things on the same seeds: the same data partition, schedule of clients and initial weights. *alpha*
says how even the partition is: at 100 all clients hold about the same, at 0.01 each holds hardly more than one class.
Runs were made on several machines over time, and [kept](reproduce.md#finished-runs-are-kept) when finished. On another
processor the same code and seed round differently, which after many rounds makes a few tenths of a point; where the two
sides of a check are from different machines, that is part of its interval. The columns:

- **measured**: accuracies are in percent, of the model that the check names. *Final* is the mean of the last five
  evaluations, *best* the highest one; chance is 10 % for ten classes. *AMP* is the mean accuracy over the clients' own
  test samples, *WLP* that of the worst-served client, *FM* the variance between clients, smaller is fairer. *Roughness*
  is the standard deviation of the change from one evaluation to the next, over the second half of them: smaller is
  steadier.
- **mean**, **compared with**: the means over the seeds of what the check is about, and of what it is compared with.
  Where a check compares two gaps ("by more at …"), these are the gaps.
- **difference**: of these two, with the 95 % confidence interval of the mean paired difference (Student's).
- **seen from**: the smallest true difference that so many seeds would show in four cases of five, from how much their
  differences vary. Where the paper's difference is smaller than that, no verdict could be expected.
- **seeds**: on how many of them the sign is the one expected.
- **paper**: the paper's difference, where it prints the numbers.

The verdicts, all about this scale:

- **confirmed**: the interval lies on the side that the paper says, or, where a check has a margin ("within", "not more
  than"), inside it.
- **contradicted**: it lies on the other side, or outside the margin.
- **not seen at this scale**: the interval leaves it open; that is no evidence against a claim, least of all where most
  seeds agree with it.
- **open**: a question on which the paper says nothing, or both; measured and not judged.
- **too few seeds**: fewer than {enough} are not judged. **not run**: declared, and still to be run.

Of {judged} intervals that are judged about one in twenty misses by chance alone, and many share runs: a verdict whose
interval nearly touches zero is worth little. The number of seeds was fixed beforehand; adding seeds until an interval
clears zero would make these intervals false. Hyper-parameters are the papers', beside what a preset says it reduces;
none was chosen by results, but for controls that say so: theirs were chosen by a factorial, on held-out images and
other seeds. Where a scale was changed after results had been seen, the claim's note says so.

## The claims
"""
_NEAREST = """\
The scale `near` of a preset is as near to the paper as two cores can bear. Few seeds are no verdict; these numbers
stand beside the paper's."""
_MEASURED = {
    "top1": "accuracy",
    "final_top1": "final accuracy",
    "global_acc": "final accuracy",
    "best_top1": "best accuracy",
    "top1_at_round": "accuracy after round {round}",
    "taught": "share that distils",
}


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
        ]
        lines += ["", "| check | preset | measured | mean | compared with | difference | seen from | seeds | paper |"]
        lines[-1] += " verdict |"
        lines.append("|---|---|---|--:|--:|--:|--:|--:|--:|---|")
        lines += [_line(result) for result in claim["checks"]]
        lines += _what_decides(claim, found.get("factorials", {}))
    return "\n".join([*lines, *_nearest(found), *_tuned(found), *_runs(found)])


def _nearest(found: Saved) -> list[str]:
    """The runs at the scale nearest to the papers; nothing, where there are none."""
    if not found.get("near"):
        return []
    lines = ["", "## Nearest to the papers", "", _NEAREST, ""]
    lines += ["| preset | row | measured | seeds | ours | paper |", "|---|---|---|--:|--:|--:|"]
    for name, table in found["near"].items():
        for row in table["rows"]:
            where = "".join(f", {key} {_plain(value)}" for key, value in row["at"].items())
            factor, digits = unit(row["metric"])
            known = [value for value in row["values"] if value is not None]
            ours = f"{factor * sum(known) / len(known):.{digits}f}" if known else "–"
            paper = "–" if row["paper"] is None else f"{factor * row['paper']:.{digits}f}"
            measured = _MEASURED.get(row["metric"], row["metric"])
            lines.append(f"| `{name}` | {row['row']}{where} | {measured} | {len(known)} | {ours} | {paper} |")
    return [*lines, "", *(f"- `{name}` still reduces: {table['reduces']}." for name, table in found["near"].items())]


def _tuned(found: Saved) -> list[str]:
    """What tools/tuned.py found; nothing, where it was not run."""
    return ["", "## Tuned", "", found["tuned"].strip()] if found.get("tuned") else []


def _runs(found: Saved) -> list[str]:
    """What the presets are, and how many runs there were."""
    lines = ["", "## The runs", "", "What each preset reduces, and its settings at the cpu scale:", ""]
    described: dict[str, str] = {}
    for name, preset in found["presets"].items():
        settings = ", ".join(f"{key} {_plain(value)}" for key, value in preset["settings"].items())
        scale = f"Reduced: {preset['reduces']}. Settings: {settings}."
        same = described.setdefault(scale, name)
        lines.append(f"- `{name}` ({preset['title']}). " + (scale if same == name else f"Scale as `{same}`."))
    runs = {run for claim in found["claims"] for result in claim["checks"] for run in result["runs"]}
    versions = "; ".join(", ".join(f"{k} {v}" for k, v in json.loads(each).items()) for each in found["versions"])
    return [*lines, "", f"{len(runs)} runs. Versions: {versions}.", ""]


def _what_decides(claim: Saved, factorials: Saved) -> list[str]:
    """Of a claim that is not confirmed: why that may be, and what is known about it."""
    if not claim.get("hypotheses"):
        return []
    lines = ["", f"**What decides it?** {claim['decides'] or 'Not known yet.'} Hypotheses:", ""]
    lines += [f"{number}. {hypothesis}" for number, hypothesis in enumerate(claim["hypotheses"], 1)]
    for name in claim["factorials"]:
        file = f"`tools/factorials/{name}.toml`"
        if name in factorials:
            factorial = factorials[name]
            lines += ["", f"**Factorial** {file}: {factorial['title']}", "", factorial["tables"].strip()]
        else:
            lines += ["", f"**Factorial** {file}, on held-out images and seeds from 100 on: not run yet."]
    return [*lines, "", f"**Still open:** {claim['still_open']}"] if claim["still_open"] else lines


def _line(result: Saved) -> str:
    check = result["check"]
    measured = _MEASURED.get(check["metric"], check["metric"]).format(**check["of"][0])
    cells = [check["says"], f"`{check['preset']}`", measured]
    if "difference" in result:
        means = [_in_unit(result, sum(result[side]) / len(result[side]), "") for side in ("of", "than")]
        paper = _in_unit(result, result["paper"]) if "paper" in result else "–"
        cells += [*means, difference(result), seen_from(result), seeds_for(result), paper]
    else:
        cells += [""] * 6
    return "| " + " | ".join([*cells, result["verdict"]]) + " |"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
