"""What all figures share: colours, the names of metrics, how a picture is begun and written."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from fedstill.core.files import write_atomic

METRICS = {
    "accuracy": "global test accuracy",
    "amp": "AMP: accuracy on the clients' tests",
    "wlp": "WLP: accuracy of the worst client",
    "fm": "FM: variance over clients",
    "loss": "global test loss",
    "local_accuracy": "local models on their own tests",
    "train_loss": "local training loss",
    "bytes_down": "bytes down a round",
    "bytes_up": "bytes up a round",
    "seconds": "seconds a round",
    "distance": "squared distance to the final model",
}
SHARES = ("accuracy", "amp", "wlp", "local_accuracy")  # shown in per cent

# Distinct in hue, in lightness (so also in grey) and for the colour-blind; what is drawn differs in style too.
COLOURS = (
    *("#0b3c5d", "#d95f02", "#2a9d8f", "#9b5de5", "#6c757d", "#c1121f", "#e9c46a", "#000000"),
    *("#7fb3d5", "#8d5524", "#6a994e", "#f4978e", "#5f0f40"),
)
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*")  # nine, so that 117 classes differ in colour or marker
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo", "---")

Target = Path | IO[bytes]


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def line(i: int) -> dict[str, Any]:
    """Colour and style of the i-th line. The first 36 differ without colour too, by dashes and sparse markers."""
    drawn: dict[str, Any] = {"color": colour(i), "linestyle": LINES[i % len(LINES)]}
    if i >= len(LINES):
        drawn |= {"marker": marker(i // len(LINES) - 1), "markevery": 0.2, "markersize": 5}
    return drawn


def marker(i: int) -> str:
    return MARKERS[i % len(MARKERS)]


def label(metric: str) -> str:
    """What to write at the axis of a metric."""
    return METRICS.get(metric, metric.replace("_", " "))


def is_share(metric: str) -> bool:
    """Whether a metric, of any model, is shown in per cent."""
    return metric.rpartition(".")[2] in SHARES


def begin(width: float, height: float, title: str = "") -> Figure:
    """An empty figure of a size in inches, titled if there is a title; panels make room for each other."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(wrapped(title, width), fontsize=11)
    return figure


def wrapped(text: str, width: float) -> str:
    """Text broken into lines that fit a width in inches at 11 points."""
    return "\n".join(textwrap.wrap(text, max(20, round(11.5 * width)), break_long_words=False))


def side_by_side(names: Sequence[str], width: float) -> int:
    """How many names of a legend share a line of a width in inches, if lines are of about the same length."""
    fit = max(1, int(width / (0.7 + 0.085 * max(map(len, names), default=1))))
    lines = max(1, -(-len(names) // fit))
    return max(1, -(-len(names) // lines))


def grid(figure: Figure, count: int, columns: int) -> list[Axes]:
    """Panels for so many things, the rest of the last row left empty."""
    lines = -(-count // columns)
    panels: list[Axes] = list(figure.subplots(lines, columns, squeeze=False).flat)
    for spare in panels[count:]:
        spare.axis("off")
    return panels[:count]


def plain(panel: Axes) -> None:
    """Light grid lines, no box."""
    panel.grid(alpha=0.25)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def in_per_cent(axis: Any) -> None:
    axis.set_major_formatter(lambda v, _: f"{100 * v:g} %")


def logarithmic(axis: Any) -> None:
    """Plain numbers along a logarithmic axis, between the powers of ten too where it spans few of them."""
    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter())


def save(figure: Figure, target: Target) -> Figure:
    """Write a figure to a file, by its ending, or as SVG to a stream. The same figure gives the same bytes."""
    kind = target.suffix.lower().lstrip(".") if isinstance(target, Path) else "svg"
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedstill"}):
        figure.savefig(drawn, format=kind, dpi=130, metadata=metadata)
    if isinstance(target, Path):
        write_atomic(target, drawn.getvalue())
    else:
        target.write(drawn.getvalue())
    return figure
