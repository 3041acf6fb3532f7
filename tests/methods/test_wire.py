"""What methods declare is what crosses, what they need is what the papers say, and clients keep what is theirs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedstill
from fedstill.analysis.listings import list_methods
from fedstill.building.config import resolve
from fedstill.building.setup import Setup, prepare
from fedstill.core.tree import Message
from fedstill.methods import registry
from fedstill.methods.base import Method, Part, Wire
from fedstill.methods.feddyn import FedDyn
from fedstill.methods.moon import MOON
from fedstill.methods.scaffold import SCAFFOLD
from fedstill.running.directory import RunDirectory
from fedstill.train.loop import Objective
from fedstill.train.task import Task
from support import commandline
from support.quick import TINY, quick
from support.recorder import record_rounds
from support.runs import RunSmall, numbers, slow, weights

WIDTHS = (16 * 16, 8, 10)  # of that network
NAMES = registry.names()
# Not those whose clients send no model, nor fedkf, which has T1 of its own.
WITH_T1 = [f"{name}+t1" for name in NAMES if registry.make(name).global_model and name != "fedkf"]


def declared(name: str) -> tuple[Setup, Wire]:
    """A quick run ready to start, and what it says will cross."""
    setup = prepare(resolve(quick(name), {"method": name}))
    return setup, setup.method.wire(setup.task)


# --- declared and sent ----------------------------------------------------------------------------------------------


def bytes_of(part: Part) -> int:
    itemsize = {torch.float32: 4, torch.float64: 8, torch.int64: 8}[part.dtype]
    return int(np.prod(part.shape)) * itemsize


def check_message(message: Message, parts: dict[str, Part]) -> None:
    required = {name for name, part in parts.items() if not part.optional}
    assert required <= set(message) <= set(parts)
    for name, tensor in message.items():
        if parts[name].variable:
            assert tensor.dim() == 1, name
            assert len(tensor) <= parts[name].shape[0], name
        else:
            assert tuple(tensor.shape) == parts[name].shape, name
        assert tensor.dtype == parts[name].dtype, name


@pytest.mark.parametrize("name", [*NAMES, *map(slow, WITH_T1)])
def test_what_crosses_is_what_is_declared_and_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wire, crossings = declared(name)[1], record_rounds(monkeypatch)
    result = fedstill.run(name, **quick(name))
    up = sum(map(bytes_of, wire.up.values()))
    for crossing, record in zip(crossings, result.records, strict=True):
        assert len(crossing.cohort) == len(crossing.up) == record["clients"] == 3
        check_message(crossing.down, wire.down)
        for message in crossing.up.values():
            check_message(message, wire.up)
        assert record["bytes_down"] == 3 * sum(bytes_of(wire.down[part]) for part in crossing.down)
        sent = sum(tensor.nbytes for message in crossing.up.values() for tensor in message.values())
        assert record["bytes_up"] == sent
        assert sent == 3 * up or (sent < 3 * up and any(part.variable for part in wire.up.values()))
    whole = sum(map(bytes_of, wire.down.values()))
    assert result.records[-1]["bytes_down"] == 3 * whole, "by then nothing optional is missing"
    assert sum(part.nbytes for part in wire.down.values()) == whole, "what `fedstill methods` shows"
    assert sum(part.nbytes for part in wire.up.values()) == up
    for way in ("bytes_down", "bytes_up"):
        assert result.summary[way] == sum(record[way] for record in result.records)


# What goes down and up in numbers, by the papers; M is one model.
M = WIDTHS[0] * WIDTHS[1] + WIDTHS[1] + WIDTHS[1] * WIDTHS[2] + WIDTHS[2]
HEADED = WIDTHS[0] * 8 + 8 + (8 * 8 + 8) + (8 * 256 + 256) + (256 * 10 + 10)  # with MOON's projection head
LOGITS = 10 * 10 + 10  # the mean logits of each class, and which classes there are
PROTOTYPES = 10 * WIDTHS[1] + 10  # the mean features of each class, and which classes there are
HEAD = WIDTHS[1] * WIDTHS[2] + WIDTHS[2]
NUMBERS: dict[str, tuple[int, int]] = {
    "fedavg": (M, M),
    "fedprox": (M, M),
    "fedgkd": (2 * M, M),
    "fedgkd-vote": (2 * M + 2, M),  # a buffer of two models, and a weight for each
    "fedgkd-plus": (2 * HEADED, HEADED),
    "fedkf": (2 * M, M),
    "moon": (HEADED, HEADED),
    "feddistill": (LOGITS, LOGITS),
    "feddistill-plus": (M + LOGITS, M + LOGITS),
    "qffl": (M, M + 1),
    "fedmgda-plus": (M, M),
    "scaffold": (2 * M, 2 * M),
    "fednova": (M, M + 1),
    "feddyn": (M, M),
    "local": (0, 0),
    "fedproto": (PROTOTYPES, PROTOTYPES),
    "fedtgp": (PROTOTYPES, PROTOTYPES),
    "lg-fedavg": (HEAD, HEAD),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_the_payload_is_the_papers(name: str) -> None:
    wire = declared(name)[1]
    assert (
        tuple(sum(int(np.prod(part.shape)) for part in way.values()) for way in (wire.down, wire.up)) == NUMBERS[name]
    )


def test_fedgkd_with_a_buffer_of_one_sends_one_model() -> None:
    setup = prepare(resolve(TINY, {"method": "fedgkd", "buffer": 1}))
    assert list(setup.method.wire(setup.task).down) == ["model"]


class Occasional(fedstill.FedAvg):
    """Says more in every second round."""

    def wire(self, task: Task) -> Wire:
        plain = super().wire(task)
        return Wire(plain.down, plain.up | {"more": Part((2,), "now and then", optional=True)})

    def uplink(self, client: fedstill.Client) -> Message:
        return super().uplink(client) | ({"more": torch.ones(2)} if client.round % 2 else {})


def test_an_optional_part_may_be_missing_from_an_answer() -> None:
    result = fedstill.run(Occasional(), **TINY)
    assert [record["dropped"] for record in result.records] == [0, 0, 0]


# --- needed, against the papers' tables -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What a table says of a method; None: the table has no such column."""

    proxy_data: bool
    extra_information: bool
    changed_model: bool | None = None


