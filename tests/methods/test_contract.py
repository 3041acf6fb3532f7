"""The contract of methods: what a modifier passes on, what a composition may share, how long a method may be."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import fedstill
from fedstill.core.store import Store
from fedstill.methods import registry
from fedstill.methods.base import Method, Part, Server, Wire
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.modifier import Modifier
from fedstill.methods.server_side import Distilling
from fedstill.running.directory import RunDirectory
from fedstill.train.client import Client
from support.runs import SMALL
from support.wiretap import setup_of

SOURCE = Path(fedstill.__file__).parent


# --- a modifier -------------------------------------------------------------------------------------------------------


def questions() -> list[str]:
    """Everything public that `Method` can be asked and a method may answer otherwise."""
    found = []
    for name, member in vars(Method).items():
        asks = inspect.isfunction(member) or isinstance(member, property)
        if asks and not name.startswith("_") and not getattr(member, "__final__", False):
            found.append(name)
    return found


def test_the_contract_is_found() -> None:
    assert {"wire", "downlink", "objective", "uplink", "aggregate", "models", "fewest_clients"} <= set(questions())


@pytest.mark.parametrize("name", questions())
def test_a_modifier_passes_on_every_question(name: str) -> None:
    called: list[str] = []

    def answer(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        raise StopIteration

    member = vars(Method)[name]
    inner = type("Inner", (FedAvg,), {name: property(answer) if isinstance(member, property) else answer})()
    modifier = Modifier(inner=inner)
    arguments = [] if isinstance(member, property) else [None] * (len(inspect.signature(member).parameters) - 1)
    with pytest.raises(StopIteration):
        getattr(modifier, name)(*arguments)
    assert called == [name]


def test_a_modifier_of_krum_needs_as_many_clients() -> None:
    assert registry.make("fedavg+krum+t1", {"byzantine": 2}).fewest_clients == 7


# --- a composition ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keeps(FedAvg):
    """Keeps something under a name that T1 and others have for something of theirs."""

    name: ClassVar[str] = "keeps"
    server_keys: ClassVar[tuple[str, ...]] = ("t1",)
    client_keys: ClassVar[tuple[str, ...]] = ("discriminator",)
    streams: ClassVar[tuple[str, ...]] = ("calibration",)


@dataclass(frozen=True)
class KeepsWithoutSaying(FedAvg):
    def start(self, server: Server) -> None:
        server.state["t1"] = 1


@dataclass(frozen=True)
class Sends(FedAvg):
    name: ClassVar[str] = "sends"

    def wire(self, task: Any) -> Wire:
        plain = super().wire(task)
        return Wire(plain.down | {"generator": Part((1,), "mine")}, plain.up)


@dataclass(frozen=True)
class Counts(FedAvg):
    name: ClassVar[str] = "counts"

    def wire(self, task: Any) -> Wire:
        plain = super().wire(task)
        return Wire(plain.down, plain.up | {"counts": Part((task.classes,), "steps of each class")})


@dataclass(frozen=True)
class Ends(FedAvg):
    """Has a final exchange of its own."""

    name: ClassVar[str] = "ends"

    def wire(self, task: Any) -> Wire:
        return replace(super().wire(task), last={"sum": Part((), "mine")})


@pytest.mark.parametrize(
    ("inner", "outer", "message"),
    [
        (Keeps(), "t1", "keeps and t1 cannot be composed: both use the key 't1' of server.state"),
        (Keeps(), "dafkd", "keeps and dafkd cannot be composed: both use the key 'discriminator' of client.state"),
        (Keeps(), "ccvr", "keeps and ccvr cannot be composed: both use the random stream 'calibration'"),
        (Sends(), "dafkd", "sends and dafkd cannot be composed: both use 'generator' in their messages"),
        (Counts(), "fedgen", "counts and fedgen cannot be composed: both use 'counts' in their messages"),
        (Ends(), "ccvr", "ccvr leaves 'sum' out of the final exchange, which ends needs"),
    ],
)
def test_one_name_for_two_things_is_refused(inner: Method, outer: str, message: str) -> None:
    task = setup_of("fedavg").task
    made = registry.make(f"fedavg+{outer}")
    assert isinstance(made, Modifier)
    with pytest.raises(fedstill.SettingError, match=re.escape(message)):
        replace(made, inner=inner).check(task)


def test_a_key_that_nobody_declared_is_refused_too(tmp_path: Path) -> None:
    setup = setup_of("fedavg")
    server = Server(setup.task, setup.federation.sizes, Store(tmp_path))
    made = registry.make("fedavg+t1")
    assert isinstance(made, Modifier)
    with pytest.raises(fedstill.SettingError, match=r"'t1' in server\.state"):
        replace(made, inner=KeepsWithoutSaying()).start(server)


def test_two_distillations_of_a_composition_draw_from_two_streams() -> None:
    alone, both = registry.make("feddf"), registry.make("fedbe+feddf")
    assert isinstance(alone, Distilling)
    assert isinstance(both, Distilling)
    assert alone.own_order_stream == "distillation"
    assert both.own_order_stream == "feddf: distillation"


def test_a_stream_of_the_users_is_never_one_of_the_librarys(tmp_path: Path) -> None:
    setup = setup_of("fedavg")
    server = Server(setup.task, setup.federation.sizes, Store(tmp_path))
    client = Client(setup.task, 0, 1, None, {})  # type: ignore[arg-type]  # it needs no data
    one: Client | Server
    for one, purpose in ((client, "batches"), (client, "noise"), (server, "distillation")):
        assert one.rng(purpose).initial_seed() != one.stream(purpose).initial_seed()
        assert one.rng(purpose).initial_seed() == one.rng(purpose).initial_seed()


SHORT: dict[str, dict[str, Any]] = {
    "feddf": {"server_steps": 1},
    "fedbe": {"server_epochs": 1, "samples": 2},
    "dafkd": {"batches": 1, "server_batch": 8, "z_dim": 4, "server_epochs": 1},
    "fedkf": {"width": 2, "z_dim": 4},
    "fedftg": {"iterations": 1, "z_dim": 4, "server_batch": 4},
    "creff": {"retrain_epochs": 1, "match_steps": 1},
    "fedhyb": {"variant": "3"},
    "fedhkd": {"noise": 0.1},
    "ccvr": {"calibration_epochs": 1},
}
TRAINING = ("batches", "augment")  # streams of the training loop itself
# With other settings or different networks only, or not in a checkpoint.
NOT_HERE = {"digest", "model", "sub-networks", "ccvr", "group teacher", "student"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*registry.names(), "fedavg+t1", "fedavg+ccvr"])
def test_a_method_keeps_and_draws_what_it_declares(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: set[str] = set()
    for side in (Client, Server):
        original = side.stream

        def stream(self: Any, purpose: str, original: Any = original) -> Any:
            drawn.add(purpose)
            return original(self, purpose)

        monkeypatch.setattr(side, "stream", stream)
    settings = SMALL | {"model": "mlp", "image_size": 16, "model_options": {"hidden": [8]}, "rounds": 2, "epochs": 1}
    settings |= {"pool": 0.2, "proxy": "pool", "fraction": 0.05, "participation": 1.0}
    settings["hyper"] = SHORT.get(name.rpartition("+")[2], {})
    fedstill.run(name, out=tmp_path / "run", **settings)
    directory = RunDirectory.open(tmp_path / "run", lock=False)
    parts = registry.make(name, settings["hyper"]).parts()
    order = {part.order_stream for part in parts if isinstance(part, Distilling)}
    kept = {key for k in range(settings["clients"]) for key in directory.client_store.latest(k) or {}}
    for found, declared in (
        (drawn - {*TRAINING}, {stream for part in parts for stream in part.streams} | order),
        (set(directory.server_state() or {}), {key for part in parts for key in part.server_keys}),
        (kept, {key for part in parts for key in part.client_keys}),
    ):
        assert declared - NOT_HERE <= found <= declared


# --- how long and how many --------------------------------------------------------------------------------------------


def lines_of_code(path: Path) -> int:
    """Lines that are not imports, docstrings, comments or blank."""
    text = path.read_text()
    other: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            other.update(range(node.lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            other.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(number not in other and bool(line.strip()) and line.strip()[0] != "#" for number, line in lines)


@pytest.mark.parametrize(
    ("method", "most"), [("fedprox", 15), ("moon", 40), ("fedkf", 120), ("dafkd", 160), ("lkd", 150)]
)
def test_a_method_is_short(method: str, most: int) -> None:
    assert lines_of_code(SOURCE / "methods" / f"{method}.py") <= most


def test_lines_of_code_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Doc\nstring."""\nimport os\n\n# why\nx = (\n    1,\n)\n')
    assert lines_of_code(tmp_path / "a.py") == 3


def test_there_is_one_place_for_kl_and_one_for_the_steps_of_training() -> None:
    texts = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    assert [path for path, text in texts.items() if "kl_div" in text] == ["train/losses.py"]
    assert [path for path in texts if path.startswith("train/") and ".backward(" in texts[path]] == [
        *["train/loop.py", "train/together.py"]  # there to try a network, not to train it
    ]


def test_reading_the_weights_changes_no_state() -> None:
    setup = setup_of("fedavg", buffers="local")
    client = Client(setup.task, 0, 1, None, {"model": torch.zeros(setup.task.size)})  # type: ignore[arg-type]
    assert client.weights is not None
    assert client.touched_state is None
