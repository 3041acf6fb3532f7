"""The figures of presets: each shows what its runs hold, named as in the preset."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedstill.analysis.final import FinalModel, distances
from fedstill.analysis.preset_figures import draw
from fedstill.building.config import resolve
from fedstill.building.data import divide, load_data
from fedstill.report import style
from fedstill.running.directory import RunDirectory
from fedstill.studies import presets, toy
from fedstill.studies.cells import Cell, run_cells
from fedstill.studies.presets import Preset
from fedstill.studies.reproduce import Plan, entries, plans
from support.commandline import fedstill
from support.runs import SMALL

pytestmark = pytest.mark.slow

TINY: dict[str, Any] = SMALL | {"model": "mlp", "model_options": {"hidden": [8]}, "rounds": 2, "fraction": 0.05}
ROWS: list[dict[str, Any]] = [
    {"name": "The mean", "method": "fedavg"},
    {"name": "Near it", "method": "fedprox", "settings": {"mu": 0.5}},
]
WITH_T1: list[dict[str, Any]] = [
    {"name": "All clients", "method": "fedavg+t1"},
    {"name": "Active ones", "method": "fedavg+t1", "model": "without T1"},
]
REGIONS: dict[str, Any] = {"regions": 2, "rounds_per_episode": 2, "pool": 0.2, "eval_every": 0}
ALPHAS = {"alpha": [0.5, 5.0]}
PRESETS: dict[str, dict[str, Any]] = {
    "curves": {"metrics": ["AMP", "FM"], "sweep": ALPHAS, "row": WITH_T1},
    "bars": {
        "metrics": ["best_top1"], "sweep": {"attack": ["noise", "label-flip"], "attackers": [1, 2]}, "row": ROWS,
    },
    "bubbles": {"sweep": ALPHAS, "row": ROWS[:1], "settings": TINY | {"partition": "dir_fedkf"}},
    "confusion": {"row": ROWS},
    "tsne": {"row": ROWS},
    "landscape": {"row": ROWS},
    "distance": {"row": ROWS, "settings": TINY | {"rounds": 3, "save_models": 1}},
    "toy": {},
}  # fmt: skip

SEEDS = {"curves": 2, "distance": 2}  # of others, one


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all presets here have their runs, so that each is made once."""
    return tmp_path_factory.mktemp("presets")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy of two rounds."""
    monkeypatch.setattr(toy, "train", partial(_train, toy.train))


def _train(train: Any, *words: Any, **settings: Any) -> Any:
    return train(*words, **settings | {"rounds": 2})


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is saved during a test."""
    found: list[Any] = []
    save = style.save

    def noted(figure: Figure, target: style.Target) -> Figure:
        found.append(figure)
        return save(figure, target)

    monkeypatch.setattr(style, "save", noted)
    return found


def known(monkeypatch: pytest.MonkeyPatch, shows: str, **changed: Any) -> str:
    """A preset of the test's own, by name."""
    content = {"title": "a figure", "shows": shows, "settings": TINY} | PRESETS[shows] | changed
    preset = Preset.model_validate(content)
    monkeypatch.setattr(presets, "load", {f"test/{shows}": preset}.__getitem__)
    return f"test/{shows}"


def figure(
    monkeypatch: pytest.MonkeyPatch, root: Path, drawn: list[Any], shows: str, **changed: Any
) -> tuple[Any, Plan]:
    """The figure of a preset, and where its runs are."""
    (plan,) = plans(known(monkeypatch, shows, **changed), "paper", SEEDS.get(shows, 1), root / "cells")
    run_cells(plan.cells)
    draw(plan, entries(plan), root / f"{shows}.png")
    return drawn.pop(), plan


def legend(shown: Any) -> list[str]:
    (found,) = shown.legends or [axes.get_legend() for axes in shown.axes if axes.get_legend()]
    return [text.get_text() for text in found.get_texts()]


def titles(shown: Any) -> list[str]:
    return [axes.get_title() for axes in shown.axes if axes.get_title()]


