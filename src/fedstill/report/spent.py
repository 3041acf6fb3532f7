"""What a run spends of its privacy, round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from fedstill.report import style

Spent = tuple[Sequence[int], Sequence[float]]  # rounds, and epsilon after each of them


def spent(plans: Mapping[str, Spent], path: style.Target, *, delta: float) -> Figure:
    """Draw epsilon by rounds, a line for each plan."""
    figure = style.begin(5.6, 4.0)
    panel = figure.subplots()
    for i, (name, (rounds, epsilons)) in enumerate(plans.items()):
        panel.plot(rounds, epsilons, label=name, linewidth=1.8, **style.line(i))
    panel.set(xlabel="round", ylabel=f"epsilon at delta {delta:g}", xlim=(0, None), ylim=(0, None))
    style.plain(panel)
    panel.legend(frameon=False, fontsize=9)
    return style.save(figure, path)
