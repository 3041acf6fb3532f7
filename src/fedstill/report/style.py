"""What all figures share: colours, the names of metrics, how a picture is begun and written."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter

from fedstill.core.errors import SettingError
from fedstill.core.files import write_atomic
from fedstill.metrics.shown import title

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
T = TypeVar("T")
_FONT = 10.0  # points: what an axis is labelled in, if nothing else is wanted
_FLATTEST = 0.75  # height of a figure of a given width, if it would be lower still


@dataclass(frozen=True)
class Look:
    """How figures are to look in a paper; what is not set is as it suits a screen."""

    width: float | None = None  # inches
    font_size: float | None = None  # points, of the labels of axes; other texts in proportion
    order: Sequence[str] = ()  # names that come first
    labels: Mapping[str, str] = field(default_factory=dict)  # what to write for a name


_PLAIN = Look()
_LOOK: ContextVar[Look] = ContextVar("look", default=_PLAIN)


@contextmanager
def using(look: Look) -> Iterator[None]:
    """Draw figures with this look meanwhile.

    >>> with using(Look(width=3.5)): begin(7, 6).get_size_inches().tolist()
    [3.5, 3.0]
    """
    before = _LOOK.set(look)
    try:
        yield
    finally:
        _LOOK.reset(before)


def wanted_width() -> float | None:
    """The width of figures in inches, if one is wanted."""
    return _LOOK.get().width


def arranged(named: Mapping[str, T]) -> dict[str, T]:
    """What a figure shows by name, in the order and under the labels that are wanted.

    A name is meant by itself, or by its beginning up to a comma or bracket: `fedavg` means `fedavg, alpha 0.1`.

    >>> with using(Look(order=["b"], labels={"a": "A"})): arranged({"a, alpha 1": 1, "b": 2})
    {'b': 2, 'A, alpha 1': 1}
    """
    look = _LOOK.get()
    for option, names in (("--order", look.order), ("--label", look.labels)):
        for name in names:
            if not any(_means(name, each) for each in named):
                raise SettingError(f"{option} {name}: there is no such name; there are {'; '.join(named)}")
    places = {each: next((i for i, n in enumerate(look.order) if _means(n, each)), len(look.order)) for each in named}
    found: dict[str, T] = {}
    for each in sorted(named, key=lambda name: places[name]):
        means = [name for name in look.labels if _means(name, each)]
        longest = max(means, key=len, default="")
        label = look.labels[longest] + each[len(longest) :] if means else each
        if label in found:
            raise SettingError(f"--label: two names would be {label!r}")
        found[label] = named[each]
    return found


def _means(name: str, full: str) -> bool:
    return full == name or full.startswith((f"{name}, ", f"{name} (", f"{name} ["))


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
    return METRICS.get(metric) or title(metric)


def is_share(metric: str) -> bool:
    """Whether a metric, of any model, is shown in per cent."""
    return metric.rpartition(".")[2] in SHARES


class Picture(Figure):
    """A figure that a notebook shows as it is, without pyplot."""

    def _repr_png_(self) -> bytes:
        drawn = io.BytesIO()
        self.savefig(drawn, format="png", dpi=110)
        return drawn.getvalue()


def begin(width: float, height: float, title: str = "") -> Figure:
    """An empty figure of a size in inches, titled if there is a title; panels make room for each other."""
    if wanted := wanted_width():
        width, height = wanted, max(height * wanted / width, min(height, _FLATTEST * wanted))
    figure = Picture(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(wrapped(title, width), fontsize=11)
    return figure


def wrapped(text: str, width: float) -> str:
    """Text broken into lines that fit a width in inches at 11 points."""
    return "\n".join(textwrap.wrap(text, max(20, round(11.5 * width / _font_scale())), break_long_words=False))


def side_by_side(names: Sequence[str], width: float) -> int:
    """How many names of a legend share a line of a width in inches, if lines are of about the same length."""
    longest = 0.7 + 0.085 * _font_scale() * max(map(len, names), default=1)
    fit = max(1, int((wanted_width() or width) / longest))
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


def _font_scale() -> float:
    return (_LOOK.get().font_size or _FONT) / _FONT


def _scale_fonts(figure: Figure, factor: float) -> None:
    """Every text by this factor. Labels of ticks are made when they are drawn: their axis is told as well."""
    ticks = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    for axis in ticks:
        if major := axis.get_majorticklabels():
            axis.set_tick_params(which="major", labelsize=factor * float(major[0].get_fontsize()))
        if minor := axis.get_minorticklabels():
            axis.set_tick_params(which="minor", labelsize=factor * float(minor[0].get_fontsize()))
    labels = {id(text) for axis in ticks for text in axis.get_ticklabels(which="both")}
    for text in figure.findobj(Text):
        if id(text) not in labels:
            text.set_fontsize(factor * float(text.get_fontsize()))


def save(figure: Figure, target: Target) -> Figure:
    """Write a figure to a file, by its ending, or as SVG to a stream. The same figure gives the same bytes."""
    if _LOOK.get().font_size:
        _scale_fonts(figure, _font_scale())
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
