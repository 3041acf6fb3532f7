"""Disks that lie: whatever happens to a file of a run, it is noticed, and named, or it does not matter."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.building.config import resolve
from fedstill.core import tree
from fedstill.core.errors import DataError, FedstillError
from fedstill.core.store import Store
from fedstill.running import directory as rundir
from fedstill.running import files
from fedstill.running.api import resume
from fedstill.running.api import run as fedstill_run
from fedstill.running.directory import RunDirectory
from fedstill.running.verify import verify
from support.commandline import fedstill, interrupted_after, model, run, short
from support.runs import SMALL

METHOD = "scaffold+t1"  # clients keep a state, and the server one of each client
ROUNDS = 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(METHOD, tmp_path_factory.mktemp("whole") / "run", rounds=ROUNDS, save_models=1)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which three of four rounds are done."""
    path = tmp_path_factory.mktemp("broken") / "run"
    with interrupted_after(3):
        fedstill("run", METHOD, *short(out=path, rounds=ROUNDS))
    return path


def files_of(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def flip(path: Path, at: float) -> None:
    """Another bit at this share of the file's length."""
    if data := bytearray(path.read_bytes()):
        data[int(at * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


def cut(path: Path, at: float) -> None:
    path.write_bytes(path.read_bytes()[: int(at * path.stat().st_size)])


def named(text: str, name: str, path: Path) -> bool:
    """Whether an error names a file, or the checkpoint that stands on it."""
    return Path(name).name in text or str(path / "checkpoints") in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm",
    [
        *(pytest.param(lambda p, at=at: flip(p, at), id=f"flipped at {at}") for at in (0.3, 1.0)),
        pytest.param(lambda p: cut(p, 0.6), id="cut off"),
        pytest.param(lambda p: p.unlink(), id="deleted"),
    ],
)
def test_a_damaged_file_changes_no_result(
    interrupted: Path, undisturbed: Path, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    expected, refused = model(undisturbed), 0
    for number, name in enumerate(files_of(interrupted)):
        path = tmp_path / str(number)
        shutil.copytree(interrupted, path)
        harm(path / name)
        answer = fedstill("resume", path)
        if answer.code:
            assert named(answer.err, name, path), (name, answer.err)
            refused += 1
        else:
            found = model(path)
            assert all(torch.equal(found[part], expected[part]) for part in expected), name
        shutil.rmtree(path)
    assert refused, "something of this must have been noticed"


def copy_of(path: Path, to: Path) -> Path:
    return Path(shutil.copytree(path, to))


def states(path: Path) -> list[Path]:
    """Client states of the last round that is done."""
    return sorted((path / "checkpoints" / "clients").glob("*/*.3.safetensors"))


def test_states_of_two_clients_that_are_swapped_are_noticed(interrupted: Path, tmp_path: Path) -> None:
    path = copy_of(interrupted, tmp_path / "run")
    one, two = states(path)[:2]
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert not all(check.sound for check in verify(path))
    with pytest.raises(DataError, match="digest does not fit"):
        RunDirectory.open(path, lock=False).read_checkpoint(3)


def test_an_older_copy_of_a_state_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path, run="a")
    store.write(5, 1, {"written": 1})
    store.write(5, 2, {"written": 2})
    shutil.copy(store.path(5, 1), store.path(5, 2))
    with pytest.raises(DataError, match=r"5\.2\.safetensors: its digest does not fit"):
        store.read(5, before=3)


def test_the_state_of_another_run_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path, run="a")
    Store(tmp_path, run="b").write(5, 1, {"written": 1})
    with pytest.raises(DataError, match="digest does not fit"):
        store.read(5, before=2)


def few_rounds(path: Path, rounds: int = 3) -> RunDirectory:
    made = RunDirectory.create(path, resolve({"method": "fedprox", "rounds": 9}))
    for round_ in range(1, rounds + 1):
        for client in (5, 6):
            made.client_store.write(client, round_, {"written": round_})
        made.server_store.write(7, round_, {"written": round_})
        made.append({"round": round_, "accuracy": round_ / 10})
        made.checkpoint(round_, {"model": torch.full((4,), float(round_)), "state": {}}, active=[5, 6, 7])
    made.settle()
    return made


def test_damage_of_the_newest_checkpoints_states_falls_back_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = few_rounds(tmp_path / "run")
    flip(made.client_store.path(6, 3), 0.9)
    restored = made.restore()
    assert restored is not None
    assert restored[0] == 2
    assert made.client_store.read(6, before=9) == {"written": 2}
    assert "6.3.safetensors" in caplog.text
    assert "goes on from round 2, the checkpoint before" in caplog.text


@pytest.mark.parametrize("checked", [0, 1000])
def test_a_state_that_is_missing_is_named_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: int
) -> None:
    monkeypatch.setattr(rundir, "_CHECKED_AT_ONCE", checked)
    made = few_rounds(tmp_path / "run")
    for round_ in (2, 3):
        made.server_store.path(7, round_).unlink()
    with pytest.raises(FedstillError, match=r"7\.3\.safetensors is missing; put back"):
        made.restore()


