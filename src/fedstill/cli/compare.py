"""What `fedstill compare` does."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.analysis.comparing import own_names, plan, run_comparison, slug
from fedstill.analysis.tuning import layer
from fedstill.analysis.winners import doubts, read_winners, winner_of
from fedstill.building.config import Config, parse_sweeps
from fedstill.cli.commands import (
    Flags,
    config_of,
    console,
    known_to,
    own_callbacks,
    print_tables,
    run_name,
    say,
    title_of,
)
from fedstill.cli.failure import Halted
from fedstill.core.choices import Format
from fedstill.core.errors import SettingError
from fedstill.running import files

SWEPT = (
    "a sweep is judged on test data: it shows what a setting does, and a value that is chosen by it looks better than "
    "it is; 'fedstill tune' chooses by validation data"
)
log = logging.getLogger(__name__)


def compare(
    methods: list[str],
    flags: Flags,
    assignments: list[str],
    *,
    seeds: int,
    sweeps: list[str],
    jobs: int,
    out: Path | None,
    force: bool,
    as_: Format,
    callbacks: Sequence[str] = (),
    trackers: Sequence[str] = (),
    tuned: Path | None = None,
) -> None:
    if len(set(methods)) < len(methods):
        raise SettingError("a method is named twice")
    sweep = parse_sweeps(sweeps)
    first = config_of(methods[0], flags, known_to(methods[0], methods, assignments))
    folder = out or Path("runs") / ("compare-" + run_name(first).removeprefix(f"{slug(first.method)}-"))

    winners = read_winners(tuned) if tuned else {}

    def configure(method: str, point: Mapping[str, Any], seed: int) -> tuple[Config, dict[str, Any]]:
        swept = {k: v for k, v in point.items() if k in Config.model_fields}
        words = [*assignments, *(f"{k}={v}" for k, v in point.items() if k not in swept)]
        won = layer(winner_of(winners, method, tuned), own_names(method)) if tuned else {}
        given = {**won, **flags, **swept, "seed": first.seed + seed}
        return config_of(method, given, known_to(method, methods, words)), {}

    if sweep[0]:
        log.warning(SWEPT)
    if tuned:
        for method in methods:
            compared = [configure(method, sweep[0], seed)[0] for seed in range(seeds)]
            for warning in doubts(tuned, method, compared):
                log.warning("--tuned %s: %s", tuned, warning)
    cells = plan(methods, configure, sweep, seeds, folder, own_callbacks(callbacks, trackers))
    title = "" if sweep[0] else title_of(first).removesuffix(f", seed {first.seed}") + f", {seeds} seeds"
    try:
        found = run_comparison(
            cells, methods, sweep, seeds, folder, jobs=jobs, force=force, title=title,
            console=console if as_ == "table" else None,
        )  # fmt: skip
    except KeyboardInterrupt as error:
        again = "the same command, without --force" if force else "the same command"
        raise Halted(error, folder, again) from error
    print_tables(found.overview(costs=as_ == "table"), as_)
    picture = folder / files.CURVES
    found.plot(path=picture)
    if as_ == "table":
        say(f"curves: {picture}\nall of it: {folder}")
        say(f"next: fedstill report {folder}, or for a paper: fedstill show {folder} --format latex")
