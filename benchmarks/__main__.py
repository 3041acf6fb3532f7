"""`make bench`: everything in one run, ratios rather than seconds."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benchmarks import engine, growth, methods, server

console = Console()


def main() -> None:
    table = Table(title="FedAvg, samples a second, 2 processes", caption="best of 5 medians, taken in turn")
    for column in ("work", "bare loop", "fedstill", "ratio", "to reach"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for work, rounds, goal in ((engine.SMALL_CLIENTS, 15, 0.80), (engine.LARGE_CLIENTS, 3, 0.92)):
        bare, ours = engine.against_bare_loop(work, rounds=rounds, repeats=5)
        table.add_row(work.name, f"{bare:,.0f}", f"{ours:,.0f}", f"{ours / bare:.2f}", f"{goal:.2f}")
    console.print(table)

    naive, cached = server.stage_seconds()
    table = Table(
        title=f"Server distillation: {server.WORK.name}, {server.EPOCHS} epochs", caption="best of 4, in turn"
    )
    for column in ("every teacher in every step", "teachers asked once", "ratio", "to reach"):
        table.add_column(column, justify="right")
    table.add_row(f"{naive:.1f} s", f"{cached:.1f} s", f"{naive / cached:.2f}", f"{0.9 * server.ARITHMETIC:.2f}")
    console.print(table)

    for cases, work, rounds, repeats in (
        (methods.CASES, methods.WORK, 6, 3),
        (methods.SERVER_CASES, methods.SERVER_WORK, 2, 1),
    ):
        table = Table(title=f"Cost of a round over FedAvg's: {work.name}", caption=f"best of {repeats} medians")
        for column in ("method", "ratio", "at most"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for method, ratio, limit in methods.round_costs(cases, work, rounds=rounds, repeats=repeats):
            table.add_row(method, f"{ratio:.2f}", "" if limit is None else f"{limit:.2f}")
        console.print(table)

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


if __name__ == "__main__":
    main()
