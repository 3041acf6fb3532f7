"""What goes wrong: one clear line, a non-zero exit, no traceback, nothing lost."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstill as library
from fedstill.building.config import resolve
from fedstill.cli.failure import Halted
from fedstill.core.files import naming
from fedstill.running.directory import RunDirectory
from support.commandline import (
    SHORT,
    Answer,
    assert_same_run,
    change_settings,
    fedstill,
    interrupted_after,
    metrics,
    model,
    run,
    short,
)
from support.guards import start

HINT = "what is done is kept; continue with: fedstill resume"


def message(answer: Answer, *, hint: bool = False) -> str:
    """The one line that tells what is wrong, after checking that there is nothing else to read."""
    assert answer.code == 2, answer
    assert "Traceback" not in answer.out + answer.err
    lines = answer.err.splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) == 1 + hint, answer.err
    if hint:
        assert lines[1].startswith(HINT)
    return lines[0].removeprefix("error: ")


def contents(path: Path) -> dict[Path, bytes]:
    """Every file in a folder."""
    return {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three rounds of FedAvg come to when nothing goes wrong."""
    return run("fedavg", tmp_path_factory.mktemp("misuse") / "undisturbed")


# --- wrong settings: found before work starts ---

WRONG: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {  # words, changed settings, what is said
    "a misspelt method": (("fedprx",), {}, "unknown method 'fedprx'; did you mean 'fedprox'?"),
    "a misspelt dataset": (("fedavg", "--data", "fashion-mimi"), {}, "did you mean 'fashion-mini'"),
    "a misspelt model": (("fedavg", "--model", "lenet"), {}, "unknown model 'lenet'; did you mean 'lenet5'"),
    "a misspelt partition": (("fedavg",), {"partition": "dirichelt"}, "did you mean 'dirichlet'?"),
    "a misspelt setting": (("fedavg", "--set", "epocs=3"), {}, "unknown setting 'epocs'; did you mean 'epochs'?"),
    "a misspelt hyper-parameter": (
        ("fedprox", "--set", "hyper.muu=3"),
        {},
        "unknown setting 'muu'; did you mean 'mu'?",
    ),
    "another method's setting": (("fedavg", "--set", "mu=3"), {}, "unknown setting 'mu'"),
    "a misspelt choice": (("fedavg",), {"engine": "inlin"}, "'inlin': should be 'process', 'inline' or 'flower'"),
    "a misspelt augmentation": (
        ("fedavg",),
        {"augment": "flipp"},
        "unknown augmentation 'flipp'; did you mean 'flip'?",
    ),
    "a misspelt flag": (("fedavg", "--rounts", "3"), {}, "--rounts"),
    "a misspelt option of the model": (
        ("fedavg", "--model", "mlp", "--set", "model_options.hiden=[3]"),
        {},
        "'hidden'",
    ),
    "alpha of zero": (("fedavg", "--alpha", "0"), {"alpha": 0.0}, "alpha = 0.0: should be greater than 0"),
    "alpha below zero": (("fedavg",), {"alpha": -1.0}, "alpha = -1.0: should be greater than 0"),
    "alpha that is not a number": (("fedavg",), {"alpha": "nan"}, "alpha = nan"),
    "an infinite learning rate": (("fedavg",), {"lr": "inf"}, "lr = inf: should be a finite number"),
    "nobody taking part": (("fedavg",), {"participation": 0}, "participation = 0: should be greater than 0"),
    "more than all taking part": (("fedavg",), {"participation": 1.5}, "should be less than or equal to 1"),
    "more clients than samples": (("fedavg",), {"clients": 400}, "400 clients cannot share 300 samples"),
    "a number that is a word": (("fedavg",), {"rounds": "abc"}, "rounds = 'abc': should be a valid integer"),
    "a flag that is a word": (("fedavg", "--rounds", "abc"), {}, "Invalid value for '--rounds'"),
    "no method": ((), {}, "Missing argument"),
    "no value": (("fedavg", "--set", "epochs"), {}, "--set epochs: write it as key=value"),
    "no key": (("fedavg", "--set", "=3"), {}, "--set =3: write it as key=value"),
    "a table as a value": (("fedprox", "--set", "hyper={mu=1}"), {}, "--set hyper.name=value"),
    "a hyper-parameter out of range": (
        ("fedprox", "--set", "mu=-1"),
        {},
        "mu = -1: should be greater than or equal to 0",
    ),
    "a model that does not fit the images": (
        ("fedavg",),
        {"model": "lenet5", "image_size": 28},
        "model 'lenet5' needs images of 32x32, got 1x28x28; set image_size=32",
    ),
    "images too small": (("fedavg",), {"image_size": 8}, "model 'cnn' needs images of at least 16x16, got 1x8x8"),
    "a missing file": (("nowhere.toml",), {}, "there is no file nowhere.toml"),
    "a missing file of one's own": (("./nowhere.py:M",), {}, "./nowhere.py:M: there is no file ./nowhere.py"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setting_is_one_line_before_work_starts(case: str, tmp_path: Path) -> None:
    words, changed, expected = WRONG[case]
    settings = {k: v for k, v in short_settings(words).items() if k not in changed} | changed
    answer = fedstill("run", *words, *as_words(settings), "--out", tmp_path / "run")
    assert expected in message(answer)
    assert not (tmp_path / "run").exists()


def short_settings(words: tuple[str, ...]) -> dict[str, Any]:
    """The settings of a short run, without those that are given as flags."""
    flags = {word.removeprefix("--") for word in words}
    return {k: v for k, v in SHORT.items() if k not in flags and not (k == "image_size" and "model" in flags)}


def as_words(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rounds = ", "is not TOML"),
        ("method = 3", "unknown method '3'"),
        ("epocs = 3", "unknown setting 'epocs'; did you mean 'epochs'?"),
        ("hyper = 3", "hyper = 3: a table of settings is needed"),
        ("model_options = 3", "model_options = 3: a table of settings is needed"),
        ("clients = [1]", "clients = [1]: should be a valid integer"),
        ("augment = 3", "augment = 3: should be a valid string"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    answer = fedstill("run", tmp_path / "mine.toml", "--out", tmp_path / "run")
    assert expected in message(answer)
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe\x00")
    assert "is not TOML" in message(fedstill("run", tmp_path / "mine.toml"))


def test_a_missing_dataset_file_is_named_with_its_address_and_place(tmp_path: Path) -> None:
    answer = fedstill("run", "fedavg", "--data", "mnist", "--data-dir", tmp_path, "--out", tmp_path / "run")
    line = message(answer)
    assert "train-images-idx3-ubyte" in line
    assert "https://" in line
    assert str(tmp_path / "mnist") in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("resume", "."), "is not a run directory: it has no config.toml"),
        (("show", "nowhere"), "is not a run directory: it has no config.toml"),
        (("partition", "--out", "picture.foo"), "--out picture.foo: a picture ends in .png, .svg, .pdf"),
        (("partition", "--out", "nowhere/picture.png"), "there is no folder nowhere"),
        (("methods", "fedprx"), "did you mean 'fedprox'?"),
        (("compare", "fedavg", "fedavg"), "a method is named twice"),
        (("compare", "fedavg", "fedprox", "--set", "mo=1"), "unknown setting 'mo'"),
        (("dance",), "No such command 'dance'"),
    ],
)
def test_other_commands_fail_in_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in message(fedstill(*words))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rounds", [0, -1, 2])
def test_a_run_cannot_be_shortened(undisturbed: Path, tmp_path: Path, rounds: int) -> None:
    path = tmp_path / "run"
    shutil.copytree(undisturbed, path)
    before = contents(path)
    assert f"{rounds}" in message(fedstill("resume", path, "--rounds", rounds))
    assert contents(path) == before


def test_rounds_edited_below_those_done_are_refused(undisturbed: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(undisturbed, path)
    change_settings(path, "rounds = 3\n", "rounds = 1\n")
    before = contents(path)
    line = message(fedstill("resume", path))
    assert line == (
        f"rounds = 1: {path} has 3 rounds done; give 3 or more, in its config.toml or with --rounds, "
        "or start another run"
    )
    assert contents(path) == before
    assert fedstill("resume", path, "--rounds", 3).code == 0
    assert_same_run(path, undisturbed)


# --- files of the user's own ---

OWN = {
    "a file that raises": (
        "x = 1\nx.missing()\n",
        "M",
        "AttributeError: 'int' object has no attribute 'missing' (line 2)",
    ),
    "a file with a syntax error": ("x = 1\ndef f(:\n", "M", "SyntaxError: invalid syntax (mine.py, line 2)"),
    "a file that ends the program": ("import sys; sys.exit('bye')\n", "M", "cannot be imported: SystemExit: bye"),
    "an error of several lines": ("raise ValueError('first\\nsecond')\n", "M", "ValueError: first (line 1)"),
    "a name that is not there": ("x = 1\n", "M", "mine.py has no 'M'"),
    "something that is not a method": ("M = 3\n", "M", "is not a method: derive a @dataclass(frozen=True)"),
    "a class that is not a method": ("class M: pass\n", "M", "is not a method"),
}


@pytest.mark.parametrize("case", OWN)
def test_a_users_own_method_that_cannot_be_used_is_one_line(case: str, tmp_path: Path) -> None:
    text, name, expected = OWN[case]
    (tmp_path / "mine.py").write_text(text)
    answer = fedstill("run", f"{tmp_path}/mine.py:{name}", *short(out=tmp_path / "run"))
    assert expected in message(answer)
    assert not (tmp_path / "run").exists()


OWN_PARTS = {
    ("model", "def net(shape, classes): raise KeyError('x')"): "net failed: KeyError: 'x' (line 1)",
    ("model", "def net(): pass"): "net failed: TypeError",
    ("model", "def net(shape, classes): return 3"): "returns a int; it must return a torch.nn.Module",
    ("model", "net = 3"): "net is not a function",
    (
        "model",
        "from torch import nn\ndef net(shape, classes): return nn.Linear(7, classes)",
    ): "does not take samples of",
    (
        "model",
        "from torch import nn\ndef net(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(256, 3))",
    ): "gives outputs of shape (2, 3) for 2 samples; the data have 10 classes",
    (
        "model",
        "from torch import nn\nclass Odd(nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.a = nn.Linear(2, 2)\n"
        "    def forward(self, x): return {}['logits']\n"
        "def net(shape, classes): return Odd()",
    ): "does not take samples of 1x16x16: KeyError: 'logits'",
    (
        "model",
        "from torch import nn\ndef net(shape, classes): return nn.Sequential(nn.Flatten())",
    ): "no trainable parameters",
    ("data", "def net(): raise OSError('no connection')"): "net failed: OSError: no connection (line 1)",
    ("data", "def net(): return [1, 2]"): "returns a list; it must return a fedstill.Dataset",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OWN_PARTS, ids=lambda case: f"{case[0]}: {case[1].splitlines()[-1][:60]}")
def test_a_users_own_network_or_data_that_cannot_be_used_is_one_line(case: tuple[str, str], tmp_path: Path) -> None:
    setting, text = case
    (tmp_path / "mine.py").write_text(text)
    answer = fedstill("run", "fedavg", *short(out=tmp_path / "run", **{setting: f"{tmp_path}/mine.py:net"}))
    assert OWN_PARTS[case] in message(answer)
    assert not (tmp_path / "run").exists()


# --- clients that answer wrongly ---

FAULTY = """
from dataclasses import dataclass
import torch
import fedstill

@dataclass(frozen=True)
class Faulty(fedstill.FedAvg):
    "Every client below `bad` sends something wrong from round 2 on."

    fault: str = "nan"
    bad: int = 1

    def uplink(self, client):
        message = super().uplink(client)
        if client.round < 2 or client.id >= self.bad:
            return message
        w = message["model"]
        return {
            "nan": {"model": torch.full_like(w, torch.nan)},
            "one infinity": {"model": torch.cat([w[1:], torch.tensor([torch.inf])])},
            "shape": {"model": w[1:]},
            "dimensions": {"model": w[None]},
            "names": {"modle": w},
            "more": {"model": w, "diary": w},
            "nothing": {},
            "dtype": {"model": w.double()},
            "number": {"model": 1.0},
            "list": [w],
            "none": None,
        }[self.fault]

@dataclass(frozen=True)
class Without(fedstill.FedAvg):
    "FedAvg in which client 0 is left out from round 2 on."

    def aggregate(self, server, uplinks):
        super().aggregate(server, (u for u in uplinks if server.round < 2 or u.client != 0))
"""
FAULTS = {
    "nan": "model is not finite",
    "one infinity": "model is not finite",
    "shape": "model has shape (15625,), declared is (15626,)",
    "dimensions": "model has shape (1, 15626), declared is (15626,)",
    "names": "it holds ['modle'], declared is ['model']",
    "more": "it holds ['diary', 'model'], declared is ['model']",
    "nothing": "it holds [], declared is ['model']",
    "dtype": "model is not a tensor of torch.float32",
    "number": "model is not a tensor of torch.float32",
    "list": "it is a list, not a dict of named tensors",
    "none": "it is a NoneType, not a dict of named tensors",
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("faulty") / "faulty.py"
    file.write_text(FAULTY)
    return file


@pytest.fixture(scope="module")
def without(faulty: Path) -> Path:
    """A run in which all take part and one client's good updates are left out by the method itself."""
    return run(f"{faulty}:Without", faulty.parent / "without", participation=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_update_is_dropped_logged_and_counted_and_the_others_are_averaged_as_without_it(
    fault: str, faulty: Path, without: Path, tmp_path: Path
) -> None:
    answer = fedstill("run", f"{faulty}:Faulty", *short(out=tmp_path / "run", participation=1.0, fault=f'"{fault}"'))
    assert answer.code == 0, answer.err
    ours, theirs = model(tmp_path / "run"), model(without)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rows = metrics(tmp_path / "run")
    assert [row["dropped"] for row in rows] == [0, 1, 1]
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in metrics(without)]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count(f"WARNING client 0 dropped: {FAULTS[fault]}") == 2
    assert "round 2: clients dropped: 1 (see log.txt)" in answer.out


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "needed", "good"), [(4, 1, 0), (2, 3, 2)])
def test_too_few_good_clients_stop_the_run_and_its_checkpoint_is_kept(
    faulty: Path, tmp_path: Path, bad: int, needed: int, good: int
) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(faulty.read_text())
    words = short(out=tmp_path / "run", participation=1.0, bad=bad, min_clients=needed)
    line = message(fedstill("run", f"{file}:Faulty", *words), hint=True)
    assert line == (
        f"only {good} of 4 clients gave a usable answer, {needed} are needed (min_clients, or the method); "
        "the last one dropped: model is not finite"
    )
    assert [row["round"] for row in metrics(tmp_path / "run")] == [1]
    assert (tmp_path / "run" / "checkpoints" / "round-000001.safetensors").exists()
    # With the clients mended, the run goes on as if nothing had been.
    file.write_text(faulty.read_text().replace("client.id >= self.bad", "True"))
    assert "--trust-code" in message(fedstill("resume", tmp_path / "run"))
    assert fedstill("resume", tmp_path / "run", "--trust-code").code == 0
    good_run = run("fedavg", tmp_path / "good", participation=1.0)
    assert_same_run(tmp_path / "run", good_run)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("seed = 0", "seed = 1"), ("lr = 0.05", "lr = 0.5")])
