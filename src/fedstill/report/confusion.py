"""Confusion matrices side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from fedstill.report import style

COLUMNS = 4
LABELLED = 12  # classes up to which every cell shows its number


def confusion(
    matrices: Mapping[str, Sequence[Sequence[int]]],
    path: style.Target,
    title: str = "",
    *,
    classes: Sequence[str] = (),
) -> Figure:
    """Draw named matrices of true by predicted classes, each row as shares of its class, in per cent."""
    matrices = style.arranged(matrices)
    columns = min(COLUMNS, len(matrices))
    lines = -(-len(matrices) // columns)
    named = 0.085 * max(map(len, classes), default=0) if len(classes) <= LABELLED else 0  # inches
    figure = style.begin((3.2 + named) * columns, (3.3 + named) * lines + 0.3, title)
    cells = style.grid(figure, len(matrices), columns)
    for cell, (name, matrix) in zip(cells, matrices.items(), strict=True):
        counts = np.asarray(matrix, float)
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        cell.imshow(shares, cmap="Greys", vmin=0, vmax=1)
        accuracy = f"{counts.trace() / max(1, counts.sum()):.1%}"
        cell.set_title(style.wrapped(f"{name}: {accuracy}", 3), fontsize=9)
        cell.set_xlabel("predicted class", fontsize=8)
        cell.set_ylabel("true class", fontsize=8)
        cell.tick_params(labelsize=7)
        if len(shares) > LABELLED:
            continue
        names = list(classes) or list(map(str, range(len(shares))))
        cell.set_xticks(range(len(shares)), names, rotation=90 if classes else 0)
        cell.set_yticks(range(len(shares)), names)
        for i, j in np.argwhere(shares >= 0.01):
            cell.text(
                j, i, f"{100 * shares[i, j]:.0f}", ha="center", va="center", fontsize=6,
                color="white" if shares[i, j] > 0.5 else "black",
            )  # fmt: skip
    return style.save(figure, path)
