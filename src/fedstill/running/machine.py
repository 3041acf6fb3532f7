"""What a run uses of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import torch

from fedstill.building.config import Config
from fedstill.core import device
from fedstill.core.errors import SettingError, unknown
from fedstill.engine.base import Engine, Inline
from fedstill.engine.process import Processes
from fedstill.engine.worker import Worker


def make_engine(config: Config, worker: Worker) -> Engine:
    """The engine that the settings name; no number of workers means one a core."""
    check_engine(config)
    kind, workers = config.engine, config.workers
    if kind == "ray":
        from fedstill.engine.ray_cluster import RayCluster

        return RayCluster(
            worker, workers, cores=workers or cores(), address=config.ray_address, gpus=config.worker_gpus
        )
    if kind == "inline" or device.find(config.device) != device.CPU:  # a GPU that is in use cannot be forked
        return Inline(worker)
    return Processes(worker, workers or cores())


def check_engine(config: Config) -> None:
    """Refuse an engine that is not installed, or a device that is not there, before anything is begun."""
    found = device.find(config.device)
    if config.engine == "ray":
        from fedstill.engine import ray_connection

        if found != device.CPU and not config.worker_gpus:
            raise SettingError(
                f"device = {config.device!r}: with engine = 'ray' this is where the server computes; say what its "
                "workers have of a GPU too: worker_gpus = 1, or 0.25 if four are to share one"
            )
        ray_connection.check(config.ray_address)
    elif config.worker_gpus or config.ray_address:
        name = "worker_gpus" if config.worker_gpus else "ray_address"
        raise SettingError(f"{name} is for engine = 'ray', and engine is {config.engine!r}; leave one of them out")


def on_engine(config: Config, engine: str) -> Config:
    """The same settings for another engine."""
    if engine not in (known := get_args(Config.model_fields["engine"].annotation)):
        raise unknown("engine", engine, known)
    only_ray = {} if engine == "ray" else {"ray_address": "", "worker_gpus": 0.0}
    return config.model_copy(update={"engine": engine, **only_ray})


def server_threads(config: Config) -> int:
    """On how many cores the server may work, once its clients have answered."""
    return 1 if config.engine == "inline" else config.workers or cores()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Kernels on one thread: results do not depend on the machine's cores, and workers have a core each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
