"""FedAvg in Flower's simulation engine, on two Ray actors with one CPU each.

An actor is one process for the whole run: it keeps the network and the data, and weights alone travel. Two ways
through the same engine are given, since they differ in speed:
- message: a ServerApp and a ClientApp that exchange messages, as Flower's documentation advises;
- start: `start_simulation`, which the documentation no longer advises, and which goes to the actors without a queue.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import NDArrays, Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerConfig
from flwr.server.strategy import FedAvg as OlderFedAvg
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation, start_simulation
from torch import Tensor, nn

from benchmarks.peers.job import Job

JOB = "FEDSTILL_BENCH_JOB"  # the environment is what actors inherit
ACTOR = {"num_cpus": 1, "num_gpus": 0.0}
RAY = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}


@lru_cache(maxsize=1)
def job() -> Job:
    return Job.from_json(os.environ[JOB])


@lru_cache(maxsize=1)
def network_and_data() -> tuple[nn.Module, Tensor, Tensor]:
    """What an actor has from its first client on."""
    torch.set_num_threads(1)
    return job().work.network(), *job().work.stored()


def trained(weights: dict[str, Tensor], context: Context) -> dict[str, Tensor]:
    work, (net, x, y) = job().work, network_and_data()
    net.load_state_dict(weights)
    part = work.samples_of(int(context.node_config["partition-id"]))
    work.train_client(net, x[part], y[part])
    return net.state_dict()


# -- message --------------------------------------------------------------------------------------------------------

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    arrays = message.content["arrays"]
    assert isinstance(arrays, ArrayRecord)
    weights = ArrayRecord(trained(arrays.to_torch_state_dict(), context))
    metrics = MetricRecord({"num-examples": job().work.samples})
    return Message(RecordDict({"arrays": weights, "metrics": metrics}), reply_to=message)


class Timed(FedAvg):
    """FedAvg that notes when each round ended."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.ends: list[float] = []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        aggregated = super().aggregate_train(server_round, replies)
        self.ends.append(time.perf_counter())
        return aggregated


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    work = job().work
    while len(list(grid.get_node_ids())) < work.clients:  # the strategy would look once a second
        time.sleep(0.01)
    strategy = Timed(
        fraction_train=work.cohort / work.clients,
        fraction_evaluate=0.0,
        min_train_nodes=work.cohort,
        min_available_nodes=work.clients,
    )
    result = strategy.start(grid, ArrayRecord(work.network().state_dict()), num_rounds=job().rounds)
    job().answer(strategy.ends, dict(result.arrays.to_torch_state_dict()))


# -- start ----------------------------------------------------------------------------------------------------------


class Trainer(NumPyClient):
    """A client, which lives for one call."""

    def __init__(self, context: Context) -> None:
        self.own = context

    def fit(self, parameters: NDArrays, config: dict[str, Any]) -> tuple[NDArrays, int, dict[str, Any]]:
        weights = {name: torch.from_numpy(a) for name, a in zip(names(), parameters, strict=True)}
        return [p.numpy() for p in trained(weights, self.own).values()], job().work.samples, {}


@lru_cache(maxsize=1)
def names() -> list[str]:
    return list(network_and_data()[0].state_dict())


def make_client(context: Context) -> Client:
    return Trainer(context).to_client()


class OlderTimed(OlderFedAvg):
    """The same as Timed, for older clients."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.ends: list[float] = []
        self.last: Parameters | None = None

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> tuple[Parameters | None, dict[str, Any]]:
        aggregated, metrics = super().aggregate_fit(server_round, results, failures)
        self.ends.append(time.perf_counter())
        self.last = aggregated
        return aggregated, metrics


def start() -> None:
    work = job().work
    first = work.network().state_dict()
    strategy = OlderTimed(
        fraction_fit=work.cohort / work.clients,
        fraction_evaluate=0.0,
        min_fit_clients=work.cohort,
        min_available_clients=work.clients,
        accept_failures=False,
        initial_parameters=ndarrays_to_parameters([p.numpy() for p in first.values()]),
    )
    start_simulation(
        client_fn=make_client,
        num_clients=work.clients,
        client_resources=ACTOR,
        config=ServerConfig(num_rounds=job().rounds),
        strategy=strategy,
        ray_init_args=RAY,
    )
    assert strategy.last is not None
    arrays = parameters_to_ndarrays(strategy.last)
    job().answer(strategy.ends, dict(zip(first, map(torch.from_numpy, arrays), strict=True)))


def main() -> None:
    way, os.environ[JOB] = sys.argv[1:]
    logging.getLogger("flwr").setLevel(logging.ERROR)
    if way == "message":
        backend: Any = {"client_resources": dict(ACTOR), "init_args": dict(RAY)}
        run_simulation(server_app, client_app, job().work.clients, backend_config=backend)
    else:
        start()


if __name__ == "__main__":
    # By its name: actors then import this file once and keep what it holds, where they are sent a copy of `__main__`.
    importlib.import_module("benchmarks.peers.flower_rounds").main()
