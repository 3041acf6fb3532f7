"""Bars: a number by a setting that varies, one colour a method, error bars over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedstill.metrics.statistics import spread
from fedstill.report import style

NUMBERED = 16  # bars of a panel up to which each shows its number
WIDEST = 14.0  # inches
Series = Mapping[str, Mapping[str, Sequence[float]]]


def bars(
    series: Series,
    path: style.Target,
    *,
    by: str,
    metric: str,
    which: str = "final",
    title: str = "",
) -> Figure:
    """Draw groups of bars: for each series and each value of the setting `by`, the numbers of all seeds."""
    return swept_bars({"": series}, path, by=by, metric=metric, which=which, title=title)


def swept_bars(
    panels: Mapping[str, Series], path: style.Target, *, by: str, metric: str, which: str = "final", title: str = ""
) -> Figure:
    """Draw such groups in each of several named panels, of the same series."""
    panels = {panel: _arranged(series, by) for panel, series in panels.items()}
    most = max(len(series) * len(_places(series)) for series in panels.values())
    width = float(np.clip(2.2 + 0.5 * most, 5, WIDEST))
    columns = min(len(panels), int(WIDEST // width))
    figure = style.begin(width * columns, 3.6 * -(-len(panels) // columns) + 0.3, title)
    drawn = style.grid(figure, len(panels), columns)
    for panel, (name, series) in zip(drawn, panels.items(), strict=True):
        _bars(panel, series, share=metric in style.SHARES)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel(by)
        panel.set_ylabel(f"{which} {style.label(metric)}".strip())
    top = max(panel.get_ylim()[1] for panel in drawn)
    for panel in drawn:
        panel.set_ylim(top=top)
    seeds = max(len(values) for series in panels.values() for numbers in series.values() for values in numbers.values())
    note = "error bars: ± one standard deviation over seeds" if seeds > 1 else None
    handles, names = drawn[0].get_legend_handles_labels()
    listed = style.side_by_side(names, width * columns)
    figure.legend(handles, names, loc="outside lower left", ncols=listed, frameon=False, fontsize=9, title=note,
                  title_fontsize=8, alignment="left")  # fmt: skip
    return style.save(figure, path)


def _arranged(series: Series, by: str) -> Series:
    """With the order and the labels of the look; along the axis, where that is of methods."""
    if by == "method":
        return {name: style.arranged(numbers) for name, numbers in series.items()}
    return style.arranged(series)


def _places(series: Series) -> list[str]:
    return list(dict.fromkeys(place for numbers in series.values() for place in numbers))


def _bars(panel: Axes, series: Series, *, share: bool) -> None:
    places, count = _places(series), sum(map(len, series.values()))
    width = 0.84 / len(series)
    for i, (name, numbers) in enumerate(series.items()):
        here = [place for place in places if place in numbers]
        summed = [spread(numbers[place]) for place in here]
        x = np.array([places.index(place) for place in here]) + (i - (len(series) - 1) / 2) * width
        heights = [s.mean for s in summed]
        errors = np.nan_to_num([s.std for s in summed])
        panel.bar(
            x, heights, 0.94 * width, label=name, color=style.colour(i), edgecolor="white", linewidth=0,
            hatch=style.HATCHES[i % len(style.HATCHES)],
        )  # fmt: skip
        if errors.any():
            panel.errorbar(x, heights, errors, fmt="none", ecolor="black", elinewidth=1.2, capsize=3)
        for place, height, error in zip(x, heights, errors, strict=True) if count <= NUMBERED else ():
            text = f"{100 * height:.1f}" if share else f"{height:.3g}"
            panel.annotate(
                text, (place, height + error), xytext=(0, 2), textcoords="offset points",
                ha="center", va="bottom", fontsize=7.5,
            )  # fmt: skip
    panel.set_xticks(range(len(places)), places, rotation=0 if max(map(len, places)) < 12 else 20)
    style.plain(panel)
    panel.grid(visible=False, axis="x")
    panel.margins(y=0.12)
    if share:
        style.in_per_cent(panel.yaxis)
