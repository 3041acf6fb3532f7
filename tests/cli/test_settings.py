"""Settings: one default each, and flags of commands that come from the typed configuration."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import ClassVar, Literal, get_origin

import pytest
import typer

import fedstill
from fedstill.building.config import resolve
from fedstill.building.schema import TEXT_TRAINING, Config
from fedstill.cli.main import app
from fedstill.cli.settings import help_text
from fedstill.core.errors import SettingError
from fedstill.data import partition
from fedstill.data.sources import Glance
from fedstill.methods import registry
from fedstill.methods.lkd import F2L
from fedstill.models import names as model_names
from support.commandline import fedstill as command_line

KINDS = {bool: "boolean", int: "integer", float: "float", str: "text"}


@pytest.mark.parametrize("name", ["run", "compare", "serve"])
def test_a_flag_of_a_setting_has_its_type_and_meaning_and_no_default_of_its_own(name: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    flags = {option.name: option for option in command.params if option.name in Config.model_fields}
    assert {"data", "rounds", "lr", "seed"} <= set(flags)
    for setting, option in flags.items():
        if setting == "method":
            continue
        field = Config.model_fields[setting]
        assert option.opts == ["--" + setting.replace("_", "-")]
        assert option.help == help_text(field)
        assert option.default is None, "a file's value wins over a default"
        kind = str if get_origin(field.annotation) in (Literal, list) else field.annotation
        assert option.type.name == KINDS[kind]  # type: ignore[index]


def test_help_shows_default_and_bounds_of_a_setting() -> None:
    assert help_text(Config.model_fields["participation"]).endswith(r"\[default: 0.2; above 0, at most 1]")
    assert help_text(Config.model_fields["data_dir"]).endswith("$FEDSTILL_DATA.")


def test_a_value_out_of_bounds_is_refused_in_the_same_words_wherever_it_is_given() -> None:
    said = [command_line("run", "fedavg", *words).err for words in (("--rounds", 0), ("--set", "rounds=0"))]
    assert said[0] == said[1]
    assert "rounds = 0" in said[0]


def test_help_names_every_partition_and_every_network() -> None:
    for setting, names in (("partition", partition.names()), ("model", model_names())):
        text = Config.model_fields[setting].description or ""
        assert [name for name in names if name not in text] == []


def test_every_setting_says_what_it_means() -> None:
    assert [name for name, field in Config.model_fields.items() if not field.description] == []


def test_alpha_has_one_default() -> None:
    alpha = Config.model_fields["alpha"].default
    assert inspect.signature(fedstill.federate).parameters["alpha"].default == alpha
    found = {partition.defaults(name).get("alpha", alpha) for name in partition.names()}
    assert found == {alpha}


@dataclass(frozen=True)
class Mine(F2L):
    name: ClassVar[str] = "mine"


def test_a_method_says_how_many_regions_it_wants() -> None:
    assert resolve({"method": "fedprox+f2l"}).regions == resolve({"method": "f2l+t1"}).regions == 3
    assert resolve({"method": "f2l", "regions": 2}).regions == 2
    assert resolve({"method": "f2l", "region": [{}, {}]}).regions == 2
    assert resolve({"method": "lkd"}).regions == 1
    assert registry.default_regions(Mine().parts()) == 3, "of a class derived from it too"
    with pytest.raises(SettingError, match="method"):
        resolve({"method": "no such"})


def test_settings_of_text_hold_for_data_without_a_name_too() -> None:
    config = resolve({"data": "<Dataset>"}, data=Glance("text"))
    assert (config.model, config.optimizer, config.lr) == ("transformer", *TEXT_TRAINING.values())
    assert resolve({"data": "<Dataset>", "lr": 0.1}, data=Glance("text")).optimizer == "sgd"
