"""What `fedstill compare` does."""

from __future__ import annotations

from pathlib import Path

from fedstill.analysis.figures import draw_comparison
from fedstill.analysis.tables import compared_metrics_table, comparison_table, cost_table, sweep_table
from fedstill.building.config import Config, anchored, parse_sweeps
from fedstill.cli.commands import Flags, config_of, console, known_to, print_table, run_name, say, slug, title_of
from fedstill.cli.progress import AllRuns
from fedstill.core.errors import SettingError
from fedstill.core.files import write_json
from fedstill.running import files
from fedstill.running.directory import RunDirectory, check_place, without_nan
from fedstill.studies.cells import Cell, check, run_cells
from fedstill.studies.comparison import combinations, grid

_NOT_SWEPT = {
    "seed": "--seeds N compares on N seeds",
    "method": "name the methods one after the other",
    "target_accuracy": "compare once for each",
}


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
) -> None:
    if len(set(methods)) < len(methods):
        raise SettingError("a method is named twice")
    sweep = parse_sweeps(sweeps)
    if not_swept := sweep[0].keys() & _NOT_SWEPT.keys():
        key = min(not_swept)
        raise SettingError(f"--sweep {key}: {_NOT_SWEPT[key]}")
    first = config_of(methods[0], flags, known_to(methods[0], methods, assignments))
    folder = out or Path("runs") / ("compare-" + run_name(first).removeprefix(f"{slug(first.method)}-"))
    cells = {}
    for method, i, s in combinations(methods, sweep, seeds):
        swept = {k: v for k, v in sweep[i].items() if k in Config.model_fields}
        words = [*assignments, *(f"{k}={v}" for k, v in sweep[i].items() if k not in swept)]
        config = config_of(method, {**flags, **swept, "seed": first.seed + s}, known_to(method, methods, words))
        swept_as = (f"{k}{v}".replace("/", "-") for k, v in sweep[i].items())
        name = [slug(method), *swept_as, *([f"s{config.seed}"] if seeds > 1 else [])]
        cells[method, i, s] = Cell(folder / "-".join(name), config)
    if len({cell.path for cell in cells.values()}) < len(cells):
        raise SettingError("two of these runs would have the same directory")
    _check_places(list(cells.values()), force=force)
    with AllRuns(console, list(cells.values())) as display:
        run_cells(list(cells.values()), jobs=jobs, watcher=display)
    tables = grid(cells, methods, sweep, seeds)
    if len(tables) > 1:
        print_table(sweep_table(tables, seeds=seeds))
    else:
        print_table(comparison_table(tables[0], seeds=seeds))
        if (metrics := compared_metrics_table(tables[0], seeds=seeds)) is not None:
            print_table(metrics)
        print_table(cost_table(tables[0], seeds=seeds))
    write_json(folder / files.COMPARISON, [without_nan(row.record(rows[0])) for rows in tables for row in rows])
    picture = folder / files.CURVES
    title = "" if sweep[0] else title_of(first).removesuffix(f", seed {first.seed}") + f", {seeds} seeds"
    draw_comparison(tables, picture, title)
    say(f"curves: {picture}\nall of it: {folder}")


def _check_places(cells: list[Cell], *, force: bool) -> None:
    """Find what is wrong with any of the runs before the first begins."""
    for cell in cells:
        if force:
            check_place(cell.path, force=True)
        elif (cell.path / files.CONFIG).is_file():
            if cell.rounds_done() is None:
                raise SettingError(f"{cell.path} is a run that keeps no models; choose another --out, or --force")
        else:
            check_place(cell.path, force=False)
    check(cells)
    for cell in cells:
        if force:
            RunDirectory.create(cell.path, anchored(cell.config), force=True).release()