FEDKF_TABLE_1 = {  # columns "No Proxy Data Required" and "No Additional Info. Leakage"
    "fedavg": Row(proxy_data=False, extra_information=False),
    "fedgen": Row(proxy_data=False, extra_information=True),
    "feddf": Row(proxy_data=True, extra_information=False),
    "fedprox": Row(proxy_data=False, extra_information=False),
    "moon": Row(proxy_data=False, extra_information=False),
    "fedgkd": Row(proxy_data=False, extra_information=False),
    "qffl": Row(proxy_data=False, extra_information=False),
    "fedmgda-plus": Row(proxy_data=False, extra_information=False),
    "fedkf": Row(proxy_data=False, extra_information=False),
}
FEDGKD_TABLE_1 = {  # columns "Proxy Data", "Add. Inf. Sharing" and "Model Modification"
    "fedavg": Row(proxy_data=False, extra_information=False, changed_model=False),
    "fedprox": Row(proxy_data=False, extra_information=False, changed_model=False),
    "feddistill": Row(proxy_data=False, extra_information=True, changed_model=False),
    "fedgen": Row(proxy_data=False, extra_information=True, changed_model=False),
    "feddf": Row(proxy_data=True, extra_information=False, changed_model=False),
    "moon": Row(proxy_data=False, extra_information=False, changed_model=True),
    "fedgkd": Row(proxy_data=False, extra_information=False, changed_model=False),
}
# What clients reveal beyond weights is declared here even where it is little: FedKF's table counts q-FFL's number as
# nothing, and neither table has a row for the other two.
COUNTED_HERE_ONLY = {"qffl": "loss", "fednova": "steps", "scaffold": "control variate"}
PRINTED = [
    pytest.param(name, row, id=f"{paper}-{name}")
    for paper, table in (("fedkf", FEDKF_TABLE_1), ("fedgkd", FEDGKD_TABLE_1))
    for name, row in table.items()
    if name in NAMES
]


@pytest.mark.parametrize(("name", "row"), PRINTED)
def test_needs_agree_with_the_papers_tables(name: str, row: Row) -> None:
    needs = registry.make(name).needs()
    assert needs.proxy_data == row.proxy_data
    assert bool(needs.extra_information) == (row.extra_information or name in COUNTED_HERE_ONLY)
    if row.changed_model is not None:
        assert needs.changed_model == row.changed_model


@pytest.mark.parametrize(("name", "word"), COUNTED_HERE_ONLY.items())
def test_what_the_tables_do_not_count_is_declared_all_the_same(name: str, word: str) -> None:
    (revealed,) = registry.make(name).needs().extra_information
    assert word in revealed


