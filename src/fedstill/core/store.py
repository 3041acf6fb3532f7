"""State that belongs to single clients, one small file each, safe against a kill at any moment.

A file carries the round that wrote it. The state of round t replaces nothing: it stands beside the older one
until a checkpoint of round t (and the one before it) no longer needs that. So after a crash, the newest file not
younger than the checkpoint is the right one, and rounds that were interrupted leave no trace. For the same reason
nobody has to wait for the disk before a checkpoint does. A client that was never active has no file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedstill.core import tree
from fedstill.core.errors import DataError
from fedstill.core.files import sync, write_atomic
from fedstill.core.tree import Tree

_PER_FOLDER = 100


class Store:
    """Versions of each client's state under one folder. Without `durable`, they are on disk after `sync`."""

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self.root, self._durable = root, durable

    def read(self, client: int, before: int) -> Tree | None:
        """The newest state that a round earlier than `before` wrote, or None."""
        rounds = [r for r in self._rounds(client) if r < before]
        if not rounds:
            return None
        path = self._path(client, max(rounds))
        try:
            return tree.decode(path.read_bytes())
        except DataError as error:
            raise DataError(f"{path}: {error}") from error

    def latest(self, client: int) -> Tree | None:
        """The newest state there is, or None."""
        return self.read(client, before=max(self._rounds(client), default=0) + 1)

    def write(self, client: int, round_: int, state: Tree) -> None:
        """Keep the state that `round_` gives this client."""
        path = self._path(client, round_)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, tree.encode(state), durable=self._durable)

    def sync(self, clients: Iterable[int], since: int) -> None:
        """Have on disk what rounds after `since` wrote for these clients."""
        folders = set()
        for client in clients:
            for round_ in self._rounds(client):
                if round_ > since:
                    sync(self._path(client, round_))
                    folders.add(self._folder(client))
        for folder in folders:
            sync(folder)
        if folders:
            sync(self.root)
            sync(self.root.parent)

    def rollback(self, round_: int) -> None:
        """Forget whatever rounds after `round_` wrote."""
        for path, _, written in self._files():
            if written > round_:
                path.unlink(missing_ok=True)

    def prune(self, clients: Iterable[int], needed: int) -> None:
        """Delete versions that no checkpoint from round `needed` on can ask for."""
        for client in clients:
            old = sorted(r for r in self._rounds(client) if r <= needed)
            for round_ in old[:-1]:
                self._path(client, round_).unlink(missing_ok=True)

    def _folder(self, client: int) -> Path:
        return self.root / str(client // _PER_FOLDER)

    def _path(self, client: int, round_: int) -> Path:
        return self._folder(client) / f"{client}.{round_}.safetensors"

    def _rounds(self, client: int) -> list[int]:
        try:
            names = os.listdir(self._folder(client))
        except FileNotFoundError:
            return []
        mine = f"{client}."
        return [int(name.split(".")[1]) for name in names if name.startswith(mine)]

    def _files(self) -> Iterator[tuple[Path, int, int]]:
        for path in self.root.glob("*/*.safetensors"):
            client, round_, _ = path.name.split(".")
            yield path, int(client), int(round_)
