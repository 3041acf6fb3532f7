"""The presets' files: every name in them is known, every printed number is found, and key settings are the papers'."""

from __future__ import annotations

import fnmatch
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from fedstill import data, models
from fedstill.building.config import Config
from fedstill.core.errors import SettingError
from fedstill.core.seeds import numpy_rng
from fedstill.data import partition
from fedstill.methods import registry
from fedstill.studies import presets
from fedstill.studies.presets import METRICS, Point, Preset, Scale
from fedstill.studies.reproduce import plans

SCALES: tuple[Scale, ...] = get_args(Scale)
NEAR = {
    "fedkf/table5",
    "f2l/table2-mnist",
    "dafkd/table1-fmnist",
    "fedgkd/figure4-cifar10",
    "fedhyb/table4-svhn",
}
TEACHERS = ("Teacher 1", "Teacher 2", "Teacher 3")
# At the smaller scale, what two cores train in minutes on data that are easy to get.
SMALL_DATA = {"mnist", "fashion-mnist", "svhn", "cifar10", "tiny-imagenet", "ag-news", "sst5"}
SMALL_MODELS = {"lenet5", "resnet8", "transformer"}

# Every table and figure of the papers but FedHyb's Table 3, on chest X-rays; and controls of ours.
LISTED = {
    "fedkf": "table3 table4 table5 figure2 figure3 control-q",
    "f2l": "table1 table2 figure2a figure2b figure2c figure3 table5 table6 table7 table8 table9 table10 control-mtkd "
    "control-steps",
    "dafkd": "table1-mnist table1-svhn table1-fmnist table1-emnist table2 table3 figure3 figure4 figure5 figure6",
    "fedgkd": "table3-cifar10 table3-cifar100 table3-tiny table4 table5 table6 table7 table8 table9 "
    "figure2 figure3 figure4 figure5",
    "fedhyb": "table1 table2 table4 figure3 figure4 figure5 figure6 figure7 figure8 figure9 figure10 control-rate",
}
# Settings of others that no paper of ours prints.
OF_NO_TABLE = {"feddf/heterogeneous", "fedproto/mnist", "htfl/cifar-10", "htfl/fashion-mnist"}
# Numbers of these tables that no preset is held against: among them one client's model on the whole test set.
WITHOUT_PRESET = {("fedhyb", "T3")}
LEFT_OUT = {("fedgkd", "Fig2", "metric", "local_top1"): 3}


@cache
def whole() -> dict[str, Preset]:
    """Every preset that has runs of its own, by name."""
    found = {name: presets.load(name) for name in presets.names()}
    return {name: preset for name, preset in found.items() if not preset.parts}


@cache
def points(name: str, scale: Scale) -> list[Point]:
    return presets.points(presets.load(name), scale)


def config(name: str, row: str, scale: Scale = "paper", **at: Any) -> Config:
    """The settings of one run: of a row, at a point of the sweep, or at its first."""
    found = [p for p in points(name, scale) if p.row == row and at.items() <= p.at.items()]
    return found[0].config


# --- that they can be read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paper", LISTED)
def test_every_table_and_figure_has_its_preset(paper: str) -> None:
    assert {f"{paper}/{name}" for name in LISTED[paper].split()} <= set(presets.names())


def test_every_preset_says_what_it_shows_and_what_the_smaller_scale_reduces() -> None:
    for name in presets.names():
        preset = presets.load(name)
        assert preset.title, name
        assert set(preset.metrics) <= set(METRICS), name
        if preset.parts:
            assert not preset.row, name
            assert set(preset.parts) <= set(whole()), name
        else:
            assert preset.cpu is not None, name
            assert preset.cpu.reduces, name


def test_every_part_belongs_to_a_preset_that_is_listed() -> None:
    listed = {f"{paper}/{name}" for paper, names in LISTED.items() for name in names.split()}
    of_others = {part for name in presets.names() for part in presets.load(name).parts}
    assert set(presets.names()) == listed | of_others | OF_NO_TABLE


def test_every_file_is_packaged() -> None:
    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["fedstill"]
    package = root / "src" / "fedstill"
    for file in [*package.glob("presets/**/*.toml"), package / "presets" / "paper_numbers.json"]:
        inside = file.relative_to(package).as_posix()
        assert any(fnmatch.fnmatch(inside, pattern) for pattern in patterns), inside


# --- that every name in them is known ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
def test_every_point_is_a_configuration_of_known_data_networks_and_partitions(scale: Scale) -> None:
    for name in whole() if scale != "near" else NEAR:
        for point in points(name, scale):
            c = point.config
            assert c.data in data.names(), name
            assert c.proxy in ("", "pool", *data.names()), name
            assert c.proxy != c.data, name
            assert c.partition in partition.names(), name
            assert set(c.model_options) <= {"feature_size", *models.options(c.model)}, name
            assert c.rounds % c.rounds_per_episode == 0 or c.flat, name
            assert point.model == "" or c.regions > 1 or c.method.endswith("+t1"), name
            if scale == "cpu":
                assert {c.data, c.proxy} - {"", "pool"} <= SMALL_DATA, name
                assert c.model in SMALL_MODELS, name