@pytest.mark.parametrize("name", NAMES)
def test_extra_information_is_declared_just_where_more_than_weights_goes_up(name: str) -> None:
    setup, wire = declared(name)
    assert bool(setup.method.needs().extra_information) == bool(set(wire.up) - {"model"})


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_model_is_declared_just_where_the_network_is_another(name: str) -> None:
    setup, _ = declared(name)
    assert setup.method.needs().changed_model == (setup.task.size != M)


def is_needy(name: str) -> bool:
    needs = registry.make(name).needs()
    return needs.server_labels or needs.proxy_data


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in [*NAMES, *WITH_T1] if is_needy(name.removesuffix("+t1"))])
def test_a_run_without_what_a_method_needs_is_refused_in_words(name: str) -> None:
    """Those that need neither labels nor proxy data ran without, above."""
    without = {key: value for key, value in quick(name).items() if key not in ("pool", "proxy")}
    with pytest.raises(fedstill.SettingError, match=r"needs .* samples|needs proxy data"):
        fedstill.run(name, **without)


def test_only_fedgkd_vote_of_the_client_side_needs_labels_on_the_server() -> None:
    assert [name for name in NUMBERS if registry.make(name).needs().server_labels] == ["fedgkd-vote"]
    assert not any(registry.make(name).needs().proxy_data for name in NUMBERS)


@pytest.mark.parametrize("name", WITH_T1)
def test_t1_changes_nothing_of_what_its_method_needs(name: str) -> None:
    plain, modified = registry.make(name.removesuffix("+t1")), registry.make(name)
    assert modified.needs() == plain.needs()
    assert modified.global_model == plain.global_model


# --- the table that users see ---------------------------------------------------------------------------------------


def shown(name: str) -> list[str]:
    """What 'fedstill methods NAME' says of each part: its name, what it is, and its size."""
    return [f"{part}: {what}, {size}" for _, part, what, size in list_methods(name, model="mlp").rows]


def in_words(numbers: int, itemsize: int = 4) -> str:
    size = numbers * itemsize
    power = (len(str(size)) - 1) // 3
    return f"{size / 1000**power:.3g} {('B', 'kB', 'MB')[power]}"


@pytest.mark.slow
def test_every_method_shows_its_parts_with_their_bytes() -> None:
    body = 784 * 200 + 200 + 200 * 200 + 200
    m = body + 200 * 10 + 10
    headed = body + (200 * 200 + 200) + (200 * 256 + 256) + (256 * 10 + 10)
    number, logits = in_words(1, 8), in_words(100)
    expected = {name: [f"model: weights, {in_words(m)}"] for name in NUMBERS}
    expected["moon"] = expected["fedgkd-plus"] = [f"model: weights, {in_words(headed)}"]
    expected["local"] = []
    expected["fedproto"] = expected["fedtgp"] = [f"prototypes: mean features of each class, {in_words(10 * 200)}"]
    expected["lg-fedavg"] = [f"head: weights of the head, {in_words(200 * 10 + 10)}"]
    expected["feddistill"] = [f"logits: mean logits of each class, {logits}"]
    expected["feddistill-plus"] += [f"logits: mean logits of each class, {logits}"]
    expected["qffl"] += [f"loss: loss before training, {number}"]
    expected["fednova"] += [f"a: normalised number of steps, {number}"]
    expected["scaffold"] += [f"c: control variate, {in_words(m)}", f"c_change: control variate, {in_words(m)}"]
    for name in ("fedgkd", "fedkf"):
        expected[name] += [f"teacher: weights, {in_words(m)}"]
    for name, parts in expected.items():
        assert set(parts) <= set(shown(name)), name
    assert not any(part.startswith("model: ") for part in shown("feddistill"))


def test_the_overview_says_what_each_method_needs() -> None:
    needs = {row[0]: row[2] for row in list_methods().rows}
    papers = {row[0]: row[3] for row in list_methods().rows}
    assert [name for name in needs if name in NAMES] == NAMES
    for name in NAMES:
        method = registry.make(name)
        assert ("proxy data" in needs[name]) == method.needs().proxy_data, name
        assert ("labels on the server" in needs[name]) == method.needs().server_labels, name
        assert ("a changed model" in needs[name]) == method.needs().changed_model, name
        assert all(words in needs[name] for words in method.needs().extra_information), name
        assert papers[name] == method.paper, name


