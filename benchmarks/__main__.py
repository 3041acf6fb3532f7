"""`make bench`: everything, or the parts that are named, in one table; ratios rather than seconds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial

from rich.console import Console
from rich.table import Table

from benchmarks import checkpoints, cluster, engine, growth, methods, networks, profile, server, start
from benchmarks.peers.environments import FLOWER, FLOWER_START, PFL, PFL_BY_HAND
from benchmarks.table import Row, shown, write
from benchmarks.work import HOME
from fedstill.running import machine

console = Console()
WIDE = 200  # characters that a row takes; a terminal that has fewer breaks it as it likes
TOLERANCE = 1e-5  # between weights that come of the same work, which move by far more


def check() -> None:
    """That all do the same work, before anybody's time counts."""
    table = Table(title="The same work: weights after two rounds of FedAvg", caption=f"at most {TOLERANCE:g} apart")
    for column in ("network", "batches an epoch", "with", "largest change", "largest difference"):
        table.add_column(column, justify="left" if column in ("network", "with") else "right")
    for work in (engine.SMALL_CLIENTS, engine.LARGE_CLIENTS):
        for small in engine.without_order(work):
            change, apart = engine.differences(small, unavailable=console.print)
            if not change > 100 * TOLERANCE:
                raise SystemExit(f"{work.model} moves by {change:.1e}, too little to tell one work from another")
            for name, difference in apart.items():
                table.add_row(work.model, str(small.batches), name, f"{change:.1e}", f"{difference:.1e}")
                if not difference <= TOLERANCE:
                    raise SystemExit(f"{name} does other work than fedstill: {work.model} is {difference:.1e} apart")
    console.print(table)


def time_rounds() -> Iterator[Row]:
    check()
    pfl = {PFL.name: 1.2, PFL_BY_HAND.name: 1.2}
    for work, rounds, repeats, goals in (
        (engine.SMALL_CLIENTS, 10, 7, pfl | {"bare loop": 0.88, FLOWER.name: 4.0}),
        (engine.LARGE_CLIENTS, 3, 3, pfl | {"bare loop": 0.95}),
    ):
        turns = engine.against_peers(work, rounds=rounds, repeats=repeats, unavailable=console.print)
        yield from compared("engine", work.name, turns, goals, partial(rate, work.samples_a_round))


def rate(samples: int, seconds: float) -> str:
    return f"{samples / seconds:,.0f} samples/s"


def time_runs() -> Iterator[Row]:
    work, rounds = engine.SMALL_CLIENTS, 20
    turns = engine.with_start_up(
        work, rounds=rounds, repeats=3, peers=(FLOWER, FLOWER_START), unavailable=console.print
    )
    what = f"{work.name}: {rounds} rounds, from the start of the process to its end"
    yield from compared("runs", what, turns, {FLOWER.name: 5.0}, lambda seconds: f"{seconds:.1f} s")


def compared(
    part: str, what: str, turns: dict[str, list[float]], goals: dict[str, float], shown: Callable[[float], str]
) -> Iterator[Row]:
    """The best turn of each against fedstill's; also how far apart the single turns' ratios are."""
    ours = turns.pop("fedstill")
    for name, theirs in turns.items():
        ratios = [b / a for a, b in zip(ours, theirs, strict=True) if math.isfinite(b)]
        note = f"turn by turn {min(ratios):.2f} to {max(ratios):.2f}"
        a, b = min(ours), min(theirs)
        yield Row(part, f"{what}: {name}", shown(a), shown(b), b / a, goals.get(name), note=note)


def time_server() -> Iterator[Row]:
    naive, cached = server.stage_seconds()
    what = f"{server.WORK.name}, {server.EPOCHS} epochs: every teacher in every step"
    yield Row("server", what, f"{cached:.1f} s", f"{naive:.1f} s", naive / cached, 0.9 * server.ARITHMETIC)
    alone, together = server.asking_seconds()
    what = f"{server.WORK.name}: teachers asked one after the other"
    yield Row("server", what, f"{together:.1f} s", f"{alone:.1f} s", alone / together)


def time_methods() -> Iterator[Row]:
    for cases, work, rounds, repeats in (
        (methods.CASES, methods.WORK, 5, 2),
        (methods.SERVER_CASES, methods.SERVER_WORK, 4, 2),
    ):
        for found in methods.round_costs(cases, work, rounds=rounds, repeats=repeats):
            cost, plain, without = found.cost, found.fedavg, found.without
            note = f"clients {cost.clients:.2f} s, server {cost.server:.2f} s"
            if without:
                note += f"; without caches {without.whole:.2f} s, saved {1 - cost.whole / without.whole:.0%}"
            yield Row(
                "methods",
                f"{work.name}: {found.case.name}",
                f"{cost.whole:.2f} s",
                f"FedAvg {plain.whole:.2f} s",
                cost.whole / plain.whole,
                at_most=found.case.at_most,
                note=note,
            )


def profile_methods() -> Iterator[Row]:
    for case, found in profile.profiles():
        note = f"most of it: {found.most}"
        share = f"{found.outside / found.seconds:.1%} of {found.seconds:.1f} s"
        yield Row("profile", f"{profile.WORK.name}: CPU time outside kernels, {case.name}", share, note=note)


