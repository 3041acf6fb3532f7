"""One HTML page about runs, whole in itself: it loads nothing and runs no script."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from string import Template

from fedstill.metrics.records import BestAndFinal, Summary, value_of
from fedstill.metrics.shown import PLACES, balanced_column, named_metrics, remarks
from fedstill.metrics.shown import title as metric_title
from fedstill.metrics.statistics import spread
from fedstill.report.runs import Group, RunData, Settings, short

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { color-scheme: light dark; --text: #1b1f24; --faint: #57606a; --line: #d0d7de; --back: #fff; --stripe: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --faint: #9aa4af; --line: #3d444d; --back: #0f1419; --stripe: #171d24; }
}
body { margin: 0 auto; max-width: 70rem; padding: 1rem; color: var(--text); background: var(--back);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p.note, figcaption, caption { color: var(--faint); font-size: .875rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { caption-side: bottom; text-align: left; padding-top: .4rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .words td, .words th { text-align: left; }
#results td:first-child { white-space: normal; min-width: 9rem; }
.words td:not(:first-child) { white-space: normal; overflow-wrap: anywhere; }
tbody tr:nth-child(odd) { background: var(--stripe); }
tr.variant td:first-child { padding-left: 2rem; color: var(--faint); }
figure { margin: 1rem 0; }
figure > div { overflow-x: auto; }
img { max-width: 100%; min-width: min(40rem, 180vw); height: auto; background: #fff; border: 1px solid var(--line);
      border-radius: 6px; box-sizing: border-box; padding: .5rem; }
details { margin: .4rem 0; }
summary { cursor: pointer; }
pre { overflow-x: auto; padding: .7rem; background: var(--stripe); border: 1px solid var(--line); border-radius: 6px;
      font-size: .8rem; }
</style>
</head>
<body>
<main>
<h1>$title</h1>
$body
</main>
</body>
</html>
""")


Scored = Summary | BestAndFinal  # of a run, or of a further model of it


@dataclass(frozen=True)
class Picture:
    """A figure as SVG, and in words."""

    caption: str
    svg: bytes


@dataclass(frozen=True)
class Column:
    """A column of the results: where its number comes from and how it is written."""

    name: str
    number: Callable[[Scored], float | None]
    factor: float
    digits: int
    unit: str = ""

    def cell(self, summaries: Sequence[Scored]) -> str:
        """Mean and deviation over the seeds; a dash where any lacks the number."""
        numbers = [self.number(summary) for summary in summaries]
        known = [self.factor * number for number in numbers if number is not None]
        if not known or len(known) < len(numbers):
            return "–"
        found = spread(known)
        deviation = f" ± {found.std:.{self.digits}f}" if found.n > 1 else ""
        return f"{found.mean:.{self.digits}f}{deviation}{self.unit}"


def _of(name: str) -> Callable[[Scored], float | None]:
    return lambda summary: value_of(summary, name)


def _sum(*names: str) -> Callable[[Scored], float | None]:
    def total(summary: Scored) -> float | None:
        numbers = [value_of(summary, name) for name in names]
        known = [number for number in numbers if number is not None]
        return sum(known) if len(known) == len(names) else None

    return total


def _columns(summaries: Sequence[Summary]) -> tuple[Column, ...]:
    """The columns of the results: balanced accuracy beside accuracy where the test classes are imbalanced."""
    balanced = balanced_column(summaries)
    beside = [Column("balanced accuracy", _of(balanced), 100, 2, " %")] if balanced else []
    return (*COLUMNS[:2], *beside, *COLUMNS[2:])


COLUMNS = (
    Column("accuracy best", _of("best_accuracy"), 100, 2, " %"),
    Column("accuracy final", _of("final_accuracy"), 100, 2, " %"),
    Column("AMP", _of("final_amp"), 100, 2, " %"),
    Column("FM", _of("final_fm"), 1, 4),
    Column("WLP", _of("final_wlp"), 100, 2, " %"),
    Column("MB moved", _sum("bytes_down", "bytes_up"), 1e-6, 1),
    Column("seconds", _sum("seconds", "eval_seconds"), 1, 1),
)


def page(
    groups: Sequence[Group], pictures: Sequence[Picture], *, title: str = "fedstill report", notes: Sequence[str] = ()
) -> str:
    """The page about finished runs; `notes` are what else its reader should know."""
    runs = [run for group in groups for run in group.runs]
    summaries = [run.summary for run in runs if run.summary]
    parts = [
        _what(groups, runs),
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        "<h2>Results</h2>",
        _results(groups, _columns(summaries)),
        *(f"<p>{escape(remark[:1].upper() + remark[1:])}.</p>" for remark in remarks(summaries)),
        _metrics(groups, named_metrics(summaries)),
        "<h2>Figures</h2>" if pictures else "",
        *map(_figure, pictures),
        "<h2>Settings</h2>",
        _settings(groups),
        "<h2>Versions</h2>",
        _versions(runs),
        "<h2>Runs</h2>",
        *(
            f"<details><summary>{escape(group.name)}, seed {run.seed}: {escape(str(run.path))}</summary>"
            f"<pre>{escape(run.config)}</pre></details>"
            for group in groups
            for run in group.runs
        ),
    ]
    return _PAGE.substitute(title=escape(title), body="\n".join(part for part in parts if part))