@pytest.mark.parametrize("shows", PRESETS)
def test_reproduce_draws_every_kind_of_figure_and_says_where(
    monkeypatch: pytest.MonkeyPatch, root: Path, drawn: list[Any], shows: str
) -> None:
    picture = root / f"test-{shows}-paper.png"
    answer = fedstill("reproduce", known(monkeypatch, shows), "--seeds", SEEDS.get(shows, 1), "--out", root)
    assert answer.code == 0, answer.err
    assert f"saved: {picture}" in answer.out
    assert picture.stat().st_size > 0
    assert f"test/{shows} (paper scale): a figure" in " ".join(drawn[0].get_suptitle().split())
    if shows in ("tsne", "landscape"):
        assert titles(drawn[0]) == ["The mean", "Near it"]
        assert "(seed 0)" in drawn[0].get_suptitle()


@pytest.mark.parametrize("shows", ["bubbles", "toy"])
def test_a_preset_without_runs_makes_the_folder_it_writes_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shows: str
) -> None:
    out = tmp_path / "runs" / "reproduced"
    answer = fedstill("reproduce", known(monkeypatch, shows), "--seeds", 1, "--out", out)
    assert answer.code == 0, answer.err
    assert sorted(p.suffix for p in out.iterdir()) == [".json", ".md", ".png"]


def test_every_kind_that_a_preset_may_have_is_tried_here() -> None:
    kinds = {presets.load(name).shows for name in presets.names()}
    assert kinds - {"table"} == set(PRESETS)


def test_curves_are_rows_with_a_panel_for_each_alpha_and_metric(
    monkeypatch: pytest.MonkeyPatch, root: Path, drawn: list[Any]
) -> None:
    shown, plan = figure(monkeypatch, root, drawn, "curves")
    assert titles(shown) == ["alpha 0.5", "alpha 0.5", "alpha 5", "alpha 5"]
    assert [axes.get_ylabel().split(":")[0] for axes in shown.axes] == ["AMP", "FM"] * 2
    assert legend(shown) == ["All clients", "Active ones"]
    for (point, runs), panel in zip(plan.runs, [0, 2, 0, 2], strict=True):
        line = next(line for line in shown.axes[panel].lines if line.get_label() == point.row)
        rounds = [[r["also"][point.model] if point.model else r for r in cell.records()] for cell in runs]
        assert line.get_ydata() == pytest.approx(np.mean([[r["amp"] for r in seed] for seed in rounds], axis=0))
    both = [line.get_ydata().tolist() for line in shown.axes[0].lines]
    assert both[0] != both[1], "two models of one run"


def test_bars_are_rows_by_a_number_with_a_panel_for_what_else_is_swept(
    monkeypatch: pytest.MonkeyPatch, root: Path, drawn: list[Any]
) -> None:
    shown, plan = figure(monkeypatch, root, drawn, "bars")
    assert titles(shown) == ["attack noise", "attack label-flip"]
    assert {axes.get_xlabel() for axes in shown.axes} == {"attackers"}
    assert shown.axes[0].get_ylabel() == "best global test accuracy"
    assert legend(shown) == ["The mean", "Near it"]
    heights = {axes.get_title(): [[bar.get_height() for bar in c] for c in axes.containers] for axes in shown.axes}
    for entry in entries(plan):
        row, place = [r["name"] for r in ROWS].index(entry.row), [1, 2].index(entry.at["attackers"])
        assert entry.ours is not None
        assert heights[f"attack {entry.at['attack']}"][row][place] == pytest.approx(entry.ours.mean)


def test_bars_of_a_preset_without_a_sweep_are_its_rows(
    monkeypatch: pytest.MonkeyPatch, root: Path, drawn: list[Any]
) -> None:
    shown, _ = figure(monkeypatch, root, drawn, "bars", sweep={}, metrics=["top1"])
    (axes,) = shown.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["The mean", "Near it"]