def test_where_clients_are_many_a_damaged_state_is_named_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "_CHECKED_AT_ONCE", 1)
    made = few_rounds(tmp_path / "run")
    flip(made.client_store.path(6, 3), 0.9)
    restored = made.restore()
    assert restored is not None
    assert restored[0] == 3
    with pytest.raises(DataError, match=r"6\.3\.safetensors: .*(digest|damaged)"):  # the byte may be of its header
        made.client_store.read(6, before=4)


@pytest.mark.parametrize("change", ["delete", "edit", "append to a line", "shorten"])
def test_metrics_that_were_changed_are_named(tmp_path: Path, change: str) -> None:
    made = few_rounds(tmp_path / "run")
    path = made.path / "metrics.jsonl"
    text = path.read_text()
    path.unlink()
    if change != "delete":
        path.write_text(
            {
                "edit": text.replace("0.1", "0.9"),
                "append to a line": text.replace("}\n", ' , "x": 1}\n', 1),
                "shorten": "",
            }[change]
        )
    with pytest.raises(FedstillError, match=r"metrics\.jsonl is"):
        made.restore()


def test_an_older_checkpoint_under_the_name_of_a_newer_one_is_noticed(tmp_path: Path) -> None:
    made = few_rounds(tmp_path / "run")
    shutil.copy(made.checkpoints / "round-000002.safetensors", made.checkpoints / "round-000003.safetensors")
    restored = made.restore()
    assert restored is not None
    assert restored[0] == 2


def test_a_run_without_a_sound_checkpoint_begins_again(interrupted: Path, undisturbed: Path, tmp_path: Path) -> None:
    path = copy_of(interrupted, tmp_path / "run")
    for checkpoint in (path / "checkpoints").glob("round-*"):
        flip(checkpoint, 0.5)
    answer = fedstill("resume", path)
    assert answer.code
    assert f"'fedstill rollback {path} --to 0'" in " ".join(answer.err.split())
    assert fedstill("rollback", path, "--to", 0).code == 0
    assert fedstill("resume", path).code == 0
    expected, found = model(undisturbed), model(path)
    assert all(torch.equal(found[part], expected[part]) for part in expected)


def test_a_run_killed_between_the_index_and_its_checkpoint_goes_on(tmp_path: Path) -> None:
    made = few_rounds(tmp_path / "run")
    made.client_store.write(5, 4, {"written": 4})
    made.index.append([(4, rundir._CLIENTS, 5, "ab" * 32)])
    with made.index.path.open("ab") as file:
        file.write(b"cut off")
    restored = made.restore()
    assert restored is not None
    assert restored[0] == 3
    assert made.client_store.read(5, before=9) == {"written": 3}
    made.checkpoint(4, {"model": torch.ones(4), "state": {}}, active=[])
    again = made.restore()
    assert again is not None
    assert again[0] == 4


