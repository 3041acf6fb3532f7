"""Connections to the SuperLink, counted from the moment they are accepted."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Collection
from contextlib import suppress
from typing import Any

_MOST_CONNECTIONS = 64  # of a site; beyond, the oldest ends
_MOST_STRANGERS = 512  # connections without a key, from all addresses
_BURST = 16  # connections accepted before others are served


class _Connection(socket.socket):
    """An accepted connection, which is counted until it is closed."""

    owner: str | None = None  # the key it has shown; the server's own has ""
    network = ""
    client = ("", 0)
    connections: Connections | None = None

    def close(self) -> None:
        if self.connections is not None:
            self.connections.leave(self)
        super().close()


class Connections:
    """All connections, from the moment they are accepted: the TLS handshake comes before any HTTP server sees them.

    One that has not made a signed request after `seconds` is closed. An address has at most `most` of these: a
    further one takes the place of the oldest, so that a site gets in beside any number that are idle.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._strangers: dict[str, dict[_Connection, None]] = {}  # by address, oldest first
        self._all: dict[tuple[str, int], _Connection] = {}

    def enter(self, connection: _Connection, address: tuple[Any, ...]) -> None:
        connection.connections = self
        connection.client, connection.network = (address[0], address[1]), _network(address[0])
        while len(self._strangers.get(connection.network, ())) >= self._most:
            self._turn_out(connection.network)
        while sum(map(len, self._strangers.values())) >= _MOST_STRANGERS:
            self._turn_out(max(self._strangers, key=lambda network: len(self._strangers[network])))
        self._strangers.setdefault(connection.network, {})[connection] = None
        self._all[connection.client] = connection
        asyncio.get_running_loop().call_later(self._seconds, self._expire, connection)

    def admit(self, client: tuple[str, int], owner: str) -> None:
        """The connection has shown a key."""
        if (connection := self._all.get(client)) is not None:
            connection.owner = owner
            self._forget_stranger(connection)
            mine = [other for other in self._all.values() if owner and other.owner == owner and other is not connection]
            for other in mine[: max(0, len(mine) - _MOST_CONNECTIONS + 1)]:  # oldest first
                _shut(other)

    def owner(self, client: tuple[str, int]) -> str | None:
        return connection.owner if (connection := self._all.get(client)) is not None else None

    def close(self, client: tuple[str, int]) -> None:
        if (connection := self._all.get(client)) is not None:
            _shut(connection)

    def close_all_but(self, owners: Collection[str]) -> None:
        """End the connections of keys that are not let in any more."""
        for connection in list(self._all.values()):
            if connection.owner and connection.owner not in owners:
                _shut(connection)

    def leave(self, connection: _Connection) -> None:
        self._forget_stranger(connection)
        if self._all.get(connection.client) is connection:
            del self._all[connection.client]

    def _forget_stranger(self, connection: _Connection) -> None:
        strangers = self._strangers.get(connection.network, {})
        strangers.pop(connection, None)
        if not strangers:
            self._strangers.pop(connection.network, None)

    def _turn_out(self, network: str) -> None:
        oldest = next(iter(self._strangers[network]))
        self._forget_stranger(oldest)
        _shut(oldest)

    def _expire(self, connection: _Connection) -> None:
        if connection in self._strangers.get(connection.network, ()):
            self._forget_stranger(connection)
            _shut(connection)


def _network(address: str) -> str:
    """Whose connections are counted together: an IPv6 customer has 2^64 addresses."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    return address if ip.version == 4 else str(ipaddress.ip_network((int(ip) >> 64 << 64, 64)))


def _shut(connection: _Connection) -> None:
    """The event loop, which owns the socket, finds it at its end and closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Door(socket.socket):
    """A listening socket whose connections are counted."""

    def __init__(self, family: int, address: Any, connections: Connections) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._connections, self._burst = connections, 0
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            self.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self.bind(address)

    def accept(self) -> tuple[socket.socket, Any]:
        self._burst += 1
        if self._burst > _BURST:  # asyncio would accept thousands before it closed those that had to go
            self._burst = 0
            raise BlockingIOError
        try:
            accepted, address = super().accept()
        except OSError:
            self._burst = 0
            raise
        connection = _Connection(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self._connections.enter(connection, address)
        return connection, address
