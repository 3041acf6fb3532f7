"""One HTML page about runs: it loads nothing, and its only script draws its charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from fedstill.metrics.records import BestAndFinal, Summary, further, value_of
from fedstill.metrics.shown import PLACES, balanced_column, named_metrics, remarks
from fedstill.metrics.shown import title as metric_title
from fedstill.metrics.statistics import ENOUGH, paired, spread
from fedstill.report.charts import Chart
from fedstill.report.markup import Cell, Grid, chart, document, folded, table, text
from fedstill.report.runs import Group, RunData, Settings, short

Scored = Summary | BestAndFinal  # of a run, or of a further model of it
Pair = tuple[Group, Group]  # a group, and the one that it is compared with
_LISTED = 20  # classes up to which their table is open
_OPEN = 8  # settings that differ, up to which their table is open
_WORST = 3  # clients of each group that are named


@dataclass(frozen=True)
class Column:
    """A column of the results: where its number comes from, how it is written, and whether the larger is better."""

    name: str
    number: Callable[[Scored], float | None]
    factor: float
    digits: int
    unit: str = ""
    larger: bool | None = None  # None: neither

    def mean(self, summaries: Sequence[Scored]) -> float | None:
        """Over the seeds; None where any lacks the number."""
        known = self._known(summaries)
        return spread(known).mean if known else None

    def text(self, summaries: Sequence[Scored]) -> str:
        """Mean and deviation over the seeds; a dash where any lacks the number."""
        if not (known := self._known(summaries)):
            return "–"
        found = spread(known)
        deviation = f" ± {found.std:.{self.digits}f}" if found.n > 1 else ""
        return f"{found.mean:.{self.digits}f}{deviation}{self.unit}"

    def _known(self, summaries: Sequence[Scored]) -> list[float]:
        numbers = [self.number(summary) for summary in summaries]
        known = [self.factor * number for number in numbers if number is not None]
        return known if len(known) == len(numbers) else []


def _of(name: str) -> Callable[[Scored], float | None]:
    return lambda summary: value_of(summary, name)


def _sum(*names: str) -> Callable[[Scored], float | None]:
    def total(summary: Scored) -> float | None:
        numbers = [value_of(summary, name) for name in names]
        known = [number for number in numbers if number is not None]
        return sum(known) if len(known) == len(names) else None

    return total


COLUMNS = (
    Column("accuracy best", _of("best_accuracy"), 100, 2, " %", larger=True),
    Column("accuracy final", _of("final_accuracy"), 100, 2, " %", larger=True),
    Column("AMP", _of("final_amp"), 100, 2, " %", larger=True),
    Column("FM", _of("final_fm"), 1, 4, larger=False),
    Column("WLP", _of("final_wlp"), 100, 2, " %", larger=True),
    Column("MB moved", _sum("bytes_down", "bytes_up"), 1e-6, 1),
    Column("seconds", _sum("seconds", "eval_seconds"), 1, 1),
)
_COMPARED = COLUMNS[1:5]
_MEANING = (
    "best: highest evaluation; final, AMP, FM, WLP: mean of the last five evaluations · AMP: accuracy on all clients' "
    "tests · FM: variance over clients, smaller is fairer · WLP: the worst client's accuracy · seconds: with evaluation"
)


def page(
    groups: Sequence[Group],
    charts: Sequence[Chart],
    *,
    title: str = "fedstill report",
    notes: Sequence[str] = (),
    pairs: Sequence[Pair] = (),
    classes: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """The page about finished runs.

    `notes` are what else its reader should know, `pairs` the groups with the baseline of each, `classes` the names of
    the classes by group.
    """
    runs, by_class = [run for group in groups for run in group.runs], per_class(groups, classes or {})
    summaries = [run.summary for run in runs if run.summary]
    parts = [
        table(_what(groups, runs)),
        *(text("p", note, css="note") for note in notes),
        *_section(results(groups, pairs), ident="results"),
        *(text("p", f"{remark[:1].upper()}{remark[1:]}.") for remark in remarks(summaries)),
        *(_section(metrics(groups, named)) if (named := named_metrics(summaries)) else ()),
        *(_section(differences(pairs)) if pairs else ()),
        "<h2>Charts</h2>" if charts else "",
        *(chart(each.kind, each.caption, each.data) for each in charts),
        *(_section(worst_clients(groups)) if any(run.clients for run in runs) else ()),
        *chain.from_iterable(_section(grid, closed=len(grid.rows) > _LISTED) for grid in by_class),
        "<h2>Settings</h2>",
        _settings(groups),
        *_section(_versions(runs)),
        "<h2>Runs</h2>",
        *(
            folded(f"{group.name}, seed {run.seed}: {run.path}", text("pre", run.config))
            for group in groups
            for run in group.runs
        ),
    ]
    return document(title, "\n".join(part for part in parts if part))


def _section(grid: Grid, *, ident: str = "", closed: bool = False) -> list[str]:
    shown = table(grid, ident=ident)
    return [text("h2", grid.title), folded(f"{len(grid.rows)} rows", shown) if closed else shown]


def _what(groups: Sequence[Group], runs: Sequence[RunData]) -> Grid:
    def all_of(name: str) -> str:
        return ", ".join(dict.fromkeys(str(run.settings.get(name, "–")) for run in runs))

    division = dict.fromkeys(_partition(run.settings) for run in runs)
    grid = Grid("What was run", (), words=True)
    grid.add("methods", all_of("method"))
    grid.add("data", all_of("data"))
    grid.add("partition", "; ".join(division))
    grid.add("network", all_of("model"))
    grid.add("rounds", all_of("rounds"))
    grid.add("seeds", ", ".join(map(str, sorted({run.seed for run in runs}))))
    grid.add("runs", f"{len(runs)}; those that differ in their seeds alone are one row: {len(groups)} rows")
    return grid


def _partition(settings: Settings) -> str:
    name = str(settings.get("partition", "–"))
    alpha = f", alpha {settings['alpha']:g}" if name.startswith("dir") and "alpha" in settings else ""
    return f"{name}{alpha}, {settings.get('clients') or 'natural'} clients"


def results(groups: Sequence[Group], pairs: Sequence[Pair] = ()) -> Grid:
    """Finished groups by metrics, each followed by the further models of its runs.

    The best number of those that are compared with the same baseline is marked.
    """
    several = any(len(group.runs) > 1 for group in groups)
    over = "mean ± sample standard deviation over seeds · " if several else ""
    mark = " · bold: the best of what is compared" if pairs else ""
    shown = _columns([run.summary for group in groups for run in group.runs if run.summary])
    grid = Grid("Results", ("", "seeds", *(c.name for c in shown)), f"{over}{_MEANING}{mark}")
    baselines = {group.name: baseline.name for group, baseline in pairs}
    rows: list[tuple[str, str, Sequence[Scored]]] = []
    for group in groups:
        summaries, place = [run.summary for run in group.runs if run.summary], baselines.get(group.name, group.name)
        rows.append((group.name, place, summaries))
        rows += [(f"{group.name}: {name}", place, each) for name, each in _variants(summaries).items()]
    places = [place for _, place, _ in rows]
    columns = [
        _marked([c.text(each) for *_, each in rows], [c.mean(each) for *_, each in rows], c.digits, c.larger, places)
        for c in shown
    ]
    for (name, _, each), *cells in zip(rows, *columns, strict=True):
        grid.add(name, str(len(each)), *cells)
    return grid


def _columns(summaries: Sequence[Summary]) -> tuple[Column, ...]:
    """The columns of the results: balanced accuracy beside accuracy where the test classes are imbalanced."""
    balanced = balanced_column(summaries)
    beside = [Column("balanced accuracy", _of(balanced), 100, 2, " %", larger=True)] if balanced else []
    return (*COLUMNS[:2], *beside, *COLUMNS[2:])


def metrics(groups: Sequence[Group], names: Sequence[str]) -> Grid:
    """The metrics that the runs name, where each is measured."""
    grid = Grid("Metrics", ("", "metric", *PLACES.values()), "mean of the last five evaluations")
    for group in groups:
        summaries = [run.summary for run in group.runs if run.summary]
        for name in names:
            columns = [Column(place, _of(f"final_{start}{name}"), 1, 4) for start, place in PLACES.items()]
            grid.add(group.name, metric_title(name), *(column.text(summaries) for column in columns))
    return grid


def _marked(
    texts: Sequence[str],
    numbers: Sequence[float | None],
    digits: int,
    larger: bool | None,
    places: Sequence[str] = (),
) -> list[Cell]:
    """Cells, of which those are marked that show the best number of their place, unless all there do."""
    best: dict[str, float] = {}
    rounded = [None if number is None else round(number, digits) for number in numbers]
    places = places or [""] * len(rounded)
    for place in dict.fromkeys(places) if larger is not None else ():
        known = {number for number, at in zip(rounded, places, strict=True) if at == place and number is not None}
        if len(known) > 1:
            best[place] = max(known) if larger else min(known)
    cells = zip(texts, rounded, places, strict=True)
    return [Cell(shown, number is not None and number == best.get(place)) for shown, number, place in cells]


def _variants(summaries: Sequence[Summary]) -> dict[str, list[BestAndFinal]]:
    """Further models of the same runs, and groups of their clients, by name, where every seed has them."""
    found: dict[str, list[BestAndFinal]] = {}
    for summary in summaries:
        for name, numbers in further(summary).items():
            found.setdefault(name, []).append(numbers)
    return {name: each for name, each in found.items() if len(each) == len(summaries)}


def differences(pairs: Sequence[Pair]) -> Grid:
    """By how much each group is better than its baseline, seed by seed."""
    grid = Grid(
        "Paired differences",
        ("", "compared with", "seeds", *(column.name for column in _COMPARED)),
        "mean difference on the same seeds, accuracies in percentage points; positive is better, for FM too (its sign "
        "is turned) · in brackets: seeds on which it is better"
        f" · with {ENOUGH} seeds or more: [95 % bootstrap interval, too narrow for few seeds]",
    )
    for group, baseline in pairs:
        ours, theirs = ({run.seed: run.summary for run in g.runs if run.summary} for g in (group, baseline))
        seeds = [seed for seed in ours if seed in theirs]
        cells = (_difference(c, [(ours[seed], theirs[seed]) for seed in seeds]) for c in _COMPARED)
        grid.add(group.name, baseline.name, str(len(seeds)), *cells)
    return grid


def _difference(column: Column, pairs: Sequence[tuple[Scored, Scored]]) -> str:
    sign = column.factor * (1 if column.larger else -1)
    numbers = [(column.number(ours), column.number(theirs)) for ours, theirs in pairs]
    known = [(sign * a, sign * b) for a, b in numbers if a is not None and b is not None]
    if not known or len(known) < len(pairs):
        return "–"
    gap = paired([a for a, _ in known], [b for _, b in known])
    interval = f" [{gap.low:+.{column.digits}f}, {gap.high:+.{column.digits}f}]" if gap.n >= ENOUGH else ""
    return f"{gap.mean:+.{column.digits}f}{interval} ({gap.wins}/{gap.n})"


def worst_clients(groups: Sequence[Group]) -> Grid:
    """Whom each group's first run serves worst, by name."""
    places = ("worst served", *(f"{i}. worst" for i in range(2, _WORST + 1)))
    grid = Grid(
        "Clients served worst",
        ("", *places),
        "name of the client: its accuracy on its own test samples (their number), under the final model of the first "
        "seed",
        words=True,
    )
    for group in groups:
        run = group.runs[0]
        named = sorted(zip(run.clients, run.client_names, strict=False), key=lambda each: each[0][1])
        shown = [f"{name}: {100 * accuracy:.1f} % ({n})" for (n, accuracy), name in named[:_WORST]]
        grid.add(group.name, *shown, *["–"] * (_WORST - len(shown)))
    return grid


