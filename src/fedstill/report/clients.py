"""How evenly a model serves the clients: the accuracy of each, from the worst to the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedstill.report import style

WIDTH = 6.8  # inches
NAMED = 40  # clients up to which each is named
Accuracies = Sequence[tuple[int, float]]  # test samples and accuracy of each client


def clients(
    groups: Mapping[str, Sequence[Accuracies]], path: style.Target, *, title: str = "", names: Sequence[str] = ()
) -> Figure:
    """Draw the clients' accuracies of each group of runs, sorted in each run: their mean over seeds, and their range.

    AMP is a dotted level, WLP the marked first point. `names` are those of the clients, of a single run.
    """
    groups = style.arranged(groups)
    figure = style.begin(WIDTH, 4.0 + 0.22 * sum(1 + len(name) // 60 for name in groups), title)
    panel = figure.subplots()
    for i, (name, runs) in enumerate(groups.items()):
        found = ranked(runs)
        mean, drawn, ranks = found.mean(axis=0), style.line(i), range(1, found.shape[1] + 1)
        if len(runs) > 1:
            panel.fill_between(ranks, found.min(0), found.max(0), color=drawn["color"], alpha=0.15, linewidth=0)
        amp = float(np.mean([np.average([a for _, a in run], weights=[n for n, _ in run]) for run in runs]))
        panel.axhline(amp, color=drawn["color"], linestyle=(0, (1, 2)), linewidth=1.2)
        label = style.wrapped(f"AMP {100 * amp:.1f} %, WLP {100 * mean[0]:.1f} %: {name}", WIDTH)
        first = {"marker": style.marker(i), "markevery": [0], "markersize": 8}
        panel.plot(ranks, mean, label=label, linewidth=1.8, clip_on=False, **drawn | first)
    panel.plot([], [], color="0.3", linestyle=(0, (1, 2)), linewidth=1.2, label="AMP: all clients' tests pooled")
    panel.set_xlabel("clients, from the worst served to the best")
    panel.set_ylabel("accuracy on the client's own test")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(names) <= NAMED and not all(name.isdecimal() for name in names):
        (run,) = next(iter(groups.values()))
        order = np.argsort([accuracy for _, accuracy in run], kind="stable")
        panel.set_xticks(range(1, len(names) + 1), [names[i] for i in order], rotation=90, fontsize=8)
    panel.set_ylim(0, 1.02)
    style.in_per_cent(panel.yaxis)
    style.plain(panel)
    several = any(len(runs) > 1 for runs in groups.values())
    note = "after the last round; marked: WLP, the worst-served client" + (
        "; lines: mean over seeds, bands: their range" if several else ""
    )
    figure.legend(loc="outside lower left", frameon=False, fontsize=9, title=note,
                  title_fontsize=8, alignment="left")  # fmt: skip
    return style.save(figure, path)


def ranked(runs: Sequence[Accuracies]) -> NDArray[np.float64]:
    """The accuracies in each run from the lowest on, (runs, clients); stretched, if another has more clients."""
    count = max(map(len, runs))
    rows = [np.sort([accuracy for _, accuracy in run]) for run in runs]
    return np.stack([np.interp(np.linspace(0, 1, count), np.linspace(0, 1, len(row)), row) for row in rows])
