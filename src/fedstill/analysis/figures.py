"""The figures of runs: for each, what it shows as data, and a function that draws it.

>>> groups = group_runs(read_runs([Path("runs")]))  # doctest: +SKIP
>>> draw_curves(groups, Path("curves.png"), metrics=["accuracy"])  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedstill.analysis.final import FinalModel, distances, refuse_objects
from fedstill.analysis.runs import alike, distinct_names, finished, in_common, read_runs, varying
from fedstill.building.data import divide, load_data
from fedstill.building.schema import IRRELEVANT
from fedstill.core.errors import SettingError
from fedstill.data.federation import Federation
from fedstill.metrics.records import EpisodeRecord, RoundRecord, curve_metrics, scalars, value_of
from fedstill.report import style
from fedstill.report.bars import bars
from fedstill.report.bubbles import bubbles
from fedstill.report.clients import clients
from fedstill.report.confusion import confusion
from fedstill.report.curves import seed_curves, swept_curves
from fedstill.report.landscape import line, plane
from fedstill.report.runs import HYPER, Group, RunData, short, value
from fedstill.report.series import Band
from fedstill.report.toy import Regions, toy
from fedstill.report.tsne import tsne
from fedstill.running.directory import RunDirectory
from fedstill.studies import toy as toys
from fedstill.studies.comparison import Row

Series = dict[str, dict[str, list[float]]]  # the numbers of all seeds, by series and by place along the axis
Matrices = dict[str, list[list[int]]]
Progress = Callable[[Iterable[float], str, int], Iterable[float]]  # what is computed, its name, how many there are


def _unseen(numbers: Iterable[float], _name: str, _count: int) -> Iterable[float]:
    return numbers


# --- numbers by round ---


def round_records(groups: Sequence[Group]) -> dict[str, list[Sequence[RoundRecord]]]:
    """The records of every seed, by group."""
    return {group.title: [run.records for run in group.runs] for group in groups}


def draw_curves(
    groups: Sequence[Group],
    out: style.Target,
    *,
    metrics: Sequence[str] = (),
    band: Band = "std",
    title: str = "",
) -> None:
    """Metrics by round; a group is one line with a band."""
    records = [record for group in groups for run in group.runs for record in run.records]
    metrics = metrics or curve_metrics(records)
    for metric in metrics:
        if all(value_of(record, metric) is None for record in records):
            names = dict.fromkeys(name for record in records for name, _ in scalars(record, "."))
            known = [name.removeprefix("metrics.") for name in names if not name.split(".")[-1].isdecimal()]
            raise SettingError(f"--metric {metric}: no round has it; those there are: {', '.join(known) or 'none'}")
    seed_curves(round_records(groups), out, metrics=metrics, band=band, title=title or in_common(groups))


def draw_comparison(
    tables: Sequence[Sequence[Row]], out: style.Target, title: str, metrics: Sequence[str] = ()
) -> Figure:
    """Curves of a comparison: a panel for each combination of the swept settings."""
    places = {
        rows[0].place: {row.method: [cell.records() for cell in row.cells] for row in rows if not row.variant}
        for rows in tables
    }
    records = [record for groups in places.values() for runs in groups.values() for run in runs for record in run]
    for name in metrics:
        if all(value_of(record, name) is None for record in records):
            raise SettingError(f"plot: no round has {name!r}; rounds() shows the names of all numbers")
    shown = metrics or curve_metrics(records)[: 2 if len(tables) == 1 else 1]
    return swept_curves(places, out, metrics=shown, title=title)


def distance_records(runs: Mapping[str, Sequence[Path]]) -> dict[str, list[list[dict[str, float]]]]:
    """The squared distance to the final model by round, of every run that kept its models."""
    return {
        name: [[{"round": r, "distance": d} for r, d in distances(path).items() if d] for path in paths]
        for name, paths in runs.items()
    }


def draw_distance(
    runs: Mapping[str, Sequence[Path]], out: style.Target, title: str = "", *, band: Band = "std"
) -> None:
    """How far the global model is from the final one, by round; the runs of a name are its seeds."""
    seed_curves(distance_records(runs), out, metrics=["distance"], band=band, log=True, title=title)


# --- numbers by a setting ---


def bar_series(groups: Sequence[Group], by: str, metric: str = "accuracy", which: str = "final") -> Series:
    """A result of finished runs by a setting that varies among them, for each combination of the other settings."""
    finished(groups)
    heads = [group.runs[0] for group in groups]
    setting = by if any(by in run.settings for run in heads) else HYPER + by
    if setting not in (known := varying(heads, but={"seed", *IRRELEVANT})):
        raise SettingError(
            f"--by {by}: the runs do not differ in it; they do in {', '.join(map(short, known)) or 'nothing'}"
        )
    if setting == "method":  # and whatever else tells the groups apart
        return {style.label(metric): {group.name: results(group, metric, which) for group in groups}}
    but = {"seed", setting, *IRRELEVANT}
    firsts: list[RunData] = []  # one run of each series
    for group in groups:
        if not any(alike(first, group.runs[0], but=but) for first in firsts):
            firsts.append(group.runs[0])
    series: Series = {name: {} for name in distinct_names(firsts, but=but)}
    for group in sorted(groups, key=lambda g: _rank(g.settings.get(setting, "none"))):
        numbers = series[next(n for n, f in zip(series, firsts, strict=True) if alike(f, group.runs[0], but=but))]
        place = value(group.settings.get(setting, "none"))
        if place in numbers:
            raise SettingError(f"{group.runs[0].path}: a run with the same settings and seed is given twice")
        numbers[place] = results(group, metric, which)
    return series


def results(group: Group, metric: str, which: str = "final") -> list[float]:
    """A number of each seed's summary: the final or best of a metric, or a total such as seconds."""
    found = []
    for run in group.runs:
        summary: Mapping[str, Any] = run.summary or {}
        number = value_of(summary, f"{which}_{metric}")
        number = value_of(summary, metric) if number is None else number
        if number is None:
            names = (*summary, *summary.get("metrics", {}))
            final = [n for n in names if n.startswith("final_") and n != "final_is_mean_of"]
            known = [n.removeprefix("final_") for n in final if value_of(summary, n) is not None]
            raise SettingError(f"--metric {metric}: {run.path} has no such number; it has {', '.join(known)}")
        found.append(number)
    return found


