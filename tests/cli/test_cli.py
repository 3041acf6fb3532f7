"""The command line: every command does what its help says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image

import fedstill as library
from fedstill.cli.main import app
from fedstill.data import names as dataset_names
from fedstill.methods import registry
from support.commandline import SHORT, assert_same_run, fedstill, interrupted_after, metrics, model, run, short

QUALITY = ("accuracy", "loss", "amp", "fm", "wlp", "local_accuracy")
COMMANDS = ("run", "compare", "resume", "show", "methods", "datasets", "partition")
SCRIPT = Path(sys.executable).with_name("fedstill")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three rounds, for tests that only look."""
    return run("fedavg", tmp_path_factory.mktemp("cli") / "finished")


def resolved(*words: object) -> dict[str, Any]:
    """The configuration that --dry-run prints."""
    answer = fedstill("run", *words, "--dry-run")
    assert answer.code == 0, answer.err
    return tomllib.loads(answer.out)


# --- help ---


def test_the_installed_script_answers() -> None:
    answer = subprocess.run([SCRIPT, "--help"], check=True, capture_output=True, text=True)
    assert "fedstill" in answer.stdout


def test_help_loads_none_of_the_heavy_packages() -> None:
    """So that it answers at once; `make bench` times it."""
    code = (
        "import sys; from fedstill.cli.main import main; sys.argv = ['fedstill', 'run', '--help']\n"
        "try: main()\nfinally: print({'torch', 'numpy', 'scipy', 'matplotlib'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert answer.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    answer = fedstill(command, "--help")
    assert (answer.code, answer.err) == (0, "")
    assert f"fedstill {command} " in answer.out
    assert len(answer.out.splitlines()) > 8


def test_every_argument_of_every_command_says_what_it_is() -> None:
    def arguments(command: Any) -> Iterator[Any]:
        for inner in getattr(command, "commands", {}).values():
            yield from arguments(inner)
        yield from (parameter for parameter in command.params if parameter.param_type_name == "argument")

    found = list(arguments(typer.main.get_command(app)))
    assert len(found) > len(COMMANDS)
    assert not [argument.name for argument in found if not argument.help]


def test_help_names_every_command_and_every_promised_flag() -> None:
    top, of_run = fedstill("--help").out, fedstill("run", "--help").out
    assert all(re.search(rf"\b{command}\b", top) for command in COMMANDS)
    flags = (
        "data partition alpha clients participation rounds epochs batch-size lr model seed workers engine "
        "eval-every out set dry-run force"
    )
    assert all(f"--{flag}" in of_run for flag in flags.split())


def test_without_arguments_the_help_is_shown() -> None:
    assert fedstill().out == fedstill("--help").out


# --- what a run leaves behind ---


def test_a_run_leaves_the_documented_files(finished: Path) -> None:
    expected = {"config.toml", "metrics.jsonl", "summary.json", "model.safetensors", "checkpoints", "log.txt"}
    left = {p.name for p in finished.iterdir()}
    assert expected <= left
    assert left - expected == {"clients.csv", "curves.png", "digests.json", "model.json"}
    assert not [p for p in finished.rglob("*") if p.name.endswith(".tmp")]


def test_metrics_hold_one_object_a_round_with_the_promised_names(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    promised = ("round", *QUALITY, "bytes_down", "bytes_up", "seconds")
    size = sum(t.numel() for t in model(finished).values())
    for row in rows:
        assert set(promised) <= set(row)
        assert all(isinstance(row[name], int | float) for name in promised)
        assert 0 <= row["wlp"] <= row["amp"] <= 1
        cohort = 2  # half of four clients
        assert row["bytes_down"] == row["bytes_up"] == cohort * 4 * size, "weights are float32"
        assert (row["clients"], row["dropped"]) == (cohort, 0)
        assert row["seconds"] > 0


def test_the_summary_follows_from_the_metrics(finished: Path) -> None:
    rows, summary = metrics(finished), json.loads((finished / "summary.json").read_text())
    for name, best in zip(QUALITY, (max, min, max, min, max, max), strict=True):
        values = [row[name] for row in rows]
        assert summary[f"best_{name}"] == best(values)
        assert summary[f"final_{name}"] == pytest.approx(sum(values) / 3), "the mean of the last five, here of three"
    assert summary["bytes_up"] == sum(row["bytes_up"] for row in rows)
    assert (summary["method"], summary["seed"], summary["rounds"]) == ("fedavg", 0, 3)
    assert summary["versions"]["torch"] == metadata.version("torch")  # torch.__version__ may add the build
    assert set(summary["versions"]) == {"python", "fedstill", "torch", "numpy"}


def test_the_model_can_be_loaded_and_has_the_accuracy_that_was_reported(finished: Path) -> None:
    net = library.models.build("cnn", (1, 16, 16), 10)
    net.load_state_dict(model(finished))
    data = library.load_dataset("fashion-mini", image_size=16)
    with torch.no_grad():
        predicted = net.eval()(data.normalise(data.test.x)).argmax(1)
    assert float((predicted == data.test.y).double().mean()) == pytest.approx(metrics(finished)[-1]["accuracy"])


def test_the_last_two_checkpoints_are_kept(finished: Path) -> None:
    kept = sorted(p.name for p in (finished / "checkpoints").glob("round-*"))
    assert kept == ["round-000002.safetensors", "round-000003.safetensors"]


def test_clients_csv_lists_every_client_with_its_accuracy(finished: Path) -> None:
    header, *rows = (finished / "clients.csv").read_text().splitlines()
    assert header == "client,train_samples,test_samples,accuracy"
    columns = [row.split(",") for row in rows]
    assert [c[0] for c in columns] == ["0", "1", "2", "3"]
    federation = library.federate(library.load_dataset("fashion-mini"), clients=4, alpha=SHORT["alpha"], fraction=0.05)
    assert [int(c[1]) for c in columns] == federation.sizes.tolist()
    tested = [(int(c[2]), float(c[3])) for c in columns if c[3]]
    pooled = sum(n * a for n, a in tested) / sum(n for n, _ in tested)
    assert pooled == pytest.approx(metrics(finished)[-1]["amp"], abs=1e-5)


def test_the_log_tells_what_happened(finished: Path) -> None:
    assert "rounds 1 to 3 of fedavg" in (finished / "log.txt").read_text()


def test_the_default_directory_tells_runs_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        assert fedstill("run", "fedavg", *short(rounds=1, seed=seed)).code == 0
    made = sorted(p.name for p in (tmp_path / "runs").iterdir())
    assert made == ["fedavg-fashion-mini-dirichlet0.5-k4-s0", "fedavg-fashion-mini-dirichlet0.5-k4-s1"]


def test_the_end_of_a_run_is_a_table_and_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "a folder [with] a long name that a terminal of eighty columns would have to break" / "run"
    answer = fedstill("run", "fedavg", *short(out=out, rounds=1), columns=80)
    assert answer.code == 0, answer.err
    assert all(word in answer.out for word in ("accuracy", "AMP", "FM", "WLP", "MB", "seconds"))
    assert f"{out}/curves.png" in answer.out, "a path is printed whole, whatever is in it"
    assert Image.open(out / "curves.png").format == "PNG"


# --- settings ---


def test_a_dry_run_prints_every_setting_and_runs_nothing(tmp_path: Path) -> None:
    config = resolved("fedprox", "--out", tmp_path / "run")
    from fedstill.building.config import Config

    assert set(config) == set(Config.model_fields)
    assert config["hyper"] == {"mu": 0.01}
    assert not (tmp_path / "run").exists()


def test_a_dry_run_says_what_the_methods_own_settings_mean() -> None:
    lines = fedstill("run", "fedprox", "--dry-run").out.splitlines()
    meaning = {parameter.name: parameter.meaning for parameter in registry.hyper_parameters("fedprox")}["mu"]
    above = next(lines[i - 1] for i, line in enumerate(lines) if line.startswith("mu = "))
    assert above.lower() == f"# {meaning}.".lower()


def test_the_dry_runs_toml_reproduces_the_run(tmp_path: Path) -> None:
    words = short(seed=3, momentum=0.9, mu=0.2, alpha=0.3, augment='"flip"')
    config = tmp_path / "again.toml"
    config.write_text(fedstill("run", "fedprox", *words, "--dry-run").out)
    assert fedstill("run", "fedprox", *words, "--out", tmp_path / "first").code == 0
    assert fedstill("run", config, "--out", tmp_path / "second").code == 0
    assert_same_run(tmp_path / "second", tmp_path / "first")
    settings = [line for line in config.read_text().splitlines() if not line.startswith("#")]
    assert (tmp_path / "second" / "config.toml").read_text().startswith("\n".join(settings))
    assert "# Local momentum (sgd). [default: 0.0; at least 0, below 1]\nmomentum = 0.9\n" in config.read_text()


def test_the_config_of_a_run_directory_repeats_the_run(finished: Path, tmp_path: Path) -> None:
    assert fedstill("run", finished / "config.toml", "--out", tmp_path / "again").code == 0
    assert_same_run(tmp_path / "again", finished)


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('method = "fedprox"\nrounds = 7\nlr = 0.5\nmu = 0.3\n[model_options]\nnorm = "batch"\n')
    config = resolved(file, "--lr", "0.25", "--set", "model_options.width=2")
    assert (config["lr"], config["rounds"], config["epochs"]) == (0.25, 7, 5)
    assert (config["method"], config["hyper"]) == ("fedprox", {"mu": 0.3})
    assert config["model_options"] == {"norm": "batch", "width": 2}
    assert resolved(file, "--set", "mu=0.1", "--set", "rounds=9")["hyper"] == {"mu": 0.1}
    assert resolved(file, "--set", "mu=0.1", "--set", "rounds=9")["rounds"] == 9


def test_set_reaches_settings_of_the_run_and_of_the_method() -> None:
    config = resolved("fedprox", "--set", "mu=0.5", "--set", "momentum=0.9", "--set", "buffers=local")
    assert config["hyper"] == {"mu": 0.5}
    assert (config["momentum"], config["buffers"]) == (0.9, "local")
    assert resolved("fedprox", "--set", "hyper.mu=0.7")["hyper"] == {"mu": 0.7}


MINE = """
from __future__ import annotations
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
import numpy as np
import fedstill
from torch import nn

@dataclass(frozen=True)
class MyMethod(fedstill.FedAvg):
    "Averages, and then takes a step back."

    momentum: Annotated[float, "how far back"] = 0.25
    note: str | None = None
    folder: Path = Path("somewhere")

    def aggregate(self, server, uplinks):
        before = server.model
        super().aggregate(server, uplinks)
        server.model = server.model + self.momentum * (before - server.model)

def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 8), nn.ReLU(), nn.Linear(8, classes))

def load():
    rng = np.random.default_rng(0)
    y = np.arange(120) % 3
    x = (rng.normal(size=(120, 5)) + y[:, None]).astype(np.float32)
    return fedstill.from_arrays(x[:90], y[:90], x[90:], y[90:])
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_where_method_and_run_have_a_setting_of_one_name_set_means_the_methods(mine: Path) -> None:
    config = resolved("./mine.py:MyMethod", "--set", "momentum=0.75")
    assert (config["hyper"]["momentum"], config["momentum"]) == (0.75, 0.0)
    (mine / "run.toml").write_text('method = "./mine.py:MyMethod"\nmomentum = 0.5\n')
    config = resolved("run.toml")
    assert (config["hyper"]["momentum"], config["momentum"]) == (0.25, 0.5)


def test_a_users_own_method_network_and_data(mine: Path) -> None:
    own = short(data="./mine.py:load", model="./mine.py:net", fraction=1.0, image_size=0)
    assert fedstill("run", "./mine.py:MyMethod", *own, "--out", "own", "--set", "momentum=1.0").code == 0
    assert fedstill("run", "fedavg", *own, "--out", "plain").code == 0
    torch.manual_seed(library.core.seeds.key(0, "initial weights"))
    initial = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    expected = initial.state_dict()
    for name, tensor in model(mine / "own").items():
        torch.testing.assert_close(tensor, expected[name], msg="with momentum 1 the server stays where it began")
    assert sorted(model(mine / "plain")) == ["1.bias", "1.weight", "3.bias", "3.weight"], "the user's own names"
    assert not torch.equal(model(mine / "plain")["3.weight"], expected["3.weight"])


@pytest.mark.slow
def test_a_run_of_a_users_own_method_resumes_and_repeats(mine: Path) -> None:
    whole = run("./mine.py:MyMethod", mine / "whole")
    with interrupted_after(1):
        assert fedstill("run", "./mine.py:MyMethod", *short(out="part")).code == 130
    assert fedstill("resume", "part").code == 0
    assert_same_run(mine / "part", whole)
    assert fedstill("run", "part/config.toml", "--out", "again").code == 0
    assert_same_run(mine / "again", whole)


@pytest.mark.slow
def test_a_comparison_is_shown_but_not_mixed_after_a_users_method_changed(mine: Path) -> None:
    file = mine / "mine.py"
    settings = {"data": "mine.py:load", "model": "mlp", "fraction": 1, "rounds": 1}
    words = ("compare", f"{file}:MyMethod", *short(out=mine / "cmp", **settings))
    assert fedstill(*words).code == 0
    before = fedstill("show", mine / "cmp")
    file.write_text(file.read_text() + "\n")
    again = fedstill(*words)
    assert again.code == 2
    assert f"was run before {file} changed; choose another --out, replace all runs with --force" in again.err
    assert fedstill("show", mine / "cmp") == before


def test_methods_shows_a_users_own_method(mine: Path) -> None:
    answer = fedstill("methods", "./mine.py:MyMethod")
    assert answer.code == 0, answer.err
    assert "how far back" in answer.out


# --- overwriting ---


def test_a_run_directory_is_never_overwritten_without_force(finished: Path) -> None:
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    answer = fedstill("run", "fedavg", *short(out=finished, seed=5))
    assert answer.code == 2
    assert answer.err == (
        f"error: {finished} exists; continue it with 'fedstill resume {finished}', choose another --out, "
        "or replace it with --force\n"
    )
    assert {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_force_replaces_a_run(tmp_path: Path) -> None:
    path = run("fedavg", tmp_path / "run", rounds=2)
    fresh = run("fedavg", tmp_path / "fresh", seed=5, rounds=1)
    run("fedavg", path, seed=5, rounds=1, force=True)
    assert_same_run(path, fresh)
    assert sorted(p.name for p in (path / "checkpoints").glob("round-*")) == ["round-000001.safetensors"]
    logs = [[line.split(" ", 2)[2] for line in (p / "log.txt").read_text().splitlines()] for p in (path, fresh)]
    assert logs[0] == logs[1], "nothing is left of the earlier run"


def test_force_keeps_a_file_that_no_run_wrote(tmp_path: Path) -> None:
    path = run("fedavg", tmp_path / "run", rounds=1)
    (path / "notes.md").write_text("why this run matters")
    run("fedavg", path, rounds=1, force=True)
    assert (path / "notes.md").read_text() == "why this run matters"


@pytest.mark.parametrize("name", ["thesis.tex", "config.toml", "checkpoints/epoch-1.pt"])
def test_force_refuses_a_folder_that_is_not_a_run_directory(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "work" / name
    precious.parent.mkdir(parents=True)
    precious.write_text("years")
    answer = fedstill("run", "fedavg", *short(out=tmp_path / "work", force=True))
    assert answer.code == 2
    assert answer.err == f"error: {tmp_path}/work is not a run directory; --force will not delete it\n"
    assert precious.read_text() == "years"
    assert [p for p in (tmp_path / "work").rglob("*") if p.is_file()] == [precious]


def test_force_with_a_wrong_setting_deletes_nothing(tmp_path: Path) -> None:
    path = run("fedavg", tmp_path / "run", rounds=1)
    before = metrics(path)
    assert fedstill("run", "fedavg", *short(out=path, force=True, partition="dirichelt")).code == 2
    assert metrics(path) == before


def test_an_empty_folder_is_a_fine_place_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run("fedavg", tmp_path / "empty", rounds=1)


# --- resume and show ---


def test_a_run_stopped_early_and_resumed_equals_an_uninterrupted_one(finished: Path, tmp_path: Path) -> None:
    with interrupted_after(1):
        assert fedstill("run", "fedavg", *short(out=tmp_path / "run")).code == 130
    assert len(metrics(tmp_path / "run")) == 1
    assert not (tmp_path / "run" / "summary.json").exists()
    answer = fedstill("resume", tmp_path / "run")
    assert answer.code == 0, answer.err
    assert "Results" in answer.out
    assert f"curves: {tmp_path / 'run' / 'curves.png'}" in answer.out
    assert (tmp_path / "run" / "curves.png").read_bytes() == (finished / "curves.png").read_bytes()
    assert_same_run(tmp_path / "run", finished)
    assert (tmp_path / "run" / "clients.csv").read_text() == (finished / "clients.csv").read_text()


def test_rounds_without_a_checkpoint_are_run_again(finished: Path, tmp_path: Path) -> None:
    with interrupted_after(2):
        fedstill("run", "fedavg", *short(out=tmp_path / "run", checkpoint_every=3))
    assert not list((tmp_path / "run" / "checkpoints").glob("round-*"))
    assert fedstill("resume", tmp_path / "run").code == 0
    assert_same_run(tmp_path / "run", finished)


def test_resume_with_more_rounds_equals_a_run_of_that_length(finished: Path, tmp_path: Path) -> None:
    run("fedavg", tmp_path / "run", rounds=1)
    assert fedstill("resume", tmp_path / "run", "--rounds", 3).code == 0
    assert_same_run(tmp_path / "run", finished)
    assert (tmp_path / "run" / "config.toml").read_text() == (finished / "config.toml").read_text()


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    path = run("fedavg", tmp_path / "run", rounds=1)
    files = ("metrics.jsonl", "model.safetensors", "config.toml", "clients.csv", "summary.json")
    before = [(path / name).read_bytes() for name in files]
    assert fedstill("resume", path).code == 0
    assert [(path / name).read_bytes() for name in files] == before


def test_show_tells_finished_runs_from_those_under_way(finished: Path, tmp_path: Path) -> None:
    with interrupted_after(1):
        fedstill("run", "fedavg", *short(out=tmp_path / "part"))
    answer = fedstill("show", finished, tmp_path / "part", "--plot", tmp_path / "both.svg")
    assert answer.code == 0, answer.err
    best = json.loads((finished / "summary.json").read_text())["best_accuracy"]
    assert f"{100 * best:.2f} %" in answer.out
    assert f"{tmp_path}/part: 1 of 3 rounds; continue it with 'fedstill resume {tmp_path}/part'" in answer.out
    assert "<svg" in (tmp_path / "both.svg").read_text()


def test_show_does_not_pass_off_an_extended_run_as_finished(tmp_path: Path) -> None:
    path = run("fedavg", tmp_path / "run", rounds=1)
    with interrupted_after(2):
        fedstill("resume", path, "--rounds", 3)
    assert "2 of 3 rounds" in fedstill("show", path).out


def test_runs_of_one_name_in_different_folders_are_shown_apart(finished: Path, tmp_path: Path) -> None:
    other = run("fedavg", tmp_path / "finished", rounds=1)
    answer = fedstill("show", finished, other)
    assert "finished " in answer.out
    assert "finished'" in answer.out


# --- lists ---


def test_methods_lists_every_method() -> None:
    answer = fedstill("methods")
    assert answer.code == 0, answer.err
    assert all(name in answer.out for name in registry.names())


def test_methods_gives_the_bytes_for_the_chosen_model() -> None:
    answer = fedstill("methods", "fedavg", "--model", "mlp")
    weights = 28 * 28 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10
    assert f"{4 * weights / 1000:.3g} kB" in " ".join(answer.out.split())


def test_methods_with_a_name_lists_its_settings() -> None:
    answer = fedstill("methods", "fedprox")
    assert answer.code == 0, answer.err
    assert re.search(r"mu\s.*0\.01\s.*weight of the proximal term", answer.out)


def test_datasets_lists_every_dataset_and_where_it_is(tmp_path: Path) -> None:
    answer = fedstill("datasets", "--data-dir", tmp_path)
    assert answer.code == 0, answer.err
    assert all(name in answer.out for name in dataset_names())
    assert "in the" in answer.out


@pytest.mark.slow
def test_partition_draws_a_picture_and_a_table(tmp_path: Path) -> None:
    picture = tmp_path / "who.png"
    words = ("--clients", 5, "--alpha", "0.3", "--seed", 2, "--set", "fraction=0.5", "--out", picture)
    answer = fedstill("partition", *words)
    assert answer.code == 0, answer.err
    assert np.asarray(Image.open(picture)).std() > 0
    federation = library.federate(library.load_dataset("fashion-mini"), clients=5, alpha=0.3, seed=2, fraction=0.5)
    rows = re.findall(r"│\s+(\d+) │\s+(\d+) │\s+(\d+) │\s+(\d+)% │\s+(\d+) │", answer.out)
    counts = federation.class_counts()
    expected = [
        [k, n, np.count_nonzero(counts[k]), round(100 * counts[k].max() / n), len(federation.test(k))]
        for k, n in enumerate(federation.sizes.tolist())
    ]
    np.testing.assert_array_equal([list(map(int, row)) for row in rows], expected)


# --- compare ---


def test_compare_trains_methods_under_the_same_conditions(tmp_path: Path) -> None:
    answer = fedstill("compare", "fedavg", "fedprox", *short(out=tmp_path / "both", mu=0.0))
    assert answer.code == 0, answer.err
    assert re.search(r"fedavg .*%", answer.out)
    assert re.search(r"fedprox .*%", answer.out)
    assert Image.open(tmp_path / "both" / "curves.png").format == "PNG"
    # FedProx with mu = 0 is FedAvg: the same bits mean the same data, cohorts and initial weights.
    assert_same_run(tmp_path / "both" / "fedavg", tmp_path / "both" / "fedprox")
    assert_same_run(tmp_path / "both" / "fedavg", run("fedavg", tmp_path / "alone"))


def test_a_setting_that_one_of_the_methods_knows_goes_to_that_one(tmp_path: Path) -> None:
    answer = fedstill("compare", "fedavg", "fedprox", *short(out=tmp_path / "both", rounds=1, mu=0.4))
    assert answer.code == 0, answer.err
    hyper = {
        m: tomllib.loads((tmp_path / "both" / m / "config.toml").read_text())["hyper"] for m in ("fedavg", "fedprox")
    }
    assert hyper == {"fedavg": {}, "fedprox": {"mu": 0.4}}


def test_compare_does_not_begin_if_one_of_its_runs_is_there_already(tmp_path: Path) -> None:
    run("fedprox", tmp_path / "both" / "fedprox", rounds=1)
    answer = fedstill("compare", "fedavg", "fedprox", *short(out=tmp_path / "both"))
    assert answer.code == 2
    assert "both/fedprox exists" in answer.err
    assert not (tmp_path / "both" / "fedavg").exists()


def test_compare_with_force_does_not_begin_if_a_folder_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "both" / "fedprox").mkdir(parents=True)
    (tmp_path / "both" / "fedprox" / "thesis.tex").write_text("years")
    answer = fedstill("compare", "fedavg", "fedprox", *short(out=tmp_path / "both", force=True))
    assert answer.code == 2
    assert "both/fedprox is not a run directory; --force will not delete it" in answer.err
    assert not (tmp_path / "both" / "fedavg").exists()


@pytest.mark.slow
def test_a_callback_in_a_file_stops_a_run_which_is_shown_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import fedstill\n"
        "class Two(fedstill.Callback):\n"
        "    def on_round_end(self, run, record):\n"
        "        return record['round'] == 2\n"
    )
    words = ("--callback", f"{tmp_path}/mine.py:Two")
    answer = fedstill("run", "fedavg", *short(out=tmp_path / "run", rounds=3), *words)
    assert answer.code == 0, answer.err
    assert "stopped by Two after round 2 of 3" in answer.out
    shown = fedstill("show", tmp_path / "run").out
    assert "2 of 3 rounds, stopped by Two" in shown
    assert "accuracy best" in shown
    assert fedstill("report", tmp_path / "run", "--out", tmp_path / "page.html").code == 0
    assert fedstill("resume", tmp_path / "run").code == 0
    assert "stopped" not in fedstill("show", tmp_path / "run").out
    wrong = fedstill("run", "fedavg", *short(out=tmp_path / "other"), "--callback", "early")
    assert wrong.err.startswith("error: --callback early: write it as file.py:name; ")
