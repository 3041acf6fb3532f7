"""State that belongs to single clients, one small file each, safe against a kill at any moment.

A file carries the round that wrote it. The state of round t replaces nothing: it stands beside the older one
until a checkpoint of round t (and the one before it) no longer needs that. So after a crash, the newest file not
younger than the checkpoint is the right one, and rounds that were interrupted leave no trace. For the same reason
nobody has to wait for the disk before a checkpoint does. A client that was never active has no file.

Each file carries a digest of its content, of whose it is and of which round, and of the run it belongs to. What is
read is what was written there, or an error that names the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedstill.core import tree
from fedstill.core.errors import DataError
from fedstill.core.files import sync, write_atomic
from fedstill.core.tree import Tree

_PER_FOLDER = 100
_NAME = re.compile(r"(\d{1,18})\.(\d{1,18})\.safetensors", re.ASCII)  # client, round


class Store:
    """Versions of each client's state under one folder. Without `durable`, they are on disk after `sync`.

    `run` tells this run from others; without it, as in runs of earlier versions, files carry no digests. `earlier`: an
    earlier version may have written some of the files.
    """

    def __init__(self, root: Path, *, durable: bool = True, run: str = "", earlier: bool = False) -> None:
        self.root, self._durable, self.run, self._earlier = root, durable, run, earlier

    def read(self, client: int, before: int) -> Tree | None:
        """The newest state that a round earlier than `before` wrote, or None."""
        newest = self.newest(client, before)
        return self.check(client, newest)[0] if newest else None

    def newest(self, client: int, before: int) -> int:
        """The last round earlier than `before` that wrote a state; 0: none did."""
        return max((r for r in self._rounds(client) if r < before), default=0)

    def check(self, client: int, round_: int) -> tuple[Tree, str]:
        """The state that a round wrote, and its digest; DataError if it is not what was written, or is not there."""
        path = self.path(client, round_)
        try:
            data = path.read_bytes()
            if not self.run:
                return tree.decode(data), ""
            state, digest = tree.unseal(data, self._label(client, round_))
            if not digest and not self._earlier:
                raise DataError("it has lost its digest, and may be damaged")
            return state, digest
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing") from error
        except DataError as error:
            raise DataError(f"{path}: {error}") from error

    def latest(self, client: int) -> Tree | None:
        """The newest state there is, or None."""
        return self.read(client, before=max(self._rounds(client), default=0) + 1)

    def write(self, client: int, round_: int, state: Tree) -> None:
        """Keep the state that `round_` gives this client."""
        path = self.path(client, round_)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = tree.seal(state, self._label(client, round_)) if self.run else tree.encode(state)
        write_atomic(path, data, durable=self._durable)

    def sync(self, clients: Iterable[int], since: int, until: int) -> list[tuple[int, int, str]]:
        """Have on disk what rounds after `since` and `until` that one wrote: client, round and digest of each state."""
        folders, found = set(), []
        for client in clients:
            for round_ in self._rounds(client):
                if since < round_ <= until:
                    found.append((client, round_, self._synced(self.path(client, round_))))
                    folders.add(self._folder(client))
        for folder in folders:
            sync(folder)
        if folders:
            sync(self.root)
            sync(self.root.parent)
        return found

    def versions(self) -> set[tuple[int, int]]:
        """Client and round of every state that is there."""
        return set(self._files())

    def rollback(self, round_: int) -> None:
        """Forget whatever rounds after `round_` wrote."""
        for client, written in list(self._files()):
            if written > round_:
                self.path(client, written).unlink(missing_ok=True)

    def prune(self, clients: Iterable[int], needed: int) -> None:
        """Delete versions that no checkpoint from round `needed` on can ask for."""
        for client in clients:
            old = sorted(r for r in self._rounds(client) if r <= needed)
            for round_ in old[:-1]:
                self.path(client, round_).unlink(missing_ok=True)

    def _label(self, client: int, round_: int) -> str:
        return f"{self.run} {self.root.name} {client}.{round_}"

    def _synced(self, path: Path) -> str:
        """The digest that a file carries, which is on disk when this returns."""
        with path.open("rb") as file:
            length = file.read(8)
            digest = tree.carried_digest(file.read(tree.header_size(length) - 8))
            os.fsync(file.fileno())
        if self.run and not digest:
            raise DataError(f"{path} is damaged: it has lost its digest")
        return digest

    def _folder(self, client: int) -> Path:
        return self.root / str(client // _PER_FOLDER)

    def path(self, client: int, round_: int) -> Path:
        """The file with the state that a round gave a client."""
        return self._folder(client) / f"{client}.{round_}.safetensors"

    def _rounds(self, client: int) -> list[int]:
        try:
            names = os.listdir(self._folder(client))
        except FileNotFoundError:
            return []
        mine = f"{client}."
        found = (_NAME.fullmatch(name) for name in names if name.startswith(mine))
        return [int(match[2]) for match in found if match]

    def _files(self) -> Iterator[tuple[int, int]]:
        for folder in os.scandir(self.root) if self.root.is_dir() else ():
            for name in os.listdir(folder) if folder.name.isdecimal() and folder.is_dir() else ():
                if found := _NAME.fullmatch(name):
                    yield int(found[1]), int(found[2])