def draw_bars(
    groups: Sequence[Group],
    out: style.Target,
    *,
    by: str,
    metric: str = "accuracy",
    which: str = "final",
    title: str = "",
) -> None:
    """A result by a setting, with error bars over seeds."""
    series = bar_series(groups, by, metric, which)
    bars(series, out, by=by, metric=metric, which=which, title=title or in_common(groups))


def _rank(setting: Any) -> tuple[bool, float, str]:
    """Numbers by size, then words."""
    number = isinstance(setting, int | float)
    return (not number, float(setting) if number else 0.0, str(setting))


# --- clients and their data ---


def client_accuracies(groups: Sequence[Group]) -> dict[str, list[Sequence[tuple[int, float]]]]:
    """Test samples and accuracy of each client in every seed, of the groups all of whose runs have them."""
    return {group.title: [run.clients for run in group.runs] for group in groups if all(r.clients for r in group.runs)}


def draw_clients(groups: Sequence[Group], out: style.Target, title: str = "") -> None:
    """Each client's accuracy, from the worst served to the best."""
    for run in (run for group in finished(groups) for run in group.runs):
        if not run.clients:
            raise SettingError(f"{run.path}: no client has an accuracy of its own (clients.csv)")
    runs = [run for group in groups for run in group.runs]
    names = runs[0].client_names if len(runs) == 1 else ()
    clients(client_accuracies(groups), out, title=title or in_common(groups), names=names)


def data_partition(path: Path) -> Federation:
    """The data of a run, divided as they were."""
    unused = ("method", "model", "proxy")
    config = RunDirectory.open(path, lock=False).config(replaced=unused)
    refuse_objects(path, config, {"method": True, "model": True})
    return divide(config, load_data(config))


def draw_partition(path: Path, out: style.Target, title: str = "") -> None:
    """The data partition of a run: clients by classes."""
    bubbles(data_partition(path), out, title=title or None)


# --- final models ---


