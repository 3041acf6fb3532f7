"""What a folder is, by the files in it: free for a run, a run that ended, one that a callback stopped."""

from __future__ import annotations

from pathlib import Path

from fedstill.core.errors import SettingError
from fedstill.core.files import check_file, read_json, read_sealed_json
from fedstill.running import files, lock


def check_result(path: Path, name: str) -> None:
    """Refuse a result of a finished run that is not what was written, where the run has digests; else DataError."""
    if (path / files.DIGESTS).exists():
        digests = read_sealed_json(path / files.DIGESTS).get("files")
        if isinstance(digests, dict) and name in digests:
            check_file(path / name, digests[name])


def stopped_by(path: Path) -> str:
    """The callback that ended a run before its last round; empty if none did, or if it has gone on since."""
    if not (path / files.SUMMARY).is_file() or not (path / files.DIGESTS).is_file():
        return ""
    return str(read_json(path / files.SUMMARY).get("stopped_by", ""))


def check_place(path: Path, *, force: bool) -> None:
    """Refuse a place for a run that would cost something else its own."""
    if _is_free(path):
        return
    if not force:
        raise SettingError(
            f"{path} exists; continue it with 'fedstill resume {path}', choose another --out, "
            "or replace it with --force"
        )
    if not _was_run(path):
        raise SettingError(f"{path} is not a run directory; --force will not delete it")


def _is_free(path: Path) -> bool:
    """Whether a run may begin here: there is no file yet, but perhaps the lock of one that could not."""
    if not path.is_dir():
        return not path.exists()
    return not any(p.is_file() and p != path / lock.LOCK for p in path.rglob("*"))


def _was_run(path: Path) -> bool:
    """Whether a run wrote to this folder; a config.toml alone may be the user's own."""
    return any((path / name).is_file() for name in (files.METRICS, lock.LOCK))
