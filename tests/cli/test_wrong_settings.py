"""A wrong setting, or a file of the user's own that cannot be used: one clear line, a non-zero exit, no traceback."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from support.commandline import (
    SHORT,
    assert_same_run,
    change_settings,
    fedstill,
    short,
)
from support.misuse import contents, message

WRONG: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {  # words, changed settings, what is said
    "a misspelt method": (("fedprx",), {}, "unknown method 'fedprx'; did you mean 'fedprox' or"),
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
    "a misspelt choice": (("fedavg",), {"engine": "inlin"}, "'inlin': should be 'process', 'inline' or 'ray'"),
    "the engine of before": (("fedavg", "--engine", "flower"), {}, "engine has given way to 'ray'"),
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
        (("methods", "fedprx"), "did you mean 'fedprox' or"),
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
    "a misspelt name": ("class Mine: pass\n", "Mien", "mine.py has no 'Mien'; it has Mine"),
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
    ("data", "def net(): return [1, 2]"): "returns is a list of 2; give a name or path, a fedstill.Dataset or",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OWN_PARTS, ids=lambda case: f"{case[0]}: {case[1].splitlines()[-1][:60]}")
def test_a_users_own_network_or_data_that_cannot_be_used_is_one_line(case: tuple[str, str], tmp_path: Path) -> None:
    setting, text = case
    (tmp_path / "mine.py").write_text(text)
    answer = fedstill("run", "fedavg", *short(out=tmp_path / "run", **{setting: f"{tmp_path}/mine.py:net"}))
    assert OWN_PARTS[case] in message(answer)
    assert not (tmp_path / "run").exists()