def _what(groups: Sequence[Group], runs: Sequence[RunData]) -> str:
    def all_of(name: str) -> str:
        return ", ".join(dict.fromkeys(str(run.settings.get(name, "–")) for run in runs))

    division = dict.fromkeys(_partition(run.settings) for run in runs)
    rows = {
        "methods": all_of("method"),
        "data": all_of("data"),
        "partition": "; ".join(division),
        "network": all_of("model"),
        "rounds": all_of("rounds"),
        "seeds": ", ".join(map(str, sorted({run.seed for run in runs}))),
        "runs": f"{len(runs)}, of which those that differ in their seeds alone are one row: {len(groups)} rows",
    }
    return _table((), rows.items(), css="words")


def _partition(settings: Settings) -> str:
    name = str(settings.get("partition", "–"))
    alpha = f", alpha {settings['alpha']:g}" if name.startswith("dir") and "alpha" in settings else ""
    return f"{name}{alpha}, {settings.get('clients') or 'natural'} clients"


def _metrics(groups: Sequence[Group], names: Sequence[str]) -> str:
    """The metrics that the runs name, where each is measured."""
    rows = []
    for group in groups:
        summaries = [run.summary for run in group.runs if run.summary]
        for name in names:
            columns = [Column(place, _of(f"final_{start}{name}"), 1, 4) for start, place in PLACES.items()]
            rows.append((group.name, metric_title(name), *(column.cell(summaries) for column in columns)))
    return f"<h2>Metrics</h2>{_table(('', 'metric', *PLACES.values()), rows)}" if rows else ""


def _results(groups: Sequence[Group], columns: Sequence[Column]) -> str:
    lines = []
    for group in groups:
        summaries = [run.summary for run in group.runs if run.summary]
        seeds = str(len(group.runs))
        lines.append(_row((group.name, seeds, *(column.cell(summaries) for column in columns))))
        for name, variants in _variants(summaries).items():
            lines.append(_row((name, seeds, *(column.cell(variants) for column in columns)), css="variant"))
    several = any(len(group.runs) > 1 for group in groups)
    caption = (
        "mean ± sample standard deviation over seeds · " if several else ""
    ) + "final, AMP, FM, WLP: mean of the last five evaluations · FM: smaller is fairer · seconds: with evaluation"
    head = _row(("", "seeds", *(column.name for column in columns)), tag="th")
    return (
        f'<div class="wide"><table id="results"><caption>{escape(caption)}</caption><thead>{head}</thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _variants(summaries: Sequence[Summary]) -> dict[str, list[BestAndFinal]]:
    """Further models of the same runs, by name, where every seed has them."""
    found: dict[str, list[BestAndFinal]] = {}
    for summary in summaries:
        for name, numbers in summary.get("also", {}).items():
            found.setdefault(name, []).append(numbers)
    return {name: each for name, each in found.items() if len(each) == len(summaries)}


def _figure(picture: Picture) -> str:
    # As an image, not as elements of the page: the ids of two SVGs would clash.
    data = base64.b64encode(picture.svg).decode()
    caption = escape(picture.caption)
    return (
        f'<figure><div><img alt="{caption}" src="data:image/svg+xml;base64,{data}"></div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _settings(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    names = [name for name in dict.fromkeys(name for run in runs for name in run.settings) if name != "seed"]
    shared = [n for n in names if len({repr(run.settings.get(n)) for run in runs}) == 1]
    own = [n for n in names if n not in shared and n != "method"]
    rows = (
        (group.name, *(", ".join(dict.fromkeys(_value(run.settings, n) for run in group.runs)) for n in own))
        for group in groups
    )
    differ = "<p>The runs differ in nothing but method and seed.</p>"
    if own:
        differ = f"<p>What differs:</p>{_table(('', *map(short, own)), rows, css='words')}"
    same = _table((), ((short(n), _value(runs[0].settings, n)) for n in shared), css="words")
    return f"{differ}<details><summary>What all share: {len(shared)} settings</summary>{same}</details>"


def _value(settings: Settings, name: str) -> str:
    return str(settings[name]) if name in settings else "–"


def _versions(runs: Sequence[RunData]) -> str:
    versions = [run.summary.get("versions", {}) if run.summary else {} for run in runs]
    names = dict.fromkeys(name for each in versions for name in each)
    weights = dict.fromkeys(
        f"{n:,}" for run in runs if run.summary and (n := run.summary.get("parameters")) is not None
    )
    rows = [(name, ", ".join(dict.fromkeys(str(each.get(name, "–")) for each in versions))) for name in names]
    return _table((), [*rows, ("weights of the network", ", ".join(weights) or "–")], css="words")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, css: str = "") -> str:
    top = f"<thead>{_row(head, tag='th')}</thead>" if head else ""
    return f'<div class="wide"><table class="{css}">{top}<tbody>{"".join(map(_row, rows))}</tbody></table></div>'


def _row(cells: Sequence[str], *, tag: str = "td", css: str = "") -> str:
    start = f'<tr class="{css}">' if css else "<tr>"
    return start + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