def final_models(directories: Iterable[Path]) -> dict[str, FinalModel]:
    """The final model of each run, by a name of its own."""
    runs = read_runs(directories)
    return dict(zip(distinct_names(runs, but=IRRELEVANT), (FinalModel(run.path) for run in runs), strict=True))


def classes_of(models: Mapping[str, FinalModel]) -> tuple[str, ...]:
    """The names of the classes, which all models must share."""
    first, *others = (model.classes for model in models.values())
    if any(classes != first for classes in others):
        raise SettingError("the runs have different classes; draw them one by one")
    return first


def draw_confusion(models: Mapping[str, FinalModel], out: style.Target, title: str = "") -> None:
    """What the models take each class of the test set for."""
    matrices = {name: model.confusion().tolist() for name, model in models.items()}
    confusion(matrices, out, title or "test samples of each class, in per cent", classes=classes_of(models))


def episode_matrices(episode: EpisodeRecord) -> Matrices:
    """The confusion of the regions' models at an episode's end, by region."""
    return {name: teacher["confusion"] for name, teacher in episode["teachers"].items()}


def draw_tsne(models: Mapping[str, FinalModel], out: style.Target, title: str = "", *, samples: int = 500) -> None:
    """The models' features of test samples, in the plane."""
    found = {}
    for name, model in models.items():
        chosen = model.samples(samples)
        found[name] = (model.features(chosen).numpy(), chosen.y.numpy())
    count = len(next(iter(found.values()))[1])
    shown = title or f"t-SNE of the features of {count} test samples"
    tsne(found, out, classes=classes_of(models), title=shown)


def loss_landscape(
    models: Mapping[str, FinalModel],
    *,
    dim: int = 2,
    points: int = 21,
    span: float = 1.0,
    samples: int = 500,
    progress: Progress = _unseen,
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Steps along each direction, and each model's test loss at every combination of them."""
    steps = np.linspace(-span, span, points + 1 - points % 2)  # an odd number: the model itself is one of them
    found = {}
    for name, model in models.items():
        losses = model.losses_around(model.samples(samples), steps.tolist(), dim)
        found[name] = np.array(list(progress(losses, name, len(steps) ** dim))).reshape((len(steps),) * dim)
    return steps, found


def draw_landscape(
    models: Mapping[str, FinalModel],
    out: style.Target,
    title: str = "",
    *,
    dim: int = 2,
    points: int = 21,
    span: float = 1.0,
    samples: int = 500,
    progress: Progress = _unseen,
) -> None:
    """The test loss around the models, along filter-normalised directions (Li et al. 2018)."""
    steps, found = loss_landscape(models, dim=dim, points=points, span=span, samples=samples, progress=progress)
    draw = line if dim == 1 else plane
    draw(found, steps, out, title=title or "test loss around the final model")


# --- points in the plane ---


def toy_regions(*, rounds: int = 20, points: int = 200, seed: int = 0) -> list[list[Regions]]:
    """What FedAvg and FedGKD make of points in the plane: for each, the clients' models and the global one."""
    federation, truth = toys.federation(points, seed), toys.classes(toys.plane())
    client_points = toys.clients(points, seed)
    everything = (np.concatenate([x for x, _ in client_points]), np.concatenate([y for _, y in client_points]))
    rows = []
    for method in ("fedavg", "fedgkd"):
        outcome = toys.train(method, federation, rounds=rounds, seed=seed)
        names = [*(f"{method}, client {k + 1}" for k in range(len(client_points))), f"{method}, global"]
        rows.append(
            [
                Regions(name, float((classes == truth).mean()), classes.reshape(toys.SIDE, toys.SIDE), *data)
                for name, classes, data in zip(names, outcome.predicted, [*client_points, everything], strict=True)
            ]
        )
    return rows


def draw_toy(out: style.Target, title: str = "", *, rounds: int = 20, points: int = 200, seed: int = 0) -> None:
    """FedAvg and FedGKD on points in the plane, two clients without a common class (Yao et al. 2022, Fig. 5)."""
    shown = title or f"share of the plane that each model gets right, after {rounds} rounds (seed {seed})"
    rows = toy_regions(rounds=rounds, points=points, seed=seed)
    toy(rows, out, extent=toys.EXTENT, title=shown)
