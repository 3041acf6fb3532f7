"""What the commands do, once the heavy imports are worth it. Those for pictures wait until one is drawn."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedstill import data as datasets_
from fedstill.analysis import listings
from fedstill.analysis.comparing import read_comparison, slug
from fedstill.analysis.tables import episodes_table, metrics_table, percent, reliability_table, results_table
from fedstill.building.config import Config, is_config_file, parse_assignments, parse_sweeps, read_toml, resolve
from fedstill.building.data import own_glance
from fedstill.cli import tracking
from fedstill.cli.failure import Halted
from fedstill.core import custom
from fedstill.core.choices import Format
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.files import read_json
from fedstill.core.table import Table as TextTable
from fedstill.methods import registry
from fedstill.methods.base import NETWORKS
from fedstill.metrics.records import RoundRecord, Summary, curve_metrics
from fedstill.running import api, files
from fedstill.running.callbacks import Callback
from fedstill.running.directory import RunDirectory
from fedstill.running.inputs import prepare_again
from fedstill.running.places import stopped_by
from fedstill.running.progress import Progress
from fedstill.running.result import Result
from fedstill.running.rollback import rollback as go_back
from fedstill.studies.reteach import SavedEpisode

# A table in a file or a pipe needs no less room than on a screen.
console = Console(width=None if sys.stdout.isatty() else 120)
Flags = Mapping[str, Any]
Justify = Literal["left", "right"]
Overflow = Literal["fold", "ellipsis"]
PICTURES = (".png", ".svg", ".pdf")


def run(
    method: str,
    flags: Flags,
    assignments: list[str],
    *,
    out: Path | None,
    force: bool,
    dry_run: bool,
    trackers: Sequence[str] = (),
    callbacks: Sequence[str] = (),
) -> None:
    config = config_of(method, flags, assignments)
    if dry_run:
        print(config.toml(comments=True), end="")
        return
    path = out or Path("runs") / run_name(config)
    with run_in(path) as display:
        hearing = [display, *own_callbacks(callbacks, trackers)]
        result = api.run_config(config, path, force=force, callbacks=hearing)
    _show_result(result, config, path)


def resume(
    directory: Path,
    rounds: int | None,
    *,
    device: str | None = None,
    engine: str | None = None,
    trackers: Sequence[str] = (),
    callbacks: Sequence[str] = (),
) -> None:
    if rounds is not None and rounds < 1:
        raise SettingError(f"--rounds {rounds}: at least 1 is needed")
    with run_in(directory) as display:
        hearing = [display, *own_callbacks(callbacks, trackers)]
        result = api.resume(directory, rounds=rounds, device=device, engine=engine, callbacks=hearing)
    _show_result(result, RunDirectory.open(directory, lock=False).config(), directory)


def own_callbacks(references: Sequence[str], trackers: Sequence[str] = ()) -> list[Callback]:
    """Trackers by name, and the callbacks that files name: an object, or a class or function that gives one."""
    found: list[Callback] = tracking.make(trackers)
    for reference in references:
        if not custom.is_reference(reference):
            raise SettingError(
                f"--callback {reference}: write it as file.py:name; of one that comes with fedstill, say with its "
                "settings there: name = fedstill.EarlyStopping('train_loss')"
            )
        made = custom.load(reference)
        found.append(made if isinstance(made, Callback) else custom.call(reference))
    return found


def _show_result(result: Result, config: Config, path: Path) -> None:
    """The table and the curves of a run that has ended."""
    print_results({config.method: result.summary})
    from fedstill.report.curves import curves

    picture = path / files.CURVES
    curves({config.method: result.records}, picture, metrics=curve_metrics(result.records), title=title_of(config))
    say(f"curves: {picture}\nall of it: {path}")


def rollback(directory: Path, to: int) -> None:
    forgotten = go_back(directory, to)
    served = RunDirectory.open(directory, lock=False).served
    again = f"the same 'fedstill serve' with --out {directory}" if served else f"fedstill resume {directory}"
    say(f"{forgotten} rounds are forgotten; continue after round {to} with: {again}")


def show(directories: list[Path], plot: Path | None, as_: Format) -> None:
    if plot:
        check_picture(plot, "--plot")
    finished: dict[str, Summary] = {}
    records: dict[str, list[RoundRecord]] = {}
    for directory in directories:
        if (directory / files.COMPARISON).is_file():
            found = read_comparison(directory)
            print_tables(found.overview(costs=as_ == "table"), as_)
            if plot:
                found.plot(path=plot)
            continue
        directory_ = RunDirectory.open(directory, lock=False)
        name = directory.resolve().name
        while name in records:
            name += "'"
        records[name] = directory_.records()
        total = read_toml(directory / files.CONFIG).get("rounds", "?")
        done = records[name][-1]["round"] if records[name] else 0
        by, summary = stopped_by(directory), directory / files.SUMMARY
        if summary.exists() and (done == total or by):
            finished[name] = read_json(summary)
        if name not in finished or by:
            stopped = f", stopped by {by}" if by else ""
            say(f"{directory}: {done} of {total} rounds{stopped}; continue it with 'fedstill resume {directory}'")
    if finished:
        print_results(finished, as_)
    if plot and records:
        from fedstill.report.curves import curves

        curves(records, plot, metrics=curve_metrics([record for each in records.values() for record in each]))
    if plot:
        say(f"curves: {plot}")


def episodes(directory: Path, *, classes: bool, out: Path | None) -> None:
    if out:
        check_picture(out, "--out")
    run_directory = RunDirectory.open(directory, lock=False)
    records = run_directory.records()
    ends = [record["episode"] for record in records if "episode" in record]
    if not ends:
        raise SettingError(f"{directory} has no finished episode; runs with --regions have some")
    print_table(episodes_table(records), first="right", fold=False)
    last = next((episode for episode in reversed(ends) if "student" in episode), None)
    names: Sequence[str] = ()
    if classes or out:
        names = prepare_again(run_directory, run_directory.config()).federation.dataset.classes
    if classes:
        print_table(reliability_table(ends[-1], names), fold=False)
    if out and last:
        matrices = {name: teacher["confusion"] for name, teacher in last["teachers"].items()}
        from fedstill.report.confusion import confusion

        matrices["global model"] = last["student"]["confusion"]
        confusion(matrices, out, title=f"episode {last['number']}", classes=names)
        say(f"picture: {out}")


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
        shown.add_row(f"teacher: {teacher}", percent(saved.accuracy(model)), "")
    shown.add_row("old global model", percent(saved.accuracy(saved.old)), "")
    for student in track(saved.teach(variants), "teaching", len(variants), console=console, transient=True):
        settings = "  ".join(f"{key}={value}" for key, value in student.settings.items()) or "as in the run"
        shown.add_row(settings, percent(student.accuracy), f"{student.seconds:.1f}")
    console.print(shown)


def samples(directory: Path, clients: list[int], count: int, out: Path) -> None:
    check_picture(out, "--out")
    run_directory = RunDirectory.open(directory, lock=False)
    setup = prepare_again(run_directory, run_directory.config())
    if any(not 0 <= client < setup.federation.clients for client in clients):
        raise SettingError(f"--client: clients are 0 to {setup.federation.clients - 1}")

    def pictures(state: Any) -> Any:
        return setup.method.pictures(setup.task, state, count) if state else None

    galleries = {}
    if not clients and (images := pictures(run_directory.server_state())) is not None:
        galleries["server"] = images
    for client in clients or range(setup.federation.clients):
        if (images := pictures(run_directory.client_store.latest(client))) is not None:
            galleries[f"client {setup.federation.client_names[client]}"] = images
        elif clients:
            raise SettingError(f"client {client} has no generator here: it was never active, or the method has none")
        if not clients and len(galleries) == 4:
            break
    if not galleries:
        raise SettingError(f"there is no generator in {directory}; methods with one are fedkf and dafkd")
    from fedstill.report.gallery import gallery

    gallery(galleries, out, title=f"{setup.config.method} on {setup.config.data}")
    say(f"picture: {out}")


def methods(name: str | None, flags: Flags, assignments: list[str], as_: Format) -> None:
    if name is None:
        if flags or assignments:
            raise SettingError("methods: name one to see what it sends with these settings")
        print_tables([listings.list_methods()], as_)
        return
    if name.removeprefix("+") in registry.modifiers():
        name = f"fedavg+{name.removeprefix('+')}"
    setup = listings.example(name, config_of(name, flags, assignments).model_dump(exclude_unset=True))
    needs = listings.needs_of(setup.method)
    table = listings.wire_table(name, setup)
    table.caption = f"{table.caption or ''} · networks: {NETWORKS[setup.method.networks]}"
    table.caption += f" · needs {needs}" if needs else ""
    own = listings.method_settings(name)
    print_tables([table, own] if own.rows else [table], as_)


def settings(name: str | None, as_: Format) -> None:
    print_tables([listings.list_settings(name)], as_)


def datasets(data_dir: str | None) -> None:
    listing = Table(title="Datasets")
    for column in ("name", "train", "test", "classes", "shape", "from", "here"):
        listing.add_column(column, overflow="fold", no_wrap=column not in ("from", "here"))
    for row in datasets_.describe(data_dir):
        shape = "x".join(map(str, row.shape)) or "text"
        listing.add_row(
            row.name,
            *(f"{count:,}" if count else "–" for count in (row.train, row.test)),
            str(row.classes),
            shape,
            row.origin,
            row.found or "no",
        )
    console.print(listing)
    say(
        "Your own: --data with a folder of images by class (or clients/NAME/CLASS), an .npz of x, y and client, a "
        "table (--target), a table of text (--text-column, --label-column), a folder of LEAF's, hf:NAME, or "
        "file.py:function.\n"
        "From Python: data=(x, y), a PyTorch or Hugging Face dataset, fedstill.from_frame(df, target=…); "
        "docs/your-own-data.md shows each."
    )


def partition(flags: Flags, assignments: list[str], out: Path, as_: Format) -> None:
    check_picture(out, "--out")
    found = listings.partition_of(config_of("fedavg", flags, assignments))
    found.plot(out)
    print_tables([found.table()], as_, first="right")
    if as_ == "table":
        say(f"picture: {out}")


def print_tables(tables: Sequence[TextTable], as_: Format, *, first: Justify = "left", no_wrap: bool = False) -> None:
    """Show tables on the terminal, or print them in another format."""
    for table in tables:
        if as_ == "table":
            print_table(table, first=first, no_wrap=no_wrap)
        else:
            print(table.formatted(as_))


def print_table(table: TextTable, *, first: Justify = "left", fold: bool = True, no_wrap: bool = False) -> None:
    """Show a table, numbers to the right; `first` is where the names of the rows go. Long cells fold, or are cut."""
    shown = Table(title=table.title, caption=table.caption)
    overflow: Overflow = "fold" if fold else "ellipsis"
    for i, column in enumerate(table.columns):
        shown.add_column(
            column, justify="right" if i and not table.words else first, overflow=overflow, no_wrap=no_wrap and i > 0
        )
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


def print_results(summaries: Mapping[str, Summary], as_: Format = "table") -> None:
    """The tables of finished runs."""
    metrics = metrics_table(summaries)
    print_tables([results_table(summaries), *([metrics] if metrics else [])], as_, no_wrap=True)


def run_name(config: Config) -> str:
    """A directory name that tells runs apart at a glance."""
    alpha = f"{config.alpha:g}" if config.partition.startswith("dir") else ""
    return f"{slug(config.method)}-{slug(config.data)}-{config.partition}{alpha}-k{config.clients}-s{config.seed}"


def config_of(method: str, flags: Flags, assignments: list[str]) -> Config:
    file = read_toml(method) if is_config_file(method) else {"method": method}
    layers = file, flags, parse_assignments(assignments, str(file.get("method", "fedavg")))
    data = next((str(layer["data"]) for layer in reversed(layers) if "data" in layer), "")
    return resolve(*layers, data=own_glance(data))


def known_to(method: str, methods: list[str], assignments: list[str]) -> list[str]:
    """The assignments without those that belong to another of the compared methods only."""
    own = {m: {p.name for p in registry.hyper_parameters(m)} | registry.old_names(m).keys() for m in methods}
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


def say(text: str) -> None:
    """Print a line as it is: a path in it can be copied, and brackets mean nothing."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def check_picture(path: Path, option: str) -> None:
    """Refuse a picture that could not be written, before the work that goes into it."""
    if path.suffix.lower() not in PICTURES:
        raise SettingError(f"{option} {path}: a picture ends in {', '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise SettingError(f"{option} {path}: there is no folder {path.parent}")


def title_of(config: Config) -> str:
    alpha = f" {config.alpha:g}" if config.partition.startswith("dir") else ""
    partition = f"{config.partition}{alpha}"
    return f"{config.data}, {config.clients} clients, {partition}, {config.network_names}, seed {config.seed}"


@contextmanager
def run_in(path: Path, again: str = "") -> Iterator[Progress]:
    """A display for a run in this directory; if the run stops under way, the user is told how to go on (`again`)."""
    display, log = Progress(console), path / files.LOG
    logged = log.stat().st_mtime_ns if log.exists() else 0
    try:
        yield display
    except SettingError:
        raise
    except (FedstillError, OSError, KeyboardInterrupt) as error:
        if not display.began:
            raise
        raise Halted(error, path, again) from error
    except Exception as error:  # of the user's own method, unless it came before there was a log
        if not log.exists() or log.stat().st_mtime_ns == logged:
            raise
        raise Halted(error, path, again) from error
