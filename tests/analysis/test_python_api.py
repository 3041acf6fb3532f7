"""The Python API around `fedstill.run`: settings, results, comparisons, lists and tables, as they are promised."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import io
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import fedstill
from fedstill.core import custom
from fedstill.core.errors import users_line_in
from fedstill.core.table import frame
from fedstill.metrics.statistics import spread
from support.commandline import fedstill as command
from support.runs import SMALL, numbers

ROOT = Path(__file__).parents[2]
TINY: dict[str, Any] = SMALL | {"model": "mlp", "model_options": {"hidden": [8]}, "rounds": 2}


@dataclass(frozen=True)
class Mine(fedstill.FedAvg):
    """Nothing new."""

    name: ClassVar[str] = "mine"
    strength: float = 1.0


# --- settings ---


def test_a_config_gives_the_run_of_its_settings_as_keywords() -> None:
    config = fedstill.Config(method="fedprox", hyper={"mu": 0.1}, **TINY)
    by_config, by_keywords = fedstill.run(config), fedstill.run("fedprox", mu=0.1, **TINY)
    assert numbers(by_config) == numbers(by_keywords)
    assert by_config.config == by_keywords.config
    assert fedstill.run(config, rounds=1).summary["rounds"] == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"learning_rate": 0.1}, "unknown setting 'learning_rate'; it is called 'lr' here"),
        ({"n_clients": 3}, "it is called 'clients' here"),
        ({"local_epochs": 3}, "it is called 'epochs' here"),
        ({"mu": 0.1}, "unknown setting 'mu'; it belongs to fedprox, moon"),
        ({"byzantine": 1}, r"it belongs to \+krum"),
        ({"roundz": 3}, "did you mean 'rounds'"),
        ({"qqqqq": 3}, "'fedstill settings' lists all"),
        ({"lr": -1}, "lr = -1: should be greater than 0"),
    ],
)
def test_what_is_wrong_with_a_setting_is_one_line_for_configs_and_keywords(
    settings: dict[str, Any], reason: str
) -> None:
    for make in (fedstill.Config, fedstill.run):
        with pytest.raises(fedstill.SettingError, match=reason) as error:
            make(**settings)
        assert "\n" not in str(error.value)


def test_the_keywords_are_those_of_config_and_the_methods() -> None:
    spec = importlib.util.spec_from_file_location("keywords_tool", ROOT / "tools/keywords.py")
    assert spec
    assert spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def words(text: str) -> str:
        return re.sub(r"\s+|[,()]", "", text)  # however the formatter breaks its lines

    assert words(tool.PAGE.read_text()) == words(tool.text()), "run: python tools/keywords.py"


def test_every_synonym_is_no_setting_and_stands_for_one() -> None:
    from fedstill.building.suggestions import _SYNONYMS

    assert set(_SYNONYMS.values()) <= set(fedstill.Config.model_fields)
    assert not set(_SYNONYMS) & set(fedstill.Config.model_fields)


# --- results ---


@pytest.fixture(scope="module")
def result() -> fedstill.Result:
    return fedstill.run("fedavg+t1", **TINY)


def test_a_result_is_short_to_look_at(result: fedstill.Result) -> None:
    final = f"{100 * result.summary['final_accuracy']:.2f} %"
    assert repr(result).startswith("<fedstill.Result fedavg+t1, seed 0: 2 rounds, best ")
    assert len(repr(result)) < 200
    assert final in repr(result)
    assert f"<td>{final}</td>" in result._repr_html_()


def test_frames_hold_the_numbers_of_rounds_and_clients(
    result: fedstill.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = fedstill.run("fedavg+t1", **TINY, out=tmp_path / "run")
    with open(tmp_path / "run/clients.csv", newline="") as file:
        rows = list(csv.DictReader(file))

    def check(rounds: Any, clients: Any) -> None:
        assert list(rounds["round"]) == [1, 2]
        assert list(rounds["accuracy"]) == [r["accuracy"] for r in result.records]
        assert list(rounds["also.without T1.fm"]) == [r["also"]["without T1"]["fm"] for r in result.records]
        assert list(clients["train_samples"]) == [int(row["train_samples"]) for row in rows]
        measured = [float(row["accuracy"] or "nan") for row in rows]
        np.testing.assert_allclose(clients["accuracy"], measured, atol=1e-6)

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pandas", None)
        without = result.frame()
        check(without, kept.clients())
        assert isinstance(without["accuracy"], np.ndarray)
    pandas = pytest.importorskip("pandas")
    assert isinstance(result.frame(), pandas.DataFrame)
    check(result.frame(), kept.clients())


def test_a_result_draws_and_reports_itself(result: fedstill.Result, tmp_path: Path) -> None:
    assert result.plot()._repr_png_().startswith(b"\x89PNG"), "as a notebook shows it"
    result.plot("accuracy", "also.without T1.accuracy", path=tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(fedstill.SettingError, match="no round has 'colour'"):
        result.plot("colour")
    page = result.report(tmp_path / "report.html").read_text()
    assert f"{100 * result.summary['final_accuracy']:.2f} %" in page
    assert page.count("<figure data-chart=") == 2


def test_what_is_shown_of_an_object_is_short() -> None:
    data = fedstill.from_arrays(np.zeros((10, 3)), np.arange(10) % 2)
    assert repr(data) == "<fedstill.Dataset arrays: 8 training and 2 test samples of shape (3,), 2 classes>"
    assert repr(data.train) == "<fedstill.Split: 8 samples of shape (3,)>"
    held = fedstill.from_clients([(np.zeros((10, 3)), np.arange(10) % 2)] * 2)
    assert repr(held).startswith("<fedstill.Federation of ")
    assert len(repr(held)) < 100
    assert repr(fedstill.Config(lr=0.1, hyper={})) == "Config(method='fedavg', lr=0.1)"
    assert repr(fedstill.list_settings("lr")) == str(fedstill.list_settings("lr"))


# --- comparisons ---


@pytest.mark.slow
def test_a_comparison_has_the_numbers_of_its_runs_in_every_form(tmp_path: Path) -> None:
    methods = ["fedavg", "fedprox"]
    found = fedstill.compare(methods, seeds=2, mu=0.5, out=tmp_path / "c", jobs=1, **TINY)
    own: dict[str, dict[str, Any]] = {"fedavg": {}, "fedprox": {"mu": 0.5}}
    alone = {method: [fedstill.run(method, **TINY, seed=s, **own[method]) for s in (0, 1)] for method in methods}
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["method"] for row in rows] == methods
    finals = {m: spread([r.summary["final_accuracy"] for r in runs]) for m, runs in alone.items()}
    for row in rows:
        assert float(row["final_accuracy"]) == finals[row["method"]].mean
        assert float(row["final_accuracy_std"]) == finals[row["method"]].std
    best = max(finals.values(), key=lambda s: s.mean)
    cell = f"{100 * best.mean:.2f} ± {100 * best.std:.2f} %"
    assert f"**{cell}**" in found.to_markdown()
    assert rf"\textbf{{{cell.replace('±', '$' + chr(92) + 'pm$').replace('%', chr(92) + '%')}}}" in found.to_latex()
    assert all(rule in found.to_latex() for rule in (r"\toprule", r"\midrule", r"\bottomrule"))
    assert list(found.frame()["seeds"]) == [2, 2]
    runs, rounds = found.runs(), found.rounds()
    assert list(runs["method"]) == ["fedavg", "fedavg", "fedprox", "fedprox"]
    assert list(runs["seed"]) == [0, 1, 0, 1]
    assert list(runs["final_accuracy"]) == [r.summary["final_accuracy"] for m in methods for r in alone[m]]
    assert list(rounds["round"]) == [1, 2] * 4
    assert list(rounds["amp"]) == [record["amp"] for m in methods for r in alone[m] for record in r.records]
    shown = command("show", tmp_path / "c", "--format", "csv").out
    assert shown.split() == found.to_csv().split()
    assert "Cost" in command("show", tmp_path / "c").out
    assert command("show", tmp_path / "c", "--format", "latex").out.strip() == found.tables()[0].to_latex().strip()


@pytest.mark.slow
def test_objects_can_be_compared_and_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, 5, generator=g), torch.arange(120) % 3
    data, net = fedstill.from_arrays(x.numpy(), y.numpy()), torch.nn.Linear(5, 3)
    settings: dict[str, Any] = {"clients": 3, "rounds": 2, "epochs": 1, "alpha": 5.0, "participation": 1.0}
    found = fedstill.compare(["fedavg", Mine()], data=data, model=net, sweep={"lr": [0.1, 0.5]}, **settings)
    (overview,) = found.overview()
    assert [row[:2] for row in overview.rows] == [
        ("lr = 0.1", "fedavg"),
        ("", "mine"),
        ("lr = 0.5", "fedavg"),
        ("", "mine"),
    ]
    assert "mine" in found.report(tmp_path / "report.html").read_text()
    found.plot("train_loss", path=tmp_path / "curves.svg", labels={"mine": "Ours"})
    assert "Ours" in (tmp_path / "curves.svg").read_text()
    with pytest.raises(fedstill.SettingError, match="no round has 'colour'"):
        found.plot("colour")
    table = found.frame()
    assert list(overview.frame()["final_accuracy"]) == list(table["final_accuracy"])
    assert list(table["method"]) == ["fedavg", "mine"] * 2
    assert list(table["lr"]) == [0.1, 0.1, 0.5, 0.5]
    assert table["final_accuracy"][0] == table["final_accuracy"][1], "it is FedAvg"
    alone = fedstill.run("fedavg", data=data, model=net, lr=0.5, **settings)
    assert table["final_accuracy"][2] == alone.summary["final_accuracy"]
    folder = found.path
    assert folder.exists()
    del found
    assert not folder.exists()


def hit(labels: Any, probabilities: Any) -> float:
    return float((probabilities.argmax(1) == labels).mean())


@pytest.mark.slow
def test_a_comparison_has_the_metrics_it_was_given_and_goes_on_with_them(tmp_path: Path) -> None:
    def compared() -> fedstill.Comparison:
        return fedstill.compare(["fedavg", "fedprox"], metrics=["auroc", hit], out=tmp_path / "c", jobs=1, **TINY)

    found = compared()
    (table,) = found.metrics()
    numbers = table.frame()
    assert list(numbers["metric"]) == ["auroc", "hit"] * 2
    finals = found.frame()["final_accuracy"]
    assert list(numbers["test set"][1::2]) == pytest.approx(list(finals)), "the share that is right is the accuracy"
    assert compared().metrics()[0].rows == table.rows, "finished runs are used again"


@pytest.mark.slow
def test_callbacks_of_a_comparison_are_each_runs_own_and_what_they_stopped_is_finished(tmp_path: Path) -> None:
    def compared(*callbacks: fedstill.Callback) -> fedstill.Comparison:
        return fedstill.compare(["fedavg"], seeds=2, out=tmp_path / "c", callbacks=callbacks, **TINY | {"rounds": 3})

    stop = fedstill.EarlyStopping("train_loss", patience=1, min_delta=99)
    found = compared(stop, fedstill.CSVLog())
    assert list(found.runs()["rounds"]) == [2, 2]
    assert stop.best is None, "this one heard nothing"
    table = found.costs()[0]
    assert table.rows[0][table.columns.index("rounds")] == "2.0"
    for cell in found.rows[0][0].cells:
        with open(cell.path / "rounds.csv", newline="") as file:
            assert [float(row["per_class.0"]) for row in csv.DictReader(file)] == [
                record["per_class"][0] for record in cell.records()
            ]
    written = (tmp_path / "c/fedavg-s0/summary.json").stat().st_mtime_ns
    compared(stop)
    assert (tmp_path / "c/fedavg-s0/summary.json").stat().st_mtime_ns == written
    assert list(compared().runs()["rounds"]) == [3, 3], "without them it goes on"
    (tmp_path / "mine.py").write_text("import fedstill\nstop = fedstill.EarlyStopping('train_loss', 1, 99)\n")
    words = ["compare", "fedavg", "--rounds", 3, "--clients", 4, "--set", "fraction=0.05", "--set", "epochs=1"]
    answer = command(*words, "--out", tmp_path / "d", "--callback", f"{tmp_path}/mine.py:stop")
    assert answer.code == 0, answer.err
    assert json.loads((tmp_path / "d/fedavg/summary.json").read_text())["stopped_by"] == "EarlyStopping"
    with pytest.raises(fedstill.SettingError, match="all runs would write there"):
        compared(fedstill.CSVLog(tmp_path / "rounds.csv"))


@pytest.mark.parametrize(
    ("methods", "settings", "reason"),
    [
        ([], {}, "at least one method"),
        (["fedavg", "fedavg"], {}, "fedavg is named twice; a dict gives names"),
        ([Mine(), Mine(strength=2.0)], {}, "mine is named twice"),
        ("fedavg", {}, "methods is 'fedavg'; give a list"),
        ([Mine], {}, r"write Mine\(…\)"),
        (["fedavg"], {"seeds": [1, 2]}, r"seeds = \[1, 2\]"),
        (["fedavg"], {"seeds": 0}, "seeds = 0: at least 1"),
        (["fedavg", "feddyn"], {"mu": 1}, "'mu'; it belongs to fedprox"),
        (["fedavg"], {"sweep": {"seed": [1, 2]}}, "sweep of seed"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused(methods: Any, settings: Any, reason: str) -> None:
    with pytest.raises(fedstill.SettingError, match=reason):
        fedstill.compare(methods, **settings)


# --- methods that are objects ---


def test_settings_of_a_method_that_is_an_object_are_changed_by_keywords_and_sweeps() -> None:
    prox = fedstill.compose("fedprox", "t1", mu=0.0)
    changed = fedstill.run(prox, mu=0.5, **TINY)
    assert numbers(changed) == numbers(fedstill.run("fedprox+t1", mu=0.5, **TINY))
    assert changed.config.method == "<FedProx+T1>"
    assert changed.config.hyper["mu"] == 0.5
    with pytest.raises(fedstill.SettingError, match="unknown setting 'muu'; did you mean 'mu'"):
        fedstill.run(prox, hyper={"muu": 1}, **TINY)
    with pytest.raises(fedstill.SettingError, match=r"mu = -1: should be greater"):
        fedstill.run(prox, mu=-1, **TINY)
    with pytest.raises(fedstill.SettingError, match=r"write Mine\(…\)"):
        fedstill.run(Mine, **TINY)  # type: ignore[arg-type]


def test_objects_and_names_compose_to_the_method_of_the_names() -> None:
    found = fedstill.compose(Mine(strength=2.0), "feddf", "t1", server_steps=3)
    assert [type(part).__name__ for part in found.parts()] == ["Mine", "FedDF", "T1"]
    assert fedstill.compose("fedprox+t1") == fedstill.compose("fedprox", "t1")
    after = fedstill.compose("fedgkd", fedstill.compose("feddf", server_steps=3))
    assert [part.name for part in after.parts()] == ["fedgkd", "feddf"]
    with pytest.raises(fedstill.SettingError, match="'mine' is a client side and comes first"):
        fedstill.compose("feddf", Mine())
    with pytest.raises(fedstill.SettingError, match="did you mean 'server_steps'"):
        fedstill.compose(Mine(), "feddf", server_step=3)


# --- lists and tables ---


def test_lists_name_what_there_is_and_partitions_what_they_hold() -> None:
    assert {"fedavg", "fedkf", "+t1"} <= {row[0] for row in fedstill.list_methods().rows}
    assert fedstill.methods().to_markdown() == fedstill.list_methods().to_markdown()  # type: ignore[operator]
    wire = fedstill.list_methods("scaffold", model="mlp").frame()
    assert list(wire["way"]) == ["down", "down", "up", "up"]
    assert [row[0] for row in fedstill.list_settings().rows] == list(fedstill.Config.model_fields)
    assert "fedkf/table5" in {row[0] for row in fedstill.list_presets().rows}
    owned = fedstill.from_arrays(np.zeros((12, 3)), np.arange(12) % 2, client=np.arange(12) // 4)
    assert fedstill.partition(owned).config.partition == "natural", "as a run has it"
    assert fedstill.partition((np.zeros((40, 3)), np.arange(40) % 2), clients=2, alpha=9.0).federation.clients == 2
    held = fedstill.partition(clients=5, alpha=0.5, seed=3)
    assert held.frame()["samples"].sum() == held.federation.sizes.sum()
    assert held.to_markdown().count("\n") == 2 + 5


def test_markup_is_escaped_and_missing_cells_are_empty() -> None:
    table = fedstill.Table("T", ("", "50 % & more"), rows=[("a_b", "x|y"), ("c",)])
    assert r"a\_b & x|y \\" in table.to_latex()
    assert r"50 \% \& more" in table.to_latex()
    assert r"| a_b | x\|y |" in table.to_markdown()
    assert "| c |  |" in table.to_markdown()
    assert "50 % &amp; more" in table._repr_html_()
    with pytest.raises(fedstill.SettingError, match="format = 'pdf'"):
        table.formatted("pdf")  # type: ignore[arg-type]


def test_missing_numbers_of_a_frame_are_nan() -> None:
    found = frame([{"a": 1, "b": None}, {"a": 2, "b": 0.5, "c": "x"}])
    assert list(found["a"]) == [1, 2]
    assert np.isnan(found["b"][0])
    assert found["c"][1] == "x"


# --- entry points, composition ---


def test_packages_register_methods_networks_and_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(**named: Any) -> dict[str, Any]:
        return {name: SimpleNamespace(load=partial(lambda made: made, made)) for name, made in named.items()}

    def net(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(int(np.prod(shape)), classes))

    def load() -> fedstill.Dataset:
        return fedstill.from_arrays(np.random.default_rng(0).random((60, 4)), np.arange(60) % 2)

    found = {"methods": points(theirs=Mine), "models": points(flat=net), "datasets": points(noise=load)}
    monkeypatch.setattr(custom, "installed", lambda kind: found[kind])
    settings: dict[str, Any] = {"clients": 2, "rounds": 1, "alpha": 9.0, "engine": "inline"}
    result = fedstill.run("theirs+t1", data="noise", model="flat", hyper={"strength": 2.0}, **settings)
    assert result.config.hyper["strength"] == 2.0
    assert sum(p.numel() for p in result.model.parameters()) == 4 * 2 + 2
    assert "theirs" in {row[0] for row in fedstill.list_methods().rows}


def test_a_package_that_registers_what_cannot_be_loaded_is_named_and_does_not_hide_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = importlib.metadata.EntryPoint("lost", "no_such_package:Method", "fedstill.methods")
    monkeypatch.setattr(custom, "installed", lambda kind: {"lost": point} if kind == "methods" else {})
    listed = {row[0]: row[1] for row in fedstill.list_methods().rows}
    assert "registers as no_such_package:Method, cannot be loaded" in listed["lost"]
    assert "fedavg" in listed
    with pytest.raises(fedstill.SettingError, match="'mu'; it belongs to fedprox"):
        fedstill.run("fedavg", mu=1)


def test_an_error_in_a_package_that_offers_a_method_shows_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("theirs", "theirs.methods:Method", "fedstill.methods")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [point] if "methods" in group else [])
    packages = "/x/lib/python3.11/site-packages"
    text = f'File "{packages}/theirs/methods.py", line 7\nFile "{packages}/torch/nn.py", line 9\n'
    assert users_line_in(text) == f"{packages}/theirs/methods.py, line 7"
    assert users_line_in('File "/home/ann/lib/mine.py", line 3\n') == "/home/ann/lib/mine.py, line 3"
    assert users_line_in(f'File "{json.__file__}", line 3\n') == ""


def test_entry_points_are_looked_for_in_three_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def entry_points(*, group: str) -> list[Any]:
        asked.append(group)
        return []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    custom.installed.cache_clear()
    for kind in ("methods", "models", "datasets"):
        assert custom.installed(kind) == {}
    custom.installed.cache_clear()
    assert asked == ["fedstill.methods", "fedstill.models", "fedstill.datasets"]


# --- what is promised ---


def test_dir_lists_what_is_public_and_all_of_it_has_documentation() -> None:
    assert set(dir(fedstill)) == {*fedstill.__all__, "__version__"}
    assert [name for name in fedstill.__all__ if not getattr(fedstill, name).__doc__] == []


def test_a_name_that_is_not_there_says_what_is() -> None:
    with pytest.raises(AttributeError, match=r"fedstill.list_settings\(\) lists") as error:
        fedstill.settings  # type: ignore[attr-defined]  # noqa: B018
    assert error.value.name == "settings", "by which Python suggests others"


def test_the_page_lists_every_public_name_once() -> None:
    page = (ROOT / "docs/api.md").read_text()
    named = re.findall(r"^\| `(\w+)` \|", page, flags=re.M)
    assert sorted(named) == sorted(fedstill.__all__)


@pytest.mark.slow
def test_a_users_script_is_checked_by_its_types(tmp_path: Path) -> None:
    """With `mypy --strict` and public names alone; wrong keywords are found where they stand."""
    good = (ROOT / "tests/support/user_script.py").read_text()
    assert re.findall(r"^(?:from|import) fedstill\S*", good, flags=re.M) == ["import fedstill"]
    (tmp_path / "wrong.py").write_text(
        "import fedstill\n"
        "fedstill.run('fedavg', rouns=3)\n"
        "fedstill.run('fedavg', rounds='three')\n"
        "fedstill.Config(buffers='keep')\n"
        "fedstill.compare('fedavg', seeds='many')\n"
        "fedstill.Callbacks\n"
    )
    (tmp_path / "good.py").write_text(good)
    words = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]  # `make check` has filled its cache
    scripts = [tmp_path / "good.py", tmp_path / "wrong.py"]
    done = subprocess.run([*words, *scripts], cwd=ROOT, capture_output=True, text=True, check=False)
    errors = re.findall(r"(\w+)\.py:(\d+): error", done.stdout)
    assert errors == [("wrong", str(line)) for line in range(2, 7)], done.stdout + done.stderr


@pytest.mark.slow
def test_the_users_script_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tests/support/user_script.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stopped_by"] == "EarlyStopping"
