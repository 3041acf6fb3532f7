"""Figures: each shows what the run directories hold."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from PIL import Image
from safetensors.torch import load_file

import fedstill as library
from fedstill.analysis.figures import bar_series, draw_bars
from fedstill.analysis.final import FinalModel, distances, filter_normalised
from fedstill.analysis.runs import distinct_names, group_runs, read_runs
from fedstill.analysis.tables import results_table
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.cli import figures
from fedstill.core.errors import SettingError
from fedstill.core.files import read_json
from fedstill.core.weights import FlatNet
from fedstill.metrics.records import scalars, value_of
from fedstill.report import style
from fedstill.report.bars import bars
from fedstill.report.bubbles import bubbles
from fedstill.report.clients import clients
from fedstill.report.confusion import confusion
from fedstill.report.curves import curves, seed_curves
from fedstill.report.landscape import line, plane
from fedstill.report.runs import RunData, flat
from fedstill.report.series import line_of
from fedstill.report.toy import Regions, toy
from fedstill.report.tsne import tsne
from fedstill.studies import toy as toys
from support.commandline import SHORT, fedstill, interrupted_after, metrics, model, run, short
from support.runs import SMALL

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods under two alphas, with two seeds each; every round's model is kept."""
    folder = tmp_path_factory.mktemp("figures")
    for method in ("fedavg", "fedprox"):
        for alpha in (0.5, 5.0):
            for seed in (0, 1):
                train(method, folder / f"{method}-{alpha}-{seed}", alpha=alpha, seed=seed, save_models=1, rounds=2)
    return folder


def train(method: str, out: Path, **settings: Any) -> Path:
    """A short run without the command line and its picture."""
    library.run(method, out=out, **(SHORT | settings))
    return out


def texts(svg: Path | bytes) -> list[str]:
    """What is written in an SVG: the backend notes each text beside the glyphs it draws."""
    content = svg.decode() if isinstance(svg, bytes) else svg.read_text()
    return [t.strip().replace("&gt;", ">").replace("&lt;", "<") for t in re.findall(r"<!-- (.*?) -->", content, re.S)]


def drawn(kind: str, *words: object, out: Path) -> list[str]:
    """The texts of a figure that the command line draws."""
    answer = fedstill("figure", kind, *words, "--out", out)
    assert answer.code == 0, answer.err
    assert f"picture: {out}" in answer.out
    return texts(out)


def refused(kind: str, *words: object) -> str:
    answer = fedstill("figure", kind, *words)
    assert answer.code == 2
    return answer.err


def bare(path: str, **settings: Any) -> RunData:
    return RunData(Path(path), flat({"method": "fedavg", "seed": 0, "alpha": 0.1} | settings), [])


# --- which runs are one ---


def test_runs_that_differ_in_the_seed_alone_are_one_group() -> None:
    found = group_runs([bare("a"), bare("b", seed=2), bare("c", alpha=1.0), bare("d", seed=1)])
    assert [[r.path.name for r in group.runs] for group in found] == [["a", "d", "b"], ["c"]]
    assert [group.title for group in found] == ["fedavg, alpha 0.1 (3 seeds)", "fedavg, alpha 1"]


def test_settings_that_change_no_number_do_not_divide_a_group() -> None:
    pair = [bare("a", workers=1), bare("b", workers=2, seed=1)]
    assert len(group_runs(pair, free=())) == 2
    assert len(group_runs(pair)) == 1


def test_the_same_run_twice_is_not_two_seeds() -> None:
    found = group_runs([bare("a"), bare("b"), bare("c", seed=1)])
    assert [group.title for group in found] == ["fedavg [a] (2 seeds)", "fedavg [b]"]


def test_a_methods_own_setting_is_in_its_name_only_where_it_tells_two_runs_apart() -> None:
    mixed = [bare("a"), bare("b", method="fedprox", hyper={"mu": 0.1})]
    assert distinct_names(mixed, but={"seed"}) == ["fedavg", "fedprox"]
    swept = [*mixed, bare("c", method="fedprox", hyper={"mu": 1.0})]
    assert distinct_names(swept, but={"seed"}) == ["fedavg", "fedprox, mu 0.1", "fedprox, mu 1"]


