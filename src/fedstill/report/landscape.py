"""The loss around a model, along random directions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedstill.report import style

Floats = NDArray[np.float64]
COLUMNS = 3
LEVELS = 14


def line(runs: Mapping[str, Floats], steps: Floats, path: style.Target, *, title: str = "") -> Figure:
    """Draw the loss of each run along one direction."""
    runs = style.arranged(runs)
    figure = style.begin(5.6, 4.0, title)
    panel = figure.subplots()
    for i, (name, losses) in enumerate(runs.items()):
        panel.plot(steps, losses, label=name, linewidth=1.8, **style.line(i))
    panel.axvline(0, color="0.5", linewidth=0.8)
    panel.set_xlabel("step along a filter-normalised direction (0: the final model)")
    panel.set_ylabel("test loss")
    panel.set_yscale("log")
    style.logarithmic(panel.yaxis)
    style.plain(panel)
    panel.legend(frameon=False, fontsize=9)
    return style.save(figure, path)


def plane(runs: Mapping[str, Floats], steps: Floats, path: style.Target, *, title: str = "") -> Figure:
    """Draw the loss of each run by its steps along direction 1 and 2, all on the same scale of colours."""
    runs = style.arranged(runs)
    columns = min(COLUMNS, len(runs))
    lines = -(-len(runs) // columns)
    figure = style.begin(3.6 * columns + 1.0, 3.5 * lines + 0.4, title)
    panels = style.grid(figure, len(runs), columns)
    every = np.stack(list(runs.values()))
    low, high = max(float(every.min()), 1e-6), max(float(every.max()), 2e-6)
    levels, scale = np.geomspace(low, high, LEVELS), LogNorm(low, high)
    for panel, (name, losses) in zip(panels, runs.items(), strict=True):
        panel.contourf(steps, steps, losses.T, levels, norm=scale, cmap="cividis", extend="both")
        panel.contour(steps, steps, losses.T, levels, colors="white", linewidths=0.5)
        panel.plot(0, 0, marker="P", color="white", markeredgecolor="black", markersize=9, label="the final model")
        panel.set_title(style.wrapped(name, 3), fontsize=9)
        panel.set(xlabel="step along direction 1", ylabel="step along direction 2", aspect="equal")
    panels[0].legend(loc="upper left", fontsize=7)
    bar = figure.colorbar(ScalarMappable(scale, "cividis"), ax=panels, label="test loss", shrink=0.85)
    style.logarithmic(bar.ax.yaxis)
    bar.ax.tick_params(which="both", labelsize=7)
    return style.save(figure, path)
