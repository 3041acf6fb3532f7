"""`fedstill figure KIND`. What it imports at the top is light: `--help` must answer at once."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import typer

from fedstill.cli.consent import TrustCode

app = typer.Typer(
    help="Draw a figure of finished runs: PNG, SVG or PDF, by the ending of --out.",
    pretty_exceptions_enable=False,
)


def _out(kind: str) -> Any:
    return typer.Option(help=rf"The picture: PNG, SVG or PDF. \[{kind}.png]", show_default=False)


Runs = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run directories, or folders that hold some.")]
Title = Annotated[str, typer.Option(help="What to write above the figure.", show_default=False)]
Samples = Annotated[int, typer.Option(help="How many test samples.", min=10)]


_FOR_PAPERS: dict[str, Any] = {
    "width": Annotated[
        float | None,
        typer.Option(help=r"Inches; a column of a paper has about 3.4. \[as it suits a screen]", min=1, max=50),
    ],
    "font_size": Annotated[
        float | None,
        typer.Option(help=r"Points, of the labels of axes; other texts in proportion. \[10]", min=3, max=40),
    ],
    "order": Annotated[str | None, typer.Option(metavar="A,B,…", help="What comes first, by name, such as methods.")],
    "label": Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=LABEL", help="What to write for a name, such as fedavg=FedAvg; can be repeated."),
    ],
}


def _for_papers(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options, in which it draws its figure."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_look(**arguments: Any) -> None:
            look = {name: arguments.pop(name) for name in names}
            with _pictures().look(**look):
                command(**arguments)

        own = inspect.signature(command, eval_str=True).parameters.values()
        kind = inspect.Parameter.KEYWORD_ONLY
        added = [inspect.Parameter(name, kind, default=None, annotation=_FOR_PAPERS[name]) for name in names]
        with_look.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        return with_look

    return decorate


_named = _for_papers(*_FOR_PAPERS)
_sized = _for_papers("width", "font_size")


@app.command()
@_named
def curves(
    directories: Runs,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="A number of metrics.jsonl, such as wlp or worst_auroc; can be repeated, one panel each. "
            r"\[accuracy, or amp without a global test set; fm]"
        ),
    ] = None,
    band: Annotated[Literal["std", "range"], typer.Option(help="Around the mean over seeds.")] = "std",
    out: Annotated[Path, _out("curves")] = Path("curves.png"),
    title: Title = "",
) -> None:
    """Metrics by round; runs that differ in the seed alone are one line with a band."""
    _pictures().curves(directories, metric or [], band, out, title)


@app.command()
@_named
def bars(
    directories: Runs,
    by: Annotated[str, typer.Option(help="The setting along the axis, such as alpha, participation or method.")],
    metric: Annotated[str, typer.Option(help="A number of summary.json, without final_ or best_.")] = "accuracy",
    which: Annotated[
        Literal["final", "best"], typer.Option(help="The mean of the last five evaluations, or the best of all.")
    ] = "final",
    out: Annotated[Path, _out("bars")] = Path("bars.png"),
    title: Title = "",
) -> None:
    """A result by a setting that varies among the runs, with error bars over seeds."""
    _pictures().bars(directories, by, metric, which, out, title)


@app.command()
@_sized
def bubbles(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
    out: Annotated[Path, _out("bubbles")] = Path("bubbles.png"),
    title: Title = "",
    trust_code: TrustCode = False,
) -> None:
    """The data partition: clients by classes."""
    _pictures().bubbles(directory, out, title)


@app.command()
@_named
def confusion(
    directories: Runs,
    out: Annotated[Path, _out("confusion")] = Path("confusion.png"),
    title: Title = "",
    trust_code: TrustCode = False,
) -> None:
    """What the final models take each class of the test set for."""
    _pictures().confusion(directories, out, title)


@app.command()
@_named
def tsne(
    directories: Runs,
    samples: Samples = 500,
    out: Annotated[Path, _out("tsne")] = Path("tsne.png"),
    title: Title = "",
    trust_code: TrustCode = False,
) -> None:
    """The final models' features of test samples, in the plane."""
    _pictures().tsne(directories, samples, out, title)


@app.command()
@_named
def landscape(
    directories: Runs,
    dim: Annotated[int, typer.Option(help="Directions: 1 or 2.", min=1, max=2)] = 2,
    points: Annotated[int, typer.Option(help="Points along each direction.", min=3)] = 21,
    span: Annotated[float, typer.Option(help="How far to go, in lengths of the model's filters.", min=0.001)] = 1.0,
    samples: Samples = 500,
    out: Annotated[Path, _out("landscape")] = Path("landscape.png"),
    title: Title = "",
    trust_code: TrustCode = False,
) -> None:
    """The test loss around the final models, along filter-normalised directions (Li et al. 2018)."""
    _pictures().landscape(directories, dim, points, span, samples, out, title)


@app.command()
@_named
def distance(
    directories: Runs,
    band: Annotated[Literal["std", "range"], typer.Option(help="Around the mean over seeds.")] = "std",
    out: Annotated[Path, _out("distance")] = Path("distance.png"),
    title: Title = "",
    trust_code: TrustCode = False,
) -> None:
    """How far the global model is from the final one, by round, for runs with --set save_models=1."""
    _pictures().distance(directories, band, out, title)


@app.command()
@_named
def clients(directories: Runs, out: Annotated[Path, _out("clients")] = Path("clients.png"), title: Title = "") -> None:
    """Each client's accuracy, from the worst served to the best, with AMP and WLP."""
    _pictures().clients(directories, out, title)


@app.command()
@_sized
def toy(
    rounds: Annotated[int, typer.Option(help="Communication rounds.", min=2)] = 20,
    points: Annotated[int, typer.Option(help="Points in the plane, of all clients.", min=20)] = 200,
    seed: Annotated[int, typer.Option(help="Other points and other initial weights.", min=0)] = 0,
    out: Annotated[Path, _out("toy")] = Path("toy.png"),
    title: Title = "",
) -> None:
    """FedAvg and FedGKD on points in the plane, two clients without a common class (Yao et al. 2022, Fig. 5).

    One seed is one draw, and either method may come out ahead: look at several.
    """
    _pictures().toy(rounds, points, seed, out, title)


def _pictures() -> ModuleType:
    """The commands' work, imported only now: it brings PyTorch along."""
    return importlib.import_module("fedstill.cli.pictures")
