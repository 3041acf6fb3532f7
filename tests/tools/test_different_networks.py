"""tools/different_networks.py: the picture and the table of the runs that have ended."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from fedstill.report import style

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    module = importlib.import_module("different_networks")
    monkeypatch.setattr(module, "COLLECTED", tmp_path / "collected.json")
    return module


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    figures: list[Figure] = []
    save = style.save

    def noting(figure: Figure, target: style.Target) -> Figure:
        saved = save(figure, target)
        saved.draw_without_rendering()  # sizes of texts are again those of the figure, not of the file
        figures.append(saved)
        return saved

    monkeypatch.setattr(style, "save", noting)
    return figures


def made_up(tool: ModuleType, out: Path, seeds: int, spread: float = 0.01) -> None:
    """Summaries as close together as those of real runs: own models in one corner, groups' in another."""
    rng = np.random.default_rng(0)
    for i, methods in enumerate(tool.KINDS.values()):
        for method in methods:
            middle = rng.normal((0.3, 0.91) if i < 2 else (0.43, 0.85), (0.02, 0.006))
            for seed in range(seeds):
                accuracy, own = rng.normal(middle, spread)
                path = tool.place(out, method, seed)
                path.mkdir(parents=True)
                groups = {name: {"final_accuracy": accuracy} for name in tool.NETWORKS}
                costs = {"bytes_down": 1e6 * seed, "bytes_up": 2e6}
                scores = {"final_accuracy": accuracy, "final_local_accuracy": own, "final_amp": own, "final_wlp": 0.0}
                summary = {**scores, **costs, "groups": groups}
                (path / "summary.json").write_text(json.dumps(summary))
                (path / "metrics.jsonl").write_text('{"seconds": 1.0}\n{"seconds": 3.0}\n{"seconds": 4.0}\n')


def test_every_method_is_of_one_kind(tool: ModuleType) -> None:
    listed = [method for methods in tool.KINDS.values() for method in methods]
    assert sorted(listed) == sorted(tool.METHODS)


@pytest.mark.parametrize("seeds", [1, 3])
def test_every_method_has_a_point_whose_name_is_in_the_frame_and_covers_no_other(
    tool: ModuleType, tmp_path: Path, seeds: int, drawn: list[Figure]
) -> None:
    made_up(tool, tmp_path / "runs", seeds)
    tool.picture(tmp_path / "runs", range(3), tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    (panel,) = drawn[0].axes
    texts = panel.findobj(Annotation)
    assert sorted(text.get_text() for text in texts) == sorted(tool.METHODS)
    boxes = [text.get_window_extent() for text in texts]
    assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
    frame = panel.get_window_extent()
    assert all(frame.x0 <= b.x0 and b.x1 <= frame.x1 and frame.y0 <= b.y0 and b.y1 <= frame.y1 for b in boxes)
    markers = [
        panel.transData.transform(point) for dots in panel.collections for point in np.asarray(dots.get_offsets())
    ]
    assert not [box for box in boxes for marker in markers if box.contains(*marker)]
    legend = drawn[0].legends[0]
    assert [text.get_text() for text in legend.get_texts()] == list(tool.KINDS)
    assert ("standard deviation" in legend.get_title().get_text()) == (seeds > 1)


def test_points_are_means_over_the_seeds_that_are_there(tool: ModuleType, tmp_path: Path, drawn: list[Figure]) -> None:
    for seed, accuracy in ((0, 0.3), (2, 0.5)):
        path = tool.place(tmp_path, "fedgkd across", seed)
        path.mkdir()
        (path / "summary.json").write_text(json.dumps({"final_accuracy": accuracy, "final_local_accuracy": 0.9}))
        (path / "metrics.jsonl").write_text('{"seconds": 1.0}\n' * 2)
    tool.picture(tmp_path, [0, 1, 2], tmp_path / "drawn.png")
    (point,) = np.asarray(drawn[0].axes[0].collections[0].get_offsets())
    assert tuple(point) == pytest.approx((0.4, 0.9))


def test_without_runs_there_is_nothing_to_draw(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no run that has ended"):
        tool.picture(tmp_path, [0], tmp_path / "drawn.png")


def test_runs_that_were_collected_count_on_another_machine(tool: ModuleType, tmp_path: Path) -> None:
    made_up(tool, tmp_path / "here", 2)
    expected = tool.table(tmp_path / "here", [0, 1])
    assert "| 3.0 | 2 |" in expected, "the seconds of the fastest round, and how many seeds"
    tool.collect(tmp_path / "here", [0, 1])
    assert tool.table(tmp_path / "elsewhere", [0, 1]) == expected
    tool.carry_out(tmp_path / "elsewhere", "local", 1, "")  # which is done
    assert not (tmp_path / "elsewhere").exists()
