"""The figures of presets, drawn from their runs as the papers draw them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.analysis.final import FinalModel
from fedstill.building.data import divide, load_data
from fedstill.cli import pictures
from fedstill.cli.commands import say
from fedstill.report import style
from fedstill.report.bars import swept_bars
from fedstill.report.bubbles import swept_bubbles
from fedstill.report.confusion import confusion
from fedstill.report.curves import swept_curves
from fedstill.report.runs import value
from fedstill.running.directory import Record
from fedstill.studies.cells import Cell
from fedstill.studies.presets import METRICS, Point
from fedstill.studies.reproduce import Entry, Plan


def draw(plan: Plan, numbers: Sequence[Entry], out: Path) -> None:
    """The figure of a preset whose runs are finished, if it is one; `numbers` are those of its table."""
    if plan.preset.shows == "table":
        return
    title = f"{plan.name} ({plan.scale} scale): {plan.title}"
    _KINDS[plan.preset.shows](plan, numbers, out, title)
    say(f"saved: {out}")


def _curves(plan: Plan, numbers: Sequence[Entry], out: Path, title: str) -> None:
    """A line for each row, a panel for each point of the sweep and each metric."""
    metrics = list(dict.fromkeys(_of_ours(metric)[1] for metric in plan.preset.metrics)) or ["accuracy"]
    places: dict[str, dict[str, list[list[Record]]]] = {}
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
    """The final models; of runs with regions, those that met last and what they taught."""
    matrices: dict[str, Any] = {}
    for name, cell in _first_seeds(plan).items():
        if met := pictures.last_meeting(cell.records()):
            matrices |= {f"{name}, {region}": teacher["confusion"] for region, teacher in met["teachers"].items()}
            matrices[f"{name}, student"] = met["student"]["confusion"]
        else:
            matrices[name] = FinalModel(cell.path).confusion().tolist()
    text = _of_first_seed(f"{title}, in per cent of the class", plan)
    confusion(matrices, out, text, classes=load_data(plan.cells[0].config).classes)


def _tsne(plan: Plan, numbers: Sequence[Entry], out: Path, title: str) -> None:
    pictures.tsne_of(_models(plan), out, _of_first_seed(title, plan))


def _landscape(plan: Plan, numbers: Sequence[Entry], out: Path, title: str) -> None:
    pictures.landscape_of(_models(plan), out, _of_first_seed(title, plan))


def _distance(plan: Plan, numbers: Sequence[Entry], out: Path, title: str) -> None:
    pictures.distance_of({_name(point): [cell.path for cell in cells] for point, cells in plan.runs}, out, title)


def _toy(plan: Plan, numbers: Sequence[Entry], out: Path, title: str) -> None:
    pictures.toy_of(out, f"{title}, and the share that each model gets right (seed 0)")


_KINDS: dict[str, Callable[[Plan, Sequence[Entry], Path, str], None]] = {
    "curves": _curves,
    "bars": _bars,
    "bubbles": _bubbles,
    "confusion": _confusion,
    "tsne": _tsne,
    "landscape": _landscape,
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


def _of_model(records: Sequence[Record], model: str) -> list[Record]:
    """The rounds as another model of the same run did in them."""
    return [{"round": r["round"], **r.get("also", {}).get(model, {})} for r in records] if model else list(records)
