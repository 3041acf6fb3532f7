"""`fedstill privacy`: what noise a promise needs, or what a noise promises."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstill.core.choices import Sampling
from fedstill.core.errors import SettingError

_POINTS = 12  # of the picture


def privacy(
    clients: Annotated[int, typer.Option(help="Clients in all.", min=1)],
    cohort: Annotated[int, typer.Option(help="Clients in a round.", min=1)],
    rounds: Annotated[int, typer.Option(help="Rounds in all.", min=1)],
    epsilon: Annotated[float | None, typer.Option(help="The promise: what may be spent. Gives the noise.")] = None,
    noise: Annotated[
        float | None, typer.Option(help="Standard deviation of the noise on the sum, in clips. Gives epsilon.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="How likely the promise may fail.", show_default="0.1 / clients")
    ] = None,
    sampling: Annotated[
        Sampling, typer.Option(help="How cohorts are drawn: each client by chance, or a fixed number of them.")
    ] = "poisson",
    out: Annotated[
        Path | None, typer.Option(help="Also draw what is spent round by round: a .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Differential privacy of whole clients: the noise for an epsilon, or the epsilon of a noise.

    fedstill privacy --clients 1000 --cohort 50 --rounds 200 --epsilon 4

    Every update is clipped, and Gaussian noise is added to the sum of a round's updates. A model trained like that is
    almost as likely without any one client: at most e^epsilon times less or more, but for a chance of delta.
    """
    accounting, commands = (
        importlib.import_module(f"fedstill.{name}") for name in ("privacy.accounting", "cli.commands")
    )
    if (epsilon is None) == (noise is None):
        raise SettingError("give --epsilon, to get the noise, or --noise, to get the epsilon")
    plan = accounting.Plan(clients, cohort, rounds, sampling)
    delta = 0.1 / clients if delta is None else delta
    with commands.console.status("accounting"):
        noise = accounting.noise_multiplier(plan, epsilon, delta) if noise is None else noise
        spent = accounting.epsilon(plan, noise, delta)
    commands.console.print(_table(plan, noise, spent, delta))
    if out is not None:
        with commands.console.status("drawing"):
            _draw(accounting, plan, noise, delta, out)
        commands.say(f"epsilon by rounds: {out}")


def _table(plan: Any, noise: float, spent: float, delta: float) -> Any:
    from rich.table import Table

    table = Table(show_header=False, title="Differential privacy of a client")
    neighbours = "one client more or less" if plan.sampling == "poisson" else "one client replaced"
    for name, value in (
        ("epsilon", f"{spent:.3f}"),
        ("delta", f"{delta:g}"),
        ("neighbours", neighbours),
        ("noise on the sum", f"{noise:.4f} x clip"),
        ("noise on the mean", f"{noise / plan.cohort:.6f} x clip"),
        ("rounds", f"{plan.rounds:,}"),
        ("clients in a round", f"{plan.cohort:,} of {plan.clients:,} ({plan.sampling})"),
    ):
        table.add_row(name, value)
    return table


def _draw(accounting: Any, plan: Any, noise: float, delta: float, out: Path) -> None:
    """What is spent after each of some rounds."""
    from dataclasses import replace

    curves = importlib.import_module("fedstill.report.spent")
    steps = sorted({max(1, round(plan.rounds * i / _POINTS)) for i in range(1, _POINTS + 1)})
    spent = [accounting.epsilon(replace(plan, rounds=step), noise, delta) for step in steps]
    curves.spent({f"noise {noise:.3g} x clip": (steps, spent)}, out, delta=delta)
