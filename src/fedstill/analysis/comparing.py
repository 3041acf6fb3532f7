"""Several methods on the same clients, schedule and initial weights, from Python and for the command line."""

from __future__ import annotations

import io
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

from rich.console import Console

from fedstill.analysis.figures import draw_comparison
from fedstill.analysis.tables import compared_metrics_table, comparison_table, cost_table, sweep_table
from fedstill.building.config import Config, anchored
from fedstill.building.keywords import Keywords
from fedstill.building.suggestions import unknown_setting
from fedstill.building.task import Network
from fedstill.core import trust
from fedstill.core.errors import SettingError
from fedstill.core.files import read_json, write_json
from fedstill.core.table import Table, frame
from fedstill.methods import registry
from fedstill.methods.base import Method
from fedstill.metrics.records import scalars
from fedstill.metrics.scores import Function
from fedstill.report import style
from fedstill.running import files
from fedstill.running.api import configure
from fedstill.running.callbacks import Callback, check_callbacks
from fedstill.running.directory import RunDirectory, without_nan
from fedstill.running.monitors import CSVLog
from fedstill.running.places import check_place
from fedstill.running.progress import in_notebook
from fedstill.running.tensorboard import TensorBoard
from fedstill.running.trackers import placed
from fedstill.studies.cells import Cell, Watcher, check, run_cells
from fedstill.studies.comparison import Row, combinations, grid
from fedstill.studies.progress import AllRuns

_NOT_SWEPT = {
    "seed": "--seeds N, or seeds=N, compares on N seeds",
    "method": "name the methods one after the other",
    "target_accuracy": "compare once for each",
}
Configure = Callable[[str, Mapping[str, Any], int], tuple[Config, dict[str, Any]]]  # method, swept settings, seed


@dataclass(frozen=True)
class Comparison:
    """What a comparison came to: a table for each combination of the settings that were swept."""

    rows: list[list[Row]]
    seeds: int
    path: Path  # a folder with a run directory for each run
    title: str = ""
    _kept: Any = field(default=None, repr=False, compare=False)  # the folder, if it is a temporary one

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(row.name for rows in self.rows for row in rows))
        return f"<fedstill.Comparison of {names}: {self.seeds} seeds, {self.path}>"

    def tables(self) -> list[Table]:
        """Methods by metrics: mean ± standard deviation over the seeds."""
        return [comparison_table(rows, seeds=self.seeds) for rows in self.rows]

    def metrics(self) -> list[Table]:
        """Methods by the metrics that the setting `metrics` names."""
        found = (compared_metrics_table(rows, seeds=self.seeds) for rows in self.rows)
        return [table for table in found if table is not None]

    def overview(self, *, costs: bool = True) -> list[Table]:
        """What to read first: of a sweep one table of all, else results, metrics and, if wanted, costs."""
        if len(self.rows) > 1:
            return [sweep_table(self.rows, seeds=self.seeds)]
        return [*self.tables(), *self.metrics(), *(self.costs() if costs else [])]

    def costs(self) -> list[Table]:
        """What each method cost, and by how much it is better than the first."""
        return [cost_table(rows, seeds=self.seeds) for rows in self.rows]

    def frame(self) -> Any:
        """A row for each method and combination: a pandas DataFrame, or without pandas a dict of NumPy arrays."""
        return frame([row for table in self.tables() for row in table.values])

    def runs(self) -> Any:
        """A row for each run: method, swept settings, seed, and the numbers of its summary; as `frame` gives them."""
        return frame([about | dict(scalars(cell.summary(), ".")) | about for about, cell in self._cells()])

    def rounds(self) -> Any:
        """A row for each round of each run: method, swept settings, seed, round, and the numbers of its record."""
        return frame(
            [
                about | {"round": record["round"], **dict(scalars(record, "."))}
                for about, cell in self._cells()
                for record in cell.records()
            ]
        )

    def _cells(self) -> Iterator[tuple[dict[str, Any], Cell]]:
        for row in (row for rows in self.rows for row in rows if not row.variant):
            for cell in row.cells:
                yield {"method": row.method, **row.settings, "seed": cell.config.seed}, cell

    def to_markdown(self) -> str:
        """The tables in Markdown, the best of each column in bold."""
        return "\n".join(map(str, self.tables())) if len(self.rows) > 1 else self.tables()[0].to_markdown()

    def to_latex(self) -> str:
        r"""The tables in LaTeX, for \usepackage{booktabs}."""
        return "\n".join(f"% {table.title}\n{table.to_latex()}" for table in self.tables())

    def to_csv(self) -> str:
        """What `frame` has, as CSV."""
        values = [row for table in self.tables() for row in table.values]
        return Table("", (), values=values).to_csv()

    def plot(
        self,
        *metrics: str,
        path: str | Path | None = None,
        width: float | None = None,
        font_size: float | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Any:
        """Draw the learning curves, means over the seeds with a band: a matplotlib Figure.

        Args:
            metrics: Numbers of the rounds; accuracy and FM if none is named.
            path: Where to save it: PNG, SVG or PDF.
            width: In inches.
            font_size: Of the labels of axes in points; other texts are in proportion.
            labels: What to write for a method, as {"fedavg": "FedAvg"}.
        """
        with style.using(style.Look(width=width, font_size=font_size, labels=labels or {})):
            return draw_comparison(self.rows, Path(path) if path else io.BytesIO(), self.title, metrics)

    def report(self, path: str | Path = "report.html", title: str = "") -> Path:
        """Write a page about the runs: results, paired differences, charts, settings; as `fedstill report` does."""
        from fedstill.analysis.pages import write_page

        write_page([self.path], Path(path), title)
        return Path(path)

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self.tables())


