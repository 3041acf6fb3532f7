"""How evenly a model serves the clients: the accuracy of each, from the worst to the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedstill.report import style

Accuracies = Sequence[tuple[int, float]]  # test samples and accuracy of each client


def clients(groups: Mapping[str, Sequence[Accuracies]], path: style.Target, *, title: str = "") -> Figure:
    """Draw one line a run, those of a group alike; AMP is a dotted level, WLP the marked first point."""
    figure = style.begin(6.8, 4.0 + 0.22 * len(groups), title)
    panel = figure.subplots()
    for i, (name, runs) in enumerate(groups.items()):
        pooled, worst = [], []
        drawn = style.line(i)
        for run in runs:
            samples, accuracy = np.array(run, float).T
            order = np.sort(accuracy)
            pooled.append(float(np.average(accuracy, weights=samples)))
            worst.append(float(order[0]))
            panel.plot(range(1, len(order) + 1), order, linewidth=1.8 if len(runs) == 1 else 1.2, **drawn)
            panel.plot(1, order[0], marker=style.marker(i), color=drawn["color"], markersize=8, clip_on=False, zorder=3)
        amp, wlp = float(np.mean(pooled)), float(np.mean(worst))
        panel.axhline(amp, color=drawn["color"], linestyle=(0, (1, 2)), linewidth=1.2)
        text = f"{name}: AMP {100 * amp:.1f} %, WLP {100 * wlp:.1f} %"
        panel.plot([], [], marker=style.marker(i), linewidth=1.8, label=text, **drawn)
    panel.plot([], [], color="0.3", linestyle=(0, (1, 2)), linewidth=1.2, label="AMP: all clients' tests pooled")
    panel.set_xlabel("clients, from the worst served to the best")
    panel.set_ylabel("accuracy on the client's own test")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_ylim(0, 1.02)
    style.in_per_cent(panel.yaxis)
    style.plain(panel)
    figure.legend(loc="outside lower left", frameon=False, fontsize=9, title="marked: WLP, the worst-served client",
                  title_fontsize=8, alignment="left")  # fmt: skip
    return style.save(figure, path)
