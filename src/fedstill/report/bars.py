"""Bars: a number by a setting that varies, one colour a method, error bars over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from fedstill.metrics.statistics import spread
from fedstill.report import style

NUMBERED = 16  # bars up to which each shows its number


def bars(
    series: Mapping[str, Mapping[str, Sequence[float]]],
    path: style.Target,
    *,
    by: str,
    metric: str,
    which: str = "final",
    title: str = "",
) -> Figure:
    """Draw groups of bars: for each series and each value of the setting `by`, the numbers of all seeds."""
    places = list(dict.fromkeys(place for numbers in series.values() for place in numbers))
    count = sum(map(len, series.values()))
    width = 0.84 / len(series)
    figure = style.begin(float(np.clip(2.2 + 0.5 * len(places) * len(series), 5, 14)), 3.9, title)
    panel = figure.subplots()
    share = metric in style.SHARES
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
    panel.set_xlabel(by)
    panel.set_ylabel(f"{which} {style.label(metric)}")
    style.plain(panel)
    panel.grid(visible=False, axis="x")
    panel.margins(y=0.12)
    if share:
        style.in_per_cent(panel.yaxis)
    seeds = max(len(values) for numbers in series.values() for values in numbers.values())
    note = "error bars: ± one standard deviation over seeds" if seeds > 1 else None
    figure.legend(loc="outside lower left", ncols=min(4, len(series)), frameon=False, fontsize=9, title=note,
                  title_fontsize=8, alignment="left")  # fmt: skip
    return style.save(figure, path)
