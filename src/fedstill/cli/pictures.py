"""What `fedstill figure` and `fedstill report` do: read run directories, compute, hand over to be drawn."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from fedstill.analysis.final import FinalModel, distances, refuse_objects
from fedstill.building.config import DIVISION, IRRELEVANT, Config, read_toml
from fedstill.building.data import divide, load_data
from fedstill.cli import commands
from fedstill.core import trust
from fedstill.core.errors import DataError, FedstillError, SettingError
from fedstill.core.files import read_json, write_atomic
from fedstill.data.federation import Federation
from fedstill.report import style
from fedstill.report.bars import bars as draw_bars
from fedstill.report.bubbles import bubbles as draw_bubbles
from fedstill.report.clients import clients as draw_clients
from fedstill.report.confusion import confusion as draw_confusion
from fedstill.report.curves import Band, seed_curves
from fedstill.report.landscape import line, plane
from fedstill.report.page import Picture, page
from fedstill.report.runs import (
    HYPER,
    Group,
    Record,
    Run,
    alike,
    distinct_names,
    flat,
    grouped,
    look_up,
    short,
    value,
    varying,
)
from fedstill.report.toy import Regions
from fedstill.report.toy import toy as draw_toy
from fedstill.report.tsne import tsne as draw_tsne
from fedstill.running import files
from fedstill.running.directory import RunDirectory
from fedstill.studies import toy as toys

_PARTITIONS = 4  # that a report shows


def curves(directories: list[Path], metrics: list[str], band: Band, out: Path, title: str) -> None:
    groups = _groups(directories, out)
    for metric in metrics:
        records = [record for group in groups for run in group.runs for record in run.records]
        if all(look_up(record, metric) is None for record in records):
            known = dict.fromkeys(name for record in records for name in record if look_up(record, name) is not None)
            raise SettingError(f"--metric {metric}: no round has it; those there are: {', '.join(known) or 'none'}")
    seed_curves(_records(groups), out, metrics=metrics, band=band, title=title or _context(groups))
    _done(out)


def bars(directories: list[Path], by: str, metric: str, which: str, out: Path, title: str) -> None:
    groups = _finished(_groups(directories, out))
    heads = [group.runs[0] for group in groups]
    setting = by if any(by in run.settings for run in heads) else HYPER + by
    if setting not in (known := varying(heads, but={"seed", *IRRELEVANT})):
        raise SettingError(
            f"--by {by}: the runs do not differ in it; they do in {', '.join(map(short, known)) or 'nothing'}"
        )
    if setting == "method":  # and whatever else tells the groups apart
        series = {style.label(metric): {group.name: _numbers(group, metric, which) for group in groups}}
    else:
        series = _series(groups, setting, metric, which)
    draw_bars(series, out, by=by, metric=metric, which=which, title=title or _context(groups))
    _done(out)


def _series(groups: Sequence[Group], setting: str, metric: str, which: str) -> dict[str, dict[str, list[float]]]:
    """The numbers of all seeds by the value of a setting, for each combination of the other settings."""
    but = {"seed", setting, *IRRELEVANT}
    firsts: list[Run] = []  # one run of each series
    for group in groups:
        if not any(alike(first, group.runs[0], but=but) for first in firsts):
            firsts.append(group.runs[0])
    series: dict[str, dict[str, list[float]]] = {name: {} for name in distinct_names(firsts, but=but)}
    for group in sorted(groups, key=lambda g: _rank(g.settings.get(setting, "none"))):
        numbers = series[next(n for n, f in zip(series, firsts, strict=True) if alike(f, group.runs[0], but=but))]
        place = value(group.settings.get(setting, "none"))
        if place in numbers:
            raise SettingError(f"{group.runs[0].path}: a run with the same settings and seed is given twice")
        numbers[place] = _numbers(group, metric, which)
    return series


def _rank(setting: Any) -> tuple[bool, float, str]:
    """Numbers by size, then words."""
    number = isinstance(setting, int | float)
    return (not number, float(setting) if number else 0.0, str(setting))


def _numbers(group: Group, metric: str, which: str) -> list[float]:
    """A number of each seed's summary: the final or best of a metric, or a total such as seconds."""
    found = []
    for run in group.runs:
        summary = run.summary or {}
        name = f"{which}_{metric}" if f"{which}_{metric}" in summary else metric
        if (number := look_up(summary, name)) is None:
            final = [n for n in summary if n.startswith("final_") and n != "final_is_mean_of"]
            known = [n.removeprefix("final_") for n in final if look_up(summary, n) is not None]
            raise SettingError(f"--metric {metric}: {run.path} has no such number; it has {', '.join(known)}")
        found.append(number)
    return found


