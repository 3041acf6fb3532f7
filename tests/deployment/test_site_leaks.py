"""Nothing of a site's data, names or paths reaches its server: a marker is put everywhere, and searched for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedstill
from fedstill.building.config import resolve
from fedstill.core import reports
from fedstill.core.tree import Tree
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.policy import Policy
from fedstill.deployment.server import serve
from fedstill.deployment.site import Site
from fedstill.deployment.site_engine import Terms
from support.runs import SMALL

pytest.importorskip("flwr")
from flwr.app import RecordDict

from fedstill.flower import link, node
from fedstill.flower.records import to_records

MARKER = "zqxmarker"  # not in any test's name, which names its folder
SETTINGS: dict[str, Any] = {k: v for k, v in SMALL.items() if k != "engine"} | {
    "clients": 2, "participation": 1.0, "rounds": 1, "model": "mlp", "model_options": {"hidden": [4]},
}  # fmt: skip
TEXT = {"data": "glosses-mini", "model": "bag", "model_options": {}, "image_size": 0}


class Nodes:
    """Sites behind the code that answers Flower's messages, and the code that reads the answers; all that crosses."""

    def __init__(self, folder: Path, **own: LocalInputs) -> None:
        self.received: list[bytes] = []
        self.nodes = {}
        for name, has in own.items():
            (folder / name).mkdir(parents=True)
            site = Site(folder / name, has, Policy())
            self.nodes[name] = node._Site(site.handle, folder / name, None, site.record)

    def present(self) -> set[str]:
        return set(self.nodes)

    def send_requests(
        self, requests: Mapping[str, Tree], *, timeout: float, name: str | None = None, **more: Any
    ) -> Iterator[tuple[str, Any]]:
        for site, request in requests.items():
            told = {"id": name or "x", "seconds": 60.0, "keep": False, "body": request}
            answer = self.nodes[site].answer(to_records(told))
            self.received.append(everything_in(answer))
            yield site, link._read(SimpleNamespace(has_error=lambda: False, content=answer), name or "x", 10**7)  # type: ignore[arg-type]


def everything_in(records: RecordDict) -> bytes:
    text = str(records.config_records["tree"]["json"]).encode()
    return text + b"".join(k.encode() + a.data for k, a in records.array_records["tensors"].items())


@pytest.fixture
def home_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What sites log at home: on a machine of their own, not in this process's logs."""
    lines: list[str] = []
    logger = logging.Logger("home")
    logger.addHandler(SimpleHandler(lines))
    monkeypatch.setattr(node, "_log", logger)
    return lines


class SimpleHandler(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def csv(*lines: str) -> Callable[[Path], LocalInputs]:
    def make(folder: Path) -> LocalInputs:
        (folder / f"{MARKER}.csv").write_text("\n".join(lines) + "\n")
        return LocalInputs(data=str(folder / f"{MARKER}.csv"))

    return make


def images(*files: str, damaged: bool = False) -> Callable[[Path], LocalInputs]:
    def make(folder: Path) -> LocalInputs:
        for number, file in enumerate(files):
            path = folder / MARKER / file
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((16, 16), number, np.uint8)).save(path)
            if damaged:
                path.write_bytes(path.read_bytes()[:40])
        return LocalInputs(data=str(folder / MARKER))

    return make


def npz(**arrays: Any) -> Callable[[Path], LocalInputs]:
    def make(folder: Path) -> LocalInputs:
        np.savez(folder / f"{MARKER}.npz", **arrays)
        return LocalInputs(data=str(folder / f"{MARKER}.npz"))

    return make


def code(text: str, kind: str, name: str) -> Callable[[Path], LocalInputs]:
    def make(folder: Path) -> LocalInputs:
        (folder / "mine.py").write_text(text.replace("MARKER", MARKER))
        return LocalInputs(**{kind: f"{folder / 'mine.py'}:{name}"})

    return make


