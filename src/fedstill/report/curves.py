"""Learning curves: any metric by round, one line a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

METRICS = {
    "accuracy": "global test accuracy",
    "amp": "AMP: accuracy on the clients' tests",
    "wlp": "WLP: accuracy of the worst client",
    "fm": "FM: variance over clients",
    "loss": "global test loss",
    "local_accuracy": "local models on their own tests",
}
# Distinct in hue, in lightness (so also in grey) and for the colour-blind; lines differ in style too.
_COLOURS = ("#0b3c5d", "#d95f02", "#2a9d8f", "#9b5de5", "#6c757d", "#c1121f", "#e9c46a", "#000000")
_STYLES = ("-", "--", "-.", ":")


def curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    path: Path,
    *,
    metrics: Sequence[str] = ("accuracy", "fm"),
    title: str = "",
) -> None:
    """Draw the metrics of several runs, given by name as the records of metrics.jsonl, into a PNG or SVG."""
    figure = Figure(figsize=(5.2 * len(metrics), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        for i, (name, records) in enumerate(runs.items()):
            points = [(r["round"], r[metric]) for r in records if r.get(metric) is not None]
            marker = "o" if len(points) == 1 else None
            panel.plot(
                *(zip(*points, strict=True) if points else ([], [])),
                label=name,
                color=_COLOURS[i % len(_COLOURS)],
                linestyle=_STYLES[(i + i // len(_COLOURS)) % len(_STYLES)],
                linewidth=1.8,
                marker=marker,
            )
        panel.set_xlabel("round")
        panel.set_ylabel(METRICS.get(metric, metric))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if metric not in ("loss", "fm"):
            panel.yaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f} %")
            panel.set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=130)
