"""What the settings of a run only name, and it cannot go on without: its tokenizer, the preprocessing of a table, and
weights that are frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedstill.building.config import Config
from fedstill.building.setup import Setup, prepare
from fedstill.core.errors import SettingError
from fedstill.data.preprocessing import TablePreprocessing, from_json
from fedstill.models.base import frozen_digest
from fedstill.running import files
from fedstill.running.directory import RunDirectory


def save_inputs(setup: Setup, directory: RunDirectory) -> None:
    """Write down what the settings only name, and a run cannot go on without."""
    if setup.task.dataset.tokenizer:
        directory.write(files.TOKENIZER, setup.task.dataset.tokenizer)
    if setup.task.dataset.table:
        directory.write(files.PREPROCESSING, setup.task.dataset.table.model_dump_json(indent=1))
    if digest := frozen_digest(setup.task.build().module):
        directory.write(files.FROZEN, digest + "\n")
    else:
        (directory.path / files.FROZEN).unlink(missing_ok=True)  # of a run that was replaced


def prepare_again(directory: RunDirectory, config: Config, **own: Any) -> Setup:
    """Prepare a run that has begun: with its own tokenizer, and refused if what it froze has changed since."""
    setup = prepare(config, tokenizer=saved_tokenizer(directory.path), **own)
    check_inputs(setup, directory.path)
    return setup


def saved_tokenizer(path: Path) -> str:
    """The tokenizer of a run directory, as JSON; empty if it has none."""
    file = path / files.TOKENIZER
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def saved_table(path: Path) -> TablePreprocessing | None:
    """The preprocessing of the table that a run directory is about, if it is about one."""
    kept = path / files.PREPROCESSING
    found = from_json(kept.read_bytes()) if kept.is_file() else None
    return found if isinstance(found, TablePreprocessing) else None


def check_inputs(setup: Setup, path: Path) -> None:
    """Refuse to go on in other tokens, with other columns, or upon other frozen weights, than a run began with."""
    tokenizer = saved_tokenizer(path)
    if tokenizer and setup.task.dataset.tokenizer != tokenizer:
        raise SettingError(f"the data are in other tokens than {path}/tokenizer.json makes, with which the run began")
    table = saved_table(path)
    if table and setup.task.dataset.table != table:
        raise SettingError(
            f"the data give another preprocessing than {path}/{files.PREPROCESSING}, with which the run began: rows or "
            "columns have changed since; put the data back, or begin another run"
        )
    if (path / files.FROZEN).is_file() and (path / files.FROZEN).read_text().strip() != frozen_digest(
        setup.task.build().module
    ):
        raise SettingError(
            f"the weights that {path} froze, and was trained upon, have changed; put the encoder back, or begin another"
        )