# --- from Python ---


def test_a_notebook_reads_groups_and_draws_runs_without_the_command_line(runs: Path, tmp_path: Path) -> None:
    groups = group_runs(read_runs([runs]))
    assert [len(group.runs) for group in groups] == [2] * 4
    series = bar_series(groups, "alpha")
    summary = read_json(runs / "fedprox-5.0-1" / "summary.json")
    assert series["fedprox"]["5"][1] == summary["final_accuracy"]
    assert results_table({"one": summary}).rows[0][2] == f"{100 * summary['final_accuracy']:.2f} %"
    draw_bars(groups, tmp_path / "bars.svg", by="alpha")
    assert {"fedavg", "fedprox", "0.5", "5"} <= set(texts(tmp_path / "bars.svg"))


# --- drawing ---


def test_a_band_reaches_one_deviation_to_both_sides_of_the_mean_or_over_the_range() -> None:
    seeds = [[{"round": r, "accuracy": a} for r in (1, 2)] for a in (0.2, 0.4, 0.6)]
    for band, low, high in (("std", 0.2, 0.6), ("range", 0.2, 0.6)):
        figure: Any = seed_curves({"x": seeds}, io.BytesIO(), metrics=["accuracy"], band=band)  # type: ignore[arg-type]
        panel = figure.axes[0]
        assert panel.lines[0].get_ydata() == pytest.approx([0.4, 0.4])
        corners = panel.collections[0].get_paths()[0].vertices
        assert (corners[:, 1].min(), corners[:, 1].max()) == pytest.approx((low, high))
    wider: Any = seed_curves({"x": [seeds[0], seeds[0], seeds[2]]}, io.BytesIO(), metrics=["accuracy"], band="std")
    top = wider.axes[0].collections[0].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(np.mean([0.2, 0.2, 0.6]) + np.std([0.2, 0.2, 0.6], ddof=1))


def test_a_band_ends_where_no_number_can_be() -> None:
    seeds = [[{"round": 1, "fm": a, "accuracy": 1 - a, "gain": 0.1 - a}] for a in (0.0, 0.0, 0.3)]
    deviation = np.std([0.0, 0.0, 0.3], ddof=1)
    assert line_of(seeds, "fm").low == [0.0], "a variance is not negative"
    assert line_of(seeds, "accuracy").high == [1.0], "nor is a share above one"
    assert line_of(seeds, "gain").low == pytest.approx([0.0 - deviation]), "what can be negative may be"


def test_curves_leave_out_rounds_without_the_number_and_label_their_axes() -> None:
    records: list[dict[str, Any]] = [{"round": 1, "loss": 2.0}, {"round": 2, "loss": None}, {"round": 3, "loss": 1.0}]
    figure: Any = curves({"one": records}, io.BytesIO(), metrics=["loss", "bytes_up"], title="a title")
    assert figure.axes[0].lines[0].get_xdata().tolist() == [1, 3]
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("round", "global test loss")
    assert figure.get_suptitle() == "a title"


def test_a_number_inside_a_record_is_found_by_its_path() -> None:
    assert value_of({"also": {"without T1": {"accuracy": 0.5}}}, "also.without T1.accuracy") == 0.5
    assert value_of({"accuracy": None, "evaluated": True}, "evaluated") is None


def test_bars_are_means_with_deviations_and_differ_in_colour_and_hatch() -> None:
    series = {"a": {"0.1": [0.2, 0.4], "1": [0.5, 0.5]}, "b": {"1": [0.7]}}
    figure: Any = bars(series, io.BytesIO(), by="alpha", metric="accuracy")
    panel = figure.axes[0]
    heights = [patch.get_height() for patch in panel.patches]
    assert heights == pytest.approx([0.3, 0.5, 0.7])
    assert len({to_hex(p.get_facecolor()) for p in panel.patches}) == len({p.get_hatch() for p in panel.patches}) == 2
    assert [t.get_text() for t in panel.get_xticklabels()] == ["0.1", "1"]
    spans = [s[:, 1] for c in panel.collections for s in c.get_segments()]
    assert spans[0] == pytest.approx(0.3 + np.array([-1, 1]) * np.std([0.2, 0.4], ddof=1))
    assert panel.get_xlabel() == "alpha"