def known(method: str) -> set[str]:
    """What a row of this method may set: a setting of the run, or of its own."""
    return {*Config.model_fields, *(p.name for p in registry.hyper_parameters(method))} - {"method"}


def test_every_setting_of_a_row_is_one_of_its_method_or_of_the_run() -> None:
    for name, preset in whole().items():
        assert preset.cpu is not None
        method = {row.name: row.method for row in preset.row}
        assert len(method) == len(preset.row), f"{name}: two rows of one name"
        for row in (*preset.row, *preset.cpu.row, *(preset.near.row if preset.near else ())):
            for settings in (row.settings, *(when.settings for when in row.when)):
                assert set(settings) <= known(method[row.name]), (name, row.name)
                own = {p.name for p in registry.hyper_parameters(method[row.name])}
                assert set(settings.get("hyper", {})) <= own, (name, row.name)


def test_every_setting_for_all_rows_and_every_swept_one_is_known_to_some_row() -> None:
    for name, preset in whole().items():
        assert preset.cpu is not None
        every = set(Config.model_fields).union(*(known(row.method) for row in preset.row))
        for table in (preset.settings, preset.cpu.settings, preset.sweep, preset.teachers):
            assert set(table) <= every, name
        assert set(preset.cpu.sweep) <= set(preset.sweep), name
        assert set(preset.cpu.leave_out) <= {row.name for row in preset.row}, name


def test_what_holds_at_some_points_names_points_that_there_are() -> None:
    for name, preset in whole().items():
        for row in preset.row:
            for when in row.when:
                assert when.at, (name, row.name)
                assert all(value in preset.sweep[key] for key, value in when.at.items()), (name, row.name)


def test_a_row_that_is_chosen_must_be_there() -> None:
    with pytest.raises(SettingError, match="FedAvg"):
        presets._chosen([{"name": "FedAvg"}], ["FedAv"])


# --- the papers' numbers ----------------------------------------------------------------------------------------------