def compare(
    methods: Sequence[str | Method] | Mapping[str, str | Method],
    *,
    seeds: int = 1,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    data: Any = None,
    model: str | Network | None = None,
    models: str | Sequence[str | Network] = (),
    proxy: Any = None,
    metrics: str | Sequence[str | Function] | None = None,
    out: str | Path | None = None,
    force: bool = False,
    jobs: int = 0,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **settings: Unpack[Keywords],
) -> Comparison:
    """Train several methods on the same clients, schedule and initial weights, with each of `seeds` seeds.

    A setting that only some of the methods know goes to those. `data`, `model`, `models`, `proxy` and `metrics` are as
    in `run`.

    Args:
        methods: Names or objects; a dict gives them the names that tables show.
        seeds: How many: `seed`, `seed + 1` and so on.
        sweep: Several values of settings, all combinations of which are tried.
        out: A folder for the runs, in which finished ones are used again. Without it the result keeps them.
        force: Replace runs that are there.
        jobs: Runs at a time; 0 is one a core.
        callbacks: Each run gets copies of its own, in a process of its own. A run that one of them stopped is finished.
        progress: Show how the runs go on; by default in a notebook.
        settings: Those of `fedstill settings` and the methods' own.

    Examples:
        >>> found = compare(["fedavg", "fedprox"], rounds=1, clients=4, epochs=1, fraction=0.05, model="mlp", mu=0.1)
        >>> [row.method for row in found.rows[0]]
        ['fedavg', 'fedprox']
    """
    if isinstance(methods, str | Method):
        raise SettingError(f"methods is {methods!r:.60}; give a list of them, as ['fedavg', 'fedprox']")
    if not methods:
        raise SettingError("compare: name at least one method")
    if not isinstance(seeds, int) or seeds < 1:
        raise SettingError(f"seeds = {seeds}: at least 1, a whole number; seed= is the first of them")
    registry.refuse_others(methods.values() if isinstance(methods, Mapping) else methods)
    named = dict(methods) if isinstance(methods, Mapping) else {method_name(method): method for method in methods}
    if len(named) < len(methods):
        twice = next(name for name, count in Counter(map(method_name, methods)).items() if count > 1)
        raise SettingError(f"{twice} is named twice; a dict gives names, as {{'first': …, 'second': …}}")
    objects = {"data": data, "model": model, "models": models, "proxy": proxy, "metrics": metrics}
    given: dict[str, Any] = dict(settings)
    first_seed = given.get("seed", 0)
    known_names = {name: own_names(method) for name, method in named.items()}

    def config_for(method: str, swept: Mapping[str, Any], seed: int) -> tuple[Config, dict[str, Any]]:
        known = settings_known(method, given | dict(swept), known_names)
        config, own = configure(named[method], objects, known | {"seed": first_seed + seed})
        # Without functions, a finished run's metrics are those in its directory, which are checked as its code.
        return config, {name: value for name, value in own.items() if name != "metrics" or value}

    axes = sweep or {}
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    kept = None if out is not None else tempfile.TemporaryDirectory(prefix="fedstill-")
    folder = Path(out) if out is not None else Path(kept.name) / "comparison"  # type: ignore[union-attr]
    cells = plan(list(named), config_for, points, seeds, folder, callbacks)
    watching = in_notebook() if progress is None else progress
    return run_comparison(cells, list(named), points, seeds, folder, jobs=jobs, force=force, kept=kept,
                     console=Console() if watching else None)  # fmt: skip


