"""Tables at sites: what a server is told before the first round, who allows it, and that the bits are the same."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill
from fedstill.building.config import resolve
from fedstill.core.reports import Code, code_of
from fedstill.core.tree import Tree
from fedstill.data import statistics
from fedstill.data.dataset import Split
from fedstill.data.federation import Federation
from fedstill.data.formats.table import TableSettings, read
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.policy import Policy
from fedstill.deployment.server import serve
from fedstill.deployment.site import Site
from fedstill.deployment.site_engine import Terms
from fedstill.methods.kinds import Kind
from support import regions
from support.sites import NAMES, Wire, weights

SETTINGS: dict[str, Any] = {
    "target": "outcome",
    "model": "mlp",
    "model_options": {"hidden": [8]},
    "rounds": 2,
    "epochs": 1,
    "participation": 1.0,
    "partition": "natural",
}
ALLOWED = Policy(allow=("statistics",))


def table(path: Path, seed: int, rows: int = 60, categories: str = "abc", **changed: str) -> Path:
    """A table of patients; `changed` lines replace columns' names."""
    rng = np.random.default_rng(seed)
    ill = rng.integers(0, 2, rows)
    columns = {
        "age": rng.normal(50 + 5 * seed + 10 * ill, 8).round(1).astype(str),
        "ward": np.array([categories[i % len(categories)] for i in range(rows)]),
        "outcome": np.where(ill, "ill", "well"),
    }
    columns["age"][:6] = ""
    header = ",".join(changed.get(name, name) for name in columns)
    path.write_text("\n".join([header, *map(",".join, zip(*columns.values(), strict=True))]) + "\n")
    return path


