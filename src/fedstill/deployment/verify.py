"""Whether what a server and its sites wrote about each other still is what was written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from fedstill.core.errors import DataError
from fedstill.core.files import read_sealed_json
from fedstill.core.store import Store
from fedstill.deployment import audit
from fedstill.running import files
from fedstill.running.directory import RunDirectory
from fedstill.running.verify import Check, checked


def sites_in(path: Path) -> list[Path]:
    """The folder of a site or regional server, or those below a folder: each has an audit log."""
    return sorted(file.parent for file in path.rglob(audit.SENT))


def verify_served(path: Path) -> Iterator[Check]:
    """What a run directory has beside the run itself if its clients are elsewhere."""
    try:
        directory = RunDirectory.open(path, lock=False)
    except DataError:
        return  # named by the run's own checks
    # Directories of earlier versions, which have no index, had neither file.
    if not directory.served or not directory.client_store.run:
        return
    rounds = [record["round"] for record in directory.records()]
    if rounds or (path / files.COUNTS).exists():
        yield checked(files.COUNTS, lambda: _check_counts(path / files.COUNTS))
    if rounds or (path / files.RECEIVED).exists():
        yield checked(files.RECEIVED, lambda: _check_received(path / files.RECEIVED, max(rounds, default=0)))


def _check_counts(path: Path) -> str:
    _check_there(path)
    return f"of {len(read_sealed_json(path))} sites"


def _check_received(path: Path, last: int) -> str:
    _check_there(path)
    lines = audit.verify(path)
    if last > max(_rounds(path), default=0):
        raise DataError(f"{path} is cut off: nothing is there of round {last}, which is done")
    return f"{lines} lines, each follows from the one before"


def _rounds(path: Path) -> Iterator[int]:
    """The rounds that an audit log has answers of."""
    for line in path.read_bytes().splitlines():
        try:
            number = json.loads(line).get("round", 0)
        except (ValueError, AttributeError, RecursionError):
            continue  # cut by a kill
        if isinstance(number, int):
            yield number


def _check_there(path: Path) -> None:
    if not path.exists():
        raise DataError(f"{path} is missing")


def verify_site(path: Path) -> list[Check]:
    """Look at what a site, or a regional server, has about what it sent, and at the states it keeps."""

    def sent() -> str:
        return f"{audit.verify(path / audit.SENT)} lines, each follows from the one before"

    checks = [checked(audit.SENT, sent)]
    for folder in sorted(p for p in (path / audit.STATE).glob("*") if p.is_dir()):

        def states(folder: Path = folder) -> str:
            store = Store(folder, run=folder.name, earlier=True)
            for client, round_ in sorted(versions := store.versions()):
                store.check(client, round_)
            return f"{len(versions)} states, sound"

        checks.append(checked(f"{audit.STATE}/{folder.name}", states))
    return checks
