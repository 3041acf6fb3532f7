"""The tables of runs and comparisons, as text by row and column; who shows them decides how they look."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.core.errors import SettingError
from fedstill.core.table import Table
from fedstill.methods import registry
from fedstill.metrics.records import (
    BestAndFinal,
    EpisodeModel,
    EpisodeRecord,
    RoundRecord,
    Summary,
    further,
    scalars,
    value_of,
)
from fedstill.metrics.shown import PLACES, balanced_column, named_metrics, remarks, title
from fedstill.metrics.statistics import ENOUGH, Spread
from fedstill.studies.comparison import METRICS, TO_TARGET, Row

_OWN_MODELS = " · *: of the clients' own models, for there is no global one"
_INTERVAL = " · interval: 95 % bootstrap of the paired differences, too narrow for few seeds"


def results_table(summaries: Mapping[str, Summary]) -> Table:
    """Finished runs by name, side by side, each followed by the further models that it evaluated."""
    runs = list(summaries.values())
    balanced = balanced_column(runs)
    shown = Table(
        "Results",
        ("", "accuracy best", "final", *(["balanced"] if balanced else []), "AMP", "FM", "WLP", "MB moved", "seconds"),
        " · ".join(["final: mean of the last five evaluations", "FM: smaller is fairer", *remarks(runs)]),
    )
    for name, s in summaries.items():
        moved = (s["bytes_down"] + s["bytes_up"] + s.get("bytes_regions", 0)) / 1e6
        shown.add(name, *_scores(s, balanced), f"{moved:.1f}", f"{s['seconds'] + s['eval_seconds']:.1f}")
        shown.values.append({"run": name, "model": "", **dict(scalars(s, "."))})
        for variant, scores in further(s).items():
            shown.add(f"  {variant}", *_scores(scores, balanced))
            shown.values.append({"run": name, "model": variant, **dict(scalars(scores, "."))})
    return shown


def metrics_table(summaries: Mapping[str, Summary]) -> Table | None:
    """The metrics that finished runs name, where each is measured; None if they name none."""
    names = named_metrics(list(summaries.values()))
    shown = Table("Metrics", ("", "metric", *PLACES.values()), "final: mean of the last five evaluations")
    for run, s in summaries.items():
        for model, scores in {run: s, **{f"  {name}": also for name, also in s.get("also", {}).items()}}.items():
            for name in names:
                values = {place: value_of(scores, f"final_{place}{name}") for place in PLACES}
                shown.add(model, title(name), *("–" if value is None else f"{value:.4f}" for value in values.values()))
                which = {"run": run, "model": "" if scores is s else model.strip(), "metric": name}
                shown.values.append(which | {PLACES[place]: value for place, value in values.items()})
    return shown if names else None


def _scores(scores: Summary | BestAndFinal, balanced: str | None) -> list[str]:
    fm = scores.get("final_fm")
    names = ("best_accuracy", "final_accuracy", *([balanced] if balanced else []), "final_amp")
    return [
        *(percent(value_of(scores, name)) for name in names),
        "–" if fm is None else f"{fm:.4f}",
        percent(scores.get("final_wlp")),
    ]


def comparison_table(rows: Sequence[Row], *, seeds: int) -> Table:
    """Methods by metrics."""
    summaries = [cell.summary() for row in rows for cell in row.cells]
    balanced = balanced_column(summaries)
    notes = [
        *([f"mean ± standard deviation of {seeds} seeds"] if seeds > 1 else []),
        "final: mean of the last five evaluations",
        "FM: smaller is fairer",
        *(["*: of the clients' own models, for there is no global one"] if any(map(_own_models, rows)) else []),
        *remarks(summaries),
    ]
    shown = Table(
        "Results" + _place(rows[0]),
        ("", "accuracy best", "final", *(["balanced"] if balanced else []), "AMP", "FM", "WLP"),
        " · ".join(notes),
    )
    accuracies = ("best_accuracy", "final_accuracy", *([balanced] if balanced else []), "final_amp")
    for row in rows:
        shown.add(
            _name(row) + "*" * _own_models(row),
            *(_spread(row.spread(metric), 100, 2, " %") for metric in accuracies),
            _spread(row.spread("final_fm"), 1, 4),
            _spread(row.spread("final_wlp"), 100, 2, " %"),
        )
        shown.values.append(_means(row, balanced))
    for j, metric in enumerate((*accuracies, "final_fm", "final_wlp"), 1):
        shown.best |= {(i, j) for i in _best(rows, metric)}
    return shown


def _best(rows: Sequence[Row], metric: str) -> set[int]:
    """The rows whose mean is the best of several."""
    means = {i: spread.mean for i, row in enumerate(rows) if (spread := row.spread(metric))}
    if len(means) < 2:
        return set()
    best = (max if METRICS.get(metric, True) else min)(means.values())
    return {i for i, mean in means.items() if mean == best}


def _means(row: Row, balanced: str | None) -> dict[str, Any]:
    """A row as data: mean and standard deviation of every metric."""
    found: dict[str, Any] = {"method": row.method, "model": row.variant, **row.settings, "seeds": len(row.cells)}
    for metric in (*METRICS, *([balanced] if balanced else [])):
        spread = row.spread(metric)
        found[metric] = spread.mean if spread else None
        found[f"{metric}_std"] = None if spread is None or math.isnan(spread.std) else spread.std
    return found


def compared_metrics_table(rows: Sequence[Row], *, seeds: int) -> Table | None:
    """Methods by the metrics that their runs name; None if they name none."""
    names = named_metrics([cell.summary() for row in rows for cell in row.cells])
    over = f"mean ± standard deviation of {seeds} seeds · " if seeds > 1 else ""
    shown = Table(
        "Metrics" + _place(rows[0]), ("", "metric", *PLACES.values()), f"{over}final: mean of the last five evaluations"
    )
    for row in rows:
        for name in names:
            found = {place: row.spread(f"final_{place}{name}") for place in PLACES}
            shown.add(_name(row), title(name), *(_spread(each, 1, 4) for each in found.values()))
            which = {"method": row.method, "model": row.variant, **row.settings, "metric": name}
            shown.values.append(which | {PLACES[place]: each.mean if each else None for place, each in found.items()})
    return shown if names else None


def cost_table(rows: Sequence[Row], *, seeds: int) -> Table:
    """What each method cost, and by how much it exceeds the first."""
    target = rows[0].cells[0].config.target_accuracy
    difference = f"final accuracy over {rows[0].name}"
    stopped = any("stopped_by" in cell.summary() for row in rows for cell in row.cells)  # else all have the same rounds
    goal = [f"{what} to {100 * target:g} %" for what in ("rounds", "MB", "s")] if target else []
    shown = Table(
        "Cost" + _place(rows[0]),
        (
            "",
            *(["rounds"] if stopped else []),
            "MB moved",
            "seconds",
            *goal,
            *([difference, "wins"] if seeds > 1 else []),
        ),
        "means over seeds · seconds: beside other runs" + (_INTERVAL if seeds >= ENOUGH else ""),
    )
    for row in rows:
        took_rounds = row.spread("rounds") if stopped else None
        numbers = [_name(row), *([f"{took_rounds.mean:.1f}" if took_rounds else ""] if stopped else []), *_cost(row)]
        if target:
            took = [row.spread(metric) for metric in TO_TARGET]
            numbers += [
                "not in all" if t is None else f"{t.mean / unit:.1f}" for t, unit in zip(took, (1, 1e6, 1), strict=True)
            ]
        shown.add(*numbers, *(_gap(row, rows[0]) if seeds > 1 else []))
    return shown


def sweep_table(tables: Sequence[Sequence[Row]], *, seeds: int) -> Table:
    """All combinations of the swept settings in one table: what counts of results, differences and cost."""
    baseline, target = tables[0][0].name, tables[0][0].cells[0].config.target_accuracy
    over = f"mean ± standard deviation of {seeds} seeds · " if seeds > 1 else ""
    shown = Table(
        "Results of the sweep",
        (
            *("", "", "final %", "FM", "WLP %"),
            *([f"over {baseline}", "wins"] if seeds > 1 else []),
            *([f"to {100 * target:g} %"] if target else []),
            *("MB", "s"),
        ),
        f"{over}final: mean of the last five evaluations · FM: smaller is fairer · WLP: the worst client"
        " · MB moved, seconds: means over seeds · comparison.json has every number"
        + (f" · to {100 * target:g} %: in how many rounds" if target else "")
        + (_OWN_MODELS if any(_own_models(row) for rows in tables for row in rows) else "")
        + (_INTERVAL if seeds >= ENOUGH else ""),
    )
    for rows in tables:
        for row in rows:
            numbers = [_spread(row.spread("final_accuracy"), 100, 2), _spread(row.spread("final_fm"), 1, 4)]
            numbers.append(_spread(row.spread("final_wlp"), 100, 2))
            if seeds > 1:
                numbers += _gap(row, rows[0])
            if target:
                took = row.spread("rounds_to_target")
                numbers.append("not in all" if took is None else f"{took.mean:.1f}")
            name = _name(row) + "*" * _own_models(row)
            shown.add(row.place if row is rows[0] else "", name, *numbers, *_cost(row))
            shown.values.append(_means(row, None))
        above = len(shown.rows) - len(rows)
        for j, metric in enumerate(("final_accuracy", "final_fm", "final_wlp"), 2):
            shown.best |= {(above + i, j) for i in _best(rows, metric)}
    return shown


def _gap(row: Row, baseline: Row) -> list[str]:
    """The paired difference in final accuracy, in percentage points, and on how many seeds it is positive."""
    gap = row.against(baseline, "final_accuracy") if row is not baseline else None
    if gap is None:
        return ["", ""]
    interval = f" [{100 * gap.low:+.2f}, {100 * gap.high:+.2f}]" if gap.n >= ENOUGH else ""
    return [f"{100 * gap.mean:+.2f}{interval}", f"{gap.wins}/{gap.n}"]


def _cost(row: Row) -> list[str]:
    """Megabytes moved and seconds, means over seeds; of a further model of a run, nothing of its own."""
    if row.variant:
        return ["", ""]
    summaries = [cell.summary() for cell in row.cells]
    moved = sum(s["bytes_down"] + s["bytes_up"] for s in summaries)
    return [f"{moved / len(summaries) / 1e6:.1f}", f"{sum(s['seconds'] for s in summaries) / len(summaries):.1f}"]


def episodes_table(records: Sequence[RoundRecord]) -> Table:
    """The episodes of a run with regions: what each region's model did before and after its end."""
    ends = [(record["round"], record["episode"]) for record in records if "episode" in record]
    after = {record["round"]: record.get("teachers_after", {}) for record in records}
    regions = list(dict.fromkeys(name for _, episode in ends for name in episode["regions"]))
    shown = Table(
        "Episodes",
        ("", "round", "stage", "disagreement", *regions, "global model", "server s"),
        "accuracy of each region's model: before the aggregation of regions → one round after it",
    )
    for round_, episode in ends:
        gap, later = episode.get("disagreement"), after.get(round_ + 1, {})
        shown.add(
            str(episode["number"]),
            str(round_),
            episode["stage"],
            "–" if gap is None else f"{gap:.3f}",
            *(_before_and_after(episode.get("teachers", {}), later, name) for name in regions),
            percent(episode["student"]["accuracy"] if "student" in episode else None),
            f"{episode['server_seconds']:.1f}",
        )
    return shown


