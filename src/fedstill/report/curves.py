"""Learning curves: any metric by round, one line a run or a group of seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedstill.report import style
from fedstill.report.series import Band, Records, line_of

COLUMNS = 3
BANDS: dict[str, str] = {"std": "± one standard deviation", "range": "from the smallest to the largest"}


def curves(
    runs: Mapping[str, Records],
    path: style.Target,
    *,
    metrics: Sequence[str] = ("accuracy", "fm"),
    title: str = "",
) -> Figure:
    """Draw the metrics of several runs, given by name as the records of metrics.jsonl."""
    return seed_curves({name: [records] for name, records in runs.items()}, path, metrics=metrics, title=title)


def seed_curves(
    groups: Mapping[str, Sequence[Records]],
    path: style.Target,
    *,
    metrics: Sequence[str] = ("accuracy", "fm"),
    band: Band = "std",
    log: bool = False,
    title: str = "",
) -> Figure:
    """Draw the mean of each group of runs, given by name as the records of each seed, and a band around it."""
    return swept_curves({"": groups}, path, metrics=metrics, band=band, log=log, title=title)


def swept_curves(
    places: Mapping[str, Mapping[str, Sequence[Records]]],
    path: style.Target,
    *,
    metrics: Sequence[str] = ("accuracy", "fm"),
    band: Band = "std",
    log: bool = False,
    title: str = "",
) -> Figure:
    """Draw such groups at each of several named places: a panel for each, or a row of panels, one a metric."""
    shown = style.arranged({name: name for groups in places.values() for name in groups})  # by label
    names = list(shown)
    # Too much to cover curves with.
    legend = len(places) > 1 or len(names) > 4 or max(map(len, names), default=0) > 25
    columns = len(metrics) if len(metrics) > 1 else min(COLUMNS, len(places))
    lines = -(-len(places) * len(metrics) // columns)
    width, height = (5.2, 3.8) if len(places) == 1 else (4.2, 3.2)
    listed = style.side_by_side(names, width * columns)
    below = 0.22 * -(-len(names) // listed) if legend else 0
    figure = style.begin(width * columns, height * lines + below, title)
    panels = style.grid(figure, len(places) * len(metrics), columns)
    for panel, ((place, groups), metric) in zip(panels, product(places.items(), metrics), strict=True):
        for i, (label, name) in enumerate(shown.items()):
            if name in groups:
                _line(panel, label, groups[name], metric, band, i)
        panel.set_title(place, fontsize=10)
        panel.set_xlabel("round")
        panel.set_ylabel(style.label(metric))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        style.plain(panel)
        if log:
            panel.set_yscale("log")
            style.logarithmic(panel.yaxis)
        elif style.is_share(metric):
            style.in_per_cent(panel.yaxis)
            panel.set_ylim(bottom=0)
    several = any(len(records) > 1 for groups in places.values() for records in groups.values())
    note = f"lines: mean over seeds; bands: {BANDS[band]}" if several else None
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "title": note, "title_fontsize": 8, "alignment": "left"}
    if legend:
        drawn = {n: handle for p in panels for handle, n in zip(*p.get_legend_handles_labels(), strict=True)}
        figure.legend([drawn[n] for n in names], names, loc="outside lower left", ncols=listed, **look)
    else:
        panels[0].legend(**look)
    return style.save(figure, path)


def _line(panel: Axes, name: str, runs: Sequence[Records], metric: str, band: Band, i: int) -> None:
    """The mean over the runs in each round that any of them has, and the band where there are several."""
    found, drawn = line_of(runs, metric, band), style.line(i)
    if len(found.rounds) == 1:
        drawn = drawn | {"marker": style.marker(i), "markevery": 1}
        panel.set_xlim(found.rounds[0] - 1, found.rounds[0] + 1)
    panel.plot(found.rounds, found.mean, label=name, linewidth=1.8, **drawn)
    if len(runs) > 1 and found.rounds:
        panel.fill_between(found.rounds, found.low, found.high, color=drawn["color"], alpha=0.18, linewidth=0)