def test_clients_are_sorted_and_amp_is_weighed_by_samples() -> None:
    figure: Any = clients({"x": [[(10, 0.9), (30, 0.1), (10, 0.5)]]}, io.BytesIO())
    sorted_line = next(each for each in figure.axes[0].lines if len(each.get_xdata()) == 3)
    assert sorted_line.get_ydata() == pytest.approx([0.1, 0.5, 0.9])
    amp = (10 * 0.9 + 30 * 0.1 + 10 * 0.5) / 50
    assert sorted_line.get_label() == f"AMP {100 * amp:.1f} %, WLP 10.0 %: x"
    assert any(
        each.get_ydata() == pytest.approx([amp, amp]) for each in figure.axes[0].lines if len(each.get_ydata()) == 2
    )


def test_clients_of_seeds_are_averaged_by_rank() -> None:
    figure: Any = clients({"x": [[(1, 0.8), (1, 0.2)], [(1, 0.0), (1, 1.0)]]}, io.BytesIO())
    mean = next(each for each in figure.axes[0].lines if len(each.get_xdata()) == 2 and each.get_marker() == "o")
    assert mean.get_ydata() == pytest.approx([0.1, 0.9])


def test_confusion_names_its_classes_and_shows_shares_of_rows() -> None:
    figure: Any = confusion({"m": [[3, 1], [0, 4]]}, io.BytesIO(), classes=("cat", "dog"))
    panel = figure.axes[0]
    assert panel.get_title() == "m: 87.5%"
    assert [t.get_text() for t in panel.get_yticklabels()] == ["cat", "dog"]
    assert sorted(t.get_text() for t in panel.texts) == ["100", "25", "75"]


def test_tsne_marks_every_class_and_many_classes_differ_in_colour_or_marker() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(30) % 3
    features = rng.normal(size=(30, 5)) + 20 * np.eye(5)[labels]
    figure: Any = tsne({"m": (features, labels)}, io.BytesIO(), classes=("x", "y", "z"))
    groups = [c.get_offsets() for c in figure.axes[0].collections if len(c.get_offsets())]
    assert [len(points) for points in groups] == [10, 10, 10]
    spread = max(np.ptp(points, axis=0).max() for points in groups)
    centres = [points.mean(axis=0) for points in groups]
    gap = min(float(np.linalg.norm(centres[i] - centres[j])) for i in range(3) for j in range(i))
    assert gap > spread / 2, "classes that lie apart are drawn apart"
    assert len({(style.colour(i), style.marker(i)) for i in range(100)}) == 100


def test_landscapes_share_one_scale_and_put_direction_1_to_the_right() -> None:
    steps = np.linspace(-1, 1, 5)
    rising = np.tile(np.exp(steps)[:, None], (1, 5))  # grows along direction 1, the first axis
    figure: Any = plane({"a": rising, "b": 10 * rising}, steps, io.BytesIO())
    scales = {c.norm.vmin for p in figure.axes[:2] for c in p.collections if c.get_array() is not None}
    assert len(scales) == 1
    first = figure.axes[0].collections[1]  # contour lines
    vertical = [p.vertices for p in first.get_paths() if len(p.vertices)]
    assert vertical
    assert all(np.ptp(v[:, 0]) < 1e-6 < np.ptp(v[:, 1]) for v in vertical)
    along: Any = line({"a": rising[:, 0]}, steps, io.BytesIO())
    assert along.axes[0].lines[0].get_ydata().tolist() == rising[:, 0].tolist()


def test_the_toy_shows_each_models_regions_and_accuracy() -> None:
    said = np.zeros((4, 4), np.int64)
    regions = Regions("m, global", 0.25, said, np.zeros((4, 2), np.float32), np.arange(4))
    figure: Any = toy([[regions, regions], [regions, regions]], io.BytesIO(), extent=4.0)
    assert [panel.get_title() for panel in figure.axes] == ["m, global: 25%"] * 4