def test_a_run_is_not_resumed_with_other_settings(tmp_path: Path, before: str, after: str) -> None:
    path = run("fedavg", tmp_path / "run", rounds=1)
    change_settings(path, before, after)
    name = before.partition(" ")[0]
    assert message(fedstill("resume", path, "--rounds", 2)).startswith(f"{name} was ")


def test_what_the_server_sends_must_be_declared(tmp_path: Path) -> None:
    file = tmp_path / "leaky.py"
    file.write_text(
        "import dataclasses, fedstill\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Leaky(fedstill.FedAvg):\n"
        "    def downlink(self, server):\n"
        "        return super().downlink(server) | {'secret': server.model}\n"
    )
    answer = fedstill("run", f"{file}:Leaky", *short(out=tmp_path / "run"))
    assert "is not what" in message(answer, hint=True)


@pytest.mark.slow
def test_a_run_is_resumed_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("own.py").write_text("import fedstill\nclass Own(fedstill.FedAvg): pass\n")
    path = run("./own.py:Own", tmp_path / "run", rounds=1)
    monkeypatch.chdir(tmp_path)
    assert fedstill("resume", path, "--rounds", 2).code == 0


def test_a_model_that_diverges_stops_the_run_with_what_to_do(tmp_path: Path) -> None:
    answer = fedstill("run", "fedavg", *short(out=tmp_path / "run", lr=1e30))
    assert "is not finite" in message(answer, hint=True)