def method_name(method: str | Method) -> str:
    """What tables call a method: its name, of a composed one those of its parts."""
    if isinstance(method, str):
        return method
    return "+".join(part.name or type(part).__name__ for part in registry.parts_of(method))


def own_names(method: str | Method) -> set[str]:
    if isinstance(method, Method):
        return set(registry.settings_of(method))
    return {p.name for p in registry.hyper_parameters(method)} | registry.old_names(method).keys()


def settings_known(method: str, settings: Mapping[str, Any], own_names: Mapping[str, set[str]]) -> dict[str, Any]:
    """The settings without those that belong to another of the compared methods only."""
    found: dict[str, Any] = {k: v for k, v in settings.items() if k in Config.model_fields and k != "hyper"}
    for key, value in {**settings.get("hyper", {}), **settings}.items():
        if key in Config.model_fields and key not in settings.get("hyper", {}):
            continue
        if not any(key in names for names in own_names.values()):
            raise unknown_setting(key, [*Config.model_fields, *itertools.chain(*own_names.values())])
        if key in own_names[method]:
            found.setdefault("hyper", {})[key] = value
    return found


def plan(
    methods: Sequence[str],
    configure: Configure,
    sweep: Sequence[dict[str, Any]],
    seeds: int,
    folder: Path,
    callbacks: Sequence[Callback] = (),
) -> dict[tuple[str, int, int], Cell]:
    """The runs of a comparison, by method, combination and seed."""
    check_callbacks(callbacks)
    for callback in callbacks:
        if isinstance(callback, CSVLog | TensorBoard) and callback.given:
            kind = type(callback).__name__
            raise SettingError(f"{kind}({str(callback.given)!r}): all runs would write there; {kind}() writes in each")
    if not_swept := {key for point in sweep for key in point} & _NOT_SWEPT.keys():
        raise SettingError(f"sweep of {min(not_swept)}: {_NOT_SWEPT[min(not_swept)]}")
    cells, heard = {}, placed(callbacks, folder)
    for method, i, s in combinations(methods, sweep, seeds):
        config, own = configure(method, sweep[i], s)
        swept_as = (f"{k}{v}".replace("/", "-") for k, v in sweep[i].items())
        name = [slug(method), *swept_as, *([f"s{config.seed}"] if seeds > 1 else [])]
        cells[method, i, s] = Cell(folder / "-".join(name), config, own, heard)
    if len({cell.path for cell in cells.values()}) < len(cells):
        raise SettingError("two of these runs would have the same directory")
    return cells


def run_comparison(
    cells: Mapping[tuple[str, int, int], Cell],
    methods: Sequence[str],
    sweep: Sequence[dict[str, Any]],
    seeds: int,
    folder: Path,
    *,
    jobs: int,
    force: bool,
    console: Console | None,
    title: str = "",
    kept: Any = None,
) -> Comparison:
    """Run what is not finished, and write comparison.json beside the runs."""
    listed = list(cells.values())
    _check_places(listed, force=force)
    if console:
        with AllRuns(console, listed) as display:
            run_cells(listed, jobs=jobs, watcher=display)
    else:
        run_cells(listed, jobs=jobs, watcher=Watcher())
    rows = grid(cells, methods, sweep, seeds)
    write_json(folder / files.COMPARISON, [without_nan(row.record(each[0])) for each in rows for row in each])
    return Comparison(rows, seeds, folder, title, kept)


def read_comparison(folder: Path) -> Comparison:
    """A comparison that is finished, from its folder."""
    tables: dict[str, list[Row]] = {}
    seeds = 1
    for record in read_json(folder / files.COMPARISON):
        paths = [folder / Path(run).name for run in record["runs"]]
        unused = (*trust.NAMED, "metrics")  # what was measured is read, and no code of a run's is needed for that
        cells = tuple(Cell(path, RunDirectory.open(path, lock=False).config(replaced=unused)) for path in paths)
        seeds = len(cells)
        row = Row(record["method"], record["settings"], cells, record["model"])
        tables.setdefault(row.place, []).append(row)
    return Comparison(list(tables.values()), seeds, folder)


def _check_places(cells: Sequence[Cell], *, force: bool) -> None:
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


def slug(name: str) -> str:
    """A name that a folder can have."""
    return "".join(c if c.isalnum() or c in "+-_" else "-" for c in name).strip("-")