def test_the_same_figure_gives_the_same_bytes(tmp_path: Path) -> None:
    records = {"x": [{"round": 1, "accuracy": 0.5}]}
    for ending in (".svg", ".pdf", ".png"):
        files = [tmp_path / f"{name}{ending}" for name in "ab"]
        for file in files:
            curves(records, file, metrics=["accuracy"])
        assert files[0].read_bytes() == files[1].read_bytes()


# --- for papers ---


def test_a_figure_has_the_width_and_the_font_size_of_a_paper() -> None:
    records = {"x": [{"round": r, "loss": 1 / r} for r in (1, 2)]}
    sizes: dict[bool, list[float]] = {}
    for paper in (False, True):
        with style.using(style.Look(width=3.4, font_size=5.0) if paper else style.Look()):
            figure: Any = curves(records, io.BytesIO(), metrics=["loss"], title="a title")
        panel = figure.axes[0]
        texts_ = [panel.xaxis.label, figure._suptitle, *panel.get_legend().get_texts(), *panel.get_xticklabels()]
        sizes[paper] = [text.get_fontsize() for text in texts_]
    assert figure.get_size_inches()[0] == 3.4
    assert sizes[True][0] == 5.0, "of the label of an axis"
    assert sizes[True] == pytest.approx([size / 2 for size in sizes[False]]), "and the others in proportion"


@pytest.mark.parametrize("kind", ["curves", "clients", "bars"])
def test_lines_have_the_order_and_the_labels_of_a_paper(kind: str) -> None:
    named = ["a, mu 1", "a, mu 2", "b"]
    with style.using(style.Look(order=["b", "a, mu 2"], labels={"a": "Alpha", "a, mu 2": "Two"})):
        if kind == "curves":
            figure: Any = curves({n: [{"round": 1, "loss": 1.0}] for n in named}, io.BytesIO(), metrics=["loss"])
        elif kind == "clients":
            figure = clients({n: [[(1, 0.5)]] for n in named}, io.BytesIO())
        else:
            figure = bars({n: {"1": [0.5]} for n in named}, io.BytesIO(), by="lr", metric="accuracy")
    legend = figure.axes[0].get_legend() or figure.legends[0]
    assert [text.get_text().rpartition(": ")[2] for text in legend.get_texts()][:3] == ["b", "Two", "Alpha, mu 1"]


def test_the_command_line_has_the_options_for_papers(runs: Path, tmp_path: Path) -> None:
    words = ("--width", 3.4, "--font-size", 7, "--order", "fedprox", "--label", "fedavg=FedAvg")
    out = tmp_path / "c.png"
    assert fedstill("figure", "curves", runs / "fedavg-0.5-0", runs / "fedprox-0.5-0", *words, "--out", out).code == 0
    assert Image.open(out).width == round(3.4 * 130)
    found = drawn("bars", runs, "--by", "alpha", *words, out=tmp_path / "b.svg")
    assert found.index("fedprox") < found.index("FedAvg")
    assert "there is no such name" in refused("curves", runs, "--label", "fedkf=x", "--out", out)
    assert "write it as NAME=LABEL" in refused("curves", runs, "--label", "fedavg", "--out", out)
    assert "two names would be" in refused("clients", runs, "--label", "fedavg=A", "--label", "fedprox=A", "--out", out)


def test_sites_with_names_are_named_in_figures() -> None:
    rng = np.random.default_rng(0)
    wards = [(rng.normal(size=(20, 3)).astype("float32"), np.arange(20) % 2) for _ in range(3)]
    federation = library.from_clients(wards, names=("ward 1", "ward 2", "ward 3"))
    figure: Any = bubbles(federation, io.BytesIO())
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["ward 1", "ward 2", "ward 3"]
    served: Any = clients({"x": [[(5, 0.9), (5, 0.1)]]}, io.BytesIO(), names=("well", "badly"))
    assert [text.get_text() for text in served.axes[0].get_xticklabels()] == ["badly", "well"]


# --- from run directories ---


