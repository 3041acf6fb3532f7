"""What a run uses of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedstill.building.config import Config
from fedstill.core import device
from fedstill.core.errors import SettingError
from fedstill.engine.base import Engine, Inline
from fedstill.engine.process import Processes
from fedstill.engine.worker import Worker


def make_engine(config: Config, worker: Worker) -> Engine:
    """The engine that the settings name; no number of workers means one a core."""
    check_engine(config)
    kind, workers = config.engine, config.workers
    if kind == "inline" or device.find(config.device) != device.CPU:  # a GPU that is in use cannot be forked
        return Inline(worker)
    if kind == "flower":
        from fedstill.flower.simulation import Simulation

        return Simulation(worker, workers or cores())
    return Processes(worker, workers or cores())


def check_engine(config: Config) -> None:
    """Refuse an engine that is not installed, or a device that is not there, before anything is begun."""
    found = device.find(config.device)
    if config.engine == "flower":
        if config.together > 1:
            raise SettingError("together: engine = 'flower' trains one client at a time; leave one of them out")
        if found != device.CPU:
            raise SettingError(f"device = {config.device!r}: engine = 'flower' works on the CPU; leave one of them out")
        try:
            import fedstill.flower.simulation  # noqa: F401
        except ImportError as error:
            raise SettingError("engine = 'flower' needs: pip install 'fedstill[flower]'") from error


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
