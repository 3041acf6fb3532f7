"""Going back: a run forgets its last rounds, as if they had never been."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedstill.building.config import read_toml
from fedstill.core.errors import DataError, FedstillError, SettingError
from fedstill.core.files import read_sealed_json, write_sealed_json
from fedstill.running import files
from fedstill.running.directory import RunDirectory
from fedstill.running.privacy import SPENT, ledgers

ROLLBACKS = "rollbacks"  # the rounds to which a run went back, one after the other


def rollback(path: Path, to: int) -> int:
    """Go back to the end of round `to`, 0 for the start; how many rounds are forgotten.

    What goes on from there comes to the same bits as if the run had never gone further. Back at the start, its
    settings may be changed as well.
    """
    directory = RunDirectory.open(path)
    try:
        rounds = directory.checkpoint_rounds()
        if to not in (0, *rounds):
            there = ", ".join(map(str, (0, *rounds)))
            raise SettingError(
                f"--to {to}: {path} can go back to {there}, where 0 is the start; "
                "keep_checkpoints says how many are kept"
            )
        try:
            if to:
                directory.read_checkpoint(to)
        except DataError as error:
            raise FedstillError(f"the checkpoint of round {to} is damaged ({error}); nothing was changed") from error
        done = max((record["round"] for record in directory.records()), default=0)
        if directory.served:
            _note(directory, to, _spent(directory, rounds))
            if to == 0:
                (directory.path / files.COUNTS).unlink(missing_ok=True)
        directory.forget_results(to, read_toml(path / files.CONFIG).get("rounds_per_episode", 1))
        directory.go_back(to)
        return max(0, int(done) - to)
    finally:
        directory.release()


def _spent(directory: RunDirectory, rounds: Sequence[int]) -> dict[str, dict[str, Any]]:
    """What the ledgers count at the end: sites have answered these rounds, and nothing takes that back."""
    for round_ in reversed(rounds):
        try:
            return {k: own for k, own in ledgers(directory.read_checkpoint(round_)).items() if own}
        except DataError:  # the one before it is the best that is known
            continue
    return {}


def _note(directory: RunDirectory, to: int, spent: dict[str, dict[str, Any]]) -> None:
    """Sites must not repeat an answer to a round that is forgotten, nor go on from it; what it spent stays counted."""
    path = directory.path / files.SERVED
    try:
        run_info = directory.served_run()
    except DataError:
        if to:
            raise
        path.unlink()  # whoever begins again has another one
        return
    if not isinstance(done := run_info.get(ROLLBACKS, []), list) or not run_info:  # it is a region's: see `seen`
        note_spent(directory, spent)
        return
    before = [*run_info.get(SPENT, []), *([spent] if spent else [])]
    if to == 0:
        run_info = {"number": secrets.token_hex(8), "sites": []}  # what else there was is settled anew
    write_sealed_json(path, run_info | {ROLLBACKS: [*done, to] if to else [to]} | ({SPENT: before} if before else {}))


def note_spent(directory: RunDirectory, spent: dict[str, dict[str, Any]]) -> None:
    """Have a region that is about to go back count what it spent, also if it is stopped before its next checkpoint."""
    known, spent = directory.served_run(), {number: own for number, own in spent.items() if own}
    if known and spent:
        write_sealed_json(directory.path / files.SERVED, known | {SPENT: [*known.get(SPENT, []), spent]})


def unseen(rollbacks: Sequence[int], path: Path) -> int | None:
    """The round to go back to with a server that went back to these, unless `path` says that it was done."""
    done = read_sealed_json(path)[ROLLBACKS] if path.exists() else 0
    return min(rollbacks[done:], default=None)


def seen(rollbacks: Sequence[int], path: Path) -> None:
    """Note that it was done."""
    known = read_sealed_json(path) if path.exists() else {}
    write_sealed_json(path, known | {ROLLBACKS: len(rollbacks)})
