"""t-SNE of features: which classes a model tells apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedstill.report import style

PERPLEXITY = 30
COLUMNS = 3
LISTED = 40  # classes up to which the legend names them


def embed(features: NDArray[Any], seed: int = 0) -> NDArray[np.float64]:
    """Features (samples, width) in the plane, (samples, 2)."""
    from sklearn.manifold import TSNE  # a second, which only this figure is worth
    from threadpoolctl import threadpool_limits

    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    with threadpool_limits(1):  # its threads wait for one another: many times slower where a core is shared
        found: NDArray[np.float64] = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(features)
    return found


def tsne(
    runs: Mapping[str, tuple[NDArray[Any], NDArray[Any]]],
    path: style.Target,
    *,
    classes: Sequence[str],
    title: str = "",
) -> Figure:
    """Draw the features of each run, given by name as (features, labels), coloured and marked by class."""
    runs = style.arranged(runs)
    columns = min(COLUMNS, len(runs))
    lines = -(-len(runs) // columns)
    figure = style.begin(3.7 * columns + 1.5, 3.8 * lines + 0.3, title)
    panels = style.grid(figure, len(runs), columns)
    for panel, (name, (features, labels)) in zip(panels, runs.items(), strict=True):
        points = embed(features)
        for c in np.unique(labels):
            x, y = points[labels == c].T
            panel.scatter(x, y, s=16, color=style.colour(c), marker=style.marker(c), linewidths=0, alpha=0.85)
        panel.set_title(style.wrapped(name, 3), fontsize=9)
        panel.set(xticks=[], yticks=[], xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)")
    if len(classes) <= LISTED:
        handles = [
            panels[0].scatter([], [], s=24, color=style.colour(c), marker=style.marker(c), linewidths=0, label=name)
            for c, name in enumerate(classes)
        ]
        figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8, title="class",
                      ncols=1 + len(classes) // 21)  # fmt: skip
    return style.save(figure, path)
