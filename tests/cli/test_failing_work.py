"""Clients that answer wrongly and methods that fail: one clear line, and nothing is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fedstill as library
from support.commandline import (
    assert_same_run,
    change_settings,
    fedstill,
    metrics,
    model,
    run,
    short,
)
from support.misuse import message

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


def test_from_python_the_users_own_exception_arrives_as_it_is() -> None:
    class Broken(library.FedAvg):
        def downlink(self, server: library.Server) -> dict[str, torch.Tensor]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        library.run(Broken(), clients=2, fraction=0.02, model="mlp", engine="inline")
