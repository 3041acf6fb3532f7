"""The command line. What it imports at the top is light: `--help` must answer at once."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from contextvars import copy_context
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn

import typer

from fedstill.cli import advise, audit, board, cache, columns, figures, inference, keys, machines, privacy
from fedstill.cli import tune as tuning
from fedstill.cli.consent import TrustCode, ask, on_terminal
from fedstill.cli.failure import Halted, one_line
from fedstill.cli.options import (
    CHOOSING,
    COLUMNS,
    FEDERATION,
    LEARNING,
    LOCAL,
    As,
    Callbacks,
    DataDir,
    Device,
    DryRun,
    Force,
    Out,
    Set,
    StudyEngine,
    Sweep,
    Tuned,
)
from fedstill.cli.settings import Settings, with_settings
from fedstill.cli.tracking import Trackers, with_trackers
from fedstill.core import trust
from fedstill.core.errors import FedstillError

UsageError: Any = typer.BadParameter.__base__  # of typer's own copy of click, or of click
STOPPED = 130  # what typer makes of Ctrl-C


class _Argument(typer.core.TyperArgument):
    """An argument with its help, which the typer that Flower allows loses where click has a place for it (8.5)."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.help = given.get("help")


typer.main.TyperArgument = _Argument  # type: ignore[attr-defined]

