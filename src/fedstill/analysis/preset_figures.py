"""The figures of presets, drawn from their runs as the papers draw them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from fedstill.analysis import figures
from fedstill.analysis.figures import Progress, episode_matrices
from fedstill.analysis.final import FinalModel
from fedstill.analysis.runs import last_evaluated_episode
from fedstill.building.data import dataset_in, divide, load_data
from fedstill.metrics.records import RoundRecord
from fedstill.report import style
from fedstill.report.bars import swept_bars
from fedstill.report.bubbles import swept_bubbles
from fedstill.report.confusion import confusion
from fedstill.report.curves import swept_curves
from fedstill.report.runs import value
from fedstill.studies.cells import Cell
from fedstill.studies.presets import METRICS, Point
from fedstill.studies.reproduce import Entry, Plan


def draw(plan: Plan, numbers: Sequence[Entry], out: Path, progress: Progress | None = None) -> bool:
    """Draw a preset whose runs are finished, if it is a figure, and tell whether it is.

    `numbers` are those of its table; `progress` shows how far a long computation is.
    """
    shows = plan.preset.shows
    if shows == "table":
        return False
    title = f"{plan.name} ({plan.scale} scale): {plan.title}"
    if shows == "landscape":
        shown: dict[str, Any] = {"progress": progress} if progress else {}
        figures.draw_landscape(_models(plan), out, _of_first_seed(title, plan), **shown)
    else:
        _KINDS[shows](plan, numbers, out, title)
    return True


def _curves(plan: Plan, numbers: Sequence[Entry], out: Path, title: str) -> None:
    """A line for each row, a panel for each point of the sweep and each metric."""
    metrics = list(dict.fromkeys(_of_ours(metric)[1] for metric in plan.preset.metrics)) or ["accuracy"]
    places: dict[str, dict[str, list[list[RoundRecord]]]] = {}
    for point, cells in plan.runs:
        lines = places.setdefault(_place(point.at), {})
        lines[point.row] = [_of_model(cell.records(), point.model) for cell in cells]
    swept_curves(places, out, metrics=metrics, title=title)


def _bars(plan: Plan, numbers: Sequence[Entry], out: Path, title: str) -> None:
    """A bar for each row, by the first swept setting that is a number, or by row; a panel for what else is swept."""
    which, metric = _of_ours(numbers[0].metric)
    shown = [e for e in numbers if e.metric == numbers[0].metric]
    swept = list(shown[0].at)
    by = next((key for key in swept if isinstance(shown[0].at[key], int | float)), swept[0] if swept else "method")
    panels: dict[str, dict[str, dict[str, list[float]]]] = {}
    for entry in shown:
        panel = panels.setdefault(_place({key: v for key, v in entry.at.items() if key != by}), {})
        series, place = (entry.row, value(entry.at[by])) if swept else (style.label(metric), entry.row)
        panel.setdefault(series, {})[place] = [v for v in entry.values if v is not None]
    swept_bars(panels, out, by=by.replace("_", " "), metric=metric, which=which, title=title)


def _bubbles(plan: Plan, numbers: Sequence[Entry], out: Path, title: str) -> None:
    """A panel for each point of the sweep. It takes no run."""
    configs = {_place(point.at): point.config for point, _ in plan.runs}
    swept_bubbles({place: divide(config, load_data(config)) for place, config in configs.items()}, out, title)


def _confusion(plan: Plan, numbers: Sequence[Entry], out: Path, title: str) -> None:
    """The final models; of runs with regions, those of the last episode's end and what they taught."""
    matrices: figures.Matrices = {}
    for name, cell in _first_seeds(plan).items():
        if episode := last_evaluated_episode(cell.records()):
            matrices |= {f"{name}, {region}": matrix for region, matrix in episode_matrices(episode).items()}
            matrices[f"{name}, student"] = episode["student"]["confusion"]
        else:
            matrices[name] = FinalModel(cell.path).confusion().tolist()
    text = _of_first_seed(f"{title}, in per cent of the class", plan)
    confusion(matrices, out, text, classes=dataset_in(load_data(plan.cells[0].config)).classes)


def _tsne(plan: Plan, numbers: Sequence[Entry], out: Path, title: str) -> None:
    figures.draw_tsne(_models(plan), out, _of_first_seed(title, plan))


def _distance(plan: Plan, numbers: Sequence[Entry], out: Path, title: str) -> None:
    figures.draw_distance({_name(point): [cell.path for cell in cells] for point, cells in plan.runs}, out, title)


def _toy(plan: Plan, numbers: Sequence[Entry], out: Path, title: str) -> None:
    figures.draw_toy(out, f"{title}, and the share that each model gets right (seed 0)")


_KINDS: dict[str, Callable[[Plan, Sequence[Entry], Path, str], None]] = {
    "curves": _curves,
    "bars": _bars,
    "bubbles": _bubbles,
    "confusion": _confusion,
    "tsne": _tsne,
    "distance": _distance,
    "toy": _toy,
}


def _models(plan: Plan) -> dict[str, FinalModel]:
    return {name: FinalModel(cell.path) for name, cell in _first_seeds(plan).items()}


def _first_seeds(plan: Plan) -> dict[str, Cell]:
    """One run for each row: a figure of a model is of one model."""
    return {_name(point): cells[0] for point, cells in plan.runs}


def _of_first_seed(title: str, plan: Plan) -> str:
    return f"{title} (seed {plan.cells[0].config.seed})"


def _name(point: Point) -> str:
    return ", ".join(filter(None, [point.row, _place(point.at)]))


def _place(at: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value(setting)}" for key, setting in at.items())


def _of_ours(metric: str) -> tuple[str, str]:
    """A paper's metric in our words: "final", "best" or nothing, and the name it has in a round."""
    which, _, name = METRICS[metric][0].partition("_")
    return (which, name) if which in ("final", "best") else ("", METRICS[metric][0])


def _of_model(records: Sequence[RoundRecord], model: str) -> list[RoundRecord]:
    """The rounds as another model of the same run did in them."""
    if not model:
        return list(records)
    return [cast(RoundRecord, {"round": r["round"], **r.get("also", {}).get(model, {})}) for r in records]
