"""What `fedstill compare` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fedstill.building.config import Config, anchored, parse_sweeps
from fedstill.cli.commands import Flags, config_of, console, known_to, run_name, say, slug, title_of
from fedstill.cli.progress import AllRuns
from fedstill.core.errors import SettingError
from fedstill.core.files import write_json
from fedstill.methods import registry
from fedstill.metrics.statistics import ENOUGH, Spread
from fedstill.report.curves import swept_curves
from fedstill.running import files
from fedstill.running.directory import RunDirectory, check_place, without_nan
from fedstill.studies.cells import Cell, check, run_cells
from fedstill.studies.comparison import TO_TARGET, Row, combinations, grid

_NOT_SWEPT = {
    "seed": "--seeds N compares on N seeds",
    "method": "name the methods one after the other",
    "target": "compare once for each",
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
    for rows in tables:
        console.print(comparison_table(rows, seeds=seeds))
        console.print(cost_table(rows, seeds=seeds))
    write_json(folder / "comparison.json", [without_nan(row.record(rows[0])) for rows in tables for row in rows])
    picture = folder / files.CURVES
    title = "" if sweep[0] else title_of(first).removesuffix(f", seed {first.seed}") + f", {seeds} seeds"
    places = {
        _settings_of(rows[0]).removeprefix(": "): {
            row.method: [cell.records() for cell in row.cells] for row in rows if not row.variant
        }
        for rows in tables
    }
    swept_curves(places, picture, metrics=["accuracy", "fm"] if len(tables) == 1 else ["accuracy"], title=title)
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


_INTERVAL = " · interval: 95 % bootstrap of the paired differences, too narrow for few seeds"


def comparison_table(rows: Sequence[Row], *, seeds: int) -> Table:
    """Methods by metrics."""
    over = f"mean ± standard deviation of {seeds} seeds · " if seeds > 1 else ""
    shown = Table(
        title="Results" + _settings_of(rows[0]),
        caption=f"{over}final: mean of the last five evaluations · FM: smaller is fairer"
        + (" · *: of the clients' own models, for there is no global one" if any(map(_own_models, rows)) else ""),
    )
    for column in ("", "accuracy best", "final", "AMP", "FM", "WLP"):
        shown.add_column(column, justify="right" if column else "left", overflow="fold")
    for row in rows:
        shown.add_row(
            (row.name if not row.variant else f"  {row.variant}") + "*" * _own_models(row),
            *(_spread(row.spread(metric), 100, 2, " %") for metric in ("best_accuracy", "final_accuracy", "final_amp")),
            _spread(row.spread("final_fm"), 1, 4),
            _spread(row.spread("final_wlp"), 100, 2, " %"),
        )
    return shown


def cost_table(rows: Sequence[Row], *, seeds: int) -> Table:
    """What each method cost, and by how much it exceeds the first."""
    target = rows[0].cells[0].config.target
    difference = f"final accuracy over {rows[0].name}"
    shown = Table(
        title="Cost" + _settings_of(rows[0]),
        caption="means over seeds · seconds: beside other runs" + (_INTERVAL if seeds >= ENOUGH else ""),
    )
    goal = [f"{what} to {100 * target:g} %" for what in ("rounds", "MB", "s")] if target else []
    for column in ("", "MB moved", "seconds", *goal, *([difference, "wins"] if seeds > 1 else [])):
        shown.add_column(column, justify="right" if column else "left", overflow="fold")
    for row in rows:
        moved = [a + b for a, b in zip(_plain(row, "bytes_down"), _plain(row, "bytes_up"), strict=True)]
        cost = [f"{sum(moved) / seeds / 1e6:.1f}", f"{sum(_plain(row, 'seconds')) / seeds:.1f}"]
        numbers = [row.name if not row.variant else f"  {row.variant}", *(cost if not row.variant else ["", ""])]
        if target:
            took = [row.spread(metric) for metric in TO_TARGET]
            numbers += [
                "not in all" if t is None else f"{t.mean / unit:.1f}" for t, unit in zip(took, (1, 1e6, 1), strict=True)
            ]
        gap = row.against(rows[0], "final_accuracy") if seeds > 1 and row is not rows[0] else None
        if gap:
            interval = f" [{100 * gap.low:+.2f}, {100 * gap.high:+.2f}]" if gap.n >= ENOUGH else ""
            numbers += [f"{100 * gap.mean:+.2f}{interval}", f"{gap.wins}/{gap.n}"]
        shown.add_row(*numbers)
    return shown


def _own_models(row: Row) -> bool:
    config = row.cells[0].config
    return not registry.make(config.method, config.hyper).global_model


def _settings_of(row: Row) -> str:
    settings = ", ".join(f"{key} = {value}" for key, value in row.settings.items())
    return f": {settings}" if settings else ""


def _plain(row: Row, metric: str) -> list[float]:
    return [float(cell.summary()[metric]) for cell in row.cells]


def _spread(found: Spread | None, factor: float, digits: int, unit: str = "") -> str:
    if found is None:
        return "–"
    text = f"{factor * found.mean:.{digits}f}"
    return text + (unit if found.n == 1 else f" ± {factor * found.std:.{digits}f}{unit}")