def per_class(groups: Sequence[Group], classes: Mapping[str, Sequence[str]]) -> list[Grid]:
    """The final accuracy on each class of the test set, the best of it marked; a table for each set of classes."""
    grids: dict[tuple[str, ...], list[tuple[Group, list[list[float]]]]] = {}
    for group in groups:
        found = [run.summary.get("final_per_class") if run.summary else None for run in group.runs]
        known = [each for each in found if each]
        if known and len(known) == len(found):
            names = tuple(classes.get(group.name, ())) or tuple(f"class {i}" for i in range(len(known[0])))
            if all(len(each) == len(names) for each in known):
                grids.setdefault(names, []).append((group, known))
    made = []
    for names, rows in grids.items():
        grid = Grid(
            "Accuracy by class",
            ("class", *(group.name for group, _ in rows)),
            "on the global test set, in the last evaluation"
            + ("; mean over seeds" if any(len(known) > 1 for _, known in rows) else "")
            + " · bold: the best on the class",
        )
        for i, name in enumerate(names):
            values = [[each[i] for each in known if each[i] is not None] for _, known in rows]
            means = [100 * spread(each).mean if each else None for each in values]
            grid.add(name, *_marked(["–" if m is None else f"{m:.1f} %" for m in means], means, 1, larger=True))
        made.append(grid)
    return made


