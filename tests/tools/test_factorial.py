"""tools/factorial.py: the runs that a file asks for, and the table of those that are finished."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedstill
from fedstill.core.files import read_json
from fedstill.studies import claims
from fedstill.studies.archive import Archive, abridged, settings_of
from fedstill.studies.reteach import SavedEpisode

TOOLS = Path(__file__).parents[2] / "tools"
SMALL: dict[str, Any] = {"fraction": 0.05, "model": "mlp", "model_options": {"hidden": [8]}, "clients": 4}
SMALL |= {"data": f"{TOOLS}/held_out.py:fashion_mini", "participation": 1.0, "rounds": 1, "epochs": 1}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("factorial", TOOLS / "factorial.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["factorial"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted((TOOLS / "factorials").glob("*.toml")), ids=lambda path: path.stem)
def test_every_factorial_keeps_the_seeds_that_confirm_and_says_what_it_expects(tool: ModuleType, path: Path) -> None:
    found = tool.Factorial.model_validate(tomllib.loads(path.read_text()))
    assert min(found.seeds) >= 100
    assert found.hypothesis
    runs = tool.Runs(found, Path("nowhere"), "")
    assert all(cell.config.data.startswith("tools/held_out.py:") for cell in runs.cells.values())
    assert runs.markdown().count("0 of") == 1


def test_claims_name_factorials_that_there_are() -> None:
    named = {name for claim in claims.claims() for name in claim.factorials}
    assert named == {path.stem for path in (TOOLS / "factorials").glob("*.toml")}


@pytest.mark.slow
def test_a_factors_effect_is_the_mean_paired_difference_of_its_runs(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f.toml").write_text(
        'title = "t"\nhypothesis = "h"\nseeds = [100, 101]\n[settings]\n'
        + "".join(
            f"{key} = {str(value).lower() if value is True else repr(value)}\n"
            for key, value in SMALL.items()
            if key != "model_options"
        )
        + 'model_options = { hidden = [8] }\n[factors]\nlr = [0.1, 0.01]\n[variants]\nFedAvg = { method = "fedavg" }\n'
    )
    results, words = (
        tmp_path / "results.json",
        ["factorial.py", str(tmp_path / "f.toml"), "--out", str(tmp_path / "out")],
    )
    results.write_text('{"claims": []}')
    monkeypatch.setattr(sys, "argv", [*words, "--results", str(results)])
    tool.main()
    printed = capsys.readouterr().out
    assert (tmp_path / "out" / "table.md").read_text() == printed[:-1]
    runs = {
        (lr, seed): fedstill.run("fedavg", **SMALL, lr=lr, seed=seed, engine="inline").summary["final_accuracy"]
        for lr in (0.1, 0.01)
        for seed in (100, 101)
    }
    effect = sum(runs[0.01, seed] - runs[0.1, seed] for seed in (100, 101)) / 2
    assert f"| lr | 0.01 | {100 * effect:+.2f} [" in printed
    assert "4 of 4 runs" in printed
    saved = read_json(results)
    assert saved["claims"] == []
    assert saved["factorials"]["f"]["title"] == "t"
    factorial = tool.Factorial.model_validate(tomllib.loads((tmp_path / "f.toml").read_text()))
    cells = tool.Runs(factorial, tmp_path / "out", "").cells.values()
    archive = Archive(tmp_path / "archive")
    archive.add("f", [abridged(settings_of(c.config, tool.HERE), c.summary(), c.records()) for c in cells])
    words = ["factorial.py", str(tmp_path / "f.toml"), "--out", str(tmp_path / "empty"), "--table"]
    monkeypatch.setattr(sys, "argv", [*words, "--archive", str(tmp_path / "archive")])
    tool.main()
    assert capsys.readouterr().out == printed, "the same table without the run directories"
    assert printed.endswith(saved["factorials"]["f"]["tables"] + "\n")


def test_images_are_held_out_of_the_training_images_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("held_out", TOOLS / "held_out.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before, after = fedstill.load_dataset("fashion-mini"), module.fashion_mini()
    assert (len(after.train), len(after.test)) == (5000, 1000)

    def pictures(*splits: Any) -> list[bytes]:
        return sorted(image.numpy().tobytes() for split in splits for image in split.x)

    assert pictures(after.train, after.test) == pictures(before.train)


def test_a_fraction_of_the_combinations_has_each_pair_of_levels_as_often(tool: ModuleType) -> None:
    settings: dict[str, Any] = {"title": "t", "hypothesis": "h", "seeds": [100, 101], "settings": SMALL}
    settings |= {"variants": {"FedAvg": {"method": "fedavg"}}}
    factors = {name: [0, 1] for name in "abcdefg"}
    confounded = {"d": ["a", "b"], "e": ["a", "c"], "f": ["b", "c"], "g": ["a", "b", "c"]}
    found = tool.Factorial.model_validate(settings | {"factors": factors, "confounded": confounded}).combinations
    assert len(found) == 8
    assert (0,) * 7 in found
    for one, other in itertools.combinations(range(7), 2):
        pairs = Counter((levels[one], levels[other]) for levels in found)
        assert pairs == dict.fromkeys(itertools.product((0, 1), repeat=2), 2)


@pytest.mark.parametrize(
    ("factors", "confounded", "message"),
    [
        ({"a": [0, 1], "b": [0, 1], "c": [0, 1, 2]}, {"a": ["b", "c"]}, "two levels each"),
        (
            {"a": [0, 1], "b": [0, 1], "c": [0, 1]},
            {"d": ["b", "c"]},
            "d is to be a factor, with two or more of a, b, c",
        ),
        ({"a": [0, 1], "b": [0, 1], "c": [0, 1]}, {"a": ["b"]}, "a is to be a factor, with two or more of b, c"),
        ({"a": [0, 1], "b": [0, 1], "c": [0, 1]}, {"a": ["b", "c"], "b": ["a", "c"]}, "a is to be a factor"),
    ],
)
def test_a_fraction_that_is_none_is_refused(
    tool: ModuleType, factors: dict[str, list[int]], confounded: dict[str, list[str]], message: str
) -> None:
    settings: dict[str, Any] = {"title": "t", "hypothesis": "h", "seeds": [100, 101], "settings": SMALL}
    settings |= {"variants": {"FedAvg": {"method": "fedavg"}}}
    with pytest.raises(ValueError, match=message):
        tool.Factorial.model_validate(settings | {"factors": factors, "confounded": confounded})


@pytest.mark.slow
def test_students_of_one_run_are_compared_by_what_its_teachers_teach_them(tool: ModuleType, tmp_path: Path) -> None:
    few = {"clients": 6, "regions": 2, "rounds": 2, "rounds_per_episode": 1, "pool": 0.1, "eval_every": 2}
    factorial = tool.Factorial.model_validate(
        {
            "title": "t", "hypothesis": "h", "seeds": [100, 101], "settings": {**SMALL, **few, "fraction": 0.2},
            "teachers": {"method": "lkd", "lambda3": 0.01, "save_teachers": True}, "taught": ["server_epochs"],
            "factors": {"lr": [0.1, 0.2], "server_epochs": [1, 9]}, "variants": {"LKD": {}, "labels": {"lambda3": 1.0}},
        }
    )  # fmt: skip
    runs = tool.Runs(factorial, tmp_path, "")
    cells = {cell.path: cell for cell in runs.cells.values()}
    assert len(cells) == 4, "two rates, two seeds: not one for each student"
    assert runs.number("LKD", (0, 0), 100) is None
    tool.run_cells(list(cells.values()), jobs=1)
    path = runs.cells["labels", (1, 1), 101].path
    (expected,) = SavedEpisode(path).teach([{"lambda3": 1.0, "server_epochs": 9}])
    assert runs.number("labels", (1, 1), 101) == expected.accuracy
    (other,) = SavedEpisode(path).teach([{"server_epochs": 1}])
    assert runs.number("LKD", (1, 0), 101) == other.accuracy
    assert "16 of 16 students" in runs.markdown()


def test_what_a_variant_sets_is_not_varied(tool: ModuleType) -> None:
    factorial = tool.Factorial.model_validate(
        {
            "title": "t", "hypothesis": "h", "seeds": [100, 101], "settings": SMALL, "teachers": {"method": "lkd"},
            "taught": ["lambda3"], "factors": {"lambda3": [0.01, 0.5]},
            "variants": {"LKD": {}, "labels": {"lambda3": 1.0}},
        }
    )  # fmt: skip
    weights = {key: student["lambda3"] for key, student in factorial.students().items()}
    assert weights == {("LKD", (0,)): 0.01, ("LKD", (1,)): 0.5, ("labels", (0,)): 1.0, ("labels", (1,)): 1.0}