def test_curves_of_runs_name_methods_settings_and_seeds(runs: Path, tmp_path: Path) -> None:
    found = drawn("curves", runs, "--metric", "accuracy", "--metric", "wlp", out=tmp_path / "c.svg")
    assert {f"{m}, alpha {a} (2 seeds)" for m in ("fedavg", "fedprox") for a in ("0.5", "5")} <= set(found)
    assert {"round", "global test accuracy", "WLP: accuracy of the worst client"} <= set(found)
    assert any(text.startswith("fashion-mini, 4 clients, dirichlet") for text in found)


def test_every_kind_of_picture_can_be_written(runs: Path, tmp_path: Path) -> None:
    for ending, begins in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        out = tmp_path / f"c{ending}"
        assert fedstill("figure", "curves", runs / "fedavg-0.5-0", "--out", out).code == 0
        assert out.read_bytes().startswith(begins)
    assert Image.open(tmp_path / "c.png").width > 800


def test_bars_by_a_setting_have_a_series_for_each_method(runs: Path, tmp_path: Path) -> None:
    found = drawn("bars", runs, "--by", "alpha", "--which", "best", out=tmp_path / "b.svg")
    assert {"fedavg", "fedprox", "0.5", "5", "alpha", "best global test accuracy"} <= set(found)
    summaries = [read_json(runs / f"fedprox-5.0-{s}" / "summary.json") for s in (0, 1)]
    mean = np.mean([s["best_accuracy"] for s in summaries])
    assert f"{100 * mean:.1f}" in found
    named = drawn("bars", runs, "--by", "method", "--metric", "fm", out=tmp_path / "m.svg")
    assert "final FM: variance over clients" in named


def test_bars_refuse_what_does_not_vary_and_what_is_not_there(runs: Path) -> None:
    assert "they do in method, alpha" in refused("bars", runs, "--by", "lr")
    assert "--metric bogus" in refused("bars", runs, "--by", "alpha", "--metric", "bogus")


def test_curves_say_which_numbers_there_are(runs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "groups"
    shutil.copytree(runs / "fedavg-0.5-0", copy)
    records = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    own = {"groups": {"phones": {"accuracy": 0.5}}, "metrics": {"top5": 0.9}}
    (copy / "metrics.jsonl").write_text("".join(json.dumps(record | own) + "\n" for record in records))
    said = "".join(refused("curves", copy, "--metric", "bogus").split())
    listed = said.partition("thosethereare:")[2].split(",")
    assert {"accuracy", "groups.phones.accuracy", "top5"} <= set(listed)
    assert not any(name.startswith("per_class") for name in listed)
    for name in ("groups.phones.accuracy", "top5"):
        drawn("curves", copy, "--metric", name, out=tmp_path / "c.svg")


def test_bubbles_show_the_partition_of_the_run(runs: Path, tmp_path: Path) -> None:
    found = drawn("bubbles", runs / "fedavg-0.5-0", out=tmp_path / "b.svg")
    assert {"client", "class", "Trouser", "0", "3"} <= set(found)
    assert "4" not in found, "there are four clients"


def test_the_final_model_is_the_one_that_was_tested(runs: Path, tmp_path: Path) -> None:
    path = runs / "fedprox-0.5-0"
    matrix = FinalModel(path).confusion()
    accuracy = metrics(path)[-1]["accuracy"]
    assert matrix.trace() / matrix.sum() == pytest.approx(accuracy)
    found = drawn("confusion", path, runs / "fedprox-0.5-1", out=tmp_path / "c.svg")
    assert f"fedprox, seed 0: {accuracy:.1%}" in found
    assert {"Ankle boot", "predicted class", "true class"} <= set(found)


@pytest.mark.parametrize("buffers", ["average", "drop"])
def test_the_final_model_of_a_network_with_batchnorm_is_read_back(tmp_path: Path, buffers: str) -> None:
    path = train("fedavg", tmp_path / "r", model="resnet8", rounds=1, buffers=buffers, model_options={"norm": "batch"})
    matrix = FinalModel(path).confusion()
    assert matrix.trace() / matrix.sum() == pytest.approx(metrics(path)[-1]["accuracy"])


def test_a_network_of_ones_own_is_given_again(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10))
    result = library.run("fedavg", model=net, out=tmp_path / "r", **{k: v for k, v in SMALL.items() if k != "model"})
    with pytest.raises(SettingError, match="model of your own"):
        FinalModel(tmp_path / "r")
    final = FinalModel(tmp_path / "r", model=net)
    assert final.features(final.samples(20)).shape == (20, 8)
    matrix = final.confusion()
    assert matrix.trace() / matrix.sum() == pytest.approx(result.records[-1]["accuracy"])
    assert "of your own" in refused("confusion", tmp_path / "r", "--out", tmp_path / "c.png")