def bubbles(directory: Path, out: Path, title: str) -> None:
    commands.check_picture(out, "--out")
    draw_bubbles(_federation(directory), out, title=title or None)
    _done(out)


def confusion(directories: list[Path], out: Path, title: str) -> None:
    models = _models(directories, out)
    matrices = {name: model.confusion().tolist() for name, model in models.items()}
    draw_confusion(matrices, out, title or "test samples of each class, in per cent", classes=_classes(models))
    _done(out)


def tsne(directories: list[Path], samples: int, out: Path, title: str) -> None:
    tsne_of(_models(directories, out), out, title, samples=samples)
    _done(out)


def tsne_of(models: dict[str, FinalModel], out: Path, title: str, *, samples: int = 500) -> None:
    found = {}
    for name, model in models.items():
        chosen = model.samples(samples)
        found[name] = (model.features(chosen).numpy(), chosen.y.numpy())
    count = len(next(iter(found.values()))[1])
    shown = title or f"t-SNE of the features of {count} test samples"
    draw_tsne(found, out, classes=_classes(models), title=shown)


def landscape(directories: list[Path], dim: int, points: int, span: float, samples: int, out: Path, title: str) -> None:
    landscape_of(_models(directories, out), out, title, dim=dim, points=points, span=span, samples=samples)
    _done(out)


def landscape_of(
    models: dict[str, FinalModel],
    out: Path,
    title: str,
    *,
    dim: int = 2,
    points: int = 21,
    span: float = 1.0,
    samples: int = 500,
) -> None:
    steps = np.linspace(-span, span, points + 1 - points % 2)  # an odd number: the model itself is one of them
    found = {}
    for name, model in models.items():
        losses = model.losses_around(model.samples(samples), steps.tolist(), dim)
        shown = track(losses, name, len(steps) ** dim, console=commands.console, transient=True)
        found[name] = np.array(list(shown)).reshape((len(steps),) * dim)
    draw = line if dim == 1 else plane
    draw(found, steps, out, title=title or "test loss around the final model")


def distance(directories: list[Path], band: Band, out: Path, title: str) -> None:
    groups = _groups(directories, out)
    paths = {group.title: [run.path for run in group.runs] for group in groups}
    distance_of(paths, out, title or _context(groups), band=band)
    _done(out)


def distance_of(runs: dict[str, list[Path]], out: Path, title: str, *, band: Band = "std") -> None:
    measured = {
        name: [[{"round": r, "distance": d} for r, d in distances(path).items() if d] for path in paths]
        for name, paths in runs.items()
    }
    seed_curves(measured, out, metrics=["distance"], band=band, log=True, title=title)


def clients(directories: list[Path], out: Path, title: str) -> None:
    groups = _finished(_groups(directories, out))
    for run in (run for group in groups for run in group.runs):
        if not run.clients:
            raise SettingError(f"{run.path}: no client has an accuracy of its own (clients.csv)")
    served = {group.title: [run.clients for run in group.runs] for group in groups}
    draw_clients(served, out, title=title or _context(groups))
    _done(out)


def toy(rounds: int, points: int, seed: int, out: Path, title: str) -> None:
    commands.check_picture(out, "--out")
    toy_of(out, title, rounds=rounds, points=points, seed=seed)
    _done(out)