def test_a_run_killed_before_its_index_was_written_begins_with_one(tmp_path: Path) -> None:
    made = RunDirectory.create(tmp_path / "run", resolve({"method": "fedprox", "rounds": 9}))
    made.index.path.unlink()
    made.release()
    again = RunDirectory.open(made.path)
    store = again.regional_store(0)  # as servers of regions have it before the run is restored
    assert again.restore() is None
    store.write(5, 1, {"written": 1})
    again.append({"round": 1})
    again.checkpoint(1, {"model": torch.ones(4), "state": {}}, active=[5])
    restored = again.restore()
    assert restored is not None
    assert restored[0] == 1


def test_changed_settings_are_named_and_may_be_meant(interrupted: Path, tmp_path: Path) -> None:
    path = copy_of(interrupted, tmp_path / "run")
    config = path / "config.toml"
    config.write_text(config.read_text().replace("rounds = 4", "rounds = 5"))
    answer = fedstill("resume", path)
    assert answer.code == 2
    assert "config.toml is not what was written" in answer.err
    assert "# sha256 of the lines above: unchecked" in answer.err
    *lines, _ = config.read_text().splitlines(keepends=True)
    config.write_text("".join(lines))
    assert fedstill("resume", path).code == 2, "it may have been cut off"
    config.write_text("".join(lines) + "# sha256 of the lines above: unchecked\n")
    assert fedstill("resume", path).code == 0
    assert RunDirectory.open(path, lock=False).records()[-1]["round"] == 5


