"""Whether a run directory still is what was written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.core.errors import DataError, FedstillError
from fedstill.core.files import check_file, read_json, read_sealed_json
from fedstill.core.tree import read_tensors
from fedstill.running import files
from fedstill.running.directory import RunDirectory

NO_DIGESTS = "no digests: made by an earlier version"


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and whether it is sound."""

    what: str
    found: str
    sound: bool = True


def runs_in(path: Path) -> list[Path]:
    """The run directory, or those below a folder of many."""
    if (path / files.CONFIG).is_file():
        return [path]
    return sorted(file.parent for file in path.rglob(files.CONFIG))


def verify(path: Path) -> list[Check]:
    """Look at all that a run left behind, finished or not. Changes nothing."""
    try:
        directory = RunDirectory.open(path, lock=False)
    except DataError as error:
        return [Check("checkpoints/index", str(error), sound=False)]
    return [*_settings(directory), *_checkpoints(directory), *_results(directory)]


def _settings(directory: RunDirectory) -> Iterator[Check]:
    yield checked(files.CONFIG, directory.check_config)
    if (directory.path / files.SERVED).exists():  # else the checkpoints say that it is missing
        yield checked(files.SERVED, directory.served_run)


def _checkpoints(directory: RunDirectory) -> Iterator[Check]:
    rounds, records = directory.checkpoint_rounds(), directory.records()
    for round_ in rounds:

        def read(round_: int = round_) -> str | None:
            directory.read_checkpoint(round_, everything=True)
            return None if directory.client_store.run else NO_DIGESTS

        yield checked(f"checkpoint of round {round_} and all it stands on", read)
    if records and not rounds:
        yield Check("checkpoints", "none, though rounds are done; the run cannot go on", sound=False)
    elif records and _is_finished(directory.path) and rounds[-1] != (last := max(r["round"] for r in records)):
        yield Check("checkpoints", f"that of round {last} is missing, the last one of a finished run", sound=False)
    if rounds and directory.client_store.run:
        yield from _saved(directory, rounds[-1])


def _saved(directory: RunDirectory, round_: int) -> Iterator[Check]:
    """Models and teachers that the run was to save."""
    try:
        saved = directory.saved_digests(round_)
    except (FedstillError, OSError, LookupError, TypeError):
        return  # the checkpoint's own check names it
    for name, paths in saved.items():

        def read(paths: dict[Path, str] = paths) -> str:
            for file, digest in paths.items():
                check_file(file, digest)
            return f"{len(paths)} sound"

        if paths:
            yield checked(name, read)


def _is_finished(path: Path) -> bool:
    return any((path / name).exists() for name in (files.SUMMARY, files.DIGESTS))


def _results(directory: RunDirectory) -> Iterator[Check]:
    """What the end of a run writes."""
    path, records = directory.path, directory.records()
    if not _is_finished(path):
        yield Check("results", f"none yet: {len(records)} rounds are done; 'fedstill resume {path}' goes on")
        return
    if (path / files.MODEL).exists():
        yield checked(files.MODEL, lambda: read_tensors(path / files.MODEL))
    if (path / files.SUMMARY).exists():  # else its digest names it
        yield checked(files.SUMMARY, lambda: _check_object(read_json(path / files.SUMMARY)))
    if (path / files.DIGESTS).exists():
        yield from _digests(path)
    elif directory.client_store.run:
        yield Check("results", f"without {files.DIGESTS}; 'fedstill resume {path}' writes them again", sound=False)
    else:
        yield Check("results", NO_DIGESTS)


def _check_object(value: Any) -> None:
    if not isinstance(value, dict):
        raise DataError("it holds no JSON object")


def _digests(path: Path) -> Iterator[Check]:
    try:
        digests = read_sealed_json(path / files.DIGESTS)["files"]
        if not isinstance(digests, dict):
            raise DataError(f"{path / files.DIGESTS} is damaged: it names no files")
    except (FedstillError, KeyError) as error:
        yield Check(files.DIGESTS, str(error), sound=False)
        return
    for name, digest in digests.items():
        if Path(name).name != name:
            yield Check(files.DIGESTS, f"it names {json.dumps(name)}, which no run has", sound=False)
        else:

            def read(name: str = name, digest: Any = digest) -> None:
                check_file(path / name, digest)

            yield checked(f"{name}, as the run wrote it", read)


def checked(what: str, read: Callable[[], object]) -> Check:
    """What reading something found: its own words, if it has some, or why it is not sound."""
    try:
        found = read()
    except (FedstillError, OSError) as error:
        return Check(what, " ".join(str(error).split()), sound=False)
    return Check(what, found if isinstance(found, str) else "sound")
