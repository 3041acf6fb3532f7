"""The servers of a run: the global one, and one for each region."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fedstill.building.setup import Setup
from fedstill.methods.base import Server
from fedstill.running.directory import RunDirectory
from fedstill.running.machine import server_threads


def make_servers(setup: Setup, directory: RunDirectory) -> tuple[Server, dict[int, Server]]:
    """The global server, and those of the regions by number; without regions they are the same one.

    Where there is one for each group of clients with the same network, the first stands for all.
    """
    regions, threads = setup.hierarchy.regions, server_threads(setup.config)
    grouped = setup.hierarchy.grouped
    only = regions[0] if setup.hierarchy.flat and not grouped else None
    server = Server(
        setup.task,
        setup.federation.sizes,
        directory.server_store,
        setup.pool(),
        clients=len(only.clients) if only else None,
        region=only.number if only else 0,
        threads=threads,
    )
    if only:
        return server, {only.number: server}
    regional = {}
    for region in regions:
        sizes = np.zeros_like(setup.federation.sizes)  # each knows its own clients alone
        sizes[region.clients] = setup.federation.sizes[region.clients]
        regional[region.number] = Server(
            region.task,
            sizes,
            directory.regional_store(region.number),
            server.pool,
            clients=len(region.clients),
            region=region.number,
            threads=threads,
            grouped=grouped,
        )
    for each in regional.values() if grouped else ():
        each.peers = tuple(other for other in regional.values() if other is not each)
    return regional[regions[0].number] if grouped else server, regional


def read_servers(setup: Setup, directory: RunDirectory) -> tuple[Server, dict[int, Server]]:
    """The same as they were after the newest checkpoint, to look at: the directory stays as it is."""
    server, regional = make_servers(setup, directory)
    round_ = directory.checkpoint_rounds()[-1]
    state = directory.read_checkpoint(round_)
    server.model, server.state = state["model"], state["state"]
    for number, own in state.get("regions", {}).items():
        regional[int(number)].model, regional[int(number)].state = own["model"], own["state"]
    for each in (server, *regional.values()):
        each.round = round_
    return server, regional


def global_model(setup: Setup, server: Server) -> Tensor:
    """The model that a run is for, as it is on its server."""
    own = setup.hierarchy.flat and not setup.method.has_final_exchange
    return next(iter(setup.method.models(server).values())) if own else server.model
