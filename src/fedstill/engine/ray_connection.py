"""Ray, by its public interface: a cluster that is there, or one on this machine for as long as it is needed."""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError, SettingError, in_one_line
from fedstill.data.dataset import Split
from fedstill.train.task import Samples

# It reports nothing to anyone, prints nothing of what its nodes say (we say who died), does not warn of its next
# version, and under `uv run` does not copy the working folder.
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


_INLINE = 100_000  # bytes up to which Ray sends an object along with a call or an answer, without its store
_INLINE_HERE = 1_000_000  # the same where we start Ray: its store costs milliseconds for each object
_SECONDS = 5  # in which a cluster takes a connection


def address_of(setting: str) -> str:
    """Where the cluster is: as the settings say, or RAY_ADDRESS; empty: there is none but this machine."""
    found = setting or os.environ.get("RAY_ADDRESS", "")
    if found.startswith("ray://"):
        raise SettingError(
            f"ray_address = {found!r}: this is Ray's address for clients outside a cluster; start fedstill on a node, "
            "with ray_address = 'auto', or give it to 'ray job submit'"
        )
    return "" if found == "local" else found


def check(setting: str) -> None:
    """Refuse a cluster that is not there, and a library that is not, before anything is begun."""
    address = address_of(setting)
    load(address)
    host, _, port = address.rpartition(":")
    if address in ("", "auto"):  # which Ray looks for by itself
        return
    if not host or not port.isdecimal():
        raise SettingError(f"ray_address = {address!r}: should be host:port as 'ray start --head' prints it, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS).close()  # Ray would try for minutes
    except (OSError, OverflowError) as error:
        raise SettingError(
            f"ray_address = {address!r}: no Ray cluster answers there ({in_one_line(error)}); 'ray start --head' "
            "prints the address of one"
        ) from error


def load(address: str) -> ModuleType:
    """The library, imported now."""
    if "ray" not in sys.modules:
        # Ray reads these when it is imported. As it listens on all interfaces, one of our own serves only processes
        # that have its token.
        os.environ.update({name: value for name, value in _VARIABLES.items() if name not in os.environ})
        if not address and "RAY_AUTH_MODE" not in os.environ:
            os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise SettingError("engine = 'ray' needs: pip install 'fedstill[ray]'") from error


@contextmanager
def connected(setting: str, cores: int) -> Iterator[int]:
    """Inside, this process is connected to the cluster, or to one of its own with so many cores.

    Gives the size in bytes up to which an object goes along with a call. A connection that the caller has made is used,
    and left as it is.
    """
    address = address_of(setting)
    ray = load(address)
    if ray.is_initialized():
        yield _INLINE
        return
    quiet: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
    local: dict[str, Any] = {"num_cpus": cores, "include_dashboard": False}
    with _silent(), tempfile.TemporaryDirectory(prefix="fedstill-", ignore_cleanup_errors=True) as folder:
        try:
            small = {} if address else {"RAY_max_direct_call_object_size": str(_INLINE_HERE)}
            with _environment({"RAY_TMPDIR": folder} | small):
                ray.init(address or "local", **quiet, **({} if address else local))
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            ray.shutdown()
            place = f"there is no Ray cluster at {address}" if address else "Ray does not start"
            raise FedstillError(f"{place}: {in_one_line(error)}") from error
        try:
            yield _INLINE if address else _INLINE_HERE
        finally:
            ray.shutdown()


@contextmanager
def _silent() -> Iterator[None]:
    """Ray says nothing on the terminal."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """What Ray starts finds these variables. Its files are open to everybody, but the folder around them is not."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def put(value: object, what: str) -> Any:
    """A reference to a copy of the value in Ray's store, from which each node fetches it once.

    Classes and functions of the user's own files go along; samples are read where they lie, by all processes of a node.
    """
    import ray
    from ray import cloudpickle
    from ray.util import deregister_serializer, register_serializer

    modules, views = _users_modules(), _Views()
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    for kind in (Split, Samples):
        register_serializer(kind, serializer=views.of, deserializer=_from_views)
    try:
        return ray.put(value)
    except Exception as error:
        reason = in_one_line(error.__cause__ or error)
        raise FedstillError(f"engine = 'ray' cannot give {what} to its workers: {reason}") from error
    finally:
        for kind in (Split, Samples):
            deregister_serializer(kind)
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _users_modules() -> list[ModuleType]:
    """The files of the user's own that are loaded, and the modules beside them, which no node need have."""
    loaded = {name: module for name, module in list(sys.modules.items()) if getattr(module, "__file__", None)}
    own = [module for name, module in loaded.items() if name.startswith("fedstill_user_")]
    folders = {Path(str(module.__file__)).parent for module in own}
    beside = [m for name, m in loaded.items() if name != "__main__" and Path(str(m.__file__)).parent in folders]
    return list({id(module): module for module in [*own, *beside]}.values())


class _Views:
    """The memory of tensors as arrays, which Ray puts into its store without a copy for each reader.

    What several objects share is one array.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, _View]] = {}  # with the tensors, so that no number comes again

    def of(self, holder: object) -> tuple[type, dict[str, Any]]:
        return type(holder), {
            name: self._view(value) if isinstance(value, Tensor) else value for name, value in vars(holder).items()
        }

    def _view(self, tensor: Tensor) -> _View:
        if id(tensor) not in self._known:
            held = tensor.detach().cpu()
            length = 1 + sum((n - 1) * step for n, step in zip(held.shape, held.stride(), strict=True))
            span = torch.as_strided(held, (length if held.numel() else 0,), (1,))
            view = _View(span.view(torch.uint8).numpy(), held.dtype, tuple(held.shape), held.stride())
            self._known[id(tensor)] = tensor, view
        return self._known[id(tensor)][1]


class _View(NamedTuple):
    """What a tensor is made of."""

    memory: npt.NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def tensor(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is not writable, and nobody writes to samples
            return torch.from_numpy(self.memory).view(self.dtype).as_strided(self.shape, self.strides)


def _from_views(parts: tuple[type, dict[str, Any]]) -> object:
    kind, values = parts
    holder: object = object.__new__(kind)
    vars(holder).update({name: value.tensor() if isinstance(value, _View) else value for name, value in values.items()})
    return holder