# --- a method that fails ---

FAILING = """
from dataclasses import dataclass
import fedstill

@dataclass(frozen=True)
class Failing(fedstill.FedAvg):
    def {where}:
        if {what}.round == 2:
            raise RuntimeError("what a pity")
        return super().{call}
"""
WHERE = {
    "objective": {"where": "objective(self, client)", "what": "client", "call": "objective(client)"},
    "uplink": {"where": "uplink(self, client)", "what": "client", "call": "uplink(client)"},
    "downlink": {"where": "downlink(self, server)", "what": "server", "call": "downlink(server)"},
    "aggregate": {
        "where": "aggregate(self, server, uplinks)",
        "what": "server",
        "call": "aggregate(server, uplinks)",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "engine"),
    [
        ("objective", "inline"),
        ("objective", "process"),
        ("uplink", "process"),
        ("downlink", "inline"),
        ("aggregate", "process"),
    ],
)
def test_a_method_that_raises_is_one_line_and_its_traceback_is_in_the_log(
    where: str, engine: str, undisturbed: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FAILING.format(**WHERE[where]))
    words = short(out=tmp_path / "run", engine=engine, workers=2)
    line = message(fedstill("run", f"{file}:Failing", *words), hint=True)
    assert "RuntimeError: what a pity" in line
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "Traceback" in log
    assert re.search(rf'"{file}", line \d+, in {where}', log)
    assert [row["round"] for row in metrics(tmp_path / "run")] == [1]

    file.write_text("import fedstill\nclass Failing(fedstill.FedAvg): pass  # mended\n")
    assert fedstill("resume", tmp_path / "run", "--trust-code").code == 0
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_method_that_raises_when_it_starts_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import fedstill\nclass M(fedstill.FedAvg):\n    def start(self, server): raise RuntimeError('no start')\n"
    )
    line = message(fedstill("run", f"{tmp_path}/mine.py:M", *short(out=tmp_path / "run")), hint=True)
    place = f"({tmp_path}/mine.py, line 3)"
    assert line == f"RuntimeError: no start {place} (the traceback is in {tmp_path}/run/log.txt)"