@pytest.mark.parametrize("at", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_a_damaged_answer_is_not_repeated_but_made_again(tmp_path: Path, at: float) -> None:
    pytest.importorskip("flwr")
    from fedstill.flower import node
    from fedstill.flower.records import from_records, to_records

    calls: list[int] = []

    def handle(body: Any) -> Any:
        calls.append(1)
        return {"model": body["model"] + 1}

    request = to_records({"id": "round 1", "seconds": 60.0, "keep": True, "body": {"model": torch.zeros(50)}})
    for started, expected in enumerate((1, 1, 2, 2)):  # anew, the same again, damaged, the same again
        if started == 2:
            flip(tmp_path / "answer.safetensors", at)
        answer = from_records(node._Site(handle, tmp_path, None).answer(request))
        assert torch.equal(answer["body"]["model"], torch.ones(50))
        assert len(calls) == expected
    site = node._Site(handle, tmp_path, None)
    flip(tmp_path / "answer.safetensors", at)  # while it runs
    assert torch.equal(from_records(site.answer(request))["body"]["model"], torch.ones(50))


# --- runs of earlier versions ---


def without_digests(path: Path) -> None:
    """The run as an earlier version would have left it."""
    (path / "checkpoints" / "index").unlink()
    (path / files.DIGESTS).unlink(missing_ok=True)
    for file in (path / "checkpoints").rglob("*.safetensors"):
        state = tree.decode(file.read_bytes())
        state.pop(rundir._STANDS_ON, None)
        file.write_bytes(tree.encode(state))
    config = path / "config.toml"
    config.write_text("".join(line for line in config.read_text().splitlines(keepends=True) if "sha256" not in line))


def test_a_run_of_an_earlier_version_goes_on_to_the_same_bits(
    interrupted: Path, undisturbed: Path, tmp_path: Path
) -> None:
    path = copy_of(interrupted, tmp_path / "run")
    without_digests(path)
    shown = fedstill("verify", path)
    assert shown.code == 0
    assert "no digests: made by an earlier version" in shown.out
    assert fedstill("resume", path).code == 0
    assert (path / "log.txt").read_text().count("no digests: made by an earlier version") == 1
    expected, found = model(undisturbed), model(path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert fedstill("verify", path).code == 0


# --- fedstill verify ---


def test_a_sound_run_is_called_sound(undisturbed: Path, interrupted: Path) -> None:
    for path in (undisturbed, interrupted):
        answer = fedstill("verify", path)
        assert (answer.code, answer.err) == (0, ""), answer.out
        assert "1 of 1 runs are sound" in answer.out


def halve(path: Path) -> None:
    cut(path, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("harm", [halve, Path.unlink], ids=["cut off", "deleted"])
def test_every_file_that_counts_is_verified(undisturbed: Path, tmp_path: Path, harm: Callable[[Path], None]) -> None:
    unchecked = []
    for number, name in enumerate(files_of(undisturbed)):
        path = copy_of(undisturbed, tmp_path / str(number))
        harm(path / name)
        if fedstill("verify", path).code == 0:
            unchecked.append(name)
        shutil.rmtree(path)
    needless = {name for name in unchecked if name.endswith(".2.safetensors")}  # the checkpoints are of rounds 3 and 4
    if harm is Path.unlink:
        needless.add("checkpoints/round-000003.safetensors")  # a spare, which a run may also lack after a rollback
    assert set(unchecked) <= {"checkpoints/lock", "curves.png", "log.txt", *needless}


def test_a_checkpoint_without_a_name_that_it_should_have_is_named(undisturbed: Path, tmp_path: Path) -> None:
    path = copy_of(undisturbed, tmp_path / "run")
    newest = RunDirectory.open(path, lock=False).checkpoint_rounds()[-1]
    for file in [f for f in (path / "checkpoints").iterdir() if f.is_file()]:
        file.write_bytes(file.read_bytes().replace(b'"stands on', b'"Xtands on'))
    assert any(f"round {newest}" in check.what and not check.sound for check in verify(path))


def test_every_run_below_a_folder_is_verified(undisturbed: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        copy_of(undisturbed, tmp_path / "runs" / name)
    flip(tmp_path / "runs" / "b" / "model.safetensors", 0.9)
    answer = fedstill("verify", tmp_path / "runs")
    assert answer.code == 1
    assert "1 of 2 runs are sound" in answer.out
    assert "model.safetensors is not what was written" in " ".join(answer.out.split())


def test_a_folder_without_runs_is_not_verified(tmp_path: Path) -> None:
    answer = fedstill("verify", tmp_path)
    assert answer.code == 2
    assert "holds none" in answer.err


def test_a_damaged_model_is_not_drawn(undisturbed: Path, tmp_path: Path) -> None:
    path = copy_of(undisturbed, tmp_path / "run")
    flip(path / "model.safetensors", 0.9)
    for words in (("confusion", path), ("distance", path)):
        answer = fedstill("figure", *words, "--out", tmp_path / "a.png")
        assert answer.code == 2
        assert "model.safetensors is not what was written" in answer.err


def test_a_run_from_python_carries_digests_too(tmp_path: Path) -> None:
    import fedstill as library

    settings: dict[str, Any] = SMALL | {"rounds": 1}
    library.run("fedavg", out=tmp_path / "run", **settings)
    assert all(check.sound for check in verify(tmp_path / "run"))
    resume(tmp_path / "run", rounds=2)
    assert all(check.sound for check in verify(tmp_path / "run"))


def test_the_best_rounds_models_of_all_groups_are_verified(tmp_path: Path) -> None:
    settings = SMALL | {"model_options": {}, "models": ["mlp", "cnn"], "validation": 0.2, "select": "val_amp"}
    fedstill_run("fedavg", **settings | {"rounds": 1}, out=tmp_path / "run")
    assert all(check.sound for check in verify(tmp_path / "run"))
    flip(tmp_path / "run" / "best-cnn.safetensors", 0.9)
    assert [check.what for check in verify(tmp_path / "run") if not check.sound] == [
        "best-cnn.safetensors, as the run wrote it"
    ]
