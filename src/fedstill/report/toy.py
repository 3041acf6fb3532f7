"""Decision regions of models on points in the plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedstill.report import style

_PALE = ("#9fb6c6", "#f3c59b", "#a8d8d2", "#d9c6f5")  # the first four colours, with white


@dataclass(frozen=True)
class Regions:
    """What one model says of the plane, and the points that it was trained on."""

    title: str
    accuracy: float  # over the whole plane
    predicted: NDArray[np.int64]  # (side, side), rows from the bottom
    points: NDArray[np.float32]  # (points, 2)
    labels: NDArray[np.int64]  # (points,)


def toy(rows: Sequence[Sequence[Regions]], path: style.Target, *, extent: float, title: str = "") -> Figure:
    """Draw a row of panels for each method; the plane reaches from -extent to extent."""
    columns = max(map(len, rows))
    figure = style.begin(2.75 * columns, 2.95 * len(rows) + 0.6, title)
    panels = figure.subplots(len(rows), columns, squeeze=False, sharex=True, sharey=True)
    box = (-extent, extent, -extent, extent)
    classes = 1 + max(int(r.labels.max()) for row in rows for r in row)
    for line, row in zip(panels, rows, strict=True):
        for panel, regions in zip(line, row, strict=True):
            panel.imshow(
                regions.predicted, extent=box, origin="lower", cmap=ListedColormap(_PALE), vmin=0, vmax=len(_PALE) - 1,
                interpolation="nearest",
            )  # fmt: skip
            for c in range(classes):
                panel.scatter(
                    *regions.points[regions.labels == c].T, s=14, color=style.colour(c), marker=style.marker(c),
                    edgecolors="white", linewidths=0.4,
                )  # fmt: skip
            panel.set_title(f"{regions.title}: {regions.accuracy:.0%}", fontsize=9)
            panel.set(xlim=box[:2], ylim=box[2:])
        line[0].set_ylabel("$x_2$")
    for panel in panels[-1]:
        panel.set_xlabel("$x_1$")
    handles = [
        panels[0, 0].scatter([], [], s=24, color=style.colour(c), marker=style.marker(c), label=f"class {c + 1}")
        for c in range(classes)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=classes, frameon=False, fontsize=8,
                  title="points: what the model was trained on; areas: what it says", title_fontsize=8)  # fmt: skip
    return style.save(figure, path)
