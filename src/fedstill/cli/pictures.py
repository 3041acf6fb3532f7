"""What `fedstill figure` and `fedstill report` do: check where to, have it drawn, say where it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import track

from fedstill.analysis import figures
from fedstill.analysis.pages import write_page
from fedstill.analysis.runs import group_runs, in_common, read_runs
from fedstill.cli import commands
from fedstill.core.errors import SettingError
from fedstill.report import style
from fedstill.report.runs import Group
from fedstill.report.series import Band


@contextmanager
def look(
    width: float | None = None, font_size: float | None = None, order: str | None = None, label: list[str] | None = None
) -> Iterator[None]:
    """Draw with the options that figures share."""
    labels = {}
    for pair in label or []:
        name, equals, text = pair.partition("=")
        if not (name and equals and text):
            raise SettingError(f"--label {pair}: write it as NAME=LABEL, such as fedavg=FedAvg")
        labels[name] = text
    names = [name.strip() for name in (order or "").split(",") if name.strip()]
    with style.using(style.Look(width, font_size, names, labels)):
        yield


def curves(directories: list[Path], metrics: list[str], band: Band, out: Path, title: str) -> None:
    figures.draw_curves(_groups(directories, out), out, metrics=metrics, band=band, title=title)
    _done(out)


def bars(directories: list[Path], by: str, metric: str, which: str, out: Path, title: str) -> None:
    figures.draw_bars(_groups(directories, out), out, by=by, metric=metric, which=which, title=title)
    _done(out)


def bubbles(directory: Path, out: Path, title: str) -> None:
    commands.check_picture(out, "--out")
    figures.draw_partition(directory, out, title)
    _done(out)


def confusion(directories: list[Path], out: Path, title: str) -> None:
    commands.check_picture(out, "--out")
    figures.draw_confusion(figures.final_models(directories), out, title)
    _done(out)


def tsne(directories: list[Path], samples: int, out: Path, title: str) -> None:
    commands.check_picture(out, "--out")
    figures.draw_tsne(figures.final_models(directories), out, title, samples=samples)
    _done(out)


def landscape(directories: list[Path], dim: int, points: int, span: float, samples: int, out: Path, title: str) -> None:
    commands.check_picture(out, "--out")
    models = figures.final_models(directories)
    figures.draw_landscape(
        models, out, title, dim=dim, points=points, span=span, samples=samples, progress=show_progress
    )
    _done(out)


def show_progress(numbers: Iterable[float], name: str, count: int) -> Iterable[float]:
    """A bar while numbers are computed, gone when they are."""
    return track(numbers, name, count, console=commands.console, transient=True)


def distance(directories: list[Path], band: Band, out: Path, title: str) -> None:
    groups = _groups(directories, out)
    paths = {group.title: [run.path for run in group.runs] for group in groups}
    figures.draw_distance(paths, out, title or in_common(groups), band=band)
    _done(out)


def clients(directories: list[Path], out: Path, title: str) -> None:
    figures.draw_clients(_groups(directories, out), out, title)
    _done(out)


def toy(rounds: int, points: int, seed: int, out: Path, title: str) -> None:
    commands.check_picture(out, "--out")
    figures.draw_toy(out, title, rounds=rounds, points=points, seed=seed)
    _done(out)


def report(directories: list[Path], out: Path, title: str, baseline: str) -> None:
    if out.suffix.lower() not in (".html", ".htm"):
        raise SettingError(f"--out {out}: a page ends in .html")
    if not out.parent.is_dir():
        raise SettingError(f"--out {out}: there is no folder {out.parent}")
    write_page(directories, out, title, baseline)
    commands.say(f"page: {out}")


def _groups(directories: list[Path], out: Path) -> list[Group]:
    commands.check_picture(out, "--out")
    return group_runs(read_runs(directories))


def _done(out: Path) -> None:
    commands.say(f"picture: {out}")
