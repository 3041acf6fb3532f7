"""Tables: what is read from files and frames, what is refused, and how columns are standardised."""

from __future__ import annotations

import gzip
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.core.errors import DataError, SettingError
from fedstill.data import statistics
from fedstill.data.federation import federate
from fedstill.data.formats.table import TableSettings, from_frame, read
from fedstill.data.preprocessing import Column, TablePreprocessing
from support.commandline import fedstill as command_line

QUICK: dict[str, Any] = {"rounds": 2, "epochs": 1, "participation": 1.0, "engine": "inline"}
ROWS = 40


def frame(**columns: Any) -> dict[str, Any]:
    """A small table: a number, a category, a label."""
    rng = np.random.default_rng(0)
    return {
        "age": rng.normal(50, 10, ROWS).round(2),
        "sex": list("fm" * (ROWS // 2)),
        "outcome": ["ill", "well", "well", "ill"] * (ROWS // 4),
        **columns,
    }


def written(path: Path, table: dict[str, Any], separator: str = ",") -> Path:
    lines = [separator.join(table), *(separator.join(map(str, row)) for row in zip(*table.values(), strict=True))]
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def rows(data: fedstill.Dataset) -> set[tuple[Any, ...]]:
    """All rows with their labels, in the names of categories."""
    assert data.table is not None
    found = set()
    for split in (data.train, data.test):
        for x, y in zip(split.x.tolist(), split.y.tolist(), strict=True):
            cells = [
                value if column.categories is None else column.categories[int(value)]
                for value, column in zip(x, data.table.columns, strict=True)
            ]
            found.add((*cells, data.classes[y]))
    return found


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "separator"),
    [("t.csv", ","), ("t.csv.gz", ","), ("t.tsv", "\t"), ("t.csv", ";"), ("t.csv", "|"), ("t.TSV.gz", "\t")],
)
def test_a_file_has_the_rows_of_the_frame_it_was_written_from(tmp_path: Path, name: str, separator: str) -> None:
    table = frame()
    path = written(tmp_path / name.replace("TSV.gz", "tsv.gz"), table, separator)
    from_file, from_memory = read(path, TableSettings("outcome")), from_frame(table, "outcome")
    assert rows(from_file) == rows(from_memory) == set(zip(*table.values(), strict=True))
    assert torch.equal(from_file.train.x, from_memory.train.x)
    assert from_file.classes == ("ill", "well")


def test_parquet_and_pandas_give_the_same_dataset(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    table = frame(code=[None, 3] * (ROWS // 2), smokes=[True, False] * (ROWS // 2))
    data = pandas.DataFrame(table).astype({"sex": "category", "code": "Int64"})
    data.to_parquet(tmp_path / "t.parquet")
    found = [
        fedstill.load_dataset(str(tmp_path / "t.parquet"), table=TableSettings("outcome")),
        from_frame(data, "outcome"),
    ]
    for each in (*found, from_frame(table, "outcome")):
        assert torch.equal(each.train.x.nan_to_num(-1), found[0].train.x.nan_to_num(-1))
        assert each.table == found[0].table
    assert [column.categories for column in found[0].table.columns if column.name == "smokes"] == [("False", "True")]  # type: ignore[union-attr]


def test_a_decimal_comma_is_read_where_semicolons_separate(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x;y\n" + "1,5;a\n2;b\n" * 10)
    assert set(read(tmp_path / "t.csv", TableSettings("y")).train.x.flatten().tolist()) == {1.5, 2.0}


@pytest.mark.parametrize("missing", ["", "NA", "n/a", "NaN", "?", " null "])
def test_what_stands_for_missing_is_missing(tmp_path: Path, missing: str) -> None:
    table = frame(age=[missing, 5.0] * (ROWS // 2), sex=["f", "f", missing, "m"] * (ROWS // 4))
    data = read(written(tmp_path / "t.csv", table), TableSettings("outcome"))
    assert data.table is not None
    assert data.table.columns[0].missing
    assert data.table.columns[1].categories == ("f", "m")
    assert data.input_shape == (4,), "age, whether it is missing, f, m"
    assert bool(data.normalise(data.train.x).isfinite().all())


def test_a_column_that_turns_out_to_be_text_late_in_the_file_is_read_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstill.data.formats.columns._ROWS", 7)
    path = written(tmp_path / "t.csv", frame(sex=["1"] * 30 + ["2", "x"] * 5))
    assert read(path, TableSettings("outcome")).table.columns[1].categories == ("1", "2", "x")  # type: ignore[union-attr]


def test_whole_numbers_are_numbers_unless_they_are_named_categories(tmp_path: Path) -> None:
    path = str(written(tmp_path / "t.csv", frame(stage=[1, 2, 3, 10] * (ROWS // 4))))
    plain = fedstill.load_dataset(path, table=TableSettings("outcome"))
    named = fedstill.load_dataset(path, table=TableSettings("outcome", categorical=("stage",), drop=("age",)))
    assert (plain.input_shape, named.input_shape) == ((4,), (6,))
    assert named.table.columns[1].categories == ("1", "2", "3", "10")  # type: ignore[union-attr]


@pytest.mark.parametrize("labels", [[1, 2, 3, 7], ["b", "a", "c", "d"], [-1, 1, 0, 5], [True, False, True, False]])
def test_labels_are_what_they_are_called(labels: list[Any]) -> None:
    data = from_frame(frame(outcome=labels * (ROWS // 4)), "outcome")
    assert set(data.classes) == {str(label) for label in labels}
    assert {row[-1] for row in rows(data)} == {str(label) for label in labels}


def test_a_column_says_which_rows_test() -> None:
    split = ["train"] * 30 + ["Test"] * 10
    data = from_frame(frame(part=split, age=np.arange(ROWS) / 2), "outcome", split="part")
    assert (len(data.train), len(data.test)) == (30, 10)
    assert data.test.x[:, 0].min() == 15.0


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"classes": ("ILL", "WELL")}, "is none of the classes ILL, WELL; write it as one of them in column 'outcome'"),
    ({}, {"target": "result"}, r"target = 'result' is no column; the columns are age, sex, outcome"),
    ({}, {"target": ""}, r"target is needed, the column with the label \(--target\); the columns are age, sex"),
    ({}, {"drop": ("id",)}, "drop_columns = 'id' is no column"),
    ({}, {"client": "outcome"}, "must be different columns"),
    ({}, {"drop": ("age", "sex")}, "no column is left to learn from"),
    ({"age": [float("inf"), 1.0] * 20}, {}, "column 'age' has a number that is not finite"),
    ({"name": [f"p{i}" for i in range(ROWS)]}, {}, r"another word in every row, .* drop_columns=name"),
    ({"outcome": ["", "a", "b", "a"] * 10}, {}, "10 rows have no label in column 'outcome'"),
    ({"outcome": np.linspace(0, 1, ROWS)}, {}, "40 different numbers: that is regression, .* classification only"),
    ({"outcome": ["a"] * ROWS}, {}, "all labels are 'a'; two classes are the fewest"),
    ({"site": ["x", ""] * 20}, {"client": "site"}, "20 rows have no client in column 'site'"),
    ({"part": ["train", "dev"] * 20}, {"split": "part"}, "has 'dev'; train and test are what it may have"),
    ({"part": ["train"] * ROWS}, {"split": "part"}, "needs rows of both train and test"),
    ({"age": [1e200, -1e200] * 20}, {}, "column 'age' has numbers that are too large"),
]


@pytest.mark.parametrize(("columns", "settings", "reason"), BAD)
def test_what_cannot_be_learnt_from_is_refused_in_one_line(
    tmp_path: Path, columns: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    path = written(tmp_path / "t.csv", frame(**columns))
    with pytest.raises((DataError, SettingError), match=reason) as error:
        read(path, TableSettings(**{"target": "outcome"} | settings))
    assert "\n" not in str(error.value)


def test_files_that_are_damaged_are_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("age,outcome\n1,a\n2,b,c\n")
    with pytest.raises(DataError, match="line 3: 3 fields, not 2"):
        read(path, TableSettings("outcome"))
    path.write_text("age,age,outcome\n")
    with pytest.raises(DataError, match="two columns are called 'age'"):
        read(path, TableSettings("outcome"))
    path.write_text("age,outcome\n")
    with pytest.raises(DataError, match="no rows"):
        read(path, TableSettings("outcome"))
    (tmp_path / "t.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match="not a parquet file"):
        read(tmp_path / "t.parquet", TableSettings("outcome"))
    path.write_text("word,outcome\n" + "".join(f"w{i},a\nw{i},b\n" for i in range(101)))
    with pytest.raises(DataError, match="more than 100 different words"):
        read(path, TableSettings("outcome"))


def test_an_index_that_pandas_wrote_has_a_name_to_drop_it_by(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", {"": range(ROWS)} | frame())
    found = read(path, TableSettings("outcome"))
    assert found.input_shape == (4,)
    assert found.notes == (
        "column 'column 1' is another whole number in every row; if it is an id, leave it out: --set "
        "drop_columns=column 1",
    )
    assert read(path, TableSettings("outcome", drop=("column 1",))).input_shape == (3,)


def test_what_is_no_frame_is_refused() -> None:
    with pytest.raises(DataError, match="a DataFrame or a mapping of columns is needed, not list"):
        from_frame([[1, 2]], "outcome")
    with pytest.raises(DataError, match="columns differ in length"):
        from_frame(frame(age=[1, 2]), "outcome")
    with pytest.raises(DataError, match="no rows"):
        from_frame({"age": [], "outcome": []}, "outcome")
    with pytest.raises(DataError, match="'age' is dates or times"):
        from_frame(frame(age=np.arange(ROWS).astype("datetime64[D]")), "outcome")


def test_an_id_of_numbers_is_warned_about() -> None:
    (note,) = from_frame(frame(patient=range(ROWS)), "outcome").notes
    assert note.startswith("column 'patient' is another whole number in every row")


def test_all_columns_that_nothing_is_learnt_from_are_named_at_once() -> None:
    words, dates = [f"P{i}" for i in range(ROWS)], [f"{i % 9 + 1:02}.03.2021" for i in range(ROWS)]
    with pytest.raises(DataError, match=r"'id' \(another word.*'day' \(dates.*--set drop_columns=id,day$"):
        from_frame(frame(id=words, day=dates), "outcome")
    assert from_frame(frame(day=dates), "outcome", categorical=["day"]).input_shape == (12,)  # who asks for it gets it


def test_a_table_may_be_json_lines_and_its_columns_numbers(tmp_path: Path) -> None:
    rows = [dict(zip(frame(), row, strict=True)) for row in zip(*frame().values(), strict=True)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row, default=float) + "\n" for row in rows))
    written(tmp_path / "t.csv", frame())
    one, other = (read(tmp_path / name, TableSettings("outcome")) for name in ("t.jsonl", "t.csv"))
    torch.testing.assert_close(one.train.x, other.train.x, equal_nan=True)
    assert (one.classes, one.table) == (other.classes, other.table)
    pandas = pytest.importorskip("pandas")
    numbered = pandas.DataFrame([[1.0, "a"], [2.0, "b"]] * 5)
    assert from_frame(numbered, target=1).classes == ("a", "b")


# --- standardising ----------------------------------------------------------------------------------------------------


def test_the_clients_sums_give_what_scikit_learn_finds_in_all_their_training_rows() -> None:
    wine = load_wine()
    columns = {f"c{i}": values for i, values in enumerate((1e6 + wine.data).T)}  # far from 0: squares would lose digits
    data = from_frame({**columns, "kind": wine.target}, "kind")
    federation = federate(data, clients=5, alpha=0.3)
    assert data.table is not None
    table = statistics.merged(data.table, statistics.client_sums(federation))
    mine = data.train.x[torch.from_numpy(federation.train_index)].numpy()
    scaler = StandardScaler().fit(mine)
    assert np.allclose([c.mean for c in table.columns], scaler.mean_, rtol=1e-12)
    assert np.allclose([c.std for c in table.columns], scaler.scale_, rtol=1e-6)
    seen = statistics.with_table(data, table).normalise(torch.from_numpy(mine))
    assert np.allclose(seen.numpy(), scaler.transform(mine), atol=1e-4)


def test_a_run_standardises_by_training_rows_of_clients_alone() -> None:
    table = frame(age=np.arange(ROWS) / 2, site=["a", "b"] * (ROWS // 2))
    data = from_frame(table, "outcome", client="site")
    config = resolve({"data": "<Dataset>", "partition": "natural", "pool": 0.2, "model": "mlp"})
    setup = prepare(config, data=data)
    index = torch.from_numpy(setup.federation.train_index)
    assert len(index) < len(data.train), "tests and the pool are left out"
    assert setup.task.dataset.table is not None
    assert setup.task.dataset.table.columns[0].mean == pytest.approx(data.train.x[index, 0].mean().item(), rel=1e-12)


def test_a_category_that_no_client_trains_on_is_zero_everywhere() -> None:
    column = ["x"] * (ROWS // 2) + ["y"] * (ROWS // 2)
    data = from_frame(frame(sex=column, part=["train"] * 20 + ["test"] * 20), "outcome", split="part")
    setup = prepare(resolve({"data": "<Dataset>", "clients": 2, "partition": "iid", "model": "mlp"}), data=data)
    found = setup.task.dataset
    assert found.table is not None
    assert found.table.columns[1].categories == ("x",)
    assert found.normalise(found.test.x)[:, 1].tolist() == [0.0] * 20
    assert found.normalise(found.train.x)[:, 1].tolist() == [1.0] * 20
    assert "column 'sex' is the same in all training samples" in setup.warnings


@pytest.mark.parametrize("value", [0.0, 0.1, 1e9 + 0.1])
def test_a_constant_column_is_kept_as_zero(value: float) -> None:
    table = TablePreprocessing(columns=(Column(name="a"),))
    owners = [statistics.column_sums(table, torch.full((n, 1), value, dtype=torch.float64)) for n in (3, 7, 1000)]
    found = statistics.merged(table, owners)
    assert found.columns[0].std == 1.0
    assert statistics.constant(found, owners) == ["a"]
    assert found.normalise(torch.full((1, 1), value, dtype=torch.float64)).abs().item() < 1e-6


def test_few_values_and_rare_categories_are_not_told() -> None:
    table = TablePreprocessing(columns=(Column(name="a"), Column(name="b", categories=("x", "y")), Column(name="c")))
    x = torch.tensor([[7.0, 0.0, torch.nan]] * 5 + [[8.0, 1.0, 3.0]] * 2, dtype=torch.float64)
    told = statistics.column_sums(table, x, least=5)
    assert told.counts == ({}, {"x": 5}, {})
    assert told.present.tolist() == [7, 7, 0]
    assert told.sums.tolist() == [51.0, 0.0, 0.0]
    assert statistics.column_sums(table, x[:4], least=5).sums.tolist() == [0.0] * 3


def test_sums_come_through_a_message_and_others_are_refused() -> None:
    table = TablePreprocessing(columns=(Column(name="a"), Column(name="b", categories=("x", "y"))))
    x = torch.tensor([[1.0, 0.0], [2.0, 1.0], [torch.nan, 1.0]], dtype=torch.float64)
    sums = statistics.column_sums(table, x)
    again = statistics.from_message(sums.message(), table)
    assert statistics.merged(table, [again]) == statistics.merged(table, [sums])

    def changed(**parts: Any) -> dict[str, Any]:
        made = sums.message()
        return made | {"message": made["message"] | parts}

    lies: list[Any] = [
        None,
        {},
        changed(sums=torch.tensor([torch.inf, 0.0], dtype=torch.float64)),
        changed(sums=torch.zeros(3, dtype=torch.float64)),
        changed(sums=torch.zeros(2)),
        changed(squares=torch.tensor([-1.0, 0.0], dtype=torch.float64)),
        changed(present=torch.tensor([10**9, 0])),
        changed(counts=torch.tensor([1])),
        changed(more=torch.zeros(2)),
        sums.message() | {"categories": [["z"], ["x", "y"]]},
        sums.message() | {"categories": [[], ["x", "x"]]},
        sums.message() | {"categories": [[], ["x", "a\nb"]]},
        sums.message() | {"categories": [[], [f"c{i}" for i in range(101)]]},
    ]
    for lie in lies:
        with pytest.raises(DataError, match="no sums over the run's columns"):
            statistics.from_message(lie, table)


# --- runs -------------------------------------------------------------------------------------------------------------


def hospitals(path: Path) -> str:
    """A table of four hospitals whose raw numbers are of very different sizes."""
    rng = np.random.default_rng(1)
    ill = rng.integers(0, 2, 200)
    table = {
        "age": rng.normal(55 + 10 * ill, 8).round(1),
        "platelets": rng.normal(260_000 - 60_000 * ill, 30_000).round(),
        "sex": rng.choice(["f", "m"], 200),
        "hospital": rng.choice(["bonn", "kiel", "lyon", "oslo"], 200),
        "outcome": np.where(ill, "ill", "well"),
    }
    return str(written(path / "patients.csv", table))


def test_a_table_runs_by_naming_its_target_and_the_clients_are_those_it_names(tmp_path: Path) -> None:
    data = hospitals(tmp_path)
    found = fedstill.run(
        data=data, target="outcome", client_column="hospital", out=tmp_path / "run", **QUICK | {"rounds": 5}
    )
    config = (tmp_path / "run/config.toml").read_text()
    assert all(line in config for line in ('partition = "natural"', 'model = "mlp"', "lr = 0.1"))
    clients = (tmp_path / "run/clients.csv").read_text().splitlines()[1:]
    assert [line.split(",")[0] for line in clients] == ["bonn", "kiel", "lyon", "oslo"]
    assert found.summary["best_accuracy"] > 0.8, "raw platelets would drown everything else"


@pytest.mark.slow
def test_a_run_goes_on_in_the_same_bits_and_not_with_other_rows(tmp_path: Path) -> None:
    data = hospitals(tmp_path)
    settings = {"data": data, "target": "outcome", "client_column": "hospital"} | QUICK
    fedstill.run(out=tmp_path / "whole", **settings)
    fedstill.run(out=tmp_path / "parts", **settings | {"rounds": 1})
    fedstill.resume(tmp_path / "parts", rounds=2)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert models[0] == models[1]
    text = Path(data).read_text().splitlines()
    Path(data).write_text("\n".join([text[0], *("99" + line[line.index(",") :] for line in text[1:])]) + "\n")
    with pytest.raises(SettingError, match=r"another preprocessing than .*preprocessing.json"):
        fedstill.resume(tmp_path / "parts", rounds=3)


def test_declared_columns_are_used_as_they_are(tmp_path: Path) -> None:
    data = hospitals(tmp_path)
    columns = [{"name": "platelets", "mean": 1.0, "std": 2.0, "missing": False}, {"name": "sex", "categories": ["f"]}]
    config = resolve({"data": data, "target": "outcome", "columns": columns, "client_column": "hospital"})
    table = prepare(config).task.dataset.table
    assert table is not None
    assert [(c.name, c.mean, c.std, c.categories) for c in table.columns] == [
        ("platelets", 1.0, 2.0, None),
        ("sex", 0.0, 1.0, ("f",)),
    ]
    partly = config.model_copy(update={"columns": resolve({"columns": [{"name": "age"}, columns[0]]}).columns})
    table = prepare(partly).task.dataset.table
    assert table is not None
    assert 50 < table.columns[0].mean < 70
    assert table.columns[1].mean == 1.0


def test_clients_alone_is_refused_where_the_data_name_theirs(tmp_path: Path) -> None:
    settings = {"data": hospitals(tmp_path), "target": "outcome", "client_column": "hospital"}
    with pytest.raises(SettingError, match="leave clients out to use them as they are"):
        resolve(settings | {"clients": 3})
    assert resolve(settings | {"clients": 3, "partition": "dirichlet"}).clients == 3
    assert resolve(settings | {"clients": 3, "partition": "natural"}).clients == 3


@pytest.mark.parametrize("kind", ["npz", "text", "folder", "object"])
def test_owners_are_the_clients_of_every_format_that_names_them(tmp_path: Path, kind: str) -> None:
    x, y, client = np.zeros((20, 4), np.float32), np.arange(20) % 2, np.arange(20) % 4
    if kind == "npz":
        np.savez(tmp_path / "d.npz", x=x, y=y, client=client)
        config = resolve({"data": str(tmp_path / "d.npz")})
    elif kind == "text":
        (tmp_path / "d.csv").write_text("text,label,Client\na b,x,1\n")
        config = resolve({"data": str(tmp_path / "d.csv")})
    elif kind == "folder":
        (tmp_path / "clients").mkdir()
        config = resolve({"data": str(tmp_path)})
    else:
        from fedstill.data.sources import Glance

        config = resolve({"data": "<Dataset>"}, data=Glance.of(fedstill.from_arrays(x, y, client=client)))
    assert (config.partition, config.clients) == ("natural", 0)


@pytest.mark.slow
def test_a_proxy_table_needs_no_label(tmp_path: Path) -> None:
    data = hospitals(tmp_path)
    lines = [",".join(np.array(line.split(","))[[2, 1, 0]]) for line in Path(data).read_text().splitlines()]
    (tmp_path / "public.csv").write_text("\n".join(lines) + "\n")
    settings: dict[str, Any] = {"data": data, "proxy": str(tmp_path / "public.csv")}
    settings |= {"target": "outcome", "client_column": "hospital"}
    assert fedstill.run("feddf", **settings, **QUICK).summary["rounds"] == 2


def test_an_accuracy_to_reach_has_another_name_now_and_old_settings_still_mean_it() -> None:
    assert resolve({"target": 0.7}).target_accuracy == 0.7
    config = resolve({"target": "outcome"})
    with pytest.raises(SettingError, match=r"is for tables .* for an accuracy to reach, set target_accuracy"):
        prepare(config)


@pytest.mark.slow
def test_tables_from_the_command_line_have_the_same_bits_on_both_engines(tmp_path: Path) -> None:
    data = hospitals(tmp_path)
    common = ["--rounds", 2, "--epochs", 1, "--participation", 1, "--client-column", "hospital", "--target", "outcome"]
    models = []
    for engine, workers in (("inline", 0), ("process", 1), ("process", 2)):
        out = tmp_path / f"{engine}{workers}"
        ended = command_line(
            "run", "fedavg", "--data", data, *common, "--engine", engine, "--workers", workers, "--out", out
        )
        assert ended.code == 0, ended.err
        models.append((out / "model.safetensors").read_bytes())
    assert models[0] == models[1] == models[2]


@pytest.mark.slow
@pytest.mark.parametrize("names_only", [False, True])
def test_the_command_columns_writes_settings_that_run(tmp_path: Path, names_only: bool) -> None:
    data = hospitals(tmp_path)
    flags = ["--names-only"] if names_only else []
    found = command_line("columns", data, "--target", "outcome", "--client-column", "hospital", *flags)
    (tmp_path / "columns.toml").write_text(found.out)
    settings = tomllib.loads(found.out)
    assert [column["name"] for column in settings["columns"]] == ["age", "platelets", "sex"]
    assert ("mean" in found.out, "['f', 'm']" in str(settings)) == (not names_only, not names_only)
    assert settings["classes"] == ["ill", "well"]
    words = ["--data", data, "--client-column", "hospital", "--rounds", 1, "--epochs", 1, "--engine", "inline"]
    ended = command_line("run", tmp_path / "columns.toml", *words, "--out", tmp_path / "run")
    assert ended.code == 0, ended.err
    without = command_line("run", tmp_path / "columns.toml", "--out", tmp_path / "other")
    assert (without.code, without.err) == (2, "error: data is empty: name a dataset or a file (--data)\n")
