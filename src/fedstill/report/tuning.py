"""Pictures of a search for settings: what each of them did, which mattered, and what two objectives cost each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from fedstill.metrics.shown import title as written
from fedstill.report import style


@dataclass(frozen=True)
class Point:
    """A trial as pictures show it."""

    settings: Mapping[str, Any]
    scores: tuple[float, ...]  # of each objective
    rounds: int  # how far it went
    best: bool = False


def slices(
    panels: Mapping[str, Sequence[Point]], log: Sequence[str], objective: str, path: style.Target, *, title: str = ""
) -> Figure:
    """Draw the objective by each setting, a row of panels for each method; a ring marks the winner."""
    names = {method: list(dict.fromkeys(name for point in points for name in point.settings))
             for method, points in panels.items()}  # fmt: skip
    columns = max(map(len, names.values()), default=1) or 1
    figure = style.begin(3.6 * columns, 2.8 * len(panels) + 0.4, title)
    drawn = figure.subplots(len(panels), columns, squeeze=False)
    for row, (method, points) in zip(drawn, panels.items(), strict=True):
        lengths = sorted({point.rounds for point in points})
        for panel in row[len(names[method]) :]:
            panel.axis("off")
        for panel, name in zip(row, names[method], strict=False):
            for i, rounds in enumerate(lengths):
                shown = [point for point in points if point.rounds == rounds and name in point.settings]
                x, y = [_place(point.settings[name]) for point in shown], [point.scores[0] for point in shown]
                panel.scatter(x, y, s=28, color=style.colour(i), marker=style.marker(i), label=after(rounds))
            for point in (point for point in points if point.best and name in point.settings):
                ring = {"facecolors": "none", "edgecolors": "black", "linewidths": 1.5}
                panel.scatter([_place(point.settings[name])], [point.scores[0]], s=130, **ring)
            if name in log:
                panel.set_xscale("log")
            panel.set_xlabel(name)
            panel.set_title(method, fontsize=10)
            style.plain(panel)
        if names[method]:
            row[0].set_ylabel(written(objective))
            row[0].legend(fontsize=8, frameon=False)
    return style.save(figure, path)


def importances(found: Mapping[str, Mapping[str, float]], path: style.Target, *, title: str = "") -> Figure:
    """Draw how much each setting of each method explains of the objective's spread, as bars."""
    bars = [(f"{method}: {name}", share) for method, shares in found.items() for name, share in shares.items()]
    figure = style.begin(6.5, 0.8 + 0.32 * max(1, len(bars)), title)
    panel = figure.subplots()
    panel.barh([name for name, _ in bars], [share for _, share in bars], color=style.colour(0))
    panel.invert_yaxis()
    panel.set_xlim(0, 1)
    panel.set_xlabel("share of the spread that the setting explains (fANOVA)")
    style.plain(panel)
    return style.save(figure, path)


def pareto(
    panels: Mapping[str, Sequence[Point]], fronts: Mapping[str, Sequence[Point]], objectives: Sequence[str],
    path: style.Target, *, title: str = "",
) -> Figure:  # fmt: skip
    """Draw two objectives against each other; lines join the trials that no other exceeds in both."""
    figure = style.begin(6.2, 4.6, title)
    panel = figure.subplots()
    for i, (method, points) in enumerate(panels.items()):
        x, y = ([point.scores[k] for point in points] for k in (0, 1))
        panel.scatter(x, y, s=24, alpha=0.5, color=style.colour(i), marker=style.marker(i))
        front = sorted(fronts[method], key=lambda point: point.scores)
        x, y = ([point.scores[k] for point in front] for k in (0, 1))
        panel.plot(x, y, color=style.colour(i), marker=style.marker(i), linewidth=1.5, label=method)
    panel.set_xlabel(written(objectives[0]))
    panel.set_ylabel(written(objectives[1]))
    panel.legend(frameon=False, fontsize=9)
    style.plain(panel)
    return style.save(figure, path)


def after(rounds: int) -> str:
    """How far a run went, in words."""
    return f"after {rounds} round{'s' * (rounds != 1)}"


def _place(value: Any) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