def test_from_python_the_users_own_exception_arrives_as_it_is() -> None:
    class Broken(library.FedAvg):
        def downlink(self, server: library.Server) -> dict[str, torch.Tensor]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        library.run(Broken(), clients=2, fraction=0.02, model="mlp", engine="inline")


# --- damage and full disks ---


REMEMBERING = """
from dataclasses import dataclass
import torch
import fedstill

@dataclass(frozen=True)
class Remembering(fedstill.FedAvg):
    "State on both sides, so that a wrong step back shows."

    def uplink(self, client):
        client.state["seen"] = client.state.get("seen", 0) + 1
        message = super().uplink(client)
        return {"model": message["model"] * (1 + 0.01 * client.state["seen"])}

    def aggregate(self, server, uplinks):
        super().aggregate(server, uplinks)
        server.state["rounds"] = server.state.get("rounds", 0) + 1
        server.model = server.model * (1 - 0.001 * server.state["rounds"])
"""


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_after_a_truncated_checkpoint_the_older_one_reaches_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REMEMBERING)
    whole = run(f"{tmp_path}/mine.py:Remembering", tmp_path / "whole", participation=1.0)
    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    truncate(broken / "checkpoints" / "round-000003.safetensors")
    answer = fedstill("resume", broken)
    assert answer.code == 0, answer.err
    assert_same_run(broken, whole)
    log = (broken / "log.txt").read_text()
    assert "round-000003.safetensors is damaged" in log
    assert "rounds 3 to 3" in log


