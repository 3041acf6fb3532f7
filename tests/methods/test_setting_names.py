"""Settings of methods that had another name before are still understood."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import fedstill
from fedstill.building.config import parse_assignments, read_toml, resolve
from fedstill.methods import registry
from fedstill.running.directory import RunDirectory
from fedstill.studies import presets
from fedstill.studies.reproduce import directory


def test_an_old_name_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    registry._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = resolve({"method": "feddf", "steps": 7})
    assert found.hyper["server_steps"] == 7
    assert "steps" not in found.hyper
    assert "the setting steps is called server_steps now" in caplog.text


def test_a_new_name_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve({"method": "dafkd", "server_batch": 8}).hyper["server_batch"] == 8
    assert not caplog.records


def test_old_names_work_wherever_settings_are_given() -> None:
    words = resolve({"method": "dafkd"}, parse_assignments(["sample_batch=8"], "dafkd"))
    table = resolve({"method": "dafkd", "hyper": {"sample_batch": 8}})
    assert words == table == resolve({"method": "dafkd", "server_batch": 8})
    assert registry.make("dafkd", {"sample_batch": 8}) == registry.make("dafkd", {"server_batch": 8})
    region = {"method": "feddf", "steps": 3}
    assert resolve({"method": "fedavg", "region": [region, {}]}).region[0].hyper == {"server_steps": 3}


def test_a_name_that_two_parts_now_share_still_means_what_it_meant() -> None:
    found = resolve({"method": "dafkd+fedhyb", "sample_batch": 8, "server_batch": 16}).hyper
    assert (found["dafkd.server_batch"], found["fedhyb.server_batch"]) == (8, 16)


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(fedstill.SettingError, match="server_steps is given twice"):
        resolve({"method": "feddf", "steps": 1, "server_steps": 2})


def test_a_preset_with_old_names_does_not_lose_them() -> None:
    assert presets.resolved("feddf", [{"steps": 7, "mu": 1.0}]).hyper["server_steps"] == 7


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        # As version 0.1 named the directories of these runs.
        ({"method": "feddf", "proxy": "pool", "pool": 60}, "feddf-5b5443f5f727"),
        ({"method": "fedavg"}, "fedavg-44136fa355b3"),
        ({"method": "fedftg", "z_dim": 10, "generator_width": 128}, "fedftg-4a57001296ed"),
    ],
)
def test_a_run_of_before_is_found_again(
    settings: dict[str, object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    assert directory(resolve(settings)) == name


@pytest.mark.parametrize("method", ["moon", "fedkf", "fedhkd", "fedavg+ccvr"])
def test_a_run_of_before_whose_numbers_would_now_be_others_is_not(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = directory(resolve({"method": method}))
    for part in registry.find(method):
        monkeypatch.setattr(part, "revision", 0)
    assert directory(resolve({"method": method})) != now


def test_a_configuration_of_before_is_the_same_run(tmp_path: Path) -> None:
    new = resolve({"method": "feddf", "proxy": "pool", "pool": 60})
    (tmp_path / "old.toml").write_text(new.toml().replace("server_steps", "steps"))
    assert resolve(read_toml(tmp_path / "old.toml")) == new


def test_a_run_of_before_a_setting_has_what_was_then_built(tmp_path: Path) -> None:
    settings = resolve({"method": "fedftg"}).toml().splitlines()
    before = "\n".join(line for line in settings if not line.startswith("generator_width"))
    (tmp_path / "config.toml").write_text(before)
    assert RunDirectory.open(tmp_path, lock=False).config().hyper["generator_width"] == 128
    assert resolve(read_toml(tmp_path / "config.toml")).hyper["generator_width"] == 32, "a new run of the same file"
