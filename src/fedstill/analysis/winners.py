"""The winners of a tuning, as its folder has them, and what speaks against comparing with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.analysis.comparing import slug
from fedstill.building.config import Config, read_toml, resolve
from fedstill.core.errors import SettingError
from fedstill.core.files import read_json
from fedstill.running import files
from fedstill.studies.cells import other_settings

BEST = "best.toml"  # in the folder of each method: its winner, for `fedstill run`; beside them: the best of all


def read_winners(folder: Path) -> dict[str, dict[str, Any]]:
    """The settings that won, by method, from the folder of a tuning."""
    path = folder / files.TUNING
    if not path.is_file():
        raise SettingError(f"--tuned {folder}: there is no {files.TUNING}; 'fedstill tune … --out {folder}' writes one")
    found = read_json(path)["methods"]
    return {method: each["settings"] for method, each in found.items() if each["best"] is not None}


def doubts(folder: Path, method: str, compared: Sequence[Config]) -> list[str]:
    """Why a comparison may not show what the winner's settings are worth: other settings, or seeds that chose it."""
    path, found = folder / slug(method) / BEST, []
    if not path.is_file():
        return [f"the search for {method} has not ended"]
    winner = resolve(read_toml(path))
    if difference := other_settings(winner.model_copy(update={"seed": compared[0].seed}), compared[0]):
        found.append(f"{method} was tuned with other settings ({difference})")
    fresh = winner.seed + read_json(folder / files.TUNING)["terms"]["seeds"]
    if any(winner.seed <= config.seed < fresh for config in compared):
        found.append(f"seeds {winner.seed} to {fresh - 1} chose the settings of {method}; --seed {fresh} is fresh")
    return found


def winner_of(winners: Mapping[str, dict[str, Any]], method: str, folder: Path) -> dict[str, Any]:
    """The settings with which a method won."""
    if method not in winners:
        raise SettingError(f"--tuned {folder}: {method} was not tuned there, but {', '.join(winners)}")
    return winners[method]