FIVE = [f"a/{MARKER}-{i}.png" for i in range(6)]
PIXELS = np.zeros((10, 16, 16), np.uint8)
METHOD = """
from dataclasses import dataclass
import fedstill

class MARKER(Exception): ...

@dataclass(frozen=True)
class Raises(fedstill.FedAvg):
    def objective(self, client):
        raise MARKER("MARKER")

@dataclass(frozen=True)
class Tells(fedstill.FedAvg):
    def uplink(self, client):
        return super().uplink(client) | {"MARKER": client.weights}

@dataclass(frozen=True)
class Odd(fedstill.FedAvg):
    def uplink(self, client):
        return {"model": "MARKER"}
"""
NET = "def net(shape, classes):\n    raise ValueError('MARKER')\n\ndef data():\n    raise SystemExit('MARKER')\n"

FAILING: dict[str, tuple[Callable[[Path], LocalInputs], dict[str, Any]]] = {
    "csv-without-header": (csv(f"{MARKER}, 1961-04-02, positive, 1", f"{MARKER},a,b,c"), TEXT),
    "csv-other-columns": (csv(f"{MARKER},label", f"{MARKER},1"), TEXT),
    "csv-column-twice": (csv("text,label,label", f"{MARKER},b,c"), TEXT),
    "csv-torn-line": (csv("text,label", MARKER, f"{MARKER},1"), TEXT),
    "csv-one-label": (csv("text,label", *[f"word {i},{MARKER}" for i in range(9)]), TEXT),
    "csv-empty-label": (csv("text,label", f"{MARKER},"), TEXT),
    "csv-unknown-labels": (csv("text,label", *[f"word,{MARKER}{i % 2}" for i in range(20)]), TEXT),
    "csv-as-image": (csv("text,label", f"{MARKER},1", "b,2"), {}),
    "images-damaged": (images(*FIVE, *[f"b/{i}.png" for i in range(6)], damaged=True), {}),
    "images-unknown-class": (images(*[f"{MARKER}{c}/{i}.png" for c in "ab" for i in range(6)]), {}),
    "images-none": (images("readme.png"), {}),
    "npz-other-names": (npz(**{MARKER: PIXELS, "y": np.arange(10)}), {}),
    "npz-unknown-class": (npz(x=PIXELS, y=np.arange(10) % 2, classes=np.array([MARKER, "b"])), {}),
    "npz-labels-of-text": (npz(x=PIXELS, y=np.array([MARKER] * 10)), {}),
    "npz-length": (npz(x=PIXELS, y=np.arange(3)), {}),
    "no-such-file": (lambda folder: LocalInputs(data=str(folder / f"{MARKER}.npz")), {}),
    "own-data-ends": (code(NET, "data", "data"), {}),
    "own-data-is-none": (code("def data():\n    return 'MARKER'\n", "data", "data"), {}),
    "own-data-does-not-load": (code("raise KeyError('MARKER')\n", "data", "data"), {}),
}  # fmt: skip


def run(folder: Path, own: LocalInputs, **settings: Any) -> tuple[Nodes, Path]:
    nodes, out = Nodes(folder / "sites", north=LocalInputs(), south=own), folder / "run"
    config = resolve(SETTINGS | settings)
    serve(config, ["north", "south"], nodes, out, terms=Terms(timeout=60), pause=lambda missing: False)
    return nodes, out


