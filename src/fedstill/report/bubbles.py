"""A picture and a table of the data partition, clients by classes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedstill.data.federation import Federation
from fedstill.report import style

MOST_CLIENTS = 100
POINTS_PER_INCH = 72
FONT = 9  # points, in the legend
LONGEST = 24  # characters of a client's name


class Row(TypedDict):
    """One client in `table`."""

    client: str
    samples: int
    classes_held: int
    largest_class_share: float
    test_samples: int


def table(federation: Federation) -> list[Row]:
    """Training samples, classes held, share of the largest class and test samples of each client."""
    counts, sizes = federation.class_counts(), federation.sizes
    largest = counts.max(axis=1) / np.maximum(sizes, 1)
    columns = zip(
        federation.client_names,
        sizes.tolist(),
        (counts > 0).sum(axis=1).tolist(),
        largest.tolist(),
        federation.test_sizes.tolist(),
        strict=True,
    )
    return [
        Row(client=name, samples=n, classes_held=held, largest_class_share=share, test_samples=test)
        for name, n, held, share, test in columns
    ]


def bubbles(federation: Federation, path: str | style.Target, title: str | None = None) -> Figure:
    """Draw clients by classes; the area of a bubble is the number of training samples."""
    return swept_bubbles({"": federation}, path, title)


def swept_bubbles(federations: Mapping[str, Federation], path: str | style.Target, title: str | None = None) -> Figure:
    """Draw the same clients and classes divided in several named ways, one below the other on the same scale."""
    federation, *_ = federations.values()
    tables = [each.class_counts(MOST_CLIENTS) for each in federations.values()]  # (clients, classes) each
    clients, classes = tables[0].shape
    text = title or f"{federation.dataset.name}: training samples by client and class"
    if federation.clients > clients:
        text += f"\n(the first {clients} of {federation.clients:,} clients)"

    cell = float(np.clip((8 if len(tables) == 1 else 6) / max(clients, classes), 0.17, 0.45))  # inches
    names = federation.dataset.classes
    left = 0.75 + 0.085 * max(map(len, names), default=1)
    who = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in federation.client_names[:clients]]
    named = not all(name.isdecimal() for name in who)
    right, below, above = (
        1.6,
        0.65 + (0.07 * max(map(len, who)) if named else 0),
        0.55 + 0.2 * text.count("\n") + (0.25 if any(federations) else 0),
    )
    between = 0.6
    narrowest, lowest = 3.0, 2.0
    if wanted := style.wanted_width():
        narrowest = lowest = 0.5
        cell = min(0.45, max(wanted - left - right, narrowest) / clients)
    inner_width, inner_height = max(cell * clients, narrowest), max(cell * classes, lowest)
    step = inner_height + between
    width, height = left + inner_width + right, below + step * len(tables) - between + above
    figure = style.Picture(figsize=(width, height))
    FigureCanvasAgg(figure)

    most = max(*(int(counts.max(initial=0)) for counts in tables), 1)
    diameter = 0.95 * POINTS_PER_INCH * min(inner_width / clients, inner_height / classes, 0.45)
    panels = []
    for i, (name, counts) in enumerate(zip(federations, tables, strict=True)):
        bottom = below + step * (len(tables) - 1 - i)
        axes = figure.add_axes((left / width, bottom / height, inner_width / width, inner_height / height))
        panels.append(axes)
        client, label = np.nonzero(counts)
        # At least a dot of one point, or a class of few samples would look like one that is not held.
        area = np.maximum(diameter**2 * counts[client, label] / most, 1.0)
        axes.scatter(client, label, s=area, color="#3b6ea5", edgecolors="black", linewidths=0.4, zorder=2)

        axes.set_xlim(-0.6, clients - 0.4)
        axes.set_ylim(classes - 0.4, -0.6)
        every = np.arange(0, clients, max(1, round((0.16 if named else 0.3) * clients / inner_width)))
        axes.set_xticks(every, [who[k] for k in every], rotation=90 if named else 0)
        axes.set_yticks(np.arange(classes), names, fontsize=8 if cell > 0.2 else 7)
        axes.tick_params(axis="x", labelsize=8)
        axes.grid(color="0.9", linewidth=0.5, zorder=0)
        axes.set_axisbelow(True)
        axes.set_title(name, fontsize=10)
        axes.set_ylabel("class")
    panels[-1].set_xlabel("client")
    figure.suptitle(text, x=(left + inner_width / 2) / width, y=1 - 0.2 / height, va="top", fontsize=11)

    handles = [
        Line2D(
            [],
            [],
            linestyle="",
            marker="o",
            markersize=max(diameter * (size / most) ** 0.5, 1.0),
            markerfacecolor="#3b6ea5",
            markeredgecolor="black",
            markeredgewidth=0.4,
            label=f"{size:,}",
        )
        for size in _legend_sizes(most)
    ]
    panels[0].legend(
        handles=handles,
        title="samples",
        fontsize=FONT,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        # In units of the font: room for the largest bubble.
        handlelength=max(1.5, diameter / FONT),
        labelspacing=max(0.6, 0.65 * diameter / FONT),
        borderaxespad=0.0,
    )
    return style.save(figure, Path(path) if isinstance(path, str) else path)


def _legend_sizes(most: int) -> list[int]:
    """The largest count rounded down to one digit, a quarter and a twentieth of it."""
    unit = 10 ** (len(str(most)) - 1)
    top = most // unit * unit
    return sorted({top, max(1, top // 4), max(1, top // 20)}, reverse=True)
