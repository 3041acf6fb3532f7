"""`make bench`: everything, or the parts that are named; ratios rather than seconds."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from benchmarks import checkpoints, engine, growth, methods, server, start
from benchmarks.peers.environments import FLOWER, FLOWER_START, PFL

console = Console()
TOLERANCE = 1e-5  # between weights that come of the same work, which move by far more


def check() -> None:
    """That all do the same work, before anybody's time counts."""
    table = Table(title="The same work: weights after two rounds of FedAvg", caption=f"at most {TOLERANCE:g} apart")
    for column in ("network", "with", "largest change", "largest difference"):
        table.add_column(column, justify="left" if column in ("network", "with") else "right")
    for work in (engine.SMALL_CLIENTS, engine.LARGE_CLIENTS):
        change, apart = engine.differences(work, unavailable=console.print)
        for name, difference in apart.items():
            table.add_row(work.model, name, f"{change:.1e}", f"{difference:.1e}")
            if not difference <= TOLERANCE:
                raise SystemExit(f"{name} does other work than fedstill: {work.model} is {difference:.1e} apart")
    console.print(table)


def time_rounds() -> None:
    check()
    table = Table(title="FedAvg, samples a second, 2 processes", caption="best of 3 medians, taken in turn")
    for column in ("work", "against", "its own", "fedstill", "ratio", "to reach"):
        table.add_column(column, justify="left" if column in ("work", "against") else "right")
    for work, rounds, goals in (
        (engine.SMALL_CLIENTS, 15, {"bare loop": 0.88, PFL.name: 1.2, FLOWER.name: 4.0}),
        (engine.LARGE_CLIENTS, 3, {"bare loop": 0.95, PFL.name: 1.2}),
    ):
        rates = engine.against_peers(work, rounds=rounds, repeats=3, unavailable=console.print)
        ours = rates.pop("fedstill")
        for name, rate in rates.items():
            goal = f"{goals[name]:.2f}" if name in goals else ""
            table.add_row(work.name, name, f"{rate:,.0f}", f"{ours:,.0f}", f"{ours / rate:.2f}", goal)
    console.print(table)


def time_runs() -> None:
    work, rounds = engine.SMALL_CLIENTS, 20
    found = engine.with_start_up(
        work, rounds=rounds, repeats=3, peers=(FLOWER, FLOWER_START), unavailable=console.print
    )
    table = Table(
        title=f"{rounds} rounds from the start of the process to its end: {work.name}", caption="best of 3, in turn"
    )
    for column in ("against", "its own", "fedstill", "ratio", "to reach"):
        table.add_column(column, justify="left" if column == "against" else "right")
    ours, goals = found.pop("fedstill"), {FLOWER.name: "5.00"}
    for name, seconds in found.items():
        table.add_row(name, f"{seconds:.1f} s", f"{ours:.1f} s", f"{seconds / ours:.2f}", goals.get(name, ""))
    console.print(table)


def time_server() -> None:
    naive, cached = server.stage_seconds()
    table = Table(
        title=f"Server distillation: {server.WORK.name}, {server.EPOCHS} epochs", caption="best of 4, in turn"
    )
    for column in ("every teacher in every step", "teachers asked once", "ratio", "to reach"):
        table.add_column(column, justify="right")
    table.add_row(f"{naive:.1f} s", f"{cached:.1f} s", f"{naive / cached:.2f}", f"{0.9 * server.ARITHMETIC:.2f}")
    console.print(table)


def time_methods() -> None:
    for cases, work, rounds, repeats in (
        (methods.CASES, methods.WORK, 5, 2),
        (methods.SERVER_CASES, methods.SERVER_WORK, 4, 1),
    ):
        table = Table(
            title=f"A round of each method: {work.name}",
            caption=f"medians, best of {repeats}, next to FedAvg's; clients: all together; server: without waiting",
        )
        for column in ("method", "over FedAvg", "at most", "clients s", "server s", "without caches", "saved"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for found in methods.round_costs(cases, work, rounds=rounds, repeats=repeats):
            cost, plain, without = found.cost, found.fedavg, found.without
            table.add_row(
                found.case.name,
                f"{cost.whole / plain.whole:.2f}",
                "" if found.case.at_most is None else f"{found.case.at_most:.2f}",
                f"{cost.clients:.2f}",
                f"{cost.server:.2f}",
                f"{without.whole / plain.whole:.2f}" if without else "",
                f"{1 - cost.whole / without.whole:.0%}" if without else "",
            )
        console.print(table)


def measure_growth() -> None:
    table = Table(
        title=f"Growth: LeNet-5, {growth.ACTIVE} active clients of {growth.HELD} samples",
        caption="MB without the arrays that say who holds what; in brackets, over that of the fewest clients",
    )
    for column in ("method", "clients", "seconds a round", "peak MB"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method, settings in growth.METHODS:
        fewest: dict[str, float] = {}
        for clients in growth.CLIENTS:
            found = growth.grown(method, settings, clients, rounds=8)
            fewest = fewest or found
            cells = [f"{found[key]:.2f} ({found[key] / fewest[key]:.2f})" for key in ("seconds", "megabytes")]
            table.add_row(method, f"{clients:,}", *cells)
    console.print(table)


def time_checkpoints() -> None:
    table = Table(
        title=f"A checkpoint after every round: {checkpoints.WORK.name}", caption="best of 2 medians, taken in turn"
    )
    for column in ("method", "s a round with", "s without", "cost", "at most"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in checkpoints.METHODS:
        with_, without = checkpoints.share(method)
        table.add_row(method, f"{with_:.2f}", f"{without:.2f}", f"{with_ / without - 1:+.1%}", "3%")
    console.print(table)


def time_starts() -> None:
    wait, round_ = start.resume_seconds()
    table = Table(
        title="Seconds until something happens", caption="best of several; whole processes, but resume in one that runs"
    )
    for column in ("what", "seconds"):
        table.add_column(column, justify="left" if column == "what" else "right")
    table.add_row("fedstill --help", f"{start.help_seconds():.2f}")
    table.add_row("fedstill run: the demo's first round, evaluation and results", f"{start.first_round_seconds():.2f}")
    table.add_row(f"resume with {start.STATES:,} client states: until its next round begins", f"{wait:.2f}")
    table.add_row("… and that round, of all of them", f"{round_:.2f}")
    console.print(table)


PARTS = {
    "engine": time_rounds,
    "runs": time_runs,
    "server": time_server,
    "methods": time_methods,
    "growth": measure_growth,
    "checkpoints": time_checkpoints,
    "start": time_starts,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--check", action="store_true", help="only check that peers do the same work; time nothing")
    told = parser.parse_args()
    if unknown := [part for part in told.parts if part not in PARTS]:
        parser.error(f"no part is called {unknown[0]!r}; there are {', '.join(PARTS)}")
    if told.check:
        check()
        return
    for part in told.parts or PARTS:
        PARTS[part]()


if __name__ == "__main__":
    main()