def toy_of(out: Path, title: str, *, rounds: int = 20, points: int = 200, seed: int = 0) -> None:
    federation, truth = toys.federation(points, seed), toys.classes(toys.plane())
    held = toys.clients(points, seed)
    everything = (np.concatenate([x for x, _ in held]), np.concatenate([y for _, y in held]))
    rows = []
    for method in ("fedavg", "fedgkd"):
        outcome = toys.train(method, federation, rounds=rounds, seed=seed)
        names = [*(f"{method}, client {k + 1}" for k in range(len(held))), f"{method}, global"]
        rows.append(
            [
                Regions(name, float((said == truth).mean()), said.reshape(toys.SIDE, toys.SIDE), *data)
                for name, said, data in zip(names, outcome.predicted, [*held, everything], strict=True)
            ]
        )
    shown = title or f"share of the plane that each model gets right, after {rounds} rounds (seed {seed})"
    draw_toy(rows, out, extent=toys.EXTENT, title=shown)


def report(directories: list[Path], out: Path, title: str) -> None:
    if out.suffix.lower() not in (".html", ".htm"):
        raise SettingError(f"--out {out}: a page ends in .html")
    if not out.parent.is_dir():
        raise SettingError(f"--out {out}: there is no folder {out.parent}")
    runs = _runs(directories)
    groups = grouped([run for run in runs if run.summary], free=IRRELEVANT)
    notes = [f"Not finished, and left out: {run.path}" for run in runs if not run.summary]
    if not groups:
        raise SettingError(f"no run is finished: continue one with 'fedstill resume {runs[0].path}'")
    pictures = [
        _picture(
            "Accuracy on the global test set, and variance over the clients (FM), by round",
            lambda file: seed_curves(_records(groups), file, title=_context(groups)),
        )
    ]
    served = {
        group.title: [run.clients for run in group.runs] for group in groups if all(r.clients for r in group.runs)
    }
    if served:
        caption = "Each client's accuracy under the final model, from the worst served to the best"
        pictures.append(_picture(caption, lambda file: draw_clients(served, file, title=_context(groups))))
    pictures += _meetings(groups)
    partitions, more = _partitions(groups)
    write_atomic(out, page(groups, pictures + partitions, title=title or "fedstill report", notes=notes + more))
    commands.say(f"page: {out}")


def _picture(caption: str, draw: Callable[[io.BytesIO], object]) -> Picture:
    file = io.BytesIO()
    draw(file)
    return Picture(caption, file.getvalue())


def _meetings(groups: Sequence[Group]) -> list[Picture]:
    """The confusion at the last episode's end that was evaluated, of the first seed of each run with regions."""
    found = []
    for group in groups:
        last = last_meeting(group.runs[0].records)
        if not last:
            continue
        matrices = {name: teacher["confusion"] for name, teacher in last["teachers"].items()}
        matrices["global model"] = last["student"]["confusion"]
        caption = (
            f"{group.name}, seed {group.runs[0].seed}: the regions' models and the global one at the end of episode "
            f"{last['number']}; test samples of each class, in per cent"
        )
        found.append(_picture(caption, partial(draw_confusion, matrices)))
    return found


def last_meeting(records: Sequence[Record]) -> Record:
    """The end of the last episode that was evaluated, of a run with regions; empty if there is none."""
    met = [r["episode"] for r in records if "student" in r.get("episode", {})]
    return met[-1] if met and "teachers" in met[-1] else {}


def _partitions(groups: Sequence[Group]) -> tuple[list[Picture], list[str]]:
    """Who holds what, once for each way of dividing; what cannot be drawn, in words."""
    pictures, notes, seen = [], [], set()
    for group in groups:
        run = group.runs[0]
        division = repr({name: run.settings.get(name) for name in sorted({"data", *DIVISION})})
        if division in seen:
            continue
        seen.add(division)
        if len(seen) > _PARTITIONS:
            notes.append(f"Of the partitions, the first {_PARTITIONS} are shown.")
            break
        try:
            federation = _federation(run.path)
        except FedstillError as error:
            notes.append(f"The partition of {group.name} is not shown: {error}")
            continue
        caption = f"Training samples by client and class: {group.name}, seed {run.seed}"
        pictures.append(_picture(caption, partial(draw_bubbles, federation)))
    return pictures, notes


