"""How well attackers tell members of a training set from others."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from fedstill.report import style

Row = tuple[str, float, tuple[float, float]]  # what was attacked, the AUC, and its interval


def leaks(rows: Sequence[Row], path: style.Target, *, title: str = "") -> Figure:
    """Draw the area under the curve of each attack with its interval, beside that of a guess."""
    figure = style.begin(6.4, 1.2 + 0.45 * len(rows), title)
    panel = figure.subplots()
    for place, (_, auc, (low, high)) in enumerate(rows):
        panel.plot([low, high], [place, place], linewidth=1.8, color=style.line(0)["color"])
        panel.plot([auc], [place], "o", color=style.line(0)["color"])
    panel.axvline(0.5, linestyle="--", linewidth=1, color="0.5")
    panel.set(xlabel="AUC (0.5: a guess)", yticks=range(len(rows)), yticklabels=[name for name, _, _ in rows])
    panel.set_xlim(min(0.45, *(low for _, _, (low, _) in rows)) - 0.02, 1.02)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    style.plain(panel)
    return style.save(figure, path)