def _settings(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    names = [name for name in dict.fromkeys(name for run in runs for name in run.settings) if name != "seed"]
    shared = [n for n in names if len({repr(run.settings.get(n)) for run in runs}) == 1]
    own = [n for n in names if n not in shared and n != "method"]
    differ = text("p", "The runs differ in nothing but method and seed.")
    if own:
        grid = Grid("What differs", ("setting", *(group.name for group in groups)), words=True)
        grid.caption = "settings in which the rows of the results differ; –: the method has no such setting"
        for name in own:
            grid.add(
                short(name),
                *(", ".join(dict.fromkeys(_value(run.settings, name) for run in group.runs)) for group in groups),
            )
        differ = table(grid, ident="differs")
        if len(own) > _OPEN:
            differ = folded(f"What differs: {len(own)} settings", differ)
    same = Grid("What all share", (), words=True)
    for name in shared:
        same.add(short(name), _value(runs[0].settings, name))
    return differ + folded(f"What all share: {len(shared)} settings", table(same))


def _value(settings: Settings, name: str) -> str:
    return str(settings[name]) if name in settings else "–"


def _versions(runs: Sequence[RunData]) -> Grid:
    versions = [run.summary.get("versions", {}) if run.summary else {} for run in runs]
    grid = Grid("Versions", (), words=True)
    for name in dict.fromkeys(name for each in versions for name in each):
        grid.add(name, ", ".join(dict.fromkeys(str(each.get(name, "–")) for each in versions)))
    weights = dict.fromkeys(
        f"{n:,}" for run in runs if run.summary and (n := run.summary.get("parameters")) is not None
    )
    grid.add("weights of the network", ", ".join(weights) or "–")
    return grid
