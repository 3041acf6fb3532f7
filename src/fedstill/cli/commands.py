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
from fedstill.analysis.tables import (
    TextTable,
    episodes_table,
    metrics_table,
    percent,
    reliability_table,
    results_table,
)
from fedstill.building.config import Config, is_config_file, parse_assignments, parse_sweeps, read_toml, resolve
from fedstill.building.data import dataset_in, divide, load_data
from fedstill.building.setup import prepare
from fedstill.cli.failure import Halted
from fedstill.cli.progress import Display
from fedstill.cli.tensorboard import TensorBoard
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.files import read_json
from fedstill.data.dataset import Dataset
from fedstill.methods import registry
from fedstill.methods.base import Part
from fedstill.metrics.records import RoundRecord, Summary, curve_metrics
from fedstill.running import api, files
from fedstill.running.directory import RunDirectory
from fedstill.running.inputs import prepare_again
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
    tensorboard: bool = False,
) -> None:
    config = config_of(method, flags, assignments)
    if dry_run:
        print(config.toml(), end="")
        return
    path = out or Path("runs") / run_name(config)
    with run_in(path) as display:
        listener = TensorBoard(path, display) if tensorboard else display
        result = api.run_config(config, path, force=force, listener=listener)
    _show_result(result, config, path)


def resume(directory: Path, rounds: int | None, *, device: str | None = None, tensorboard: bool = False) -> None:
    if rounds is not None and rounds < 1:
        raise SettingError(f"--rounds {rounds}: at least 1 is needed")
    with run_in(directory) as display:
        listener = TensorBoard(directory, display) if tensorboard else display
        result = api.resume(directory, rounds=rounds, device=device, listener=listener)
    _show_result(result, RunDirectory.open(directory, lock=False).config(), directory)


def _show_result(result: api.Result, config: Config, path: Path) -> None:
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


def show(directories: list[Path], plot: Path | None) -> None:
    if plot:
        check_picture(plot, "--plot")
    finished: dict[str, Summary] = {}
    records: dict[str, list[RoundRecord]] = {}
    for directory in directories:
        directory_ = RunDirectory.open(directory, lock=False)
        name = directory.resolve().name
        while name in records:
            name += "'"
        records[name] = directory_.records()
        total = read_toml(directory / files.CONFIG).get("rounds", "?")
        done = records[name][-1]["round"] if records[name] else 0
        summary = directory / files.SUMMARY
        if summary.exists() and done == total:
            finished[name] = read_json(summary)
            continue
        say(f"{directory}: {done} of {total} rounds; continue it with 'fedstill resume {directory}'")
    if finished:
        print_results(finished)
    if plot:
        from fedstill.report.curves import curves

        curves(records, plot, metrics=curve_metrics([record for each in records.values() for record in each]))
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


def methods(name: str | None, flags: Flags, assignments: list[str]) -> None:
    if name in registry.modifiers():
        name = f"fedavg+{name}"
    chosen = [name] if name else [*registry.names(), *(f"fedavg+{modifier}" for modifier in registry.modifiers())]
    overview = Table(title="Methods", caption="bytes for one client and round")
    for column in ("id", "what it does", "down", "up", "needs", "paper"):
        overview.add_column(column, overflow="fold", no_wrap=column == "id")
    dataset: Dataset | None = None
    for each in chosen:
        config = config_of(each, flags, assignments)
        dataset = dataset or dataset_in(load_data(config))
        example = {
            "clients": 20,
            "participation": 1.0,
            "partition": "iid",
            "pool": 0.1,
            "proxy": "pool",
            "regions": 1,
        }  # so that no method lacks anything
        try:
            setup = prepare(config.model_copy(update=example), data=dataset)
        except SettingError as error:
            if name:
                raise
            overview.add_row(each, f"not on these data: {error}")
            continue
        wire, cls = setup.method.wire(setup.task), type(setup.method)
        declared = setup.method.needs()
        needs = [
            *(["proxy data"] if declared.proxy_data else []),
            *(["labels on the server"] if declared.server_labels else []),
            *(["a changed model"] if declared.changed_model else []),
            *declared.extra_information,
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


def partition(flags: Flags, assignments: list[str], out: Path) -> None:
    check_picture(out, "--out")
    config = config_of("fedavg", flags, assignments)
    federation = divide(config, load_data(config))
    from fedstill.report.bubbles import bubbles, table

    bubbles(federation, out)
    rows = table(federation)
    shown = Table(title=f"{config.data}, {config.partition}, {federation.clients} clients")
    for column in rows[0]:
        shown.add_column(column.replace("_", " "), justify="right")
    for row in rows[:100]:
        shown.add_row(*(f"{v:.0%}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(shown)
    say(f"picture: {out}")


def print_table(table: TextTable, *, first: Justify = "left", fold: bool = True, no_wrap: bool = False) -> None:
    """Show a table, numbers to the right; `first` is where the names of the rows go. Long cells fold, or are cut."""
    shown = Table(title=table.title, caption=table.caption)
    overflow: Overflow = "fold" if fold else "ellipsis"
    for i, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if i else first, overflow=overflow, no_wrap=no_wrap and i > 0)
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


def print_results(summaries: Mapping[str, Summary]) -> None:
    """The tables of finished runs."""
    print_table(results_table(summaries), no_wrap=True)
    if (metrics := metrics_table(summaries)) is not None:
        print_table(metrics, no_wrap=True)


def run_name(config: Config) -> str:
    """A directory name that tells runs apart at a glance."""
    alpha = f"{config.alpha:g}" if config.partition.startswith("dir") else ""
    return f"{slug(config.method)}-{slug(config.data)}-{config.partition}{alpha}-k{config.clients}-s{config.seed}"


def config_of(method: str, flags: Flags, assignments: list[str]) -> Config:
    file = read_toml(method) if is_config_file(method) else {"method": method}
    named = str(file.get("method", "fedavg"))
    return resolve(file, flags, parse_assignments(assignments, named))


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


def _parts(parts: dict[str, Part]) -> str:
    return "\n".join(f"{name}: {part.what}, {_size(part.nbytes)}" for name, part in parts.items())


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"


def say(text: str) -> None:
    """Print a line as it is: a path in it can be copied, and brackets mean nothing."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def check_picture(path: Path, option: str) -> None:
    """Refuse a picture that could not be written, before the work that goes into it."""
    if path.suffix.lower() not in PICTURES:
        raise SettingError(f"{option} {path}: a picture ends in {', '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise SettingError(f"{option} {path}: there is no folder {path.parent}")


def slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "+-_" else "-" for c in name).strip("-")


def title_of(config: Config) -> str:
    alpha = f" {config.alpha:g}" if config.partition.startswith("dir") else ""
    return f"{config.data}, {config.clients} clients, {config.partition}{alpha}, {config.model}, seed {config.seed}"


@contextmanager
def run_in(path: Path, again: str = "") -> Iterator[Display]:
    """A display for a run in this directory; if the run stops under way, the user is told how to go on (`again`)."""
    display, log = Display(console), path / files.LOG
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