def test_tsne_draws_runs_side_by_side(runs: Path, tmp_path: Path) -> None:
    pair = (runs / "fedavg-0.5-0", runs / "fedprox-0.5-0")
    found = drawn("tsne", *pair, "--samples", 40, out=tmp_path / "t.svg")
    assert {"fedavg", "fedprox", "Ankle boot", "t-SNE of the features of 40 test samples"} <= set(found)


def test_a_direction_has_filters_as_long_as_the_models_and_leaves_biases() -> None:
    setup = prepare(resolve(SMALL))
    net: FlatNet = setup.task.build()
    weights = net.read()
    direction = filter_normalised(net, weights, torch.Generator().manual_seed(0))
    for entry in net.entries:
        ours, theirs = entry.view(direction), entry.view(weights)
        if len(entry.shape) < 2:
            assert not ours.any()
        else:
            torch.testing.assert_close(ours.flatten(1).norm(dim=1), theirs.flatten(1).norm(dim=1))


def test_the_middle_of_a_landscape_is_the_loss_of_the_final_model(runs: Path, tmp_path: Path) -> None:
    path = runs / "fedavg-0.5-0"
    final = FinalModel(path)
    losses = list(final.losses_around(final.samples(), [-0.5, 0.0, 0.5], 2))
    assert len(losses) == 9
    assert losses[4] == pytest.approx(metrics(path)[-1]["loss"], rel=1e-5)
    small = ("--points", 4, "--samples", 20)
    found = drawn("landscape", path, runs / "fedavg-5.0-0", *small, out=tmp_path / "l.svg")
    assert {"fedavg, alpha 0.5", "fedavg, alpha 5", "the final model", "test loss"} <= set(found)
    assert "step along a filter-normalised direction (0: the final model)" in drawn(
        "landscape", path, "--dim", 1, *small, out=tmp_path / "l1.svg"
    )


def test_distance_ends_at_the_final_model(runs: Path, tmp_path: Path) -> None:
    path = runs / "fedprox-5.0-1"
    found = distances(path)
    assert list(found) == [1, 2]
    assert found[2] == 0
    first, end = load_file(path / "models" / "round-000001.safetensors"), model(path)
    assert found[1] == pytest.approx(sum(float((first[n] - end[n]).double().square().sum()) for n in end))
    assert "squared distance to the final model" in drawn("distance", runs, out=tmp_path / "d.svg")


def test_clients_of_a_run_have_the_amp_and_wlp_of_its_last_round(runs: Path, tmp_path: Path) -> None:
    path = runs / "fedavg-5.0-0"
    last = metrics(path)[-1]
    found = drawn("clients", path, out=tmp_path / "c.svg")
    assert f"AMP {100 * last['amp']:.1f} %, WLP {100 * last['wlp']:.1f} %: fedavg" in found


def test_the_toy_trains_two_clients_without_a_common_class(tmp_path: Path) -> None:
    held = toys.clients(80, seed=3)
    assert [sorted(set(y.tolist())) for _, y in held] == [[0, 1], [2, 3]]
    found = drawn("toy", "--rounds", 2, "--points", 40, "--seed", 3, out=tmp_path / "t.svg")
    titles = [text.partition(":")[0] for text in found if text.endswith("%")]
    expected = [f"{m}, {who}" for m in ("fedavg", "fedgkd") for who in ("client 1", "client 2", "global")]
    assert titles == expected


def test_the_toy_gives_the_same_regions_for_the_same_seed() -> None:
    data = toys.federation(60, seed=0)
    once, again = (toys.train("fedavg", data, rounds=1, seed=0).predicted for _ in range(2))
    assert len(once) == 3, "two local models and the global one"
    assert all(np.array_equal(a, b) for a, b in zip(once, again, strict=True))