def _before_and_after(before: Mapping[str, EpisodeModel], after: Mapping[str, float | None], region: str) -> str:
    if region not in before or before[region]["accuracy"] is None:
        return ""
    later = after.get(region)
    return percent(before[region]["accuracy"]) + ("" if later is None else f" → {percent(later)}")


def reliability_table(episode: EpisodeRecord, classes: Sequence[str]) -> Table:
    """How reliable each region's model is on each class, at an episode's end."""
    if "reliability" not in episode:
        raise SettingError("--classes: no reliability was measured; lkd and f2l do")
    title = "Reliability (AUC) of each region on each class, last episode"
    shown = Table(title, ("class", *episode["regions"]))
    for name, *values in zip(classes, *episode["reliability"], strict=True):
        shown.add(name, *(f"{value:.3f}" for value in values))
    return shown


def percent(value: float | None) -> str:
    """A share in per cent, a dash where there is none."""
    return "–" if value is None else f"{100 * value:.2f} %"


def _name(row: Row) -> str:
    return row.name if not row.variant else f"  {row.variant}"


def _own_models(row: Row) -> bool:
    """Whether the numbers are of the clients' own models."""
    config, own = row.cells[0].config, row.cells[0].own.get("method")
    return not (own or registry.make(config.method, config.hyper)).global_model


def _place(row: Row) -> str:
    return f": {row.place}" if row.place else ""


def _spread(found: Spread | None, factor: float, digits: int, unit: str = "") -> str:
    if found is None:
        return "–"
    text = f"{factor * found.mean:.{digits}f}"
    return text + (unit if found.n == 1 else f" ± {factor * found.std:.{digits}f}{unit}")
