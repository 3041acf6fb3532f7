"""What users give as Python objects: data and networks of many types, or one line that says which are taken."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstill.core import custom
from fedstill.core.errors import DataError, SettingError
from fedstill.data import Dataset, from_arrays, from_frame, from_huggingface, from_torch, huggingface
from fedstill.data.federation import Federation

_TAKEN = (
    "a name or path, a fedstill.Dataset or Federation, (x, y) or (x, y, x_test, y_test) of arrays, (DataFrame, "
    "labels), a map-style torch.utils.data.Dataset, or a datasets.Dataset"
)


def as_data(given: object, what: str = "data") -> str | Dataset | Federation:
    """Data as a run takes them: a name, or a dataset or federation made of what was given."""
    if isinstance(given, str | Dataset | Federation):
        return given
    if isinstance(given, Path):
        return str(given)
    if huggingface.is_object(given):
        return from_huggingface(given)
    if isinstance(given, tuple) and (found := _from_tuple(given)):
        return found
    if isinstance(given, torch.utils.data.Dataset):
        return from_torch(given)
    raise DataError(f"{what} is {_kind(given)}; {_hint(given)}")


def _from_tuple(given: tuple[Any, ...]) -> Dataset | None:
    if len(given) == 2 and all(isinstance(part, torch.utils.data.Dataset) for part in given):
        return from_torch(given[0], given[1])
    if len(given) == 2 and _is_frame(given[0]):
        return _labelled_frame(*given)
    return from_arrays(*given) if len(given) in (2, 4) and all(map(_is_array, given)) else None


def as_dataset(given: object, what: str) -> str | Dataset:
    """The same of data that nobody divides."""
    found = as_data(given, what)
    if isinstance(found, Federation):
        raise DataError(f"{what} is a Federation; give a fedstill.Dataset, such as its .dataset")
    return found


def as_model(given: object) -> str | nn.Module | Callable[[], nn.Module]:
    """A network as a run takes it: a name, a module, or a function that makes one."""
    if isinstance(given, str | nn.Module):
        return given
    if isinstance(given, torch.optim.Optimizer) or (
        inspect.isclass(given) and issubclass(given, torch.optim.Optimizer)
    ):
        raise SettingError(
            f"model is {_kind(given)}, an optimiser; model takes a network, and the settings optimizer and lr say how "
            "clients train"
        )
    if not callable(given):
        raise SettingError(
            f"model is {_kind(given)}; give a name, a torch.nn.Module, a function that returns one, or file.py:function"
        )
    _check_callable(given)
    return lambda: _made(given)


def _check_callable(given: Callable[..., Any]) -> None:
    """Refuse what cannot be called without arguments, before anything is loaded."""
    try:
        parameters = inspect.signature(given).parameters.values()
    except (TypeError, ValueError):
        return
    plain = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in plain]
    name = getattr(given, "__name__", type(given).__name__)
    if needed:
        kind = "class that is not instantiated" if inspect.isclass(given) else "function"
        raise SettingError(
            f"model is {name}, a {kind}, and needs {', '.join(needed)}; give {name}(…) itself, or lambda: {name}(…)"
        )


def _made(make: Callable[[], Any]) -> nn.Module:
    name = getattr(make, "__name__", type(make).__name__)
    try:
        found = make()
    except Exception as error:
        raise SettingError(f"model: {name}() failed: {custom.summary(error)}") from error
    if not isinstance(found, nn.Module):
        raise SettingError(f"model: {name}() returns {_kind(found)}; it must return a torch.nn.Module")
    return found


def _is_frame(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in ("pandas", "polars") and hasattr(value, "columns")


def _labelled_frame(frame: Any, labels: Any) -> Dataset:
    """A table of features and its labels apart, as scikit-learn takes them."""
    columns = {str(column): frame[column] for column in frame.columns}
    target = str(getattr(labels, "name", None) or "label")
    if target in columns:
        raise DataError(f"column {target!r} is both a feature and the label; leave it out of the features")
    return from_frame(columns | {target: labels}, target)


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray | Tensor) or (isinstance(value, list) and bool(value))


def _kind(value: object) -> str:
    """What something is, in words."""
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', '')}".rstrip()
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, np.ndarray | Tensor) else ""
    length = f" of {len(value)}" if isinstance(value, list | tuple | dict) else ""
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}{shape}{length}"


def _hint(given: object) -> str:
    """What to give instead."""
    parts = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    hints = {
        "make a dataset of it with fedstill.from_frame(df, target=…), where target is the column of the labels": (
            _is_frame(given)
        ),
        "give its dataset, data=loader.dataset: batches are made by clients (batch_size)": (
            isinstance(given, torch.utils.data.DataLoader)
        ),
        "labels are needed too: give data=(x, y)": isinstance(given, np.ndarray | Tensor),
        "for one (samples, labels) pair a client, give fedstill.from_clients(…)": (
            bool(parts) and all(isinstance(part, tuple) and len(part) == 2 for part in parts)
        ),
        "for one dataset a client, put their arrays into fedstill.from_clients([(x, y), …])": (
            bool(parts) and all(isinstance(part, torch.utils.data.Dataset) for part in parts)
        ),
        f"call it, or give {_TAKEN}": callable(given),
    }
    return next((hint for hint, fits in hints.items() if fits), f"give {_TAKEN}")