class Hospitals(Wire):
    """Three sites with tables of their own, whose answers are written down."""

    def __init__(self, folder: Path, policy: Policy = ALLOWED, target: str = "", **given: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.files = {
            name: given.get(name) or table(folder / f"{name}.csv", seed, categories="abcd"[seed : seed + 2])
            for seed, name in enumerate(NAMES)
        }
        self.sites = {
            name: Site(folder / name, LocalInputs(data=str(path), target=target), policy)
            for name, path in self.files.items()
        }
        self.away = set[str]()
        self.answers: list[tuple[str, Tree, Tree]] = []

    def answer(self, name: str, request: Tree) -> Any:
        try:
            found = super().answer(name, request)
        except fedstill.FedstillError as error:
            return {"error": {"code": code_of(error).value, "step": "consent", "number": "0000"}}
        self.sites[name].record(request, {"body": found})
        self.answers.append((name, request["request"], found))
        return found


def served(wire: Wire, out: Path, **settings: Any) -> Any:
    config = resolve(SETTINGS | {"clients": 3} | settings)
    return serve(config, NAMES, wire, out, terms=Terms(timeout=5), pause=lambda missing: False)


def of_run(out: Path) -> list[dict[str, Any]]:
    return list(json.loads((out / "preprocessing.json").read_text())["columns"])


def simulated(wire: Hospitals, server: Path, out: Path) -> Any:
    """The run of one machine that has the sites' training and test rows, and the server's test rows."""
    server_data = read(server, TableSettings("outcome"))
    assert server_data.table is not None
    wide = server_data.table.model_copy(
        update={"columns": (server_data.table.columns[0], server_data.table.columns[1].model_copy(
            update={"categories": tuple("abcde")}))}
    )  # fmt: skip
    parts = [
        statistics.with_table(read(path, TableSettings("outcome", columns=wide.columns)), wide)
        for path in wire.files.values()
    ]
    splits = [*(part.train for part in parts), *(part.test for part in parts)]
    x, y = torch.cat([split.x for split in splits]), torch.cat([split.y for split in splits])
    bounds = np.cumsum([0, *(len(split) for split in splits)])
    dataset = replace(statistics.with_table(server_data, wide), train=Split(x, y))
    federation = Federation(
        dataset,
        np.arange(bounds[3]),
        bounds[:4],
        np.arange(bounds[3], bounds[6]),
        bounds[3:] - bounds[3],
        np.zeros(0, np.int64),
    )
    own = {k: v for k, v in SETTINGS.items() if k not in ("target", "partition")}
    return fedstill.run(data=federation, out=out, engine="inline", lr=0.1, **own)


def test_a_served_run_on_tables_has_the_bits_of_a_simulation(tmp_path: Path) -> None:
    wire, server = Hospitals(tmp_path / "sites"), table(tmp_path / "server.csv", 9, categories="ae")
    result = served(wire, tmp_path / "served", data=str(server))
    alone = simulated(wire, server, tmp_path / "alone")
    assert of_run(tmp_path / "served") == of_run(tmp_path / "alone")
    assert of_run(tmp_path / "served")[1]["categories"] == ["a", "b", "c", "d"], "those of the sites' rows"
    assert weights(tmp_path / "served") == weights(tmp_path / "alone")
    assert [r["accuracy"] for r in result.records] == [r["accuracy"] for r in alone.records]
    assert [r["amp"] for r in result.records] == [r["amp"] for r in alone.records]


def test_a_site_tells_sums_and_nothing_of_a_row(tmp_path: Path) -> None:
    rare = table(tmp_path / "rare.csv", 3, categories="a")
    lines = rare.read_text().splitlines()
    lines[7:9] = ["77.7,secret,ill", "33.3,hidden,well"]
    rare.write_text("\n".join(lines) + "\n")
    wire = Hospitals(tmp_path / "sites", south=rare)
    served(wire, tmp_path / "run", data=str(table(tmp_path / "server.csv", 9)))
    told = {name: answer for name, request, answer in wire.answers if request == {"kind": "Statistics"}}
    assert told.keys() == set(NAMES)
    assert told["south"]["categories"] == [[], ["a"]], "what fewer than five rows have is not told"
    assert {name: tuple(part.shape) for name, part in told["south"]["message"].items()} == {
        **dict.fromkeys(("present", "missing", "sums", "squares"), (2,)),
        "counts": (1,),
    }
    own = read(rare, TableSettings("outcome")).train.x[:, 0]
    assert told["south"]["message"]["sums"][0].item() == pytest.approx(own.nansum().item())
    entry = json.loads((tmp_path / "sites/south/audit.jsonl").read_text().splitlines()[0])
    assert entry["request"] == "Statistics"
    assert {part["kind"] for part in entry["parts"]} == {"statistics"}
    assert entry["values"] == ["categories"]
    received = (tmp_path / "run/received.jsonl").read_text() + (tmp_path / "run/log.txt").read_text()
    assert "secret" not in received + str(wire.answers)


@pytest.mark.slow
def test_statistics_need_consent_and_a_declared_table_needs_none(tmp_path: Path) -> None:
    server = table(tmp_path / "server.csv", 9)
    for policy in (Policy(), Policy(allow=("statistics",), deny=(Kind.STATISTICS,))):
        wire = Hospitals(tmp_path / "sites", policy)
        with pytest.raises(fedstill.FedstillError, match="only 0 of 3 sites"):
            served(wire, tmp_path / f"run{len(policy.deny)}", data=str(server))
        assert not wire.answers
        assert Code.NOT_ALLOWED in (tmp_path / f"run{len(policy.deny)}/log.txt").read_text()
    columns = [{"name": "age", "mean": 50.0, "std": 10.0, "missing": True}, {"name": "ward", "categories": ["a", "b"]}]
    wire = Hospitals(tmp_path / "sites", Policy())
    served(wire, tmp_path / "declared", data=str(server), columns=columns)
    assert {request["kind"] for _, request, _ in wire.answers if request} == {"Train", "Score", "Finish"}
    assert of_run(tmp_path / "declared")[0]["mean"] == 50.0


def test_the_owner_is_asked_with_the_columns_named(tmp_path: Path) -> None:
    asked: list[str] = []
    go = threading.Event()

    def ask(question: str) -> bool:
        asked.append(question)
        return go.wait()

    site = Site(tmp_path / "site", LocalInputs(data=str(table(tmp_path / "t.csv", 1))), Policy(), ask)
    found = read(table(tmp_path / "server.csv", 9), TableSettings("outcome"))
    assert found.table is not None
    run = {
        "number": "0" * 16, "config": resolve(SETTINGS | {"clients": 1}).toml(), "client": 0, "clients": 1,
        "checkpoint": 0, "classes": ["ill", "well"], "mean": [], "std": [], "shape": [2], "tokenizer": "",
        "table": found.table.model_dump_json(), "steps": [], "frozen": [],
    }  # fmt: skip
    message = {"run": run, "request": {"kind": "Statistics"}, "down": {}}
    with pytest.raises(fedstill.SettingError, match="--allow statistics") as error:
        site.handle(message)
    assert code_of(error.value) is Code.CONSENT_PENDING
    go.set()
    for thread in threading.enumerate():
        if thread.name == "consent":
            thread.join()
    assert set(site.handle(message)) == {"message", "categories"}
    assert "of the columns age, ward" in asked[0]


def test_a_server_without_data_knows_columns_and_classes(tmp_path: Path) -> None:
    settings = {
        "data": "",
        "classes": ["ill", "well"],
        "columns": [{"name": "age"}, {"name": "ward", "categories": []}],
    }
    result = served(Hospitals(tmp_path / "sites"), tmp_path / "run", **settings)
    assert of_run(tmp_path / "run")[1]["categories"] == ["a", "b", "c", "d"]
    assert result.records[-1]["amp"] > 0
    assert result.records[-1]["accuracy"] is None
    with pytest.raises(fedstill.SettingError, match="the server has no data to take it from"):
        served(Hospitals(tmp_path / "sites"), tmp_path / "pool", **settings, pool=10)


@pytest.mark.slow
def test_a_restarted_server_asks_nobody_again(tmp_path: Path) -> None:
    server = str(table(tmp_path / "server.csv", 9))
    served(Hospitals(tmp_path / "whole"), tmp_path / "run1", data=server)
    served(Hospitals(tmp_path / "parts"), tmp_path / "run2", data=server, rounds=1)
    again = Hospitals(tmp_path / "parts")
    served(again, tmp_path / "run2", data=server, rounds=2)
    assert {"kind": "Statistics"} not in [request for _, request, _ in again.answers]
    assert weights(tmp_path / "run1") == weights(tmp_path / "run2")


@pytest.mark.slow
def test_a_site_may_call_its_label_otherwise_and_have_more_columns_in_another_order(tmp_path: Path) -> None:
    plain = table(tmp_path / "plain.csv", 1)
    rows = [line.split(",") for line in plain.read_text().splitlines()]
    other = tmp_path / "other.csv"
    other.write_text("\n".join(f"{i or 'id'},{o},{w},{a}" for i, (a, w, o) in enumerate(rows)) + "\n")
    answers = []
    for number, path in enumerate((plain, other)):
        wire = Hospitals(tmp_path / f"sites{number}", south=path)
        served(wire, tmp_path / f"run{number}", data=str(table(tmp_path / "server.csv", 9)))
        answers.append(next(a for n, r, a in wire.answers if n == "south" and r == {"kind": "Statistics"}))
    assert torch.equal(answers[0]["message"]["sums"], answers[1]["message"]["sums"])
    named = table(tmp_path / "named.csv", 1, outcome="ergebnis")
    site = Site(tmp_path / "s", LocalInputs(data=str(named), target="ergebnis"), ALLOWED)
    assert site._inputs.config(resolve(SETTINGS).toml()).target == "ergebnis"


@pytest.mark.parametrize("wrong", ["column", "label", "number", "other"])
def test_a_table_that_does_not_fit_is_left_out_and_the_server_gets_a_code(tmp_path: Path, wrong: str) -> None:
    own = table(tmp_path / "own.csv", 1, ward="unit" if wrong == "column" else "ward")
    if wrong == "label":
        own.write_text(own.read_text().replace("ill", "poorly"))
    elif wrong == "number":
        own.write_text(own.read_text() + "old,a,ill\n")
    elif wrong == "other":
        own = tmp_path / "own.npz"
        np.savez(own, x=np.zeros((20, 2)), y=np.arange(20) % 2)
    wire = Hospitals(tmp_path / "sites", south=own)
    result = served(wire, tmp_path / "run", data=str(table(tmp_path / "server.csv", 9)))
    assert [r["clients"] for r in result.records] == [2, 2]
    assert "south" not in [name for name, _, _ in wire.answers]
    log = (tmp_path / "run/log.txt").read_text()
    assert "poorly" not in log
    assert "unit" not in log


@pytest.mark.slow
def test_regions_run_on_declared_tables_and_refuse_others(tmp_path: Path) -> None:
    sites = [name for names in regions.SITES.values() for name in names]
    files = {name: str(table(tmp_path / f"{name}.csv", seed, categories="ab")) for seed, name in enumerate(sites)}
    declared: list[dict[str, Any]] = [
        {"name": "age", "mean": 55.0, "std": 10.0, "missing": True},
        {"name": "ward", "categories": ["a", "b"]},
    ]
    settings: dict[str, Any] = {"data": "", "classes": ["ill", "well"], "pool": 0, "fraction": 1.0, "partition": "iid"}
    settings |= {name: SETTINGS[name] for name in ("target", "model", "model_options")}
    world = regions.World(tmp_path, **files)
    result = regions.served(world, tmp_path / "run", "fedavg", columns=declared, **settings)
    assert len(result.records) == 2, "a line an episode"
    assert result.records[-1]["amp"] > 0
    with pytest.raises(fedstill.SettingError, match="of tables in regions, all must be declared"):
        regions.served(world, tmp_path / "other", "fedavg", columns=[{"name": "age"}], **settings)