def test_bubbles_show_each_alphas_partition_and_train_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drawn: list[Any]
) -> None:
    answer = fedstill("reproduce", known(monkeypatch, "bubbles"), "--seeds", 2, "--out", tmp_path)
    assert answer.code == 0, answer.err
    assert "0 runs" in answer.out
    assert not (tmp_path / "cells").exists()
    (shown,) = drawn
    assert titles(shown) == ["alpha 0.5", "alpha 5"]
    areas = []
    for axes, alpha in zip(shown.axes, (0.5, 5.0), strict=True):
        config = resolve({"method": "fedavg", **TINY, "partition": "dir_fedkf", "alpha": alpha})
        counts = divide(config, load_data(config)).class_counts()
        bubbles = axes.collections[0]
        assert bubbles.get_offsets().tolist() == np.argwhere(counts).tolist()
        areas.append(bubbles.get_sizes().max() / counts.max())
    assert areas[0] == pytest.approx(areas[1]), "one scale for both"


def test_confusion_of_runs_is_that_of_the_final_models(
    monkeypatch: pytest.MonkeyPatch, root: Path, drawn: list[Any]
) -> None:
    shown, plan = figure(monkeypatch, root, drawn, "confusion")
    assert [title.split(":")[0] for title in titles(shown)] == ["The mean", "Near it"]
    for (_, runs), axes in zip(plan.runs, shown.axes, strict=True):
        counts = FinalModel(runs[0].path).confusion()
        assert axes.images[0].get_array().data == pytest.approx(counts / counts.sum(axis=1, keepdims=True))


def test_confusion_of_regions_is_that_of_the_teachers_and_their_student(
    monkeypatch: pytest.MonkeyPatch, root: Path, drawn: list[Any]
) -> None:
    rows = [{"name": "LKD", "method": "lkd", "settings": {"server_epochs": 1}}]
    shown, plan = figure(monkeypatch, root, drawn, "confusion", row=rows, settings=TINY | REGIONS)
    assert [title.split(":")[0] for title in titles(shown)] == ["LKD, region 1", "LKD, region 2", "LKD, student"]
    episode = plan.cells[0].records()[-1]["episode"]
    told = [*episode["teachers"].values(), episode["student"]]
    assert [title.split(": ")[1] for title in titles(shown)] == [f"{model['accuracy']:.1%}" for model in told]


def test_distances_are_rows_and_end_before_the_final_model(
    monkeypatch: pytest.MonkeyPatch, root: Path, drawn: list[Any]
) -> None:
    shown, plan = figure(monkeypatch, root, drawn, "distance")
    assert legend(shown) == ["The mean", "Near it"]
    for (_, runs), line in zip(plan.runs, shown.axes[0].lines, strict=True):
        expected = np.mean([[distances(cell.path)[r] for r in (1, 2)] for cell in runs], axis=0)
        assert line.get_ydata() == pytest.approx(expected)


# --- runs that were made without the models that a figure needs -------------------------------------------------------


def cell(path: Path, **settings: Any) -> Cell:
    return Cell(path, resolve({"method": "lkd", **TINY, **REGIONS, "server_epochs": 1, **settings}))


def test_a_run_that_did_not_keep_the_models_that_are_wanted_is_run_again(tmp_path: Path) -> None:
    run_cells([cell(tmp_path / "run")])
    before = (tmp_path / "run/model.safetensors").read_bytes()
    for wanted in ({"save_models": 2}, {"save_models": 1}, {"save_teachers": True}):
        again = cell(tmp_path / "run", **wanted)
        assert not again.finished, wanted
        run_cells([again])
        assert again.finished
        assert (tmp_path / "run/model.safetensors").read_bytes() == before
    kept = RunDirectory.open(tmp_path / "run", lock=False)
    assert list(kept.saved_models()) == [1, 2], "what an earlier figure asked for is still there"
    assert list(kept.saved_episodes()) == [1]


def test_a_run_that_kept_more_than_is_wanted_is_used_as_it_is(tmp_path: Path) -> None:
    run_cells([cell(tmp_path / "run", save_models=1, save_teachers=True)])
    for wanted in ({}, {"save_models": 1}, {"save_models": 2}, {"save_teachers": True}):
        assert cell(tmp_path / "run", **wanted).finished, wanted
