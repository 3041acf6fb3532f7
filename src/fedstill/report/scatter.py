"""Two numbers of each method against each other: a point with its name, and bars over seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import cos, pi, sin

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.path import Path as Line
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from fedstill.metrics.statistics import Spread, spread
from fedstill.report import style

_MARKER = 42  # square points
_RADIUS = 4.5  # points around its middle that a marker needs
_DISTANCES = (7, 12, 18, 26, 36, 48, 62, 78, 96)  # points between a marker and its name
_DIRECTIONS = 16
_LINE_FROM = 12  # a name as far away as this is joined to its marker
# What a name costs, in points of distance: that hides something, whose line leads past another marker, over a line.
_HIDDEN, _MISLED, _CROSSED = 1000, 100, 25


@dataclass(frozen=True)
class Point:
    """What a method came to, a pair of numbers for each seed, and what kind of method it is."""

    name: str
    kind: str
    pairs: Sequence[tuple[float, float]]


def scatter(
    points: Sequence[Point], labels: tuple[str, str], path: style.Target, kinds: Sequence[str], *, title: str = ""
) -> Figure:
    """Draw shares against each other, in per cent; a kind has the same colour and marker whichever others are there."""
    figure = style.begin(8, 6, title)
    panel = figure.add_subplot()
    found = {point.name: tuple(map(spread, zip(*point.pairs, strict=True))) for point in points}
    for i, kind in enumerate(kinds):
        here = [found[point.name] for point in points if point.kind == kind]
        if not here:
            continue
        x, y = ([pair[axis].mean for pair in here] for axis in (0, 1))
        panel.scatter(x, y, s=_MARKER, label=kind, color=style.colour(i), marker=style.marker(i), zorder=3)
        errors = np.nan_to_num([[pair[axis].std for pair in here] for axis in (0, 1)])
        if errors.any():
            panel.errorbar(x, y, errors[1], errors[0], fmt="none", ecolor=style.colour(i), elinewidth=0.9, alpha=0.55)
    panel.set_xlabel(labels[0])
    panel.set_ylabel(labels[1])
    panel.margins(0.12)
    style.plain(panel)
    for axis in (panel.xaxis, panel.yaxis):
        style.in_per_cent(axis)
    several = any(len(point.pairs) > 1 for point in points)
    note = "error bars: ± one standard deviation over seeds" if several else None
    columns = style.side_by_side(kinds, 8)
    figure.legend(loc="outside lower left", ncols=columns, frameon=False, fontsize=9, title=note, title_fontsize=8,
                  alignment="left")  # fmt: skip
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # from now on everything stays where it is
    panel.autoscale(enable=False)
    _name(panel, found)
    return style.save(figure, path)


def _name(panel: Axes, found: Mapping[str, tuple[Spread, ...]]) -> None:
    """Write every point's name inside the frame where it hides no marker and no other name, and crosses few lines."""
    pixels = panel.figure.dpi / 72
    middles = {name: panel.transData.transform((x.mean, y.mean)) for name, (x, y) in found.items()}
    taken = {name: Bbox([at - _RADIUS * pixels, at + _RADIUS * pixels]) for name, at in middles.items()}
    lines = [Line(panel.transData.transform(bar)) for x, y in found.values() for bar in _bars(x, y)]
    frame, names = panel.get_window_extent(), dict[str, Bbox]()
    for name in sorted(found, key=lambda name: _nearest(name, middles)):  # the most crowded have the choice
        x, y = found[name]
        text = panel.annotate(name, (x.mean, y.mean), (0, 0), textcoords="offset points", fontsize=8.5, va="center",
                              ha="center", zorder=4)  # fmt: skip
        text.set_in_layout(False)
        size = text.get_window_extent()
        beside = [box for other, box in taken.items() if other != name] + list(names.values())
        best, least = (0.0, np.zeros(2)), float("inf")
        for distance, offset in _offsets(size.width / pixels, size.height / pixels):
            box = size.translated(*(offset * pixels))
            joined = _line(middles[name], box)
            cost = distance + _HIDDEN * box.padded(2).count_overlaps([*taken.values(), *names.values()])
            cost += _HIDDEN * (not (frame.contains(*box.min) and frame.contains(*box.max)))
            cost += _CROSSED * sum(line.intersects_bbox(box.padded(2)) for line in lines)
            cost += _MISLED * sum(joined.intersects_bbox(other) for other in beside)
            if cost < least:
                best, least = (distance, offset), cost
        distance, offset = best
        names[name] = size.translated(*(offset * pixels))
        text.set_position((float(offset[0]), float(offset[1])))
        if distance >= _LINE_FROM:
            lines.append(joined := _line(middles[name], names[name]))
            panel.plot(*panel.transData.inverted().transform(joined.vertices).T, color="0.6", linewidth=0.6, zorder=2)


def _nearest(name: str, middles: Mapping[str, NDArray[np.float64]]) -> float:
    """How far it is from a point to the nearest other one."""
    return min((float(np.hypot(*(middles[name] - at))) for other, at in middles.items() if other != name), default=0.0)


def _line(point: NDArray[np.float64], box: Bbox) -> Line:
    """From a point to the nearest edge of a box."""
    return Line([point, np.clip(point, box.min, box.max)])


def _bars(x: Spread, y: Spread) -> list[list[tuple[float, float]]]:
    """The error bars of a point, from end to end."""
    if x.n < 2:
        return []
    return [[(x.mean - x.std, y.mean), (x.mean + x.std, y.mean)], [(x.mean, y.mean - y.std), (x.mean, y.mean + y.std)]]


def _offsets(width: float, height: float) -> Iterator[tuple[float, NDArray[np.float64]]]:
    """Where a text of this size may be about its point, the nearest first, right and left before above and below."""
    angles = sorted((2 * pi * i / _DIRECTIONS for i in range(_DIRECTIONS)), key=lambda angle: abs(sin(angle)))
    for distance in _DISTANCES:
        for angle in angles:
            towards = np.array([cos(angle), sin(angle)])
            yield distance, towards * distance + np.array([np.round(towards[0], 2) * width, towards[1] * height]) / 2