def check(nodes: Nodes, out: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not any(MARKER.encode() in received.lower() for received in nodes.received)
    assert MARKER not in caplog.text.lower()
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {"log.txt", "received.jsonl"} <= {path.name for path in files}
    for path in files:
        assert MARKER.encode() not in path.read_bytes().lower(), path
        assert MARKER not in path.name


@pytest.mark.slow
@pytest.mark.parametrize("case", FAILING)
def test_what_is_wrong_with_the_data_is_said_at_home_alone(
    tmp_path: Path, case: str, home_log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    make, settings = FAILING[case]
    home = tmp_path / "home"
    home.mkdir()
    nodes, out = run(tmp_path, make(home), **settings)
    check(nodes, out, caplog)
    assert "south cannot take part: " in (out / "log.txt").read_text()
    assert "details are in the site's own log" in (out / "log.txt").read_text()
    if case not in ("images-none", "csv-as-image", "own-data-is-none"):  # whose errors do not name it
        assert any(MARKER in line for line in home_log)
    number = (out / "log.txt").read_text().split(", number ")[1][:4]
    assert any(f"number {number}: " in line for line in home_log), "by which the line at home is found"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Raises", "Tells", "Odd"])
def test_a_method_of_ones_own_that_raises_or_sends_more_tells_nothing(
    tmp_path: Path, name: str, home_log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    own = code(METHOD, "method", name)(home)
    with pytest.raises(fedstill.FedstillError, match="needed"):
        serve(
            resolve(SETTINGS | {"method": own.method, "clients": 1}), ["south"],
            nodes := Once(tmp_path / "sites", south=own), out := tmp_path / "run",
            terms=Terms(timeout=60), pause=lambda missing: False,
        )  # fmt: skip
    check(nodes, out, caplog)
    assert len(nodes.received) > 1


class Once(Nodes):
    """Gives the run up after its first round: one in which nobody answers is tried again."""

    def present(self) -> set[str]:
        if len(self.received) > 1:
            raise fedstill.FedstillError("as many answers as are needed")
        return super().present()


def test_a_network_of_ones_own_that_raises_tells_nothing(
    tmp_path: Path, home_log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    nodes, out = run(tmp_path, code(NET, "model", "net")(home))
    check(nodes, out, caplog)
    assert any(MARKER in line for line in home_log)


@pytest.mark.slow
def test_data_that_train_tell_neither_names_nor_texts(
    tmp_path: Path, home_log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    classes = fedstill.load_dataset("fashion-mini").classes[:2]
    own = images(*[f"train/{c}/{MARKER}-{i}.png" for c in classes for i in range(9)])(home)
    check(*run(tmp_path / "a", own), caplog)
    labels = fedstill.load_dataset("glosses-mini").classes[:2]
    rows = [f"{MARKER} {i},{labels[i % 2]},{MARKER}{i % 3}" for i in range(20)]
    own = csv("text,label,client", *rows)(home)
    nodes, out = run(tmp_path / "b", own, **TEXT)
    check(nodes, out, caplog)
    assert "south has" in (out / "log.txt").read_text(), "it took part"
    assert home_log == []


# --- what a server makes of a report ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forged",
    [
        "a text", None, [], {}, 7, {"code": "failed"},
        {"code": "failed", "step": "load", "number": "4f2a", "text": "more"},
        {"code": "failed\n2026-01-01 INFO all is well", "step": "load", "number": "4f2a"},
        {"code": "failed", "step": "\x1b[2J", "number": "4f2a"},
        {"code": "failed", "step": "load", "number": "x" * 1_200_000},
        {"code": ["failed"], "step": "load", "number": "4f2a"},
    ],
)  # fmt: skip
def test_a_forged_report_is_not_repeated(forged: Any) -> None:
    assert reports.sentence(forged) == "it failed, and its report is not one of the known codes"


def test_every_code_has_a_sentence() -> None:
    assert set(reports.SENTENCES) == set(reports.Code)
    for code in reports.Code:
        text = reports.sentence(reports.report(code, reports.Step.LOAD, reports.new_number()))
        assert code in text
        assert len(text) < 300


def test_strings_from_elsewhere_are_one_short_printable_line() -> None:
    assert reports.cleaned("a\nb\tc\x1b[31m\u202e\x00") == "a b c?[31m??"
    assert len(reports.cleaned("x" * 10**6)) == 200
    message = {"n\n" * 10**5: 1, "\x1b[2J": 2}
    problem = fedstill.methods.base.misfit(message, {})
    assert problem is not None
    assert len(problem) < 300
    assert problem.isprintable()