def test_if_every_checkpoint_is_truncated_the_results_are_left_alone(undisturbed: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(undisturbed, broken)
    for file in (broken / "checkpoints").glob("round-*"):
        truncate(file)
    assert message(fedstill("resume", broken, "--rounds", 5)).startswith("no checkpoint can be read: ")
    assert_same_run(broken, undisturbed)


def test_a_run_whose_checkpoints_were_deleted_keeps_its_results(undisturbed: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(undisturbed, path, ignore=shutil.ignore_patterns("checkpoints"))
    assert "holds no checkpoint of the 3 rounds done" in message(fedstill("resume", path))
    assert_same_run(path, undisturbed)


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond this, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_when_a_checkpoint_does_not_fit_the_earlier_one_is_kept(undisturbed: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with interrupted_after(1):
        fedstill("run", "fedavg", *short(out=path))
    first = path / "checkpoints" / "round-000001.safetensors"
    before = first.read_bytes()
    with files_at_most(len(before) // 2):
        line = message(fedstill("resume", path), hint=True)
    assert line == f"{first.with_name('round-000002.safetensors')}: File too large"
    assert first.read_bytes() == before
    assert [p.name for p in (path / "checkpoints").glob("*round*")] == [first.name], "nothing half written is left"
    assert fedstill("resume", path).code == 0
    assert_same_run(path, undisturbed)


FULL_AT = [  # the file, how many times it was written before, whether rounds had begun
    ("config.toml", 0, False),
    ("metrics.jsonl", 0, False),
    ("metrics.jsonl", 1, True),
    ("metrics.jsonl", 3, True),
    ("round-000001", 0, True),
    ("round-000003", 0, True),
    ("clients.csv", 0, True),
    ("model.safetensors", 0, True),
    ("summary.json", 0, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "times", "began"), FULL_AT)
def test_a_disk_that_is_full_at_any_write_costs_nothing(
    name: str, times: int, began: bool, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written, sync = tmp_path / "run", 0, os.fsync

    def full(descriptor: int) -> None:
        nonlocal written
        if name in Path(os.readlink(f"/proc/self/fd/{descriptor}")).name:
            written += 1
            if written > times:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        answer = fedstill("run", "fedavg", *short(out=path))
    line = message(answer, hint=began)
    assert line.endswith(": No space left on device")
    assert line.startswith(f"{path}/")
    assert name in Path(line.split(": ")[0]).name, "it names the file, and not the temporary one"
    assert not Path(line.split(": ")[0]).name.startswith(".")
    there = (path / "config.toml").exists()
    assert there == (name != "config.toml")
    answer = fedstill("resume", path) if there else fedstill("run", "fedavg", *short(out=path))
    assert answer.code == 0, answer.err
    assert_same_run(path, undisturbed)
    assert not list(path.rglob("*.tmp"))


@pytest.mark.parametrize("engine", ["inline", "process"])
def test_a_full_disk_is_named_wherever_it_is_written(engine: str, tmp_path: Path) -> None:
    """A client's state, by the process that trains it; a line of metrics.jsonl; a picture."""
    path = tmp_path / "run"
    with files_at_most(20_000):
        line = message(fedstill("run", "scaffold", *short(out=path, engine=engine, workers=1)), hint=True)
    assert re.fullmatch(rf"{re.escape(str(path))}/checkpoints/clients/0/\d\.1\.safetensors: File too large", line)

    directory = RunDirectory.create(tmp_path / "other", resolve({}))
    with files_at_most(10), pytest.raises(OSError, match=r"File too large: '.*/other/metrics\.jsonl'"):
        directory.append({"round": 1, "accuracy": 0.5})
    directory.release()
    with files_at_most(1000):
        line = message(fedstill("partition", *short(data="fashion-mini")[:2], "--out", tmp_path / "who.png"))
    assert line == f"{tmp_path / 'who.png'}: File too large"
    assert not (tmp_path / "who.png").exists()


def test_an_error_of_the_system_that_names_nothing_gets_a_name(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left on device: 'here'"), naming("here"):
        raise full
    with pytest.raises(FileNotFoundError, match="'there'"), naming("here"):
        open("there")  # noqa: SIM115 - it fails
    with pytest.raises(OSError, match="5 requested and 3 written: 'here'"), naming("here"):
        raise OSError("5 requested and 3 written")
    assert str(Halted(OSError(errno.ENOSPC, "No space left on device"), tmp_path)) == (
        f"{tmp_path}: No space left on device"
    )


# --- two at once, and Ctrl-C ---


def test_a_second_process_is_turned_away_and_nothing_happens(undisturbed: Path) -> None:
    held = RunDirectory.open(undisturbed)
    before = contents(undisturbed)
    for words in (("resume", undisturbed), ("run", "fedavg", *short(out=undisturbed, force=True))):
        assert message(fedstill(*words)) == f"{undisturbed} is in use by another process"
    assert fedstill("show", undisturbed).code == 0, "looking is always allowed"
    held.release()
    assert contents(undisturbed) == before


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    words = short(out=path, rounds=500, engine="process", workers=2)
    command = [sys.executable, "-m", "fedstill", "run", "fedavg", *words]
    process = start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (path / "metrics.jsonl").exists() or not metrics(path):
        assert process.poll() is None
        time.sleep(0.05)
    second = fedstill("resume", path)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, err = process.communicate()
    assert message(second) == f"{path} is in use by another process"
    assert process.returncode == 130
    assert err.splitlines() == ["error: stopped", f"{HINT} {path}"]

    done = len(metrics(path))
    assert 0 < done < 500
    assert fedstill("resume", path, "--rounds", done + 1).code == 0
    assert_same_run(path, run("fedavg", tmp_path / "whole", rounds=done + 1))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["inline", "process"])
def test_an_error_in_a_users_method_names_its_file_and_line(tmp_path: Path, engine: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import fedstill\nclass M(fedstill.FedAvg):\n    def objective(self, client):\n        return 1 / 0\n"
    )
    settings = short(out=tmp_path / "run", engine=engine, workers=1)
    line = message(fedstill("run", f"{file}:M", *settings), hint=True)
    assert f"division by zero ({file}, line 4)" in line


def test_a_comparison_that_is_interrupted_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedstill.analysis.comparing.run_cells", interrupt)
    answer = fedstill("compare", "fedavg", *short(out=tmp_path / "c"))
    assert answer.code == 130
    assert answer.err.splitlines() == ["error: stopped", "what is done is kept; continue with: the same command"]
