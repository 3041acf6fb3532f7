"""What the commands do, once the heavy imports are worth it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedstill import data as datasets_
from fedstill.cli.failure import Halted
from fedstill.cli.progress import AllRuns, Display
from fedstill.cli.tensorboard import TensorBoard
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.files import read_json, write_json
from fedstill.data.dataset import Dataset
from fedstill.experiment import api
from fedstill.experiment.cells import Cell, carry_out
from fedstill.experiment.comparison import TO_TARGET, Row, combinations, grid
from fedstill.experiment.config import (
    Config,
    anchored,
    is_config_file,
    parse_assignments,
    parse_sweeps,
    read_toml,
    resolve,
)
from fedstill.experiment.reteach import SavedEpisode
from fedstill.experiment.rundir import Record, RunDirectory, check_place, without_nan
from fedstill.experiment.setup import divide, load_data, prepare, wanted_size
from fedstill.methods import registry
from fedstill.methods.base import Part
from fedstill.metrics.statistics import Spread
from fedstill.report.bubbles import bubbles, table
from fedstill.report.confusion import confusion
from fedstill.report.curves import curves, seed_curves
from fedstill.report.gallery import gallery

# A table in a file or a pipe needs no less room than on a screen.
console = Console(width=None if sys.stdout.isatty() else 120)
Flags = Mapping[str, Any]
PICTURES = (".png", ".svg", ".pdf")


def run(
    method: str,
    flags: Flags,
    assignments: list[str],
    *,
    out: Path | None,
    force: bool,
    dry_run: bool,
    tensorboard: bool = False,
) -> None:
    config = _config(method, flags, assignments)
    if dry_run:
        print(config.toml(), end="")
        return
    path = out or Path("runs") / run_name(config)
    with _run_in(path) as display:
        listener = TensorBoard(path, display) if tensorboard else display
        result = api.start(config, path, force=force, listener=listener)
    console.print(results_table({config.method: result.summary}))
    picture = path / "curves.png"
    curves({config.method: result.records}, picture, title=_title(config))
    _say(f"curves: {picture}\nall of it: {path}")


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
    first = _config(methods[0], flags, _known_to(methods[0], methods, assignments))
    folder = out or Path("runs") / ("compare-" + run_name(first).removeprefix(f"{_slug(first.method)}-"))
    cells = {}
    for method, i, s in combinations(methods, sweep, seeds):
        swept = {k: v for k, v in sweep[i].items() if k in Config.model_fields}
        words = [*assignments, *(f"{k}={v}" for k, v in sweep[i].items() if k not in swept)]
        config = _config(method, {**flags, **swept, "seed": first.seed + s}, _known_to(method, methods, words))
        name = [_slug(method), *(f"{k}{v}" for k, v in sweep[i].items()), *([f"s{config.seed}"] if seeds > 1 else [])]
        cells[method, i, s] = Cell(folder / "-".join(name), config)
    _check_all(list(cells.values()), force=force)
    with AllRuns(console, list(cells.values())) as display:
        carry_out(list(cells.values()), jobs=jobs, watcher=display)
    tables = grid(cells, methods, sweep, seeds)
    for rows in tables:
        console.print(comparison_table(rows, seeds=seeds))
        console.print(cost_table(rows, seeds=seeds))
    write_json(folder / "comparison.json", [without_nan(row.record(rows[0])) for rows in tables for row in rows])
    picture = folder / "curves.png"
    lines = {
        " ".join([row.method, *(f"{key}={value}" for key, value in row.settings.items())]): [
            cell.records() for cell in row.cells
        ]
        for rows in tables
        for row in rows
        if not row.variant
    }
    seed_curves(lines, picture, title=_title(first))
    _say(f"curves: {picture}\nall of it: {folder}")


def _check_all(cells: list[Cell], *, force: bool) -> None:
    """Find what is wrong with any of the runs before the first begins."""
    for cell in cells:
        if force:
            check_place(cell.path, force=True)
        elif (cell.path / "config.toml").is_file():
            cell.rounds_done()
        else:
            check_place(cell.path, force=False)
    datasets: dict[tuple[object, ...], Dataset] = {}
    for cell in cells:
        c = cell.config
        source = (c.data, c.data_dir, wanted_size(c))
        datasets.setdefault(source, load_data(c))
        prepare(c, data=datasets[source])
    for cell in cells:
        if force:
            RunDirectory.create(cell.path, anchored(cell.config), force=True).release()


def comparison_table(rows: Sequence[Row], *, seeds: int) -> Table:
    """Methods by metrics."""
    over = f"mean ± standard deviation of {seeds} seeds · " if seeds > 1 else ""
    shown = Table(
        title="Results" + _settings_of(rows[0]),
        caption=f"{over}final: mean of the last five evaluations · FM: smaller is fairer",
    )
    for column in ("", "accuracy best", "final", "AMP", "FM", "WLP"):
        shown.add_column(column, justify="right" if column else "left", overflow="fold")
    for row in rows:
        shown.add_row(
            row.name if not row.variant else f"  {row.variant}",
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
        caption="means over seeds" + (" · interval: 95 % bootstrap of the paired differences" if seeds > 1 else ""),
    )
    goal = [f"{what} to {target:.0%}" for what in ("rounds", "MB", "s")] if target else []
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
            numbers += [f"{100 * gap.mean:+.2f} [{100 * gap.low:+.2f}, {100 * gap.high:+.2f}]", f"{gap.wins}/{gap.n}"]
        shown.add_row(*numbers)
    return shown


def _settings_of(row: Row) -> str:
    settings = ", ".join(f"{key} = {value}" for key, value in row.settings.items())
    return f": {settings}" if settings else ""


def _plain(row: Row, metric: str) -> list[float]:
    return [float(cell.summary()[metric]) for cell in row.cells]


def _spread(found: Spread | None, factor: float, digits: int, unit: str = "") -> str:
    if found is None:
        return "–"
    text = f"{factor * found.mean:.{digits}f}"
    return text + (unit if found.n == 1 else f" ± {factor * found.std:.{digits}f}")


def resume(directory: Path, rounds: int | None, *, tensorboard: bool = False) -> None:
    if rounds is not None and rounds < 1:
        raise SettingError(f"--rounds {rounds}: at least 1 is needed")
    with _run_in(directory) as display:
        listener = TensorBoard(directory, display) if tensorboard else display
        result = api.resume(directory, rounds=rounds, listener=listener)
    console.print(results_table({result.summary["method"]: result.summary}))


def show(directories: list[Path], plot: Path | None) -> None:
    if plot:
        _check_picture(plot, "--plot")
    finished: dict[str, Record] = {}
    records: dict[str, list[Record]] = {}
    for directory in directories:
        directory_ = RunDirectory.open(directory, lock=False)
        name = directory.resolve().name
        while name in records:
            name += "'"
        records[name] = directory_.records()
        total = read_toml(directory / "config.toml").get("rounds", "?")
        done = records[name][-1]["round"] if records[name] else 0
        summary = directory / "summary.json"
        if summary.exists() and done == total:
            finished[name] = read_json(summary)
            continue
        _say(f"{directory}: {done} of {total} rounds; continue it with 'fedstill resume {directory}'")
    if finished:
        console.print(results_table(finished))
    if plot:
        curves(records, plot)
        _say(f"curves: {plot}")


def episodes(directory: Path, *, classes: bool, out: Path | None) -> None:
    if out:
        _check_picture(out, "--out")
    run_directory = RunDirectory.open(directory, lock=False)
    records = run_directory.records()
    met = [record["episode"] for record in records if "episode" in record]
    if not met:
        raise SettingError(f"{directory} has no finished episode; runs with --regions have some")
    after = {record["round"]: record.get("teachers_after", {}) for record in records}
    shown = Table(title="Episodes", caption="accuracy of each region's model: before the meeting → one round after it")
    regions = list(dict.fromkeys(name for episode in met for name in episode["regions"]))
    for column in ("", "round", "stage", "disagreement", *regions, "global model", "server s"):
        shown.add_column(column, justify="right")
    rounds = [record["round"] for record in records if "episode" in record]
    for round_, episode in zip(rounds, met, strict=True):
        gap, student = episode.get("disagreement"), episode.get("student", {})
        before, later = episode.get("teachers", {}), after.get(round_ + 1, {})
        shown.add_row(
            str(episode["number"]),
            str(round_),
            episode["stage"],
            "–" if gap is None else f"{gap:.3f}",
            *(_before_and_after(before.get(name, {}).get("accuracy"), later.get(name)) for name in regions),
            _percent(student.get("accuracy")),
            f"{episode['server_seconds']:.1f}",
        )
    console.print(shown)
    last = next((episode for episode in reversed(met) if "student" in episode), None)
    if classes:
        _print_reliability(met[-1], prepare(run_directory.config()).federation.dataset.classes)
    if out and last:
        matrices = {name: teacher["confusion"] for name, teacher in last["teachers"].items()}
        confusion(matrices | {"global model": last["student"]["confusion"]}, out, title=f"episode {last['number']}")
        _say(f"picture: {out}")


def _before_and_after(before: float | None, after: float | None) -> str:
    return "" if before is None else _percent(before) + ("" if after is None else f" → {_percent(after)}")


def _print_reliability(episode: Record, classes: Sequence[str]) -> None:
    if "reliability" not in episode:
        raise SettingError("--classes: no reliability was measured; lkd and f2l do")
    shown = Table(title="Reliability (AUC) of each region on each class, last episode")
    for column in ("class", *episode["regions"]):
        shown.add_column(column, justify="left" if column == "class" else "right")
    for name, *values in zip(classes, *episode["reliability"], strict=True):
        shown.add_row(name, *(f"{value:.3f}" for value in values))
    console.print(shown)


def reteach(directory: Path, sweeps: list[str], assignments: list[str], episode: int | None) -> None:
    saved = SavedEpisode(directory, episode)
    name = saved.setup.config.method
    fixed = parse_assignments(assignments, name)["hyper"]
    if stray := [a for a in assignments if a.partition("=")[0] not in fixed]:
        raise SettingError(f"--set {stray[0]}: only settings of {name} itself can be changed here")
    variants = [fixed | combination for combination in parse_sweeps(sweeps)]
    shown = Table(title=f"{name} on the teachers of episode {saved.number}")
    for column in ("", "accuracy", "server s"):
        shown.add_column(column, justify="right" if column else "left")
    for teacher, model in saved.teachers.items():
        shown.add_row(f"teacher: {teacher}", _percent(saved.accuracy(model)), "")
    shown.add_row("old global model", _percent(saved.accuracy(saved.old)), "")
    for lesson in track(saved.teach(variants), "teaching", len(variants), console=console, transient=True):
        settings = "  ".join(f"{key}={value}" for key, value in lesson.settings.items()) or "as in the run"
        shown.add_row(settings, _percent(lesson.accuracy), f"{lesson.seconds:.1f}")
    console.print(shown)


def samples(directory: Path, clients: list[int], count: int, out: Path) -> None:
    _check_picture(out, "--out")
    run_directory = RunDirectory.open(directory, lock=False)
    setup = prepare(run_directory.config())
    if any(not 0 <= client < setup.federation.clients for client in clients):
        raise SettingError(f"--client: clients are 0 to {setup.federation.clients - 1}")

    def pictures(state: Any) -> Any:
        return setup.method.pictures(setup.task, state, count) if state else None

    made = {}
    if not clients and (images := pictures(run_directory.server_state())) is not None:
        made["server"] = images
    for client in clients or range(setup.federation.clients):
        if (images := pictures(run_directory.client_store.latest(client))) is not None:
            made[f"client {setup.federation.client_names[client]}"] = images
        elif clients:
            raise SettingError(f"client {client} has no generator here: it was never active, or the method has none")
        if not clients and len(made) == 4:
            break
    if not made:
        raise SettingError(f"there is no generator in {directory}; methods with one are fedkf and dafkd")
    gallery(made, out, title=f"{setup.config.method} on {setup.config.data}")
    _say(f"picture: {out}")


def methods(name: str | None, flags: Flags, assignments: list[str]) -> None:
    if name in registry.modifiers():
        name = f"fedavg+{name}"
    chosen = [name] if name else [*registry.names(), *(f"fedavg+{modifier}" for modifier in registry.modifiers())]
    overview = Table(title="Methods", caption="bytes for one client and round")
    for column in ("id", "what it does", "down", "up", "needs", "paper"):
        overview.add_column(column, overflow="fold", no_wrap=column == "id")
    dataset: Dataset | None = None
    for each in chosen:
        config = _config(each, flags, assignments)
        dataset = dataset or load_data(config)
        example = {
            "clients": 1,
            "partition": "iid",
            "pool": 0.1,
            "proxy": "pool",
            "regions": 1,
        }  # so that no method lacks anything
        setup = prepare(config.model_copy(update=example), data=dataset)
        wire, cls = setup.method.wire(setup.task), type(setup.method)
        asked = setup.method.needs()
        needs = [
            *(["proxy data"] if asked.proxy_data else []),
            *(["labels on the server"] if asked.server_labels else []),
            *(["a changed model"] if asked.changed_model else []),
            *asked.extra_information,
        ]
        overview.add_row(
            each,
            (cls.__doc__ or "").splitlines()[0],
            _parts(wire.down),
            _parts(wire.up) + (f"\nafter the last round:\n{_parts(wire.last)}" if wire.last else ""),
            ", ".join(needs),
            cls.paper,
        )
    console.print(overview)
    if name:
        settings = Table(title=f"Settings of {name} (--set key=value)")
        for column in ("key", "default", "meaning"):
            settings.add_column(column)
        for parameter in registry.hyper_parameters(name):
            settings.add_row(parameter.name, str(parameter.default), parameter.meaning)
        console.print(settings)


def datasets(data_dir: str | None) -> None:
    listing = Table(title="Datasets")
    for column in ("name", "train", "test", "classes", "shape", "from", "here"):
        listing.add_column(column, overflow="fold", no_wrap=column not in ("from", "here"))
    for row in datasets_.describe(data_dir):
        shape = "x".join(map(str, row.shape))
        listing.add_row(
            row.name,
            f"{row.train:,}",
            f"{row.test:,}",
            str(row.classes),
            shape,
            row.origin,
            row.found or "no",
        )
    console.print(listing)
    _say("Also: a folder of images by class, a folder per client, an .npz of x, y and client, file.py:function")


def partition(flags: Flags, assignments: list[str], out: Path) -> None:
    _check_picture(out, "--out")
    config = _config("fedavg", flags, assignments)
    federation = divide(config, load_data(config))
    bubbles(federation, out)
    rows = table(federation)
    shown = Table(title=f"{config.data}, {config.partition}, {federation.clients} clients")
    for column in rows[0]:
        shown.add_column(column.replace("_", " "), justify="right")
    for row in rows[:100]:
        shown.add_row(*(f"{v:.0%}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(shown)
    _say(f"picture: {out}")


def results_table(summaries: Mapping[str, Record]) -> Table:
    """Runs side by side."""
    shown = Table(title="Results", caption="final: mean of the last five evaluations · FM: smaller is fairer")
    for column in ("", "accuracy best", "final", "AMP", "FM", "WLP", "MB moved", "seconds"):
        shown.add_column(column, justify="right" if column else "left", overflow="fold", no_wrap=bool(column))
    for name, s in summaries.items():
        moved = (s["bytes_down"] + s["bytes_up"] + s.get("bytes_regions", 0)) / 1e6
        shown.add_row(
            name,
            *(_percent(s[key]) for key in ("best_accuracy", "final_accuracy", "final_amp")),
            "–" if s["final_fm"] is None else f"{s['final_fm']:.4f}",
            _percent(s["final_wlp"]),
            f"{moved:.1f}",
            f"{s['seconds'] + s['eval_seconds']:.1f}",
        )
        also = s.get("also", {})
        if concluded := s.get("concluded"):
            numbers = {f"final_{key}": value for key, value in concluded.items() if value is not None}
            also = {"after the last exchange": numbers} | also
        for variant, values in also.items():
            shown.add_row(
                f"  {variant}",
                _percent(values.get("best_accuracy")),
                *(_percent(values.get(key)) for key in ("final_accuracy", "final_amp")),
                "–" if values.get("final_fm") is None else f"{values['final_fm']:.4f}",
                _percent(values.get("final_wlp")),
            )
    return shown


def run_name(config: Config) -> str:
    """A directory name that tells runs apart at a glance."""
    alpha = f"{config.alpha:g}" if config.partition.startswith("dir") else ""
    return f"{_slug(config.method)}-{_slug(config.data)}-{config.partition}{alpha}-k{config.clients}-s{config.seed}"


def _config(method: str, flags: Flags, assignments: list[str]) -> Config:
    file = read_toml(method) if is_config_file(method) else {"method": method}
    named = str(file.get("method", "fedavg"))
    return resolve(file, flags, parse_assignments(assignments, named))


def _known_to(method: str, methods: list[str], assignments: list[str]) -> list[str]:
    """The assignments without those that belong to another of the compared methods only."""
    own = {m: {p.name for p in registry.hyper_parameters(m)} for m in methods}
    known = []
    for assignment in assignments:
        key = assignment.partition("=")[0]
        name = key.removeprefix("hyper.")
        owners = [m for m in methods if name in own[m]]
        if key in Config.model_fields and owners and len(owners) < len(methods):
            raise SettingError(
                f"--set {key}: {owners[0]} has a setting of that name, and so has the run; "
                f"write --set hyper.{key} for the method's, or use the flag or a file for the run's"
            )
        if method in owners or not owners:
            known.append(assignment)
    return known


def _parts(parts: dict[str, Part]) -> str:
    return "\n".join(f"{name}: {part.what}, {_size(part.nbytes)}" for name, part in parts.items())


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _say(text: str) -> None:
    """Print a line as it is: a path in it can be copied, and brackets mean nothing."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _check_picture(path: Path, option: str) -> None:
    """Refuse a picture that could not be written, before the work that goes into it."""
    if path.suffix.lower() not in PICTURES:
        raise SettingError(f"{option} {path}: a picture ends in {', '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise SettingError(f"{option} {path}: there is no folder {path.parent}")


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "+-_" else "-" for c in name).strip("-")


def _title(config: Config) -> str:
    alpha = f" {config.alpha:g}" if config.partition.startswith("dir") else ""
    return f"{config.data}, {config.clients} clients, {config.partition}{alpha}, {config.model}, seed {config.seed}"


@contextmanager
def _run_in(path: Path) -> Iterator[Display]:
    """A display for a run in this directory; if the run stops under way, the user is told how to go on."""
    display, log = Display(console), path / "log.txt"
    logged = log.stat().st_mtime_ns if log.exists() else 0
    try:
        yield display
    except SettingError:
        raise
    except (FedstillError, OSError, KeyboardInterrupt) as error:
        if not display.began:
            raise
        raise Halted(error, path) from error
    except Exception as error:  # of the user's own method, unless it came before there was a log
        if not log.exists() or log.stat().st_mtime_ns == logged:
            raise
        raise Halted(error, path) from error