app = typer.Typer(
    name="fedstill",
    help="Federated learning on heterogeneous data by knowledge distillation.\n\nStart with:  fedstill demo",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fedstill {importlib.metadata.version('fedstill')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Federated learning on heterogeneous data by knowledge distillation.

    Start with:  fedstill demo
    """


@app.command(rich_help_panel="Train")
def demo(
    out: Annotated[Path, typer.Option(help="Where its runs go; finished ones there are used again.")] = Path(
        "runs/demo"
    ),
    rounds: Annotated[int | None, typer.Option(help="Rounds of each run, to try it out.", min=1)] = None,
    force: Force = False,
) -> None:
    """See what it is about in three minutes: four methods where clients' data differ, a table, a picture, a page."""
    _commands("demo").demo(out, rounds, force=force)


@app.command(rich_help_panel="Train")
@with_settings(*FEDERATION, *LEARNING, *CHOOSING, *LOCAL)
@with_trackers
def run(
    method: Annotated[str, typer.Argument(help="A method from 'fedstill methods', file.py:Class, or a config.toml.")],
    settings: Settings,
    out: Out = None,
    set_: Set = None,
    force: Force = False,
    dry_run: DryRun = False,
    trackers: Trackers = (),
    callback: Callbacks = None,
) -> None:
    """Train one federation.

    \b
    fedstill run fedavg
    fedstill run fedprox --alpha 0.05 --clients 50 --set mu=0.1
    fedstill run config.toml --seed 1
    fedstill run ./mine.py:MyMethod --data mnist --model resnet8

    Settings come from flags, then the file, then defaults.
    """
    _commands().run(
        method, settings, set_ or [], out=out, force=force, dry_run=dry_run, trackers=trackers,
        callbacks=callback or [],
    )  # fmt: skip


@app.command(rich_help_panel="Train")
@with_settings(*FEDERATION, *LEARNING, *CHOOSING, *LOCAL, "target_accuracy")
@with_trackers
def compare(
    methods: Annotated[list[str], typer.Argument(help="Methods from 'fedstill methods', or file.py:Class.")],
    settings: Settings,
    seeds: Annotated[int, typer.Option(help="Repeat with so many seeds, from --seed on.", min=1)] = 1,
    sweep: Sweep = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0 is one a core, or one on a GPU.", min=0)] = 0,
    out: Out = None,
    set_: Set = None,
    force: Force = False,
    callback: Callbacks = None,
    trackers: Trackers = (),
    tuned: Tuned = None,
    as_: As = "table",
) -> None:
    """Train several methods on the same clients, schedule and initial weights; end in a table and a picture.

    \b
    fedstill compare fedavg fedprox --alpha 0.1
    fedstill compare fedavg fedgkd fedkf --seeds 5 --sweep alpha=0.05,0.1,1 --target-accuracy 0.7

    A --set that only some of the methods know goes to those. Interrupted, the same command goes on.
    """
    _commands("compare").compare(
        methods, settings, set_ or [], seeds=seeds, sweeps=sweep or [], jobs=jobs, out=out, force=force, as_=as_,
        callbacks=callback or [], tuned=tuned, trackers=trackers,
    )  # fmt: skip


app.command(rich_help_panel="Train")(tuning.tune)


@app.command(rich_help_panel="Train")
@with_trackers
def resume(
    directory: Annotated[Path, typer.Argument(help="The directory of a run that was interrupted.")],
    rounds: Annotated[int | None, typer.Option(help="Go on to this round, also after the run had ended.")] = None,
    device: Annotated[str | None, typer.Option(help="Go on here: cpu, cuda, cuda:1 and so on, or auto.")] = None,
    engine: Annotated[str | None, typer.Option(help="Go on with this engine: process, inline or ray.")] = None,
    trackers: Trackers = (),
    callback: Callbacks = None,
    trust_code: TrustCode = False,
) -> None:
    """Continue a run after any interruption; the result is the same, bit for bit."""
    _commands().resume(directory, rounds, device=device, engine=engine, trackers=trackers, callbacks=callback or [])


@app.command(rich_help_panel="Train")
def rollback(
    directory: Annotated[Path, typer.Argument(help="The directory of a run that is not running.")],
    to: Annotated[int, typer.Option(help="The last round to keep, one that has a checkpoint; 0 is the start.", min=0)],
) -> None:
    """Forget the last rounds of a run; it goes on as if they had never been.

    \b
    fedstill rollback runs/served-fedavg-… --to 12
    """
    _commands().rollback(directory, to)


for command in (machines.serve, machines.region, machines.join):
    app.command(rich_help_panel="Many machines")(command)
app.add_typer(keys.app, name="keys", rich_help_panel="Many machines")


@app.command(rich_help_panel="Papers")
def presets(
    name: Annotated[str | None, typer.Argument(help="Show the settings and runs of this one.")] = None,
    scale: Annotated[
        str, typer.Option(help="paper; near, where there is one: what two cores can do in hours; cpu: in minutes.")
    ] = "paper",
    as_: As = "table",
) -> None:
    """List the papers' tables and figures that can be reproduced, or show one."""
    _commands("presets").presets(name, scale, as_)


@app.command(rich_help_panel="Papers")
def reproduce(
    name: Annotated[str, typer.Argument(help="A preset from 'fedstill presets', such as fedkf/table5.")],
    scale: Annotated[
        str, typer.Option(help="paper; near, where there is one: what two cores can do in hours; cpu: in minutes.")
    ] = "paper",
    seeds: Annotated[int, typer.Option(help="Seeds, from 0 on.", min=1)] = 3,
    data_dir: DataDir = None,
    device: Device = None,
    engine: StudyEngine = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0 is one a core, or one on a GPU.", min=0)] = 0,
    out: Annotated[
        Path, typer.Option(help="Where runs and tables go; finished runs there are used again, whatever the device.")
    ] = Path("runs/reproduced"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be run, and for how long.")] = False,
    as_: As = "table",
) -> None:
    """Run a paper's table or figure again, and set the paper's numbers beside ours.

    \b
    fedstill reproduce fedkf/table5 --scale cpu --seeds 3

    Interrupted, the same command goes on where it stopped.
    """
    _commands("presets").reproduce(
        name, scale, seeds=seeds, data_dir=data_dir, device=device, engine=engine, jobs=jobs, out=out, dry_run=dry_run,
        as_=as_,
    )  # fmt: skip


@app.command(rich_help_panel="Papers")
def claims(
    seeds: Annotated[int, typer.Option(help="Seeds, from 0 on; 5 are the fewest that are judged.", min=1)] = 5,
    data_dir: DataDir = None,
    engine: StudyEngine = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0 is one a core.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Where runs go; finished ones there, also reproduce's, are used.")] = Path(
        "runs/reproduced"
    ),
    page: Annotated[Path | None, typer.Option(help=r"Where to write the page. \[OUT/claims.md]")] = None,
    finished: Annotated[bool, typer.Option("--finished", help="Run nothing: judge by what is finished.")] = False,
    earlier: Annotated[
        Path | None, typer.Option(help="Saved results of runs elsewhere, kept where they have more seeds than here.")
    ] = None,
    archive: Annotated[
        Path | None, typer.Option(help="A folder with what finished runs came to, which need not be run again.")
    ] = None,
    saved: Annotated[Path | None, typer.Option(help="Only write the page of results that were saved here.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be run, and for how long.")] = False,
) -> None:
    """Check what the papers claim on runs that two cores can do, and write a page with a verdict on each claim.

    \b
    fedstill claims --seeds 5 --data-dir DATA
    fedstill claims --finished --archive docs/archive --earlier docs/results.json --page docs/results.md
    fedstill claims --saved docs/results.json --page docs/results.md

    Interrupted, the same command goes on where it stopped. It takes hours; --finished shows what there is.
    """
    command = _commands("claims")
    if saved:
        command.show(saved, page)
        return
    command.carry_on(
        seeds=seeds,
        data_dir=data_dir,
        engine=engine,
        jobs=jobs,
        out=out,
        page=page,
        finished=finished,
        earlier=earlier,
        archive=archive,
        dry_run=dry_run,
    )


@app.command(rich_help_panel="Look")
def show(
    directories: Annotated[list[Path], typer.Argument(help="Directories of runs, under way too, or of comparisons.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw the learning curves into this PNG or SVG.")] = None,
    as_: As = "table",
) -> None:
    """Show what runs and comparisons came to."""
    _commands().show(directories, plot, as_)


@app.command(rich_help_panel="Look")
def verify(
    directories: Annotated[
        list[Path], typer.Argument(help="Run directories, folders of sites (site-NAME), or folders that hold some.")
    ],
) -> None:
    """Check that runs, finished or under way, and what sites keep, still are what was written; exit 1 if not."""
    raise typer.Exit(_commands("verify").verify(directories))


@app.command(rich_help_panel="Look")
def report(
    directories: Annotated[list[Path], typer.Argument(help="Run directories, or folders that hold some.")],
    out: Annotated[Path, typer.Option(help="The page, one file.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="What to write above it.", show_default=False)] = "",
    baseline: Annotated[str, typer.Option(help=r"The method that others are compared with. \[the first]")] = "",
    trust_code: TrustCode = False,
) -> None:
    """Write a page about runs: results, charts, settings. One file, which a browser opens without a network.

    \b
    fedstill report runs/compare-… --out report.html
    fedstill report runs --baseline fedavg

    Runs are in the order given, those of a comparison in its order. 'fedstill board' shows runs under way.
    """
    importlib.import_module("fedstill.cli.pictures").report(directories, out, title, baseline)


@app.command(rich_help_panel="Look")
def episodes(
    directory: Annotated[Path, typer.Argument(help="The directory of a run with regions.")],
    classes: Annotated[bool, typer.Option("--classes", help="Also how reliable each region is on each class.")] = False,
    out: Annotated[Path | None, typer.Option(help="Draw the last episode's confusion matrices: PNG, SVG, PDF.")] = None,
    trust_code: TrustCode = False,
) -> None:
    """Show what each aggregation of the regions came to, for example after 'fedstill run f2l --set pool=0.1'."""
    _commands().episodes(directory, classes=classes, out=out)


@app.command(rich_help_panel="Train")
def reteach(
    directory: Annotated[Path, typer.Argument(help="The directory of a run with regions and save_teachers=true.")],
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,…", help="Values to try of a setting of the method; can be repeated."),
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting for all.")] = None,
    episode: Annotated[int | None, typer.Option(help=r"Which episode's teachers. \[the last]")] = None,
    trust_code: TrustCode = False,
) -> None:
    """Teach the global model again from saved teachers, with other settings.

    \b
    fedstill run lkd --regions 3 --set pool=400 --set save_teachers=true --out runs/taught
    fedstill reteach runs/taught --sweep lambda3=0,0.01,0.1,0.5,1 --set update=false
    """
    _commands().reteach(directory, sweep or [], set_ or [], episode)


@app.command(rich_help_panel="Look")
def samples(
    directory: Annotated[Path, typer.Argument(help="The directory of a run of a method with a generator.")],
    client: Annotated[list[int] | None, typer.Option(help=r"Which client; can be repeated. \[the first four]")] = None,
    count: Annotated[int, typer.Option(help="Images of each.", min=1)] = 32,
    out: Annotated[Path, typer.Option(help="The picture: PNG, SVG or PDF.")] = Path("samples.png"),
    trust_code: TrustCode = False,
) -> None:
    """Draw what generators make, the clients' or the server's, for example after 'fedstill run fedkf'."""
    _commands().samples(directory, client or [], count, out)


@app.command(rich_help_panel="Look")
@with_settings("data", "data_dir", *COLUMNS, "model")
def methods(
    settings: Settings,
    method: Annotated[str | None, typer.Argument(help="Show this one's settings.")] = None,
    set_: Set = None,
    as_: As = "table",
) -> None:
    """List the methods, or show one: its settings, and what crosses the wire with bytes for the chosen model."""
    _commands().methods(method, settings, set_ or [], as_)


@app.command(rich_help_panel="Look")
def settings(
    name: Annotated[str | None, typer.Argument(help="Show this one.")] = None,
    as_: As = "table",
) -> None:
    """List every setting of a run: meaning, default and bounds."""
    _commands().settings(name, as_)


@app.command(rich_help_panel="Look")
def datasets(data_dir: DataDir = None) -> None:
    """List the datasets, and which of them are on this machine."""
    _commands().datasets(data_dir)


@app.command(rich_help_panel="Look")
@with_settings("data", "data_dir", *COLUMNS, "partition", "alpha", "clients", "seed")
def partition(
    settings: Settings,
    out: Annotated[Path, typer.Option(help="The picture: PNG, SVG or PDF.")] = Path("partition.png"),
    set_: Set = None,
    as_: As = "table",
) -> None:
    """Draw the data partition: a picture of clients by classes, and a table."""
    _commands().partition(settings, set_ or [], out, as_)


app.add_typer(figures.app, name="figure", rich_help_panel="Look")
app.command(name="advise", rich_help_panel="Look")(advise.advise)
app.command(name="cache", rich_help_panel="Look")(cache.cache)
app.command(name="privacy", rich_help_panel="Look")(privacy.privacy)
app.command(name="audit", rich_help_panel="Look")(audit.audit)
app.command(name="columns", rich_help_panel="Look")(columns.columns)
for command in (inference.predict, inference.evaluate, inference.export):
    app.command(rich_help_panel="Use a trained model")(command)
app.command(name="board", rich_help_panel="Look")(board.board)


def _commands(module: str = "commands") -> ModuleType:
    """The commands' work, imported only now: it brings PyTorch along."""
    return importlib.import_module(f"fedstill.cli.{module}")


@lru_cache
def _command_line() -> Callable[..., int | None]:
    """All commands, whose annotations are read once in a process."""
    return typer.main.get_command(app)


def main() -> None:
    """Entry point: what the user can mend is one line, without a traceback."""
    copy_context().run(_main)  # what one call confirms does not hold for the next


def _main() -> None:
    if on_terminal():
        trust.confirm.set(ask)
    try:
        code = _command_line()(args=sys.argv[1:] or ["--help"], standalone_mode=False)
    except UsageError as error:
        text, context = error.format_message(), error.ctx
        where = f" (see '{context.command_path} --help')" if context else ""
        _fail(" ".join(text.split()).rstrip(".") + where)
    except Halted as error:
        _fail(str(error), error.hint, code=error.code)
    except (FedstillError, OSError) as error:
        _fail(one_line(error))
    if code == STOPPED:
        _fail("stopped", code=STOPPED)
    sys.exit(code or 0)


def _fail(text: str, hint: str = "", code: int = 2) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    if hint:
        print(hint, file=sys.stderr)
    sys.exit(code)
