"""Which states a run's checkpoints stand on: who wrote what in which round, and its digest.

One small record a state, appended at each checkpoint, in the order of the rounds. A checkpoint carries the digest of
what the index held when it was made, and so, through the index, those of a million states at the price of a few.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.core.files import GrowingFile, sync, write_atomic

Entry = tuple[int, int, int, str]  # round, kind, number, digest
_MAGIC = b"fedstill"
_HEADER = len(_MAGIC) + 16  # and the run's own number
_RECORD = np.dtype([("round", "<u4"), ("kind", "<i4"), ("number", "<u8"), ("sha256", "V32")])
Entries = NDArray[Any]  # of _RECORD


class Index:
    """The index of a run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GrowingFile(path)

    def create(self) -> None:
        """Begin an empty one, with a number that tells this run from any other."""
        write_atomic(self.path, _MAGIC + secrets.token_bytes(16))
        self._file.forget()

    def run(self) -> str:
        """The number of the run; empty if there is no index, as in run directories of earlier versions."""
        try:
            with self.path.open("rb") as file:
                header = file.read(_HEADER)
        except FileNotFoundError:
            return ""
        if len(header) < _HEADER or not header.startswith(_MAGIC):
            raise DataError(f"{self.path} is damaged")
        return header[len(_MAGIC) :].hex()

    def append(self, entries: Iterable[Entry]) -> None:
        """States that were written since the last checkpoint."""
        rows = [(r, kind, number, bytes.fromhex(digest)) for r, kind, number, digest in sorted(entries)]
        if rows:
            self._file.append(np.array(rows, _RECORD).tobytes())
            sync(self.path)

    def mark(self) -> dict[str, Any]:
        """What a checkpoint carries."""
        return self._file.mark()

    def check(self, mark: dict[str, Any]) -> Entries:
        """The entries that a checkpoint stands on."""
        data = self._file.check(mark)
        if (len(data) - _HEADER) % _RECORD.itemsize or len(data) < _HEADER:
            raise DataError(f"{self.path} is damaged")
        return np.frombuffer(data, _RECORD, offset=_HEADER)

    def cut(self, round_: int) -> None:
        """Forget whatever later rounds wrote."""
        data = self.path.read_bytes()
        whole = (len(data) - _HEADER) // _RECORD.itemsize
        entries = np.frombuffer(data, _RECORD, whole, _HEADER)
        later = np.flatnonzero(entries["round"] > round_)
        count = int(later[0]) if len(later) else whole
        self._file.replace(data[: _HEADER + count * _RECORD.itemsize])


def newest(entries: Entries, kinds: Iterable[int]) -> Entries:
    """The last entry of each kind and number."""
    chosen = entries[np.isin(entries["kind"], list(kinds))][::-1]
    keys = np.empty(len(chosen), [("kind", "<i4"), ("number", "<u8")])
    keys["kind"], keys["number"] = chosen["kind"], chosen["number"]
    _, first = np.unique(keys, return_index=True)
    found: Entries = chosen[first]
    return found