def questions(preset: Preset, name: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Every row, metric and point of a table at the paper's scale."""
    further: dict[str, list[dict[str, Any]]] = {
        "rounds_to_target": [
            *({"target_acc": target} for target in preset.targets),
            *({"target_percent": target} for target in preset.relative_targets),
        ],
        "top1_at_round": [{"round": round_} for round_ in preset.at_rounds],
    }
    asked = [(point.row, point.at) for point in points(name, "paper")]
    if preset.reteach:
        asked += [(teacher, at) for teacher in TEACHERS for _, at in asked]
    return [(row, m, at | more) for row, at in asked for m in preset.metrics for more in further.get(m, [{}])]


def test_every_number_of_a_table_with_presets_is_found_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each number is replaced by its place in its table, so that what is found tells which it was.
    places = {
        paper: {
            table: {"rows": [row | {"value": i, "unit": "", "scale": 1.0} for i, row in enumerate(content["rows"])]}
            for table, content in tables.items()
        }
        for paper, tables in presets.paper_numbers().items()
    }
    monkeypatch.setattr(presets, "paper_numbers", lambda: places)
    found: dict[tuple[str, str], list[int]] = {
        (paper, table): []
        for paper, tables in places.items()
        for table in tables
        if (paper, table) not in WITHOUT_PRESET
    }
    for name, preset in whole().items():
        if not preset.numbers:
            continue
        for row, metric, at in questions(preset, name):
            number = presets.paper_number(name, preset, row, metric, at)
            assert number is not None, (name, row, metric, at)
            found[name.partition("/")[0], preset.numbers].append(int(number["value"]))
    for (paper, table), used in found.items():
        rows = places[paper][table]["rows"]
        assert max(Counter(used).values()) == 1, (paper, table)
        unused = [row for i, row in enumerate(rows) if i not in used]
        expected = Counter({k: n for k, n in LEFT_OUT.items() if k[:2] == (paper, table)})
        for row in unused:
            reason = [k for k in expected if row.get(k[2]) == k[3]]
            assert reason, (paper, table, row)
            expected[reason[0]] -= 1
        assert not any(expected.values()), (paper, table)


@pytest.mark.parametrize(
    ("name", "row", "metric", "at", "value"),
    [  # read in the papers
        ("fedkf/table3", "FedKF", "FM", {"alpha": 0.01}, 3.099e-2),
        ("fedkf/table5", "FedAvg+T1", "WLP", {"alpha": 0.01}, 0.3366),
        ("f2l/table5", "G-student", "top1", {"lambda3": 0.0}, 0.7175),
        ("f2l/table8", "G-student", "top1", {"server_frac": 1 / 6}, 0.7948),
        ("f2l/table9", "Teacher 2", "top1", {"server_frac": 0.1}, 0.3064),
        ("dafkd/table2-svhn", "DaFKD", "rounds_to_target", {"target_acc": 60.0}, 18.67),
        ("dafkd/table3a-fmnist", "DaFKD-no-correlation", "top1", {"alpha": 0.1}, 0.6435),
        ("dafkd/table3b-emnist", "DaFKD-no-sharing", "rounds_to_target", {"target_acc": 70.0}, 45.66),
        ("fedgkd/table3-tiny", "FedGKD+", "best_top1", {"alpha": 0.1}, 0.3572),
        ("fedgkd/table5", "FedProx", "final_top1", {"participation": 0.3}, 0.7455),
        ("fedgkd/table6", "FedGKD", "top1_at_round", {"round": 100}, 0.6484),
        ("fedgkd/table7-cifar100", "FedGKD", "best_top1", {"buffer": 7, "alpha": 0.5}, 0.4244),
        ("fedgkd/table9-cifar10", "FedAvg", "best_top1", {}, 0.6922),
        ("fedgkd/table9-cifar10", "FedGKD (MSE)", "best_top1", {}, 0.7012),
        ("fedhyb/table1-svhn", "FedHyb*", "local_acc", {"clients": 50}, 0.8275),
        ("fedhyb/table2", "FedHyb", "rounds_to_target", {"target_percent": 70.0}, 7.33),
        ("fedhyb/table4-svhn", "FedHyb3", "global_acc", {}, 0.6858),
    ],
)
def test_a_number_is_the_one_that_the_paper_prints(
    name: str, row: str, metric: str, at: dict[str, Any], value: float
) -> None:
    number = presets.paper_number(name, presets.load(name), row, metric, at)
    assert number is not None
    assert number["value"] == pytest.approx(value)


# --- the papers' settings, written out here once more -----------------------------------------------------------------

FEDKF: dict[str, Any] = {
    **{"partition": "dir_fedkf", "clients": 20, "participation": 0.2, "rounds": 100, "epochs": 10, "batch_size": 64},
    **{"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "local_unit": "equal_steps", "test_fraction": 0.2},
    **{"local_test": "split", "augment": ""},
}
F2L: dict[str, Any] = {
    **{"partition": "dir_client_prior", "clients": 30, "participation": 1.0, "rounds": 200, "epochs": 5},
    **{"batch_size": 32, "optimizer": "sgd", "lr": 0.05, "rounds_per_episode": 40, "fixed_regions": False},
}
DAFKD: dict[str, Any] = {
    **{"partition": "dir_balanced", "min_size": 100, "clients": 20, "participation": 0.4, "rounds": 60, "epochs": 20},
    **{"batch_size": 32, "optimizer": "adam", "lr": 0.001, "weight_decay": 0.001, "model": "resnet11"},
    **{"local_test": "matched", "pool": 0.0, "fraction": 1.0},
}
FEDGKD: dict[str, Any] = {
    **{"partition": "dir_feddf", "clients": 20, "participation": 0.2, "rounds": 100, "epochs": 20, "batch_size": 64},
    **{"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-5, "clip": 10.0, "augment": "crop,flip"},
    **{"pool": 0.1, "model": "resnet8", "model_options": {}, "local_unit": "epochs"},
}
FEDHYB: dict[str, Any] = {
    **{"partition": "dir_balanced", "alpha": 0.5, "samples_per_client": 500, "participation": 1.0, "rounds": 50},
    **{"epochs": 5, "batch_size": 64, "optimizer": "adam", "lr": 0.001, "local_test": "matched", "proxy_size": 1000},
}
RESNET18 = {"model": "resnet18", "model_options": {"stem": "7x7", "code": 32}}
SETTINGS: dict[str, dict[str, Any]] = {
    "fedkf/table3": FEDKF | {"data": "cifar10", "fraction": 1.0, "model": "resnet8-w64", "lr": 0.1},
    "fedkf/table4": FEDKF | {"data": "cifar100", "fraction": 1.0, "model": "resnet8-w64", "lr": 0.1},
    "fedkf/table5": FEDKF | {"data": "emnist-letters", "fraction": 0.1, "model": "lenet5", "lr": 0.01},
    "f2l/table1-emnist": F2L | {"data": "emnist-balanced", "pool": 8000, "model": "lenet5", "samples_per_client": 0},
    "f2l/table1-cifar10": F2L | {"data": "cifar10", "pool": 3200, "model": "resnet18", "samples_per_client": 0},
    "f2l/table1-cifar100": F2L | {"data": "cifar100", "pool": 3200, "model": "resnet18", "samples_per_client": 0},
    "f2l/table1-cinic10": F2L | {"data": "cinic10", "pool": 3200, "model": "resnet18", "samples_per_client": 1600},
    "f2l/table1-celeba": F2L | {"data": "celeba", "pool": 10000, "model": "resnet18", "samples_per_client": 5000},
    "f2l/table2-mnist": F2L
    | {"data": "mnist", "pool": 3200, "samples_per_client": 1600, "model": "lenet5", "alpha": 0.1, "regions": 3}
    | {"rounds": 240},
    "f2l/table2-emnist": F2L
    | {"data": "emnist-byclass", "pool": 8000, "samples_per_client": 3948, "model": "lenet5", "rounds": 240},
    "f2l/table5": F2L | {"data": "emnist-balanced", "alpha": 0.1, "regions": 3, "save_teachers": True},
    "f2l/table9": F2L | {"data": "cifar10", "alpha": 0.1, "regions": 3, "save_teachers": True},
    "f2l/figure2c": F2L | {"data": "cinic10", "pool": 9000, "clients": 200, "alpha": 0.1, "fixed_regions": True},
    "dafkd/table1-mnist": DAFKD | {"data": "mnist"},
    "dafkd/table1-svhn": DAFKD | {"data": "svhn"},
    "dafkd/table1-fmnist": DAFKD | {"data": "fashion-mnist"},
    "dafkd/table1-emnist": DAFKD | {"data": "emnist-byclass", "epochs": 40},
    "dafkd/table2-emnist": DAFKD | {"data": "emnist-byclass", "epochs": 40, "alpha": 0.1},
    "dafkd/table3b-mnist": DAFKD | {"data": "mnist", "alpha": 0.1},
    "dafkd/figure4-svhn": DAFKD | {"data": "svhn", "alpha": 0.1},
    "dafkd/figure6c": DAFKD | {"data": "svhn", "alpha": 0.1},
    "fedgkd/table3-cifar10": FEDGKD | {"data": "cifar10"},
    "fedgkd/table3-cifar100": FEDGKD | {"data": "cifar100"},
    "fedgkd/table5": {k: v for k, v in FEDGKD.items() if k != "participation"} | {"data": "cifar10", "alpha": 0.5},
    "fedgkd/table6": FEDGKD | {"data": "cifar10", "alpha": 0.1},
    "fedgkd/table8": FEDGKD | {"data": "cifar10"},
    "fedgkd/table9-cifar100": FEDGKD | {"data": "cifar100", "alpha": 0.1},
    "fedgkd/figure2": FEDGKD | {"data": "cifar10", "alpha": 0.1},
    "fedhyb/table1-cifar10": FEDHYB | RESNET18 | {"data": "cifar10", "proxy": "cifar100"},
    "fedhyb/table1-cifar100": FEDHYB | RESNET18 | {"data": "cifar100", "proxy": "cifar10"},
    "fedhyb/table1-svhn": FEDHYB | {"data": "svhn", "model": "shufflenetv2", "model_options": {"code": 32}},
    "fedhyb/table2": FEDHYB | RESNET18 | {"data": "cifar10", "clients": 10},
    "fedhyb/table4-cifar10": FEDHYB | RESNET18 | {"data": "cifar10", "clients": 10},
    "fedhyb/table4-svhn": FEDHYB | {"data": "svhn", "model": "shufflenetv2", "clients": 10},
    "fedhyb/figure5": FEDHYB | RESNET18 | {"data": "cifar10", "clients": 10, "save_models": 1},
    "fedhyb/figure8": FEDHYB | RESNET18 | {"data": "cifar10", "clients": 10},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_all_rows_of_a_table_train_as_the_paper_says(name: str) -> None:
    for point in points(name, "paper"):
        assert {key: getattr(point.config, key) for key in SETTINGS[name]} == SETTINGS[name], point.row


def test_tiny_imagenet_has_batch_norm_where_there_is_a_projection_head() -> None:
    for point in points("fedgkd/table3-tiny", "paper"):
        norm = "batch" if point.row in ("MOON", "FedGKD+") else "group"
        c = point.config
        assert (c.data, c.model, c.model_options, c.rounds) == ("tiny-imagenet", "resnet50", {"norm": norm}, 30)
        assert (c.epochs, c.batch_size, c.lr, c.clients, c.participation) == (20, 64, 0.05, 20, 0.2)


SWEEPS: dict[str, dict[str, list[float]]] = {
    **{f"fedkf/{name}": {"alpha": [1, 0.1, 0.01]} for name in ("table3", "table4", "table5", "figure2", "figure3")},
    **{f"f2l/table1-{d}": {"alpha": [1, 0.1]} for d in ("emnist", "cifar10", "cifar100", "cinic10", "celeba")},
    **{f"f2l/table{n}": {"lambda3": [0, 0.001, 0.01, 0.1, 0.5, 1]} for n in (5, 6, 7)},
    **{f"f2l/table{n}": {"server_frac": [1, 1 / 2, 1 / 4, 1 / 6, 1 / 8, 1 / 10]} for n in (8, 9, 10)},
    "dafkd/table1-mnist": {"alpha": [0.05, 0.1, 1]},
    **{f"dafkd/table1-{d}": {"alpha": [0.05, 0.1, 10]} for d in ("svhn", "fmnist", "emnist")},
    **{f"dafkd/table2-{d}": {} for d in ("mnist", "svhn", "fmnist", "emnist")},
    **{f"dafkd/table3a-{d}": {"alpha": [0.05, 0.1]} for d in ("mnist", "svhn", "fmnist", "emnist")},
    **{f"fedgkd/table3-{d}": {"alpha": [1, 0.5, 0.1]} for d in ("cifar10", "cifar100", "tiny")},
    "fedgkd/table5": {"participation": [0.1, 0.2, 0.3, 0.4]},
    "fedgkd/table8": {"buffer": [1, 3, 5, 7], "alpha": [1, 0.5, 0.1]},
    **{f"fedgkd/table7-{d}": {"buffer": [1, 3, 5, 7], "alpha": [1, 0.5, 0.1]} for d in ("cifar10", "cifar100")},
    **{f"fedhyb/table1-{d}": {"clients": [10, 20, 50]} for d in ("svhn", "cifar10", "cifar100")},
    "fedhyb/figure8": {"imbalance_factor": [10, 20, 50, 100]},
}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_is_over_what_the_paper_varies(name: str) -> None:
    assert presets.load(name).sweep == SWEEPS[name]


def test_targets_and_rounds_are_those_of_the_tables() -> None:
    targets = {"mnist": [85, 90], "svhn": [55, 60], "fmnist": [60, 65], "emnist": [65, 70]}
    for dataset, wanted in targets.items():
        assert presets.load(f"dafkd/table2-{dataset}").targets == wanted
        assert presets.load(f"dafkd/table3b-{dataset}").targets == wanted
    assert presets.load("fedgkd/table6").at_rounds == [10, 20, 50, 100]
    assert presets.load("fedhyb/table2").relative_targets == [70, 80, 90, 100]


DISTILS = {"regions": 3, "Tw": 4.0, "T": 3.0, "server_epochs": 10, "server_lr": 0.001, "server_batch": 128}
KEEPS_CODE = {"z_dim": 100, "generator_lr": 0.001, "server_lr": 0.001, "batches": 40, "server_batch": 32}
# Preset, row, point of the sweep, method, and what belongs to the row alone.
ROWS: list[tuple[str, str, dict[str, Any], str, dict[str, Any]]] = [
    ("fedkf/table3", "FedProx", {}, "fedprox+t1", {"mu": 0.001}),
    ("fedkf/table4", "FedProx", {}, "fedprox+t1", {"mu": 0.0001}),
    ("fedkf/table4", "FedProx+T1", {}, "fedprox+t1", {"mu": 0.0001}),
    ("fedkf/table5", "FedProx", {}, "fedprox+t1", {"mu": 0.001}),
    ("fedkf/table3", "FedGKD", {}, "fedgkd+t1", {"gamma": 0.2, "buffer": 5}),
    ("fedkf/table4", "FedGKD+T1", {}, "fedgkd+t1", {"gamma": 0.2, "buffer": 5}),
    ("fedkf/table5", "FedGKD", {}, "fedgkd+t1", {"gamma": 0.001, "buffer": 5}),
    ("fedkf/table4", "q-FFL", {}, "qffl", {"q": 0.0001}),
    ("fedkf/table3", "FedKF", {"alpha": 1.0}, "fedkf", {"gamma": 0.001, "lambda1": 0.1, "lambda2": 0.1, "z_dim": 1000}),
    ("fedkf/table3", "FedKF", {"alpha": 0.1}, "fedkf", {"gamma": 1.0, "lambda1": 0.1, "beta": 0.001, "width": 128}),
    ("fedkf/table4", "FedKF", {"alpha": 1.0}, "fedkf", {"gamma": 1.0, "lambda1": 0.01, "lambda2": 0.1, "z_dim": 1000}),
    ("fedkf/table5", "FedKF", {"alpha": 1.0}, "fedkf", {"gamma": 1.0, "lambda1": 0.01, "lambda2": 0.1, "z_dim": 100}),
    ("f2l/table1-cifar10", "FedAvg", {}, "fedavg", {"regions": 1}),
    ("f2l/table1-emnist", "FedGen", {}, "fedgen", {"regions": 1, "hyper.alpha": 10.0, "beta": 1.0}),
    ("f2l/table1-celeba", "Fed-Distill", {}, "feddistill-plus", {"regions": 1, "c": 1.0}),
    ("f2l/table1-cinic10", "F2L", {}, "f2l", DISTILS | {"lambda3": 0.01, "epsilon": 0.1, "update": True}),
    ("f2l/table2-celeba", "Teacher 3 after", {}, "lkd", DISTILS | {"lambda3": 0.01, "update": True}),
    ("f2l/table7", "G-student", {"lambda3": 0.5}, "lkd", DISTILS | {"lambda3": 0.5, "update": False}),
    ("f2l/table10", "G-student", {"server_frac": 0.125}, "lkd", DISTILS | {"lambda3": 0.1, "server_frac": 0.125}),
    ("f2l/figure2a", "F2L-noFedAvg", {}, "lkd", {"regions": 3, "alpha": 0.1}),
    ("f2l/figure2a", "vanilla FL", {}, "fedavg", {"regions": 1}),
    ("f2l/figure2a", "flatten LKD", {}, "lkd", {"regions": 1}),
    ("f2l/figure2c", "vanilla FL", {}, "fedavg", {"late_clients": 100, "late_from": 101, "regions": 1}),
    ("f2l/figure2c", "F2L", {}, "f2l", {"regions": 6}),
    (
        "dafkd/table1-mnist",
        "FedDF",
        {},
        "feddf",
        {"proxy": "emnist-letters", "proxy_size": 40 * 32, "server_lr": 0.001},
    ),
    ("dafkd/table1-emnist", "FedDF", {}, "feddf", {"proxy": "mnist"}),
    ("dafkd/table1-fmnist", "FedDF", {}, "feddf", {"proxy": "mnist"}),
    ("dafkd/table1-svhn", "FedDF", {}, "feddf", {"proxy": "cifar10"}),
    ("dafkd/table1-mnist", "FedGen", {}, "fedgen", {"hyper.alpha": 10.0, "beta": 10.0, "generator_lr": 0.001}),
    ("dafkd/table1-emnist", "FedGen", {}, "fedgen", {"hyper.alpha": 10.0, "beta": 1.0, "generator_lr": 0.001}),
    ("dafkd/table1-svhn", "FedFTG", {}, "fedftg", {"generator_lr": 0.001, "server_lr": 0.01}),
    ("dafkd/table1-svhn", "DaFKD", {}, "dafkd", KEEPS_CODE | {"uniform": True, "variant": "full", "adv_rounds": 0}),
    ("dafkd/table3a-mnist", "DaFKD-no-sharing", {}, "dafkd", KEEPS_CODE | {"variant": "no-sharing"}),
    ("dafkd/table3b-svhn", "DaFKD-no-correlation", {}, "dafkd", KEEPS_CODE | {"variant": "no-correlation"}),
    ("dafkd/figure6b", "DaFKD", {"batch_size": 64}, "dafkd", {"server_batch": 64, "batches": 20}),
    ("fedgkd/table3-cifar10", "FedProx", {}, "fedprox", {"mu": 0.01}),
    ("fedgkd/table3-cifar100", "FedProx", {}, "fedprox", {"mu": 0.001}),
    ("fedgkd/table3-tiny", "FedProx", {}, "fedprox", {"mu": 0.001}),
    ("fedgkd/table3-cifar100", "MOON", {}, "moon", {"mu": 5.0, "tau": 0.5}),
    ("fedgkd/table3-tiny", "MOON", {}, "moon", {"mu": 1.0, "tau": 0.5}),
    ("fedgkd/table3-tiny", "FedDistill+", {}, "feddistill-plus", {"c": 0.1}),
    (
        "fedgkd/table5",
        "FedGen",
        {},
        "fedgen",
        {"hyper.alpha": 0.1, "alpha": 0.5, "beta": 0.0, "hidden": 512, "z_dim": 64},
    ),
    ("fedgkd/table3-cifar100", "FedGen", {}, "fedgen", {"hyper.alpha": 1.0, "hidden": 512}),
    ("fedgkd/table3-tiny", "FedGen", {}, "fedgen", {"hidden": 2048}),
    ("fedgkd/table3-cifar10", "FedGKD", {}, "fedgkd", {"gamma": 0.2, "buffer": 5, "regulariser": "kl"}),
    ("fedgkd/table3-tiny", "FedGKD", {}, "fedgkd", {"gamma": 0.1, "buffer": 5}),
    ("fedgkd/table3-tiny", "FedGKD-VOTE", {}, "fedgkd-vote", {"lambda": 0.1, "buffer": 5, "beta": 0.0}),
    ("fedgkd/table3-tiny", "FedGKD+", {}, "fedgkd-plus", {"gamma": 0.1, "buffer": 5}),
    ("fedgkd/table4-agnews", "FedProx", {}, "fedprox", {"mu": 0.001, "epochs": 1, "clients": 20, "lr": 1e-5}),
    ("fedgkd/table4-sst5", "FedAvg", {}, "fedavg", {"optimizer": "adam", "epochs": 3, "clients": 10, "rounds": 10}),
    ("fedgkd/table4-sst5", "MOON", {}, "moon", {"mu": 0.1, "tau": 0.5, "participation": 0.4}),
    ("fedgkd/table4-sst5", "FedGen", {}, "fedgen", {"hidden": 768, "hyper.alpha": 0.1}),
    ("fedgkd/table4-agnews", "FedGKD", {}, "fedgkd", {"gamma": 0.2, "buffer": 1, "batch_size": 64}),
    ("fedgkd/table4-sst5", "FedGKD-VOTE", {}, "fedgkd-vote", {"lambda": 0.1, "buffer": 3, "weight_decay": 0.0}),
    ("fedgkd/table9-sst5", "FedGKD (MSE)", {}, "fedgkd", {"buffer": 1, "regulariser": "mse", "epochs": 3}),
    ("fedgkd/table7-cifar10", "FedGKD", {"buffer": 3}, "fedgkd", {"gamma": 0.2, "buffer": 3}),
    ("fedgkd/table8", "FedGKD-VOTE", {"buffer": 7}, "fedgkd-vote", {"lambda": 0.1, "buffer": 7}),
    ("fedgkd/table9-cifar10", "FedGKD (MSE)", {}, "fedgkd", {"gamma": 0.2, "buffer": 1, "regulariser": "mse"}),
    ("fedgkd/table9-cifar10", "FedGKD (KL)", {}, "fedgkd", {"gamma": 0.2, "buffer": 1, "regulariser": "kl"}),
    ("fedgkd/figure3", "FedGKD", {"participation": 0.4}, "fedgkd", {"buffer": 1, "participation": 0.4}),
    ("fedhyb/table1-cifar10", "MOON", {}, "moon", {"mu": 5.0, "tau": 0.5}),
    ("fedhyb/table1-cifar100", "MOON", {}, "moon", {"mu": 1.0, "tau": 0.5}),
    ("fedhyb/table1-svhn", "FedMD", {}, "fedmd", {"weight": 0.1, "average_weights": True, "proxy": "cifar10"}),
    (
        "fedhyb/table1-svhn",
        "FedHKD",
        {},
        "fedhkd",
        {"lambda": 0.05, "gamma": 0.05, "T": 0.5, "noise": 0.0, "clip": 1.1},
    ),
    ("fedhyb/table1-svhn", "FedHKD+DaFKD", {}, "fedhkd+dafkd", {"lambda": 0.05, "z_dim": 100, "variant": "full"}),
    (
        "fedhyb/table2",
        "FedHyb",
        {},
        "fedhyb",
        {"a": 1.0, "eta": 1.0, "nu": 1.0, "M": 2, "variant": "full", "clip": 0.0},
    ),
    ("fedhyb/table2", "FedHyb", {}, "fedhyb", {"server_epochs": 1, "server_lr": 0.001, "server_batch": 64}),
    ("fedhyb/table1-cifar100", "FedHyb*", {}, "dafkd+fedhyb", {"source": "generated", "dafkd.variant": "no-distill"}),
    ("fedhyb/table4-svhn", "FedHyb1", {}, "fedhyb", {"variant": "1", "a": 1.0, "M": 2}),
    ("fedhyb/table4-svhn", "FedHyb3", {}, "fedhyb", {"variant": "3", "eta": 1.0, "nu": 1.0}),
    ("fedhyb/figure3", "logits", {}, "fedhyb", {"variant": "3", "eta": 1.0, "nu": 0.0}),
    ("fedhyb/figure9", "DaFKD", {"proxy_size": 2048}, "dafkd", {"batches": 64, "server_batch": 32}),
    ("fedhyb/figure10", "FedDF", {"attackers": 3}, "feddf", {"attack": "noise", "attackers": 3, "attack_scale": 1.0}),
]


@pytest.mark.parametrize(("name", "row", "at", "method", "own"), ROWS)
def test_a_row_has_the_coefficients_of_its_paper(
    name: str, row: str, at: dict[str, Any], method: str, own: dict[str, Any]
) -> None:
    c = config(name, row, **at)
    assert c.method == method
    run = {key: value for key, value in c.model_dump().items() if key != "hyper"}
    found = {f"hyper.{key}": value for key, value in c.hyper.items()} | c.hyper | run
    assert {key: found[key] for key in own} == own


# --- what follows from how they are written ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figure", "table"),
    [
        ("fedkf/figure3", "fedkf/table3"),
        ("fedgkd/figure4-tiny", "fedgkd/table3-tiny"),
        ("fedgkd/figure2", "fedgkd/table6"),
        ("dafkd/figure3-svhn", "dafkd/table1-svhn"),
        ("dafkd/figure4-mnist", "dafkd/table1-mnist"),
        ("dafkd/table3b-emnist", "dafkd/table3a-emnist"),
        ("f2l/figure2b", "f2l/figure2a"),
        ("fedhyb/figure4", "fedhyb/figure3"),
        ("fedhyb/table2", "fedhyb/table1-cifar10"),
    ],
)
def test_a_figure_shows_the_runs_of_its_table_and_no_others(figure: str, table: str) -> None:
    ours, theirs = ([p.config for p in points(name, "paper")] for name in (figure, table))
    assert all(c in theirs for c in ours)


@pytest.mark.slow
def test_the_smaller_scale_has_the_rows_of_the_papers_and_no_more_work() -> None:
    for name in whole():
        large, small = ({p.row for p in points(name, scale)} for scale in ("paper", "cpu"))
        assert large == small, name
        for row in large:
            before, after = config(name, row, "paper"), config(name, row, "cpu")
            assert after.rounds <= before.rounds, name
            assert after.epochs <= before.epochs, name
            assert after.clients <= before.clients, name


@pytest.mark.slow
def test_a_tables_two_scales_share_the_coefficients_of_a_method() -> None:
    reduced = {"adv_rounds", "adv_epochs", "width"}  # of generators alone
    for name, preset in whole().items():
        for row in preset.row:
            large, small = config(name, row.name, "paper"), config(name, row.name, "cpu")
            swept = set(preset.sweep)
            kept = {k: v for k, v in large.hyper.items() if k not in reduced | swept}
            assert {k: v for k, v in small.hyper.items() if k not in reduced | swept} == kept, (name, row.name)


def test_each_papers_headline_table_has_a_scale_between_the_other_two() -> None:
    assert {name for name, preset in whole().items() if preset.near} == NEAR
    assert {name.partition("/")[0] for name in NEAR} == set(LISTED)

    def work(c: Config) -> float:
        return c.rounds * c.epochs * (c.samples_per_client * c.clients or 1e4 * c.fraction)

    for name in NEAR:
        for row in {p.row for p in points(name, "near")}:
            small, near, large = (config(name, row, scale, **points(name, "near")[0].at) for scale in SCALES[::-1])
            assert work(small) <= work(near) <= work(large), (name, row)
    with pytest.raises(SettingError, match="no near scale of this preset; presets that have one: dafkd/table1-fmnist"):
        points("fedkf/table3", "near")


def test_without_attackers_there_is_no_attack_and_the_two_kinds_share_a_run() -> None:
    for row in ("FedAvg", "FedHKD", "FedDF", "DaFKD", "FedHyb"):
        noise, flip = (config("fedhyb/figure10", row, attack=kind, attackers=0) for kind in ("noise", "label-flip"))
        assert (noise.attack, noise.attackers) == ("", 0)
        assert noise == flip
        assert config("fedhyb/figure10", row, attack="label-flip", attackers=4).attack == "label-flip"


@pytest.mark.parametrize(("scale", "sizes"), [("paper", [33, 33, 34, 33, 33, 34]), ("cpu", [5] * 6)])
def test_the_clients_that_come_late_are_the_same_with_and_without_regions(scale: Scale, sizes: list[int]) -> None:
    flat, regional = (config("f2l/figure2c", row, scale) for row in ("vanilla FL", "F2L"))
    held = [region.clients for region in regional.region if isinstance(region.clients, list)]
    assert [len(clients) for clients in held] == sizes
    assert [client for clients in held for client in clients] == list(range(flat.clients))
    assert held[3][0] == flat.clients - flat.late_clients == sum(sizes[:3])
    assert [region.joins for region in regional.region] == [1, 1, 1, *[flat.late_from] * 3]


def test_the_tables_over_saved_teachers_are_taught_from_one_run() -> None:
    for number in (5, 6, 7):
        labels, share = (presets.load(f"f2l/table{n}") for n in (number, number + 3))
        assert labels.reteach
        assert share.reteach
        assert labels.teachers == share.teachers == {"lambda3": 0.01, "server_frac": 1.0}
        first = [points(f"f2l/table{n}", "paper")[0].config for n in (number, number + 3)]
        runs = [c.model_copy(update={"hyper": c.hyper | labels.teachers}) for c in first]
        assert runs[0] == runs[1]
    names = ("table5", "control-mtkd", "control-steps")
    swept, *controls = (plans(f"f2l/{name}", "cpu", 2, Path("nowhere"))[0] for name in names)
    for control in controls:
        assert {cell.path for cell in control.cells} == {cell.path for cell in swept.cells}


@pytest.mark.slow
def test_every_partition_can_be_drawn() -> None:
    sizes = {d.name: (d.train, d.classes) for d in data.describe()}
    drawn = set()
    for name in whole():
        for point in [*points(name, "paper"), *points(name, "cpu")]:
            c = point.config
            samples, classes = sizes[c.data]
            samples = int(c.fraction * samples * (1 - c.pool) if c.pool < 1 else samples - c.pool)
            settings = {"alpha": c.alpha, "samples_per_client": c.samples_per_client}
            settings |= {"min_size": c.min_size} if c.min_size >= 0 else {}
            settings |= {"min_share": c.min_share}
            key = (c.partition, samples, classes, c.clients, *settings.values())
            if key in drawn or samples > 200_000:
                continue
            drawn.add(key)
            labels = np.arange(samples) % classes
            owner = partition.partition(c.partition, labels, c.clients, numpy_rng(0, "partition"), **settings)
            held = np.bincount(owner[owner >= 0], minlength=c.clients)
            assert held.min() >= max(1, c.min_size), name
            if c.partition in ("dir_client_prior", "dir_feddf") and c.samples_per_client:
                assert (held == c.samples_per_client).all(), name