def _federation(path: Path) -> Federation:
    """The data of a run, divided as they were."""
    config = RunDirectory.open(path, lock=False).config(custom_method=True)
    refuse_objects(path, config, {"method": True, "model": True})
    trust.check(path, {"data": config.data})
    return divide(config, load_data(config))


def _models(directories: list[Path], out: Path) -> dict[str, FinalModel]:
    """The final model of each run, by a name of its own."""
    commands.check_picture(out, "--out")
    runs = _runs(directories)
    return dict(zip(distinct_names(runs, but=IRRELEVANT), (FinalModel(run.path) for run in runs), strict=True))


def _classes(models: dict[str, FinalModel]) -> tuple[str, ...]:
    """The names of the classes, which all models must share."""
    first, *others = (model.classes for model in models.values())
    if any(classes != first for classes in others):
        raise SettingError("the runs have different classes; draw them one by one")
    return first


def _groups(directories: list[Path], out: Path) -> list[Group]:
    commands.check_picture(out, "--out")
    return grouped(_runs(directories), free=IRRELEVANT)


def _finished(groups: list[Group]) -> list[Group]:
    for run in (run for group in groups for run in group.runs):
        if run.summary is None:
            raise SettingError(f"{run.path} is not finished; continue it with 'fedstill resume {run.path}'")
    return groups


def _context(groups: Sequence[Group]) -> str:
    """What all runs have in common that a reader must know."""
    first = groups[0].settings
    words = {
        "data": Path(str(first["data"])).name,
        "clients": f"{first['clients']} clients" if first["clients"] else "",
        "partition": str(first["partition"]),
        "alpha": f"alpha {value(first['alpha'])}" if str(first["partition"]).startswith("dir") else "",
        "model": Path(str(first["model"])).name,
    }
    return ", ".join(
        text for name, text in words.items() if text and all(group.settings[name] == first[name] for group in groups)
    )


def _records(groups: Sequence[Group]) -> dict[str, list[Any]]:
    return {group.title: [run.records for run in group.runs] for group in groups}


def _runs(directories: list[Path]) -> list[Run]:
    """The runs in these directories and in folders of them, each once."""
    paths: list[Path] = []
    for directory in directories:
        inside = [directory] if (directory / files.CONFIG).is_file() else sorted(
            file.parent for file in directory.rglob(files.CONFIG)
        )  # fmt: skip
        if not inside:
            raise SettingError(f"{directory} is not a run directory and holds none: there is no config.toml")
        paths += inside
    return [_run(path) for path in dict.fromkeys(path.resolve() for path in paths)]


def _run(path: Path) -> Run:
    directory = RunDirectory.open(path, lock=False)
    records, text = directory.records(), (path / files.CONFIG).read_text()
    # A setting that is younger than the run had what is now its default.
    settings = flat(Config.model_validate({}).model_dump() | read_toml(path / files.CONFIG))
    done = records[-1]["round"] if records else 0
    ended = (path / files.SUMMARY).is_file() and done == settings["rounds"]
    return Run(
        path,
        settings,
        records,
        read_json(path / files.SUMMARY) if ended else None,
        _accuracies(path / files.CLIENTS) if ended else (),
        text,
    )


def _accuracies(file: Path) -> list[tuple[int, float]]:
    try:
        with file.open(newline="") as rows:
            return [(int(r["test_samples"]), float(r["accuracy"])) for r in csv.DictReader(rows) if r["accuracy"]]
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise DataError(f"{file} is damaged: {error}") from error


def _done(out: Path) -> None:
    commands.say(f"picture: {out}")