# --- what is refused ---


def test_a_figure_that_cannot_be_drawn_says_why(runs: Path, tmp_path: Path) -> None:
    assert "is not a run directory and holds none" in refused("curves", tmp_path)
    assert "a picture ends in" in refused("curves", runs, "--out", tmp_path / "c.gif")
    plain = train("fedavg", tmp_path / "plain", rounds=2)
    assert "save_models=1" in refused("distance", plain, "--out", tmp_path / "d.png")
    with interrupted_after(1):
        assert fedstill("run", "fedavg", *short(out=tmp_path / "part")).code == 130
    for kind in ("clients", "confusion"):
        assert re.search("not finished|has not ended", refused(kind, tmp_path / "part", "--out", tmp_path / "x.png"))


def test_help_names_every_kind() -> None:
    kinds = {
        command.name or command.callback.__name__ for command in figures.app.registered_commands if command.callback
    }
    assert kinds == {"curves", "bars", "bubbles", "confusion", "tsne", "landscape", "distance", "clients", "toy"}
    out = fedstill("figure", "--help").out
    assert all(kind in out for kind in kinds)


# --- models of past rounds ---


def test_models_are_kept_at_the_interval_and_are_what_the_run_had(tmp_path: Path) -> None:
    path = train("fedavg", tmp_path / "r", rounds=4, save_models=2)
    assert sorted(p.name for p in (path / "models").iterdir()) == [
        "round-000002.safetensors",
        "round-000004.safetensors",
    ]
    halfway = train("fedavg", tmp_path / "half", rounds=2)
    kept = load_file(path / "models" / "round-000002.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in model(halfway).items())
    assert not (halfway / "models").exists()


def test_force_clears_models_and_events_of_the_run_before(tmp_path: Path) -> None:
    path = tmp_path / "r"
    assert fedstill("run", "fedavg", *short(out=path, rounds=2, save_models=1), "--tensorboard").code == 0
    run("fedavg", path, rounds=1, force=True)
    assert not list((path / "models").glob("*"))
    assert not list((path / "tensorboard").glob("*"))


def test_an_interrupted_run_has_no_gap_in_its_models(tmp_path: Path) -> None:
    with interrupted_after(2):
        assert fedstill("run", "fedavg", *short(out=tmp_path / "r", save_models=1), "--tensorboard").code == 130
    assert fedstill("resume", tmp_path / "r").code == 0
    whole = train("fedavg", tmp_path / "whole", save_models=1)
    for round_ in (1, 2, 3):
        name = f"models/round-{round_:06d}.safetensors"
        assert (tmp_path / "r" / name).read_bytes() == (whole / name).read_bytes()
    assert metrics(tmp_path / "r") == metrics(whole), "TensorBoard changes no number either"


# --- TensorBoard ---


def test_tensorboard_gets_the_numbers_of_every_round(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = tmp_path / "r"
    with interrupted_after(2):
        assert fedstill("run", "fedavg", *short(out=path), "--tensorboard").code == 130
    assert fedstill("resume", path, "--tensorboard").code == 0
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    rows = metrics(path)
    for name in ("accuracy", "loss", "amp", "bytes_up"):
        found = events.Scalars(name)
        assert [event.step for event in found] == [1, 2, 3]
        assert [event.value for event in found] == pytest.approx([row[name] for row in rows], rel=1e-6)
    first = events.Scalars("per_class/T-shirt/top")  # by the class's name
    assert [event.value for event in first] == pytest.approx([r["per_class"][0] for r in rows])


def test_without_the_package_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    answer = fedstill("run", "fedavg", *short(out=tmp_path / "r"), "--tensorboard")
    assert answer.code == 2
    assert "fedstill[tensorboard]" in answer.err
    assert not (tmp_path / "r").exists()


def test_scalars_leave_out_what_is_no_number() -> None:
    record = {
        "round": 3,
        "evaluated": True,
        "accuracy": None,
        "fm": 0.1,
        "episode": {"confusion": [[1, 2]], "bytes": 4},
    }
    assert dict(scalars(record)) == {"fm": 0.1, "episode/bytes": 4.0}