def measure_growth() -> Iterator[Row]:
    for method, settings in growth.METHODS:
        fewest: dict[str, float] = {}
        for clients in growth.CLIENTS:
            found = growth.grown(method, settings, clients, rounds=8, repeats=2)
            seconds, memory, whole = found["seconds"], found["megabytes"], found["whole"]
            what, first = f"{method}, {clients:,} clients", f"with {growth.CLIENTS[0]}"
            if not fewest:
                fewest = found
                yield Row("growth", f"{what}: a round", f"{seconds:.3f} s")
                yield Row("growth", f"{what}: memory", f"{memory:.0f} MB")
                continue
            ratios = {key: found[key] / fewest[key] for key in found}
            beside = f"{fewest['seconds']:.3f} s {first}"
            yield Row("growth", f"{what}: a round", f"{seconds:.3f} s", beside, ratios["seconds"], at_most=1.2)
            beside, note = f"{fewest['megabytes']:.0f} MB {first}", f"{whole:.0f} MB with the data partition"
            yield Row(
                "growth", f"{what}: memory", f"{memory:.0f} MB", beside, ratios["megabytes"], at_most=1.3, note=note
            )
        yield Row("growth", f"{what}: all of its memory", f"{whole:.0f} MB", "4,000 MB", whole / 4000, at_most=1.0)


def time_checkpoints() -> Iterator[Row]:
    for method in checkpoints.METHODS:
        with_, without = checkpoints.share(method)
        what = f"{checkpoints.WORK.name}, one a round: {method}"
        yield Row(
            "checkpoints", what, f"{with_:.2f} s", f"none: {without:.2f} s", with_ / without, at_most=1.03,
            note=f"{with_ / without - 1:+.1%}",
        )  # fmt: skip


def time_starts() -> Iterator[Row]:
    wait, round_ = start.resume_seconds()
    many = "a million clients"
    for what, seconds, most in (
        ("fedstill --help", start.help_seconds(), 0.5),
        *((f"partition {name}, {many}", start.partition_seconds(name), 20.0) for name in start.PARTITIONS),
        *((f"federate, local_test {how}, {many}", start.federate_seconds(how), 20.0) for how in ("split", "matched")),
        ("a partition that no draw fits is refused", start.refusal_seconds(), 5.0),
    ):
        yield Row("start", what, f"{seconds:.2f} s", f"{most:g} s", seconds / most, at_most=1.0)
    for what, seconds in (
        ("fedstill run: the demo's first round, evaluation and results", start.first_round_seconds()),
        (f"resume with {start.STATES:,} client states, in a process that runs: until its next round begins", wait),
        ("… and that round, of all of them", round_),
    ):
        yield Row("start", what, f"{seconds:.2f} s")


def time_cluster() -> Iterator[Row]:
    work, cores = engine.SMALL_CLIENTS, machine.cores()
    federation = work.federation(*work.stored())
    ray, process = cluster.rounds(work, federation, 10, repeats=5)
    ratios = [a / b for a, b in zip(ray, process, strict=True)]
    yield Row(
        "cluster", f"{work.name}: a round with --engine ray", f"{min(ray):.3f} s", f"process {min(process):.3f} s",
        min(ray) / min(process), at_most=1.15, note=f"turn by turn {min(ratios):.2f} to {max(ratios):.2f}",
    )  # fmt: skip
    seconds = {kind: cluster.start_seconds(work, federation, kind) for kind in ("process", "ray")}
    yield Row(
        "cluster", "--engine ray: to the end of the first round", f"{seconds['ray']:.1f} s", "8 s",
        seconds["ray"] / 8, at_most=1.0, note=f"process {seconds['process']:.1f} s",
    )  # fmt: skip
    found = cluster.rounds_by_nodes(work, federation, cores, 10)
    for nodes, each in found.items():
        what = f"{work.name}: a round on {nodes} node{'s' * (nodes > 1)} with a core each"
        yield Row("cluster", what, f"{each:.3f} s", f"one node {found[1]:.3f} s", found[1] / each)


def time_networks() -> Iterator[Row]:
    for method, (together, apart) in networks.round_costs(rounds=3, repeats=3).items():
        what, beside = f"{networks.WORK.name}: {method}", f"the sum of one network each: {apart:.2f} s"
        yield Row("networks", what, f"{together:.2f} s", beside, together / apart, at_most=1.1)


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "engine": time_rounds,
    "runs": time_runs,
    "server": time_server,
    "methods": time_methods,
    "networks": time_networks,
    "profile": profile_methods,
    "growth": measure_growth,
    "checkpoints": time_checkpoints,
    "start": time_starts,
    "cluster": time_cluster,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--check", action="store_true", help="only check that peers do the same work; time nothing")
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"no part is called {unknown[0]!r}; there are {', '.join(PARTS)}")
    if arguments.check:
        check()
        return
    rows: list[Row] = []
    path = HOME / f"{'-'.join(arguments.parts) or 'all'}.md"
    for part in arguments.parts or PARTS:
        console.log(part)
        for row in PARTS[part]():
            rows.append(row)
            write(rows, path)
            console.log(*(cell for cell in row.cells()[1:] if cell), sep=" · ")
    Console(width=max(console.width, WIDE)).print(shown(rows))
    console.print(f"in {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