@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("moon+t1", "a changed model"),
        ("fedgkd-vote+t1", "labels on the server"),
        ("scaffold+t1", "control variate"),
        ("feddistill-plus+t1", "logits"),
    ],
)
def test_a_modified_method_needs_what_the_method_needs(name: str, need: str) -> None:
    answer = commandline.fedstill("methods", name, "--model", "mlp", columns=400)
    assert answer.code == 0, answer.err
    said = " ".join(answer.out.split("Settings of")[0].split())  # a caption is folded as its table is wide
    assert need in said.split("· needs ")[1]


# --- what clients keep ----------------------------------------------------------------------------------------------

STATEFUL = ["scaffold", "feddyn", "moon", "fedkf", "feddistill"]


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal to the bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def client_states(path: Path) -> dict[int, Any]:
    store = RunDirectory(path).client_store
    states = {k: store.read(k, before=10**9) for k in range(TINY["clients"])}
    return {k: state for k, state in states.items() if state is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEFUL)
def test_client_state_survives_resume_after_every_round_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Uninterrupted in one process, and stopped after each round in two; the cohorts differ."""
    whole = fedstill.run(name, out=tmp_path / "whole", **(quick(name) | {"rounds": 4}))
    broken = tmp_path / "broken"
    last = fedstill.run(name, out=broken, **(quick(name) | {"rounds": 1, "engine": "process", "workers": 2}))
    for rounds in (2, 3, 4):
        last = fedstill.resume(broken, rounds=rounds)
    assert numbers(last) == numbers(whole)
    assert torch.equal(weights(last), weights(whole))
    states, expected = client_states(broken), client_states(tmp_path / "whole")
    assert states.keys() == expected.keys()
    assert len(expected) > 3, "more clients than in any one round"
    for k, state in expected.items():
        assert same(states[k], state), f"client {k}"
        assert not any(same(state, other) for j, other in expected.items() if j != k), "and each has its own"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedgkd", "qffl", "fednova", "fedmgda-plus", "feddistill-plus"])
def test_methods_without_client_state_leave_no_files(name: str, tmp_path: Path) -> None:
    fedstill.run(name, out=tmp_path / "run", **(quick(name) | {"rounds": 2}))
    assert client_states(tmp_path / "run") == {}


def test_moons_clients_keep_the_models_that_they_themselves_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossings = record_rounds(monkeypatch)
    fedstill.run("moon", out=tmp_path / "run", **(quick("moon") | {"rounds": 6}))
    sent: dict[int, list[Tensor]] = {}
    for crossing in crossings:
        for k, up in crossing.up.items():
            sent.setdefault(k, []).insert(0, up["model"])
    states = client_states(tmp_path / "run")
    assert states.keys() == sent.keys()
    assert any(len(models) > 2 for models in sent.values()), "some had to forget"
    assert all(same(states[k]["previous"], models[:2]) for k, models in sent.items()), "the newest two, newest first"


def test_scaffolds_clients_keep_the_sum_of_their_own_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossings = record_rounds(monkeypatch)
    fedstill.run("scaffold", out=tmp_path / "run", **(TINY | {"rounds": 6}))
    changes: dict[int, Tensor] = {}
    for crossing in crossings:
        for k, up in crossing.up.items():
            changes[k] = changes.get(k, torch.zeros(())) + up["c_change"].double()
    states = client_states(tmp_path / "run")
    assert states.keys() == changes.keys()
    for k, change in changes.items():
        torch.testing.assert_close(states[k]["c"].double(), change, rtol=1e-5, atol=1e-6)


class Stumbling(fedstill.FedAvg):
    """Put before a method's class: in round 2 one client's training goes to infinity."""

    def objective(self, client: fedstill.Client) -> Objective:
        objective = super().objective(client)
        if client.round == 2 and client.id == 0:
            return replace(objective, gradient=lambda w: torch.full_like(w, torch.inf))
        return objective


class StumblingScaffold(Stumbling, SCAFFOLD): ...


class StumblingFedDyn(Stumbling, FedDyn): ...


class StumblingMOON(Stumbling, MOON): ...


@pytest.mark.slow
@pytest.mark.parametrize("method", [Stumbling(), StumblingScaffold(), StumblingFedDyn(), StumblingMOON()])
def test_a_client_whose_training_failed_once_is_back_in_the_next_round(run_small: RunSmall, method: Method) -> None:
    """Its answer is dropped; what it keeps must not be what that training left."""
    result = run_small(method, **(TINY | {"rounds": 4, "participation": 1.0}))
    assert [record["dropped"] for record in result.records] == [0, 1, 0, 0]
