"""What `fedstill compare` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.analysis.comparing import plan, run_comparison, slug
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
) -> None:
    if len(set(methods)) < len(methods):
        raise SettingError("a method is named twice")
    sweep = parse_sweeps(sweeps)
    first = config_of(methods[0], flags, known_to(methods[0], methods, assignments))
    folder = out or Path("runs") / ("compare-" + run_name(first).removeprefix(f"{slug(first.method)}-"))

    def configure(method: str, point: Mapping[str, Any], seed: int) -> tuple[Config, dict[str, Any]]:
        swept = {k: v for k, v in point.items() if k in Config.model_fields}
        words = [*assignments, *(f"{k}={v}" for k, v in point.items() if k not in swept)]
        given = {**flags, **swept, "seed": first.seed + seed}
        return config_of(method, given, known_to(method, methods, words)), {}

    cells = plan(methods, configure, sweep, seeds, folder, own_callbacks(callbacks))
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
