"""Confusion matrices side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLUMNS = 4
LABELLED = 12  # classes up to which every cell shows its number


def confusion(matrices: Mapping[str, Sequence[Sequence[int]]], path: Path, title: str = "") -> None:
    """Draw named matrices of true by predicted classes, each row as shares of its class."""
    columns = min(COLUMNS, len(matrices))
    lines = math.ceil(len(matrices) / columns)
    figure = Figure(figsize=(3.2 * columns, 3.3 * lines + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    cells = figure.subplots(lines, columns, squeeze=False).flatten()
    for cell in cells[len(matrices) :]:
        cell.axis("off")
    for cell, (name, matrix) in zip(cells, matrices.items(), strict=False):
        counts = np.asarray(matrix, float)
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        cell.imshow(shares, cmap="Greys", vmin=0, vmax=1)
        cell.set_title(f"{name}: {counts.trace() / max(1, counts.sum()):.1%}", fontsize=9)
        cell.set_xlabel("predicted", fontsize=8)
        cell.set_ylabel("true", fontsize=8)
        cell.tick_params(labelsize=7)
        if len(shares) > LABELLED:
            continue
        cell.set_xticks(range(len(shares)))
        cell.set_yticks(range(len(shares)))
        for i, j in np.argwhere(shares >= 0.01):
            cell.text(
                j, i, f"{100 * shares[i, j]:.0f}", ha="center", va="center", fontsize=6,
                color="white" if shares[i, j] > 0.5 else "black",
            )  # fmt: skip
    if title:
        figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
